"""Memory: holds the payloads of a server without data_dir, and reads the payloads of any storage in slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from replay_server.tables.items import Storage, StorageFacts
from replay_server.tables.table import Payload

BYTES_PER_READ = 8 << 20
"""Payload bytes that are read at once, so that a response holds only about this many bytes in memory. A payload that is
larger is read at once, too."""


class MemoryStorage:
    """The Storage of a server without data_dir: holds payloads as the bytes objects that came from the wire."""

    def __init__(self) -> None:
        self._payloads: dict[int, Payload] = {}
        self._extended: set[int] = set()
        """The keys of payloads that were extended, so that they may have more bytes than a reader asks for."""

    def put(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        assert self._payloads.keys().isdisjoint(keys), "a payload would replace another one"
        self._payloads.update(zip(keys, payloads, strict=True))

    def extend(self, key: int, size: int, segment: Payload) -> None:
        # Make a new tuple, and leave the old one as it is, because a reader may still hold it.
        self._payloads[key] = (*self._payloads[key], *segment)
        self._extended.add(key)

    def get(self, keys: Sequence[int], sizes: Sequence[int]) -> list[Payload]:
        """Returns the first bytes of each payload, as many as `sizes` says."""
        payloads = list(map(self._payloads.__getitem__, keys))  # faster than a comprehension
        if self._extended.isdisjoint(keys):
            return payloads
        return [first_bytes(payload, size) for payload, size in zip(payloads, sizes, strict=True)]

    def delete(self, keys: Sequence[int]) -> None:
        for key in keys:
            del self._payloads[key]
        if self._extended:
            self._extended.difference_update(keys)

    def check(self, sizes: Mapping[int, int]) -> None:
        """Asserts that this storage has exactly the payloads of `sizes` (bytes by key), in these sizes."""
        assert self._payloads.keys() == sizes.keys(), self._payloads.keys() ^ sizes.keys()
        for key, payload in self._payloads.items():
            nbytes = sum(map(len, payload))
            assert nbytes == sizes[key], (key, nbytes, sizes[key])
        assert self._extended <= self._payloads.keys(), self._extended - self._payloads.keys()

    def why_full(self, nbytes: int) -> str | None:
        return None

    def facts(self) -> StorageFacts:
        return StorageFacts("memory")


def first_bytes(payload: Payload, size: int) -> Payload:
    """Returns the first `size` bytes of a payload, without a copy. The payload must have at least `size` bytes."""
    chunks: list[bytes | memoryview] = []
    missing = size
    for chunk in payload:
        if missing < len(chunk):  # the result ends within this chunk, or before it if no byte is missing
            if missing:
                chunks.append(memoryview(chunk)[:missing])
            break
        chunks.append(chunk)
        missing -= len(chunk)
    return tuple(chunks)


def read_payloads(storage: Storage, keys: Sequence[int], sizes: Sequence[int]) -> Iterator[Payload]:
    """Returns an iterator over the payloads of `keys`, each cut after as many bytes as `sizes` says.

    This call reads the first slice of payloads (`read_slices`), and the iteration reads the others. Both may raise
    DamagedPayloads. The caller must hold the items until the iteration has ended.
    """
    slices = read_slices(sizes)
    no_payloads = slice(0)
    first = next(slices, no_payloads)
    first_payloads = storage.get(keys[first], sizes[first])
    return chain(first_payloads, _read_rest(storage, keys, sizes, slices))


def _read_rest(
    storage: Storage, keys: Sequence[int], sizes: Sequence[int], slices: Iterator[slice]
) -> Iterator[Payload]:
    """Yields the payloads of these slices. Reads each slice when its first payload is asked for."""
    for next_slice in slices:
        yield from storage.get(keys[next_slice], sizes[next_slice])


def read_slices(sizes: Sequence[int]) -> Iterator[slice]:
    """Divides payloads of these sizes into consecutive slices of at most BYTES_PER_READ.

    A payload that is larger than BYTES_PER_READ is a slice of its own.
    """
    if sizes and sum(sizes) <= BYTES_PER_READ:  # the most frequent case
        yield slice(0, len(sizes))
        return
    start = 0
    nbytes = 0
    for index, size in enumerate(sizes):
        if index > start and nbytes + size > BYTES_PER_READ:
            yield slice(start, index)
            start = index
            nbytes = 0
        nbytes += size
    if start < len(sizes):
        yield slice(start, len(sizes))
