"""Scopes: which keys of a table were given out under which scope. Under one scope no item is given out twice.

* A scope is a name that clients choose, usually of one training step. The scopes used longest ago are forgotten first.
* The current scope never forgets a key that may still come again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set

MAX_SCOPES = 1024
MAX_KEYS = 1 << 20
"""Keys of all scopes of a table together, beyond those that the current scope needs."""
_NO_KEYS: frozenset[int] = frozenset()


class Scopes:
    def __init__(self, may_come_again: Callable[[int], bool]) -> None:
        """`may_come_again(key)`: whether the table has the item, or may get it back from an outstanding batch."""
        self._may_come_again = may_come_again
        self._keys: OrderedDict[str, set[int]] = OrderedDict()
        self._trim_at = MAX_KEYS

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __contains__(self, scope: str) -> bool:
        return scope in self._keys

    def given(self, scope: str) -> Set[int]:
        """The keys given out under `scope`."""
        return self._keys.get(scope, _NO_KEYS)

    def give(self, scope: str, keys: Iterable[int]) -> None:
        self._use(scope).update(keys)

    def give_back(self, scope: str, keys: Iterable[int]) -> None:
        self._use(scope).difference_update(keys)

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
        while len(self._keys) > 1 and total > MAX_KEYS // 2:
            total -= len(self._keys.popitem(last=False)[1])
        # If the current scope alone has many keys, trimming again soon would free nothing and cost O(keys) each time.
        self._trim_at = max(MAX_KEYS, 2 * total)
