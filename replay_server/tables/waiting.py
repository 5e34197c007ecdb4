"""Pending: a request that has to wait, in the lines of its tables, until it may proceed or its deadline passes."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from replay_server.errors import Refused, invalid
from replay_server.tables.meters import BlockedTime

T = TypeVar("T")

ASKS_AGAIN = 10.0
"""If a request has ended without being served, a request that comes within this many seconds continues its wait,
because usually it is the same client that asks again."""


class Pending(Generic[T]):
    """A request that waits. It ends once: with a value, with an error, or because its client went away.

    A request that has ended is in no line.
    """

    def __init__(self, since: float, deadline: float = math.inf) -> None:
        """`since`: the time at which the wait begins. `deadline`: the time at which it ends at the latest. Both are by
        the server's clock."""
        self.since = since
        self.deadline = deadline
        self.done = False
        """True if the request has ended."""
        self.ahead = False
        """True while the request has its place in the line but no client waits for it yet, because the client has sent
        it ahead."""
        self.on_done: Callable[[], None] | None = None
        """Called when the request ends with a value or an error."""
        self.lines: list[Line[Any]] = []
        """The lines in which the request waits."""
        self.value: T | None = None
        """The result, if the request ended without an error; None until then."""
        self._error: Refused | None = None

    def finish(self, value: T) -> None:
        """Ends the request with this result."""
        self.value = value
        self._end(served=True)

    def fail(self, error: Refused) -> None:
        """Ends the request with this error."""
        self._error = error
        self._end(served=False)

    def abandon(self) -> None:
        """Ends the request without calling `on_done`, because its client went away."""
        assert not self.done
        self.done = True
        self._leave(served=False)

    def result(self) -> T:
        """The result of the request, which must have ended. Raises its error if it failed."""
        assert self.done
        if self._error is not None:
            raise self._error
        return self.value  # type: ignore[return-value]

    def _end(self, served: bool) -> None:
        """Ends the request: leaves all lines, and then calls `on_done`. The caller has set the value or the error."""
        assert not self.done
        self.done = True
        self._leave(served)
        if self.on_done is not None:
            self.on_done()

    def _leave(self, served: bool) -> None:
        """Leaves all lines. `served`: True if the request ends with a result. Then each line notes that it served a
        request."""
        for line in self.lines:
            line.leave(self)
            if served:
                line.moved()
        self.lines.clear()


def deadline_at(now: float, timeout: float | None) -> float:
    """The end of a wait of `timeout` seconds that begins at `now`. None: the wait never ends."""
    if timeout is None:
        return math.inf
    if not timeout >= 0:  # also true for NaN
        raise invalid(f"timeout must be a number of seconds from 0, not {timeout}")
    return now + timeout


async def result_of(
    pending: Pending[T], now: float, time_out: Callable[[Any], None], abandon: Callable[[Any], None]
) -> T:
    """Waits until `pending` has ended, and returns its result or raises its error.

    Calls `time_out(pending)` at the deadline, which must end the request. Calls `abandon(pending)` if this task is
    cancelled.
    """
    remaining = pending.deadline - now
    if not pending.done and remaining <= 0:
        time_out(pending)
    if not pending.done:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            # A cancellation of this task cancels `done` at once. `pending` may still end before the task runs again.
            if not done.done():
                done.set_result(None)

        pending.on_done = wake
        timer = None
        if remaining < math.inf:
            timer = loop.call_later(remaining, time_out, pending)  # ends `pending`, which calls `wake`
        try:
            await done
        except asyncio.CancelledError:
            abandon(pending)
            raise
        finally:
            if timer is not None:
                timer.cancel()
    return pending.result()


P = TypeVar("P", bound=Pending[Any])


class Line(Generic[P]):
    """Pending requests, first come first served. A request that ends leaves its lines.

    A client whose request ends at its deadline usually asks again. A series of such requests is one wait, so
    `standstill` counts from the first of them, and not from the last. Requests that are `ahead` do not count as waits.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pending: OrderedDict[int, P] = OrderedDict()
        """The requests by `id` of the object, from the first to the last."""
        self.moved_at = -math.inf
        """The time at which a request was served last; -inf: none was."""
        self._still_since = -math.inf
        """The time since which requests wait and no request was served."""
        self._left_at = -math.inf
        """The time at which the last awaited request left the line without being served; -inf: there was none since a
        request was served."""
        self.awaited = 0
        """The number of requests in the line that a client waits for: all but those that are `ahead`."""
        self.blocked = BlockedTime(clock())
        """Measures the time in which `awaited` is above 0."""

    def join(self, pending: P) -> None:
        """Adds a request at the end of the line."""
        self._pending[id(pending)] = pending
        pending.lines.append(self)
        assert not pending.done, "a request that has ended waits again"
        if not pending.ahead:
            self._add_awaited(pending.since)

    def set_ahead(self, pending: P, ahead: bool) -> None:
        """Sets `ahead` of `pending`, which is in this line."""
        if ahead == pending.ahead:
            return
        if ahead:
            self._change_awaited(-1, self._clock())
        else:
            self._add_awaited(self._clock())
        pending.ahead = ahead

    def _add_awaited(self, since: float) -> None:
        """Counts one more request that a client waits for, from the time `since`."""
        # Other requests are awaited already, or the last awaited request has left just now without being served.
        continues_wait = self.awaited > 0 or since - self._left_at <= ASKS_AGAIN
        if not continues_wait:
            self._still_since = since
        self._change_awaited(1, since)

    def _change_awaited(self, change: int, now: float) -> None:
        """Adds `change`, which is 1 or -1, to the number of awaited requests."""
        before = self.awaited
        self.awaited += change
        assert 0 <= self.awaited <= len(self._pending), (self.awaited, len(self._pending))
        first_begins = before == 0
        last_ended = self.awaited == 0
        if first_begins or last_ended:
            self.blocked.set(self.awaited > 0, now)

    def leave(self, pending: P) -> None:
        """Removes a request from the line."""
        del self._pending[id(pending)]
        if not pending.ahead:
            now = self._clock()
            self._change_awaited(-1, now)
            if not self.awaited:
                self._left_at = now  # if the request was served, `moved` is called next and resets this

    def moved(self) -> None:
        """Notes that a request was served, whether it had waited in the line or not."""
        self._still_since = self.moved_at = self._clock()
        self._left_at = -math.inf  # no request has left the line unserved since this one was served

    @property
    def still_since(self) -> float | None:
        """The time since which requests wait and no request was served.

        None: no request waits, and no client is expected to ask again, because no request has ended without being
        served in the last ASKS_AGAIN seconds.
        """
        if self.awaited or self._clock() - self._left_at <= ASKS_AGAIN:
            return self._still_since
        return None

    @property
    def standstill(self) -> float:
        """Seconds since `still_since`; 0.0: the line does not stand still."""
        since = self.still_since
        if since is None:
            return 0.0
        return max(0.0, self._clock() - since)

    @property
    def head(self) -> P | None:
        """The first request of the line; None: the line is empty."""
        return next(iter(self._pending.values()), None)

    def check(self) -> None:
        """Asserts that all requests in the line wait, have the line in `lines`, and are counted."""
        for pending in self._pending.values():
            assert not pending.done, pending
            assert self in pending.lines, pending
        awaited = sum(not pending.ahead for pending in self._pending.values())
        assert self.awaited == awaited, (self.awaited, awaited)
        assert (self.blocked.since is not None) == (awaited > 0), (self.blocked.since, awaited)

    def ahead_of(self, pending: P) -> int:
        """The number of requests in the line before `pending`."""
        return list(self._pending).index(id(pending))

    def __iter__(self) -> Iterator[P]:
        return iter(list(self._pending.values()))  # a copy, because requests may leave the line during a loop

    def __len__(self) -> int:
        return len(self._pending)
