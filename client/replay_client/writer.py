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
from replay_client.waits import Deadline, Patience
from replay_protos import replay_pb2 as pb
from replay_protos.words import counted

if TYPE_CHECKING:
    from replay_client.shards.fleet import Fleet
    from replay_client.shards.placing import Placement

_WORTH_A_MESSAGE = 1 << 18
"""Unsent items with at least this many payload bytes are sent at once. Fewer bytes wait for more items, to share a
message with them. The number is multiplied by the number of servers to which the writer sends, up to _FULL, because
each of several servers gets only a part of the items."""
_FULL = 1 << 20
"""Payload bytes that fill a message."""
_LINGER = 0.002
"""Seconds that the timer of a line lets unsent items wait for more items. The number is multiplied by the number of
servers to which the writer sends, so that several servers together get no more messages than one server would."""


class AsyncWriter(AbstractAsyncContextManager["AsyncWriter"]):
    """Inserts items without waiting for each acknowledgement.

    `AsyncReplayClient.writer()` makes a writer, for `async with`. The end of the `async with` block flushes the writer,
    unless the block raises.
    """

    # The blocking writer uses an AsyncWriter from other threads. Therefore:
    #
    # * Any thread may call `offer`, which never waits. If there is no room, `offer` keeps a callback of its caller. The
    #   writer calls the callback when the caller should offer the item again, in most cases on the event loop.
    # * `lock` guards the queues and counters. No code waits while it holds the lock.
    #
    # Each server has a line (`InsertLine`). `max_in_flight` and `max_bytes` bound all lines together. Items that a
    # server has not acknowledged stay in its line while the server is away. These items count as in flight only while
    # all servers are away. As long as another server can be reached, they do not count, so that new items can be sent
    # to the other server.

    def __init__(
        self,
        fleet: Fleet | OneServer,
        placement: Placement | OneServer,
        keys: KeySequence,
        max_in_flight: int,
        max_bytes: int,
        timeout: float | None,
    ) -> None:
        """`timeout`: the most seconds that each item may wait for its tables; None: for ever."""
        if max_in_flight < 1 or max_bytes < 1:
            raise InvalidRequestError(f"max_in_flight {max_in_flight} and max_bytes {max_bytes} must be at least 1")
        self.timeout = timeout
        self.max_in_flight = max_in_flight
        self.max_bytes = max_bytes
        self.refused: dict[int, ReplayError] = {}
        """Key of an item that a server refused -> the reason."""
        self.evicted = EvictedItems()
        """Key of an item that full tables removed as soon as it was inserted -> the names of these tables.

        The mapping has the newest 65,536 of these items. Such a removal is no error, because a pool that keeps only the
        best items does not keep every new item.
        """
        self.keys = keys
        """The keys for items without a key of their own."""
        self.lock = threading.Lock()
        self.loop = asyncio.get_running_loop()
        self._fleet = fleet
        self._placement = placement
        self._lines: dict[Connection, InsertLine] = {}
        """The line of each server for which this writer has had an item."""
        self._divide()
        self._in_flight = 0
        """The number of items in all lines."""
        self._bytes = 0
        """The payload bytes of the items in all lines."""
        self._unreported: list[ReplayError] = []
        """The errors of refused items that no call has raised yet."""
        self._lost: deque[ReplayError] = deque()
        """The errors that ended the lines of some servers, while the lines of other servers go on. A call that raises
        such an error removes the error. The items of an ended line are lost: nobody knows whether the server has
        inserted them."""
        self._failure: ReplayError | None = None
        """The reason why this writer sends nothing more; None: it still sends."""
        self._room: list[Callable[[], None]] = []
        """The callbacks of callers that wait for room."""
        self.awaited_by: list[Callable[[], None]] = []
        """The callbacks of callers that wait until all items are acknowledged. While there is such a caller, items are
        sent at once."""
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
        """Queues a group and returns its key.

        Waits first if `max_in_flight` items or `max_bytes` bytes are in flight, until there is room for the group.
        If earlier inserts failed and no call has raised their errors yet, raises the first of these errors and does not
        queue this group. `refused` has all errors. `AsyncReplayClient.insert` explains `key` and `tags`.
        """
        if key is None:
            key = next(self.keys)
        item = Item.of(key, group, priorities, policy_version, self.timeout, permits, tags)
        if not self.offer(item):
            room = asyncio.Event()
            # If `offer` finds no room, it keeps `room.set`. The writer calls `room.set` when there may be room.
            while not self.offer(item, room.set):
                await room.wait()
                room.clear()
        return item.key

    async def flush(self, timeout: Timeout = DEFAULT) -> None:
        """Waits until the servers have acknowledged all items. If items are inserted meanwhile, waits for these too.

        Raises the first error of an item that no call has raised yet. Raises DeadlineExceededError if not all items are
        acknowledged within `timeout` seconds.
        """
        deadline = Deadline(seconds_of(timeout, self._fleet.timeout))
        drained = asyncio.Event()
        while not self._drain(drained.set):
            try:
                async with asyncio.timeout(deadline.seconds):
                    await drained.wait()
            except TimeoutError:
                with self.lock:
                    lines = [line.waiting() for line in self._lines.values() if line.in_flight]
                reason = "; ".join(lines) or "not all shards have been tried yet"
                raise DeadlineExceededError(reason) from None
            drained.clear()
        self.check()

    def offer(self, item: Item, when_room: Callable[[], None] | None = None) -> bool:
        """Queues the item and returns True if there is room. Any thread may call this.

        If there is no room, returns False, and calls `when_room` once when the caller should offer the item again.
        Raises an error of earlier items that no call has raised yet.
        """
        with self.lock:
            self._raise()
            # `decided` is True once the fleet has tried to reach each server. Before that, nothing has room, because
            # the items of a server that is only slow to connect would be sent to another server.
            has_room = self._fleet.decided and self._has_room(item)
            if not has_room:
                if when_room is not None:
                    self._room.append(when_room)
                return False
            self._in_flight += 1
            self._bytes += item.nbytes
            wake_line = self._line_for(item).add(item)
        if wake_line is not None:
            self.loop.call_soon_threadsafe(wake_line)
        return True

    def _drain(self, when_drained: Callable[[], None]) -> bool:
        """Sends all unsent items. Returns True if no item was in flight, so that there is nothing to wait for.

        Otherwise returns False, and calls `when_drained` once when all items are acknowledged, or when an error ends a
        line. If no item is in flight or a line has ended, raises an error that no call has raised yet, if there is one.
        """
        with self.lock:
            if not self._in_flight or self._failure is not None or self._lost:
                self._raise()  # always raises, except if no item is in flight and no error is left to raise
                return True
            self.awaited_by.append(when_drained)
            lines_to_send = [line for line in self._lines.values() if line.must_send()]
        for line in lines_to_send:
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
        """Notes that the server has decided about these items of the line: it has inserted or refused each.

        Sends the items that a draining server has refused to other servers, if there are any. If an item was inserted
        on another shard than the one that granted its permit, releases the permit (`settle`).
        """
        errors = {error.key: error_of(error.code, error.message, error.reason) for error in response.errors}
        for item in items:
            if item.moved and item.key not in errors:  # inserted on another shard than the one that granted the permit
                await self._placement.settle(item)
        other_lines: set[InsertLine] = set()
        with self.lock:
            for item in items:
                is_draining = isinstance(errors.get(item.key), ShardDrainingError)
                # `forget` returns True if another server may get the item. The item then stays in flight.
                if is_draining and self._placement.forget(item, line.shard):
                    del errors[item.key]
                    other_line = self._line_for(item)
                    other_line.add(item)  # ignore the returned callback, because the last loop below calls `send`
                    other_lines.add(other_line)
                else:
                    self._in_flight -= 1
                    self._bytes -= item.nbytes
            assert self._in_flight >= 0, self._in_flight
            assert self._bytes >= 0, self._bytes
            self.refused.update(errors)
            self.evicted.record(response)
            self._unreported.extend(errors.values())
        for other_line in other_lines:
            other_line.send()
        self._notify_waiters()

    def ended(self, line: InsertLine, error: ReplayError) -> None:
        """Notes that the line sends nothing more, because of `error`.

        If the client has other servers, the writer goes on with them, and the items of the line are lost.
        """
        if self._fleet.shards == [line.shard]:  # the client has no other server
            self._fail(error)
            return
        with self.lock:
            is_open = self._lines.get(line.shard) is line  # False if this was called for the line before
            if is_open:
                del self._lines[line.shard]  # a later item for this server will begin a new line
                self._divide()
                self._lost.append(error)
                self._in_flight -= line.in_flight
                self._bytes -= line.bytes_in_flight
                assert self._in_flight >= 0, self._in_flight
        self._notify_waiters(now=True)

    def check(self) -> None:
        """Asserts that all items of the lines count as in flight, with their bytes, and that `_divide` was called.

        The shares of the lines sum to at most `max_in_flight`, unless there are more lines than that, because the share
        of a line is at least 1. Any thread may call this.
        """
        with self.lock:
            lines = self._lines.values()
            assert self._in_flight >= sum(line.in_flight for line in lines), (self._in_flight, lines)
            assert self._bytes >= sum(line.bytes_in_flight for line in lines), (self._bytes, lines)
            assert self.max_in_a_line * max(1, len(lines)) <= max(self.max_in_flight, len(lines)), len(lines)
            for line in lines:
                line.check()

    @property
    def is_idle(self) -> bool:
        """True if each server has decided about all items that this writer has sent to it."""
        return not any(line.unacknowledged for line in self._lines.values())

    def _has_room(self, item: Item) -> bool:
        """True if the item may join its line now.

        If no other item counts as in flight, the item may join even if it is larger than `max_bytes`.
        """
        in_flight = self._in_flight
        bytes_with_item = self._bytes + item.nbytes
        if in_flight < self.max_in_flight and bytes_with_item <= self.max_bytes:
            return True
        # While any server can be reached, the items of servers that are away do not count.
        if self._fleet.up():
            for shard, line in self._lines.items():
                if not shard.is_up:
                    in_flight -= line.in_flight
                    bytes_with_item -= line.bytes_in_flight
        is_alone = in_flight == 0
        return is_alone or (in_flight < self.max_in_flight and bytes_with_item <= self.max_bytes)

    def _line_for(self, item: Item) -> InsertLine:
        """Chooses the server for the item, and returns its line. Makes a line if the server has none.

        The caller holds the lock.
        """
        shard = self._placement.shard_for(item)
        line = self._lines.get(shard)
        if line is None:
            line = InsertLine(self, shard)
            self._lines[shard] = line
            self._divide()
        return line

    def _divide(self) -> None:
        """Divides the bounds among the lines. Call it when the number of lines has changed."""
        line_count = max(1, len(self._lines))
        self.max_in_a_line = max(1, self.max_in_flight // line_count)
        """The share of each line in `max_in_flight`."""
        self.worth_a_message = min(_FULL, _WORTH_A_MESSAGE * line_count)
        """If the unsent items of a line have at least this many payload bytes, they do not wait for more items."""
        self.linger = _LINGER * line_count
        """Seconds that a few small items wait for more items."""

    def _raise(self) -> None:
        """Raises an error that no call has raised yet, if there is one. The caller holds the lock."""
        if self._unreported:
            error = self._unreported[0]
            self._unreported = []  # only the first error is raised, because `refused` has the others
            raise error
        if self._failure is not None:
            raise self._failure
        if self._lost:
            raise self._lost.popleft()

    def _fail(self, error: ReplayError) -> None:
        """Makes all later calls of the writer raise this error. If `_fail` was called before, the first error stays."""
        with self.lock:
            self._failure = self._failure or error
        self._notify_waiters(now=True)

    def _notify_waiters(self, _: Connection | None = None, *, now: bool = False) -> None:
        """Calls the callbacks of all callers that wait for room.

        If all items are acknowledged, also calls the callbacks in `awaited_by`. With `now`, calls these callbacks even
        if items are in flight, so that their callers notice an error.

        The fleet calls this method, too, with the shard as its argument, when a shard becomes reachable or unreachable.
        Then there may be more room, because the items of shards that are away may not count.
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

    An item is either in `_unsent` or in `unacknowledged`, until the server has decided about it. A task sends the
    items. A few small items do not wake the task at once. They wait for the next acknowledgement, or for a timer, so
    that more items share their message.
    """

    def __init__(self, writer: AsyncWriter, shard: Connection) -> None:
        self.shard = shard
        """The server of this line."""
        self._writer = writer
        self._lock = writer.lock
        self._unsent: deque[Item] = deque()
        self.unacknowledged: deque[Item] = deque()
        """The items that were sent, in the order in which the server decides about them."""
        self._unsent_bytes = 0
        """The payload bytes of the items in `_unsent`."""
        self._wake = asyncio.Event()
        """Set when `_task` should send, or should notice that its stream has ended."""
        self._timer: asyncio.TimerHandle | None = None
        """The timer that calls `send` for items that wait for more items."""
        self._awake = False
        """True if the task sends items now, or a call of `send` is scheduled."""
        self._lingers = False
        """True from the time when `add` returns `linger` until the next `send`. Until then, `add` need not return
        `linger` again."""
        self._task: asyncio.Task[None] | None = None
        """The task that runs `_run`; None before the first `send`."""

    @property
    def in_flight(self) -> int:
        """The number of items that are not acknowledged."""
        return len(self._unsent) + len(self.unacknowledged)

    @property
    def bytes_in_flight(self) -> int:
        """The payload bytes of the items that are not acknowledged."""
        return self._unsent_bytes + sum(item.nbytes for item in self.unacknowledged)

    def check(self) -> None:
        """Asserts that `_unsent_bytes` is the sum of the bytes of the unsent items. The caller holds the lock."""
        nbytes = sum(item.nbytes for item in self._unsent)
        assert self._unsent_bytes == nbytes, (self._unsent_bytes, nbytes)

    def add(self, item: Item) -> Callable[[], None] | None:
        """Adds the item to the unsent ones, and returns the method that the caller must then call on the event loop.

        This is `send` or `linger`. None: the caller need not call anything, because the item will be sent without that.
        The caller holds the lock.
        """
        self._unsent.append(item)
        self._unsent_bytes += item.nbytes
        if self._awake:  # the task sends this item, too
            return None
        if self._worth_sending():
            self._awake = True
            return self.send
        if self.unacknowledged:  # the next acknowledgement starts the timer
            return None
        if self._lingers:  # the timer runs, or a call of `linger` is scheduled
            return None
        self._lingers = True
        return self.linger

    def must_send(self) -> bool:
        """Returns True if the caller must call `send`, because there are unsent items and the task does not send yet.

        Then also sets `_awake`, so that no other caller calls `send` for these items. The caller holds the lock.
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
        """A sentence for an error: how many items the server has not acknowledged."""
        address = self.shard.address
        items = counted(self.in_flight, "item")
        return f"{address} has not acknowledged {items} yet ({self.bytes_in_flight} bytes)"

    async def close(self) -> None:
        """Ends the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _worth_sending(self) -> bool:
        """True if the unsent items should be sent now, and not after the next acknowledgement.

        A message costs both sides as much as many small items. So small items wait for each other while any server has
        unacknowledged items of this writer. They are sent at once in any of these cases:

        * No server has unacknowledged items of this writer.
        * A caller waits until all items are acknowledged.
        * The payload bytes of the unsent items are worth a message (`worth_a_message`).
        * The unsent items are at least half of the line's share of `max_in_flight`.
        """
        writer = self._writer
        return (
            bool(writer.awaited_by)
            or self._unsent_bytes >= writer.worth_a_message
            or 2 * len(self._unsent) >= writer.max_in_a_line
            or (not self.unacknowledged and writer.is_idle)
        )

    async def _run(self) -> None:
        """Sends the items of the line over one stream after another, until an error ends the attempts."""
        writer = self._writer
        try:
            connection = self.shard
            patience = connection.patience(connection.timeout)
            while True:
                await self._wake.wait()  # connect only when there is something to send
                try:
                    await self._stream(connection, patience)
                except grpc.aio.AioRpcError as error:
                    # If no item is in flight, the broken stream loses nothing. Then the next item connects again.
                    if self.in_flight:
                        await patience.pause_or_raise(error)  # raises if no other attempt follows
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
            # Do not raise the error again. Otherwise the task would keep the stack frames of the error, and the shared
            # memory to which these frames refer, until a garbage collection.
            writer.ended(self, ServerClosedError("the writer was closed while it had work to do"))
        except Exception as error:  # a bug of this package. Without this branch, callers would wait for ever
            writer.ended(self, ReplayError(f"the writer failed: {type(error).__name__}: {error}"))
            raise

    async def _stream(self, connection: Connection, patience: Patience) -> None:
        """Sends items and reads acknowledgements over one stream. Raises AioRpcError when the stream has ended."""
        stream = connection.transport.stream("InsertStream")
        doubting = asyncio.create_task(self._doubt())
        reader = asyncio.create_task(self._read(stream, patience))
        reader.add_done_callback(lambda _: self._wake.set())  # when the stream has ended, this ends the wait below
        try:
            while not reader.done():
                await self._wake.wait()
                self._wake.clear()
                items = self._next_items(at_once=True)
                # While a message is written, more items arrive. Send them too, unless they should wait.
                while not reader.done() and items:
                    for request in pack_items(items, stream.bytes_per_message):
                        await stream.write(request)
                    items = self._next_items()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # `reader.result()` below raises the reason
        finally:
            if not self.in_flight:  # the server has decided about all items, so the stream can end in good order
                await stream.end(reader)
            stream.cancel()  # does nothing to a stream that has ended
            doubting.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        reader.result()  # raises the reason why the stream ended

    async def _doubt(self) -> None:
        """Makes the client probe the server whenever it has acknowledged nothing for LATE_SECONDS. Runs as a task.

        If the server does not answer the probes, new items are sent to other servers.
        """
        while True:
            oldest = self.unacknowledged[0] if self.unacknowledged else None
            await asyncio.sleep(LATE_SECONDS)
            if oldest is not None and self.unacknowledged and self.unacknowledged[0] is oldest:
                self.shard.doubt()

    def _next_items(self, *, at_once: bool = False) -> list[Item]:
        """Moves the next items to send from `_unsent` to `unacknowledged`, and returns them.

        Returns an empty list if the unsent items should wait for more items. With `at_once`, no item waits.
        """
        with self._lock:
            items: list[Item] = []
            if at_once or self._worth_sending():
                count = min(len(self._unsent), ROWS_PER_MESSAGE)
                items = [self._unsent.popleft() for _ in range(count)]
            self._unsent_bytes -= sum(item.nbytes for item in items)
            assert self._unsent_bytes >= 0, self._unsent_bytes
            self.unacknowledged.extend(items)
            self._awake = bool(items)  # with nothing to send, the task waits until it is woken
        return items

    async def _read(self, stream: Stream, patience: Patience) -> None:
        """Reads acknowledgements until the stream ends, as a task. Then raises AioRpcError, even if all went well."""
        while True:
            response = await stream.read()
            patience.renew()  # the server answers, so the timeout and the pauses begin anew
            with self._lock:
                # `response.decided` is the number of items about which the server has decided, in the order of sending.
                items = [self.unacknowledged.popleft() for _ in range(response.decided)]
            await self._writer.decided(self, items, response)
            with self._lock:
                # Items that waited for this acknowledgement now wait for the timer.
                if self._unsent and not self._awake:
                    self.linger()
