"""LmdbStorage: payloads and records in one LMDB file under `data_dir`.

* A payload stays in memory until a commit has written it, together with all records that changed.
* Each transaction leads from one consistent state of the server to the next.
* LMDB trusts its file, and a damaged page can crash it. So every page is verified before it opens (lmdb_check.py).
* Payloads and records have checksums of their own, which are verified when they are read.

    payloads   key (8 bytes, big-endian), number of the chunk (4 bytes) -> checksum, at most CHUNK_BYTES
    items      key -> record of the item and its rows
    pieces     name -> record of a table, the policy, ...
    seen       number of the commit -> checksum, keys inserted with it
    (main)     "commit" -> format, number of the transaction
"""

from __future__ import annotations

import logging
import math
import os
import struct
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from replay_protos.framing import cut
from replay_server.storage.data_dir import (
    CHUNK_KEY,
    COMMIT,
    COMMIT_RECORD,
    KEY,
    UnusableDirectory,
    lock,
    put_aside,
    verify,
    why_damaged,
)
from replay_server.storage.records import (
    FORMAT,
    Damaged,
    Delta,
    ItemRecords,
    State,
    join_items,
    seal,
    unpack_items,
    unseal,
)
from replay_server.tables.payloads import DamagedPayloads, Payload, Reader, StorageFacts

log = logging.getLogger("replay_server")

MAP_SIZE = 1 << 42
"""Of the address space only: the file grows with what it holds."""
CHUNK_BYTES = 256 * 1024 - 16 - 8
"""Payload bytes in one value. With LMDB's page header and the checksum it fills its pages to the last byte. Small
chunks reuse the space of deleted ones: whole values of up to 5 MB would need half as much space again."""
BYTES_PER_TRANSACTION = 64 << 20
"""Payload bytes in one transaction, about: LMDB keeps all of it in memory."""
MAX_KNOWN_KEYS = 1 << 18
"""How many of the last inserted keys are kept, at least."""
RESERVE = 64 << 20
"""Bytes of the disk that inserts leave free (an eighth, if that is less). Deletes and samples still need room."""
_LOOK_EVERY = 0.2
"""Seconds between two looks at the free space of the disk."""

_CHUNK = np.dtype([("key", ">u8"), ("number", ">u4")])


class LmdbStorage:
    def __init__(self, directory: Path, *, fsync: bool = False, replace: bool = False) -> None:
        """Opens or creates the directory. `fsync`: a commit returns when it is on the disk. `replace`: the old file is
        renamed and kept.

        Raises UnusableDirectory, also if it cannot be made or written.
        """
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = lock(directory)
        except OSError as error:
            raise UnusableDirectory(f"data_dir {directory} cannot be written: {error.strerror}") from error
        try:
            if replace:
                put_aside(directory)
                os.ftruncate(self._lock, 0)
            verify(directory, used=os.fstat(self._lock).st_size > 0)
            (directory / "lock.mdb").unlink(missing_ok=True)  # we hold server.lock, so its last owner is gone
            self._env = lmdb.open(
                str(directory),
                map_size=MAP_SIZE,
                max_dbs=8,
                sync=fsync,
                metasync=fsync,
                readahead=False,
                max_spare_txns=4,
            )
            self._payloads = self._env.open_db(b"payloads")
            self._items = self._env.open_db(b"items")
            self._pieces = self._env.open_db(b"pieces")
            self._seen = self._env.open_db(b"seen")
        except lmdb.Error as error:
            os.close(self._lock)
            raise UnusableDirectory(f"data_dir {directory}: {error}") from error
        except BaseException:
            os.close(self._lock)
            raise
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
        self._seen_counts: deque[tuple[int, int]] = deque()
        """(number, keys) of the records in `seen`."""
        self._seen_total = 0
        self.commits = 0
        self.error = ""
        """Why the last commit failed, if it did."""
        self._room = 0
        self._looked_at = -_LOOK_EVERY

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
        return _Reader(self._env.begin(db=self._payloads, buffers=True), list(zip(keys, sizes, unwritten, strict=True)))

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
            return (
                f"data_dir {self.directory} has no room for {nbytes} bytes: {free} bytes are free on its disk, and "
                f"{reserve} stay so"
            )
        return None

    def _free_bytes(self) -> tuple[int, int]:
        """The free bytes of the disk, and how many of them are reserved."""
        disk = os.statvfs(self.directory)
        return disk.f_bavail * disk.f_frsize, min(RESERVE, disk.f_blocks * disk.f_frsize // 8)

    def _free_pages(self) -> int:
        """Free bytes within the file that new payloads can use, about: half is counted as lost to fragmentation."""
        with self._env.begin() as txn:
            stats = [txn.stat(db) for db in (self._payloads, self._items, self._pieces, self._seen)]
        used = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        free = (self._env.info()["last_pgno"] - used) * stats[0]["psize"]
        return free // 2

    def facts(self) -> StorageFacts:
        blocks = (self.directory / "data.mdb").stat().st_blocks
        return StorageFacts("lmdb", disk_bytes=blocks * 512, commits=self.commits, error=self.error)

    # ------------------------------------------------------------------------------------------------ commits

    def begin_commit(self) -> tuple[dict[int, Payload], list[tuple[int, int]]]:
        """The payloads to write and to delete in the next commit. They can be read until it has ended."""
        self._taken = self._fresh, self._gone
        self._fresh, self._gone = {}, []
        return self._taken

    def commit(self, delta: Delta, new: dict[int, Payload], gone: list[tuple[int, int]]) -> None:
        """Writes everything. If it raises lmdb.Error, nothing has an effect. The only method for another thread."""
        portion = BYTES_PER_TRANSACTION if new.keys().isdisjoint(key for key, _ in gone) else math.inf
        values = _values(new)
        old_seen: int | None = None
        while old_seen is None:
            written = 0
            with self._env.begin(write=True) as txn:
                payloads = txn.cursor(self._payloads)
                for name, value in values:
                    payloads.put(name, value)
                    written += len(value)
                    if written >= portion:
                        break
                else:  # records go with the last payloads: without them the payloads have no effect
                    old_seen = self._write_records(txn, delta, new, gone)
                txn.put(COMMIT, seal(COMMIT_RECORD.pack(FORMAT, txn.id())))
        self._strays = []
        for _ in range(old_seen):
            self._seen_total -= self._seen_counts.popleft()[1]
        if delta.known_keys:
            self._seen_total += len(delta.known_keys)
            self._seen_counts.append((self._env.info()["last_txnid"], len(delta.known_keys)))

    def _write_records(
        self, txn: lmdb.Transaction, delta: Delta, new: Collection[int], gone: list[tuple[int, int]]
    ) -> int:
        """Returns how many records of seen keys are obsolete now."""
        for key, size in gone:
            for number in range(0 if key in new else _count(size)):
                txn.delete(CHUNK_KEY.pack(key, number), db=self._payloads)
        for stray in self._strays:
            if CHUNK_KEY.unpack(stray)[0] not in new:
                txn.delete(stray, db=self._payloads)
        for key in delta.removed:
            txn.delete(KEY.pack(key), db=self._items)
        txn.cursor(self._items).putmulti([(KEY.pack(key), record) for key, record in delta.items])
        for piece in delta.state_records:
            if piece.record is None:
                txn.delete(piece.name, db=self._pieces)
            else:
                txn.put(piece.name, piece.record, db=self._pieces)
        obsolete = 0
        if delta.known_keys:
            txn.put(KEY.pack(txn.id()), seal(np.array(delta.known_keys, dtype="<u8").tobytes()), db=self._seen)
            total = self._seen_total + len(delta.known_keys)
            for number, n in self._seen_counts:
                if (total := total - n) < MAX_KNOWN_KEYS:
                    break
                txn.delete(KEY.pack(number), db=self._seen)
                obsolete += 1
        return obsolete

    def write_payloads(self) -> None:
        """Writes the payloads so far, to free their memory. They have an effect once their items are written."""
        if self.unwritten:
            self.commit(Delta([], [], [], []), *self.begin_commit())
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
            if not self.commits:
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
        """Returns when all commits so far are on the disk."""
        self._env.sync(True)

    def close(self) -> None:
        self._env.close()
        os.close(self._lock)

    # ------------------------------------------------------------------------------------------------ start

    def why_damaged(self, what: str) -> str:
        return why_damaged(self.directory, what)

    def load(self) -> State:
        """The committed state, without payloads. Items whose payload is incomplete are left out.

        Raises UnusableDirectory if the directory is not one, or of another version.
        """
        with self._env.begin() as txn:
            commit = txn.get(COMMIT)
            entries = [txn.stat(db)["entries"] for db in (self._payloads, self._items, self._pieces, self._seen)]
            if commit is None and any(entries):
                raise UnusableDirectory(f"data_dir {self.directory} holds data of something else; name another one")
            if commit is not None:
                self._check_format(commit)
            pieces = dict(txn.cursor(self._pieces))
            seen: list[int] = []
            bad_seen = 0
            for key, record in txn.cursor(self._seen):
                keys: list[int] = []
                try:
                    keys = np.frombuffer(unseal(record), dtype="<u8").tolist()
                except (Damaged, ValueError):
                    bad_seen += 1
                seen += keys
                self._seen_counts.append((KEY.unpack(key)[0], len(keys)))
                self._seen_total += len(keys)
            parts, skipped = [], []
            cursor = txn.cursor(self._items)
            entries_left = iter(cursor)
            while portion := list(islice(entries_left, 1 << 16)):
                keys_there = np.frombuffer(b"".join(key for key, _ in portion), dtype=">u8")
                part = unpack_items(keys_there, [record for _, record in portion])
                if len(part) < len(portion):
                    skipped += np.setdiff1d(keys_there, part.items["key"]).tolist()
                parts.append(part)
            names = txn.cursor(self._payloads).iternext(values=False)
            there = [
                np.frombuffer(b"".join(some), dtype=_CHUNK) for some in iter(lambda: list(islice(names, 1 << 16)), [])
            ]
        items = join_items(parts)
        complete = self._match_payloads(items, np.concatenate([np.empty(0, _CHUNK), *there]))
        skipped += items.items["key"][~complete].tolist()
        return State(pieces, items.select(complete), seen, skipped, bad_seen)

    def _check_format(self, commit: bytes) -> None:
        try:
            version, _ = COMMIT_RECORD.unpack(unseal(commit))
        except (Damaged, struct.error):
            raise UnusableDirectory(why_damaged(self.directory, "the record of the last commit")) from None
        if version != FORMAT:
            raise UnusableDirectory(
                f"data_dir {self.directory} has format {version}, and this version of the software reads {FORMAT}: use "
                f"the version that wrote it, or restore a checkpoint of this version into another directory"
            )

    def _match_payloads(self, items: ItemRecords, there: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Which items have all chunks of their payload. The next commit deletes the chunks of no item."""
        keys, counts = items.items["key"], -(-items.items["nbytes"] // CHUNK_BYTES)
        first = np.searchsorted(there["key"], keys)
        last = first + counts - 1
        inside = last < there.size
        at = np.where(inside & (counts > 0), last, 0)
        complete = counts == 0
        if there.size:  # by ascending number: if the last one stands so far behind the first, none is missing
            complete |= inside & (there["key"][at] == keys) & (there["number"][at] == counts - 1)
        owner = np.searchsorted(keys, there["key"]).clip(max=max(0, keys.size - 1))
        mine = np.zeros(there.size, dtype=np.bool_)
        if keys.size:
            mine = (keys[owner] == there["key"]) & complete[owner] & (there["number"] < counts[owner])
        for key, number in there[~mine].tolist():
            self._strays.append(CHUNK_KEY.pack(key, number))
        return np.asarray(complete)


class _Reader:
    """Reads the payloads of one moment: a transaction sees no later change."""

    def __init__(self, txn: lmdb.Transaction, entries: list[tuple[int, int, Payload | None]]) -> None:
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
    for number in range(_count(size)):
        value = txn.get(CHUNK_KEY.pack(key, number))
        if value is None or len(value) != 8 + min(CHUNK_BYTES, size - number * CHUNK_BYTES):
            return None
        piece = bytes(value[8:])  # the view ends with the transaction
        if xxh3_64_intdigest(piece, _seed(key, number)).to_bytes(8) != value[:8]:
            return None
        pieces.append(piece)
    return tuple(pieces)


def _values(payloads: dict[int, Payload]) -> Iterator[tuple[bytes, bytes]]:
    for key, payload in payloads.items():
        for number, parts in enumerate(cut(payload, CHUNK_BYTES)):
            checksum = xxh3_64(seed=_seed(key, number))
            for part in parts:
                checksum.update(part)
            yield CHUNK_KEY.pack(key, number), b"".join((checksum.digest(), *parts))


def _seed(key: int, number: int) -> int:
    """The seed of a checksum. With it the checksum also proves that the chunk is in its place in this payload."""
    return (key + number * 0x9E3779B97F4A7C15) % (1 << 64)


def _count(size: int) -> int:
    """How many chunks a payload has."""
    return -(-size // CHUNK_BYTES)


def _length(payload: Payload) -> int:
    return sum(map(len, payload))
