"""Storage: where payload bytes live, by key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

Payload = tuple[bytes | memoryview, ...]
"""The bytes of one item, in the pieces in which they came. A view is of a message that holds little else."""

BYTES_PER_READ = 8 << 20
"""What is read, or copied, between two turns of everyone else. Of an answer that is longer no more is in memory."""


class DamagedPayloads(Exception):
    """The bytes under `keys` are not what was put there."""

    def __init__(self, keys: list[int]) -> None:
        super().__init__(f"the payloads of {keys} are damaged")
        self.keys = keys


class Reader(Protocol):
    def read(self, part: slice) -> list[Payload | None]:
        """The payloads of some of the keys; None for each that is damaged. For any thread."""

    def close(self) -> None:
        """Lets go of what has been deleted meanwhile."""


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


class Storage(Protocol):
    def put(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        """Keeps payloads under keys that are not in use."""

    def get(self, keys: Sequence[int], sizes: Sequence[int]) -> list[Payload]:
        """The payloads of keys that are in use, of so many bytes. Raises DamagedPayloads."""

    def reader(self, keys: Sequence[int], sizes: Sequence[int]) -> Reader:
        """What `get` does, later and on another thread; deleting the payloads meanwhile makes no difference."""

    def delete(self, keys: Sequence[int], sizes: Sequence[int]) -> None:
        """Forgets payloads, of so many bytes."""

    def why_full(self, nbytes: int) -> str | None:
        """Why a payload of so many bytes cannot be kept; None: it can."""

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
        return [self._payloads[key] for key in keys]

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
    parts = portions(sizes)
    first = next(parts, slice(0))
    later = (payload for part in parts for payload in storage.get(keys[part], sizes[part]))
    return chain(storage.get(keys[first], sizes[first]), later)


def portions(sizes: Sequence[int]) -> Iterator[slice]:
    """Payloads of these sizes, BYTES_PER_READ of them at a time; those without bytes go with others."""
    start = nbytes = 0
    for place, size in enumerate(sizes):
        if place > start and nbytes + size > BYTES_PER_READ:
            yield slice(start, place)
            start, nbytes = place, 0
        nbytes += size
    if start < len(sizes):
        yield slice(start, len(sizes))
