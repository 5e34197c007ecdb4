"""Balance: draws have fixed shares of the values of one tag, however many items of each value the table holds.

**Why.** Without balance, training on a table that holds 90 % mathematics is training on 90 % mathematics, and
environments that generate faster crowd out the rest. A sampler cannot prevent that, because it weighs items, and the
weights of the items would have to change with each insert.

**How.** Every draw chooses twice. It first chooses a value, in proportion to the weights of the values that still have
an item to give. Then the table's own sampler chooses an item among the items of that value. So the probability of an
item is the share of its value times the probability of the item within the value. A value that has no item to give is
not chosen. The other values divide its share in proportion to their weights.

The table's sampler is therefore built once for each value. If these samplers worked on the table's slots, the trees of
each sampler would be as long as the table, and a thousand values would need a thousand times the memory. So each value
has its own short arrays with the facts of its items (`_Part`), and its sampler works on positions in these arrays. All
parts together are about as large as one selector of the table.

A draw of n distinct rows consists of n draws one after the other, each from the rows that are left. `choose` finds the
values of all n draws with array operations, and never chooses a value that is used up. Then each value selects all of
its rows together, because its selection does not depend on the other values.

All items without the tag count as items of one value, the empty text.
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
    """How many rows of a batch shall have a value, as in the message ValueRows of replay.proto."""

    value: str
    rows: int
    share: float
    """The factor by which the probability of each of these rows is multiplied."""


class Balanced(Selector):
    """Chooses a value, and then a slot by the selector of that value. A draw is O(values), apart from the selectors."""

    def __init__(
        self, columns: Columns, tag: str, weights: Mapping[str, float], build: Callable[[RowFacts], Selector]
    ) -> None:
        """`weights`: value -> weight; other values have the weight 1. `build` makes the selector of one value."""
        self._columns = columns
        self.tag = columns.tags[tag]
        self._weight_of = weights
        self._build = build
        self._parts: dict[int, _Part] = {}
        """The part of each tag value that has an item here. The keys are codes: indices into `self.tag.values`."""
        self._position = np.zeros(0, dtype=np.int64)
        """By slot: the position of the item of the slot, in the part of its value."""
        self._drawable = np.zeros(16, dtype=np.int64)
        """By code: the number of items of the value that can be drawn; 0 if the weight of the value is 0."""
        self._weights = np.zeros(16)
        """By code: the weight of the value, if the value has a part."""

    def insert(self, slots: IntArray) -> None:
        """Adds each slot to the part of its value. A value that had no item gets a part."""
        if slots.size:
            self._lengthen(int(slots.max()))
        for code, value_slots in self._by_value(slots):
            part = self._parts.get(code)
            if part is None:
                part = self._add_part(code)
            positions = part.add(value_slots, self._columns)
            self._position[value_slots] = positions
            part.selector.insert(positions)
            self._count_drawable(code, part)

    def _lengthen(self, slot: int) -> None:
        """Makes `_position` long enough for this slot."""
        if slot >= self._position.size:
            longer = np.zeros(2 * slot + 64, dtype=np.int64)
            longer[: self._position.size] = self._position
            self._position = longer

    def _add_part(self, code: int) -> _Part:
        """Adds a part for a value that had no item here, and returns the part."""
        while code >= self._drawable.size:
            self._drawable = np.concatenate([self._drawable, np.zeros_like(self._drawable)])
            self._weights = np.concatenate([self._weights, np.zeros_like(self._weights)])
        self._weights[code] = self._weight_of.get(self.tag.values[code], 1.0)
        part = _Part(self._columns.current_version, self._build)
        self._parts[code] = part
        assert not self._drawable[code], "a value that had no item could be drawn"
        return part

    def delete(self, slots: IntArray) -> None:
        """Removes each slot from the part of its value. A value that has no item left loses its part."""
        for code, value_slots in self._by_value(slots):
            part = self._parts[code]
            positions = self._position[value_slots]
            part.selector.delete(positions)
            part.free(positions)
            if part.size:
                self._count_drawable(code, part)
            else:
                del self._parts[code]
                self._drawable[code] = 0

    def update(self, slots: IntArray) -> None:
        """As in Selector. First copies the new priorities into the parts."""
        for code, value_slots in self._by_value(slots):
            part = self._parts[code]
            positions = self._position[value_slots]
            part.priority[positions] = self._columns.priority[value_slots]
            part.selector.update(positions)
            self._count_drawable(code, part)

    def version_moved(self, before: int) -> None:
        for part in self._parts.values():
            part.current_version = self._columns.current_version
            part.selector.version_moved(before)

    def _count_drawable(self, code: int, part: _Part) -> None:
        """Notes in `_drawable` how many items of a value can be drawn: none if the weight of the value is 0."""
        self._drawable[code] = part.selector.selectable() if self._weights[code] else 0

    def _by_value(self, slots: IntArray) -> Iterator[tuple[int, IntArray]]:
        """Yields each code that some of `slots` (n,) have, with the slots that have it, in the order of `slots`."""
        codes = self.tag.codes[slots].astype(np.int64)
        for code, rows in _rows_by_value(codes):
            yield code, slots[rows]

    def selectable(self) -> int:
        return int(self._drawable.sum())

    def holds(self, slot: int) -> bool:
        """As in Selector. False for an item whose value has weight 0, because `select` never returns such an item."""
        code = self.tag.codes.item(slot)
        part = self._parts.get(code)
        if part is None or not self._drawable[code]:  # nothing of the value can be drawn
            return False
        if slot >= self._position.size:  # no slot as high as this was ever inserted here
            return False
        position = self._position.item(slot)
        # A slot whose item waits for columns is in no part. But `_position` may still have the position of an earlier
        # item of this slot.
        if position >= part.slots.size or part.slots[position] != slot:
            return False
        return part.selector.holds(position)

    def check(self, slots: IntArray) -> None:
        """As in Selector. Each value with an item must have a part, with exactly the items of the value."""
        slots_by_code = dict(self._by_value(slots))
        assert self._parts.keys() == slots_by_code.keys(), "a value has a part and no item, or an item and no part"
        for code, value_slots in slots_by_code.items():
            part = self._parts[code]
            positions = self._position[value_slots]
            assert np.array_equal(part.slots[positions], value_slots), "a position belongs to another slot"
            part.check(positions, self._columns)
            drawable = part.selector.selectable() if self._weights[code] else 0
            assert self._drawable[code] == drawable, (self._drawable[code], drawable)
        drawable_of_others = np.delete(self._drawable, list(slots_by_code))
        assert not drawable_of_others.any(), "a value can be drawn that no item has"

    def weigh_values(self, excluded: IntArray = NONE) -> list[dict[str, Any]]:
        """The weights of each value that has items which can be drawn. Excluded slots do not count. O(size).

        Each entry has the fields of the message ValueWeight of replay.proto.
        """
        excluded_by_code = self._positions_by_code(excluded)
        entries = []
        for code, part in self._parts.items():
            excluded_positions = excluded_by_code.get(code, NONE)
            items = int(self._drawable[code]) - excluded_positions.size
            if items <= 0:  # all are excluded, or the value has weight 0
                continue
            total, squares = part.selector.weigh(excluded_positions)
            weights = {
                "value": self.tag.values[code],
                "weight": float(self._weights[code]),
                "total": total,
                "squares": squares,
                "items": items,
            }
            entries.append(weights)
        return entries

    def _positions_by_code(self, slots: IntArray) -> dict[int, IntArray]:
        """Code -> the positions of those of `slots` (n,) that have the code."""
        return {code: self._position[value_slots] for code, value_slots in self._by_value(slots)}

    def _drawable_without(self, excluded_by_code: dict[int, IntArray]) -> IntArray:
        """By code: the number of items that can be drawn, without the excluded positions of each code."""
        drawable = self._drawable.copy()
        for code, positions in excluded_by_code.items():
            drawable[code] -= positions.size
        return drawable

    def select(self, n: int, rng: np.random.Generator, excluded: IntArray = NONE) -> tuple[IntArray, FloatArray]:
        """As in Selector. Chooses the value of each row first, and then the slots of each value together."""
        excluded_by_code = self._positions_by_code(excluded)
        drawable = self._drawable_without(excluded_by_code)
        n = min(n, int(drawable.sum()))
        codes = choose(self._weights, drawable, n, rng)
        shares = self._shares(drawable)
        return self._select_within_values(codes, shares, rng, excluded_by_code)

    def select_repeated(self, n: int, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
        shares = self._shares(self._drawable)
        codes = NONE
        if shares.any():  # otherwise no value can be drawn
            codes = _draw(shares, n, rng)
        return self._select_within_values(codes, shares, rng, excluded_by_code=None)

    def _shares(self, drawable: IntArray) -> FloatArray:
        """By code: the probability that a draw chooses this value. `drawable`: by code, the items that can be drawn."""
        weights = np.where(drawable > 0, self._weights, 0.0)
        total = weights.sum() or 1.0  # if the sum is 0, no value can be chosen, and all shares are 0
        return np.asarray(weights / total)

    def _select_within_values(
        self,
        codes: IntArray,
        shares: FloatArray,
        rng: np.random.Generator,
        excluded_by_code: dict[int, IntArray] | None,
    ) -> tuple[IntArray, FloatArray]:
        """Selects a slot for each row, among the items of the value whose code `codes` (n,) has for the row.

        Returns the slots (n,), and the probability (n,) of each. `shares`: by code, the share of the value.
        `excluded_by_code`: by code, the positions that are not selected; None: slots may repeat.
        """
        slots = np.zeros(codes.size, dtype=np.int64)
        probabilities = np.zeros(codes.size)
        for code, rows in _rows_by_value(codes):
            part = self._parts[code]
            if excluded_by_code is None:
                positions, probabilities_in_value = part.selector.select_repeated(rows.size, rng)
            else:
                excluded_positions = excluded_by_code.get(code, NONE)
                positions, probabilities_in_value = part.selector.select(rows.size, rng, excluded_positions)
            slots[rows] = part.slots[positions]
            probabilities[rows] = shares[code] * probabilities_in_value
        return slots, probabilities

    def values(self) -> list[dict[str, Any]]:
        """The values with items here, sorted by name. Items that wait for columns do not count.

        Each entry has the fields of the message ValueInfo of replay.proto.
        """
        entries = []
        for code, part in self._parts.items():
            info = {
                "name": self.tag.values[code],
                "items": part.size,
                "weight": float(self._weights[code]),
            }
            entries.append(info)
        return sorted(entries, key=itemgetter("name"))

    def one_too_many(self, labels: Sequence[Labels] | None) -> str | None:
        """Finds a value of new items for which the limit MAX_BALANCED leaves no room; None: all their values fit.

        `labels` (n,): the labels of the new items; None: they have no labels.
        """
        tag = self.tag
        if labels is None or len(tag) + len(labels) <= MAX_BALANCED:  # there is room even if each item has a new value
            return None
        # There may be too little room: count the values that are really new.
        values = {item_labels.text(tag.name) for item_labels in labels}
        new_values = [value for value in values if tag.code(value) is None]
        if new_values and len(tag) + len(new_values) > MAX_BALANCED:
            return max(new_values)  # any of them would do; `max` does not depend on the order of the set
        return None

    def rows_of(
        self, wanted: Sequence[ValueRows], excluded: IntArray = NONE, *, distinct: bool
    ) -> tuple[IntArray, FloatArray]:
        """Returns the code (n,) of the value of each row that can be drawn, and the share of each value, by code.

        The rows are in the order of `wanted`, one value after the other. Rows of a value that no drawable item has are
        left out. If the rows must be distinct, a value with fewer drawable items than wanted rows gives each of its
        items once. The selector must hold all excluded slots.
        """
        drawable = self._drawable_without(self._positions_by_code(excluded))
        codes = [NONE]
        shares = np.zeros(drawable.size)
        for value_rows in wanted:
            code = self.tag.code(value_rows.value)
            if code is None or code not in self._parts:  # no item has the value
                continue
            if not drawable[code]:  # all items of the value are excluded, or its weight is 0
                continue
            rows = value_rows.rows
            if distinct:
                rows = min(rows, drawable[code])
            codes.append(np.full(rows, code))
            shares[code] = value_rows.share
        return np.concatenate(codes), shares

    def select_values(
        self, wanted: Sequence[ValueRows], rng: np.random.Generator, excluded: IntArray = NONE, *, distinct: bool
    ) -> tuple[IntArray, FloatArray]:
        """Selects a slot for each row that `rows_of` returns: distinct slots if `distinct`, otherwise slots may repeat.

        Returns the slots (n,), and the probability (n,) of each: its probability within its value, times the share in
        `wanted`.
        """
        codes, shares = self.rows_of(wanted, excluded, distinct=distinct)
        excluded_by_code = self._positions_by_code(excluded) if distinct else None
        return self._select_within_values(codes, shares, rng, excluded_by_code)


class _Part(RowFacts):
    """The facts of the items of one value, by position, and the selector of the value.

    The positions of items that leave are used again. So the arrays have at most twice as many entries as the value ever
    had items at once, or 64. The facts are copies of the table's facts. Only the priority of an item ever changes, and
    `Balanced.update` then copies it again.
    """

    def __init__(self, current_version: int, build: Callable[[RowFacts], Selector]) -> None:
        super().__init__(current_version)
        self.slots = np.zeros(0, dtype=np.int64)
        """By position: the slot of the item in the table; -1 if the item has left."""
        self.size = 0
        """The number of items."""
        self.selector = build(self)
        """The selector of the value. Its slots are positions here, and not slots of the table."""

    def add(self, slots: IntArray, columns: Columns) -> IntArray:
        """Gives each of `slots` (n,) a position, and copies its facts from the table. Returns the positions (n,)."""
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
        """Asserts that exactly these distinct positions (n,) have items, with the same facts as in the table."""
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
    """Draws n values, one after the other. Returns them (n,) as indices into `weights` (v,).

    Each draw chooses a value in proportion to the weights of the values that are not used up. `left` (v,) is the number
    of times that each value can still be drawn. The sum of `left` over the values whose weight is above 0 must be at
    least n.
    """
    # Take independent draws, and reject each draw whose value is used up by the draws before it. The accepted draws are
    # then distributed as draws from the values that are not used up. So draw all n values independently, reject the
    # draws that come too late, and draw as many new values from those that are left.
    left = left.copy()
    chosen = [NONE]
    assert left[weights > 0].sum() >= n, "there are fewer items than draws, which would never end"
    while n:
        drawn = _draw(np.where(left > 0, weights, 0.0), n, rng)
        counts = np.bincount(drawn, minlength=left.size)  # (v,): how often each value was drawn
        if (counts > left).any():
            for value, rows in _rows_by_value(drawn):
                too_late = rows[left[value] :]  # `rows` are in the order of the draws
                drawn[too_late] = -1
            drawn = drawn[drawn >= 0]
            counts = np.minimum(counts, left)
        left -= counts
        n -= drawn.size
        chosen.append(drawn)
    return np.concatenate(chosen)


def _draw(weights: FloatArray, n: int, rng: np.random.Generator) -> IntArray:
    """Draws n values independently, in proportion to `weights` (v,). Returns them (n,) as indices into `weights`.

    At least one weight is above 0.
    """
    # The range from 0 to the sum of the weights is divided into one interval for each possible value, which is as long
    # as the weight of the value. A random point of the range draws the value of the interval in which it lies.
    possible = np.flatnonzero(weights)
    ends = np.cumsum(weights[possible])
    points = rng.random(n) * ends[-1]
    intervals = np.searchsorted(ends, points, side="right")
    # Because of rounding, a point can be the end of the last interval.
    intervals = np.minimum(intervals, possible.size - 1)
    return np.asarray(possible[intervals])


def _rows_by_value(values: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Yields each distinct value in `values` (n,), with the indexes at which it stands, ascending."""
    if values.size == 0:
        return
    first = values.item(0)
    if values.size == 1 or (values == first).all():
        yield first, np.arange(values.size)
        return
    rows = np.argsort(values, kind="stable")  # rows with the same value stand together, in ascending order
    starts = np.flatnonzero(np.diff(values[rows])) + 1  # where the rows of each value but the first begin
    for rows_of_value in np.split(rows, starts):
        yield values.item(rows_of_value[0]), rows_of_value
