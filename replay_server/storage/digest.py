"""Digest: a number for all records of a data directory together. It tells whether a state is that of one commit.

LMDB's pages have no checksums. After a crash of the machine some pages can be older than the root that names them, and
still be well-formed. So each commit records the sum over all records that it leaves, and the start computes it again.

* The digest is the sum of one number for each record, modulo 2^64. So a commit needs only the records it changes.
* A payload counts with the names of its chunks. Each chunk has a checksum of its own (chunks.py).
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

DIGEST = b"digest"
DIGEST_RECORD = struct.Struct("<QQ")
"""Number of the transaction, digest."""

_FACTOR, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_MASK = (1 << 64) - 1


def of_record(name: bytes, record: bytes | memoryview | None) -> int:
    """The number of a record under its name; 0 where there is none."""
    return 0 if record is None else xxh3_64_intdigest(name + bytes(record))


def of_item(record: bytes | memoryview | None) -> int:
    """The number of an item's record, which begins with its own checksum (records.ITEM)."""
    return 0 if record is None else int.from_bytes(record[:8], "little")


def of_items(checksums: npt.NDArray[np.uint64]) -> int:
    """The sum of `of_item` over records with these checksums."""
    return int(np.add.reduce(checksums, dtype=np.uint64))


def of_chunks(names: npt.NDArray[np.void]) -> int:
    """The sum of one number for each name of a chunk (chunks.CHUNK_NAME)."""
    keys, numbers = names["key"].astype(np.uint64), names["number"].astype(np.uint64)
    mixed = (keys + numbers * _FACTOR) * _MIX
    return int(np.add.reduce((mixed ^ mixed >> np.uint64(32)) * _MIX, dtype=np.uint64))


def total(numbers: int) -> int:
    return numbers & _MASK
