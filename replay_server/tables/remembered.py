"""Remembered: what the last requests were answered, by the ids that their clients chose. A retry finds its answer here.

A client that loses an answer sends its request again, perhaps to a server that was killed in between. The server then
must not do again what it has done. So each kind of request that changes something remembers its ids: keys of inserts,
batches that were taken, and calls with a number of their own. In durable mode the commit that writes a change also
writes its id and its answer, and forgets what is forgotten here.

The oldest ids are forgotten first. A retry comes within seconds, so bounds of some hundred thousand ids are ample.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from replay_server.tables.columns import KeyArray


class Watcher(Protocol):
    """Is told of every change, for example to record it on disk."""

    def changed(self, keys: Iterable[int] | KeyArray) -> None:
        """The records of these items may no longer be true."""

    def remembered(self, kind: str, ids: Iterable[int]) -> None:
        """These ids were remembered just now."""

    def scope_changed(self, table: str, scope: str) -> None:
        """Keys were given out under this scope; "": any scope of the table may have changed."""

    def lease_changed(self, batch_id: int) -> None:
        """The reader of this batch has it now under a lease, or has it no longer."""


A = TypeVar("A")


class Remembered(Generic[A]):
    """Ids from the oldest to the newest, each with its answer."""

    def __init__(self, kind: str, most: int, watchers: Sequence[Watcher] = (), *, most_bytes: float = math.inf) -> None:
        """Remembers about `most` ids: up to a 256th more, which then go together.

        With `most_bytes` an answer is a tuple of bytes. The answers together have at most so many, and are durable.
        Without it only the ids are, and an answer from before a restart is None.
        """
        self.kind = kind
        self.has_bytes = most_bytes < math.inf
        self._most = most
        self._most_bytes = most_bytes
        self._watchers = watchers
        self._answers: dict[int, A | None] = {}
        self._bytes = 0

    def __contains__(self, id: int) -> bool:
        return id in self._answers

    def __iter__(self) -> Iterator[int]:
        return iter(self._answers)

    def __len__(self) -> int:
        return len(self._answers)

    def any_of(self, ids: Iterable[int]) -> bool:
        return not self._answers.keys().isdisjoint(ids)

    def get(self, id: int) -> A | None:
        return self._answers.get(id)

    def remember(self, ids: Collection[int], answer: A | None = None) -> None:
        """The answer to each of `ids`. Call it in the same step as the change, so that one commit writes both."""
        self.load(ids, answer)
        for watcher in self._watchers:
            watcher.remembered(self.kind, ids)

    def load(self, ids: Iterable[int], answer: A | None = None) -> None:
        """As `remember`, from a record of before."""
        self._answers.update(dict.fromkeys(ids, answer))
        if self.has_bytes:
            self._bytes += _bytes_of(answer)
        # A dict that has lost its first entries takes long to find the next one, so many go at once.
        while len(self._answers) > self._most or (self._bytes > self._most_bytes and len(self._answers) > 1):
            for oldest in list(islice(self._answers, 1 + (len(self._answers) >> 8))):
                self.forget(oldest)

    def forget(self, id: int) -> None:
        """What was remembered was undone."""
        answer = self._answers.pop(id, None)
        if self.has_bytes:
            self._bytes -= _bytes_of(answer)


def _bytes_of(answer: Any) -> int:
    return 0 if answer is None else sum(map(len, answer))
