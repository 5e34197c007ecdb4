"""LmdbStorage: payloads and records in one LMDB file under `data_dir`.

* A payload stays in memory until a commit has written it, together with all records that changed.
* A payload that is extended keeps its chunks, and gets more. One commit may write several segments as one chunk. So a
  chunk may have more bytes than the payload had when a reader learned its size.
* Each transaction leads from one consistent state of the server to the next.
* LMDB syncs the pages of a transaction before it writes the root that names them, and then the root. So the file is
  whole after a crash of the machine, and has every transaction that has ended. Without these syncs (`fsync=False`) only
  the death of the process is harmless: the file `unsynced` then names the boot of the machine in which it was written,
  and a start in a later boot refuses the directory.
* LMDB trusts its file, and a damaged page can crash it. So every page is verified before it opens (data_dir.py).
* Payloads and records have checksums of their own, which are verified when they are read.

    payloads   key (8 bytes, big-endian), first byte of the chunk (8 bytes) -> checksum, at most CHUNK_BYTES
    items      key -> record of the item and its rows
    pieces     name -> record of a table, the policy, ...
    (main)     "commit" -> format, number of the transaction
"""

from __future__ import annotations

import logging
import math
import os
import resource
import shutil
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_digest

from replay_protos.framing import cut
from replay_protos.words import counted
from replay_server.storage.data_dir import (
    CHUNK_KEY,
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
from replay_server.storage.memory import first_bytes
from replay_server.storage.records import (
    FORMAT,
    ITEM,
    POLICY,
    Damaged,
    Delta,
    ItemRecords,
    State,
    boot_id,
    join_items,
    pack_items,
    seal,
    unpack,
    unpack_items,
    unseal,
)
from replay_server.tables.items import DamagedPayloads, StorageFacts
from replay_server.tables.table import Payload

log = logging.getLogger("replay_server")

BYTES_PER_TRANSACTION = 16 << 20
"""Payload bytes in one transaction, about: LMDB keeps all of it in memory."""
RESERVE = 64 << 20
"""Bytes of the disk that inserts leave free (an eighth, if that is less). Deletes and samples still need room."""
_LOOK_EVERY = 0.2
"""Seconds between two looks at the free space of the disk."""
_SYNC_EVERY = 0.1
"""Seconds between two syncs of a copy."""
MAP_SIZE = 1 << 42
"""Of the address space only: the file grows with what it holds."""
LOCK_BYTES = 8192
"""Of LMDB's lock file with its default of 126 readers."""
_RECORDS_AT_ONCE = 1 << 16
CHUNK_BYTES = 256 * 1024 - 16 - 8
"""Payload bytes in one value. With LMDB's page header and the checksum it fills its pages to the last byte. Small
chunks reuse the space of deleted ones: whole values of up to 5 MB would need half as much space again."""
NBYTES, NBYTES_AT = struct.Struct("<q"), ITEM.fields["nbytes"][1]  # type: ignore[index]
"""The field of an item's record."""
CHUNK_NAME = np.dtype([("key", ">u8"), ("start", ">u8")])


class Part(NamedTuple):
    """The bytes of a payload that no commit has written yet."""

    start: int
    """Bytes before them."""
    pieces: Payload
    is_new: bool
    """Whether nothing of the payload is written. Otherwise it was extended."""

    def extended(self, pieces: Payload) -> Part:
        return self._replace(pieces=(*self.pieces, *pieces))

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))


@dataclass
class Unwritten:
    """What belongs to one commit of payloads."""

    parts: dict[int, Part] = field(default_factory=dict)
    """By key."""
    gone: list[int] = field(default_factory=list)
    """Keys of payloads to delete from the file."""
    nbytes: int = 0
    """Of the parts."""

    def check(self) -> None:
        """Asserts that the bytes are those of the parts."""
        nbytes = sum(part.size for part in self.parts.values())
        assert self.nbytes == nbytes, (self.nbytes, nbytes)


def _identity(directory: Path) -> tuple[int, int] | None:
    """Which file data.mdb is; None: there is none."""
    try:
        status = (directory / "data.mdb").stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _address_space_remedy() -> str:
    """What to do about a limit of the address space that LMDB's map does not fit into; "": there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit > MAP_SIZE:
        return ""
    return (
        f"; this process may have {limit:,} bytes of address space (ulimit -v), and maps {MAP_SIZE:,} for the file, "
        f"which take no memory: start it with `ulimit -v unlimited`"
    )


class FileGone(lmdb.Error):
    """The file of the data directory has no name any more: what is written into it, nobody finds again."""


class LmdbFile:
    """Reads what a server wrote into one LMDB file."""

    def __init__(self, path: Path, **options: Any) -> None:
        """`options` of lmdb.open. Raises lmdb.Error."""
        self._env = lmdb.open(str(path), map_size=MAP_SIZE, max_dbs=8, readahead=False, **options)
        create = not options.get("readonly", False)
        self._databases = [self._env.open_db(name, create=create) for name in (b"payloads", b"items", b"pieces")]
        self._payloads, self._items, self._pieces = self._databases
        self._strays: list[bytes] = []
        """Names of chunks that no item needs."""

    def load(self) -> State:
        """The committed state, without payloads. What a payload lacks is found when it is read."""
        with self._env.begin() as txn:
            pieces = dict(txn.cursor(self._pieces))
            parts: list[ItemRecords] = []
            skipped: list[int] = []
            entries = iter(txn.cursor(self._items))
            while portion := list(islice(entries, _RECORDS_AT_ONCE)):
                keys_there = np.frombuffer(b"".join(key for key, _ in portion), dtype=">u8")
                part = unpack_items(keys_there.tolist(), [record for _, record in portion])
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

    def totals(self) -> tuple[int, int, int]:
        """The items, the bytes of their payloads, and the policy version."""
        with self._env.begin() as txn:
            records = txn.cursor(self._items).iternext(keys=False)
            nbytes = sum(NBYTES.unpack_from(record, NBYTES_AT)[0] for record in records)
            return txn.stat(self._items)["entries"], nbytes, unpack(txn.get(POLICY, b"", db=self._pieces))[0]

    def sizes(self, keys: Sequence[int]) -> dict[int, int]:
        """The bytes of the payloads of those items that are there, by key."""
        with self._env.begin() as txn:
            found = txn.cursor(self._items).getmulti([KEY.pack(key) for key in keys])
        return {KEY.unpack(key)[0]: NBYTES.unpack_from(record, NBYTES_AT)[0] for key, record in found}

    def read(self, keys: Sequence[int], sizes: Sequence[int]) -> list[Payload | None]:
        """The first bytes of payloads, as many as `sizes` says; None for each that is damaged."""
        with self._env.begin(db=self._payloads, buffers=True) as txn:
            return [_read(txn, key, size) for key, size in zip(keys, sizes, strict=True)]

    def close(self) -> None:
        self._env.close()


class LmdbStorage(LmdbFile):
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

    @property
    def unwritten(self) -> int:
        """Payload bytes that no commit has written yet."""
        return self._taken.nbytes + self._next.nbytes

    def _check_openable(self) -> None:
        path = self.directory / "data.mdb"
        if not path.exists() or not path.stat().st_size:
            if self.was_written:
                raise DamagedDirectory(self.directory, "data.mdb is gone or empty")
        elif self._unsynced.exists() and self._unsynced.read_text() != boot_id():
            raise DamagedDirectory(self.directory, 'the machine stopped while a server with fsync = "never" wrote')
        elif problem := why_not_openable(path):
            raise DamagedDirectory(self.directory, problem)

    def _open(self) -> None:
        lock_file = self.directory / "lock.mdb"
        lock_file.unlink(missing_ok=True)  # we hold server.lock, so its last owner is gone
        try:
            # LMDB maps a file with a hole, and a full disk would end the process (SIGBUS) when it writes there.
            lock_file.write_bytes(bytes(LOCK_BYTES))
            super().__init__(self.directory, sync=self._fsync, metasync=self._fsync, max_spare_txns=4)
            self._file = _identity(self.directory)
            if self._fsync:
                self.sync()
            else:
                self._unsynced.write_text(boot_id())
                sync_directory(self.directory)
        except (lmdb.Error, OSError) as error:
            raise UnusableDirectory(f"data_dir {self.directory}: {error}{_address_space_remedy()}") from error

    # ------------------------------------------------------------------------------------------------ payloads

    def put(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        parts = [Part(0, payload, True) for payload in payloads]
        self._next.parts.update(zip(keys, parts, strict=True))
        self._next.nbytes += sum(part.size for part in parts)

    def extend(self, key: int, size: int, segment: Payload) -> None:
        self._next.parts[key] = self._next.parts.get(key, Part(size, (), False)).extended(segment)
        self._next.nbytes += sum(map(len, segment))

    def get(self, keys: Sequence[int], sizes: Sequence[int]) -> list[Payload]:
        if self._next.parts or self._taken.parts:
            places = list(map(self._place, keys, sizes))
            in_file = self.read(keys, [written for written, _ in places])
            found = [
                None if first is None else (*first, *rest) for first, (_, rest) in zip(in_file, places, strict=True)
            ]
        else:
            found = self.read(keys, sizes)
        if damaged := [key for key, payload in zip(keys, found, strict=True) if payload is None]:
            raise DamagedPayloads(damaged)
        return [payload for payload in found if payload is not None]

    def _place(self, key: int, size: int) -> tuple[int, Payload]:
        """How many of the first `size` bytes of a payload are in the file, and those after them."""
        written = size
        pieces: Payload = ()
        for unwritten in (self._taken, self._next):
            if (part := unwritten.parts.get(key)) is None:
                continue
            if part.is_new:  # also where an older item with this key is in the file, or on its way there
                written, pieces = 0, part.pieces
            else:
                written, pieces = min(written, part.start), (*pieces, *part.pieces)
        return written, first_bytes(pieces, size - written)

    def delete(self, keys: Sequence[int]) -> None:
        following = self._next
        for key in keys:
            if (part := following.parts.pop(key, None)) is not None:
                following.nbytes -= part.size
                assert following.nbytes >= 0, following.nbytes
            following.gone.append(key)  # also a new one: a commit that failed may have left chunks of it in the file

    def check(self, sizes: Mapping[int, int]) -> None:
        """As Storage: a part that no commit has written yet ends where its item does."""
        self._taken.check()
        self._next.check()
        assert self._next.parts.keys() <= sizes.keys(), self._next.parts.keys() - sizes.keys()
        for key, part in self._next.parts.items():
            assert part.start + part.size == sizes[key], (key, part, sizes[key])
            assert not part.is_new or part.start == 0, (key, part)

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
        disk = os.fstatvfs(self._lock)  # the directory may be renamed
        return disk.f_bavail * disk.f_frsize, min(RESERVE, disk.f_blocks * disk.f_frsize // 8)

    def _free_pages(self) -> int:
        """Free bytes within the file that new payloads can use, about: half is counted as lost to fragmentation."""
        with self._env.begin() as txn:
            stats = [txn.stat(db) for db in self._databases]
        used = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        free = (self._env.info()["last_pgno"] - used) * stats[0]["psize"]
        return free // 2

    def facts(self) -> StorageFacts:
        error = self.error
        try:
            blocks = (self.directory / "data.mdb").stat().st_blocks
        except OSError:  # it was removed, and `commit` says so
            blocks = 0
        if not error and self._lacking:  # nobody may insert any more, so look whether there is room now
            error = self.why_full(self._lacking) or ""
        return StorageFacts("lmdb", blocks * 512, self.commits, error, self.fell_back)

    # ------------------------------------------------------------------------------------------------ commits

    def begin_commit(self) -> Unwritten:
        """The payloads to write and to delete in the next commit. They can be read until it has ended."""
        assert not self._taken.parts, "a commit begins before the one before it has ended"
        self._taken, self._next = self._next, Unwritten()
        return self._taken

    def commit(self, delta: Delta, payloads: Unwritten, slices: Sequence[Delta] = ()) -> None:
        """Writes everything: the slices, and `delta` over them. If it raises lmdb.Error, nothing has an effect.

        The only method for another thread. Raises FileGone if data.mdb was removed or replaced.
        """
        self._check_file()
        # The chunks of a new payload would overwrite those of an older item with its key, which must be there until the
        # last transaction.
        portion = BYTES_PER_TRANSACTION if payloads.parts.keys().isdisjoint(payloads.gone) else math.inf
        parts = payloads.parts.items()
        chunks = chain.from_iterable(chunks_of(key, part.pieces, part.start) for key, part in parts)
        changes = [(some, pack_items(some.items)) for some in (*slices, delta)]
        first = next(chunks, None)
        whole = False
        while not whole:
            with self._env.begin(write=True) as txn:
                for stray in self._strays:
                    txn.delete(stray, db=self._payloads)
                if first is not None:
                    txn.cursor(self._payloads).putmulti(first_chunks(chain([first], chunks), portion))
                if whole := (first := next(chunks, None)) is None:
                    # Records go with the last payloads: without them the payloads have no effect.
                    self._delete_payloads(txn, payloads)
                    for some, records in changes:
                        self._write_records(txn, some, records)
                txn.put(COMMIT, seal(COMMIT_RECORD.pack(FORMAT, txn.id())))
                self._check_file()  # once more, after all that takes long: an error here undoes the transaction
            self._strays = []

    def _check_file(self) -> None:
        """Raises FileGone if what is written now could not be found again."""
        if _identity(self.directory) != self._file:
            raise FileGone(
                "data.mdb was removed or replaced while the server runs: put that file back, or stop the server and "
                "restore a checkpoint"
            )

    def _delete_payloads(self, txn: lmdb.Transaction, payloads: Unwritten) -> None:
        cursor = txn.cursor(self._payloads)
        for key in payloads.gone:
            if key not in payloads.parts:
                cursor.set_range(name := KEY.pack(key))
                while cursor.key()[: KEY.size] == name:
                    cursor.delete()

    def _write_records(self, txn: lmdb.Transaction, delta: Delta, records: list[tuple[int, bytes]]) -> None:
        for key in delta.removed:
            txn.delete(KEY.pack(key), db=self._items)
        txn.cursor(self._items).putmulti([(KEY.pack(key), record) for key, record in records])
        for name, piece in delta.named_records().items():
            if piece is None:
                txn.delete(name, db=self._pieces)
            else:
                txn.put(name, piece, db=self._pieces)

    @property
    def changed(self) -> bool:
        """Whether payloads have to be written or deleted."""
        following = self._next
        return bool(following.parts or following.gone or self._strays)

    def end_commit(self, error: lmdb.Error | None) -> list[int]:
        """The commit has ended. Returns the keys of new payloads that it could not write.

        The next commit writes them, and what was appended to others.
        """
        taken, following = self._taken, self._next
        self._taken = Unwritten()
        self._looked_at = -_LOOK_EVERY
        if error is None:
            self._mark_used()
            self.error = ""
            self.commits += 1
            return []
        self.error = f"the last commit failed ({error})"
        deleted = set(following.gone)
        following.gone = taken.gone + following.gone
        kept = {key: part for key, part in taken.parts.items() if key not in deleted}
        for key, part in kept.items():
            following.nbytes += part.size
            later = following.parts.get(key)
            following.parts[key] = part if later is None else part.extended(later.pieces)
        return [key for key, part in kept.items() if part.is_new]

    def sync(self) -> None:
        """Returns when all commits so far are on the disk. May be called from any thread."""
        self._env.sync(True)
        self._unsynced.unlink(missing_ok=True)
        sync_directory(self.directory)

    def copy_to(self, path: Path) -> None:
        """Copies the last commit into a new file, without free pages. May be called from any thread; raises OSError."""
        with path.open("xb") as file, ThreadPoolExecutor(1) as thread:
            copying = thread.submit(self._env.copyfd, file.fileno(), compact=True)
            # Without regular syncs the system keeps a GB and more in memory, and writes it all at the end.
            while wait([copying], _SYNC_EVERY).not_done:
                os.fdatasync(file.fileno())
            copying.result()

    def close(self) -> None:
        """Closes the file. Without `fsync` the commits since the last `sync` are not on the disk yet."""
        super().close()
        os.close(self._lock)

    # ------------------------------------------------------------------------------------------------ start

    def load(self) -> State:
        """As LmdbFile. Raises DamagedDirectory, and UnusableDirectory for what this version did not write."""
        with self._env.begin() as txn:
            if (commit := txn.get(COMMIT)) is not None:
                try:
                    unseal(commit)
                except Damaged:
                    raise DamagedDirectory(self.directory, "the record of the last commit is damaged") from None
            elif any(txn.stat(db)["entries"] for db in self._databases):
                raise UnusableDirectory(f"data_dir {self.directory} holds data of something else; name another one")
        return super().load()

    def adopt(self, path: Path, size: int) -> None:
        """Takes the first `size` bytes of a checkpoint in the place of its own file.

        A start in a directory that was left meanwhile finds it damaged. Raises ValueError if it holds items, and as
        `load`.
        """
        state = self.load()
        if held := len(state.items) + len(state.skipped):
            raise ValueError(
                f"data_dir {self.directory} holds {counted(held, 'item')}, and a checkpoint is to be restored: start "
                f"without --restore to go on with them, or with --replace to put them aside"
            )
        self._mark_used()
        self._env.close()
        partial = self.directory / "restored.mdb"
        try:
            shutil.copyfile(path, partial)
            os.truncate(partial, size)
            partial.rename(self.directory / "data.mdb")
            self._open()
            for _ in range(2):  # a copy does not know the number of its commit, and a start compares the last two
                self.commit(Delta(), self.begin_commit())
                self.end_commit(None)
        except (OSError, lmdb.Error) as error:
            partial.unlink(missing_ok=True)
            raise UnusableDirectory(
                f"data_dir {self.directory} cannot take the {size} bytes of the checkpoint: {error}; make room, and "
                f"restore it again"
            ) from error

    def _mark_used(self) -> None:
        if not self.was_written:
            os.pwrite(self._lock, b"This directory holds data of a replay server.\n", 0)


def _read(txn: lmdb.Transaction, key: int, size: int) -> Payload | None:
    """The first `size` bytes of the payload in its chunks; None if it is damaged."""
    pieces: list[bytes] = []
    start = 0
    while start < size:
        value = txn.get(CHUNK_KEY.pack(key, start), b"")
        piece = bytes(value[8:])  # the view ends with the transaction
        if not piece or xxh3_64_digest(piece, _seed(key, start)) != value[:8]:
            return None
        pieces.append(piece)
        start += len(piece)
    return tuple(pieces) if start == size else first_bytes(tuple(pieces), size)


def chunks_of(key: int, payload: Payload, start: int = 0) -> Iterator[tuple[bytes, bytes]]:
    """(name, value) of each chunk of a payload, or of its rest from the byte `start` on."""
    if len(payload) == 1 and isinstance(whole := payload[0], bytes) and 0 < len(whole) <= CHUNK_BYTES:
        # The most frequent case takes half the time so.
        yield CHUNK_KEY.pack(key, start), xxh3_64_digest(whole, _seed(key, start)) + whole
        return
    for parts in cut(payload, CHUNK_BYTES):
        checksum = xxh3_64(seed=_seed(key, start))
        for part in parts:
            checksum.update(part)
        yield CHUNK_KEY.pack(key, start), b"".join((checksum.digest(), *parts))
        start += sum(map(len, parts))


def first_chunks(chunks: Iterator[tuple[bytes, bytes]], nbytes: float) -> Iterator[tuple[bytes, bytes]]:
    """The first of these chunks, with `nbytes` together or a few more."""
    for name, value in chunks:
        yield name, value
        nbytes -= len(value)
        if nbytes <= 0:
            return


def _seed(key: int, start: int) -> int:
    """The seed of a checksum. With it the checksum also proves that the chunk is in its place in this payload."""
    return (key + start * 0x9E3779B97F4A7C15) % (1 << 64)


def unneeded(items: ItemRecords, there: npt.NDArray[np.void]) -> list[bytes]:
    """Those of `there`, the names of chunks, that no payload of `items` needs."""
    keys, sizes = items.items["key"], items.items["nbytes"]
    needed = np.zeros(there.size, dtype=np.bool_)
    if keys.size:
        owner = np.searchsorted(keys, there["key"]).clip(max=keys.size - 1)
        needed = (keys[owner] == there["key"]) & (there["start"] < sizes[owner])
    return [CHUNK_KEY.pack(key, start) for key, start in there[~needed].tolist()]
