"""AsyncWriter: sends inserts without waiting for each acknowledgement, to each server in order.

insert() ──▶ unsent ──stream──▶ unacknowledged ──ack──▶ done
                ▲                     │
                └──── reconnect ──────┘       with the same keys, so no item is inserted twice
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import grpc

from replay_client.columns import Buffer
from replay_client.connection import DEFAULT, LATE_SECONDS, Connection, OneServer, Timeout, seconds_of
from replay_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ReplayError,
    ServerClosedError,
    ShardDrainingError,
    error_of,
)
from replay_client.records import PermitGrant
from replay_client.requests import ROWS_PER_MESSAGE, EvictedItems, Item, KeySequence, pack_items
from replay_client.rollout import RolloutGroup
from replay_client.transport import Stream
from replay_client.waits import Patience
from replay_protos import replay_pb2 as pb
from replay_protos.words import counted

if TYPE_CHECKING:
    from replay_client.shards.fleet import Fleet
    from replay_client.shards.placing import Placement

_WORTH_A_MESSAGE = 1 << 18
"""The bytes of items at which a message is sent at once. Items with fewer bytes wait for more items, to share a message
with them. The number is multiplied by the number of the writer's servers, up to _FULL, because each of several servers
gets fewer items."""
_FULL = 1 << 20
"""Bytes that fill a message."""
_LINGER = 0.002
"""The most seconds that items wait for more items. It is multiplied by the number of the writer's servers, so that
several servers together get no more messages than one."""


class AsyncWriter(AbstractAsyncContextManager["AsyncWriter"]):
    """Inserts without waiting for each acknowledgement; made by `AsyncReplayClient.writer()`, for `async with`.

    The end of the `async with` block flushes the writer, unless the block raises.
    """

    # The blocking writer uses an AsyncWriter from other threads. Therefore:
    #
    # * Any thread may call `offer`. It never waits. If there is no room, it keeps the given callback. The callback is
    #   called when the caller should try again, in most cases on the event loop.
    # * Each server has a line (`InsertLine`). `max_in_flight` and `max_bytes` bound all lines together. Items that a
    #   server has not acknowledged stay in its line while the server is away. They count as in flight only while all
    #   servers are away: otherwise new items go to other servers, and need not wait for this one.
    # * `lock` guards the queues and counters. It is never held during a wait.

    def __init__(
        self,
        fleet: Fleet | OneServer,
        placement: Placement | OneServer,
        keys: KeySequence,
        max_in_flight: int,
        max_bytes: int,
        timeout: float | None,
    ) -> None:
        if max_in_flight < 1 or max_bytes < 1:
            raise InvalidRequestError(f"max_in_flight {max_in_flight} and max_bytes {max_bytes} must be at least 1")
        self.timeout = timeout
        self.max_in_flight = max_in_flight
        self.max_bytes = max_bytes
        self.refused: dict[int, ReplayError] = {}
        """The reason for each item that the server refused, by the key of the item."""
        self.evicted = EvictedItems()
        """The tables that were full and removed an item as soon as it was inserted, by the item's key.

        The mapping has the newest 65,536 of these items. This is no error: a pool that keeps the best items does not
        keep these.
        """
        self.keys = keys
        self.lock = threading.Lock()
        self.loop = asyncio.get_running_loop()
        self._fleet = fleet
        self._placement = placement
        self._lines: dict[Connection, InsertLine] = {}
        self._divide()
        self._in_flight = 0
        self._bytes = 0
        self._unreported: list[ReplayError] = []
        """The errors of refused items that no call has raised yet."""
        self._lost: deque[ReplayError] = deque()
        """The reason of each line that ended with items in it. Each reason is raised once."""
        self._failure: ReplayError | None = None
        """The reason why this writer sends nothing more; None: it still sends."""
        self._room: list[Callable[[], None]] = []
        """The callbacks of callers that wait for room."""
        self.awaited_by: list[Callable[[], None]] = []
        """The callbacks of callers that wait until all items are acknowledged."""
        fleet.connect()
        fleet.listeners.append(self._notify_waiters)

    async def insert(
        self,
        group: RolloutGroup | Buffer,
        priorities: Mapping[str, float],
        *,
        key: int | None = None,
        policy_version: int | None = None,
        permits: PermitGrant | None = None,
        tags: Mapping[str, str | int] | None = None,
    ) -> int:
        """Queues a group and returns its key; waits only while `max_in_flight` or `max_bytes` are in flight.

        Raises the first error of earlier inserts that was not raised yet, and then does not queue this group.
        `refused` has all errors. `key` and `tags` as in `AsyncReplayClient.insert`.
        """
        if key is None:
            key = next(self.keys)
        item = Item.of(key, group, priorities, policy_version, self.timeout, permits, tags)
        if not self.offer(item):
            room = asyncio.Event()
            while not self.offer(item, room.set):
                await room.wait()
                room.clear()
        return item.key

    async def flush(self, timeout: Timeout = DEFAULT) -> None:
        """Returns when the servers have acknowledged all items inserted so far. Raises the first error of them."""
        drained = asyncio.Event()
        while not self._is_drained(drained.set):
            try:
                async with asyncio.timeout(seconds_of(timeout, self._fleet.timeout)):
                    await drained.wait()
            except TimeoutError:
                with self.lock:
                    lines = [line.waiting() for line in self._lines.values() if line.in_flight]
                reason = "; ".join(lines) or "not all shards have been tried yet"
                raise DeadlineExceededError(reason) from None
            drained.clear()
        self.check()

    def offer(self, item: Item, when_room: Callable[[], None] | None = None) -> bool:
        """Takes the item if there is room. Raises the errors of earlier items.

        Otherwise returns False, and calls `when_room` once when the caller should offer the item again.
        """
        with self.lock:
            self._raise()
            # Before the fleet has tried to reach each server, the items of a server that is only slow to connect would
            # go to another server.
            if not (self._fleet.decided and self._has_room(item)):
                if when_room is not None:
                    self._room.append(when_room)
                return False
            self._in_flight += 1
            self._bytes += item.nbytes
            wake = self._line_for(item).add(item)
        if wake is not None:
            self.loop.call_soon_threadsafe(wake)
        return True

    def _is_drained(self, when_drained: Callable[[], None]) -> bool:
        """True if all items are acknowledged. Raises the errors of earlier items.

        Otherwise sends all unsent items, and calls `when_drained` once when all items are acknowledged.
        """
        with self.lock:
            if not self._in_flight or self._failure is not None or self._lost:
                self._raise()
                return True
            self.awaited_by.append(when_drained)
            idle = [line for line in self._lines.values() if line.wakes()]
        for line in idle:
            line.send()
        return False

    async def close(self) -> None:
        """Stops sending. The servers may have inserted items that they have not acknowledged."""
        if self._notify_waiters in self._fleet.listeners:
            self._fleet.listeners.remove(self._notify_waiters)
        for line in list(self._lines.values()):
            await line.close()
        self._fail(ServerClosedError("the writer is closed"))

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                await self.flush()
        finally:
            await self.close()

    async def decided(self, line: InsertLine, items: Sequence[Item], response: pb.InsertResponse) -> None:
        """Notes that the server has decided about these items of the line."""
        errors = {error.key: error_of(error.code, error.message, error.reason) for error in response.errors}
        for item in items:
            if item.moved and item.key not in errors:  # the item was inserted on another shard than its permit's
                await self._placement.settle(item)
        moved: set[InsertLine] = set()
        with self.lock:
            for item in items:
                # A draining server has refused the item, so it may go to another server. It stays in flight.
                is_draining = isinstance(errors.get(item.key), ShardDrainingError)
                if is_draining and self._placement.forget(item.key, line.shard):
                    del errors[item.key]
                    other = self._line_for(item)
                    other.add(item)
                    moved.add(other)
                else:
                    self._in_flight -= 1
                    self._bytes -= item.nbytes
            assert self._in_flight >= 0, self._in_flight
            assert self._bytes >= 0, self._bytes
            self.refused.update(errors)
            self.evicted.record(response)
            self._unreported.extend(errors.values())
        for other in moved:
            other.send()
        self._notify_waiters()

    def ended(self, line: InsertLine, error: ReplayError) -> None:
        """Notes that the line sends nothing more. The writer goes on with other servers, if there are any."""
        if self._fleet.shards == [line.shard]:
            self._fail(error)
            return
        with self.lock:
            if self._lines.get(line.shard) is line:
                del self._lines[line.shard]
                self._divide()
                self._lost.append(error)
                self._in_flight -= line.in_flight
                self._bytes -= line.bytes_in_flight
                assert self._in_flight >= 0, self._in_flight
        self._notify_waiters(now=True)

    def check(self) -> None:
        """Asserts that all items of the lines count as in flight, with their bytes. Any thread may call this."""
        with self.lock:
            lines = self._lines.values()
            assert self._in_flight >= sum(line.in_flight for line in lines), (self._in_flight, lines)
            assert self._bytes >= sum(line.bytes_in_flight for line in lines), (self._bytes, lines)
            assert self.max_in_a_line * max(1, len(lines)) <= max(self.max_in_flight, len(lines)), len(lines)
            for line in lines:
                line.check()

    @property
    def is_idle(self) -> bool:
        """True if no server has work of this writer."""
        return not any(line.unacknowledged for line in self._lines.values())

    def _has_room(self, item: Item) -> bool:
        """True if the item may be sent now. An item that is larger than `max_bytes` may be sent alone."""
        in_flight = self._in_flight
        nbytes = self._bytes + item.nbytes
        if in_flight < self.max_in_flight and nbytes <= self.max_bytes:
            return True
        # The items of servers that are away do not count, while another server can be reached.
        if self._fleet.up():
            for shard, line in self._lines.items():
                if not shard.is_up:
                    in_flight -= line.in_flight
                    nbytes -= line.bytes_in_flight
        return not in_flight or (in_flight < self.max_in_flight and nbytes <= self.max_bytes)

    def _line_for(self, item: Item) -> InsertLine:
        shard = self._placement.shard_for(item)
        line = self._lines.get(shard)
        if line is None:
            line = InsertLine(self, shard)
            self._lines[shard] = line
            self._divide()
        return line

    def _divide(self) -> None:
        """Divides the bounds among the lines. Call it when the number of lines has changed."""
        lines = max(1, len(self._lines))
        self.max_in_a_line = max(1, self.max_in_flight // lines)
        """The share of each line in `max_in_flight`."""
        self.worth_a_message = min(_FULL, _WORTH_A_MESSAGE * lines)
        """The bytes from which on items do not wait for more items."""
        self.linger = _LINGER * lines
        """Seconds that a few small items wait for more items."""

    def _raise(self) -> None:
        """Raises an error that was not raised yet, if there is one. The caller holds the lock."""
        if self._unreported:
            error = self._unreported[0]
            self._unreported = []
            raise error
        if self._failure is not None:
            raise self._failure
        if self._lost:
            raise self._lost.popleft()

    def _fail(self, error: ReplayError) -> None:
        with self.lock:
            self._failure = self._failure or error
        self._notify_waiters(now=True)

    def _notify_waiters(self, _: Connection | None = None, *, now: bool = False) -> None:
        """Calls the callbacks of callers that wait for room. Each shard that comes or goes calls this, too.

        If all items are acknowledged, or with `now`, also calls the callbacks of callers that wait until they are.
        """
        with self.lock:
            waiting = self._room
            self._room = []
            if now or not self._in_flight:
                waiting += self.awaited_by
                self.awaited_by = []
        for callback in waiting:
            callback()


class InsertLine:
    """The items of one writer for one server.

    An item is either in `_unsent` or in `unacknowledged`, until the server has decided about it.
    """

    def __init__(self, writer: AsyncWriter, shard: Connection) -> None:
        self.shard = shard
        self._writer = writer
        self._lock = writer.lock
        self._unsent: deque[Item] = deque()
        self.unacknowledged: deque[Item] = deque()
        """The items that were sent, in the order in which the server decides about them."""
        self._unsent_bytes = 0
        self._wake = asyncio.Event()
        """Set when `_task` should send, or should see that its stream has ended."""
        self._timer: asyncio.TimerHandle | None = None
        self._awake = False
        """True if the task sends items, or will do so soon."""
        self._lingers = False
        """True if the timer runs, or will be started soon."""
        self._task: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        """Items that are not acknowledged."""
        return len(self._unsent) + len(self.unacknowledged)

    @property
    def bytes_in_flight(self) -> int:
        return self._unsent_bytes + sum(item.nbytes for item in self.unacknowledged)

    def check(self) -> None:
        """Asserts that `_unsent_bytes` are the bytes of the unsent items. The caller holds the lock."""
        nbytes = sum(item.nbytes for item in self._unsent)
        assert self._unsent_bytes == nbytes, (self._unsent_bytes, nbytes)

    def add(self, item: Item) -> Callable[[], None] | None:
        """Takes the item. Returns a function that the caller must call on the event loop, or None.

        The caller holds the lock.
        """
        self._unsent.append(item)
        self._unsent_bytes += item.nbytes
        if self._awake:  # the task sends this item, too
            return None
        if self._worth_sending():
            self._awake = True
            return self.send
        if self.unacknowledged or self._lingers:  # the next acknowledgement, or the timer, sends the item
            return None
        self._lingers = True
        return self.linger

    def wakes(self) -> bool:
        """True if the caller must call `send`: there are unsent items, and they must not wait for more items.

        The caller holds the lock.
        """
        if self._awake or not self._unsent:
            return False
        self._awake = True
        return True

    def send(self) -> None:
        """Sends the unsent items. Call it on the event loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._lingers = False
        self._wake.set()
        if self._task is None:
            self._task = self._writer.loop.create_task(self._run())

    def linger(self) -> None:
        """Sends the unsent items after a short time, so that more items may join them. Call it on the event loop."""
        if self._timer is None:
            self._timer = self._writer.loop.call_later(self._writer.linger, self.send)

    def waiting(self) -> str:
        """The items that the server has not acknowledged, for an error."""
        address = self.shard.address
        items = counted(self.in_flight, "item")
        return f"{address} has not acknowledged {items} yet ({self.bytes_in_flight} bytes)"

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _worth_sending(self) -> bool:
        """True if the unsent items should be sent now, and not after the next acknowledgement.

        A message costs both sides as much as many small items. So small items wait for each other while any server has
        unacknowledged items of this writer. An item is sent at once if no server has any, or if a caller waits until
        all items are acknowledged.
        """
        writer = self._writer
        return (
            bool(writer.awaited_by)
            or self._unsent_bytes >= writer.worth_a_message
            or 2 * len(self._unsent) >= writer.max_in_a_line
            or (not self.unacknowledged and writer.is_idle)
        )

    async def _run(self) -> None:
        writer = self._writer
        try:
            connection = self.shard
            patience = connection.patience(connection.timeout)
            while True:
                await self._wake.wait()  # do not connect before there is something to send
                try:
                    await self._stream(connection, patience)
                except grpc.aio.AioRpcError as error:
                    if self.in_flight:
                        await patience.pause_or_raise(error)
                with self._lock:
                    # Items that were not acknowledged are sent again, before the unsent ones and in the old order.
                    self._unsent.extendleft(reversed(self.unacknowledged))
                    self._unsent_bytes += sum(item.nbytes for item in self.unacknowledged)
                    self.unacknowledged.clear()
                    self._awake = bool(self._unsent)
                    if self._awake:
                        self._wake.set()
                    else:
                        self._wake.clear()
        except ReplayError as error:
            writer.ended(self, error)
        except asyncio.CancelledError:
            # The error is not raised again: the task would keep these frames, and the shared memory that they refer to,
            # until a garbage collection.
            writer.ended(self, ServerClosedError("the writer was closed while it had work to do"))
        except Exception as error:  # a bug. Without this branch, callers would wait for ever
            writer.ended(self, ReplayError(f"the writer failed: {type(error).__name__}: {error}"))
            raise

    async def _stream(self, connection: Connection, patience: Patience) -> None:
        """Sends items and reads acknowledgements until the stream breaks."""
        stream = connection.transport.stream("InsertStream")
        doubting = asyncio.create_task(self._doubt())
        reader = asyncio.create_task(self._read(stream, patience))
        reader.add_done_callback(lambda _: self._wake.set())
        try:
            while not reader.done():
                await self._wake.wait()
                self._wake.clear()
                items = self._next_items(at_once=True)
                while not reader.done() and items:
                    for request in pack_items(items, stream.bytes_per_message):
                        await stream.write(request)
                    items = self._next_items()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader raises the reason
        finally:
            if not self.in_flight:
                await stream.end(reader)
            stream.cancel()
            doubting.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        reader.result()

    async def _doubt(self) -> None:
        """Has a server probed that acknowledges nothing. While it does not answer, new items go to other servers."""
        while True:
            oldest = self.unacknowledged[0] if self.unacknowledged else None
            await asyncio.sleep(LATE_SECONDS)
            if oldest is not None and self.unacknowledged and self.unacknowledged[0] is oldest:
                self.shard.doubt()

    def _next_items(self, *, at_once: bool = False) -> list[Item]:
        """The next items to send; none if they should wait for more items. With `at_once` they do not wait."""
        with self._lock:
            items: list[Item] = []
            if at_once or self._worth_sending():
                count = min(len(self._unsent), ROWS_PER_MESSAGE)
                items = [self._unsent.popleft() for _ in range(count)]
            self._unsent_bytes -= sum(item.nbytes for item in items)
            assert self._unsent_bytes >= 0, self._unsent_bytes
            self.unacknowledged.extend(items)
            self._awake = bool(items)
        return items

    async def _read(self, stream: Stream, patience: Patience) -> None:
        while True:  # a server ends an insert stream only with an error
            response = await stream.read()
            patience.renew()
            with self._lock:
                items = [self.unacknowledged.popleft() for _ in range(response.decided)]
            await self._writer.decided(self, items, response)
            with self._lock:
                if self._unsent and not self._awake:
                    self.linger()
