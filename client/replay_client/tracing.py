"""Tracing: opens OpenTelemetry spans for the methods of a client and for groups, if the program has set up the SDK.

The W3C trace context names the span under which other processes open their spans. The context goes to the trainer in
the meta of each group, as `traceparent`, and to the server in the metadata of calls with one answer. The metadata of a
stream cannot carry the context, because a stream lasts longer than the spans in which it is used. Inserts, draws and
updates use streams, so the client has spans for them, and the server has none.

If the program has not loaded the SDK, this module does nothing. The methods of a client open spans only inside of a
span that is recorded.
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
    """The tracer of this package; None if the program has not loaded the SDK, because then nothing exports spans."""
    # Look into `sys.modules`, because an import would load the SDK for programs that do not trace.
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    return trace.get_tracer("replay_client")


def carrier() -> dict[str, str]:
    """The W3C trace context of the open span, as headers; empty if no span is open or the open span is not recorded."""
    if tracer() is None:
        return {}
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    if get_current_span().is_recording():
        TraceContextTextMapPropagator().inject(headers)
    return headers


async def in_span(name: str, work: Callable[[], Awaitable[T]], **attributes: str) -> T:
    """Calls `work` in a new span, and returns its result. Spans that `work` opens become children of the new span.

    `name` and `attributes` are those of the span. If the program has not loaded the SDK, there is no span.
    """
    current_tracer = tracer()
    if current_tracer is None:
        return await work()
    with current_tracer.start_as_current_span(name, attributes=attributes):
        return await work()


def spans(client: type[T]) -> type[T]:
    """Decorates a class of clients: each call of a public coroutine method inside of a recorded span opens a child
    span."""
    for name, method in list(vars(client).items()):
        if inspect.iscoroutinefunction(method) and not name.startswith("_"):
            setattr(client, name, _traced(f"replay.{name}", method))
    return client


def _traced(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the method: each call inside of a recorded span opens a child span with this name."""

    @wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        if not carrier():  # no recorded span is open
            return await method(*args, **kwargs)
        return await in_span(name, partial(method, *args, **kwargs))

    return call
