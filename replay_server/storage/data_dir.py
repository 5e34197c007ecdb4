"""Data directory: locks the folder of an LMDB file, and verifies every page of the file before LMDB opens it.

* py-lmdb's own verifier (`lmdb.verify`) checks pages one node at a time. This module checks the large databases by the
  same rules, thousands of nodes at once.
* This module adds one rule, which the public function of py-lmdb does not have: no two nodes overlap. Without this rule
  a file in which the size of a node is damaged would pass, and the next delete would move bytes over a neighbour of the
  node. Such deletes have crashed processes ("free(): invalid size").
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
"""The layout of the key of an item. Big-endian, so that LMDB orders the keys as numbers."""
CHUNK_KEY = struct.Struct(">QQ")
"""The layout of the name of a chunk: the key of its item, and the position of the chunk's first byte in the payload."""
COMMIT = b"commit"
"""The name of the record of the last commit."""
COMMIT_RECORD = struct.Struct("<QQ")
"""The layout of the record of a commit: FORMAT, and the number of the transaction. `seal` puts a checksum before it."""


class UnusableDirectory(ValueError):
    """Raised for a data directory that the server cannot use. The message gives the reason and the remedy."""


class DamagedDirectory(UnusableDirectory):
    """Raised if no state in the data directory is known to be whole. The remedy is to restore a checkpoint."""

    def __init__(self, directory: Path, what: str) -> None:
        """`what` says in a few words what is damaged."""
        super().__init__(
            f"data_dir {directory} is damaged ({what}): name an empty data_dir and restore a checkpoint into it with "
            f"--restore latest"
        )
        self.what = f"data_dir {directory} is damaged ({what}), and no state in it is whole"
        """The message without the remedy, for a start that falls back to a checkpoint by itself."""


def lock(directory: Path) -> int:
    """Locks the directory. Returns a file descriptor, which holds the lock until it is closed.

    Raises UnusableDirectory if another server has the lock, and OSError if the lock file cannot be made.
    """
    descriptor = os.open(directory / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UnusableDirectory(
            f"data_dir {directory} is in use by another server: stop that one, or name another folder"
        ) from None
    return descriptor


def put_aside(directory: Path) -> None:
    """Renames data.mdb, if the directory has this file. The content stays in the directory under the new name."""
    path = directory / "data.mdb"
    if path.exists():
        aside = directory / f"replaced-{time.time_ns()}.mdb"
        path.rename(aside)
        log.warning("what was in %s is in %s now; remove it when nothing of it is needed", directory, aside)


def why_not_openable(path: Path) -> str:
    """Verifies an LMDB file. Returns the reason why LMDB must not open it; "" if there is none.

    A reason is damage on which LMDB could crash, or with which it would open an older commit than the last one. Raises
    UnusableDirectory if another version of the server wrote the file.
    """
    with path.open("rb") as file:
        check = LmdbCheck(file, path.stat().st_size)
        # The verifier raises VerifyError for most damage. Some damaged numbers raise one of the other errors in it.
        try:
            check.check_version(path.parent)
            check.verify()
            check.check_roots()
        except (lmdb_verify.VerifyError, struct.error, IndexError, OverflowError) as error:
            return str(error)
    return ""


def sync_directory(path: Path) -> None:
    """Syncs a directory: returns when the names of the files in it are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# This class is private in py-lmdb and may change in any release, so pyproject.toml pins the version. It has no types.
_Verifier: Any = vars(lmdb_verify)["_Verifier"]
IntArray = npt.NDArray[np.int64]

# The layout of a page with nodes: header, node pointers (2 bytes each), free bytes, nodes. A node is one entry of a
# database: header, key, value. The pointers are in the order of the keys, and the nodes are in any order.
_PAGE_HEADER = 16
"""Bytes of the header of a page."""
_NODE_HEADER = 8
"""Bytes of the header of a node: size of the value (4), flags (2), size of the key (2)."""
_BIG = 1
"""The flag of a node whose value lies on overflow pages."""
_OVERFLOW = 4
"""The flag of an overflow page."""
_PAGES_AT_ONCE = 4096
"""The leaf pages of a large database that are checked at once."""
_KEY_SIZES = {"main/items": KEY.size, "main/payloads": CHUNK_KEY.size}
"""The large databases, with the number of bytes of their keys. LMDB orders these keys by their bytes."""


class LmdbCheck(_Verifier):  # type: ignore[misc]  # the type of the base class is not known
    """Verifies one LMDB file. Checks the leaf pages of the large databases with numpy."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        """`size` is the number of bytes of the file."""
        super().__init__(file, size)
        self._unchecked: dict[int, bytes] = {}
        """By page number: the bytes of the leaf pages that are still to be checked. They are pages of one large
        database, in the order of their keys."""
        self._last_key = np.empty(0, np.bytes_)
        """(1,): the last key of the pages of this database that are checked already; (0,): no page is checked yet."""

    # ------------------------------------------------------------------------------------------------ overridden
    # These methods replace methods of py-lmdb's verifier, which calls them in the course of `verify`.

    def err(self, msg: str) -> None:
        raise lmdb_verify.VerifyError(msg)  # one problem is enough to refuse a file

    def _read_at(self, off: int, n: int) -> bytes:
        return os.pread(self.f.fileno(), n, off)  # takes half as long as seek and read, which matters for each page

    def _verify_tree(self, name: str, db: Any, *rest: Any, is_free: bool) -> Any:
        """Checks one database. `is_free`: True for the database in which LMDB lists free pages under integer keys."""
        # With other flags LMDB orders keys in another way, or fails an assertion, which ends the process.
        expected_flags = lmdb_verify.MDB_INTEGERKEY if is_free else 0
        if db.flags != expected_flags:
            self.err(f"{name} DB: unknown flags {db.flags}")
        return super()._verify_tree(name, db, *rest, is_free=is_free)

    def _walk_leaf(self, ctx: dict[str, Any], pgno: int, buf: bytes) -> None:
        """Checks a leaf page. The leaf pages of large databases are only collected here, and checked many at once."""
        if ctx["name"] not in _KEY_SIZES:
            super()._walk_leaf(ctx, pgno, buf)
            return
        self._unchecked[pgno] = buf
        if len(self._unchecked) == _PAGES_AT_ONCE:
            self._check_leaves(ctx)

    def _check_counts(self, name: str, db: Any, ctx: dict[str, Any]) -> None:
        """Checks the last leaf pages of a database, and its counters. The verifier calls this after the last page."""
        if self._unchecked:
            self._check_leaves(ctx)
        self._last_key = self._last_key[:0]  # the keys of the next database need not follow the keys of this one
        super()._check_counts(name, db, ctx)

    def _check_cover(self) -> None:
        """Checks that each page but the two meta pages is either reachable (1 in `live`) or free (1 in `free`)."""
        live = np.frombuffer(self.live, np.uint8)[2:]
        free = np.frombuffer(self.free, np.uint8)[2:]
        is_either = (live ^ free) == 1
        if not is_either.all():
            super()._check_cover()  # finds the wrong pages in a slow loop, and reports them

    # ------------------------------------------------------------------------------------------------ own checks

    def check_version(self, directory: Path) -> None:
        """Raises UnusableDirectory if another version wrote the file.

        Call this before `verify`, which knows only the keys of this version.
        """
        # `detect_engine` finds the layout of the file. `load_metas` sets `meta`, the meta page of the last commit.
        self.detect_engine()
        self.load_metas()
        commit = self._read_commit_record(self.meta)
        if commit is None:
            return
        version, _ = commit
        if version != FORMAT:
            raise UnusableDirectory(f"data_dir {directory} {of_another_version(f'format {version}')}")

    def check_roots(self) -> None:
        """Checks that the meta pages of the last two commits have the numbers that these commits recorded.

        The meta page of a commit has the number of the commit, and the root of its pages. LMDB keeps the meta pages of
        the last two commits, and opens the root of the commit with the higher number. If a number is damaged, LMDB
        opens the older state and does not notice. So each of our commits also records its number as an entry of the
        main database. Call this after `verify`.
        """
        metas = [self._read_meta(page_number, self.psize) for page_number in (0, 1)]
        old, new = sorted(metas, key=lambda meta: int(meta.txnid))
        recorded_old = self._recorded_number(old)
        recorded_new = self._recorded_number(new)
        if recorded_new is None:
            # No commit of a replay server has ended yet. Or another program wrote the file: then the start refuses it.
            return
        # LMDB gives successive transactions successive numbers, so the numbers of the two commits differ by 1, even if
        # the older commit has no record of ours. A new file has only one commit: its other meta page has number 0 and
        # no root.
        is_new_file = not old.txnid and old.main.root == lmdb_verify.P_INVALID
        if recorded_old is None and old.txnid != new.txnid - 1 and not is_new_file:
            self.err(f"commits {old.txnid} and {new.txnid} follow each other")
        for recorded, meta in ((recorded_new, new), (recorded_old, old)):
            if recorded is not None and recorded != meta.txnid:
                self.err(f"commit {recorded} says that it is {meta.txnid}")

    def _recorded_number(self, meta: Any) -> int | None:
        """Returns the number that the commit with this meta page recorded; None if it has no readable record."""
        commit = self._read_commit_record(meta)
        if commit is None:
            return None
        _, number = commit
        return number

    def _read_commit_record(self, meta: Any) -> tuple[int, int] | None:
        """Returns the format and the number that the commit with this meta page recorded in the main database.

        None if there is no readable record. The main database of a replay server has only one page, its root.
        """
        page = self.read_page(meta.main.root)
        if page is None:
            return None
        try:
            # The node pointers of the page end at the byte `lower`. Each is the byte at which a node begins.
            (lower,) = struct.unpack_from("<H", page, 12)
            for (node_start,) in struct.iter_unpack("<H", page[_PAGE_HEADER:lower]):
                # The size of a value has two words. The record that is sought is short, so only the low word is used.
                value_size, _, _, key_size = struct.unpack_from("<HHHH", page, node_start)
                key_start = node_start + _NODE_HEADER
                value_start = key_start + key_size
                if page[key_start:value_start] == COMMIT:
                    record = unseal(page[value_start : value_start + value_size])
                    version, number = COMMIT_RECORD.unpack(record)
                    return version, number
        except (struct.error, Damaged):
            pass
        return None

    def _check_leaves(self, ctx: dict[str, Any]) -> None:
        """Checks the pages of `_unchecked` and their nodes, and that the keys follow `_last_key`. Empties `_unchecked`.

        An array (pages,) has one entry for each page, and an array (nodes,) one entry for each node of any page.
        """
        pages = self._unchecked
        self._unchecked = {}
        page_numbers = list(pages)  # (pages,)
        name = ctx["name"]
        key_size = _KEY_SIZES[name]
        page_size = self.psize

        def refuse_if_any(bad: npt.NDArray[np.bool_], page: IntArray, what: str) -> None:
            """Refuses the file if an entry of `bad` (n,) is True. `page` (n,) is the index of each entry's page."""
            if bad.any():
                first_bad_page = int(page[bad][0])
                self.err(f"{name} DB: {what} on page {page_numbers[first_bad_page]}")

        # The words (2 bytes each) of each page: (pages, words of a page).
        words_of_pages = np.frombuffer(b"".join(pages.values()), "<u2").reshape(len(page_numbers), -1)
        page_indexes = np.arange(len(page_numbers))
        # (pages,): the node pointers of a page end at the byte `lower`, and its nodes begin at the byte `upper`.
        lower = words_of_pages[:, 6].astype(np.int64)
        upper = words_of_pages[:, 7].astype(np.int64)
        # A pointer is a word, so the pointers end at an even byte.
        bad_bounds = (lower < _PAGE_HEADER) | (lower > upper) | (upper > page_size) | (lower % 2 == 1)
        refuse_if_any(bad_bounds, page_indexes, "bad bounds")

        counts = (lower - _PAGE_HEADER) // 2  # (pages,): the number of nodes of each page, which have a pointer each
        page = np.repeat(page_indexes, counts)  # (nodes,): the index of each node's page
        nodes_before = np.cumsum(counts) - counts  # (pages,): the number of nodes on the pages before each page
        # (nodes,): the position of each node's pointer among the pointers of its page.
        position = np.arange(page.size) - np.repeat(nodes_before, counts)
        # (nodes,): the pointer, which is the byte of the page at which the node begins.
        start = words_of_pages[page, _PAGE_HEADER // 2 + position].astype(np.int64)
        outside = (start < upper[page]) | (start + _NODE_HEADER + key_size > page_size) | (start % 2 == 1)
        refuse_if_any(outside, page, "a node out of bounds")

        # Four words are the header of a node: low word and high word of the value's size, flags, size of the key.
        words = words_of_pages.reshape(-1)
        node_index = (page * page_size + start) // 2  # (nodes,): the index in `words` at which each node begins
        value_size = _read_u32(words, node_index)
        flags = words[node_index + 2]
        is_big = flags == _BIG
        # A big node has, in the place of its value, the number of its first overflow page, in 8 bytes.
        end = start + _NODE_HEADER + key_size + np.where(is_big, 8, value_size)
        damaged = (flags > _BIG) | (words[node_index + 3] != key_size) | (end > page_size)
        refuse_if_any(damaged, page, "a damaged node")

        order = np.lexsort((start, page))  # by page, and within a page by `start`
        sorted_page = page[order]
        sorted_start = start[order]
        sorted_end = end[order]
        overlapping = (sorted_page[1:] == sorted_page[:-1]) & (sorted_start[1:] < sorted_end[:-1])
        refuse_if_any(overlapping, sorted_page[1:], "nodes that overlap")

        key_index = node_index + _NODE_HEADER // 2  # (nodes,): the index in `words` at which each key begins
        key_words = words[key_index[:, None] + np.arange(key_size // 2)]  # (nodes, words of a key)
        new_keys = key_words.view(f"S{key_size}")[:, 0]  # (nodes,)
        keys = np.concatenate([self._last_key.astype(new_keys.dtype), new_keys])
        # Compares each key with the key before it. If there is no last key, the first new key has no key before it, so
        # the first entry of `page` is left out.
        page_of_compared = page if self._last_key.size else page[1:]
        refuse_if_any(keys[1:] <= keys[:-1], page_of_compared, "keys out of order")

        self._last_key = keys[-1:]
        # The verifier compares this sum with the counter of the database (`_check_counts`).
        ctx["entries"] += page.size
        if is_big.any():
            first_page_index = node_index[is_big] + (_NODE_HEADER + key_size) // 2
            first_pages = _read_u32(words, first_page_index) | (_read_u32(words, first_page_index + 2) << 32)
            self._check_overflow(ctx, first_pages, value_size[is_big])

    def _check_overflow(self, ctx: dict[str, Any], first: IntArray, size: IntArray) -> None:
        """Checks the overflow pages of large values, and marks the pages as reached.

        The pages of a value have successive numbers, which begin at `first` (values,). `size` (values,) are the bytes
        of the values.
        """
        name = ctx["name"]
        pages_in_file = self.filesize // self.psize
        # The number of pages of each value: one header and the value, rounded up to whole pages.
        counts = (_PAGE_HEADER + size - 1) // self.psize + 1
        if ((first < 2) | (first + counts > min(self.next_pgno, pages_in_file))).any():
            self.err(f"{name} DB: overflow pages out of range")

        words_of_file = np.memmap(self.f, dtype="<u2", mode="r", shape=(pages_in_file, self.psize // 2))
        headers = words_of_file[first, :8]  # the headers of the first pages: number, flags, count of pages
        recorded_first = headers[:, :4].copy().view("<u8")[:, 0]
        recorded_counts = headers[:, 6:8].copy().view("<u4")[:, 0]
        bad = (recorded_first != first) | (headers[:, 5] != _OVERFLOW) | (recorded_counts != counts)
        if bad.any():
            self.err(f"{name} DB: overflow page {first[bad][0]} is damaged")

        # The numbers of all pages of all values: first, first + 1, ..., first + count - 1 of one value after the other.
        pages_before = np.cumsum(counts) - counts  # the number of pages of the values before each value
        page_numbers = np.repeat(first - pages_before, counts) + np.arange(int(counts.sum()))
        # A view of the verifier's `live`, in which each page that was reached has a 1.
        live = np.frombuffer(self.live, np.uint8)
        if live[page_numbers].any() or np.unique(page_numbers).size < page_numbers.size:
            self.err(f"{name} DB: overflow pages are reachable more than once")
        live[page_numbers] = 1
        # The verifier compares this sum with the counter of the database (`_check_counts`).
        ctx["overflow"] += page_numbers.size


def _read_u32(words: npt.NDArray[np.uint16], index: IntArray) -> IntArray:
    """Reads numbers of 4 bytes, little-endian. `index` (n,) are the indexes in `words` at which they begin."""
    low: IntArray = words[index].astype(np.int64)
    high: IntArray = words[index + 1].astype(np.int64)
    return low | (high << 16)
