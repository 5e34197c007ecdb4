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

_FACTOR, _MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1


def of_record(name: bytes, record: bytes | None) -> int:
    """The number of a record under its name; 0 where there is none."""
    return 0 if record is None else xxh3_64_intdigest(name + record)


def of_item(record: bytes | None) -> int:
    """The number of an item's record, which begins with its own checksum (records.ITEM)."""
    return 0 if record is None else int.from_bytes(record[:8], "little")


def of_items(checksums: npt.NDArray[np.uint64]) -> int:
    return int(np.add.reduce(checksums, dtype=np.uint64))


def of_chunk(key: int, number: int) -> int:
    """The number of the name of a chunk."""
    mixed = (key + number * _FACTOR) * _MIX & _MASK
    return (mixed ^ mixed >> 32) * _MIX & _MASK


def of_chunks(keys: npt.NDArray[np.uint64], numbers: npt.NDArray[np.uint64]) -> int:
    """The sum of `of_chunk` over all."""
    mixed = (keys + numbers * np.uint64(_FACTOR)) * np.uint64(_MIX)
    return int(np.add.reduce((mixed ^ mixed >> np.uint64(32)) * np.uint64(_MIX), dtype=np.uint64))


def total(numbers: int) -> int:
    return numbers & _MASK
