"""LmdbStorage: payloads and records in one LMDB file under `data_dir`.

* A payload stays in memory until a commit has written it, together with all records that changed.
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
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

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
from replay_server.tables.items import DamagedPayloads, Payload, Reader, StorageFacts

log = logging.getLogger("replay_server")

BYTES_PER_TRANSACTION = 64 << 20
"""Payload bytes in one transaction, about: LMDB keeps all of it in memory."""
RESERVE = 64 << 20
"""Bytes of the disk that inserts leave free (an eighth, if that is less). Deletes and samples still need room."""
_LOOK_EVERY = 0.2
"""Seconds between two looks at the free space of the disk."""
MAP_SIZE = 1 << 42
"""Of the address space only: the file grows with what it holds."""
_RECORDS_AT_ONCE = 1 << 16
CHUNK_KEY = struct.Struct(">QI")
CHUNK_BYTES = 256 * 1024 - 16 - 8
"""Payload bytes in one value. With LMDB's page header and the checksum it fills its pages to the last byte. Small
chunks reuse the space of deleted ones: whole values of up to 5 MB would need half as much space again."""
CHUNK_NAME = np.dtype([("key", ">u8"), ("number", ">u4")])


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
        self._fresh: dict[int, Payload] = {}
        """Payloads that no commit has written yet."""
        self._gone: list[tuple[int, int]] = []
        """(key, bytes) of payloads to delete from the file."""
        self._half_written: set[int] = set()
        """Fresh payloads of a failed commit. Some of their chunks may be in the file."""
        self._taken: tuple[dict[int, Payload], list[tuple[int, int]]] = ({}, [])
        """The fresh and the deleted payloads that belong to the running commit."""
        self.unwritten = 0
        """Bytes of fresh payloads."""
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
        (self.directory / "lock.mdb").unlink(missing_ok=True)  # we hold server.lock, so its last owner is gone
        try:
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
        self._fresh.update(zip(keys, payloads, strict=True))
        self.unwritten += sum(len(piece) for payload in payloads for piece in payload)

    def get(self, keys: Sequence[int], sizes: Sequence[int]) -> list[Payload]:
        reader = self.reader(keys, sizes)
        found = reader.read(slice(None))
        reader.close()
        if damaged := [key for key, payload in zip(keys, found, strict=True) if payload is None]:
            raise DamagedPayloads(damaged)
        return [payload for payload in found if payload is not None]

    def reader(self, keys: Sequence[int], sizes: Sequence[int]) -> Reader:
        under_way = self._taken[0]
        unwritten = [self._fresh.get(key, under_way.get(key)) for key in keys]
        return ChunkReader(
            self._env.begin(db=self._payloads, buffers=True), list(zip(keys, sizes, unwritten, strict=True))
        )

    def delete(self, keys: Sequence[int], sizes: Sequence[int]) -> None:
        for key, size in zip(keys, sizes, strict=True):
            fresh = self._fresh.pop(key, None) is not None
            if fresh:
                self.unwritten -= size
            if not fresh or key in self._half_written:
                self._gone.append((key, size))

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

    def begin_commit(self) -> tuple[dict[int, Payload], list[tuple[int, int]]]:
        """The payloads to write and to delete in the next commit. They can be read until it has ended."""
        self._taken = self._fresh, self._gone
        self._fresh, self._gone = {}, []
        return self._taken

    def commit(
        self, delta: Delta, new: dict[int, Payload], gone: list[tuple[int, int]], slices: Sequence[Delta] = ()
    ) -> None:
        """Writes everything: the slices, and `delta` over them. If it raises lmdb.Error, nothing has an effect.

        The only method for another thread.
        """
        portion = BYTES_PER_TRANSACTION if new.keys().isdisjoint(key for key, _ in gone) else math.inf
        chunks = chunks_of(new)
        changes = [(some, pack_items(some.items)) for some in (*slices, delta)]
        whole = False
        while not whole:
            written = 0
            with self._env.begin(write=True) as txn:
                payloads = txn.cursor(self._payloads)
                for name, value in chunks:
                    payloads.put(name, value)
                    written += len(value)
                    if written >= portion:
                        break
                else:  # records go with the last payloads: without them the payloads have no effect
                    self._delete_payloads(txn, new, gone)
                    for some, records in changes:
                        self._write_records(txn, some, records)
                    whole = True
                txn.put(COMMIT, seal(COMMIT_RECORD.pack(FORMAT, txn.id())))
        self._strays = []

    def _delete_payloads(self, txn: lmdb.Transaction, new: dict[int, Payload], gone: list[tuple[int, int]]) -> None:
        for key, size in gone:
            for number in range(0 if key in new else chunk_count(size)):
                txn.delete(CHUNK_KEY.pack(key, number), db=self._payloads)
        for stray in self._strays:
            if CHUNK_KEY.unpack(stray)[0] not in new:
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
            self.commit(Delta(), *self.begin_commit())
            self.end_commit(None)

    @property
    def changed(self) -> bool:
        """Whether payloads have to be written or deleted."""
        return bool(self._fresh or self._gone or self._strays)

    def end_commit(self, error: lmdb.Error | None) -> list[int]:
        """The commit has ended. Returns the keys of payloads that it could not write; the next commit writes them."""
        new, gone = self._taken
        self._taken = {}, []
        self._looked_at = -_LOOK_EVERY
        if error is None:
            if not self.was_written:
                os.pwrite(self._lock, b"This directory holds data of a replay server.\n", 0)
            self.error = ""
            self.commits += 1
            self._half_written.clear()
            self.unwritten -= sum(map(_length, new.values()))
            return []
        self.error = f"the last commit failed ({error})"
        deleted = {key for key, _ in self._gone if key in new}
        self.unwritten -= sum(_length(new[key]) for key in deleted)
        self._gone = gone + [entry for entry in self._gone if entry[0] not in deleted]
        kept = {key: payload for key, payload in new.items() if key not in deleted}
        self._fresh = kept | self._fresh
        self._half_written |= new.keys()
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


def unneeded(items: ItemRecords, there: npt.NDArray[np.void]) -> list[bytes]:
    """Those of `there`, the names of chunks, that no payload of `items` needs."""
    keys, counts = items.items["key"], -(-items.items["nbytes"] // CHUNK_BYTES)
    needed = np.zeros(there.size, dtype=np.bool_)
    if keys.size:
        owner = np.searchsorted(keys, there["key"]).clip(max=keys.size - 1)
        needed = (keys[owner] == there["key"]) & (there["number"] < counts[owner])
    return [CHUNK_KEY.pack(key, number) for key, number in there[~needed].tolist()]
