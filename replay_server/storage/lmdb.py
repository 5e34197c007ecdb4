"""LmdbStorage: payloads and records in one LMDB file under `data_dir`.

* A payload stays in memory until a commit has written it, together with all records that changed.
* If a payload is extended, its chunks stay as they are, and further chunks hold the new bytes. One commit may write
  several extensions of a payload as one chunk. So a chunk may have bytes behind the end that a reader knows.
* Each transaction leads from one consistent state of the server to the next.
* LMDB syncs the pages of a transaction before it writes the root that names them, and then the root. So the file is
  whole after a crash of the machine, and has every transaction that has ended. Without these syncs (`fsync=False`) the
  file survives a killed process, but perhaps no crash of the machine. So the server then also writes the file
  `unsynced`, with the id of this boot of the machine. A server that starts in a later boot refuses the directory.
* LMDB trusts its file, and a damaged page can crash it. So every page is verified before LMDB opens the file
  (data_dir.py).
* Payloads and records have checksums of their own, which are verified when they are read.

The file has four databases of LMDB:

    payloads   key (8 bytes, big-endian), position of the chunk's first byte (8 bytes) -> checksum, chunk
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
"""Payload bytes in one transaction, about. They are limited because LMDB keeps a whole transaction in memory."""
RESERVE = 64 << 20
"""Bytes of the disk that inserts leave free, because deletes and samples need to write too; an eighth of the disk, if
that is less."""
_LOOK_EVERY = 0.2
"""Seconds between two looks at the free space of the disk."""
_SYNC_EVERY = 0.1
"""Seconds between two syncs of the file that `copy_to` writes."""
MAP_SIZE = 1 << 42
"""Bytes of the map of the file. They take only address space, because the file grows with its contents."""
LOCK_BYTES = 8192
"""Bytes of LMDB's lock file with its default of 126 readers."""
_RECORDS_AT_ONCE = 1 << 16
"""Records that are read and unpacked at once."""
CHUNK_BYTES = 256 * 1024 - 16 - 8
"""Payload bytes in one value. With LMDB's page header (16 bytes) and the checksum (8), a value fills its pages to the
last byte.

Small chunks fit into the space of deleted chunks. If each payload of up to 5 MB were one value, the file would be half
as large again.
"""
NBYTES = struct.Struct("<q")
"""The layout of the field `nbytes` in the record of an item."""
NBYTES_AT = ITEM.fields["nbytes"][1]  # type: ignore[index]
"""The position of the field `nbytes` in the record of an item, in bytes."""
CHUNK_NAME = np.dtype([("key", ">u8"), ("start", ">u8")])
"""The layout of the name of a chunk: the key of its item, and the position of its first byte in the payload."""


class Part(NamedTuple):
    """The bytes of a payload that no commit has written yet."""

    start: int
    """The number of bytes of the payload before this part."""
    pieces: Payload
    """The bytes of this part, as consecutive buffers."""
    is_new: bool
    """True if the payload is new, so that this part begins with its first byte. False if this part was appended to an
    older payload."""

    def extended(self, pieces: Payload) -> Part:
        """This part with more pieces behind it."""
        return self._replace(pieces=(*self.pieces, *pieces))

    @property
    def size(self) -> int:
        """Bytes of this part."""
        return sum(map(len, self.pieces))


@dataclass
class Unwritten:
    """The payloads, or parts of them, that one commit writes, and the payloads that it deletes."""

    parts: dict[int, Part] = field(default_factory=dict)
    """The parts to write, by the keys of their payloads."""
    gone: list[int] = field(default_factory=list)
    """The keys of payloads to delete from the file."""
    nbytes: int = 0
    """The bytes of all parts."""

    def check(self) -> None:
        """Asserts that `nbytes` is the sum of the bytes of the parts."""
        nbytes = sum(part.size for part in self.parts.values())
        assert self.nbytes == nbytes, (self.nbytes, nbytes)


def _identity(directory: Path) -> tuple[int, int] | None:
    """The device and the inode of data.mdb, by which a replaced file is noticed; None if there is no such file."""
    try:
        status = (directory / "data.mdb").stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _address_space_remedy() -> str:
    """The remedy for a limit of the address space that is too low for LMDB's map; "" if the limit is not too low."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit > MAP_SIZE:
        return ""
    return (
        f"; this process may have {limit:,} bytes of address space (ulimit -v), and maps {MAP_SIZE:,} for the file, "
        f"which take no memory: start it with `ulimit -v unlimited`"
    )


class FileGone(lmdb.Error):
    """data.mdb was removed or replaced. No later start would find what the server writes into its open file."""


class LmdbFile:
    """Reads the state that a server wrote into one LMDB file."""

    def __init__(self, path: Path, **options: Any) -> None:
        """Opens the file at `path`. `options` are passed to lmdb.open. Raises lmdb.Error."""
        # No readahead, because payloads are read in any order. `max_dbs` has to be at least the three databases below.
        self._env = lmdb.open(str(path), map_size=MAP_SIZE, max_dbs=8, readahead=False, **options)
        create = not options.get("readonly", False)
        self._payloads = self._env.open_db(b"payloads", create=create)
        self._items = self._env.open_db(b"items", create=create)
        # The database `pieces`: all records except those of items, by name.
        self._named_records = self._env.open_db(b"pieces", create=create)
        self._databases = [self._payloads, self._items, self._named_records]
        self._strays: list[bytes] = []
        """The names of chunks that no item needs, such as those of a commit that was killed between two transactions.
        The next commit deletes them."""

    def load(self) -> State:
        """Reads the committed state, without payloads. A damaged payload is found only when it is read."""
        with self._env.begin() as txn:
            state_records = dict(txn.cursor(self._named_records))
            items, skipped = self._load_items(txn)
            chunk_names = self._load_chunk_names(txn)
        # A commit writes payloads before the records of their items. So a server that is killed between the two leaves
        # chunks that no item needs.
        self._strays = unneeded(items, chunk_names)
        return State(state_records, items, skipped)

    def _load_items(self, txn: Any) -> tuple[ItemRecords, list[int]]:
        """Reads the records of all items. Returns the intact records, and the keys of the damaged records."""
        portions: list[ItemRecords] = []
        damaged_keys: list[int] = []
        entries = iter(txn.cursor(self._items))
        while some_entries := list(islice(entries, _RECORDS_AT_ONCE)):
            keys = np.frombuffer(b"".join([key for key, _ in some_entries]), dtype=">u8")
            intact = unpack_items(keys.tolist(), [record for _, record in some_entries])
            if len(intact) < len(some_entries):
                damaged_keys += np.setdiff1d(keys, intact.items["key"]).tolist()
            portions.append(intact)
        return join_items(portions), damaged_keys

    def _load_chunk_names(self, txn: lmdb.Transaction) -> npt.NDArray[np.void]:
        """Reads the names of all chunks, as an array of CHUNK_NAME."""
        portions = [np.empty(0, CHUNK_NAME)]  # np.concatenate needs at least one array
        names = txn.cursor(self._payloads).iternext(values=False)
        while some_names := list(islice(names, _RECORDS_AT_ONCE)):
            portions.append(np.frombuffer(b"".join(some_names), dtype=CHUNK_NAME))
        return np.concatenate(portions)

    def totals(self) -> tuple[int, int, int]:
        """Returns the number of items, the bytes of their payloads, and the policy version.

        The list of checkpoints shows them. The records of the items are not verified. Raises Damaged if the record of
        the policy is damaged or missing.
        """
        with self._env.begin() as txn:
            items: int = txn.stat(self._items)["entries"]
            records = txn.cursor(self._items).iternext(keys=False)
            nbytes = sum(NBYTES.unpack_from(record, NBYTES_AT)[0] for record in records)
            policy = unpack(txn.get(POLICY, b"", db=self._named_records))
            return items, nbytes, policy[0]  # the record begins with the version

    def sizes(self, keys: Sequence[int]) -> dict[int, int]:
        """The bytes of the payloads of `keys`, by key. Keys that the file does not have are left out."""
        sizes: dict[int, int] = {}
        with self._env.begin() as txn:
            found = txn.cursor(self._items).getmulti([KEY.pack(key) for key in keys])
        for packed_key, record in found:
            (key,) = KEY.unpack(packed_key)
            (nbytes,) = NBYTES.unpack_from(record, NBYTES_AT)
            sizes[key] = nbytes
        return sizes

    def read(self, keys: Sequence[int], sizes: Sequence[int]) -> list[Payload | None]:
        """Reads the first bytes of each payload, as many as `sizes` says. A damaged payload becomes None."""
        with self._env.begin(db=self._payloads, buffers=True) as txn:
            return [_read(txn, key, size) for key, size in zip(keys, sizes, strict=True)]

    def close(self) -> None:
        self._env.close()


class LmdbStorage(LmdbFile):
    """The Storage of a server with data_dir, and the commits of the journal."""

    def __init__(self, directory: Path, *, fsync: bool = False, replace: bool = False) -> None:
        """Opens or creates the directory.

        With `fsync`, a commit returns when it is on the disk. With `replace`, an old file is renamed and kept.

        Raises DamagedDirectory if the file is damaged, and UnusableDirectory if there is another reason not to use the
        directory, for example if it cannot be made or written.
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
        """If the directory was damaged, a sentence about the older state from which the server started; else ""."""
        self._next = Unwritten()
        """The changes that the next commit writes."""
        self._committing = Unwritten()
        """The changes that the running commit writes."""
        self.commits = 0
        """The number of commits that have succeeded."""
        self.error = ""
        """The reason why the last commit failed; "" if it did not fail."""
        self._room = 0
        """Bytes that new payloads could use at the time of the last look at the disk."""
        self._refused_bytes = 0
        """Payload bytes of the last insert that found no room; 0 while there is room."""
        self._looked_at = -_LOOK_EVERY
        """The time of the last look at the free space of the disk."""

    @property
    def was_written(self) -> bool:
        """True if a commit has succeeded in this directory, even if the file was put aside since then.

        The first commit writes a line into the lock file (`_mark_used`), which is empty before.
        """
        return os.fstat(self._lock).st_size > 0

    @property
    def unwritten(self) -> int:
        """Payload bytes that no commit has written yet."""
        return self._committing.nbytes + self._next.nbytes

    def _check_openable(self) -> None:
        """Raises DamagedDirectory if LMDB must not open the file, and does nothing if there is no file yet."""
        path = self.directory / "data.mdb"
        if not path.exists() or not path.stat().st_size:
            if self.was_written:  # otherwise the directory is new
                raise DamagedDirectory(self.directory, "data.mdb is gone or empty")
            return
        if self._unsynced.exists() and self._unsynced.read_text() != boot_id():
            raise DamagedDirectory(self.directory, 'the machine stopped while a server with fsync = "never" wrote')
        problem = why_not_openable(path)
        if problem:
            raise DamagedDirectory(self.directory, problem)

    def _open(self) -> None:
        """Opens the file, or makes it. Raises UnusableDirectory if this fails."""
        lock_file = self.directory / "lock.mdb"
        lock_file.unlink(missing_ok=True)  # we hold server.lock, so the last owner of lock.mdb is gone
        try:
            # Write the whole lock file, so that it has its blocks on the disk. LMDB itself would make and map a file
            # without blocks, and on a full disk an access to such a file would end the process (SIGBUS).
            lock_file.write_bytes(bytes(LOCK_BYTES))
            super().__init__(self.directory, sync=self._fsync, metasync=self._fsync, max_spare_txns=4)
            self._file = _identity(self.directory)
            """The device and inode of the file that LMDB has opened."""
            if self._fsync:
                self.sync()  # also removes the file `unsynced`
            else:
                self._unsynced.write_text(boot_id())
                sync_directory(self.directory)
        except (lmdb.Error, OSError) as error:
            raise UnusableDirectory(f"data_dir {self.directory}: {error}{_address_space_remedy()}") from error

    # ------------------------------------------------------------------------------------------------ payloads
    # The methods of a Storage.

    def put(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        """Holds new payloads in memory until a commit has written them."""
        parts = [Part(start=0, pieces=payload, is_new=True) for payload in payloads]
        self._next.parts.update(zip(keys, parts, strict=True))
        self._next.nbytes += sum(part.size for part in parts)

    def extend(self, key: int, size: int, segment: Payload) -> None:
        """Appends `segment` to a payload, which had `size` bytes before. The next commit writes the segment."""
        part = self._next.parts.get(key)
        if part is None:
            part = Part(start=size, pieces=(), is_new=False)
        self._next.parts[key] = part.extended(segment)
        self._next.nbytes += sum(map(len, segment))

    def get(self, keys: Sequence[int], sizes: Sequence[int]) -> list[Payload]:
        """Returns the first bytes of each payload, as many as `sizes` says. Raises DamagedPayloads."""
        if self._next.parts or self._committing.parts:
            found = self._read_with_unwritten(keys, sizes)
        else:
            found = self.read(keys, sizes)
        damaged = [key for key, payload in zip(keys, found, strict=True) if payload is None]
        if damaged:
            raise DamagedPayloads(damaged)
        return [payload for payload in found if payload is not None]

    def _read_with_unwritten(self, keys: Sequence[int], sizes: Sequence[int]) -> list[Payload | None]:
        """Does the same as `read`, but takes the bytes that no commit has written yet from memory."""
        written_sizes: list[int] = []
        unwritten: list[Payload] = []
        for key, size in zip(keys, sizes, strict=True):
            written_size, pieces = self._split(key, size)
            written_sizes.append(written_size)
            unwritten.append(pieces)
        written = self.read(keys, written_sizes)
        payloads: list[Payload | None] = []
        for first, rest in zip(written, unwritten, strict=True):
            if first is None:  # the bytes in the file are damaged
                payloads.append(None)
            else:
                payloads.append((*first, *rest))
        return payloads

    def _split(self, key: int, size: int) -> tuple[int, Payload]:
        """Splits the first `size` bytes of a payload into bytes of the file and bytes in memory.

        Returns the number of bytes to read from the file, and the bytes that follow them. These are in memory, because
        no commit has written them yet.
        """
        written = size
        pieces: Payload = ()
        for unwritten in (self._committing, self._next):  # of a payload, the running commit has the earlier bytes
            part = unwritten.parts.get(key)
            if part is None:
                continue
            if part.is_new:
                # All bytes come from this part and later ones. If the file or an earlier part has bytes for this key,
                # they belong to an older item.
                written = 0
                pieces = part.pieces
            else:  # the file has the bytes before the first of the two parts
                written = min(written, part.start)
                pieces = (*pieces, *part.pieces)
        return written, first_bytes(pieces, size - written)

    def delete(self, keys: Sequence[int]) -> None:
        """Deletes payloads. The next commit deletes them from the file."""
        next_commit = self._next
        for key in keys:
            part = next_commit.parts.pop(key, None)
            if part is not None:
                next_commit.nbytes -= part.size
                assert next_commit.nbytes >= 0, next_commit.nbytes
            # This includes payloads that no commit has written, because a commit that failed may have left chunks of
            # them in the file.
            next_commit.gone.append(key)

    def check(self, sizes: Mapping[int, int]) -> None:
        """Asserts that each part that the next commit writes ends where its payload ends."""
        self._committing.check()
        self._next.check()
        assert self._next.parts.keys() <= sizes.keys(), self._next.parts.keys() - sizes.keys()
        for key, part in self._next.parts.items():
            assert part.start + part.size == sizes[key], (key, part, sizes[key])
            assert not part.is_new or part.start == 0, (key, part)

    def why_full(self, nbytes: int) -> str | None:
        """Says why payloads of `nbytes` cannot be stored. Returns None if they can.

        Logs when the disk has no room any more, and when it has room again.
        """
        if self.error:
            free, _ = self._free_bytes()
            return f"data_dir {self.directory}: {self.error}; {free} bytes are free"
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY:  # not at each insert, because a look takes time
            free, reserve = self._free_bytes()
            self._looked_at = now
            self._room = free + self._reusable_bytes() - reserve
        # The server has accepted the unwritten bytes already, and the next commits need room for them.
        if nbytes + self.unwritten > self._room:
            free, reserve = self._free_bytes()
            why = (
                f"data_dir {self.directory} has no room for {nbytes} bytes: {free} bytes are free on its disk, and "
                f"{reserve} stay so"
            )
            if not self._refused_bytes:
                log.error("%s: such inserts are refused until there is room", why)
            self._refused_bytes = nbytes
            return why
        if self._refused_bytes and nbytes >= self._refused_bytes:  # a smaller insert would not show that there is room
            log.warning("data_dir %s has room again", self.directory)
            self._refused_bytes = 0
        return None

    def _free_bytes(self) -> tuple[int, int]:
        """The free bytes of the disk, and the bytes that inserts must leave free."""
        disk = os.fstatvfs(self._lock)  # not by the path of the directory, because that may be renamed
        free = disk.f_bavail * disk.f_frsize
        reserve = min(RESERVE, disk.f_blocks * disk.f_frsize // 8)
        return free, reserve

    def _reusable_bytes(self) -> int:
        """The bytes in the file that new payloads can reuse.

        Only half of the file's free pages count, because fragmentation wastes about the other half.
        """
        with self._env.begin() as txn:
            stats = [txn.stat(db) for db in self._databases]
        used_pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        free_pages = self._env.info()["last_pgno"] - used_pages
        return free_pages * stats[0]["psize"] // 2

    def facts(self) -> StorageFacts:
        """The current facts about the storage that operators see."""
        error = self.error
        try:
            blocks = (self.directory / "data.mdb").stat().st_blocks
        except OSError:  # the file was removed, which the next commit reports
            blocks = 0
        # If no client inserts any more, only this call can notice that there is room again.
        if not error and self._refused_bytes:
            error = self.why_full(self._refused_bytes) or ""
        return StorageFacts(
            storage="lmdb",
            disk_bytes=blocks * 512,
            commits=self.commits,
            commit_error=error,
            fell_back=self.fell_back,
        )

    # ------------------------------------------------------------------------------------------------ commits

    def begin_commit(self) -> Unwritten:
        """Begins a commit, and returns the payloads that it must write and delete.

        Until the commit has ended, `get` still reads the payloads of the commit from memory.
        """
        assert not self._committing.parts, "a commit begins before the one before it has ended"
        self._committing = self._next
        self._next = Unwritten()
        return self._committing

    def commit(self, delta: Delta, payloads: Unwritten, slices: Sequence[Delta] = ()) -> None:
        """Writes the payloads, then the records of the slices, and then those of `delta`.

        Raises lmdb.Error if a write fails, and FileGone if data.mdb was removed or replaced. After an error, nothing of
        the commit has an effect. Runs on the thread of the journal.
        """
        self._check_file()
        bytes_per_transaction: float = BYTES_PER_TRANSACTION
        if not payloads.parts.keys().isdisjoint(payloads.gone):
            # A new item has the key of a deleted item, so the chunks of the new payload overwrite the chunks of the old
            # payload. The old item must be whole until the last transaction, so there may be only one transaction.
            bytes_per_transaction = math.inf
        parts = payloads.parts.items()
        chunks = chain.from_iterable(chunks_of(key, part.pieces, part.start) for key, part in parts)
        changes = [(change, pack_items(change.items)) for change in (*slices, delta)]
        next_chunk = next(chunks, None)  # one chunk is read ahead, because None shows that no transaction follows
        is_last = False
        while not is_last:
            with self._env.begin(write=True) as txn:
                for stray in self._strays:
                    txn.delete(stray, db=self._payloads)
                if next_chunk is not None:  # it is None if the commit writes only records
                    remaining_chunks = chain([next_chunk], chunks)
                    chunks_to_write = first_chunks(remaining_chunks, bytes_per_transaction)
                    txn.cursor(self._payloads).putmulti(chunks_to_write)
                next_chunk = next(chunks, None)
                is_last = next_chunk is None
                if is_last:
                    # Only the last transaction writes the records, because payloads without records have no effect.
                    self._delete_payloads(txn, payloads)
                    for change, item_records in changes:
                        self._write_records(txn, change, item_records)
                txn.put(COMMIT, seal(COMMIT_RECORD.pack(FORMAT, txn.id())))
                self._check_file()  # once more, because the writes may take long; an error undoes the transaction
            self._strays = []

    def _check_file(self) -> None:
        """Raises FileGone if data.mdb is not the file that LMDB has opened, so that writes would be lost."""
        if _identity(self.directory) != self._file:
            raise FileGone(
                "data.mdb was removed or replaced while the server runs: put that file back, or stop the server and "
                "restore a checkpoint"
            )

    def _delete_payloads(self, txn: lmdb.Transaction, payloads: Unwritten) -> None:
        """Deletes the chunks of all payloads that are gone, except those whose keys have new payloads."""
        cursor = txn.cursor(self._payloads)
        for key in payloads.gone:
            if key not in payloads.parts:
                packed_key = KEY.pack(key)
                cursor.set_range(packed_key)
                # The name of a chunk begins with the key of its payload. At the end of the database, `cursor.key()` is
                # empty.
                while cursor.key()[: KEY.size] == packed_key:
                    cursor.delete()  # this also moves the cursor to the next chunk

    def _write_records(self, txn: lmdb.Transaction, delta: Delta, item_records: list[tuple[int, bytes]]) -> None:
        """Writes and deletes the records of a delta. `item_records` are the packed items of the delta, with keys."""
        for key in delta.removed:
            txn.delete(KEY.pack(key), db=self._items)
        txn.cursor(self._items).putmulti([(KEY.pack(key), record) for key, record in item_records])
        for name, record in delta.named_records().items():
            if record is None:
                txn.delete(name, db=self._named_records)
            else:
                txn.put(name, record, db=self._named_records)

    @property
    def changed(self) -> bool:
        """True if there are payloads or chunks that the next commit writes or deletes."""
        next_commit = self._next
        return bool(next_commit.parts or next_commit.gone or self._strays)

    def end_commit(self, error: lmdb.Error | None) -> list[int]:
        """Notes that the commit has ended, with `error` if it failed.

        After an error, the next commit writes the parts of payloads that this commit did not write. Returns the keys of
        the new payloads among them.
        """
        ended = self._committing
        next_commit = self._next
        self._committing = Unwritten()
        self._looked_at = -_LOOK_EVERY  # the commit has used or freed space, so `why_full` must look at the disk again
        if error is None:
            self._mark_used()
            self.error = ""
            self.commits += 1
            return []
        self.error = f"the last commit failed ({error})"
        deleted = set(next_commit.gone)  # payloads that were deleted during the commit need not be written any more
        next_commit.gone = ended.gone + next_commit.gone
        remaining = {key: part for key, part in ended.parts.items() if key not in deleted}
        for key, part in remaining.items():
            next_commit.nbytes += part.size
            appended = next_commit.parts.get(key)  # bytes that were appended during the commit
            if appended is None:
                next_commit.parts[key] = part
            else:
                next_commit.parts[key] = part.extended(appended.pieces)
        return [key for key, part in remaining.items() if part.is_new]

    def sync(self) -> None:
        """Syncs all commits so far, and returns when they are on the disk. Any thread may call this."""
        self._env.sync(force=True)
        self._unsynced.unlink(missing_ok=True)
        sync_directory(self.directory)

    def copy_to(self, path: Path) -> None:
        """Copies the state of the last commit into a new file, without free pages.

        Raises OSError if the copy cannot be written. Any thread may call this.
        """
        with path.open("xb") as file, ThreadPoolExecutor(1) as thread:
            copying = thread.submit(self._env.copyfd, file.fileno(), compact=True)
            # Sync regularly. Otherwise the system keeps a GB and more in memory, and writes all of it at the end.
            while wait([copying], _SYNC_EVERY).not_done:
                os.fdatasync(file.fileno())
            copying.result()

    def close(self) -> None:
        """Closes the file. Without `fsync` the commits since the last `sync` are not on the disk yet."""
        super().close()
        os.close(self._lock)

    # ------------------------------------------------------------------------------------------------ start

    def load(self) -> State:
        """The committed state, as LmdbFile loads it.

        Raises DamagedDirectory if the record of the last commit is damaged. Raises UnusableDirectory if the file has
        data but no such record, because then no replay server wrote the file.
        """
        with self._env.begin() as txn:
            commit = txn.get(COMMIT)  # None if nothing was committed yet, or if no replay server wrote the file
            if commit is not None:
                try:
                    unseal(commit)
                except Damaged:
                    raise DamagedDirectory(self.directory, "the record of the last commit is damaged") from None
            elif any(txn.stat(db)["entries"] for db in self._databases):
                raise UnusableDirectory(f"data_dir {self.directory} holds data of something else; name another one")
        return super().load()

    def adopt(self, path: Path, size: int) -> None:
        """Replaces the file by the first `size` bytes of the checkpoint at `path`.

        If the server is killed before this method returns, the next start may find the directory damaged. Raises
        ValueError if the directory holds items, UnusableDirectory if the copy fails, and the errors of `load`.
        """
        state = self.load()
        items = len(state.items) + len(state.skipped)
        if items:
            raise ValueError(
                f"data_dir {self.directory} holds {counted(items, 'item')}, and a checkpoint is to be restored: start "
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
            # In a checkpoint, LMDB may number the commit anew. Its number then differs from the number in the record of
            # the commit. A start compares these numbers for the last two commits, so make two commits in which they
            # agree.
            for _ in range(2):
                self.commit(Delta(), self.begin_commit())
                self.end_commit(None)
        except (OSError, lmdb.Error) as error:
            partial.unlink(missing_ok=True)
            raise UnusableDirectory(
                f"data_dir {self.directory} cannot take the {size} bytes of the checkpoint: {error}; make room, and "
                f"restore it again"
            ) from error

    def _mark_used(self) -> None:
        """Makes `was_written` True, for this server and later ones."""
        if not self.was_written:
            os.pwrite(self._lock, b"This directory holds data of a replay server.\n", 0)


def _read(txn: lmdb.Transaction, key: int, size: int) -> Payload | None:
    """Reads the first `size` bytes of a payload from its chunks. Returns None if a chunk is damaged or missing."""
    chunks: list[bytes] = []
    start = 0
    while start < size:
        value = txn.get(CHUNK_KEY.pack(key, start), b"")
        chunk = bytes(value[8:])  # a copy, because the view `value` is valid only during the transaction
        if not chunk or xxh3_64_digest(chunk, _seed(key, start)) != value[:8]:
            return None
        chunks.append(chunk)
        start += len(chunk)
    payload = tuple(chunks)
    if start == size:
        return payload
    # The last chunk goes on after `size`, because one commit may write several extensions of a payload as one chunk.
    return first_bytes(payload, size)


def chunks_of(key: int, payload: Payload, start: int = 0) -> Iterator[tuple[bytes, bytes]]:
    """Yields (name, value) of each chunk of a payload.

    If `payload` has only the last bytes of a payload, `start` is the number of bytes before them.
    """
    if len(payload) == 1:
        # A payload that is one chunk is the most frequent case. Here it takes half the time that the loop below takes.
        whole = payload[0]
        if isinstance(whole, bytes) and 0 < len(whole) <= CHUNK_BYTES:
            yield CHUNK_KEY.pack(key, start), xxh3_64_digest(whole, _seed(key, start)) + whole
            return
    for views in cut(payload, CHUNK_BYTES):  # the views of one chunk
        checksum = xxh3_64(seed=_seed(key, start))
        for view in views:
            checksum.update(view)
        yield CHUNK_KEY.pack(key, start), b"".join((checksum.digest(), *views))
        start += sum(map(len, views))


def first_chunks(chunks: Iterator[tuple[bytes, bytes]], nbytes: float) -> Iterator[tuple[bytes, bytes]]:
    """Yields the first chunks, until their values have at least `nbytes` together."""
    missing = nbytes
    for name, value in chunks:
        yield name, value
        missing -= len(value)
        if missing <= 0:
            return


def _seed(key: int, start: int) -> int:
    """The seed of the checksum of a chunk.

    Each chunk has a seed of its own. So a chunk that is stored in the place of another chunk counts as damaged.
    """
    # The factor is 2 ** 64 divided by the golden ratio. It spreads the positions over all seeds.
    return (key + start * 0x9E3779B97F4A7C15) % (1 << 64)


def unneeded(items: ItemRecords, names: npt.NDArray[np.void]) -> list[bytes]:
    """Selects from the names of chunks (n,) those that no payload of `items` needs."""
    keys = items.items["key"]
    sizes = items.items["nbytes"]
    needed = np.zeros(names.size, dtype=np.bool_)
    if keys.size:
        # For each chunk, the index of the only item that may need it. LMDB sorts its entries, so `keys` are sorted.
        owner = np.searchsorted(keys, names["key"]).clip(max=keys.size - 1)
        # If a chunk begins behind the end of its payload, a commit wrote the chunk and was killed before the records.
        needed = (keys[owner] == names["key"]) & (names["start"] < sizes[owner])
    return [CHUNK_KEY.pack(key, start) for key, start in names[~needed].tolist()]
