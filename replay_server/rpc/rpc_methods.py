"""RPC methods: the decorators that all gRPC methods share, and how a refusal reaches its client.

`unary`, `stream` and `endless` say how a method responds. `durable`, under `unary`, lets the response wait until all
that the method changed is written. `once`, under `durable`, answers a retry without changing anything again.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from replay_protos import CLOSING, REASON_KEY
from replay_server.errors import Refused, invalid
from replay_server.rpc.auth import REVOKED
from replay_server.rpc.backend import Backend
from replay_server.rpc.clients import Context

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Method = Callable[..., Awaitable[T]]
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class HasBackend(Protocol):
    backend: Backend


def unary(method: Method[T]) -> Method[T]:
    """One request, one response. A Refused ends the call with its code, message and reason."""

    @functools.wraps(method)
    async def respond(self: HasBackend, request: Any, context: Context) -> T:
        async with _open_call(self.backend, context):
            return await method(self, _readable(request), context)
        raise AssertionError("a call that ends early raises")

    return respond


def durable(method: Method[T]) -> Method[T]:
    """The response waits until all that the method changed is written. Stands under `unary`."""

    @functools.wraps(method)
    async def respond(self: HasBackend, request: Any, context: Context) -> T:
        response = await method(self, request, context)
        await self.backend.durable()
        return response

    return respond


def once(response_type: type[M]) -> Callable[[Method[M]], Method[M]]:
    """A request that comes again, with the same id in `request`, gets the answer of its first time. Under `durable`.

    So a retry after a broken connection, or after a kill in durable mode, has the effect of one call. The method must
    not wait after its change, so that one commit writes the change and the answer.
    """

    def decorate(method: Method[M]) -> Method[M]:
        @functools.wraps(method)
        async def respond(self: HasBackend, request: Any, context: Context) -> M:
            if not request.request:
                return await method(self, request, context)
            answers = self.backend.buffer.answers
            digest = hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=8).digest()
            digest += type(request).__name__.encode()
            if (answer := answers.get(request.request)) is None:
                response = await method(self, request, context)
                answers.remember([request.request], (digest, response.SerializeToString()))
                return response
            first_digest, first_response = answer
            if first_digest != digest:
                raise invalid(f"request {request.request} was another request before: choose a new number for each")
            return response_type.FromString(first_response)

        return respond

    return decorate


def stream(method: Callable[..., AsyncGenerator[T]]) -> Callable[..., Awaitable[None]]:
    """One request, a response with payloads. The call ends if its client does not read for `stall_timeout` seconds."""

    @functools.wraps(method)
    async def respond(self: HasBackend, request: Any, context: Context) -> None:
        async with (
            _open_call(self.backend, context),
            aclosing(method(self, _readable(request), context)) as responses,
        ):
            await self.backend.calls.send(responses, context)

    return respond


def endless(method: Callable[..., AsyncIterator[T]]) -> Callable[..., AsyncIterator[T]]:
    """A stream that lasts until its client ends it, or the server stops.

    The client may read slowly: the server holds little for it meanwhile.
    """

    @functools.wraps(method)
    async def respond(self: HasBackend, request: Any, context: Context) -> AsyncIterator[T]:
        calls, task = self.backend.calls, asyncio.current_task()
        assert task is not None
        calls.endless.add(task)
        try:
            async with _open_call(self.backend, context):
                async for response in method(self, _readable(request), context):
                    yield response
        except asyncio.CancelledError:
            if not calls.closing:
                raise
            # UNAVAILABLE lets clients try again until a server is back. The reason is for those without a timeout.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down", ((REASON_KEY, CLOSING),))
        finally:
            calls.endless.discard(task)

    return respond


def parser(parse: Callable[[bytes], T]) -> Callable[[bytes], T | DecodeError]:
    """Returns the error instead of raising it. gRPC would log a traceback for each bad message, and call it UNKNOWN."""

    def parse_or_explain(data: bytes) -> T | DecodeError:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    return parse_or_explain


def _readable(request: Any) -> Any:
    """The request, or the stream of requests, as parsed. Raises Refused if the bytes are no message."""
    if isinstance(request, DecodeError):
        raise invalid(f"the bytes are no message of this protocol: {request}")
    return _each_readable(request) if isinstance(request, AsyncIterator) else request


async def _each_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)


@asynccontextmanager
async def _open_call(backend: Backend, context: Context) -> AsyncIterator[None]:
    """Counts the call while it is open, and tells its client why it ends early."""
    try:
        with backend.calls.counted():
            yield
    except Refused as refusal:
        reason = ((REASON_KEY, str(refusal.reason)),) if refusal.reason else ()
        await context.abort(_STATUS[refusal.code], refusal.message, reason)
    except asyncio.CancelledError as error:
        if error.args == (REVOKED,):  # gRPC tells the client nothing about a call that is cancelled here
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, REVOKED)
        raise
