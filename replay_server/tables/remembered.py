"""Remembered: the ids of the last requests, each with its answer. A request that is sent again gets the same answer.

A client that loses an answer sends its request again, perhaps after the server was killed and started again. The server
must not make the same change twice. For each kind of request that changes something, it therefore remembers the ids of
the last requests, which their clients chose: the keys of inserts, the ids of acknowledged or requeued batches, and the
numbers of other calls. If there is a `data_dir`, the commit that writes a change also writes the id and the answer of
its request, and deletes the ids that are forgotten here.

The oldest ids are forgotten first. A request is sent again within seconds, so it suffices to remember some hundred
thousand ids.

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
    """Hears of every change of a buffer. `ChangeCollector` implements these methods, to record the changes on disk."""

    def changed(self, keys: Iterable[int] | KeyArray) -> None:
        """The items of these keys changed, so their records on disk may be outdated."""

    def remembered(self, kind: str, ids: Iterable[int]) -> None:
        """The `Remembered` of this kind has just remembered these ids."""

    def scope_changed(self, table: str, scope: str) -> None:
        """The keys drawn under this scope of the table changed; `scope` "": all scopes of the table were forgotten."""

    def lease_changed(self, batch_id: int) -> None:
        """The lease of this batch began, changed or ended."""


Answer = TypeVar("Answer")


class Remembered(Generic[Answer]):
    """Ids from the oldest to the newest, each with its answer.

    The number of ids is bounded, and so are the bytes of all answers. But the newest answer stays, however large it is.
    """

    def __init__(self, kind: str, most: int, watchers: Sequence[Watcher] = (), *, most_bytes: float = math.inf) -> None:
        """`kind` names these ids in the records on disk. `most`: the most ids. When one more is added, the oldest 256th
        of the ids is forgotten at once.

        With `most_bytes`, each answer is a tuple of bytes, and all answers together have at most `most_bytes`. They are
        stored on disk together with their ids.

        Without `most_bytes`, only the ids are stored on disk, so an answer from before a restart is None.
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
        """True if at least one of `ids` is remembered."""
        return not self._answers.keys().isdisjoint(ids)

    def get(self, id: int) -> Answer | None:
        """The answer of this id; None: the id is unknown, or has no answer."""
        return self._answers.get(id)

    def remember(self, ids: Collection[int], answer: Answer | None = None) -> None:
        """Remembers `answer` for each of `ids`.

        Call it in the same step of the event loop as the change that the request makes, so that one commit writes the
        change and the ids.
        """
        self.load(ids, answer)
        for watcher in self._watchers:
            watcher.remembered(self.kind, ids)

    def load(self, ids: Collection[int], answer: Answer | None = None) -> None:
        """Remembers `answer` for each of `ids`, which a record on disk has already. So watchers are not called."""
        if self.has_bytes:
            for id in ids:
                # The id has an answer already if two copies of one request were served at the same time.
                replaced = self._answers.get(id)
                self._bytes += _bytes_of(answer) - _bytes_of(replaced)
        self._answers.update(dict.fromkeys(ids, answer))
        # To find its first entry, a dict steps over all entries that were deleted before it, which takes long. So the
        # oldest ids are looked for only once in a while, and a 256th of all ids is then forgotten at once.
        while self._has_too_many():
            surplus = 1 + len(self._answers) // 256
            for oldest in list(islice(self._answers, surplus)):
                self.forget(oldest)

    def _has_too_many(self) -> bool:
        """True if there are more than `_most` ids, or if their answers have more than `_most_bytes`."""
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
        """Asserts the bounds on ids and bytes, and that `_bytes` is the sum of the bytes of all answers."""
        assert len(self) <= self._most, (len(self), self._most)
        if self.has_bytes:
            nbytes = sum(map(_bytes_of, self._answers.values()))
            assert self._bytes == nbytes, (self._bytes, nbytes)
            assert nbytes <= self._most_bytes or len(self) == 1, (nbytes, len(self))


def _bytes_of(answer: Any) -> int:
    """The number of bytes of an answer, which is a tuple of bytes or None."""
    if answer is None:
        return 0
    return sum(map(len, answer))


MAX_SCOPES = 1024
"""The most scopes of a table."""
MAX_SCOPE_KEYS = 1 << 20
"""The most keys of all scopes of a table together, unless the current scope alone has more."""
_NO_KEYS: frozenset[int] = frozenset()


class Scopes:
    """Remembers which keys of a table were drawn under each scope, because no item is drawn twice under one scope.

    A scope is a name that clients choose, usually one name for each training step. The current scope is the scope that
    was used last. If there are too many scopes or keys, the scopes used longest ago are forgotten first. Keys of the
    current scope are forgotten only if their items cannot be drawn again.
    """

    def __init__(self, may_come_again: Callable[[int], bool]) -> None:
        """`may_come_again(key)`: True if the table has the item, or may get it back from an outstanding batch."""
        self._may_come_again = may_come_again
        self._keys: OrderedDict[str, set[int]] = OrderedDict()
        """The keys by scope, from the scope used longest ago to the current scope."""
        self._trim_at = MAX_SCOPE_KEYS
        """If all scopes together have more keys than this, `_trim` is called."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def keys_under(self, scope: str) -> Set[int]:
        """The keys drawn under `scope`."""
        return self._keys.get(scope, _NO_KEYS)

    def give(self, scope: str, keys: Iterable[int]) -> None:
        """Adds `keys`, which were drawn under `scope`."""
        self._use(scope).update(keys)

    def requeue(self, scope: str, keys: Iterable[int]) -> None:
        """Removes `keys` from `scope`, because their draw was undone."""
        self._use(scope).difference_update(keys)

    def of(self, keys: Collection[int]) -> list[str]:
        """The scopes under which at least one of `keys` was drawn."""
        return [scope for scope, drawn in self._keys.items() if not drawn.isdisjoint(keys)]

    def forget(self, keys: Collection[int]) -> None:
        """Removes these keys from all scopes, so that each scope may draw their items again."""
        for drawn in self._keys.values():
            drawn.difference_update(keys)

    def load(self, scope: str, keys: Iterable[int]) -> None:
        """Restores a scope after a restart. Call it once for each scope, from the one used longest ago to the current
        one."""
        self._keys[scope] = set(keys)

    def _use(self, scope: str) -> set[int]:
        """Makes `scope` the current scope. Returns its keys, which the caller may change.

        If there are too many scopes, forgets the one used longest ago. If there are too many keys, calls `_trim`.
        """
        keys = self._keys.setdefault(scope, set())
        self._keys.move_to_end(scope)
        if len(self._keys) > MAX_SCOPES:
            self._keys.popitem(last=False)
        if sum(map(len, self._keys.values())) > self._trim_at:
            self._trim()
        return keys

    def _trim(self) -> None:
        """Forgets all keys whose items cannot be drawn again. Then forgets the scopes used longest ago, until at most
        half of MAX_SCOPE_KEYS are left or only the current scope is left. O(keys).

        It stops only at half of MAX_SCOPE_KEYS, so that many keys can be drawn before the next call.
        """
        for drawn in self._keys.values():
            drawn.intersection_update([key for key in drawn if self._may_come_again(key)])
        total = sum(map(len, self._keys.values()))
        while len(self._keys) > 1 and total > MAX_SCOPE_KEYS // 2:
            _, keys = self._keys.popitem(last=False)
            total -= len(keys)
        # The current scope alone may have so many keys that a call after the next draw would take O(keys) again, and
        # free nothing. So the next call comes only when the number of keys has doubled.
        self._trim_at = max(MAX_SCOPE_KEYS, 2 * total)

    def check(self) -> None:
        """Asserts the bounds on the number of scopes and on `_trim_at`."""
        assert len(self._keys) <= MAX_SCOPES, len(self._keys)
        assert self._trim_at >= MAX_SCOPE_KEYS, self._trim_at
