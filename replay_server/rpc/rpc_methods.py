"""Calls: what all gRPC methods share. Requests are readable, refusals become codes, answers are read in time.

A method of ReplayService is decorated with one of `unary`, `stream` and `endless`, by how it answers.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError

from replay_protos import REASON_KEY
from replay_server.config import LimitsSection
from replay_server.errors import Refused, busy, deadline, invalid
from replay_server.limits import MAX_ANSWERS
from replay_server.rpc.auth import REVOKED

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
T = TypeVar("T")
_STATUS = {code.value[0]: code for code in grpc.StatusCode}
Method = Callable[..., Awaitable[T]]


class Calls:
    """The calls that are open."""

    def __init__(self, limits: LimitsSection) -> None:
        self._limits = limits
        self.open = 0
        self.endless: set[asyncio.Task[Any]] = set()
        """Those that last until their clients go."""
        self.closing = False
        self._answers: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By connection: each answer with payloads that is under way holds one of its MAX_ANSWERS."""

    def close(self) -> None:
        """Ends those that would not end by themselves."""
        self.closing = True
        for task in self.endless:
            task.cancel()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """One more is open. Raises Refused where that is one too many."""
        if self.open >= self._limits.max_calls:
            raise busy(f"{self.open} calls are open, which is as many as this server takes (max_calls); try later")
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def send(self, responses: AsyncIterator[Any], context: Context) -> None:
        """Sends an answer with payloads. Raises Refused where the client does not read it."""
        stall, begun = self._limits.stall_timeout, False
        try:
            async for response in responses:
                async with asyncio.timeout(stall):
                    if not begun:
                        await self._begin_answer(context)
                        begun = True
                    await context.write(response)
        except TimeoutError:
            raise deadline(
                f"the answer was not read: the client took none of it for {stall:g} s (stall_timeout), or did not read "
                f"{MAX_ANSWERS} answers before it"
            ) from None

    async def _begin_answer(self, context: Context) -> None:
        """Waits while too many answers to this connection are under way."""
        slots = self._answers.setdefault(context.peer(), asyncio.Semaphore(MAX_ANSWERS))
        await slots.acquire()
        # At the very end of the call: an answer that is not read stays in gRPC, even if we have given it up.
        context.add_done_callback(lambda *_: slots.release())  # type: ignore[arg-type]  # no lambda is generic


async def abort(context: Context, refusal: Refused) -> None:
    """Ends the call with the code, the message and, as trailing metadata, the reason of a refusal."""
    metadata = ((REASON_KEY, str(refusal.reason)),) if refusal.reason else ()
    await context.abort(_STATUS[refusal.code], refusal.message, metadata)


class HasCalls(Protocol):
    calls: Calls


def parser(parse: Callable[[bytes], T]) -> Callable[[bytes], T | DecodeError]:
    """Gives the error instead of raising it: gRPC would log a traceback for each bad message, and call it UNKNOWN."""

    def parse_or_explain(data: bytes) -> T | DecodeError:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    return parse_or_explain


def readable(request: Any) -> Any:
    """The request, or the stream of them, as parsed. Raises Refused for what is none."""
    if isinstance(request, DecodeError):
        raise invalid(f"the bytes are no message of this protocol: {request}")
    return _readable_each(request) if isinstance(request, AsyncIterator) else request


async def _readable_each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield readable(request)


@asynccontextmanager
async def _answering(calls: Calls, context: Context) -> AsyncIterator[None]:
    """One more call is open; what ends it early is told to its client."""
    try:
        with calls.counted():
            yield
    except Refused as refusal:
        await abort(context, refusal)
    except asyncio.CancelledError as error:
        if error.args == (REVOKED,):  # gRPC says nothing to the client of a call that is cancelled here
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, REVOKED)
        raise


def unary(method: Method[T]) -> Method[T]:
    """Answers a Refused with its code and message."""

    @functools.wraps(method)
    async def answer(self: HasCalls, request: Any, context: Context) -> T:
        async with _answering(self.calls, context):
            return await method(self, readable(request), context)
        raise AssertionError("what ends a call early raises")

    return answer


def stream(method: Callable[..., AsyncGenerator[T]]) -> Callable[..., Awaitable[None]]:
    """The same for a method that answers with payloads; a client that does not read them is not waited for long."""

    @functools.wraps(method)
    async def answer(self: HasCalls, request: Any, context: Context) -> None:
        async with _answering(self.calls, context), aclosing(method(self, readable(request), context)) as responses:
            await self.calls.send(responses, context)

    return answer


def endless(method: Callable[..., AsyncIterator[T]]) -> Callable[..., AsyncIterator[T]]:
    """The same for a stream that lasts until its client goes: the end of the server ends it as well.

    Its client may take its time to read: the server holds little for it meanwhile.
    """

    @functools.wraps(method)
    async def answer(self: HasCalls, request: Any, context: Context) -> AsyncIterator[T]:
        task = asyncio.current_task()
        assert task is not None
        self.calls.endless.add(task)
        try:
            async with _answering(self.calls, context):
                async for response in method(self, readable(request), context):
                    yield response
        except asyncio.CancelledError:
            if not self.calls.closing:
                raise
            # Clients try again while a server comes back in time.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        finally:
            self.calls.endless.discard(task)

    return answer
