"""Pending: a request that may not proceed yet. It keeps its place in line, costs no thread, and has a deadline."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from replay_server.errors import Refused

T = TypeVar("T")


class Pending(Generic[T]):
    """Ends exactly once: with a value, with an error, or because its client went away."""

    def __init__(self, since: float, deadline: float = math.inf) -> None:
        self.since = since
        self.deadline = deadline
        self.done = False
        self.on_done: Callable[[], None] | None = None
        self.value: T | None = None
        """Set when it ended well."""
        self._error: Refused | None = None

    def finish(self, value: T) -> None:
        self.value = value
        self._end()

    def fail(self, error: Refused) -> None:
        self._error = error
        self._end()

    def abandon(self) -> None:
        """Nobody waits any more: nothing is to be told."""
        self.done = True

    def result(self) -> T:
        assert self.done
        if self._error is not None:
            raise self._error
        return self.value  # type: ignore[return-value]

    def _end(self) -> None:
        assert not self.done
        self.done = True
        if self.on_done is not None:
            self.on_done()


P = TypeVar("P", bound=Pending[Any])


class Line(Generic[P]):
    """Pending requests, first come first served. Those that ended elsewhere are passed over."""

    def __init__(self) -> None:
        self._queue: deque[P] = deque()

    def join(self, pending: P) -> None:
        self._queue.append(pending)

    @property
    def head(self) -> P | None:
        while self._queue and self._queue[0].done:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def __iter__(self) -> Iterator[P]:
        return iter([pending for pending in self._queue if not pending.done])

    def __len__(self) -> int:
        return sum(not pending.done for pending in self._queue)

    def __bool__(self) -> bool:
        return self.head is not None
