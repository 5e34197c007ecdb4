"""LmdbLoad: reads the state of one commit from an LMDB file, and says whether it is whole."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from replay_server.storage import digest, records
from replay_server.storage.chunks import CHUNK_NAME, ChunkReader, match_payloads
from replay_server.storage.data_dir import COMMIT, COMMIT_RECORD, KEY, UnusableDirectory
from replay_server.storage.digest import DIGEST, DIGEST_RECORD
from replay_server.storage.records import (
    ANSWER,
    CLOCK,
    FORMAT,
    SCOPE,
    TAKEN,
    Damaged,
    ItemRecords,
    State,
    join_items,
    unpack,
    unpack_items,
    unseal,
)
from replay_server.tables.payloads import read_slices

MAP_SIZE = 1 << 42
"""Of the address space only: the file grows with what it holds."""
_RECORDS_AT_ONCE = 1 << 16
_MAY_BE_LOST = (SCOPE, TAKEN, ANSWER)
"""Names of the records without which a server can start."""


class NotWhole(Exception):
    """A state is not that of one commit, with the reason."""


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
    """The state of one commit."""

    state: State
    seen_counts: deque[tuple[int, int]]
    """(number, keys) of the records in `seen`."""
    strays: list[bytes]
    """Names of chunks that no item needs."""
    digest: int
    """Of all that was read."""
    recorded: int | None
    """The digest that the commit recorded; None: an older version of the software wrote it."""
    damaged: int
    """How many records are not what was written."""


def load(env: lmdb.Environment, databases: Databases, directory: Path) -> Loaded:
    """The committed state, without payloads. Items whose payload is incomplete are left out.

    Raises UnusableDirectory if the directory is not one, or of another version; NotWhole if a record is damaged without
    which no server can start.
    """
    with env.begin() as txn:
        commit = txn.get(COMMIT)
        if commit is None and any(txn.stat(db)["entries"] for db in databases.all()):
            raise UnusableDirectory(f"data_dir {directory} holds data of something else; name another one")
        number = None if commit is None else _checked_number(commit, directory)
        sums = 0
        pieces = dict(txn.cursor(databases.pieces))
        for name, record in pieces.items():
            sums += digest.of_record(name, record)
        seen: list[int] = []
        seen_counts: deque[tuple[int, int]] = deque()
        bad_seen = 0
        for key, record in txn.cursor(databases.seen):
            sums += digest.of_record(key, record)
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
                bad = set(np.setdiff1d(keys_there, part.items["key"]).tolist())
                skipped += bad
                # They count as they are, because the commit that deletes them subtracts them so.
                sums += sum(digest.of_item(record) for key, record in portion if KEY.unpack(key)[0] in bad)
            parts.append(part)
            sums += digest.of_items(part.items["checksum"])
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
        sums += digest.of_chunks(there)
        recorded = _recorded_digest(txn.get(DIGEST), number)
    items = join_items(parts)
    complete, strays = match_payloads(items, there)
    bad_records = len(skipped) + bad_seen + _damaged(pieces)
    skipped += items.items["key"][~complete].tolist()
    state = State(pieces, items.select(complete), seen, skipped, bad_seen)
    return Loaded(state, seen_counts, strays, digest.total(sums), recorded, bad_records)


def check(loaded: Loaded, env: lmdb.Environment, databases: Databases, on_disk: bool) -> None:
    """Raises NotWhole unless the state is known to be that of its commit.

    `on_disk`: all of its pages are on the disk as they were written. Then, and if the machine did not crash, a damaged
    record is damage of the disk, and costs that record alone.
    """
    crashed = _has_crashed(loaded.state.state_records)
    if (
        loaded.recorded is not None
        and loaded.recorded != loaded.digest
        and not (loaded.damaged and (on_disk or not crashed))
    ):
        raise NotWhole("its records are not those of one commit")
    if crashed and not on_disk:
        _check_payloads(loaded.state, env, databases)


def _check_payloads(state: State, env: lmdb.Environment, databases: Databases) -> None:
    """Reads all payloads. Raises NotWhole if one is damaged."""
    if state.skipped:
        raise NotWhole(f"the payload of item {state.skipped[0]} is not complete")
    keys, sizes = state.items.items["key"].tolist(), state.items.items["nbytes"].tolist()
    for part in read_slices(sizes):
        entries = [(key, size, None) for key, size in zip(keys[part], sizes[part], strict=True)]
        reader = ChunkReader(env.begin(db=databases.payloads, buffers=True), entries)
        found = reader.read(slice(None))
        reader.close()
        for key, payload in zip(keys[part], found, strict=True):
            if payload is None:
                raise NotWhole(f"the payload of item {key} is not what was written")


def _has_crashed(state_records: dict[bytes, bytes]) -> bool:
    """Whether the machine was started since the last commit."""
    if (record := state_records.get(CLOCK)) is None:
        return False
    booted, now = unpack(record)[0], records.boot_id()
    return bool(booted and now and booted != now)


def _damaged(pieces: dict[bytes, bytes]) -> int:
    """How many state records are damaged. Raises NotWhole if no server can start without one of them."""
    damaged = 0
    for name, record in pieces.items():
        try:
            unseal(record)
        except Damaged:
            if not name.startswith(_MAY_BE_LOST):
                raise NotWhole(f"the record {name.decode(errors='replace')!r} is damaged") from None
            damaged += 1
    return damaged


def _checked_number(commit: bytes, directory: Path) -> int:
    try:
        version, number = COMMIT_RECORD.unpack(unseal(commit))
    except (Damaged, struct.error):
        raise NotWhole("the record of the last commit is damaged") from None
    if version != FORMAT:
        raise UnusableDirectory(
            f"data_dir {directory} has format {version}, and this version of the software reads {FORMAT}: use "
            f"the version that wrote it, or restore a checkpoint of this version into another directory"
        )
    return int(number)


def _recorded_digest(record: bytes | None, number: int | None) -> int | None:
    """The digest of commit `number`. Older versions of the software leave that of an earlier commit."""
    if record is None:
        return None
    try:
        of_commit, recorded = DIGEST_RECORD.unpack(unseal(record))
    except (Damaged, struct.error):
        raise NotWhole("the record of the digest is damaged") from None
    return int(recorded) if of_commit == number else None
