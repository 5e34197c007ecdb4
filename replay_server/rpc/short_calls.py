"""Short calls: answers methods with one short response, one call after the other on an open stream.

To gRPC in Python a message on an open stream costs half of a call (`python -m benchmarks.floor`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, NoReturn, cast

import grpc

from replay_protos import REASON_KEY, SHORT_METHODS
from replay_protos import replay_pb2 as pb
from replay_server.errors import Code
from replay_server.rpc.auth import REVOKED
from replay_server.rpc.backend import Backend, endless
from replay_server.rpc.clients import Context


class _Method(NamedTuple):
    behavior: Callable[[Any, Context], Awaitable[Any]]
    parse: Callable[[bytes], Any]
    serialize: Callable[[Any], bytes]


class ShortCalls:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._methods: dict[str, _Method] = {}

    def add(
        self,
        name: str,
        behavior: Callable[[Any, Context], Awaitable[Any]],
        parse: Callable[[bytes], Any],
        serialize: Callable[[Any], bytes],
    ) -> None:
        """Lets clients call a method of one request and one response on the stream, if it is one of SHORT_METHODS."""
        if name in SHORT_METHODS:
            self._methods[name] = _Method(behavior, parse, serialize)

    @endless
    async def Calls(self, requests: AsyncIterator[pb.CallRequest], context: Context) -> AsyncIterator[pb.CallResponse]:
        async for request in requests:
            yield await self._respond(request, context)

    async def _respond(self, request: pb.CallRequest, context: Context) -> pb.CallResponse:
        if (method := self._methods.get(request.method)) is None:
            return pb.CallResponse(
                code=Code.INVALID_ARGUMENT,
                message=f"method {request.method[:100]!r}: one of {', '.join(SHORT_METHODS)}",
            )
        call = _Context(context)
        try:
            response = await method.behavior(method.parse(request.request), cast("Context", call))
        except grpc.aio.AbortError:
            if not call.refusal.code:  # the stream is aborted
                raise
            return call.refusal
        return pb.CallResponse(response=method.serialize(response))


class _Context:
    """The context of one call. A call that is aborted ends alone, and its stream goes on; a revoked token ends both."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.refusal = pb.CallResponse()
        """Why the call was aborted."""

    def peer(self) -> str:
        return self._context.peer()

    def code(self) -> int:
        return self.refusal.code

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()  # that of the stream is not the call's

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, str], ...] = ()
    ) -> NoReturn:
        if details == REVOKED:
            await self._context.abort(code, details)
        number: int = code.value[0]
        self.refusal = pb.CallResponse(code=number, message=details, reason=dict(trailing_metadata).get(REASON_KEY, ""))
        raise grpc.aio.AbortError(details)
