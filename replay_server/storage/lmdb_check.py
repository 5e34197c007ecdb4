"""LmdbCheck: verifies every page of an LMDB file, so that LMDB can open it safely.

* py-lmdb's own verifier (`lmdb.verify`) checks pages one node at a time. Large databases are checked here, thousands of
  nodes at once and by the same rules.
* One rule is added: no two nodes overlap. Without it a file with a damaged size passes, and the next delete moves bytes
  over a neighbour: flips in page headers then crash the process ("free(): invalid size"). That is why the public
  function alone is not enough.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from lmdb import verify as lmdb_verify

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


def problems_of(path: Path, key_sizes: dict[bytes, int]) -> list[str]:
    """The problems of the file, in words; empty: LMDB can open it.

    `key_sizes`: the databases to check at once, with the bytes of their keys (8 or 12), which are in order as numbers.
    """
    with path.open("rb") as file:
        check = LmdbCheck(file, path.stat().st_size, {f"main/{name.decode()}": n for name, n in key_sizes.items()})
        try:
            return list(check.verify())
        except lmdb_verify.VerifyError as error:
            return [str(error)]


class LmdbCheck(_Verifier):  # type: ignore[misc]  # its type is not known
    def __init__(self, file: BinaryIO, size: int, key_sizes: dict[str, int]) -> None:
        super().__init__(file, size)
        self._key_sizes = key_sizes
        self._leaves: dict[str, list[int]] = {name: [] for name in key_sizes}

    def _walk_leaf(self, ctx: dict[str, Any], pgno: int, buf: bytes) -> None:
        if ctx["name"] in self._leaves:
            self._leaves[ctx["name"]].append(pgno)
        else:
            super()._walk_leaf(ctx, pgno, buf)

    def _check_counts(self, name: str, db: Any, ctx: dict[str, Any]) -> None:
        leaves = self._leaves.get(name, [])
        last: npt.NDArray[np.void] | None = None
        for start in range(0, len(leaves), _PAGES_AT_ONCE):
            if (last := self._check_leaves(ctx, leaves[start : start + _PAGES_AT_ONCE], last)) is None:
                return  # and said why
        super()._check_counts(name, db, ctx)

    def _check_cover(self) -> None:
        live, free = np.frombuffer(self.live, np.uint8)[2:], np.frombuffer(self.free, np.uint8)[2:]
        if not (live ^ free == 1).all():
            super()._check_cover()

    def _check_leaves(
        self, ctx: dict[str, Any], numbers: list[int], last: npt.NDArray[np.void] | None
    ) -> npt.NDArray[np.void] | None:
        """Checks leaf pages, in order, after the key `last`. Returns their last key; None if a page is damaged."""
        name, psize, key_size = ctx["name"], self.psize, self._key_sizes[ctx["name"]]

        def wrong(bad: npt.NDArray[np.bool_], page: Words, what: str) -> bool:
            if bad.any():
                self.err(f"{name} DB: {what} on page {numbers[int(page[bad][0])]}")
            return bool(bad.any())

        every = np.frombuffer(b"".join(self.read_page(number) for number in numbers), "<u2").reshape(len(numbers), -1)
        each = np.arange(len(numbers))
        lower, upper = every[:, 6].astype(np.int64), every[:, 7].astype(np.int64)
        if wrong((lower < _HEADER) | (lower > upper) | (upper > psize) | (lower % 2 == 1), each, "bad bounds"):
            return None
        counts = (lower - _HEADER) // 2
        page = np.repeat(each, counts)
        place = np.arange(page.size) - np.repeat(np.cumsum(counts) - counts, counts)
        node = every[page, _HEADER // 2 + place].astype(np.int64)
        if wrong(
            (node < upper[page]) | (node + _NODE + key_size > psize) | (node % 2 == 1), page, "a node out of bounds"
        ):
            return None
        words = every.reshape(-1)
        at = (page * psize + node) // 2
        size = words[at] | words[at + 1].astype(np.int64) << 16
        flags, start = words[at + 2], node + _NODE + key_size
        big = flags == _BIG
        end = start + np.where(big, 8, size)
        bad = (flags > _BIG) | (words[at + 3] != key_size) | (end > psize)
        if wrong(bad, page, "a damaged node"):
            return None
        order = np.lexsort((node, page))
        page_by, start_by, end_by = page[order], node[order], end[order]
        if wrong((page_by[1:] == page_by[:-1]) & (start_by[1:] < end_by[:-1]), page_by[1:], "nodes that overlap"):
            return None
        keys = np.empty(page.size + 1, dtype=[("high", np.uint64), ("low", np.uint64)])
        parts = [words[at + _NODE // 2 + place].byteswap().astype(np.uint64) for place in range(key_size // 2)]
        keys["high"][1:] = parts[0] << 48 | parts[1] << 32 | parts[2] << 16 | parts[3]
        keys["low"][1:] = 0 if key_size == 8 else parts[4] << 16 | parts[5]
        keys[0] = keys[1] if last is None and page.size else last
        before, after = keys[:-1], keys[1:]
        rising = (before["high"] < after["high"]) | ((before["high"] == after["high"]) & (before["low"] < after["low"]))
        if last is None:
            rising[:1] = True
        if wrong(~rising, page, "keys out of order"):
            return None
        ctx["entries"] += page.size
        if big.any() and not self._check_overflow(ctx, words, at[big] + (_NODE + key_size) // 2, size[big]):
            return None
        return keys[-1:]

    def _check_overflow(self, ctx: dict[str, Any], words: npt.NDArray[np.uint16], at: Words, size: Words) -> bool:
        """Checks the overflow pages of large values; `at` is where the nodes name the first page."""
        parts = [words[at + place].astype(np.uint64) for place in range(4)]
        named = parts[0] | parts[1] << 16 | parts[2] << 32 | parts[3] << 48
        pages = (_HEADER - 1 + size) // self.psize + 1
        in_file = self.filesize // self.psize
        most = min(self.next_pgno, in_file)
        if (named < 2).any() or (named >= most).any() or (named.astype(np.int64) + pages > most).any():
            self.err(f"{ctx['name']} DB: overflow pages out of range")
            return False
        first = named.astype(np.int64)
        heads = np.memmap(self.f, dtype="<u2", mode="r", shape=(in_file, self.psize // 2))[first, :8]
        number = heads[:, :4].copy().view("<u8")[:, 0]
        length = heads[:, 6:8].copy().view("<u4")[:, 0]
        if (bad := (number != named) | (heads[:, 5] != _OVERFLOW) | (length != pages)).any():
            self.err(f"{ctx['name']} DB: overflow page {first[bad][0]} is damaged")
            return False
        runs = np.repeat(first - (np.cumsum(pages) - pages), pages) + np.arange(int(pages.sum()))
        live = np.frombuffer(self.live, np.uint8)
        if live[runs].any() or np.unique(runs).size < runs.size:
            self.err(f"{ctx['name']} DB: overflow pages are reachable more than once")
            return False
        live[runs] = 1
        ctx["overflow"] += runs.size
        return True
