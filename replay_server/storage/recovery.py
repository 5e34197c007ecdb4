"""Recovery: after damage, takes a data directory back to the newest commit whose state is known to be whole.

It looks at the roots in the file and at the last one that was synced (roots.py), the newest first. It works on a copy,
and keeps the damaged file beside it, under a name that says when and why it was put aside.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import lmdb

from replay_server.storage.data_dir import DamagedDirectory, UnusableDirectory, why_not_openable
from replay_server.storage.lmdb_load import MAP_SIZE, Databases, NotWhole, check, load
from replay_server.storage.roots import Root, SyncedRoot, roots_in, sync_directory

log = logging.getLogger("replay_server")

_COPIES = "recovering-"
_FICLONE = 0x40049409
"""ioctl: the copy shares the bytes of the file, where the file system can do that."""


def fall_back(directory: Path, synced: SyncedRoot, why: str) -> str:
    """Puts an older state in the place of the damaged one. Returns what it did, in words.

    Raises DamagedDirectory if no state is known to be whole, and UnusableDirectory if the copy cannot be made.
    """
    path = directory / "data.mdb"
    roots = {root.txn: root for root in roots_in(path) if root.txn}
    if synced.root is not None:
        roots.setdefault(synced.root.txn, synced.root)
    for old in directory.glob(f"{_COPIES}*"):
        shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_COPIES, dir=directory) as folder:
        copy = Path(folder) / path.name
        try:
            _copy(path, copy)
        except OSError as error:
            raise UnusableDirectory(
                f"data_dir {directory} is damaged ({why}), and its file cannot be copied to look for an older state: "
                f"{error}; make room for {path.stat().st_size} bytes, and start again"
            ) from error
        for txn in sorted(roots, reverse=True):
            problem = _why_not_whole(copy, roots[txn], synced.covers(txn))
            if problem:
                log.error("%s: commit %d is not whole: %s", directory, txn, problem)
                continue
            aside = directory / f"damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{_slug(why)}.mdb"
            os.link(path, aside)
            copy.replace(path)
            sync_directory(directory)
            said = (
                f"the start found damage ({why}), and fell back to commit {txn}, the newest that is whole; later "
                f"changes are lost; the damaged file is {aside.name}"
            )
            log.error("%s: %s", directory, said)
            return said
    raise DamagedDirectory(directory, why)


def _why_not_whole(copy: Path, root: Root, on_disk: bool) -> str:
    root.write_to(copy)
    if problem := why_not_openable(copy):
        return problem
    try:
        with lmdb.open(str(copy.parent), map_size=MAP_SIZE, max_dbs=8, readonly=True, lock=False) as env:
            databases = Databases.of(env, create=False)
            check(load(env, databases, copy.parent), env, databases, on_disk)
    except (lmdb.Error, NotWhole) as error:
        return str(error)
    file = os.open(copy, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
    return ""


def _copy(path: Path, copy: Path) -> None:
    with path.open("rb") as old, copy.open("xb") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        except OSError:
            shutil.copyfileobj(old, new, 1 << 24)


def _slug(why: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", why.lower())[:60].strip("-")
