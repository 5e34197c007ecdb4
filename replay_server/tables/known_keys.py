"""Known keys: the keys inserted last. They show that an insert is a retry even after its item was consumed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

MAX_KNOWN_KEYS = 1 << 18
_MANY_SETS = 1 << 10
"""Different sets of tables of which one copy each is kept."""


class KnownKeys:
    def __init__(self) -> None:
        self._tables: dict[int, frozenset[str] | None] = {}
        """For which tables each key was inserted; None: unknown, because that was before a restart."""
        self._order: deque[int] = deque()
        """From the oldest to the newest; may also hold keys that were forgotten."""
        self._sets: dict[frozenset[str], frozenset[str]] = {}

    def any_of(self, keys: Iterable[int]) -> bool:
        return not self._tables.keys().isdisjoint(keys)

    def tables_of(self, key: int) -> frozenset[str] | None:
        """For which tables the key was inserted; None: it is not known."""
        return self._tables.get(key)

    def remember(self, keys: Iterable[int], tables: Iterable[str] | None = None) -> None:
        """`tables`: for which ones the keys were inserted, if that is known."""
        self._tables.update(dict.fromkeys(keys, None if tables is None else self._shared(frozenset(tables))))
        self._order.extend(keys)
        while len(self._order) > MAX_KNOWN_KEYS:
            self._tables.pop(self._order.popleft(), None)

    def forget(self, key: int) -> None:
        self._tables.pop(key, None)

    def order(self) -> list[int]:
        """From the oldest to the newest; with some that were forgotten."""
        return list(self._order)

    def among(self, keys: Iterable[int]) -> list[int]:
        """The known ones of `keys`, in the same order."""
        return list(filter(self._tables.__contains__, keys))

    def _shared(self, tables: frozenset[str]) -> frozenset[str]:
        """One copy for all keys: 200,000 copies would take 50 MB."""
        if len(self._sets) > _MANY_SETS:
            self._sets.clear()
        return self._sets.setdefault(tables, tables)
