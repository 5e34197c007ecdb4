"""Remembered: the answers to the last requests, by the ids that their clients chose. A retry finds its answer here.

A client that loses an answer sends its request again, perhaps to a server that was killed in between. The server then
must not make the same change twice. So each kind of request that changes something remembers its ids: keys of inserts,
batches that were acknowledged, and calls with a number of their own. In durable mode the commit that writes a change
also writes its id and its answer, and deletes the ids that are forgotten here.

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
    """Hears of every change, for example to record the change on disk."""

    def changed(self, keys: Iterable[int] | KeyArray) -> None:
        """The records of these items may no longer be true."""

    def remembered(self, kind: str, ids: Iterable[int]) -> None:
        """These ids were remembered just now."""

    def scope_changed(self, table: str, scope: str) -> None:
        """Keys were given out under this scope; "": any scope of the table may have changed."""

    def lease_changed(self, batch_id: int) -> None:
        """The lease of this batch began, changed or ended."""


A = TypeVar("A")


class Remembered(Generic[A]):
    """Ids from the oldest to the newest, each with its answer.

    Both the number of ids and the bytes of their answers are bounded, except that the newest answer always stays.
    """

    def __init__(self, kind: str, most: int, watchers: Sequence[Watcher] = (), *, most_bytes: float = math.inf) -> None:
        """Remembers at most `most` ids. Beyond that, a 256th of the ids is forgotten at once.

        With `most_bytes` an answer is a tuple of bytes. All answers together have at most `most_bytes`, and are
        durable. Without `most_bytes` only the ids are durable, and an answer from before a restart is None.
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
        """Remembers `answer` for each of `ids`. Call it in the step of the change, so that one commit writes both."""
        self.load(ids, answer)
        for watcher in self._watchers:
            watcher.remembered(self.kind, ids)

    def load(self, ids: Collection[int], answer: A | None = None) -> None:
        """As `remember`, from a record on disk: watchers are not called."""
        if self.has_bytes:
            for id in ids:  # a request that came twice at the same time has two answers, of which the last counts
                self._bytes += _bytes_of(answer) - _bytes_of(self._answers.get(id))
        self._answers.update(dict.fromkeys(ids, answer))
        # A dict that has lost its first entries takes long to find its first entry. So many ids are forgotten at once.
        while self._has_too_many():
            some = 1 + (len(self._answers) >> 8)
            for oldest in list(islice(self._answers, some)):
                self.forget(oldest)

    def _has_too_many(self) -> bool:
        if len(self._answers) > self._most:
            return True
        # The newest answer stays, however large it is.
        return self._bytes > self._most_bytes and len(self._answers) > 1

    def forget(self, id: int) -> None:
        """Forgets an id, for example because its change was undone."""
        answer = self._answers.pop(id, None)
        if self.has_bytes:
            self._bytes -= _bytes_of(answer)
            assert self._bytes >= 0, self._bytes

    def check(self) -> None:
        """Asserts the bounds, and that `_bytes` is the sum of the bytes of the answers."""
        assert len(self) <= self._most, (len(self), self._most)
        if self.has_bytes:
            nbytes = sum(map(_bytes_of, self._answers.values()))
            assert self._bytes == nbytes, (self._bytes, nbytes)
            assert nbytes <= self._most_bytes or len(self) == 1, (nbytes, len(self))


def _bytes_of(answer: Any) -> int:
    """The bytes of an answer, which is a tuple of bytes or None."""
    if answer is None:
        return 0
    return sum(map(len, answer))


MAX_SCOPES = 1024
"""Scopes of a table."""
MAX_SCOPE_KEYS = 1 << 20
"""Keys of all scopes of a table together. The current scope may have more keys."""
_NO_KEYS: frozenset[int] = frozenset()


class Scopes:
    """The keys of a table that were given out under each scope. Under one scope no item is given out twice.

    A scope is a name that clients choose, usually of one training step. The scopes used longest ago are forgotten
    first. The current scope never forgets a key that may still come again.
    """

    def __init__(self, may_come_again: Callable[[int], bool]) -> None:
        """`may_come_again(key)`: True if the table has the item, or may get it back from an outstanding batch."""
        self._may_come_again = may_come_again
        self._keys: OrderedDict[str, set[int]] = OrderedDict()
        """By scope, from the scope used longest ago to the current scope."""
        self._trim_at = MAX_SCOPE_KEYS
        """The number of keys of all scopes beyond which keys are forgotten."""

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
        """Removes these keys from all scopes: their items come back as if they had never been given out."""
        for known in self._keys.values():
            known.difference_update(keys)

    def load(self, scope: str, keys: Iterable[int]) -> None:
        """Restores a scope. Call it in the order in which the scopes were last used."""
        self._keys[scope] = set(keys)

    def _use(self, scope: str) -> set[int]:
        """Makes `scope` the current scope, and forgets the oldest scopes. Returns the keys of `scope`."""
        keys = self._keys.setdefault(scope, set())
        self._keys.move_to_end(scope)
        if len(self._keys) > MAX_SCOPES:
            self._keys.popitem(last=False)
        if sum(map(len, self._keys.values())) > self._trim_at:
            self._trim()
        return keys

    def _trim(self) -> None:
        """Forgets keys that cannot come again, and then the scopes used longest ago. O(keys)."""
        for known in self._keys.values():
            known.intersection_update([key for key in known if self._may_come_again(key)])
        total = sum(map(len, self._keys.values()))
        while len(self._keys) > 1 and total > MAX_SCOPE_KEYS // 2:
            _, keys = self._keys.popitem(last=False)
            total -= len(keys)
        # If the current scope alone has many keys, trimming again soon would free nothing and cost O(keys) each time.
        self._trim_at = max(MAX_SCOPE_KEYS, 2 * total)

    def check(self) -> None:
        """Asserts the bound on the number of scopes."""
        assert len(self._keys) <= MAX_SCOPES, len(self._keys)
        assert self._trim_at >= MAX_SCOPE_KEYS, self._trim_at
