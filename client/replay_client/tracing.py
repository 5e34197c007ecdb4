"""Tracing: opens OpenTelemetry spans for the methods of a client and for groups, if the program has set up the SDK.

The trace context (W3C) travels to the trainer in the meta of each group, as `traceparent`, and to the server in the
metadata of calls. A stream lasts longer than the spans in which it is used, so its metadata cannot carry the context.
Inserts, draws and updates use streams. So only the client has spans for them, and the server has none. Without the SDK,
and outside of a sampled span, this module does nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

TRACEPARENT = "traceparent"
"""The name of the trace context in the meta of a group."""
T = TypeVar("T")


def tracer() -> Tracer | None:
    """The tracer; None if the program has not loaded the SDK, so that no span would be exported."""
    # Look into `sys.modules`, because an import would load the SDK for programs that do not trace.
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    return trace.get_tracer("replay_client")


def carrier() -> dict[str, str]:
    """The open span as headers of W3C trace context; empty if no span is open or the open span is not recorded."""
    if tracer() is None:
        return {}
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    if get_current_span().is_recording():
        TraceContextTextMapPropagator().inject(headers)
    return headers


async def in_span(name: str, work: Callable[[], Awaitable[T]], **attributes: str) -> T:
    """The result of `work`, which runs in a span. Spans that open meanwhile are its children."""
    current_tracer = tracer()
    if current_tracer is None:
        return await work()
    with current_tracer.start_as_current_span(name, attributes=attributes):
        return await work()


def spans(client: type[T]) -> type[T]:
    """Decorates a class of clients: each public coroutine opens a span, if a recorded span is open already."""
    for name, method in list(vars(client).items()):
        if inspect.iscoroutinefunction(method) and not name.startswith("_"):
            setattr(client, name, _traced(f"replay.{name}", method))
    return client


def _traced(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, with a span of this name around each call, if a recorded span is open already."""

    @wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        if not carrier():
            return await method(*args, **kwargs)
        return await in_span(name, partial(method, *args, **kwargs))

    return call
