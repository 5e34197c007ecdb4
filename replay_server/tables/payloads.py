"""Payloads: the bytes of items, the protocol of the storage that keeps them, and the storage in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

Payload = tuple[bytes | memoryview, ...]
"""The bytes of one item, in the chunks in which they came. A view keeps its whole message in memory, so the chunk must
be most of it."""

BYTES_PER_READ = 8 << 20
"""Bytes read before yielding to the event loop; also the most of one response that is held in memory."""


class DamagedPayloads(Exception):
    """The bytes under `keys` are not what was put there."""

    def __init__(self, keys: list[int]) -> None:
        super().__init__(f"the payloads of {keys} are damaged")
        self.keys = keys


class Reader(Protocol):
    def read(self, part: slice) -> list[Payload | None]:
        """The payloads of the keys in `part`; None for each damaged one. May be called from any thread."""

    def close(self) -> None:
        """Ends the read, so that payloads deleted meanwhile can be freed."""


@dataclass(frozen=True)
class StorageFacts:
    """What operators are told of a storage."""

    name: str
    disk_bytes: int = 0
    """What its file occupies."""
    commits: int = 0
    """Transactions since the start."""
    error: str = ""
    """Why the last commit failed; "": it did not."""
    fell_back: str = ""
    """Why the start went back to an older state, and to which; "": it did not."""


class Storage(Protocol):
    def put(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        """Stores payloads under keys that are not in use."""

    def get(self, keys: Sequence[int], sizes: Sequence[int]) -> list[Payload]:
        """The payloads of keys in use; `sizes` are their bytes. Raises DamagedPayloads."""

    def reader(self, keys: Sequence[int], sizes: Sequence[int]) -> Reader:
        """Reads as `get`, but later and on another thread. Payloads that are deleted meanwhile can still be read."""

    def delete(self, keys: Sequence[int], sizes: Sequence[int]) -> None:
        """Deletes payloads; `sizes` are their bytes."""

    def why_full(self, nbytes: int) -> str | None:
        """Why payloads of `nbytes` cannot be stored; None: they can."""

    def facts(self) -> StorageFacts: ...

    def close(self) -> None:
        """Frees all resources."""


class MemoryStorage:
    """Keeps payloads in the process, as the bytes objects that came from the wire."""

    def __init__(self) -> None:
        self._payloads: dict[int, Payload] = {}

    def put(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        self._payloads.update(zip(keys, payloads, strict=True))

    def get(self, keys: Sequence[int], sizes: Sequence[int]) -> list[Payload]:
        return list(map(self._payloads.__getitem__, keys))

    def reader(self, keys: Sequence[int], sizes: Sequence[int]) -> Reader:
        return _MemoryReader(self.get(keys, sizes))

    def delete(self, keys: Sequence[int], sizes: Sequence[int]) -> None:
        for key in keys:
            del self._payloads[key]

    def why_full(self, nbytes: int) -> str | None:
        return None

    def facts(self) -> StorageFacts:
        return StorageFacts("memory")

    def close(self) -> None:
        self._payloads.clear()


class _MemoryReader:
    def __init__(self, payloads: list[Payload]) -> None:
        self._payloads = payloads

    def read(self, part: slice) -> list[Payload | None]:
        return list(self._payloads[part])

    def close(self) -> None:
        self._payloads = []


def read(storage: Storage, keys: Sequence[int], sizes: Sequence[int]) -> Iterator[Payload]:
    """The payloads of `keys`, as `Storage.get` gives them: the first BYTES_PER_READ now, the rest as they are iterated.

    Raises DamagedPayloads, now or while they are iterated. The keys must stay in use until then.
    """
    parts = read_slices(sizes)
    first = next(parts, slice(0))
    later = (payload for part in parts for payload in storage.get(keys[part], sizes[part]))
    return chain(storage.get(keys[first], sizes[first]), later)


def read_slices(sizes: Sequence[int]) -> Iterator[slice]:
    """Divides `sizes` into slices of at most BYTES_PER_READ, or of one larger payload."""
    if sizes and sum(sizes) <= BYTES_PER_READ:
        yield slice(0, len(sizes))
        return
    start = nbytes = 0
    for place, size in enumerate(sizes):
        if place > start and nbytes + size > BYTES_PER_READ:
            yield slice(start, place)
            start, nbytes = place, 0
        nbytes += size
    if start < len(sizes):
        yield slice(start, len(sizes))
