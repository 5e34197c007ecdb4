"""Storage: where payload bytes live, by key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Protocol

Payload = tuple[bytes | memoryview, ...]
"""The bytes of one item, in the pieces in which they came. A view is of a message that holds little else."""

PORTION_BYTES = 8 << 20
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


class Storage(Protocol):
    name: str

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

    def close(self) -> None:
        """Lets go of every resource."""


def read(storage: Storage, keys: Sequence[int], sizes: Sequence[int]) -> Iterator[Payload]:
    """What `Storage.get` gives, PORTION_BYTES of it now and the rest as it is asked for. Raises DamagedPayloads, now or
    then. The keys must stay in use until it is all read.
    """
    parts = portions(sizes)
    first = next(parts, slice(0))
    later = (payload for part in parts for payload in storage.get(keys[part], sizes[part]))
    return chain(storage.get(keys[first], sizes[first]), later)


def portions(sizes: Sequence[int]) -> Iterator[slice]:
    """Payloads of these sizes, PORTION_BYTES of them at a time; those without bytes go with others."""
    start = nbytes = 0
    for place, size in enumerate(sizes):
        if place > start and nbytes + size > PORTION_BYTES:
            yield slice(start, place)
            start, nbytes = place, 0
        nbytes += size
    if start < len(sizes):
        yield slice(start, len(sizes))
