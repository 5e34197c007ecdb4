"""Tracing: OpenTelemetry spans for calls that carry a trace context.

The server makes spans only if the program has loaded the OpenTelemetry SDK before the server starts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from replay_protos.framing import SERVICE

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Method = Callable[[Any, Context], Awaitable[Any]]
"""A method of the gRPC service, which takes the request and gRPC's context, and returns the response."""
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
"""The names of gRPC's status codes by their numbers."""


def available() -> bool:
    """True if the program has loaded the OpenTelemetry SDK."""
    return "opentelemetry.sdk.trace" in sys.modules


def traced(name: str, method: Method) -> Method:
    """Wraps `method`, which answers one request, so that each call runs in a span. `name` is the name of the method.

    If the client sends no span, the call gets no span.
    """
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    tracer = trace.get_tracer("replay_server")
    propagator = TraceContextTextMapPropagator()

    @functools.wraps(method)
    async def call(request: Any, context: Context) -> Any:
        """Takes the place of `method`: answers the request within a span, whose parent is the client's span."""
        headers = {key: value for key, value in context.invocation_metadata() or () if key == "traceparent"}
        if not headers:  # the client has no span that this call could belong to
            return await method(request, context)
        attributes = {
            "rpc.system": "grpc",
            "rpc.service": SERVICE,
            "rpc.method": name,
            "replay.table": _tables(request),
        }
        with tracer.start_as_current_span(
            name=f"{SERVICE}/{name}",
            context=propagator.extract(headers),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
            # An exception is always the AbortError by which gRPC ends a call. The status that is set below says more.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                return await method(request, context)
            except grpc.aio.AbortError:
                span.set_status(trace.StatusCode.ERROR, code_name(context.code()))
                raise

    return call


def code_name(code: Any) -> str:
    """The name of a status code, which gRPC gives as a number or as a member of its enum."""
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _NAMES.get(code, "UNKNOWN")


def _tables(request: Any) -> str:
    """The tables that a request names, separated by commas."""
    message = getattr(request, "head", request)  # the request of an insert is a Frame, which has the message as `head`
    targets = getattr(message, "targets", ())
    if targets:
        return ", ".join(target.table for target in targets)
    return getattr(message, "table", "")
