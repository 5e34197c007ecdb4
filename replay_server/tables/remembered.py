"""Remembered: the answers to the last requests, by the ids that their clients chose. A retry finds its answer here.

A client that loses an answer sends its request again, perhaps after the server was killed and started again. The server
must not make the same change twice. For each kind of request that changes something, it therefore remembers the ids of
the last requests: the keys of inserts, the ids of acknowledged or requeued batches, and the numbers that clients choose
for other calls. With `data_dir`, the commit that writes a change also writes the id and the answer of the request, and
deletes the ids that are forgotten here.

The oldest ids are forgotten first. A retry comes within seconds, so bounds of some hundred thousand ids are ample.

The class `Scopes` remembers which keys of a table were drawn under which scope.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from replay_server.tables.columns import KeyArray


class Watcher(Protocol):
    """Its methods are called at every change of a buffer. `ChangeCollector` uses them to record changes on disk."""

    def changed(self, keys: Iterable[int] | KeyArray) -> None:
        """These items changed, so their records on disk may be outdated."""

    def remembered(self, kind: str, ids: Iterable[int]) -> None:
        """The `Remembered` of this kind has just remembered these ids."""

    def scope_changed(self, table: str, scope: str) -> None:
        """The keys drawn under this scope of the table changed. "": all scopes of the table were forgotten."""

    def lease_changed(self, batch_id: int) -> None:
        """The lease of this batch began, changed or ended."""


Answer = TypeVar("Answer")


class Remembered(Generic[Answer]):
    """Ids from the oldest to the newest, each with its answer.

    Both the number of ids and the bytes of their answers are bounded, except that the newest answer always stays.
    """

    def __init__(self, kind: str, most: int, watchers: Sequence[Watcher] = (), *, most_bytes: float = math.inf) -> None:
        """Remembers at most `most` ids. When one more is added, the oldest 256th of the ids is forgotten together.

        `kind` names these ids in the records on disk. With `most_bytes`, each answer is a tuple of bytes, all answers
        together have at most `most_bytes`, and ids and answers are stored on disk. Without `most_bytes`, only the ids
        are stored on disk, so an answer from before a restart is None.
        """
        self.kind = kind
        self.has_bytes = most_bytes < math.inf
        """True if answers are tuples of bytes, which are bounded and stored on disk."""
        self._most = most
        self._most_bytes = most_bytes
        self._watchers = watchers
        self._answers: dict[int, Answer | None] = {}
        """The answers by id, from the oldest id to the newest."""
        self._bytes = 0
        """The bytes of all answers; 0 if answers are not tuples of bytes."""

    def __contains__(self, id: int) -> bool:
        return id in self._answers

    def __iter__(self) -> Iterator[int]:
        return iter(self._answers)

    def __len__(self) -> int:
        return len(self._answers)

    def any_of(self, ids: Iterable[int]) -> bool:
        return not self._answers.keys().isdisjoint(ids)

    def get(self, id: int) -> Answer | None:
        """The answer of this id; None: the id is unknown, or has no answer."""
        return self._answers.get(id)

    def remember(self, ids: Collection[int], answer: Answer | None = None) -> None:
        """Remembers `answer` for each of `ids`.

        Call it in the same step of the event loop as the change, so that one commit writes the change and the ids.
        """
        self.load(ids, answer)
        for watcher in self._watchers:
            watcher.remembered(self.kind, ids)

    def load(self, ids: Collection[int], answer: Answer | None = None) -> None:
        """Remembers ids that a record on disk has already, so watchers are not called."""
        if self.has_bytes:
            # If two copies of a request were served at the same time, the id has an answer, which is replaced.
            for id in ids:
                self._bytes += _bytes_of(answer) - _bytes_of(self._answers.get(id))
        self._answers.update(dict.fromkeys(ids, answer))
        # A dict steps over all entries that were deleted at its front to find its first entry. To do that rarely,
        # a 256th of the ids is forgotten together.
        while self._has_too_many():
            surplus = 1 + (len(self._answers) >> 8)
            for oldest in list(islice(self._answers, surplus)):
                self.forget(oldest)

    def _has_too_many(self) -> bool:
        """True if the ids or the bytes of their answers exceed their bound."""
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
"""The most scopes of a table."""
MAX_SCOPE_KEYS = 1 << 20
"""The most keys of all scopes of a table together. The current scope alone may have more keys."""
_NO_KEYS: frozenset[int] = frozenset()


class Scopes:
    """The keys of a table that were drawn under each scope. No item is drawn twice under one scope.

    A scope is a name that clients choose, usually of one training step. The current scope is the scope that was used
    last. The scopes used longest ago are forgotten first. The current scope forgets only keys of items that cannot be
    drawn again.
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
        """The keys drawn under `scope`."""
        return self._keys.get(scope, _NO_KEYS)

    def give(self, scope: str, keys: Iterable[int]) -> None:
        """Adds keys that were drawn under `scope`."""
        self._use(scope).update(keys)

    def requeue(self, scope: str, keys: Iterable[int]) -> None:
        """Removes keys whose draw under `scope` was undone."""
        self._use(scope).difference_update(keys)

    def of(self, keys: Collection[int]) -> list[str]:
        """The scopes under which at least one of `keys` was drawn."""
        return [scope for scope, drawn in self._keys.items() if not drawn.isdisjoint(keys)]

    def forget(self, keys: Collection[int]) -> None:
        """Removes these keys from all scopes, so that each scope may draw their items again."""
        for drawn in self._keys.values():
            drawn.difference_update(keys)

    def load(self, scope: str, keys: Iterable[int]) -> None:
        """Restores a scope. Call it for the scope used longest ago first, and for the current scope last."""
        self._keys[scope] = set(keys)

    def _use(self, scope: str) -> set[int]:
        """Makes `scope` the current scope. Returns its keys.

        Forgets the scope used longest ago if there are too many scopes, and more if there are too many keys.
        """
        keys = self._keys.setdefault(scope, set())
        self._keys.move_to_end(scope)
        if len(self._keys) > MAX_SCOPES:
            self._keys.popitem(last=False)
        if sum(map(len, self._keys.values())) > self._trim_at:
            self._trim()
        return keys

    def _trim(self) -> None:
        """Forgets keys whose items cannot be drawn again, and then the scopes used longest ago. O(keys).

        Stops at half of MAX_SCOPE_KEYS, so that many keys can be drawn before the next call.
        """
        for drawn in self._keys.values():
            drawn.intersection_update([key for key in drawn if self._may_come_again(key)])
        total = sum(map(len, self._keys.values()))
        while len(self._keys) > 1 and total > MAX_SCOPE_KEYS // 2:
            _, keys = self._keys.popitem(last=False)
            total -= len(keys)
        # If the current scope alone has many keys, trimming again soon would free nothing and cost O(keys) each time.
        self._trim_at = max(MAX_SCOPE_KEYS, 2 * total)

    def check(self) -> None:
        """Asserts the bounds on the number of scopes and on the number of keys at which they are trimmed."""
        assert len(self._keys) <= MAX_SCOPES, len(self._keys)
        assert self._trim_at >= MAX_SCOPE_KEYS, self._trim_at
