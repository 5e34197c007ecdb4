"""Data directory: locks the folder of an LMDB file, and verifies the file before LMDB opens it."""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from replay_server.storage.chunks import CHUNK_KEY
from replay_server.storage.lmdb_check import problems_of
from replay_server.storage.records import Damaged, unseal

log = logging.getLogger("replay_server")

KEY = struct.Struct(">Q")
COMMIT = b"commit"
COMMIT_RECORD = struct.Struct("<QQ")
"""FORMAT, number of the transaction."""

_U16 = struct.Struct("<H")

# The beginning of a meta page: MDB_page, MDB_meta in mdb.c, 64 bit.
_HEAD_BYTES = 16 + 136
_FLAGS, _MAGIC, _PAGE_SIZE, _MAIN_ROOT, _TXN = 10, 16, 40, 128, 144
_IS_META, _MAGIC_AND_VERSION = 0x08, (0xBEEFC0DE, 1)
_NO_PAGE = (1 << 64) - 1


class UnusableDirectory(ValueError):
    """A data directory that the server cannot use, with the reason and the remedy."""


class DamagedDirectory(UnusableDirectory):
    """No state in the data directory is known to be whole. The remedy is a checkpoint."""

    def __init__(self, directory: Path, what: str) -> None:
        super().__init__(
            f"data_dir {directory} is damaged ({what}): name an empty data_dir and restore a checkpoint into it with "
            f"--restore latest"
        )
        self.what = f"data_dir {directory} is damaged ({what}), and no state in it is whole"


def lock(directory: Path) -> int:
    file = os.open(directory / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise UnusableDirectory(
            f"data_dir {directory} is in use by another server: stop that one, or name another folder"
        ) from None
    return file


def put_aside(directory: Path) -> None:
    path = directory / "data.mdb"
    if path.exists():
        aside = directory / f"replaced-{time.time_ns()}.mdb"
        path.rename(aside)
        log.warning("what was in %s is in %s now; remove it when nothing of it is needed", directory, aside)


def why_not_openable(path: Path) -> str:
    """Why LMDB could crash on the file, or open another commit than the last one; "": it can open it."""
    try:
        problems = problems_of(path, {b"items": KEY.size, b"payloads": CHUNK_KEY.size}) or list(_wrong_roots(path))
    except (struct.error, IndexError, OverflowError) as error:
        problems = [str(error)]
    return f"{len(problems)} problems, the first: {problems[0]}" if problems else ""


@dataclass(frozen=True)
class _Root:
    """The root of a commit, as a meta page names it."""

    txn: int
    """Number of the commit."""
    main: int
    """Root page of the main database; _NO_PAGE: it is empty."""
    page_size: int

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
        (main,), (txn,) = struct.unpack_from("<Q", head, _MAIN_ROOT), struct.unpack_from("<Q", head, _TXN)
        return cls(txn, main, page_size)


def _roots_in(path: Path) -> list[_Root]:
    """The roots that the file has, the newest first; a new file has two with number 0. Only their form is checked."""
    with path.open("rb") as file:
        first = _Root.parse(file.read(4096))
        found = [first]
        for size in [4096, 1 << 13, 1 << 14, 1 << 15] if first is None else [first.page_size]:
            file.seek(size)
            found.append(_Root.parse(file.read(_HEAD_BYTES)))
    return sorted((root for root in found if root is not None), key=lambda root: root.txn, reverse=True)


def _wrong_roots(path: Path) -> Iterator[str]:
    """LMDB keeps the roots of its last two commits, and opens the one with the higher number. With a damaged number
    it opens the older state and does not notice. So each of our commits records its own number."""
    roots = _roots_in(path)
    new, others = roots[0], [root for root in roots[1:] if root.txn or root.main != _NO_PAGE]
    with path.open("rb") as file:
        known_new, *known_others = (_commit_number(file, root.main, root.page_size) for root in (new, *others))
    if known_new is None:
        return  # no commit yet, or what `load` refuses
    if known_new != new.txn:
        yield f"commit {known_new} says that it is {new.txn}"
    for old, known in zip(others, known_others, strict=True):
        if known is None and old.txn != new.txn - 1:
            yield f"commits {old.txn} and {new.txn} follow each other"
        if known is not None and known != old.txn:
            yield f"commit {known} says that it is {old.txn}"


def _commit_number(file: BinaryIO, root: int, size: int) -> int | None:
    """The number in our own record in the main database, whose only page is `root`."""
    if root * size >= file.seek(0, os.SEEK_END):  # also where there is none
        return None
    file.seek(root * size)
    page = file.read(size)
    try:
        lower = _U16.unpack_from(page, 12)[0]
        for at in range(16, lower, 2):
            node = _U16.unpack_from(page, at)[0]
            length, _, _, key_length = struct.unpack_from("<HHHH", page, node)
            if page[node + 8 : node + 8 + key_length] == COMMIT:
                start = node + 8 + key_length
                return int(COMMIT_RECORD.unpack(unseal(page[start : start + length]))[1])
    except (struct.error, Damaged):
        return None
    return None


def sync_directory(path: Path) -> None:
    """Returns when the names in a directory are on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
