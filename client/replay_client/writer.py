"""AsyncWriter: sends inserts in order without waiting for each acknowledgement. InsertStreams: sends single ones.

insert() ──▶ unsent ──stream──▶ unacknowledged ──ack──▶ gone
                ▲                     │
                └──── reconnect ──────┘       with the same keys, so no item is inserted twice
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice

import grpc

from replay_client.connection import DEFAULT, Connection, Patience, Timeout
from replay_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ReplayError,
    ServerClosedError,
    ShardDrainingError,
    error_of,
)
from replay_client.frames import ROWS_PER_MESSAGE, EvictedItems, Item, pack_items
from replay_client.records import Buffer, PermitLease
from replay_client.requests import KeySequence
from replay_client.rollout import RolloutGroup
from replay_client.shared_memory import SharedInserts
from replay_client.streams import end_stream, read_message
from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame

_WORTH_A_MESSAGE = 1 << 18
"""Bytes of items that are sent at once. Fewer bytes wait for more items, to share a message with them."""
_LINGER = 0.002
"""The most seconds that such items wait after an acknowledgement."""
_MOST_IDLE = 16
"""Streams for single inserts that stay open."""


class Pipeline:
    """The items of one writer on their way to the server. The blocking and the asyncio writer share it.

    * Any thread may call `offer` and `drained`. They never wait: if the answer is no, they keep the given callback and
      call it on the event loop when the caller should try again.
    * `_lock` guards the queues and counters. It is never held while something waits.
    * An item is in `_unsent` or in `_unacknowledged` until the server has decided about it.
    """

    def __init__(
        self,
        connection: Connection,
        loop: asyncio.AbstractEventLoop,
        max_in_flight: int,
        max_bytes: int,
        timeout: float | None,
    ) -> None:
        if max_in_flight < 1 or max_bytes < 1:
            raise InvalidRequestError(f"max_in_flight {max_in_flight} and max_bytes {max_bytes} must be at least 1")
        self.timeout = timeout
        self.refused: dict[int, ReplayError] = {}
        """Items that the server refused and did not insert: key to reason."""
        self.evicted = EvictedItems()
        self.on_draining: Callable[[Item], None] | None = None
        """Called on the event loop with each item that a draining server refused. It takes the item over."""
        self._connection = connection
        self._loop = loop
        self._max_in_flight, self._max_bytes = max_in_flight, max_bytes
        self._lock = threading.Lock()
        self._unsent: deque[Item] = deque()
        self._unacknowledged: deque[Item] = deque()
        self._unsent_bytes = 0
        self._in_flight, self._bytes = 0, 0
        self._unreported: list[ReplayError] = []
        self._failure: ReplayError | None = None
        self._room: list[Callable[[], None]] = []
        self._drained: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._awake = False
        self._task: asyncio.Task[None] | None = None

    def offer(self, item: Item, when_room: Callable[[], None] | None = None) -> bool:
        """Takes the item if there is room. Raises the errors of earlier items."""
        with self._lock:
            self._raise()
            if self._in_flight and (
                self._in_flight >= self._max_in_flight or self._bytes + item.nbytes > self._max_bytes
            ):
                if when_room is not None:
                    self._room.append(when_room)
                return False
            self._unsent.append(item)
            self._unsent_bytes += item.nbytes
            self._in_flight += 1
            self._bytes += item.nbytes
            wake = not self._awake and self._worth_sending()
            self._awake = self._awake or wake
        if wake:
            self._loop.call_soon_threadsafe(self._start)
        return True

    def take_over(self, item: Item) -> None:
        """Takes an item of another pipeline, whether there is room or not."""
        with self._lock:
            self._unsent.append(item)
            self._unsent_bytes += item.nbytes
            self._in_flight += 1
            self._bytes += item.nbytes
            self._awake = True
        self._start()

    def drained(self, when_drained: Callable[[], None]) -> bool:
        """Whether all items are acknowledged. Raises the errors of earlier items."""
        with self._lock:
            if not self._in_flight or self._failure is not None:
                self._raise()
                return True
            self._drained.append(when_drained)
            wake = not self._awake and bool(self._unsent)
            self._awake = self._awake or wake
        if wake:
            self._loop.call_soon_threadsafe(self._start)
        return False

    @property
    def in_flight(self) -> int:
        """Items that are not acknowledged."""
        return self._in_flight

    @property
    def bytes_in_flight(self) -> int:
        return self._bytes

    @property
    def failure(self) -> ReplayError | None:
        """The error after which this pipeline sends nothing more; None: it works."""
        return self._failure

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when items have been acknowledged or the pipeline has failed."""
        with self._lock:
            self._room.append(callback)

    def seconds(self, timeout: Timeout) -> float | None:
        return self._connection.seconds(timeout)

    def waiting(self) -> str:
        return f"{self._in_flight} items ({self._bytes} bytes) are not acknowledged yet by {self._connection.address}"

    async def close(self) -> None:
        """Stop sending. The server may have inserted items that it has not acknowledged."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(ServerClosedError("the writer is closed"))

    def _raise(self) -> None:
        if self._unreported:
            error, self._unreported = self._unreported[0], []
            raise error
        if self._failure is not None:
            raise self._failure

    def _worth_sending(self) -> bool:
        """Whether to send what is unsent now, and not with the next acknowledgement.

        A message costs both sides as much as ten small items. Small items therefore wait for each other while the
        server has work of this writer. An item that comes when the server has none, or when somebody waits for all
        items, is sent at once.
        """
        return (
            not self._unacknowledged
            or bool(self._drained)
            or self._unsent_bytes >= _WORTH_A_MESSAGE
            or 2 * len(self._unsent) >= self._max_in_flight
        )

    def _start(self) -> None:
        self._timer = None
        self._wake.set()
        if self._task is None:
            self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        patience = Patience(self._connection, self._connection.timeout)
        try:
            while True:
                await self._wake.wait()  # do not connect before there is something to send
                try:
                    await self._stream(patience)
                except grpc.aio.AioRpcError as error:
                    if self._in_flight:
                        await patience.pause_or_raise(error)
                with self._lock:  # send again what was not acknowledged, first and in the old order
                    self._unsent.extendleft(reversed(self._unacknowledged))
                    self._unsent_bytes += sum(item.nbytes for item in self._unacknowledged)
                    self._unacknowledged.clear()
                    self._awake = bool(self._unsent)
                    if self._awake:
                        self._wake.set()
                    else:
                        self._wake.clear()
        except ReplayError as error:
            self._fail(error)
        except asyncio.CancelledError:
            self._fail(ServerClosedError("the writer was closed while it had work to do"))
            raise
        except Exception as error:  # a bug: fail, or callers would wait for ever
            self._fail(ReplayError(f"the writer failed: {type(error).__name__}: {error}"))
            raise

    async def _stream(self, patience: Patience) -> None:
        """Sends and reads until the stream breaks."""
        call = self._connection.payloads.InsertStream()
        reader = asyncio.create_task(self._read(call, patience))
        reader.add_done_callback(lambda _: self._wake.set())
        try:
            while not reader.done():
                await self._wake.wait()
                self._wake.clear()
                items = self._next_items(worth=False)
                while not reader.done() and items:
                    for request in pack_items(items, call.bytes_per_message):
                        await call.write(request)
                    items = self._next_items()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader raises the reason
        finally:
            if not self._in_flight and await end_stream(call, reader):
                call.keep_ring()
            call.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        reader.result()

    def _next_items(self, worth: bool = True) -> list[Item]:
        with self._lock:
            items = []
            if not worth or self._worth_sending():
                items = [self._unsent.popleft() for _ in range(min(len(self._unsent), ROWS_PER_MESSAGE))]
            self._unsent_bytes -= sum(item.nbytes for item in items)
            self._unacknowledged.extend(items)
            self._awake = bool(items)
        return items

    async def _read(self, call: SharedInserts, patience: Patience) -> None:
        async for response in call:
            patience.renew()
            errors = {error.key: error_of(error.code, error.message, error.reason) for error in response.errors}
            self._pass_on(response.decided, errors)
            with self._lock:
                for _ in range(response.decided):
                    item = self._unacknowledged.popleft()
                    self._in_flight -= 1
                    self._bytes -= item.nbytes
                self.refused.update(errors)
                self.evicted.see(response)
                self._unreported.extend(errors.values())
                if self._unsent and not self._awake and self._timer is None:
                    self._timer = self._loop.call_later(_LINGER, self._start)
            self._call(self._room)
            if not self._in_flight:
                self._call(self._drained)
        # A server ends an insert stream only with an error.
        raise error_of(grpc.StatusCode.UNKNOWN, "the server ended the insert stream without an error")

    def _pass_on(self, decided: int, errors: dict[int, ReplayError]) -> None:
        """Pass the items that a draining server refused to `on_draining`. They then count as no error."""
        if self.on_draining is None or not errors:
            return
        for item in list(islice(self._unacknowledged, decided)):
            if isinstance(errors.get(item.key), ShardDrainingError):
                del errors[item.key]
                self.on_draining(item)  # before this pipeline counts it as done: it is always in one of them

    def _fail(self, error: ReplayError) -> None:
        with self._lock:
            self._failure = self._failure or error
        self._call(self._room)
        self._call(self._drained)

    def _call(self, callbacks: list[Callable[[], None]]) -> None:
        with self._lock:
            waiting = callbacks[:]
            callbacks.clear()
        for callback in waiting:
            callback()


class AsyncWriter:
    """Inserts without waiting for each acknowledgement; made by `AsyncReplayClient.writer()`, for `async with`.

    The end of the `async with` block flushes the writer.
    """

    def __init__(self, pipeline: Pipeline, keys: KeySequence) -> None:
        self.pipeline = pipeline
        self._keys = keys

    @property
    def refused(self) -> Mapping[int, ReplayError]:
        """The items that the server refused: their keys, each with the reason."""
        return self.pipeline.refused

    @property
    def evicted(self) -> Mapping[int, tuple[str, ...]]:
        """The items that left a full table at once, because its remover chose them: their tables by key.

        The newest 65,536 of them. They were inserted, so this is no error; a pool that keeps the best does not keep
        them.
        """
        return self.pipeline.evicted

    async def insert(
        self,
        group: RolloutGroup | Buffer,
        priorities: Mapping[str, float],
        *,
        policy_version: int | None = None,
        permits: PermitLease | None = None,
    ) -> int:
        """Queues a group and returns its key; waits only while `max_in_flight` or `max_bytes` are in flight.

        Raises the first error of earlier inserts that was not raised yet, and then does not queue this group.
        `refused` has all of them.
        """
        item = self.item(group, priorities, policy_version, permits)
        if not self.pipeline.offer(item):
            room = asyncio.Event()
            while not self.pipeline.offer(item, room.set):
                await room.wait()
                room.clear()
        return item.key

    def item(
        self,
        group: RolloutGroup | Buffer,
        priorities: Mapping[str, float],
        policy_version: int | None,
        permits: PermitLease | None,
    ) -> Item:
        lease = permits.id if permits else 0
        return Item.of(next(self._keys), group, priorities, policy_version, self.pipeline.timeout, lease)

    async def flush(self, timeout: Timeout = DEFAULT) -> None:
        """Returns when everything inserted so far is acknowledged. Raises the first error of any of it."""
        drained = asyncio.Event()
        while not self.pipeline.drained(drained.set):
            try:
                async with asyncio.timeout(self.pipeline.seconds(timeout)):
                    await drained.wait()
            except TimeoutError:
                raise DeadlineExceededError(self.pipeline.waiting()) from None
            drained.clear()

    async def close(self) -> None:
        await self.pipeline.close()

    async def __aenter__(self) -> AsyncWriter:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                await self.flush()
        finally:
            await self.close()


class InsertStreams:
    """The idle streams of one client, for single inserts. A round trip on an open stream costs half of a new call.

    Each stream carries one insert at a time. So an insert that waits for its table does not delay another one.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._idle: list[SharedInserts] = []

    async def insert(self, frames: Sequence[Frame[pb.InsertRequest]], timeout: float | None) -> pb.InsertResponse:
        """Sends one item and returns the server's decision. Raises AioRpcError if the stream breaks."""
        call = self._idle.pop() if self._idle else self._connection.payloads.InsertStream()
        try:
            async with asyncio.timeout(timeout):
                with suppress(asyncio.InvalidStateError):  # the idle stream has ended; the read raises the reason
                    for frame in frames:
                        await call.write(frame)
                response: pb.InsertResponse = await read_message(call)
        except TimeoutError:
            call.cancel()
            address = self._connection.address
            raise DeadlineExceededError(f"{address} did not answer an insert within {timeout:g} s") from None
        except BaseException:
            for broken in [call, *self._idle]:  # they share a connection, so all of them are broken
                broken.cancel()
            self._idle.clear()
            raise
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(call)
        else:
            call.cancel()
        return response

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        await asyncio.gather(*map(end_stream, idle))
