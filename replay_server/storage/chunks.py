"""Chunks: how the payload of an item lies in the database `payloads`.

key (8 bytes, big-endian), number of the chunk (4 bytes) -> checksum, at most CHUNK_BYTES
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import lmdb
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from replay_protos.framing import cut
from replay_server.storage.records import ItemRecords
from replay_server.tables.payloads import Payload

CHUNK_KEY = struct.Struct(">QI")
CHUNK_BYTES = 256 * 1024 - 16 - 8
"""Payload bytes in one value. With LMDB's page header and the checksum it fills its pages to the last byte. Small
chunks reuse the space of deleted ones: whole values of up to 5 MB would need half as much space again."""
CHUNK_NAME = np.dtype([("key", ">u8"), ("number", ">u4")])


class ChunkReader:
    """Reads the payloads of one moment: a transaction sees no later change."""

    def __init__(self, txn: lmdb.Transaction, entries: Sequence[tuple[int, int, Payload | None]]) -> None:
        self._txn = txn
        self._entries = entries
        """(key, bytes, payload if it is in memory)"""

    def read(self, part: slice) -> list[Payload | None]:
        return [
            _read(self._txn, key, size) if payload is None else payload for key, size, payload in self._entries[part]
        ]

    def close(self) -> None:
        self._txn.abort()


def _read(txn: lmdb.Transaction, key: int, size: int) -> Payload | None:
    """The payload in its chunks; None if it is damaged."""
    pieces = []
    for number in range(chunk_count(size)):
        value = txn.get(CHUNK_KEY.pack(key, number))
        if value is None or len(value) != 8 + min(CHUNK_BYTES, size - number * CHUNK_BYTES):
            return None
        piece = bytes(value[8:])  # the view ends with the transaction
        if xxh3_64_intdigest(piece, _seed(key, number)).to_bytes(8) != value[:8]:
            return None
        pieces.append(piece)
    return tuple(pieces)


def chunks_of(payloads: dict[int, Payload]) -> Iterator[tuple[bytes, bytes]]:
    """(name, value) of each chunk of `payloads`."""
    for key, payload in payloads.items():
        for number, parts in enumerate(cut(payload, CHUNK_BYTES)):
            checksum = xxh3_64(seed=_seed(key, number))
            for part in parts:
                checksum.update(part)
            yield CHUNK_KEY.pack(key, number), b"".join((checksum.digest(), *parts))


def _seed(key: int, number: int) -> int:
    """The seed of a checksum. With it the checksum also proves that the chunk is in its place in this payload."""
    return (key + number * 0x9E3779B97F4A7C15) % (1 << 64)


def chunk_count(size: int) -> int:
    """How many chunks a payload has."""
    return -(-size // CHUNK_BYTES)


def match_payloads(items: ItemRecords, there: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.bool_], list[bytes]]:
    """Which items have all chunks of their payload; and the names of the chunks that no such item needs.

    `there`: the names of all chunks, ascending.
    """
    keys, counts = items.items["key"], -(-items.items["nbytes"] // CHUNK_BYTES)
    first = np.searchsorted(there["key"], keys)
    last = first + counts - 1
    inside = last < there.size
    at = np.where(inside & (counts > 0), last, 0)
    complete = counts == 0
    if there.size:  # by ascending number: if the last one stands so far behind the first, none is missing
        complete |= inside & (there["key"][at] == keys) & (there["number"][at] == counts - 1)
    owner = np.searchsorted(keys, there["key"]).clip(max=max(0, keys.size - 1))
    mine = np.zeros(there.size, dtype=np.bool_)
    if keys.size:
        mine = (keys[owner] == there["key"]) & complete[owner] & (there["number"] < counts[owner])
    return np.asarray(complete), [CHUNK_KEY.pack(key, number) for key, number in there[~mine].tolist()]
