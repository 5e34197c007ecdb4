"""Balance: draws have fixed shares of the values of one tag, however many items of each value the table holds.

**Why.** A pool that holds 90 % mathematics trains on 90 % mathematics, and environments that generate faster crowd out
the rest. A sampler cannot mend that: it weighs items, and the weights would have to change with each insert.

**How.** Every draw chooses twice. It first chooses a value, in proportion to the weights of the values that still have
an item to give. Then the table's own sampler chooses an item among the items of that value. So the probability of an
item is the share of its value times the probability of the item within the value. A value that has nothing to give is
not chosen: the other values divide its share in proportion to their weights.

The table's sampler is therefore built once for each value. If its positions were the table's slots, the trees of each
sampler would be as long as the table, and a thousand values would need a thousand times the memory. So each value
numbers its own items: a `_Part` has the facts of its items one after the other, without gaps. All parts together are
about as large as one selector of the table.

Distinct draws of n rows are n draws one after the other, each from the rows that are left. `choose` finds the values of
all draws in one vectorised pass: a value that is used up is not chosen again. Then each value selects its rows at once,
because its selection does not depend on the other values.

Items without the tag are one value together, the empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from replay_protos.labels import Labels
from replay_server.tables.columns import MAX_BALANCED, Columns, FloatArray, IntArray, RowFacts
from replay_server.tables.selectors import NONE, Selector


@dataclass(frozen=True)
class ValueRows:
    """The number of rows of a batch that have a value: the message ValueRows of replay.proto."""

    value: str
    rows: int
    share: float
    """The factor by which the probability of each of these rows is multiplied."""


class Balanced(Selector):
    """Chooses a value, and then a slot by the selector of that value. A draw is O(values), apart from the selectors."""

    def __init__(
        self, columns: Columns, tag: str, weights: Mapping[str, float], build: Callable[[RowFacts], Selector]
    ) -> None:
        """`weights`: by value; a value without a weight has 1. `build` makes a selector over the items of one value."""
        self._columns = columns
        self.tag = columns.tags[tag]
        self._weight_of = weights
        self._build = build
        self._parts: dict[int, _Part] = {}
        """By code: a part for each value that has an item here."""
        self._position = np.zeros(0, dtype=np.int64)
        """By slot: the position of its item in the part of its value."""
        self._left = np.zeros(16, dtype=np.int64)
        """By code: the number of items that can be drawn; 0 if the weight is 0."""
        self._weights = np.zeros(16)
        """By code: the weight of the value, if the value has a part."""

    def insert(self, slots: IntArray) -> None:
        if slots.size:
            self._reach(int(slots.max()))
        for code, of_value in self._by_value(slots):
            part = self._parts.get(code)
            if part is None:
                part = self._open(code)
            positions = part.add(of_value, self._columns)
            self._position[of_value] = positions
            part.selector.insert(positions)
            self._count(code, part)

    def _reach(self, slot: int) -> None:
        """Makes room for the position of this slot."""
        if slot >= self._position.size:
            longer = np.zeros(2 * slot + 64, dtype=np.int64)
            longer[: self._position.size] = self._position
            self._position = longer

    def _open(self, code: int) -> _Part:
        """A part for a value that had no item here."""
        while code >= self._left.size:
            self._left = np.concatenate([self._left, np.zeros_like(self._left)])
            self._weights = np.concatenate([self._weights, np.zeros_like(self._weights)])
        self._weights[code] = self._weight_of.get(self.tag.values[code], 1.0)
        part = _Part(self._columns.current_version, self._build)
        self._parts[code] = part
        assert not self._left[code], "a value that had no item could be drawn"
        return part

    def delete(self, slots: IntArray) -> None:
        for code, of_value in self._by_value(slots):
            part = self._parts[code]
            positions = self._position[of_value]
            part.selector.delete(positions)
            part.free(positions)
            if part.size:
                self._count(code, part)
            else:
                del self._parts[code]
                self._left[code] = 0

    def update(self, slots: IntArray) -> None:
        for code, of_value in self._by_value(slots):
            part = self._parts[code]
            positions = self._position[of_value]
            part.priority[positions] = self._columns.priority[of_value]
            part.selector.update(positions)
            self._count(code, part)

    def version_moved(self, before: int) -> None:
        for part in self._parts.values():
            part.current_version = self._columns.current_version
            part.selector.version_moved(before)

    def _count(self, code: int, part: _Part) -> None:
        """Counts the items of a value that can be drawn."""
        self._left[code] = part.selector.selectable() if self._weights[code] else 0

    def _by_value(self, slots: IntArray) -> Iterator[tuple[int, IntArray]]:
        """Each code of `slots` (n,), with the slots that have it, in the same order."""
        codes = self.tag.codes[slots].astype(np.int64)
        for code, rows in _groups(codes):
            yield code, slots[rows]

    def selectable(self) -> int:
        return int(self._left.sum())

    def holds(self, slot: int) -> bool:
        code = self.tag.codes.item(slot)
        part = self._parts.get(code)
        if part is None or not self._left[code]:
            return False
        if slot >= self._position.size:
            return False
        position = self._position.item(slot)
        # A slot that waits for columns is not here, but may have the position of an item that used the slot before.
        if position >= part.slots.size or part.slots[position] != slot:
            return False
        return part.selector.holds(position)

    def check(self, slots: IntArray) -> None:
        of_values = dict(self._by_value(slots))
        assert self._parts.keys() == of_values.keys(), "a value has a part and no item, or an item and no part"
        for code, of_value in of_values.items():
            part = self._parts[code]
            positions = self._position[of_value]
            assert np.array_equal(part.slots[positions], of_value), "a position belongs to another slot"
            part.check(positions, self._columns)
            left = part.selector.selectable() if self._weights[code] else 0
            assert self._left[code] == left, (self._left[code], left)
        left_of_others = np.delete(self._left, list(of_values))
        assert not left_of_others.any(), "a value can be drawn that no item has"

    def weigh_values(self, excluded: IntArray = NONE) -> list[dict[str, Any]]:
        """The weights of each value that has an item to give; O(size).

        Each entry has the fields of the message ValueWeight of replay.proto.
        """
        left_out = self._positions_by_code(excluded)
        found = []
        for code, part in self._parts.items():
            without = left_out.get(code, NONE)
            items = int(self._left[code]) - without.size
            if items <= 0:
                continue
            total, squares = part.selector.weigh(without)
            weights = {
                "value": self.tag.values[code],
                "weight": float(self._weights[code]),
                "total": total,
                "squares": squares,
                "items": items,
            }
            found.append(weights)
        return found

    def _positions_by_code(self, slots: IntArray) -> dict[int, IntArray]:
        """By code: the positions of the `slots` (n,) that have the code."""
        return {code: self._position[of_value] for code, of_value in self._by_value(slots)}

    def _left_without(self, left_out: dict[int, IntArray]) -> IntArray:
        """By code: the number of items that can be drawn without these positions."""
        left = self._left.copy()
        for code, positions in left_out.items():
            left[code] -= positions.size
        return left

    def select(self, n: int, rng: np.random.Generator, excluded: IntArray = NONE) -> tuple[IntArray, FloatArray]:
        left_out = self._positions_by_code(excluded)
        left = self._left_without(left_out)
        n = min(n, int(left.sum()))
        codes = choose(self._weights, left, n, rng)
        return self._select_each(codes, self._shares(left), rng, left_out)

    def select_repeated(self, n: int, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
        shares = self._shares(self._left)
        codes = _draw(shares, n, rng) if shares.any() else NONE
        return self._select_each(codes, shares, rng, None)

    def _shares(self, left: IntArray) -> FloatArray:
        """By code: the probability that a draw chooses this value first."""
        shares = np.where(left > 0, self._weights, 0.0)
        return np.asarray(shares / (shares.sum() or 1.0))

    def _select_each(
        self, codes: IntArray, shares: FloatArray, rng: np.random.Generator, left_out: dict[int, IntArray] | None
    ) -> tuple[IntArray, FloatArray]:
        """A slot for each value of `codes` (n,), and the probability of the slot.

        `left_out`: the positions by code that are not selected. None: slots may repeat.
        """
        slots = np.zeros(codes.size, dtype=np.int64)
        probabilities = np.zeros(codes.size)
        for code, rows in _groups(codes):
            part = self._parts[code]
            if left_out is None:
                positions, within = part.selector.select_repeated(rows.size, rng)
            else:
                positions, within = part.selector.select(rows.size, rng, left_out.get(code, NONE))
            slots[rows] = part.slots[positions]
            probabilities[rows] = shares[code] * within
        return slots, probabilities

    def values(self) -> list[dict[str, Any]]:
        """The values, sorted by name, each with the number of its items. Items that wait for columns do not count.

        Each entry has the fields of the message ValueInfo of replay.proto.
        """
        found = []
        for code, part in self._parts.items():
            info = {
                "name": self.tag.values[code],
                "items": part.size,
                "weight": float(self._weights[code]),
            }
            found.append(info)
        return sorted(found, key=itemgetter("name"))

    def one_too_many(self, labels: Sequence[Labels] | None) -> str | None:
        """A value of the new items (n,) for which there is no room among MAX_BALANCED values; None: all values fit."""
        tag = self.tag
        if labels is None or len(tag) + len(labels) <= MAX_BALANCED:
            return None
        texts = {of_item.text(tag.name) for of_item in labels}
        new = [text for text in texts if tag.code(text) is None]
        if new and len(tag) + len(new) > MAX_BALANCED:
            return max(new)
        return None

    def rows_of(
        self, wanted: Sequence[ValueRows], excluded: IntArray = NONE, *, distinct: bool
    ) -> tuple[IntArray, FloatArray]:
        """The code (n,) of each wanted row that can be drawn, one value after the other, and the shares by code.

        If a value has too few distinct rows, it gives all of them. The selector must hold all excluded slots.
        """
        left = self._left_without(self._positions_by_code(excluded))
        codes = [NONE]
        shares = np.zeros(left.size)
        for value_rows in wanted:
            code = self.tag.code(value_rows.value)
            if code is None or code not in self._parts:
                continue
            if not left[code]:
                continue
            rows = value_rows.rows
            if distinct:
                rows = min(rows, left[code])
            codes.append(np.full(rows, code))
            shares[code] = value_rows.share
        return np.concatenate(codes), shares

    def select_values(
        self, wanted: Sequence[ValueRows], rng: np.random.Generator, excluded: IntArray = NONE, *, distinct: bool
    ) -> tuple[IntArray, FloatArray]:
        """Selects the rows of `rows_of`, as `select` if they are distinct, else as `select_repeated`.

        The probability of a row is its probability within its value, times the share in `wanted`.
        """
        codes, shares = self.rows_of(wanted, excluded, distinct=distinct)
        left_out = self._positions_by_code(excluded) if distinct else None
        return self._select_each(codes, shares, rng, left_out)


class _Part(RowFacts):
    """The facts of the items of one value, by position.

    Positions are used again, so they stay below twice the most items that the value ever had. The facts are copies of
    the table's. Only the priority of an item ever changes, and `Balanced.update` copies it again.
    """

    def __init__(self, current_version: int, build: Callable[[RowFacts], Selector]) -> None:
        super().__init__(current_version)
        self.slots = np.zeros(0, dtype=np.int64)
        """By position: the slot in the table; -1 if the item of the position has left."""
        self.size = 0
        self.selector = build(self)

    def add(self, slots: IntArray, columns: Columns) -> IntArray:
        """Gives each of `slots` (n,) a position. Returns the positions (n,)."""
        n = slots.size
        positions = np.array(self._claim(n), dtype=np.int64)
        self.size += n
        self.slots[positions] = slots
        self.priority[positions] = columns.priority[slots]
        self.policy_version[positions] = columns.policy_version[slots]
        self.order[positions] = columns.order[slots]
        return positions

    def free(self, positions: IntArray) -> None:
        """Frees the positions (n,) of items that leave."""
        self.size -= positions.size
        assert self.size >= 0, "more items leave than the value has"
        self.slots[positions] = -1
        self._free.extend(positions.tolist())

    def check(self, positions: IntArray, columns: Columns) -> None:
        """Asserts that the items are at these positions (n,), distinct, with the facts of the table."""
        assert self.size == positions.size, (self.size, positions.size)
        free = np.ones(self.slots.size, dtype=np.bool_)
        free[positions] = False
        self.check_free(free)
        assert self.current_version == columns.current_version, (self.current_version, columns.current_version)
        slots = self.slots[positions]
        for name in ("priority", "policy_version", "order"):
            assert np.array_equal(getattr(self, name)[positions], getattr(columns, name)[slots]), name
        self.selector.check(positions)


def choose(weights: FloatArray, left: IntArray, n: int, rng: np.random.Generator) -> IntArray:
    """The values (n,) of n draws, one after the other, as indices into `weights` (v,).

    Each draw chooses a value in proportion to the weights of the values that are not used up. `left` (v,) is the number
    of draws that each value can still give. The values whose weight is above 0 must have n or more draws left together.
    """
    # Draw independently, and leave out each draw whose value is used up by then. The remaining draws are distributed as
    # draws from the values that are not used up. So draw all at once, leave out the draws that came too late, and draw
    # as many again from the rest.
    left = left.copy()
    parts = [NONE]
    assert left[weights > 0].sum() >= n, "there are fewer items than draws, which would never end"
    while n:
        drawn = _draw(np.where(left > 0, weights, 0.0), n, rng)
        counts = np.bincount(drawn, minlength=left.size)
        if (counts > left).any():
            for value, rows in _groups(drawn):
                too_late = rows[left[value] :]
                drawn[too_late] = -1
            drawn = drawn[drawn >= 0]
            counts = np.minimum(counts, left)
        left -= counts
        n -= drawn.size
        parts.append(drawn)
    return np.concatenate(parts)


def _draw(weights: FloatArray, n: int, rng: np.random.Generator) -> IntArray:
    """n independent draws (n,) in proportion to `weights` (v,). At least one weight is above 0."""
    possible = np.flatnonzero(weights)
    ends = np.cumsum(weights[possible])
    targets = rng.random(n) * ends[-1]
    found = np.searchsorted(ends, targets, side="right")
    # With rounding, a target can reach the end of the last stretch.
    found = np.minimum(found, possible.size - 1)
    return np.asarray(possible[found])


def _groups(values: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Each different value in `values` (n,), and the ascending indexes of the rows that have the value."""
    if values.size == 0:
        return
    first = values.item(0)
    if values.size == 1 or (values == first).all():
        yield first, np.arange(values.size)
        return
    rows = np.argsort(values, kind="stable")
    ends = np.flatnonzero(np.diff(values[rows])) + 1
    for group in np.split(rows, ends):
        yield values.item(group[0]), group
