"""Tracing: OpenTelemetry spans of calls and of generated groups, if the program has set up the SDK.

The trace context (W3C) travels to the server in the metadata of each call. It travels to the trainer in the meta of
each group, as `traceparent`. Without the SDK, and outside of a sampled span, this module does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

TRACEPARENT = "traceparent"


def tracer() -> Tracer | None:
    """The tracer; None if the program has not loaded the SDK, so that no span would be exported."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    return trace.get_tracer("replay_client")


def active() -> bool:
    """Whether a recorded span is open here."""
    return bool(carrier())


def carrier() -> dict[str, str]:
    """The open span as W3C trace context; empty without a recorded span."""
    if tracer() is None:
        return {}
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    if get_current_span().is_recording():
        TraceContextTextMapPropagator().inject(headers)
    return headers


async def in_span(name: str, work: Callable[[], Awaitable[None]], **attributes: str) -> None:
    """Runs `work` in a span. Spans that open meanwhile are its children."""
    if (found := tracer()) is None:
        await work()
        return
    with found.start_as_current_span(name, attributes=attributes):
        await work()


class TracedChannel:
    """A channel that opens a span for each call of one request, if a span is open already.

    It has only the methods that stubs and Connection use. A stream outlives the spans in which it is used, so it
    belongs to none of them.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        return self._traced(found) if name in ("unary_unary", "unary_stream") else found

    def _traced(self, make: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
        def make_traced(path: str, *serializers: Any, **options: Any) -> Callable[..., Any]:
            method, name = make(path, *serializers, **options), path.removeprefix("/")
            return method if name.endswith("/WatchPolicy") else lambda *args, **given: _call(method, name, args, given)

        return make_traced


def _call(method: Callable[..., Any], name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    found = tracer()
    if found is None or not active():
        return method(*args, **options)
    from opentelemetry.trace import SpanKind, use_span

    service, _, short = name.partition("/")
    attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": short}
    opened = found.start_span(name, kind=SpanKind.CLIENT, attributes=attributes)
    with use_span(opened):
        call = method(*args, metadata=tuple(carrier().items()), **options)
    call.add_done_callback(lambda _: opened.end())
    return call
