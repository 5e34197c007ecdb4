"""Known keys: the keys inserted last. They show that an insert is a retry even after its item was consumed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

MAX_KNOWN_KEYS = 1 << 18


class KnownKeys:
    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._order: deque[int] = deque()
        """From the oldest to the newest; may also hold keys that were forgotten."""

    def any_of(self, keys: Iterable[int]) -> bool:
        return not self._keys.isdisjoint(keys)

    def remember(self, keys: Iterable[int]) -> None:
        self._keys.update(keys)
        self._order.extend(keys)
        while len(self._order) > MAX_KNOWN_KEYS:
            self._keys.discard(self._order.popleft())

    def forget(self, key: int) -> None:
        self._keys.discard(key)

    def all(self) -> list[int]:
        """From the oldest to the newest."""
        return self.among(self._order)

    def among(self, keys: Iterable[int]) -> list[int]:
        """The known ones of `keys`, in the same order."""
        return [key for key in keys if key in self._keys]
