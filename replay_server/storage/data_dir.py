"""Data directory: locks the folder of an LMDB file, and verifies every page of the file before LMDB opens it.

* py-lmdb's own verifier (`lmdb.verify`) checks pages one node at a time. Large databases are checked here, thousands of
  nodes at once and by the same rules.
* One rule is added: no two nodes overlap. Without it a file with a damaged size passes, and the next delete moves bytes
  over a neighbour: flips in page headers then crash the process ("free(): invalid size"). That is why the public
  function alone is not enough.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from lmdb import verify as lmdb_verify

from replay_server.storage.records import FORMAT, Damaged, of_another_version, unseal

log = logging.getLogger("replay_server")

KEY = struct.Struct(">Q")
CHUNK_KEY = struct.Struct(">QQ")
COMMIT = b"commit"
COMMIT_RECORD = struct.Struct("<QQ")
"""FORMAT, number of the transaction."""


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
    with path.open("rb") as file:
        check = LmdbCheck(file, path.stat().st_size)
        try:
            check.check_version(path.parent)
            check.verify()
            check.check_roots()
        except (lmdb_verify.VerifyError, struct.error, IndexError, OverflowError) as error:
            return str(error)
    return ""


def sync_directory(path: Path) -> None:
    """Returns when the names in a directory are on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# The class has no public name, so pyproject.toml holds on to the version; and py-lmdb has no types for it.
_Verifier: Any = vars(lmdb_verify)["_Verifier"]
Words = npt.NDArray[np.int64]

_HEADER = 16
"""Bytes before the node pointers of a page."""
_NODE = 8
"""Bytes before the key of a node: size of the value (4), flags (2), size of the key (2)."""
_BIG = 1
"""Flag of a node whose value has pages of its own."""
_OVERFLOW = 4
"""Flag of such pages."""
_PAGES_AT_ONCE = 4096
_KEY_SIZES = {"main/items": KEY.size, "main/payloads": CHUNK_KEY.size}
"""The large databases, with the bytes of their keys, whose order is that of the bytes."""


class LmdbCheck(_Verifier):  # type: ignore[misc]  # its type is not known
    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__(file, size)
        self._unchecked: dict[int, bytes] = {}
        """Leaf pages of the database that is being walked, in order, by their numbers."""
        self._last = np.empty(0, np.bytes_)
        """The last key of the pages that were checked; empty: none was."""

    def err(self, msg: str) -> None:
        raise lmdb_verify.VerifyError(msg)  # one problem is enough to refuse a file

    def _read_at(self, off: int, n: int) -> bytes:
        return os.pread(self.f.fileno(), n, off)  # half the time of seek and read, for each page of the file

    def _verify_tree(self, name: str, db: Any, *rest: Any, is_free: bool) -> Any:
        # With other ones LMDB orders keys otherwise, or fails an assertion, which ends the process.
        if db.flags != (lmdb_verify.MDB_INTEGERKEY if is_free else 0):
            self.err(f"{name} DB: unknown flags {db.flags}")
        return super()._verify_tree(name, db, *rest, is_free=is_free)

    def _walk_leaf(self, ctx: dict[str, Any], pgno: int, buf: bytes) -> None:
        if ctx["name"] not in _KEY_SIZES:
            super()._walk_leaf(ctx, pgno, buf)
            return
        self._unchecked[pgno] = buf
        if len(self._unchecked) == _PAGES_AT_ONCE:
            self._check_leaves(ctx)

    def _check_counts(self, name: str, db: Any, ctx: dict[str, Any]) -> None:
        if self._unchecked:
            self._check_leaves(ctx)
        self._last = self._last[:0]
        super()._check_counts(name, db, ctx)

    def _check_cover(self) -> None:
        live, free = np.frombuffer(self.live, np.uint8)[2:], np.frombuffer(self.free, np.uint8)[2:]
        if not (live ^ free == 1).all():
            super()._check_cover()

    def check_version(self, directory: Path) -> None:
        """Before `verify`, which knows the keys of this version. Raises UnusableDirectory."""
        self.detect_engine()
        self.load_metas()
        commit = self._commit(self.meta.main.root)
        if commit is not None and commit[0] != FORMAT:
            raise UnusableDirectory(f"data_dir {directory} {of_another_version(f'format {commit[0]}')}")

    def check_roots(self) -> None:
        """LMDB keeps the roots of its last two commits, and opens the one with the higher number. With a damaged number
        it opens the older state and does not notice. So each of our commits records its own number. After `verify`."""
        roots = [self._read_meta(0, 1), self._read_meta(1, self.psize)]
        old, new = sorted(roots, key=lambda root: int(root.txnid))
        known_old, known_new = [(self._commit(root.main.root) or (FORMAT, None))[1] for root in (old, new)]
        if known_new is None:
            return  # no commit yet, or what the start refuses
        is_new_file = not old.txnid and old.main.root == lmdb_verify.P_INVALID
        if known_old is None and old.txnid != new.txnid - 1 and not is_new_file:
            self.err(f"commits {old.txnid} and {new.txnid} follow each other")
        for known, root in ((known_new, new), (known_old, old)):
            if known is not None and known != root.txnid:
                self.err(f"commit {known} says that it is {root.txnid}")

    def _commit(self, root: int) -> tuple[int, int] | None:
        """Format and number in our own record in the main database, whose only page is `root`."""
        if (page := self.read_page(root)) is None:
            return None
        try:
            (lower,) = struct.unpack_from("<H", page, 12)
            for (node,) in struct.iter_unpack("<H", page[_HEADER:lower]):
                length, _, _, key_length = struct.unpack_from("<HHHH", page, node)
                start = node + _NODE + key_length
                if page[node + _NODE : start] == COMMIT:
                    version, number = COMMIT_RECORD.unpack(unseal(page[start : start + length]))
                    return version, number
        except (struct.error, Damaged):
            pass
        return None

    def _check_leaves(self, ctx: dict[str, Any]) -> None:
        """Checks the leaf pages that were walked since the last time, and that their keys follow the last one."""
        pages, self._unchecked = self._unchecked, {}
        numbers = list(pages)
        name, psize, key_size = ctx["name"], self.psize, _KEY_SIZES[ctx["name"]]

        def refuse(bad: npt.NDArray[np.bool_], page: Words, what: str) -> None:
            if bad.any():
                self.err(f"{name} DB: {what} on page {numbers[int(page[bad][0])]}")

        every = np.frombuffer(b"".join(pages.values()), "<u2").reshape(len(numbers), -1)
        each = np.arange(len(numbers))
        lower, upper = every[:, 6].astype(np.int64), every[:, 7].astype(np.int64)
        refuse((lower < _HEADER) | (lower > upper) | (upper > psize) | (lower % 2 == 1), each, "bad bounds")
        counts = (lower - _HEADER) // 2
        page = np.repeat(each, counts)
        place = np.arange(page.size) - np.repeat(np.cumsum(counts) - counts, counts)
        node = every[page, _HEADER // 2 + place].astype(np.int64)
        outside = (node < upper[page]) | (node + _NODE + key_size > psize) | (node % 2 == 1)
        refuse(outside, page, "a node out of bounds")
        words = every.reshape(-1)
        at = (page * psize + node) // 2
        size = words[at] | words[at + 1].astype(np.int64) << 16
        flags, start = words[at + 2], node + _NODE + key_size
        big = flags == _BIG
        end = start + np.where(big, 8, size)
        refuse((flags > _BIG) | (words[at + 3] != key_size) | (end > psize), page, "a damaged node")
        order = np.lexsort((node, page))
        page_by, start_by, end_by = page[order], node[order], end[order]
        refuse((page_by[1:] == page_by[:-1]) & (start_by[1:] < end_by[:-1]), page_by[1:], "nodes that overlap")
        found = words[(at + _NODE // 2)[:, None] + np.arange(key_size // 2)].view(f"S{key_size}")[:, 0]
        keys = np.concatenate([self._last.astype(found.dtype), found])
        refuse(keys[1:] <= keys[:-1], page[found.size + 1 - keys.size :], "keys out of order")
        self._last = keys[-1:]
        ctx["entries"] += page.size
        if big.any():
            self._check_overflow(ctx, words, at[big] + (_NODE + key_size) // 2, size[big])

    def _check_overflow(self, ctx: dict[str, Any], words: npt.NDArray[np.uint16], at: Words, size: Words) -> None:
        """Checks the overflow pages of large values; `at` is where the nodes name the first page."""
        name, in_file = ctx["name"], self.filesize // self.psize
        first = (words[at] | words[at + 1].astype(np.int64) << 16) | (
            words[at + 2] | words[at + 3].astype(np.int64) << 16
        ) << 32
        pages = (_HEADER - 1 + size) // self.psize + 1
        if ((first < 2) | (first + pages > min(self.next_pgno, in_file))).any():
            self.err(f"{name} DB: overflow pages out of range")
        heads = np.memmap(self.f, dtype="<u2", mode="r", shape=(in_file, self.psize // 2))[first, :8]
        number = heads[:, :4].copy().view("<u8")[:, 0]
        length = heads[:, 6:8].copy().view("<u4")[:, 0]
        if (bad := (number != first) | (heads[:, 5] != _OVERFLOW) | (length != pages)).any():
            self.err(f"{name} DB: overflow page {first[bad][0]} is damaged")
        runs = np.repeat(first - (np.cumsum(pages) - pages), pages) + np.arange(int(pages.sum()))
        live = np.frombuffer(self.live, np.uint8)
        if live[runs].any() or np.unique(runs).size < runs.size:
            self.err(f"{name} DB: overflow pages are reachable more than once")
        live[runs] = 1
        ctx["overflow"] += runs.size
