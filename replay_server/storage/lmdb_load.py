"""LmdbLoad: reads the state of the last commit from an LMDB file."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from replay_server.storage.chunks import CHUNK_NAME, match_payloads
from replay_server.storage.data_dir import COMMIT, COMMIT_RECORD, KEY, DamagedDirectory, UnusableDirectory
from replay_server.storage.records import (
    ANSWER,
    ENDED,
    FORMAT,
    SCOPE,
    Damaged,
    ItemRecords,
    State,
    join_items,
    unpack_items,
    unseal,
)

MAP_SIZE = 1 << 42
"""Of the address space only: the file grows with what it holds."""
_RECORDS_AT_ONCE = 1 << 16
_MAY_BE_LOST = (SCOPE, ENDED, ANSWER)
"""Names of the records without which a server can start."""


@dataclass(frozen=True)
class Databases:
    """The databases of a file, as LMDB names them."""

    payloads: Any
    items: Any
    pieces: Any
    seen: Any

    @classmethod
    def of(cls, env: lmdb.Environment, create: bool = True) -> Databases:
        """Raises lmdb.NotFoundError if one is missing, and is not to be made."""
        return cls(*(env.open_db(name, create=create) for name in (b"payloads", b"items", b"pieces", b"seen")))

    def all(self) -> tuple[Any, ...]:
        return self.payloads, self.items, self.pieces, self.seen


@dataclass(frozen=True)
class Loaded:
    """The state of the last commit."""

    state: State
    seen_counts: deque[tuple[int, int]]
    """(number, keys) of the records in `seen`."""
    strays: list[bytes]
    """Names of chunks that no item needs."""


def load(env: lmdb.Environment, databases: Databases, directory: Path) -> Loaded:
    """The committed state, without payloads. Items whose payload is incomplete are left out.

    Raises UnusableDirectory if the directory is not one, or of another version; DamagedDirectory if a record is damaged
    without which no server can start.
    """
    with env.begin() as txn:
        commit = txn.get(COMMIT)
        if commit is None and any(txn.stat(db)["entries"] for db in databases.all()):
            raise UnusableDirectory(f"data_dir {directory} holds data of something else; name another one")
        if commit is not None:
            _check_format(commit, directory)
        pieces = dict(txn.cursor(databases.pieces))
        seen: list[int] = []
        seen_counts: deque[tuple[int, int]] = deque()
        bad_seen = 0
        for key, record in txn.cursor(databases.seen):
            keys: list[int] = []
            try:
                keys = np.frombuffer(unseal(record), dtype="<u8").tolist()
            except (Damaged, ValueError):
                bad_seen += 1
            seen += keys
            seen_counts.append((KEY.unpack(key)[0], len(keys)))
        parts: list[ItemRecords] = []
        skipped: list[int] = []
        entries = iter(txn.cursor(databases.items))
        while portion := list(islice(entries, _RECORDS_AT_ONCE)):
            keys_there = np.frombuffer(b"".join(key for key, _ in portion), dtype=">u8")
            part = unpack_items(keys_there, [record for _, record in portion])
            if len(part) < len(portion):
                skipped += np.setdiff1d(keys_there, part.items["key"]).tolist()
            parts.append(part)
        names = txn.cursor(databases.payloads).iternext(values=False)
        there = np.concatenate(
            [
                np.empty(0, CHUNK_NAME),
                *(
                    np.frombuffer(b"".join(some), dtype=CHUNK_NAME)
                    for some in iter(lambda: list(islice(names, _RECORDS_AT_ONCE)), [])
                ),
            ]
        )
    items = join_items(parts)
    complete, strays = match_payloads(items, there)
    _check_state_records(pieces, directory)
    skipped += items.items["key"][~complete].tolist()
    state = State(pieces, items.select(complete), seen, skipped, bad_seen)
    return Loaded(state, seen_counts, strays)


def _check_state_records(pieces: dict[bytes, bytes], directory: Path) -> None:
    for name, record in pieces.items():
        if not name.startswith(_MAY_BE_LOST):
            try:
                unseal(record)
            except Damaged:
                what = f"the record {name.decode(errors='replace')!r} is damaged"
                raise DamagedDirectory(directory, what) from None


def _check_format(commit: bytes, directory: Path) -> None:
    try:
        version, _ = COMMIT_RECORD.unpack(unseal(commit))
    except (Damaged, struct.error):
        raise DamagedDirectory(directory, "the record of the last commit is damaged") from None
    if version != FORMAT:
        raise UnusableDirectory(
            f"data_dir {directory} has format {version}, and this version of the software reads {FORMAT}: use "
            f"the version that wrote it, or restore a checkpoint of this version into another directory"
        )
