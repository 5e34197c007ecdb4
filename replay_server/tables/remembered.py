"""Remembered: what the last requests were answered, by the ids that their clients chose. A retry finds its answer here.

A client that loses an answer sends its request again, perhaps to a server that was killed in between. The server then
must not do again what it has done. So each kind of request that changes something remembers its ids: keys of inserts,
batches that were acknowledged, and calls with a number of their own. In durable mode the commit that writes a change
also writes its id and its answer, and forgets what is forgotten here.

The oldest ids are forgotten first. A retry comes within seconds, so bounds of some hundred thousand ids are ample.

Scopes remember in the same way which keys of a table were given out under a name.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
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
    """Ids from the oldest to the newest, each with its answer. Neither they nor the bytes of their answers grow without
    a bound, except that the newest answer stays however large it is."""

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

    def load(self, ids: Collection[int], answer: A | None = None) -> None:
        """As `remember`, from a record of before."""
        if self.has_bytes:
            for id in ids:  # a request that came twice at once is answered twice, and the last answer counts
                self._bytes += _bytes_of(answer) - _bytes_of(self._answers.get(id))
        self._answers.update(dict.fromkeys(ids, answer))
        # A dict that has lost its first entries takes long to find the next one, so many go at once.
        while len(self._answers) > self._most or (self._bytes > self._most_bytes and len(self._answers) > 1):
            for oldest in list(islice(self._answers, 1 + (len(self._answers) >> 8))):
                self.forget(oldest)

    def forget(self, id: int) -> None:
        """What was remembered was undone."""
        answer = self._answers.pop(id, None)
        if self.has_bytes:
            self._bytes -= _bytes_of(answer)
            assert self._bytes >= 0, self._bytes

    def check(self) -> None:
        """Asserts its bounds, and that the bytes are those of the answers."""
        assert len(self) <= self._most, (len(self), self._most)
        if self.has_bytes:
            nbytes = sum(map(_bytes_of, self._answers.values()))
            assert self._bytes == nbytes, (self._bytes, nbytes)
            assert nbytes <= self._most_bytes or len(self) == 1, (nbytes, len(self))


def _bytes_of(answer: Any) -> int:
    return 0 if answer is None else sum(map(len, answer))


MAX_SCOPES = 1024
MAX_SCOPE_KEYS = 1 << 20
"""Keys of all scopes of a table together, beyond those that the current scope needs."""
_NO_KEYS: frozenset[int] = frozenset()


class Scopes:
    """Which keys of a table were given out under which scope. Under one scope no item is given out twice.

    A scope is a name that clients choose, usually of one training step. The scopes used longest ago are forgotten
    first. The current scope never forgets a key that may still come again.
    """

    def __init__(self, may_come_again: Callable[[int], bool]) -> None:
        """`may_come_again(key)`: whether the table has the item, or may get it back from an outstanding batch."""
        self._may_come_again = may_come_again
        self._keys: OrderedDict[str, set[int]] = OrderedDict()
        self._trim_at = MAX_SCOPE_KEYS

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def keys_under(self, scope: str) -> Set[int]:
        """The keys given out under `scope`."""
        return self._keys.get(scope, _NO_KEYS)

    def give(self, scope: str, keys: Iterable[int]) -> None:
        self._use(scope).update(keys)

    def requeue(self, scope: str, keys: Iterable[int]) -> None:
        self._use(scope).difference_update(keys)

    def of(self, keys: Collection[int]) -> list[str]:
        """The scopes under which one of `keys` was given out."""
        return [scope for scope, known in self._keys.items() if not known.isdisjoint(keys)]

    def forget(self, keys: Collection[int]) -> None:
        """These keys come back as if no scope had ever had them."""
        for known in self._keys.values():
            known.difference_update(keys)

    def load(self, scope: str, keys: Iterable[int]) -> None:
        """Restores a scope. Call it in the order in which the scopes were last used."""
        self._keys[scope] = set(keys)

    def _use(self, scope: str) -> set[int]:
        keys = self._keys.setdefault(scope, set())
        self._keys.move_to_end(scope)
        if len(self._keys) > MAX_SCOPES:
            self._keys.popitem(last=False)
        if sum(map(len, self._keys.values())) > self._trim_at:
            self._trim()
        return keys

    def _trim(self) -> None:
        for known in self._keys.values():
            known.intersection_update([key for key in known if self._may_come_again(key)])
        total = sum(map(len, self._keys.values()))
        while len(self._keys) > 1 and total > MAX_SCOPE_KEYS // 2:
            total -= len(self._keys.popitem(last=False)[1])
        # If the current scope alone has many keys, trimming again soon would free nothing and cost O(keys) each time.
        self._trim_at = max(MAX_SCOPE_KEYS, 2 * total)

    def check(self) -> None:
        """Asserts the bound of their number."""
        assert len(self._keys) <= MAX_SCOPES, len(self._keys)
        assert self._trim_at >= MAX_SCOPE_KEYS, self._trim_at
