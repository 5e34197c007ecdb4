"""KeySequence: keys for new items. Two clients do not choose the same key."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

FIRST_KEY, LAST_KEY = 1 << 62, (1 << 63) - 1
"""The smallest and the largest key of a KeySequence."""


class KeySequence:
    """Keys of 38 random bits and a counter of 24 bits. Not safe across a fork."""

    def __init__(self) -> None:
        self._keys: Iterator[int] = iter(())

    def __next__(self) -> int:
        key = next(self._keys, None)
        if key is None:
            start = FIRST_KEY | secrets.randbits(38) << 24
            self._keys = iter(range(start, start + (1 << 24)))
            key = next(self._keys)
        return key
