"""Data directory: locks the folder of an LMDB file, and verifies the file before LMDB opens it."""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from replay_server.storage.lmdb_check import problems_of
from replay_server.storage.records import Damaged, unseal

log = logging.getLogger("replay_server")

CHUNK_KEY = struct.Struct(">QI")
KEY = struct.Struct(">Q")
COMMIT = b"commit"
COMMIT_RECORD = struct.Struct("<QQ")
"""FORMAT, number of the transaction."""

# Of LMDB's pages 0 and 1, which hold the roots of its last two commits (MDB_meta in mdb.c, 64 bit).
_PAGE_SIZE, _PAGE_SIZE_AT = struct.Struct("<I"), 40
_ROOT, _ROOT_AT = struct.Struct("<QQQ"), 128
"""Root page of the main database, last page, number of the transaction."""
_U16 = struct.Struct("<H")


class UnusableDirectory(ValueError):
    """A data directory that the server cannot use, with the reason and the remedy."""


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


def why_damaged(directory: Path, what: str) -> str:
    return (
        f"data_dir {directory} is damaged ({what}): name an empty data_dir and restore a checkpoint into it with "
        f"--restore latest"
    )


def verify(directory: Path, used: bool) -> None:
    """Raises UnusableDirectory if LMDB could crash on the file. `used`: the directory had data before."""
    path = directory / "data.mdb"
    if not path.exists() or not path.stat().st_size:
        if used:
            raise UnusableDirectory(why_damaged(directory, "data.mdb is gone or empty"))
        return
    try:
        problems = problems_of(path, {b"items": KEY.size, b"payloads": CHUNK_KEY.size}) or list(_wrong_roots(path))
    except (struct.error, IndexError, OverflowError) as error:
        problems = [str(error)]
    if problems:
        raise UnusableDirectory(why_damaged(directory, f"{len(problems)} problems, the first: {problems[0]}"))


def _wrong_roots(path: Path) -> Iterator[str]:
    """LMDB keeps the roots of its last two commits, and opens the one with the higher number. With a damaged number
    it opens the older state and does not notice. So each of our commits records its own number."""
    with path.open("rb") as file:
        file.seek(0)
        size = _PAGE_SIZE.unpack_from(file.read(4096), _PAGE_SIZE_AT)[0]
        roots = []
        for number in (0, 1):
            file.seek(number * size)
            root, _, txn = _ROOT.unpack_from(file.read(size), _ROOT_AT)
            roots.append((txn, root))
        roots.sort()
        (old, old_root), (new, new_root) = roots
        known_new, known_old = (_commit_number(file, root, size) for root in (new_root, old_root))
    if known_new is None:
        return  # no commit yet, or what `load` refuses
    if known_new != new:
        yield f"commit {known_new} says that it is {new}"
    if known_old is None and old != new - 1:
        yield f"commits {old} and {new} follow each other"
    if known_old is not None and known_old != old:
        yield f"commit {known_old} says that it is {old}"


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
