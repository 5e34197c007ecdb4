"""Keeps payloads in the process, where a server has no disk; and reads them from any storage, a part at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from replay_server.tables.items import Storage, StorageFacts
from replay_server.tables.table import Payload

BYTES_PER_READ = 8 << 20
"""Bytes read before yielding to the event loop; also the most of one response that is held in memory."""


class MemoryStorage:
    """Keeps payloads in the process, as the bytes objects that came from the wire.

    The chunks of a payload have as many bytes as its item says, whatever was appended.
    """

    def __init__(self) -> None:
        self._payloads: dict[int, Payload] = {}
        self._extended: set[int] = set()
        """Keys of payloads that may have more bytes than somebody asks for."""

    def put(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        assert self._payloads.keys().isdisjoint(keys), "a payload would replace another one"
        self._payloads.update(zip(keys, payloads, strict=True))

    def extend(self, key: int, size: int, segment: Payload) -> None:
        # Whoever has the chunks of before keeps them: a payload is never changed in place.
        self._payloads[key] = (*self._payloads[key], *segment)
        self._extended.add(key)

    def get(self, keys: Sequence[int], sizes: Sequence[int]) -> list[Payload]:
        found = list(map(self._payloads.__getitem__, keys))
        if self._extended.isdisjoint(keys):
            return found
        return [first_bytes(payload, size) for payload, size in zip(found, sizes, strict=True)]

    def delete(self, keys: Sequence[int]) -> None:
        for key in keys:
            del self._payloads[key]
        if self._extended:
            self._extended.difference_update(keys)

    def check(self, sizes: Mapping[int, int]) -> None:
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
    """The first `size` bytes of a payload that has at least so many, without a copy."""
    kept: list[bytes | memoryview] = []
    for chunk in payload:
        if size < len(chunk):
            if size:
                kept.append(memoryview(chunk)[:size])
            break
        kept.append(chunk)
        size -= len(chunk)
    return tuple(kept)


def read_payloads(storage: Storage, keys: Sequence[int], sizes: Sequence[int]) -> Iterator[Payload]:
    """The payloads of `keys`, as `Storage.get` gives them: the first BYTES_PER_READ now, the rest as they are iterated.

    Raises DamagedPayloads, now or while they are iterated. The items must be held until then.
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
