"""Checkpoints: a directory of them (list, verify, open, prune), and the format of their files.

A checkpoint is a whole server in one file, written from front to back and read the same way, in frames. Each has a
checksum over all of it, so that any flip or cut is noticed:

    HEAD           format, name, time
    PAYLOADS       payloads of some items              ┐ in any order, while the server goes on;
    ITEM_COLUMNS   records of some items, as columns   │ the last record of an item counts
    REMOVED        keys of removed items               │
    STATE_RECORD   name, record or nothing             ┘
    FOOT           a summary, as of the one moment that the checkpoint describes

The last bytes say where FOOT begins, so that a list of checkpoints need not read them.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import msgpack
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from replay_server.errors import invalid
from replay_server.storage.records import ITEM, ROW, ItemRecords, State, StateRecord, join_items
from replay_server.tables.items import Payload

log = logging.getLogger("replay_server")

SUFFIX = ".checkpoint"
PARTIAL = ".partial"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}\Z")
_OWN_NAME = re.compile(r"auto-\d{8}T\d{6}\.\d{3}Z\Z")
HEAD, PAYLOADS, ITEM_COLUMNS, REMOVED, STATE_RECORD, FOOT = range(1, 7)
CHECKPOINT_FORMAT = 4
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
PLACE = np.dtype([("key", "<u8"), ("start", "<i8"), ("size", "<i8")])
"""Where in the file the payload of an item lies."""


@dataclass(frozen=True)
class Listed:
    """One file of the directory."""

    name: str
    created: float
    summary: Summary | None
    """None: the file is not a whole checkpoint."""
    problem: str = ""


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that has been verified as a whole."""

    path: Path
    summary: Summary
    state: State
    places: npt.NDArray[np.void]
    """A PLACE for each item (n,), in the order of the file."""

    def payloads(self) -> Iterator[tuple[list[int], list[Payload]]]:
        """Keys and payloads of the items, some MB at a time."""
        starts, ends = self.places["start"], self.places["start"] + self.places["size"]
        with self.path.open("rb") as file:
            at = 0
            while at < ends.size:
                # What lies between two payloads is small, so one read takes all that begin within some MB.
                first = int(starts[at])
                to = max(at + 1, int(np.searchsorted(ends, first + 16 * _CHUNK)))
                file.seek(first)
                block = file.read(int(ends[to - 1]) - first)
                spans = zip((starts[at:to] - first).tolist(), (ends[at:to] - first).tolist(), strict=True)
                yield self.places["key"][at:to].tolist(), [(block[start:end],) for start, end in spans]
                at = to


class CheckpointDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, name: str) -> Path:
        """Raises Refused for what is not the name of a checkpoint."""
        if not _NAME.match(name):
            raise invalid(
                f"checkpoint name {name[:100]!r}: 1 to 100 letters, digits, '_', '-' and '.', and neither of the last "
                f"two at its beginning"
            )
        return self.path / (name + SUFFIX)

    def check_writable(self) -> None:
        """Makes the folder. Raises ValueError if nothing can be written there: a server says so at its start."""
        # It writes no file to try: on a full disk a server must still start, and say so when it is asked for one.
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"[checkpoints] dir {self.path} cannot be written: {error.strerror}") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ValueError(f"[checkpoints] dir {self.path} cannot be written: Permission denied")

    def list(self) -> list[Listed]:
        """All checkpoints, the newest first. Reads only their first and last bytes."""
        found = [self._look(path, summary_of) for path in self.path.glob(f"*{SUFFIX}")]
        return sorted(filter(None, found), key=lambda entry: entry.created, reverse=True)

    def verify(self, name: str) -> Listed | None:
        """Reads every byte of a checkpoint; None: it is gone."""
        return self._look(self.file(name), lambda path: read_contents(path).summary)

    def _look(self, path: Path, read: Callable[[Path], Summary]) -> Listed | None:
        name = path.name.removesuffix(SUFFIX)
        try:
            status = path.stat()
            if not _NAME.match(name) or not stat.S_ISREG(status.st_mode):
                return None
            summary = read(path)
        except FileNotFoundError:
            return None  # removed meanwhile
        except (DamagedCheckpoint, OSError) as error:
            return Listed(name, status.st_mtime, None, str(error))
        return Listed(name, summary.created, summary)

    def open(self, name: str) -> OpenCheckpoint:
        """The checkpoint `name`, or "latest", or the newest whole one if that is damaged. Raises ValueError."""
        order = [entry.name for entry in self.list()]
        if name != "latest":
            if not _NAME.match(name) or name not in order:
                raise ValueError(f"no checkpoint {name!r} in {self.path}; there are: {', '.join(order) or 'none'}")
            order = [name, *(other for other in order if other != name)]
        for other in order:
            path = self.path / (other + SUFFIX)
            try:
                checkpoint = read_contents(path)
            except (DamagedCheckpoint, OSError) as error:
                log.error("checkpoint %s is damaged: %s", path, error)
                continue
            if other != order[0]:
                log.warning("falling back to checkpoint %s, the newest that is whole", other)
            return checkpoint
        raise ValueError(f"no whole checkpoint in {self.path}")

    def prune(self, keep: int) -> None:
        """Removes all but the newest `keep` of the checkpoints that a server named, and their unfinished files."""
        for partial in self.path.glob(f"auto-*{SUFFIX}{PARTIAL}"):
            if _OWN_NAME.match(partial.name.removesuffix(SUFFIX + PARTIAL)):
                partial.unlink(missing_ok=True)
        own = [entry for entry in self.list() if _OWN_NAME.match(entry.name) and entry.summary is not None]
        for entry in own[keep:]:
            self.file(entry.name).unlink(missing_ok=True)
            log.info("removed checkpoint %s: the last %d are kept", entry.name, keep)


def own_name(now: float) -> str:
    """The name that the server gives a checkpoint made at `now` (seconds since the epoch)."""
    return time.strftime("auto-%Y%m%dT%H%M%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03}Z"


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

    def __init__(self, path: Path, name: str, created: float, syncs: Executor) -> None:
        """`syncs` has a thread on which the disk is told to write."""
        self._file = path.open("xb", buffering=0)
        # Without regular syncs the system keeps a GB and more in memory, and writes it all at the end.
        self._syncs = syncs
        self._syncing: Future[None] | None = None
        self._unsynced = 0
        self._file.write(_MAGIC)
        self._frame(HEAD, [msgpack.packb([CHECKPOINT_FORMAT, name, created])])

    def payloads(self, payloads: Sequence[tuple[int, int, Payload]]) -> None:
        """Writes (key, bytes, payload) of some items."""
        columns = [len(payloads)], [key for key, _, _ in payloads], [size for _, size, _ in payloads]
        table = b"".join(np.array(column, "<u8").tobytes() for column in columns)
        self._frame(PAYLOADS, [table, *chain.from_iterable(payload for _, _, payload in payloads)])

    def item_columns(self, records: ItemRecords) -> None:
        counts = np.array([len(records), records.rows.size], "<u8")
        self._frame(
            ITEM_COLUMNS,
            [column.tobytes() for column in (counts, records.items, records.rows, records.owners, records.labels)],
        )

    def removed(self, keys: Sequence[int]) -> None:
        self._frame(REMOVED, [np.array(keys, "<u8").tobytes()])

    def piece(self, piece: StateRecord) -> None:
        self._frame(STATE_RECORD, [msgpack.packb([piece.name, piece.record])])

    def close(self, summary: Summary) -> None:
        """Completes the file and syncs it to the disk."""
        at = self._file.tell()
        values = [summary.name, summary.created, summary.items, summary.bytes, summary.policy_version]
        self._frame(FOOT, [msgpack.packb(values)])
        self._write_all(_TAIL.pack(at, _TAIL_MARK))
        self._wait_for_sync()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        self._wait_for_sync()
        self._file.close()

    def _wait_for_sync(self) -> None:
        """The file must stay open until then."""
        if self._syncing is not None:
            wait([self._syncing])

    def _frame(self, kind: int, parts: list[bytes | memoryview]) -> None:
        joined = list(_joined(parts))
        length = sum(map(len, joined))
        checksum = xxh3_64(_FRAME.pack(kind, length, 0))
        for part in joined:
            checksum.update(part)
        joined[0] = _FRAME.pack(kind, length, checksum.intdigest()) + joined[0]
        for part in joined:
            self._write_all(part)
        self._unsynced += length
        if self._unsynced >= _SYNC and (self._syncing is None or self._syncing.done()):
            self._syncing, self._unsynced = self._syncs.submit(os.fdatasync, self._file.fileno()), 0

    def _write_all(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while len(rest):
            rest = rest[self._file.write(rest) :]


def _joined(parts: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes: small parts together, large ones by themselves. The first is bytes."""
    start = 0
    for place, part in enumerate(parts):
        if len(part) >= _CHUNK // 4:
            yield b"".join(parts[start:place])
            yield part
            start = place + 1
    yield b"".join(parts[start:])


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


def read_contents(path: Path) -> OpenCheckpoint:
    """Verifies every byte of a checkpoint, and keeps all but the payloads. Raises DamagedCheckpoint."""
    summary = summary_of(path)
    records: list[ItemRecords | npt.NDArray[np.uint64]] = []
    """In the order of the file; an array has the keys of removed items."""
    all_places = [np.empty(0, PLACE)]
    state = State()
    with path.open("rb") as file:
        _check_head(file)
        end = os.fstat(file.fileno()).st_size - _TAIL.size
        kind = 0
        for kind, start, body in _frames(file, end):
            if kind == PAYLOADS:
                all_places.append(_places(body, start))
            elif kind == ITEM_COLUMNS:
                records.append(_item_columns(body))
            elif kind == REMOVED:
                records.append(np.frombuffer(body, "<u8"))
            elif kind == STATE_RECORD:
                name, record = msgpack.unpackb(body)
                if record is None:
                    state.state_records.pop(name, None)
                else:
                    state.state_records[name] = record
        if kind != FOOT:
            raise DamagedCheckpoint("its end is missing")
    state.items = _last_records(records)
    places = np.concatenate(all_places)
    if not np.array_equal(places["key"], state.items.items["key"]):  # they differ where something changed meanwhile
        places = places[_is_last(places["key"])]
        places = places[np.isin(places["key"], state.items.items["key"], assume_unique=True)]
    found, total = places.size, int(places["size"].sum())
    if not len(state.items) == found == summary.items or total != summary.bytes:
        raise DamagedCheckpoint(f"it has {found} items of {total} bytes, not {summary.items} of {summary.bytes}")
    return OpenCheckpoint(path, summary, state, places)


def _is_last(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """For each of `keys` (n,): whether the same key does not come again after it."""
    last = np.ones(keys.size, dtype=np.bool_)
    ordered = np.sort(keys)
    if (ordered[1:] != ordered[:-1]).all():  # an order that is stable takes many times as long
        return last
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    last[order[:-1]] = ordered[1:] != ordered[:-1]
    return last


def _last_records(parts: Sequence[ItemRecords | npt.NDArray[np.uint64]]) -> ItemRecords:
    """The last record of each item, in the order of `parts`, without those that were removed after it."""
    # Not by key: items stand in the file as they lie in memory, and keys are random.
    joined = join_items(part for part in parts if isinstance(part, ItemRecords))
    keys, is_record = [np.empty(0, np.uint64)], [np.empty(0, np.bool_)]
    for part in parts:
        of_items = isinstance(part, ItemRecords)
        keys.append(part.items["key"] if isinstance(part, ItemRecords) else part)
        is_record.append(np.full(len(part), of_items))
    chosen = _is_last(np.concatenate(keys))[np.concatenate(is_record)]
    return joined if chosen.all() else joined.select(chosen)


def _check_head(file: BinaryIO) -> None:
    """Leaves the file behind its head."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise DamagedCheckpoint("it does not begin like a checkpoint")
    kind, _, body = next(_frames(file, os.fstat(file.fileno()).st_size), (0, 0, b""))
    if kind != HEAD:
        raise DamagedCheckpoint("its head is damaged")
    if (version := msgpack.unpackb(body)[0]) != CHECKPOINT_FORMAT:
        raise DamagedCheckpoint(f"it has format {version}, and this version of the software reads {CHECKPOINT_FORMAT}")


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


def _places(body: bytes, start: int) -> npt.NDArray[np.void]:
    """A PLACE for each payload of a frame whose body begins at `start`."""
    n = int.from_bytes(body[:8], "little")
    places = np.empty(n, PLACE)
    places["key"], sizes = np.frombuffer(body, "<u8", n, 8), np.frombuffer(body, "<i8", n, 8 + 8 * n)
    places["start"], places["size"] = start + 8 + 16 * n + np.cumsum(sizes) - sizes, sizes
    return places


def _item_columns(body: bytes) -> ItemRecords:
    n, m = np.frombuffer(body, "<u8", 2).tolist()
    rows_at = 16 + n * ITEM.itemsize
    owners_at = rows_at + m * ROW.itemsize
    return ItemRecords(
        np.frombuffer(body, ITEM, n, 16),
        np.frombuffer(body, ROW, m, rows_at),
        np.frombuffer(body, "<i8", m, owners_at),
        np.frombuffer(body, np.uint8, offset=owners_at + 8 * m),
    )
