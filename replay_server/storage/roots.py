"""Roots: the pages of an LMDB file that name the root of a commit, and a copy of the last one that is on the disk.

LMDB keeps the roots of its last two commits, and reuses pages that only older commits need. Without a sync before each
commit a crash of the machine can damage both. Therefore:

* After each regular sync the root of the last commit that it covers is written into the file `last-synced`.
* Until the next sync has ended a read transaction keeps the pages of that commit from being reused (lmdb.py).

So all pages below the root in `last-synced` are on the disk as they were written, whatever happens to others.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Self

from replay_server.storage.records import Damaged, seal, unseal

# The beginning of a meta page: MDB_page, MDB_meta in mdb.c, 64 bit.
_HEAD_BYTES = 16 + 136
_PAGE, _FLAGS, _MAGIC, _PAGE_SIZE = 0, 10, 16, 40
_DATABASES = (40, 88)
"""The free pages, and the main database: padding (4), flags (2), depth (2), four counters, root page."""
_LAST_PAGE, _TXN = 136, 144
_IS_META, _MAGIC_AND_VERSION = 0x08, (0xBEEFC0DE, 1)
NO_PAGE = (1 << 64) - 1

_SLOT_BYTES = 512
_SYNCED = struct.Struct("<QQ")
"""How many records were written before, SyncMode. The root follows."""


class SyncMode(IntEnum):
    """What the running server does for a crash of the machine."""

    NEVER = 0
    """It syncs when it stops."""
    REGULARLY = 1
    """It syncs regularly, and keeps the pages of the last commit that it synced."""
    ALWAYS = 2
    """It syncs each commit before the next one."""


@dataclass(frozen=True)
class Root:
    txn: int
    """Number of the commit."""
    main: int
    """Root page of the main database; NO_PAGE: it is empty."""
    page_size: int
    head: bytes
    """How its page begins."""

    @classmethod
    def parse(cls, head: bytes) -> Self | None:
        """None: this is no root."""
        if len(head) < _HEAD_BYTES:
            return None
        (flags,) = struct.unpack_from("<H", head, _FLAGS)
        (page_size,) = struct.unpack_from("<I", head, _PAGE_SIZE)
        if not flags & _IS_META or struct.unpack_from("<II", head, _MAGIC) != _MAGIC_AND_VERSION:
            return None
        if page_size & (page_size - 1) or not 512 <= page_size <= 1 << 15:
            return None
        (main,) = struct.unpack_from("<Q", head, _DATABASES[1] + 40)
        (txn,) = struct.unpack_from("<Q", head, _TXN)
        return cls(txn, main, page_size, bytes(head[:_HEAD_BYTES]))

    def _page(self) -> bytes:
        head = bytearray(self.head)
        struct.pack_into("<Q", head, _PAGE, self.txn % 2)
        return bytes(head).ljust(self.page_size, b"\0")

    def _emptied(self) -> bytes:
        """The other page, as LMDB makes it for a new file."""
        head = bytearray(self.head)
        struct.pack_into("<Q", head, _PAGE, 1 - self.txn % 2)
        for at in _DATABASES:
            struct.pack_into("<HQQQQQ", head, at + 6, 0, 0, 0, 0, 0, NO_PAGE)
        struct.pack_into("<QQ", head, _LAST_PAGE, 1, 0)
        return bytes(head).ljust(self.page_size, b"\0")

    def write_to(self, path: Path) -> None:
        """Makes this the only root of the file."""
        file = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(file, self._page(), self.txn % 2 * self.page_size)
            os.pwrite(file, self._emptied(), (1 - self.txn % 2) * self.page_size)
        finally:
            os.close(file)


def roots_in(path: Path) -> list[Root]:
    """The roots that the file has, the newest first; a new file has two with number 0. Only their form is checked."""
    with path.open("rb") as file:
        first = Root.parse(file.read(4096))
        sizes = [first.page_size] if first is not None else [4096, 1 << 13, 1 << 14, 1 << 15]
        found = [first]
        for size in sizes:
            file.seek(size)
            found.append(Root.parse(file.read(_HEAD_BYTES)))
    roots = [root for root in found if root is not None]
    return sorted(roots, key=lambda root: root.txn, reverse=True)


def root_of(file: int, txn: int, page_size: int) -> Root | None:
    """The root of commit `txn` of an open file; None: a later commit has overwritten it."""
    while True:
        head = os.pread(file, _HEAD_BYTES, txn % 2 * page_size)
        if head == os.pread(file, _HEAD_BYTES, txn % 2 * page_size):  # not while it is being written
            break
    root = Root.parse(head)
    return root if root is not None and root.txn == txn else None


class SyncedRoot:
    """The file `last-synced`. It has two places, which are written in turn: a torn write leaves the other one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "last-synced"
        self.root: Root | None = None
        """None: no root is known to be on the disk."""
        self.mode = SyncMode.NEVER
        self._count = 0
        data = self._path.read_bytes() if self._path.exists() else b""
        for at in range(0, len(data), _SLOT_BYTES):
            try:
                record = bytes(unseal(data[at : at + 8 + _SYNCED.size + _HEAD_BYTES]))
                count, mode = _SYNCED.unpack_from(record)
            except (Damaged, struct.error):
                continue
            if count >= self._count and mode in list(SyncMode):
                self._count, self.mode = count + 1, SyncMode(mode)
                self.root = Root.parse(record[_SYNCED.size :])

    def write(self, root: Root, mode: SyncMode) -> None:
        """Returns when it is on the disk. Call it when all pages of the root are."""
        is_new = not self._path.exists()
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            record = seal(_SYNCED.pack(self._count, mode) + root.head)
            slot = record.ljust(_SLOT_BYTES, b"\0")
            if is_new:  # take the space of both places while there is some
                os.pwrite(file, bytes(2 * _SLOT_BYTES), 0)
            os.pwrite(file, slot, self._count % 2 * _SLOT_BYTES)
            os.fdatasync(file)
        finally:
            os.close(file)
        if is_new:
            sync_directory(self._directory)  # and with it the name of the database's file
        self._count, self.root, self.mode = self._count + 1, root, mode

    def forget(self) -> None:
        """What is in the directory was put aside."""
        self._path.unlink(missing_ok=True)
        self.root, self.mode, self._count = None, SyncMode.NEVER, 0

    def covers(self, txn: int) -> bool:
        """Whether all pages of the commit are known to be on the disk as they were written."""
        if self.root is None or self.mode == SyncMode.NEVER:
            return False
        return txn == self.root.txn or (self.mode == SyncMode.ALWAYS and txn > self.root.txn)


def sync_directory(path: Path) -> None:
    """Returns when the names in a directory are on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
