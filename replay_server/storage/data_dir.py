"""Data directory: locks the folder of an LMDB file, and verifies every page of the file before LMDB opens it.

* py-lmdb's own verifier (`lmdb.verify`) checks pages one node at a time. This module checks the large databases by the
  same rules, thousands of nodes at once.
* This module adds one rule, which the public function of py-lmdb does not have: no two nodes overlap. Without this rule
  a file in which the size of a node is damaged would pass, and the next delete would move bytes over a neighbour of the
  node. This has crashed processes ("free(): invalid size").
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
"""The layout of the name of a chunk: the key of its item, and the position of its first byte."""
COMMIT = b"commit"
"""The name of the record of the last commit."""
COMMIT_RECORD = struct.Struct("<QQ")
"""The layout of the record of a commit: FORMAT, and the number of the transaction."""


class UnusableDirectory(ValueError):
    """A data directory that the server cannot use, with the reason and the remedy."""


class DamagedDirectory(UnusableDirectory):
    """No state in the data directory is known to be whole. The remedy is a checkpoint."""

    def __init__(self, directory: Path, what: str) -> None:
        """`what` says in a few words what is damaged."""
        super().__init__(
            f"data_dir {directory} is damaged ({what}): name an empty data_dir and restore a checkpoint into it with "
            f"--restore latest"
        )
        self.what = f"data_dir {directory} is damaged ({what}), and no state in it is whole"
        """The message without the remedy, for a start that falls back to a checkpoint by itself."""


def lock(directory: Path) -> int:
    """Locks the directory until the file descriptor that this returns is closed.

    Raises UnusableDirectory if another server has the lock, and OSError if the lock file cannot be made.
    """
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
    """Renames data.mdb, if the directory has this file. The content stays in the directory under the new name."""
    path = directory / "data.mdb"
    if path.exists():
        aside = directory / f"replaced-{time.time_ns()}.mdb"
        path.rename(aside)
        log.warning("what was in %s is in %s now; remove it when nothing of it is needed", directory, aside)


def why_not_openable(path: Path) -> str:
    """The reason why LMDB could crash on the file, or open an older commit than the last one; "": no reason.

    Raises UnusableDirectory if another version wrote the file.
    """
    with path.open("rb") as file:
        check = LmdbCheck(file, path.stat().st_size)
        # The verifier reports most damage by its own error, but some damaged numbers end in one of the others.
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


# The class has no public name, so pyproject.toml pins the version of py-lmdb. py-lmdb has no types for the class.
_Verifier: Any = vars(lmdb_verify)["_Verifier"]
Words = npt.NDArray[np.int64]

_HEADER = 16
"""Bytes before the node pointers of a page."""
_NODE = 8
"""Bytes before the key of a node: size of the value (4), flags (2), size of the key (2)."""
_BIG = 1
"""The flag of a node whose value lies on overflow pages."""
_OVERFLOW = 4
"""The flag of an overflow page."""
_PAGES_AT_ONCE = 4096
"""Leaf pages that are checked at once."""
_KEY_SIZES = {"main/items": KEY.size, "main/payloads": CHUNK_KEY.size}
"""The large databases, with the number of bytes of their keys. LMDB orders these keys by their bytes."""


class LmdbCheck(_Verifier):  # type: ignore[misc]  # the type of the base class is not known
    """A verifier of one LMDB file that checks the leaf pages of the large databases with numpy."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        """`size` is the number of bytes of the file."""
        super().__init__(file, size)
        self._unchecked: dict[int, bytes] = {}
        """The next leaf pages to check, by their numbers, in the order in which the walk found them."""
        self._last = np.empty(0, np.bytes_)
        """The last key on the pages checked so far; empty: no page was checked yet."""

    # Methods of py-lmdb's verifier, which its `verify` calls.

    def err(self, msg: str) -> None:
        raise lmdb_verify.VerifyError(msg)  # one problem is enough to refuse a file

    def _read_at(self, off: int, n: int) -> bytes:
        return os.pread(self.f.fileno(), n, off)  # half the time of seek and read, for each page of the file

    def _verify_tree(self, name: str, db: Any, *rest: Any, is_free: bool) -> Any:
        """Checks one database. `is_free`: it is LMDB's own list of free pages, whose keys are integers."""
        # With other flags LMDB orders keys in another way, or fails an assertion, which ends the process.
        flags = lmdb_verify.MDB_INTEGERKEY if is_free else 0
        if db.flags != flags:
            self.err(f"{name} DB: unknown flags {db.flags}")
        return super()._verify_tree(name, db, *rest, is_free=is_free)

    def _walk_leaf(self, ctx: dict[str, Any], pgno: int, buf: bytes) -> None:
        """Checks a leaf page, or puts off the check of a page of a large database until there are many."""
        if ctx["name"] not in _KEY_SIZES:
            super()._walk_leaf(ctx, pgno, buf)
            return
        self._unchecked[pgno] = buf
        if len(self._unchecked) == _PAGES_AT_ONCE:
            self._check_leaves(ctx)

    def _check_counts(self, name: str, db: Any, ctx: dict[str, Any]) -> None:
        """Checks the counters of a database. The verifier calls this after the last page of the database."""
        if self._unchecked:
            self._check_leaves(ctx)
        self._last = self._last[:0]  # the keys of the next database begin anew
        super()._check_counts(name, db, ctx)

    def _check_cover(self) -> None:
        """Checks that each page but the two meta pages is either reachable (1 in `live`) or free (1 in `free`)."""
        live = np.frombuffer(self.live, np.uint8)[2:]
        free = np.frombuffer(self.free, np.uint8)[2:]
        if not (live ^ free == 1).all():
            super()._check_cover()  # finds the page, in a slow loop, and reports it

    def check_version(self, directory: Path) -> None:
        """Raises UnusableDirectory if another version wrote the file.

        Call this before `verify`, which knows only the keys of this version.
        """
        # Methods of py-lmdb's verifier: the first finds the layout of the file, the second the root of the last commit.
        self.detect_engine()
        self.load_metas()
        commit = self._commit(self.meta.main.root)
        if commit is not None and commit[0] != FORMAT:
            raise UnusableDirectory(f"data_dir {directory} {of_another_version(f'format {commit[0]}')}")

    def check_roots(self) -> None:
        """Checks that the roots of the last two commits have the numbers that these commits recorded.

        LMDB keeps the roots of its last two commits, and opens the root with the higher number. If a number is damaged,
        LMDB opens the older state and does not notice. So each of our commits records its own number. Call this after
        `verify`.
        """
        roots = [self._read_meta(0, 1), self._read_meta(1, self.psize)]
        old, new = sorted(roots, key=lambda root: int(root.txnid))
        recorded_old = self._recorded_number(old)
        recorded_new = self._recorded_number(new)
        if recorded_new is None:
            return  # no commit has ended yet, or the file is not of a replay server: then the start refuses it
        # LMDB numbers its transactions one after the other, so the numbers of the two roots differ by 1, even if the
        # older root has no record of ours. A new file has only one root: the other has number 0 and no pages.
        is_new_file = not old.txnid and old.main.root == lmdb_verify.P_INVALID
        if recorded_old is None and old.txnid != new.txnid - 1 and not is_new_file:
            self.err(f"commits {old.txnid} and {new.txnid} follow each other")
        for recorded, root in ((recorded_new, new), (recorded_old, old)):
            if recorded is not None and recorded != root.txnid:
                self.err(f"commit {recorded} says that it is {root.txnid}")

    def _recorded_number(self, meta: Any) -> int | None:
        """The number that the commit with this meta page recorded; None if it has no readable record."""
        commit = self._commit(meta.main.root)
        return None if commit is None else commit[1]

    def _commit(self, root: int) -> tuple[int, int] | None:
        """The format and the number in our record in the main database, whose only page is `root`.

        None if there is no readable record.
        """
        page = self.read_page(root)
        if page is None:
            return None
        try:
            # The node pointers of the page end at the byte `lower`. Each is the byte at which a node begins.
            (lower,) = struct.unpack_from("<H", page, 12)
            for (node,) in struct.iter_unpack("<H", page[_HEADER:lower]):
                # Our record is short: the upper half of its length, which is not used here, is 0.
                length, _, _, key_length = struct.unpack_from("<HHHH", page, node)
                start = node + _NODE + key_length
                if page[node + _NODE : start] == COMMIT:
                    version, number = COMMIT_RECORD.unpack(unseal(page[start : start + length]))
                    return version, number
        except (struct.error, Damaged):
            pass
        return None

    def _check_leaves(self, ctx: dict[str, Any]) -> None:
        """Checks the unchecked leaf pages, and that their keys follow the last key of the pages before.

        The arrays of pages have one entry for each page. All later arrays have one entry for each node of any page.
        """
        pages = self._unchecked
        self._unchecked = {}
        numbers = list(pages)
        name = ctx["name"]
        key_size = _KEY_SIZES[name]
        page_size = self.psize

        def refuse(bad: npt.NDArray[np.bool_], page: Words, what: str) -> None:
            """Refuses the file if any entry is `bad` (n,). `page` (n,) has the index of each entry's page."""
            if bad.any():
                self.err(f"{name} DB: {what} on page {numbers[int(page[bad][0])]}")

        words_of_pages = np.frombuffer(b"".join(pages.values()), "<u2").reshape(len(numbers), -1)
        page_indexes = np.arange(len(numbers))
        # The node pointers of a page end at the byte `lower`, and its nodes begin at the byte `upper`.
        lower = words_of_pages[:, 6].astype(np.int64)
        upper = words_of_pages[:, 7].astype(np.int64)
        # Pointers are words of 2 bytes, so their end is even.
        bad_bounds = (lower < _HEADER) | (lower > upper) | (upper > page_size) | (lower % 2 == 1)
        refuse(bad_bounds, page_indexes, "bad bounds")

        counts = (lower - _HEADER) // 2  # nodes of each page: each has a pointer of 2 bytes
        page = np.repeat(page_indexes, counts)  # the page of each node
        first_of_page = np.cumsum(counts) - counts
        position = np.arange(page.size) - np.repeat(first_of_page, counts)  # of each node's pointer in its page
        # The pointer: the byte of the page at which the node begins.
        node = words_of_pages[page, _HEADER // 2 + position].astype(np.int64)
        outside = (node < upper[page]) | (node + _NODE + key_size > page_size) | (node % 2 == 1)
        refuse(outside, page, "a node out of bounds")

        words = words_of_pages.reshape(-1)
        at = (page * page_size + node) // 2  # the index in `words` at which each node begins
        size = words[at] | words[at + 1].astype(np.int64) << 16  # of the value: the low word, then the high word
        flags = words[at + 2]
        big = flags == _BIG
        # A big node holds the number of its first overflow page, in 8 bytes, in the place of its value.
        end = node + _NODE + key_size + np.where(big, 8, size)
        damaged = (flags > _BIG) | (words[at + 3] != key_size) | (end > page_size)
        refuse(damaged, page, "a damaged node")

        order = np.lexsort((node, page))  # by page, and in a page by the position of the node
        sorted_page = page[order]
        sorted_node = node[order]
        sorted_end = end[order]
        overlapping = (sorted_page[1:] == sorted_page[:-1]) & (sorted_node[1:] < sorted_end[:-1])
        refuse(overlapping, sorted_page[1:], "nodes that overlap")

        key_words = words[(at + _NODE // 2)[:, None] + np.arange(key_size // 2)]  # (nodes, words of a key)
        new_keys = key_words.view(f"S{key_size}")[:, 0]  # (nodes,)
        keys = np.concatenate([self._last.astype(new_keys.dtype), new_keys])
        # Each key is compared with the key before it. If there is no last key, the first new key has none before it,
        # and its entry of `page` is left out.
        refuse(keys[1:] <= keys[:-1], page[new_keys.size + 1 - keys.size :], "keys out of order")

        self._last = keys[-1:]
        # The verifier compares these sums with the counters of the database (`_check_counts`).
        ctx["entries"] += page.size
        if big.any():
            self._check_overflow(ctx, words, at[big] + (_NODE + key_size) // 2, size[big])

    def _check_overflow(self, ctx: dict[str, Any], words: npt.NDArray[np.uint16], at: Words, size: Words) -> None:
        """Checks the overflow pages of large values.

        `at` (n,) are the indexes in `words` at which the nodes name their first overflow page. `size` (n,) are the
        bytes of the values.
        """
        name = ctx["name"]
        pages_in_file = self.filesize // self.psize
        low = words[at] | words[at + 1].astype(np.int64) << 16
        high = words[at + 2] | words[at + 3].astype(np.int64) << 16
        first = low | high << 32  # the number of each value's first page
        pages = (_HEADER - 1 + size) // self.psize + 1  # pages of each value: header and value, rounded up
        if ((first < 2) | (first + pages > min(self.next_pgno, pages_in_file))).any():
            self.err(f"{name} DB: overflow pages out of range")

        words_of_file = np.memmap(self.f, dtype="<u2", mode="r", shape=(pages_in_file, self.psize // 2))
        heads = words_of_file[first, :8]  # the headers of the first pages: number, flags, count of pages
        number = heads[:, :4].copy().view("<u8")[:, 0]
        length = heads[:, 6:8].copy().view("<u4")[:, 0]
        bad = (number != first) | (heads[:, 5] != _OVERFLOW) | (length != pages)
        if bad.any():
            self.err(f"{name} DB: overflow page {first[bad][0]} is damaged")

        # The numbers of all pages of all values: first, first + 1, ..., first + pages - 1 of each value.
        run_starts = first - (np.cumsum(pages) - pages)
        page_numbers = np.repeat(run_starts, pages) + np.arange(int(pages.sum()))
        # A view of the verifier's `live`, in which each page that was reached has a 1.
        live = np.frombuffer(self.live, np.uint8)
        if live[page_numbers].any() or np.unique(page_numbers).size < page_numbers.size:
            self.err(f"{name} DB: overflow pages are reachable more than once")
        live[page_numbers] = 1
        ctx["overflow"] += page_numbers.size
