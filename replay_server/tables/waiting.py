"""Pending: a request that has to wait, in the lines of its tables, until it may proceed or its deadline passes."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from replay_server.errors import Refused, invalid

T = TypeVar("T")


class Pending(Generic[T]):
    """A request that waits. It ends once: with a value, with an error, or because its client went away."""

    def __init__(self, since: float, deadline: float = math.inf) -> None:
        self.since = since
        self.deadline = deadline
        self.done = False
        self.on_done: Callable[[], None] | None = None
        self.lines: list[Line[Any]] = []
        """The lines in which it waits."""
        self.value: T | None = None
        """The result, if it ended without an error."""
        self._error: Refused | None = None

    def finish(self, value: T) -> None:
        self.value = value
        self._end()

    def fail(self, error: Refused) -> None:
        self._error = error
        self._end()

    def abandon(self) -> None:
        """The client went away, so `on_done` is not called."""
        self.done = True
        self._leave()

    def result(self) -> T:
        assert self.done
        if self._error is not None:
            raise self._error
        return self.value  # type: ignore[return-value]

    def _end(self) -> None:
        assert not self.done
        self.done = True
        self._leave()
        if self.on_done is not None:
            self.on_done()

    def _leave(self) -> None:
        for line in self.lines:
            line.leave(self)
        self.lines.clear()


def deadline_at(now: float, timeout: float | None) -> float:
    """When a wait of `timeout` seconds that begins at `now` ends; a timeout of None never ends."""
    if timeout is None:
        return math.inf
    if not timeout >= 0:
        raise invalid(f"timeout must be a number of seconds from 0, not {timeout}")
    return now + timeout


async def result_of(
    pending: Pending[T], now: float, time_out: Callable[[Any], None], abandon: Callable[[Any], None]
) -> T:
    """The result of `pending`. Calls `time_out` at its deadline, and `abandon` if the caller is cancelled."""
    remaining = pending.deadline - now
    if not pending.done and remaining <= 0:
        time_out(pending)
    if not pending.done:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not done.done():
                done.set_result(None)

        pending.on_done = wake
        timer = loop.call_later(remaining, time_out, pending) if remaining < math.inf else None
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
    """Pending requests, first come first served. A request that ends leaves its lines."""

    def __init__(self) -> None:
        self._pending: OrderedDict[int, P] = OrderedDict()

    def join(self, pending: P) -> None:
        self._pending[id(pending)] = pending
        pending.lines.append(self)

    def leave(self, pending: P) -> None:
        del self._pending[id(pending)]

    @property
    def head(self) -> P | None:
        for pending in self._pending.values():
            return pending
        return None

    def ahead_of(self, pending: P) -> int:
        """How many requests came before `pending`."""
        return list(self._pending).index(id(pending))

    def __iter__(self) -> Iterator[P]:
        return iter(list(self._pending.values()))

    def __len__(self) -> int:
        return len(self._pending)
