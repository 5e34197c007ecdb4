"""Backend: what all gRPC methods share. The tables, the bounds that clients share, and the decorators of the methods.

* Budget: an amount that clients share. No client, and not all of them together, can use more than there is.
* MemoryGuard: says when too little memory is left for more items, before the system kills the server.
* OpenCalls: counts the calls that are open, and ends endless streams.

A client is a connection (gRPC's name of the peer).

`unary`, `stream` and `endless` say how a method responds, and how a refusal reaches its client. `durable`, under
`unary`, lets the response wait until all that the method changed is written. `once`, under `durable`, answers a retry
without changing anything again. `split_payloads` lays payloads out over the messages of a response.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import hashlib
import logging
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from replay_protos import CLOSING, REASON_KEY
from replay_protos.framing import BYTES_PER_MESSAGE, Frame
from replay_server.config import MAX_BYTES_READ, MAX_ROWS_OUTSTANDING, LimitsSection
from replay_server.errors import Refused, busy, deadline, invalid
from replay_server.rpc.auth import REVOKED
from replay_server.rpc.clients import Clients, Context
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.extensions.archive import Archiving
from replay_server.tables.items import Payload
from replay_server.tables.waiting import Line, Pending, deadline_at, result_of
from replay_server.telemetry.host import Memory, memories

log = logging.getLogger("replay_server")

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Method = Callable[..., Awaitable[T]]
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class Backend:
    def __init__(
        self, buffer: ReplayBuffer, limits: LimitsSection, written: Callable[[], Awaitable[None]] | None
    ) -> None:
        """`written`, which is Journal.durable, returns when all changes until now are written; None: in memory only."""
        self.buffer = buffer
        self.limits = limits
        self.is_durable = written is not None
        self._written = written
        self.calls = OpenCalls(limits)
        # An item of the largest size must fit, or it could never be received.
        unfinished = max(limits.max_unfinished_bytes, buffer.max_payload_bytes)
        self.unfinished = Budget(unfinished, "bytes of items that are not complete (max_unfinished_bytes)")
        self.waiting = Budget(limits.max_waiting_bytes, "bytes of items that wait for their table (max_waiting_bytes)")
        self.outstanding = Budget(MAX_ROWS_OUTSTANDING, "samples under leases or drawn ahead")
        self.reading = Budget(max(MAX_BYTES_READ, buffer.max_payload_bytes), "bytes of items that readers are sent")
        archive = Archiving.of(buffer)
        self.memory = MemoryGuard(limits.memory_share, archive.free_all if archive is not None else lambda: None)
        self.clients = Clients(buffer.clock)
        self.draining = False
        """Whether items with new keys are refused. Another thread may set it."""
        self.insert_streams = 0
        """Open now."""
        self.sample_streams = 0
        """Open now."""

    async def durable(self) -> None:
        """Returns when all changes until now are written; at once where items are in memory only."""
        if self._written is not None:
            await self._written()


class PendingShare(Pending[int]):
    def __init__(self, client: str, n: int, since: float, deadline_at: float) -> None:
        super().__init__(since, deadline_at)
        self.client = client
        self.n = n


class Budget:
    """At most `total` is in use, and at most half of it by one client that already uses some.

    A client that uses nothing may take more than half, or a large request could never be served. Waiting requests are
    served first come, first served, except those that wait for their own client's half.
    """

    def __init__(self, total: int, name: str) -> None:
        """`name` completes "N of M ...", for example "bytes of items that are not complete (max_unfinished_bytes)"."""
        self.total = total
        self.used = 0
        self._name = name
        self._used_by: dict[str, int] = {}
        self._line: Line[PendingShare] = Line(time.monotonic)

    def why_not(self, client: str, n: int) -> str | None:
        """Why the client cannot have n more; None if it can."""
        if self.used + n > self.total:
            return f"{self.used} of {self.total} {self._name} are in use, and {n} more were asked for"
        used = self._used_by.get(client, 0)
        if used and used + n > self.total // 2:
            return f"this client has {used} of {self.total} {self._name} in use, and no client may have over half"
        return None

    def take(self, client: str, n: int) -> None:
        """Raises Refused (RESOURCE_EXHAUSTED) if the client cannot have n more."""
        if why := self.why_not(client, n):
            raise busy(f"{why}; try again later")
        self._take(client, n)

    def give_back(self, client: str, n: int) -> None:
        self.used -= n
        left = self._used_by.pop(client, 0) - n
        if left:
            self._used_by[client] = left
        self._serve()

    @contextmanager
    def held(self, client: str, n: int) -> Iterator[None]:
        """Raises Refused as `take` does."""
        self.take(client, n)
        try:
            yield
        finally:
            self.give_back(client, n)

    async def take_in_turn(self, client: str, n: int, timeout: float | None) -> None:
        """Waits until the client can have n more. Raises Refused (DEADLINE_EXCEEDED) after `timeout` seconds."""
        now = time.monotonic()
        pending = PendingShare(client, n, now, deadline_at(now, timeout))
        self._line.join(pending)
        self._serve()
        await result_of(pending, now, self._time_out, self._abandon)

    def _time_out(self, pending: PendingShare) -> None:
        if not pending.done:
            why = self.why_not(pending.client, pending.n) or f"others came first for the {self.total} {self._name}"
            pending.fail(deadline(why))
            self._serve()

    def _abandon(self, pending: PendingShare) -> None:
        if not pending.done:
            pending.abandon()
            self._serve()
        elif pending.value is not None:  # it was served just before
            self.give_back(pending.client, pending.n)

    def _serve(self) -> None:
        for pending in self._line:
            if self.used + pending.n > self.total:
                break
            if self.why_not(pending.client, pending.n) is None:
                self._take(pending.client, pending.n)
                pending.finish(pending.n)

    def _take(self, client: str, n: int) -> None:
        self.used += n
        if n:
            self._used_by[client] = self._used_by.get(client, 0) + n


_MACHINE_RESERVE = 512 << 20
"""Bytes of the machine that stay free at most. Others use the machine too."""
_LOOK_EVERY = 0.05
_TRIM_EVERY = 1.0
"""Seconds between two looks, and between two requests to give freed memory back to the system."""
_SHARE_BETWEEN_LOOKS = 0.25
"""The guard looks again once the server has received this share of the room above the reserve. A fast client fills the
reserve of a small container within _LOOK_EVERY."""


class MemoryGuard:
    """Looks at the machine and at the control groups of the process. What is there is kept.

    Inserts are refused until items have left, or others have freed memory.
    """

    def __init__(
        self,
        share: float,
        let_go: Callable[[], None] = lambda: None,
        look: Callable[[], Sequence[Memory]] = memories,
    ) -> None:
        """`share` of each memory may be in use; 1: all of it. `let_go` drops what nobody but the archive needs."""
        self._share = share
        self._let_go = let_go
        self._look = look
        self._why: str | None = None
        self._looked_at = self._trimmed_at = -_TRIM_EVERY
        self._until_next_look = 0.0
        """Bytes that may still be received before the next look."""

    def why_full(self, received: int) -> str | None:
        """Why no more items can be kept; None: they can. `received`: bytes that have come into memory
        since the last question. If a caller names the same bytes twice, the guard only looks sooner."""
        now = time.monotonic()
        self._until_next_look -= received
        due = now - self._looked_at >= _LOOK_EVERY or (self._until_next_look < 0 and self._why is None)
        if self._share < 1 and due:
            self._looked_at, before = now, self._why
            self._why = self._find()
            if self._why and now - self._trimmed_at >= _TRIM_EVERY:
                self._trimmed_at = now
                self._let_go()
                give_back_freed()
                self._why = self._find()
            if bool(before) != bool(self._why):
                log.warning("%s", self._why or "there is memory again: inserts are accepted")
        return self._why

    def _find(self) -> str | None:
        self._until_next_look = float("inf")
        for memory in self._look():
            reserve = int(memory.limit * (1 - self._share))
            if memory.name == "the machine":
                reserve = min(reserve, _MACHINE_RESERVE)
            if memory.available < reserve:
                return (
                    f"{memory.name} has {memory.available} of {memory.limit} bytes of memory left, and {reserve} stay "
                    f"free ([limits] memory_share): give it more memory, or let tables evict with a lower max_bytes"
                )
            self._until_next_look = min(self._until_next_look, _SHARE_BETWEEN_LOOKS * (memory.available - reserve))
        return None


def give_back_freed() -> None:
    """Without this the C library keeps the memory of items that have left, and the guard would stay as it is."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (OSError, AttributeError):  # not the GNU C library
            return


class OpenCalls:
    def __init__(self, limits: LimitsSection) -> None:
        self._limits = limits
        self.count = 0
        self.endless: set[asyncio.Task[Any]] = set()
        """The streams that last until their clients end them."""
        self.closing = False

    def close(self) -> None:
        """Ends the streams that would not end by themselves."""
        self.closing = True
        for task in self.endless:
            task.cancel()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts one more open call. Raises Refused if `max_calls` are open."""
        if self.count >= self._limits.max_calls:
            raise busy(f"{self.count} calls are open, which is as many as this server takes (max_calls); try later")
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1

    async def send(self, responses: AsyncIterator[Any], context: Context) -> None:
        """Sends a response with payloads. Raises Refused if the client does not read it."""
        stall = self._limits.stall_timeout
        try:
            async for response in responses:
                async with asyncio.timeout(stall):
                    await context.write(response)
        except TimeoutError:
            raise deadline(
                f"the answer was not read: the client took none of it for {stall:g} s (stall_timeout)"
            ) from None


# ------------------------------------------------------------------------------------------- decorators of methods


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
            buffer = self.backend.buffer
            digest = hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=8).digest()
            digest += type(request).__name__.encode()
            if (answer := first_answer(buffer, request.request, digest)) is None:
                response = await method(self, request, context)
                buffer.answers.remember([request.request], (digest, response.SerializeToString()))
                return response
            return response_type.FromString(answer)

        return respond

    return decorate


def first_answer(buffer: ReplayBuffer, request: int, digest: bytes) -> bytes | None:
    """What the request with this number was answered; None: it has not come before.

    Raises Refused if it was another request: one with another `digest`.
    """
    if (answer := buffer.answers.get(request)) is None:
        return None
    first_digest, first_response = answer
    if first_digest != digest:
        raise invalid(f"request {request} was another request before: choose a new number for each")
    return first_response


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


def split_payloads(first: M, payloads: Iterable[Payload]) -> Iterator[Frame[M]]:
    """`first` with as many payload bytes as fit, then messages with the rest of the bytes.

    A chunk goes into one message, so that the reader need not join it, unless it is much larger than a message: a
    client that does not read would keep all of it in memory.
    """
    head, filled = first, 0
    chunks: list[bytes | memoryview] = []
    for chunk in _short_chunks(payloads):
        if filled and filled + len(chunk) > BYTES_PER_MESSAGE:
            yield Frame(head, chunks)
            head, chunks, filled = type(first)(), [], 0
        chunks.append(chunk)
        filled += len(chunk)
    yield Frame(head, chunks)


def _short_chunks(payloads: Iterable[Payload]) -> Iterator[bytes | memoryview]:
    for payload in payloads:
        for chunk in payload:
            if len(chunk) <= 2 * BYTES_PER_MESSAGE:
                yield chunk
            else:
                view = memoryview(chunk)
                yield from (view[at : at + BYTES_PER_MESSAGE] for at in range(0, len(view), BYTES_PER_MESSAGE))
