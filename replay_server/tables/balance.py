"""Balance: draws have fixed shares of the values of one tag, however many items of each value the table holds.

**Why.** A pool that holds 90 % mathematics trains on 90 % mathematics, and environments that generate faster crowd out
the rest. A sampler cannot mend that: it weighs items, and the weights would have to change with each insert.

**How.** Every draw chooses twice. It first chooses a value, in proportion to the weights of the values that still have
an item to give. Then the table's own sampler chooses an item among the items of that value. So the probability of an
item is the share of its value times the probability of the item within the value. A value that has nothing to give is
not chosen: the other values divide its share in proportion to their weights.

The table's sampler is therefore built once for each value. If these samplers worked on the table's slots, the trees of
each sampler would be as long as the table, and a thousand values would need a thousand times the memory. So each value
has its own short arrays with the facts of its items (`_Part`), and its sampler works on positions in these arrays. All
parts together are about as large as one selector of the table.

Distinct draws of n rows are n draws one after the other, each from the rows that are left. `choose` finds the values of
all draws with arrays: a value that is used up is not chosen again. Then each value selects all of its rows together,
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
        """The part of each tag value that has an item here. The keys are codes: indices into `self.tag.values`."""
        self._position = np.zeros(0, dtype=np.int64)
        """By slot: the position of its item in the part of its value."""
        self._left = np.zeros(16, dtype=np.int64)
        """By code: the number of items that can be drawn; 0 if the weight is 0."""
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
            self._count(code, part)

    def _lengthen(self, slot: int) -> None:
        """Makes `_position` long enough for this slot."""
        if slot >= self._position.size:
            longer = np.zeros(2 * slot + 64, dtype=np.int64)
            longer[: self._position.size] = self._position
            self._position = longer

    def _add_part(self, code: int) -> _Part:
        """Adds a part for a value that had no item here, and returns the part."""
        while code >= self._left.size:
            self._left = np.concatenate([self._left, np.zeros_like(self._left)])
            self._weights = np.concatenate([self._weights, np.zeros_like(self._weights)])
        self._weights[code] = self._weight_of.get(self.tag.values[code], 1.0)
        part = _Part(self._columns.current_version, self._build)
        self._parts[code] = part
        assert not self._left[code], "a value that had no item could be drawn"
        return part

    def delete(self, slots: IntArray) -> None:
        """Removes each slot from the part of its value. A value that has no item left loses its part."""
        for code, value_slots in self._by_value(slots):
            part = self._parts[code]
            positions = self._position[value_slots]
            part.selector.delete(positions)
            part.free(positions)
            if part.size:
                self._count(code, part)
            else:
                del self._parts[code]
                self._left[code] = 0

    def update(self, slots: IntArray) -> None:
        """As in Selector. Copies the new priorities into the parts of the values first."""
        for code, value_slots in self._by_value(slots):
            part = self._parts[code]
            positions = self._position[value_slots]
            part.priority[positions] = self._columns.priority[value_slots]
            part.selector.update(positions)
            self._count(code, part)

    def version_moved(self, before: int) -> None:
        for part in self._parts.values():
            part.current_version = self._columns.current_version
            part.selector.version_moved(before)

    def _count(self, code: int, part: _Part) -> None:
        """Notes how many items of a value can be drawn; none if the weight of the value is 0."""
        self._left[code] = part.selector.selectable() if self._weights[code] else 0

    def _by_value(self, slots: IntArray) -> Iterator[tuple[int, IntArray]]:
        """Each code of `slots` (n,), with the slots that have it, in the same order."""
        codes = self.tag.codes[slots].astype(np.int64)
        for code, rows in _groups(codes):
            yield code, slots[rows]

    def selectable(self) -> int:
        return int(self._left.sum())

    def holds(self, slot: int) -> bool:
        """As in Selector. False for an item whose value has weight 0, because `select` never returns such an item."""
        code = self.tag.codes.item(slot)
        part = self._parts.get(code)
        if part is None or not self._left[code]:  # nothing of the value can be drawn
            return False
        if slot >= self._position.size:  # no slot as high as this was ever inserted here
            return False
        position = self._position.item(slot)
        # A slot that waits for columns is not here, but `_position` may still name the position of an earlier item of
        # the slot.
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
            left = part.selector.selectable() if self._weights[code] else 0
            assert self._left[code] == left, (self._left[code], left)
        left_of_others = np.delete(self._left, list(slots_by_code))
        assert not left_of_others.any(), "a value can be drawn that no item has"

    def weigh_values(self, excluded: IntArray = NONE) -> list[dict[str, Any]]:
        """The weights of each value that has an item which can be drawn, without the excluded slots; O(size).

        Each entry has the fields of the message ValueWeight of replay.proto.
        """
        left_out = self._positions_by_code(excluded)
        entries = []
        for code, part in self._parts.items():
            excluded_positions = left_out.get(code, NONE)
            items = int(self._left[code]) - excluded_positions.size
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
        """By code: the positions of the `slots` (n,) that have the code."""
        return {code: self._position[value_slots] for code, value_slots in self._by_value(slots)}

    def _left_without(self, left_out: dict[int, IntArray]) -> IntArray:
        """By code: the number of items that can be drawn if the positions `left_out`, by code, are not drawn."""
        left = self._left.copy()
        for code, positions in left_out.items():
            left[code] -= positions.size
        return left

    def select(self, n: int, rng: np.random.Generator, excluded: IntArray = NONE) -> tuple[IntArray, FloatArray]:
        """As in Selector. Chooses the value of each row first, and then the slots of each value together."""
        left_out = self._positions_by_code(excluded)
        left = self._left_without(left_out)
        n = min(n, int(left.sum()))
        codes = choose(self._weights, left, n, rng)
        return self._select_each(codes, self._shares(left), rng, left_out)

    def select_repeated(self, n: int, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
        shares = self._shares(self._left)
        codes = _draw(shares, n, rng) if shares.any() else NONE  # without a share above 0, no value can be drawn
        return self._select_each(codes, shares, rng, None)

    def _shares(self, left: IntArray) -> FloatArray:
        """By code: the probability that a draw chooses this value. `left`: by code, the items that can be drawn."""
        shares = np.where(left > 0, self._weights, 0.0)
        return np.asarray(shares / (shares.sum() or 1.0))  # a sum of 0: no value can be chosen

    def _select_each(
        self, codes: IntArray, shares: FloatArray, rng: np.random.Generator, left_out: dict[int, IntArray] | None
    ) -> tuple[IntArray, FloatArray]:
        """A slot (n,) for each row, which has a value of `codes` (n,), and the probability (n,) of the slot.

        `shares`: by code. `left_out`: by code, the positions that are not selected. None: slots may repeat.
        """
        slots = np.zeros(codes.size, dtype=np.int64)
        probabilities = np.zeros(codes.size)
        for code, rows in _groups(codes):
            part = self._parts[code]
            if left_out is None:
                positions, within_value = part.selector.select_repeated(rows.size, rng)
            else:
                positions, within_value = part.selector.select(rows.size, rng, left_out.get(code, NONE))
            slots[rows] = part.slots[positions]
            probabilities[rows] = shares[code] * within_value
        return slots, probabilities

    def values(self) -> list[dict[str, Any]]:
        """The values, sorted by name, each with the number of its items. Items that wait for columns do not count.

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
        """A value of new items that would exceed MAX_BALANCED values; None: all their values fit.

        `labels` (n,): of the new items; None: they have no labels.
        """
        tag = self.tag
        if labels is None or len(tag) + len(labels) <= MAX_BALANCED:  # there is room even if each item has a new value
            return None
        # Not enough room in the worst case: count the values that are really new.
        texts = {of_item.text(tag.name) for of_item in labels}
        new = [text for text in texts if tag.code(text) is None]
        if new and len(tag) + len(new) > MAX_BALANCED:
            return max(new)  # any of them would do, but the same one each time
        return None

    def rows_of(
        self, wanted: Sequence[ValueRows], excluded: IntArray = NONE, *, distinct: bool
    ) -> tuple[IntArray, FloatArray]:
        """The code (n,) of each wanted row that can be drawn, one value after the other, and the shares by code.

        If the rows must be distinct, and a value has fewer rows than wanted, all of its rows are drawn. The selector
        must hold all excluded slots.
        """
        left = self._left_without(self._positions_by_code(excluded))
        codes = [NONE]
        shares = np.zeros(left.size)
        for value_rows in wanted:
            code = self.tag.code(value_rows.value)
            if code is None or code not in self._parts:  # no item has the value
                continue
            if not left[code]:  # all items of the value are excluded, or its weight is 0
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
    """The facts of the items of one value, by position, and the selector of the value.

    Positions are used again, so they stay below twice the most items that the value ever had. The facts are copies of
    the table's facts. Only the priority of an item ever changes: then `Balanced.update` copies it again.
    """

    def __init__(self, current_version: int, build: Callable[[RowFacts], Selector]) -> None:
        super().__init__(current_version)
        self.slots = np.zeros(0, dtype=np.int64)
        """By position: the slot in the table; -1 if the item of the position has left."""
        self.size = 0
        """The number of items."""
        self.selector = build(self)
        """Selects among positions, and not among slots."""

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
        """Asserts that exactly these positions (n,), which are distinct, have items, with the facts of the table."""
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
    # If draws are independent, and each draw whose value is used up by then is left out, the remaining draws are
    # distributed as draws from the values that are not used up. So draw all rows independently, leave out the draws
    # that came too late, and draw as many again from the values that are left.
    left = left.copy()
    chosen = [NONE]
    assert left[weights > 0].sum() >= n, "there are fewer items than draws, which would never end"
    while n:
        drawn = _draw(np.where(left > 0, weights, 0.0), n, rng)
        counts = np.bincount(drawn, minlength=left.size)  # (v,): draws of each value
        if (counts > left).any():
            for value, rows in _groups(drawn):
                too_late = rows[left[value] :]  # the rows are in the order of the draws
                drawn[too_late] = -1
            drawn = drawn[drawn >= 0]
            counts = np.minimum(counts, left)
        left -= counts
        n -= drawn.size
        chosen.append(drawn)
    return np.concatenate(chosen)


def _draw(weights: FloatArray, n: int, rng: np.random.Generator) -> IntArray:
    """n independent draws (n,) in proportion to `weights` (v,). At least one weight is above 0."""
    # Each possible value has a stretch of the line from 0 to the sum of the weights, as long as its weight.
    possible = np.flatnonzero(weights)
    ends = np.cumsum(weights[possible])
    targets = rng.random(n) * ends[-1]
    stretches = np.searchsorted(ends, targets, side="right")
    # With rounding, a target can reach the end of the last stretch.
    stretches = np.minimum(stretches, possible.size - 1)
    return np.asarray(possible[stretches])


def _groups(values: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Each different value in `values` (n,), and the indexes of the rows that have the value, ascending."""
    if values.size == 0:
        return
    first = values.item(0)
    if values.size == 1 or (values == first).all():
        yield first, np.arange(values.size)
        return
    rows = np.argsort(values, kind="stable")  # rows of equal values stand together
    ends = np.flatnonzero(np.diff(values[rows])) + 1
    for group in np.split(rows, ends):
        yield values.item(group[0]), group
