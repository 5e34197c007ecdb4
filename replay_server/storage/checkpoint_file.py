"""CheckpointFile: a whole server in one file, written from front to back and read the same way.

Frames, each with a checksum over all of it, so that any flip or cut is noticed:

    HEAD           name, time, FORMAT
    PAYLOADS       payloads of some items  ┐ in any order, while the server goes on;
    ITEMS          records of some items   │ the last record of an item counts
    REMOVED        keys of removed items   │
    STATE_RECORD   name, record or nothing │
    SEEN           inserted keys           ┘
    FOOT           a summary, as of the one moment that the checkpoint describes

The last bytes say where FOOT begins, so that a list of checkpoints need not read them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgpack
import numpy as np
from xxhash import xxh3_64

from replay_server.storage.records import FORMAT, State, StateRecord, unpack_items
from replay_server.tables.payloads import Payload

HEAD, PAYLOADS, ITEMS, REMOVED, STATE_RECORD, SEEN, FOOT = range(1, 8)

_MAGIC = b"replay checkpoint\0"
_FRAME = struct.Struct("<QQQ")
"""Kind, bytes that follow, checksum of both and of these."""
_TAIL = struct.Struct("<Q8s")
_TAIL_MARK = b"complete"
_CHUNK = 1 << 20
_SYNC = 32 << 20
"""Bytes after which the disk is told to write them."""
_MOST_RECORDS = 1 << 30
"""Bytes of a frame that is not of payloads; no frame is as large, unless its length is damaged."""


class DamagedCheckpoint(ValueError):
    """A file that is not a whole checkpoint, with the reason."""


@dataclass(frozen=True)
class Summary:
    """The contents of FOOT."""

    name: str
    created: float
    """Seconds since the epoch."""
    items: int
    bytes: int
    """Of all payloads."""
    policy_version: int


class CheckpointWriter:
    """Appends frames to a new file. May be called from any thread, one call at a time."""

    def __init__(self, path: Path, name: str, created: float) -> None:
        self._file = path.open("xb", buffering=0)
        # Without regular syncs the system keeps a GB and more in memory, and writes it all at the end.
        self._syncs = ThreadPoolExecutor(1, thread_name_prefix="replay-checkpoint-sync")
        self._syncing: Future[None] | None = None
        self._unsynced = 0
        self._file.write(_MAGIC)
        self._frame(HEAD, [msgpack.packb([FORMAT, name, created])])

    def payloads(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        sizes = [sum(map(len, payload)) for payload in payloads]
        self._frame(PAYLOADS, [_table(keys, sizes), *(part for payload in payloads for part in payload)])

    def items(self, items: Sequence[tuple[int, bytes]]) -> None:
        records = [record for _, record in items]
        self._frame(ITEMS, [_table([key for key, _ in items], list(map(len, records))), *records])

    def keys(self, kind: int, keys: Sequence[int]) -> None:
        self._frame(kind, [np.array(keys, "<u8").tobytes()])

    def piece(self, piece: StateRecord) -> None:
        self._frame(STATE_RECORD, [msgpack.packb([piece.name, piece.record])])

    def close(self, summary: Summary) -> None:
        """Completes the file and syncs it to the disk."""
        at = self._file.tell()
        values = [summary.name, summary.created, summary.items, summary.bytes, summary.policy_version]
        self._frame(FOOT, [msgpack.packb(values)])
        self._write([_TAIL.pack(at, _TAIL_MARK)])
        self._syncs.shutdown()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        self._syncs.shutdown()
        self._file.close()

    def _frame(self, kind: int, parts: list[bytes | memoryview]) -> None:
        length = sum(map(len, parts))
        checksum = xxh3_64(_FRAME.pack(kind, length, 0))
        for part in parts:
            checksum.update(part)
        self._write([_FRAME.pack(kind, length, checksum.intdigest()), *parts])
        self._unsynced += length
        if self._unsynced >= _SYNC and (self._syncing is None or self._syncing.done()):
            self._syncing, self._unsynced = self._syncs.submit(os.fdatasync, self._file.fileno()), 0

    def _write(self, parts: Iterable[bytes | memoryview]) -> None:
        """Writes everything; small parts together."""
        small: list[bytes | memoryview] = []
        for part in parts:
            if len(part) < _CHUNK // 4:
                small.append(part)
                continue
            self._write_all(b"".join(small))
            self._write_all(part)
            small = []
        self._write_all(b"".join(small))

    def _write_all(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while len(rest):
            rest = rest[self._file.write(rest) :]


def _table(keys: Sequence[int], sizes: Sequence[int]) -> bytes:
    """What stands before the parts of a frame: how many, their keys, their sizes."""
    return b"".join(np.array(column, "<u8").tobytes() for column in ([len(keys)], keys, sizes))


def summary_of(path: Path) -> Summary:
    """What a checkpoint holds, by its first and last bytes only. Raises DamagedCheckpoint."""
    with path.open("rb") as file:
        _check_head(file)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL.size))
        tail = file.read()
        at, mark = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (0, b"")
        if mark != _TAIL_MARK or at >= size - _TAIL.size:
            raise DamagedCheckpoint("its end is missing")
        file.seek(at)
        kind, _, body = next(_frames(file, size - _TAIL.size))
        if kind != FOOT:
            raise DamagedCheckpoint("its end is damaged")
        return Summary(*msgpack.unpackb(body))


@dataclass(frozen=True)
class Contents:
    """A checkpoint that has been verified as a whole."""

    summary: Summary
    state: State
    places: dict[int, tuple[int, int]]
    """Where in the file the payload of each item lies: (start, bytes)."""


def read_contents(path: Path) -> Contents:
    """Verifies every byte of a checkpoint, and keeps all but the payloads. Raises DamagedCheckpoint."""
    summary = summary_of(path)
    records: dict[int, bytes] = {}
    places: dict[int, tuple[int, int]] = {}
    state = State()
    with path.open("rb") as file:
        _check_head(file)
        end = os.fstat(file.fileno()).st_size - _TAIL.size
        kind = 0
        for kind, start, body in _frames(file, end):
            if kind == PAYLOADS:
                places.update((key, (start + at, size)) for key, at, size in _entries(body))
            elif kind == ITEMS:
                records.update((key, body[at : at + size]) for key, at, size in _entries(body))
            elif kind == REMOVED:
                for key in np.frombuffer(body, "<u8").tolist():
                    records.pop(key, None)
            elif kind == SEEN:
                state.known_keys += np.frombuffer(body, "<u8").tolist()
            elif kind == STATE_RECORD:
                name, record = msgpack.unpackb(body)
                if record is None:
                    state.state_records.pop(name, None)
                else:
                    state.state_records[name] = record
        if kind != FOOT:
            raise DamagedCheckpoint("its end is missing")
    keys = sorted(records)
    state.items = unpack_items(np.array(keys, dtype=np.uint64), [records[key] for key in keys])
    found = {key: places[key] for key in keys if key in places}
    total = sum(size for _, size in found.values())
    if not len(state.items) == len(found) == summary.items or total != summary.bytes:
        raise DamagedCheckpoint(f"it has {len(found)} items of {total} bytes, not {summary.items} of {summary.bytes}")
    return Contents(summary, state, found)


def read_payloads(path: Path, places: dict[int, tuple[int, int]]) -> Iterator[tuple[list[int], list[Payload]]]:
    """The payloads that lie there, some MB at a time, in the order of the file."""
    with path.open("rb") as file:
        keys: list[int] = []
        payloads: list[Payload] = []
        read = 0
        for key, (start, size) in sorted(places.items(), key=lambda entry: entry[1]):
            file.seek(start)
            keys.append(key)
            payloads.append((file.read(size),))
            if (read := read + size) >= 16 * _CHUNK:
                yield keys, payloads
                keys, payloads, read = [], [], 0
        yield keys, payloads


def _check_head(file: BinaryIO) -> None:
    """Leaves the file behind its head."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise DamagedCheckpoint("it does not begin like a checkpoint")
    kind, _, body = next(_frames(file, os.fstat(file.fileno()).st_size), (0, 0, b""))
    if kind != HEAD:
        raise DamagedCheckpoint("its head is damaged")
    if (version := msgpack.unpackb(body)[0]) != FORMAT:
        raise DamagedCheckpoint(f"it has format {version}, and this version of the software reads {FORMAT}")


def _frames(file: BinaryIO, end: int) -> Iterator[tuple[int, int, bytes]]:
    """(kind, start of the body, body) of each frame from here to `end`; of PAYLOADS only what says whose they are."""
    while (at := file.tell()) < end:
        head = file.read(_FRAME.size)
        if len(head) < _FRAME.size:
            raise DamagedCheckpoint(f"it is cut off at byte {at}")
        kind, length, expected = _FRAME.unpack(head)
        start = at + _FRAME.size
        if length > end - start or (kind != PAYLOADS and length > _MOST_RECORDS):
            raise DamagedCheckpoint(f"it is cut off or damaged at byte {at}")
        checksum = xxh3_64(_FRAME.pack(kind, length, 0))
        kept = length
        if kind == PAYLOADS:
            count = file.read(8)
            checksum.update(count)
            kept = min(max(0, length - 8), 16 * int.from_bytes(count, "little"))
        body = file.read(kept)
        checksum.update(body)
        rest = start + length - file.tell()
        while rest > 0:
            chunk = file.read(min(rest, _CHUNK))
            checksum.update(chunk)
            rest -= len(chunk)
        if checksum.intdigest() != expected:
            raise DamagedCheckpoint(f"bytes {at} to {start + length} are not what was written")
        yield kind, start, count + body if kind == PAYLOADS else body


def _entries(body: bytes) -> Iterator[tuple[int, int, int]]:
    """(key, where it begins in the body, bytes) of each part that the count, keys and sizes before them speak of."""
    n = int.from_bytes(body[:8], "little")
    keys, sizes = np.frombuffer(body, "<u8", n, 8), np.frombuffer(body, "<u8", n, 8 + 8 * n)
    starts = 8 + 16 * n + np.cumsum(sizes) - sizes
    return zip(keys.tolist(), starts.tolist(), sizes.tolist(), strict=True)
