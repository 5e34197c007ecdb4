"""Backend: the tables, the journal, and the bounds that clients share. All gRPC methods work on one backend.

* Budget: an amount that clients share. No client, and not all of them together, can use more than there is.
* MemoryGuard: says when too little memory is left for more items, before the system kills the server.
* OpenCalls: counts the calls that are open, and ends endless streams.

A client is a connection (gRPC's name of the peer).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from replay_server.config import MAX_ROWS_OUTSTANDING, LimitsSection
from replay_server.errors import busy, deadline
from replay_server.rpc.clients import Clients, Context
from replay_server.storage.journal import Journal
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.waiting import Line, Pending, deadline_at, result_of
from replay_server.telemetry.host import Memory, memories

log = logging.getLogger("replay_server")


class Backend:
    def __init__(self, buffer: ReplayBuffer, limits: LimitsSection, journal: Journal | None) -> None:
        """With a journal no client is told of a change before it is written."""
        self.buffer = buffer
        self.limits = limits
        self.journal = journal
        self.calls = OpenCalls(limits)
        # An item of the largest size must fit, or it could never be received.
        unfinished = max(limits.max_unfinished_bytes, buffer.max_payload_bytes)
        self.unfinished = Budget(unfinished, "bytes of items that are not complete (max_unfinished_bytes)")
        self.waiting = Budget(limits.max_waiting_bytes, "bytes of items that wait for their table (max_waiting_bytes)")
        self.outstanding = Budget(MAX_ROWS_OUTSTANDING, "samples under leases or drawn ahead")
        self.memory = MemoryGuard(limits.memory_share)
        self.clients = Clients(buffer.clock)
        self.draining = False
        """Whether items with new keys are refused. Another thread may set it."""
        self.insert_streams = 0
        """Open now."""
        self.sample_streams = 0
        """Open now."""

    async def durable(self) -> None:
        """Returns when all changes until now are written; at once without a journal."""
        if self.journal is not None:
            await self.journal.durable()


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


class MemoryGuard:
    """Looks at the machine and at the control groups of the process. What is there is kept.

    Inserts are refused until items have left, or others have freed memory.
    """

    def __init__(self, share: float, look: Callable[[], Sequence[Memory]] = memories) -> None:
        """`share` of each memory may be in use; 1: all of it."""
        self._share = share
        self._look = look
        self._why: str | None = None
        self._looked_at = self._trimmed_at = -_TRIM_EVERY

    def why_full(self) -> str | None:
        """Why no more items can be kept; None: they can. What has been received counts already."""
        now = time.monotonic()
        if self._share < 1 and now - self._looked_at >= _LOOK_EVERY:
            self._looked_at, before = now, self._why
            self._why = self._find()
            if self._why and now - self._trimmed_at >= _TRIM_EVERY:
                self._trimmed_at = now
                give_back_freed()
                self._why = self._find()
            if bool(before) != bool(self._why):
                log.warning("%s", self._why or "there is memory again: inserts are accepted")
        return self._why

    def _find(self) -> str | None:
        for memory in self._look():
            reserve = int(memory.limit * (1 - self._share))
            if memory.name == "the machine":
                reserve = min(reserve, _MACHINE_RESERVE)
            if memory.available < reserve:
                return (
                    f"{memory.name} has {memory.available} of {memory.limit} bytes of memory left, and {reserve} stay "
                    f"free ([limits] memory_share): give it more memory, or let tables evict with a lower max_bytes"
                )
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
