"""Limits: the objects that all gRPC methods share, and the bounds for all clients together.

* Backend: holds these objects, such as the tables, the clients and the budgets.
* Budget: an amount that clients share. All clients together cannot use more than the amount.
* OpenCalls: counts the calls that are open, and ends endless streams when the server stops.

A client in this module is a connection, and its name is gRPC's name of the peer.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from replay_server.config import MAX_BYTES_READ, MAX_ROWS_OUTSTANDING, LimitsConfig
from replay_server.errors import Code, Reason, Refused, busy, deadline
from replay_server.rpc.auth import REVOKED
from replay_server.rpc.clients import Clients
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.extensions.forwarding import Copying
from replay_server.tables.waiting import Line, Pending, deadline_at, result_of
from replay_server.telemetry.host import MemoryGuard


class Backend:
    """The objects that all gRPC methods share."""

    def __init__(
        self, buffer: ReplayBuffer, limits: LimitsConfig, written: Callable[[], Awaitable[None]] | None
    ) -> None:
        """`written` (Journal.durable) returns when all changes until now are written; None: nothing is written."""
        self.buffer = buffer
        self.limits = limits
        self.is_durable = written is not None
        self._written = written
        self.calls = OpenCalls(limits)
        # The budgets for receiving and for sending must hold an item of the largest size.
        unfinished_bytes = max(limits.max_unfinished_bytes, buffer.max_payload_bytes)
        reading_bytes = max(MAX_BYTES_READ, buffer.max_payload_bytes)
        self.unfinished = Budget(unfinished_bytes, "bytes of items that are not complete (max_unfinished_bytes)")
        self.waiting = Budget(limits.max_waiting_bytes, "bytes of items that wait for their table (max_waiting_bytes)")
        self.outstanding = Budget(MAX_ROWS_OUTSTANDING, "samples under leases or drawn ahead")
        self.reading = Budget(reading_bytes, "bytes of items that readers are sent")
        # If memory is short, the guard calls `_release_copies`. If that does not suffice, inserts are refused.
        self.memory = MemoryGuard(limits.memory_share, self._release_copies)
        self.clients = Clients(buffer.clock)
        self.draining = False
        """True while items with new keys are refused. Another thread may set it."""

    async def durable(self) -> None:
        """Returns when all changes until now are written, or at once if items are in memory only."""
        if self._written is not None:
            await self._written()

    def _release_copies(self) -> None:
        """Drops the items that only tables of copies (`copy_to`) hold."""
        copying = Copying.of(self.buffer)
        if copying is not None:  # None: no table has `copy_to`
            copying.free(math.inf)  # as many bytes as possible


class PendingShare(Pending[int]):
    """The request of a client that waits for `n` more of a budget. Its result is `n`."""

    def __init__(self, client: str, n: int, since: float, deadline: float) -> None:
        super().__init__(since, deadline)
        self.client = client
        self.n = n


class Budget:
    """An amount that clients share. All clients together use at most `total`.

    * A client that already uses some of the budget may use at most half of the budget. A client that uses nothing may
      take more than half at once, because otherwise a request of more than half could never be served.
    * Waiting requests are served first come, first served. The exception is a request that waits only because its own
      client would then use more than half: it does not hold up the requests behind it.
    """

    def __init__(self, total: int, name: str) -> None:
        """`name` completes "N of M ...", for example "bytes of items that are not complete (max_unfinished_bytes)"."""
        self.total = total
        self.used = 0
        """The amount that all clients together use, which is the sum of `_used_by`."""
        self._name = name
        self._used_by: dict[str, int] = {}
        """The amount that each client uses. Clients that use nothing are left out."""
        self._line: Line[PendingShare] = Line(time.monotonic)
        """The requests of `take_in_turn` that wait."""

    def why_not(self, client: str, n: int) -> str | None:
        """Returns the reason why the client cannot have n more; None if it can."""
        if self.used + n > self.total:
            return f"{self.used} of {self.total} {self._name} are in use, and {n} more were asked for"
        used = self._used_by.get(client, 0)
        if used and used + n > self.total // 2:
            return f"this client has {used} of {self.total} {self._name} in use, and no client may have over half"
        return None

    def acquire(self, client: str, n: int) -> None:
        """Takes n more for the client, without a wait. Raises Refused (RESOURCE_EXHAUSTED) if it cannot have n more."""
        why = self.why_not(client, n)
        if why is not None:
            raise busy(f"{why}; try again later")
        self._acquire(client, n)

    def release(self, client: str, n: int) -> None:
        """Gives back n of the amount that the client uses, and serves the waiting requests that then fit."""
        self.used -= n
        left = self._used_by.pop(client, 0) - n
        assert left >= 0, f"{client} gives back {-left} {self._name} more than it has"
        assert 0 <= self.used <= self.total, (self.used, self.total)
        if left:
            self._used_by[client] = left
        self._serve()

    @contextmanager
    def held(self, client: str, n: int) -> Iterator[None]:
        """Takes n more for the client, and gives n back when the block ends. Raises Refused as `acquire` does."""
        self.acquire(client, n)
        try:
            yield
        finally:
            self.release(client, n)

    async def take_in_turn(self, client: str, n: int, timeout: float | None) -> None:
        """Waits in line until the client can have n more, and takes n. The caller gives n back by `release`.

        Raises Refused (DEADLINE_EXCEEDED) after `timeout` seconds; None: waits without an end.
        """
        now = time.monotonic()
        pending = PendingShare(client, n, since=now, deadline=deadline_at(now, timeout))
        self._line.join(pending)
        self._serve()
        await result_of(pending, now, self._time_out, self._abandon)

    def _time_out(self, pending: PendingShare) -> None:
        """Refuses a request whose deadline has passed, and serves the requests that it held up."""
        if not pending.done:
            why = self.why_not(pending.client, pending.n)
            if why is None:  # the client could have n more, but another request in front of this one did not fit
                why = f"others came first for the {self.total} {self._name}"
            pending.fail(deadline(why))
            self._serve()

    def _abandon(self, pending: PendingShare) -> None:
        """Ends a request whose client went away, and serves the requests that it held up."""
        if not pending.done:
            pending.abandon()
            self._serve()
        elif pending.value is not None:  # it was served just before its client went away, so the client gives n back
            self.release(pending.client, pending.n)

    def _serve(self) -> None:
        """Serves all requests in the line that can be served now."""
        for pending in self._line:
            if self.used + pending.n > self.total:
                break  # first come, first served: so smaller requests behind this one wait, too
            # If the client would use more than half, its request stays in the line, and those behind it are served.
            if self.why_not(pending.client, pending.n) is None:
                self._acquire(pending.client, pending.n)
                pending.finish(pending.n)

    def check(self) -> None:
        """Asserts that `used` is the sum of what clients use, and that the first request in the line must wait."""
        assert self.used == sum(self._used_by.values()), (self.used, self._used_by)
        assert 0 <= self.used <= self.total, (self.used, self.total)
        assert all(used > 0 for used in self._used_by.values()), self._used_by
        self._line.check()
        first = self._line.head
        if first is not None:
            assert self.why_not(first.client, first.n) is not None, first.n

    def _acquire(self, client: str, n: int) -> None:
        """Counts n more as used by the client. The caller has checked with `why_not` that the client can have it."""
        assert n >= 0, n
        self.used += n
        assert self.used <= self.total, (self.used, self.total)
        if n:
            self._used_by[client] = self._used_by.get(client, 0) + n


class OpenCalls:
    """Counts the open calls, refuses calls beyond `max_calls`, and ends endless streams when the server stops."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self.open: Counter[str] = Counter()
        """The number of open calls of each method."""
        self._endless: set[asyncio.Task[Any]] = set()
        """The tasks of the open streams that last until their clients end them."""
        self._closing = False
        """True if the server stops, and has cancelled the endless streams."""

    def close(self) -> None:
        """Ends all endless streams, because the server stops."""
        self._closing = True
        for task in self._endless:
            task.cancel()

    @contextmanager
    def counted(self, method: str, endless: bool) -> Iterator[None]:
        """Counts a call of the method as open until the block ends. The block must run the call in the current task.

        Raises Refused if `max_calls` are open. The server itself cancels a call whose token was revoked, and endless
        streams when it stops. Then this raises Refused in the place of CancelledError, so that the client gets the
        reason.
        """
        count = self.open.total()
        if count >= self._limits.max_calls:
            raise busy(f"{count} calls are open, which is as many as this server takes (max_calls); try later")
        self.open[method] += 1
        task = asyncio.current_task()
        assert task is not None
        if endless:
            self._endless.add(task)
        try:
            yield
        except asyncio.CancelledError as error:  # gRPC would not tell the client why the call was cancelled
            if error.args == (REVOKED,):  # `Authorizer.end_revoked` cancels calls with this argument
                raise Refused(Code.UNAUTHENTICATED, REVOKED) from None
            if endless and self._closing:
                # After UNAVAILABLE, a client tries again until a server is back, or until the timeout of its call. If a
                # call has no timeout, this may last for ever. The reason CLOSING tells the client to end such a call.
                raise Refused(Code.UNAVAILABLE, "the server is shutting down", Reason.CLOSING) from None
            raise
        finally:
            self.open[method] -= 1
            assert self.open[method] >= 0, method
            self._endless.discard(task)
