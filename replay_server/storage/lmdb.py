"""LmdbStorage: payloads and records in one LMDB file under `data_dir`.

* A payload stays in memory until a commit has written it, together with all records that changed.
* A payload that is extended keeps its chunks. Only the last one, if it is not full, is written again, with more bytes.
  So a chunk may have more bytes than the payload of a reader, or of an older commit. These bytes do not belong to it.
* Each transaction leads from one consistent state of the server to the next.
* LMDB syncs the pages of a transaction before it writes the root that names them, and then the root. So the file is
  whole after a crash of the machine, and has every transaction that has ended. Without these syncs (`fsync=False`) only
  the death of the process is harmless: the file `unsynced` then names the boot of the machine in which it was written,
  and a start in a later boot refuses the directory.
* LMDB trusts its file, and a damaged page can crash it. So every page is verified before it opens (data_dir.py).
* Payloads and records have checksums of their own, which are verified when they are read.

    payloads   key (8 bytes, big-endian), number of the chunk (4 bytes) -> checksum, at most CHUNK_BYTES
    items      key -> record of the item and its rows
    pieces     name -> record of a table, the policy, ...
    (main)     "commit" -> format, number of the transaction
"""

from __future__ import annotations

import logging
import math
import os
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_digest, xxh3_64_intdigest

from replay_protos.framing import cut
from replay_server.storage.data_dir import (
    COMMIT,
    COMMIT_RECORD,
    KEY,
    DamagedDirectory,
    UnusableDirectory,
    lock,
    put_aside,
    sync_directory,
    why_not_openable,
)
from replay_server.storage.records import (
    FORMAT,
    Damaged,
    Delta,
    ItemRecords,
    State,
    boot_id,
    join_items,
    pack_items,
    seal,
    unpack_items,
    unseal,
)
from replay_server.tables.items import DamagedPayloads, Payload, Reader, StorageFacts, first_bytes

log = logging.getLogger("replay_server")

BYTES_PER_TRANSACTION = 64 << 20
"""Payload bytes in one transaction, about: LMDB keeps all of it in memory."""
RESERVE = 64 << 20
"""Bytes of the disk that inserts leave free (an eighth, if that is less). Deletes and samples still need room."""
_LOOK_EVERY = 0.2
"""Seconds between two looks at the free space of the disk."""
MAP_SIZE = 1 << 42
"""Of the address space only: the file grows with what it holds."""
LOCK_BYTES = 8192
"""Of LMDB's lock file with its default of 126 readers."""
_RECORDS_AT_ONCE = 1 << 16
CHUNK_KEY = struct.Struct(">QI")
CHUNK_BYTES = 256 * 1024 - 16 - 8
"""Payload bytes in one value. With LMDB's page header and the checksum it fills its pages to the last byte. Small
chunks reuse the space of deleted ones: whole values of up to 5 MB would need half as much space again."""
CHUNK_NAME = np.dtype([("key", ">u8"), ("number", ">u4")])


class Growth(NamedTuple):
    """Bytes that were appended to a payload."""

    size: int
    """Bytes of the payload before."""
    pieces: Payload


@dataclass
class Unwritten:
    """What belongs to one commit of payloads."""

    fresh: dict[int, Payload] = field(default_factory=dict)
    """Payloads that no commit has written yet, by key."""
    grown: dict[int, Growth] = field(default_factory=dict)
    """What was appended to payloads since the commit before, by key. A payload may be fresh and grown."""
    gone: list[tuple[int, int]] = field(default_factory=list)
    """(key, bytes) of payloads to delete from the file."""

    def bytes_of(self, keys: Iterable[int]) -> int:
        """Bytes of the payloads of these keys that belong to this commit."""
        empty = Growth(0, ())
        return sum(_length(self.fresh.get(key, ())) + _length(self.grown.get(key, empty).pieces) for key in keys)


class LmdbStorage:
    def __init__(self, directory: Path, *, fsync: bool = False, replace: bool = False) -> None:
        """Opens or creates the directory. `fsync`: a commit returns when it is on the disk. `replace`: the old file is
        renamed and kept.

        Raises UnusableDirectory, also if it cannot be made or written, and DamagedDirectory if its file is damaged.
        """
        self.directory = directory
        self._fsync = fsync
        self._unsynced = directory / "unsynced"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = lock(directory)
        except OSError as error:
            raise UnusableDirectory(f"data_dir {directory} cannot be written: {error.strerror}") from error
        try:
            if replace:
                put_aside(directory)
                self._unsynced.unlink(missing_ok=True)
            else:
                self._check_openable()
            self._open()
        except BaseException:
            os.close(self._lock)
            raise
        self.fell_back = ""
        """How the server started in spite of a damaged directory, in words; "": it was whole."""
        self._next = Unwritten()
        """What the next commit writes."""
        self._taken = Unwritten()
        """What the running commit writes."""
        self._taken_bytes = 0
        """Payload bytes of that."""
        self._writing: lmdb.Transaction
        """The transaction in which the running commit writes; of its thread."""
        self._half_written: set[int] = set()
        """Fresh payloads of a failed commit. Some of their chunks may be in the file."""
        self.unwritten = 0
        """Payload bytes that no commit has written yet."""
        self._strays: list[bytes] = []
        """Names of chunks that no item needs."""
        self.commits = 0
        self.error = ""
        """Why the last commit failed, if it did."""
        self._room = 0
        self._lacking = 0
        """Bytes for which there was no room; 0: there is room."""
        self._looked_at = -_LOOK_EVERY

    @property
    def was_written(self) -> bool:
        """Whether a commit has ended in this directory, now or in a file that was put aside since."""
        return os.fstat(self._lock).st_size > 0

    def _check_openable(self) -> None:
        path = self.directory / "data.mdb"
        if not path.exists() or not path.stat().st_size:
            if self.was_written:
                raise DamagedDirectory(self.directory, "data.mdb is gone or empty")
        elif self._unsynced.exists() and self._unsynced.read_text() != boot_id():
            raise DamagedDirectory(self.directory, 'the machine stopped while a server with fsync = "never" wrote')
        elif problem := why_not_openable(path, {b"items": KEY.size, b"payloads": CHUNK_KEY.size}):
            raise DamagedDirectory(self.directory, problem)

    def _open(self) -> None:
        lock_file = self.directory / "lock.mdb"
        lock_file.unlink(missing_ok=True)  # we hold server.lock, so its last owner is gone
        try:
            # LMDB maps a file with a hole, and a full disk would end the process (SIGBUS) when it writes there.
            lock_file.write_bytes(bytes(LOCK_BYTES))
            self._env = lmdb.open(
                str(self.directory),
                map_size=MAP_SIZE,
                max_dbs=8,
                sync=self._fsync,
                metasync=self._fsync,
                readahead=False,
                max_spare_txns=4,
            )
            self._databases = [self._env.open_db(name) for name in (b"payloads", b"items", b"pieces")]
            if self._fsync:
                self.sync()
            else:
                self._unsynced.write_text(boot_id())
                sync_directory(self.directory)
        except (lmdb.Error, OSError) as error:
            raise UnusableDirectory(f"data_dir {self.directory}: {error}") from error
        self._payloads, self._items, self._pieces = self._databases

    # ------------------------------------------------------------------------------------------------ payloads

    def put(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        self._next.fresh.update(zip(keys, payloads, strict=True))
        self.unwritten += sum(len(piece) for payload in payloads for piece in payload)

    def extend(self, key: int, size: int, segment: Payload) -> None:
        before = self._next.grown.get(key, Growth(size, ()))
        self._next.grown[key] = Growth(before.size, (*before.pieces, *segment))
        self.unwritten += _length(segment)

    def get(self, keys: Sequence[int], sizes: Sequence[int]) -> list[Payload]:
        reader = self.reader(keys, sizes)
        found = reader.read(slice(None))
        reader.close()
        if damaged := [key for key, payload in zip(keys, found, strict=True) if payload is None]:
            raise DamagedPayloads(damaged)
        return [payload for payload in found if payload is not None]

    def reader(self, keys: Sequence[int], sizes: Sequence[int]) -> Reader:
        fresh, under_way = self._next.fresh, self._taken.fresh
        if self._next.grown or self._taken.grown:
            entries = [self._entry(key, size) for key, size in zip(keys, sizes, strict=True)]
        else:
            entries = [
                (key, size, ()) if (payload := fresh.get(key, under_way.get(key))) is None else (key, 0, payload)
                for key, size in zip(keys, sizes, strict=True)
            ]
        return ChunkReader(self._env.begin(db=self._payloads, buffers=True), entries)

    def _entry(self, key: int, size: int) -> Entry:
        """Where the first `size` bytes of a payload are, some of which may be in memory only."""
        written = size
        pieces: Payload = ()
        for part in (self._taken, self._next):
            if key in part.fresh:  # also where an older item with this key is in the file, or on its way there
                written, pieces = 0, part.fresh[key]
            if (growth := part.grown.get(key)) is not None:
                written, pieces = min(written, growth.size), (*pieces, *growth.pieces)
        written = min(written, size)
        return key, written, first_bytes(pieces, size - written)

    def delete(self, keys: Sequence[int], sizes: Sequence[int]) -> None:
        following = self._next
        for key, size in zip(keys, sizes, strict=True):
            fresh = following.fresh.pop(key, None) is not None
            growth = following.grown.pop(key, None) if following.grown else None
            if fresh:
                self.unwritten -= size
            elif growth is not None:
                self.unwritten -= _length(growth.pieces)
            if not fresh or key in self._half_written:
                following.gone.append((key, size))

    def why_full(self, nbytes: int) -> str | None:
        if self.error:
            return f"data_dir {self.directory}: {self.error}; {self._free_bytes()[0]} bytes are free"
        if (now := time.monotonic()) - self._looked_at >= _LOOK_EVERY:
            free, reserve = self._free_bytes()
            self._looked_at, self._room = now, free + self._free_pages() - reserve
        if nbytes + self.unwritten > self._room:
            free, reserve = self._free_bytes()
            why = (
                f"data_dir {self.directory} has no room for {nbytes} bytes: {free} bytes are free on its disk, and "
                f"{reserve} stay so"
            )
            if not self._lacking:
                log.error("%s: such inserts are refused until there is room", why)
            self._lacking = nbytes
            return why
        if self._lacking and nbytes >= self._lacking:
            log.warning("data_dir %s has room again", self.directory)
            self._lacking = 0
        return None

    def _free_bytes(self) -> tuple[int, int]:
        """The free bytes of the disk, and how many of them are reserved."""
        disk = os.statvfs(self.directory)
        return disk.f_bavail * disk.f_frsize, min(RESERVE, disk.f_blocks * disk.f_frsize // 8)

    def _free_pages(self) -> int:
        """Free bytes within the file that new payloads can use, about: half is counted as lost to fragmentation."""
        with self._env.begin() as txn:
            stats = [txn.stat(db) for db in self._databases]
        used = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        free = (self._env.info()["last_pgno"] - used) * stats[0]["psize"]
        return free // 2

    def facts(self) -> StorageFacts:
        blocks, error = (self.directory / "data.mdb").stat().st_blocks, self.error
        if not error and self._lacking:  # nobody may insert any more, so look whether there is room now
            error = self.why_full(self._lacking) or ""
        return StorageFacts(
            "lmdb", disk_bytes=blocks * 512, commits=self.commits, error=error, fell_back=self.fell_back
        )

    # ------------------------------------------------------------------------------------------------ commits

    def begin_commit(self) -> Unwritten:
        """The payloads to write and to delete in the next commit. They can be read until it has ended."""
        self._taken, self._next = self._next, Unwritten()
        self._taken_bytes = self.unwritten
        return self._taken

    def commit(self, delta: Delta, payloads: Unwritten, slices: Sequence[Delta] = ()) -> None:
        """Writes everything: the slices, and `delta` over them. If it raises lmdb.Error, nothing has an effect.

        The only method for another thread.
        """
        again = payloads.fresh.keys().isdisjoint(key for key, _ in payloads.gone)
        portion = BYTES_PER_TRANSACTION if again else math.inf
        chunks = self._chunks(payloads)
        changes = [(some, pack_items(some.items)) for some in (*slices, delta)]
        whole = False
        while not whole:
            written = 0
            with self._env.begin(write=True) as self._writing:
                cursor = self._writing.cursor(self._payloads)
                for name, value in chunks:
                    cursor.put(name, value)
                    written += len(value)
                    if written >= portion:
                        break
                else:  # records go with the last payloads: without them the payloads have no effect
                    self._delete_payloads(self._writing, payloads)
                    for some, records in changes:
                        self._write_records(self._writing, some, records)
                    whole = True
                self._writing.put(COMMIT, seal(COMMIT_RECORD.pack(FORMAT, self._writing.id())))
        self._strays = []

    def _chunks(self, payloads: Unwritten) -> Iterator[tuple[bytes, bytes]]:
        """(name, value) of each chunk to write, for the transaction that is open when it is asked for."""
        for key, payload in payloads.fresh.items():
            growth = payloads.grown.get(key)
            yield from chunks_of(key, payload if growth is None else (*payload, *growth.pieces))
        for key, growth in payloads.grown.items():
            if key in payloads.fresh:
                continue
            first, inside = divmod(growth.size, CHUNK_BYTES)
            tail = b""
            if inside:
                value = self._writing.get(CHUNK_KEY.pack(key, first), db=self._payloads)
                # A damaged chunk stays as it is. With a new checksum nobody would find out.
                if (found := unsealed_chunk(key, first, value, inside)) is None:
                    continue
                tail = found
            yield from chunks_of(key, (tail, *growth.pieces), first)

    def _delete_payloads(self, txn: lmdb.Transaction, payloads: Unwritten) -> None:
        for key, size in payloads.gone:
            for number in range(0 if key in payloads.fresh else chunk_count(size)):
                txn.delete(CHUNK_KEY.pack(key, number), db=self._payloads)
        for stray in self._strays:
            if (key := CHUNK_KEY.unpack(stray)[0]) not in payloads.fresh and key not in payloads.grown:
                txn.delete(stray, db=self._payloads)

    def _write_records(self, txn: lmdb.Transaction, delta: Delta, records: list[tuple[int, bytes]]) -> None:
        for key in delta.removed:
            txn.delete(KEY.pack(key), db=self._items)
        txn.cursor(self._items).putmulti([(KEY.pack(key), record) for key, record in records])
        for piece in delta.state_records:
            if piece.record is None:
                txn.delete(piece.name, db=self._pieces)
            else:
                txn.put(piece.name, piece.record, db=self._pieces)

    def write_payloads(self) -> None:
        """Writes the payloads so far, to free their memory. They have an effect once their items are written."""
        if self.unwritten:
            self.commit(Delta(), self.begin_commit())
            self.end_commit(None)

    @property
    def changed(self) -> bool:
        """Whether payloads have to be written or deleted."""
        following = self._next
        return bool(following.fresh or following.grown or following.gone or self._strays)

    def end_commit(self, error: lmdb.Error | None) -> list[int]:
        """The commit has ended. Returns the keys of new payloads that it could not write.

        The next commit writes them, and what was appended to others.
        """
        taken, following = self._taken, self._next
        self._taken = Unwritten()
        self._looked_at = -_LOOK_EVERY
        if error is None:
            if not self.was_written:
                os.pwrite(self._lock, b"This directory holds data of a replay server.\n", 0)
            self.error = ""
            self.commits += 1
            self._half_written.clear()
            self.unwritten -= self._taken_bytes
            return []
        self.error = f"the last commit failed ({error})"
        deleted = {key for key, _ in following.gone if key in taken.fresh or key in taken.grown}
        self.unwritten -= taken.bytes_of(deleted)
        following.gone = taken.gone + [entry for entry in following.gone if entry[0] not in deleted]
        kept = {key: payload for key, payload in taken.fresh.items() if key not in deleted}
        following.fresh = kept | following.fresh
        for key, growth in taken.grown.items():
            if key not in deleted:
                later = following.grown.get(key, Growth(0, ()))
                following.grown[key] = Growth(growth.size, (*growth.pieces, *later.pieces))
        self._half_written |= taken.fresh.keys()
        return list(kept)

    def sync(self) -> None:
        """Returns when all commits so far are on the disk. May be called from any thread."""
        self._env.sync(True)
        self._unsynced.unlink(missing_ok=True)
        sync_directory(self.directory)

    def close(self) -> None:
        """Closes the file. Without `fsync` the commits since the last `sync` are not on the disk yet."""
        self._env.close()
        os.close(self._lock)

    # ------------------------------------------------------------------------------------------------ start

    def load(self) -> State:
        """The committed state, without payloads. What a payload lacks is found when it is read.

        Raises UnusableDirectory if the directory is not one, or of another version, and DamagedDirectory.
        """
        with self._env.begin() as txn:
            commit = txn.get(COMMIT)
            if commit is None and any(txn.stat(db)["entries"] for db in self._databases):
                raise UnusableDirectory(f"data_dir {self.directory} holds data of something else; name another one")
            if commit is not None:
                _check_format(commit, self.directory)
            pieces = dict(txn.cursor(self._pieces))
            parts: list[ItemRecords] = []
            skipped: list[int] = []
            entries = iter(txn.cursor(self._items))
            while portion := list(islice(entries, _RECORDS_AT_ONCE)):
                keys_there = np.frombuffer(b"".join(key for key, _ in portion), dtype=">u8")
                part = unpack_items(keys_there, [record for _, record in portion])
                if len(part) < len(portion):
                    skipped += np.setdiff1d(keys_there, part.items["key"]).tolist()
                parts.append(part)
            chunks = [np.empty(0, CHUNK_NAME)]
            names = txn.cursor(self._payloads).iternext(values=False)
            while some := list(islice(names, _RECORDS_AT_ONCE)):
                chunks.append(np.frombuffer(b"".join(some), dtype=CHUNK_NAME))
        items = join_items(parts)
        self._strays = unneeded(items, np.concatenate(chunks))
        return State(pieces, items, skipped)


def _length(payload: Payload) -> int:
    return sum(map(len, payload))


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


Entry = tuple[int, int, Payload]
"""Where a payload is: its key, how many of its first bytes are in the file, and the bytes after them, in memory."""


class ChunkReader:
    """Reads the payloads of one moment: a transaction sees no later change."""

    def __init__(self, txn: lmdb.Transaction, entries: Sequence[Entry]) -> None:
        self._txn = txn
        self._entries = entries

    def read(self, part: slice) -> list[Payload | None]:
        return [
            _read(self._txn, key, written, pieces) if written else pieces
            for key, written, pieces in self._entries[part]
        ]

    def close(self) -> None:
        self._txn.abort()


def _read(txn: lmdb.Transaction, key: int, size: int, more: Payload) -> Payload | None:
    """The first `size` bytes of the payload in its chunks, and then `more`; None if it is damaged."""
    pieces = []
    for number in range(chunk_count(size)):
        value = txn.get(CHUNK_KEY.pack(key, number))
        piece = unsealed_chunk(key, number, value, min(CHUNK_BYTES, size - number * CHUNK_BYTES))
        if piece is None:
            return None
        pieces.append(piece)
    return (*pieces, *more)


def unsealed_chunk(key: int, number: int, value: bytes | memoryview | None, size: int) -> bytes | None:
    """The first `size` bytes of a chunk, of the value under its name; None if it is damaged, shorter, or not there."""
    if value is None or len(value) < 8 + size:
        return None
    piece = bytes(value[8:])  # the view ends with the transaction
    if xxh3_64_intdigest(piece, _seed(key, number)).to_bytes(8) != value[:8]:
        return None
    return piece if len(piece) == size else piece[:size]


def chunks_of(key: int, payload: Payload, first: int = 0) -> Iterator[tuple[bytes, bytes]]:
    """(name, value) of each chunk of a payload, or of its rest from the chunk with the number `first` on."""
    if len(payload) == 1 and isinstance(whole := payload[0], bytes) and 0 < len(whole) <= CHUNK_BYTES:
        # The most frequent case takes half the time so.
        yield CHUNK_KEY.pack(key, first), xxh3_64_digest(whole, _seed(key, first)) + whole
        return
    for number, parts in enumerate(cut(payload, CHUNK_BYTES), first):
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


def unneeded(items: ItemRecords, there: npt.NDArray[np.void]) -> list[bytes]:
    """Those of `there`, the names of chunks, that no payload of `items` needs."""
    keys, counts = items.items["key"], -(-items.items["nbytes"] // CHUNK_BYTES)
    needed = np.zeros(there.size, dtype=np.bool_)
    if keys.size:
        owner = np.searchsorted(keys, there["key"]).clip(max=keys.size - 1)
        needed = (keys[owner] == there["key"]) & (there["number"] < counts[owner])
    return [CHUNK_KEY.pack(key, number) for key, number in there[~needed].tolist()]
