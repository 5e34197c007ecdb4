"""Health: gRPC's health checking, for load balancers and orchestrators, and its reflection, for grpcurl.

A caller of health checks needs no token. Both methods therefore read their request themselves, as a stream: gRPC then
reads nothing before they begin. They read from a few callers at a time, and only for seconds.

grpc_health has a servicer for asyncio, which is not used. gRPC would read up to 16 MB for each caller before it. When a
caller of Watch leaves, it forgets all other callers of Watch. Its Watch never ends, so the server could not stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from replay_protos.framing import SERVICE
from replay_server.rpc.clients import Context

HEALTH: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
REFLECTION: str = reflection.SERVICE_NAME
_STATUS = health_pb2.HealthCheckResponse
_MAX_READERS = 16
"""Requests that are read at a time: each can be as large as any message."""
_READ_SECONDS = 5.0


class Health:
    """SERVING until `drain`, then NOT_SERVING; for the server ("") and for the service of replay.proto."""

    def __init__(self) -> None:
        self._draining = asyncio.Event()
        self._reading: dict[asyncio.Timeout, None] = {}
        """The timeouts of the requests that are being read, oldest first."""

    def drain(self) -> None:
        self._draining.set()

    async def Check(self, requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        service = await self._read_service(requests, context)
        if service not in ("", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {service[:100]!r} here")
        yield self._response(service)

    async def Watch(self, requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        service = await self._read_service(requests, context)
        yield self._response(service)
        await self._draining.wait()
        yield self._response(service)

    async def _read_service(self, requests: AsyncIterator[Any], context: Context) -> str:
        """The name of the service in question."""
        try:
            async with asyncio.timeout(_READ_SECONDS) as limit:
                if len(self._reading) >= _MAX_READERS:  # cancel the oldest pending read
                    oldest = next(iter(self._reading))
                    oldest.reschedule(0)
                    del self._reading[oldest]
                self._reading[limit] = None
                try:
                    request = await anext(requests, None)
                finally:
                    self._reading.pop(limit, None)
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the request did not come within {_READ_SECONDS:g} s, or before {_MAX_READERS} others",
            )
        if not isinstance(request, health_pb2.HealthCheckRequest):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the bytes are no health check request")
        name: str = request.service
        return name

    def _response(self, service: str) -> Any:
        if service not in ("", SERVICE):
            return _STATUS(status=_STATUS.SERVICE_UNKNOWN)
        return _STATUS(status=_STATUS.NOT_SERVING if self._draining.is_set() else _STATUS.SERVING)


def add_health(server: grpc.aio.Server) -> Health:
    """Registers health checking and reflection."""
    health = Health()
    handlers = {
        name: grpc.stream_stream_rpc_method_handler(method, _parse_request, _STATUS.SerializeToString)
        for name, method in (("Check", health.Check), ("Watch", health.Watch))
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(HEALTH, handlers),))
    reflection.enable_server_reflection((SERVICE, HEALTH, REFLECTION), server)
    return health


def _parse_request(data: bytes) -> Any:
    """The request, or None if the bytes are none. gRPC would log a traceback for an error."""
    try:
        return health_pb2.HealthCheckRequest.FromString(data)
    except DecodeError:
        return None
