"""Selectors choose the next item, for sampling and for removal.

A selector keeps an order or a distribution over the slots of one table's Columns. `select(n)` returns n distinct slots
in their order, and the probability of each slot to come first. The slots stay in the selector. Ties go to the older
item.

Selectors by priority use a tree: a SumTree draws positions in proportion to numbers, and a MinTree finds the positions
with the smallest pairs of a rank and an order.

Freshness (after arXiv 2604.16918): with a half-life of h policy versions, the weight of an item halves for each h
versions that the item lags by.

* When the current version moves, all weights change by the same factor, so their order and their shares stay. A
  selector therefore keeps weights relative to a fixed version, and changes none of them when the version moves.
* After a rollback an item may be newer than the current version. Then it counts as an item of the current version.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from replay_server.tables.columns import FloatArray, IntArray, RowFacts, power_of_two

NONE = np.zeros(0, dtype=np.int64)
"""No slots."""
_STRIDE = 50.0
"""The most half-lives by which the newest item may be newer than the reference version of the weights. 2 ** 50 times
the largest weight is still finite."""
_LEAST_WEIGHT = 1e-300
"""The smallest weight of an item whose priority is above 0."""
_LOW_TOTAL = 1e-100
"""If the sum of all weights is below this, the reference version may be far newer than all items."""
_LOG_OF_ZERO = -1e300
"""The rank of priority 0. It is below all other ranks, and finite: infinity marks a free slot of the tree."""


class Selector(ABC):
    """An order or a distribution over slots. The methods that are implemented here suit an order."""

    @abstractmethod
    def insert(self, slots: IntArray) -> None:
        """Adds slots, which the selector does not have yet. Their columns are filled."""

    @abstractmethod
    def delete(self, slots: IntArray) -> None:
        """Removes slots. The caller frees them afterwards."""

    def update(self, slots: IntArray) -> None:  # noqa: B027  # most selectors ignore priorities
        """Reads the priorities of these slots again."""

    def version_moved(self, before: int) -> None:  # noqa: B027
        """The current policy version has changed; it was `before`."""

    @abstractmethod
    def selectable(self) -> int:
        """The number of distinct slots that `select` can return."""

    @abstractmethod
    def holds(self, slot: int) -> bool:
        """True if `select` can return this slot."""

    @abstractmethod
    def check(self, slots: IntArray) -> None:
        """Asserts that the selector has exactly these slots (n,), distinct, and that its derived values are current.

        Passes over arrays, no loop over slots.
        """

    def weigh(self, excluded: IntArray = NONE) -> tuple[float, float]:
        """The sum of the weights of all slots, and the sum of their squares, without the excluded slots.

        The selector must hold all excluded slots. In a selector with an order every slot weighs 1.
        """
        slots = float(self.selectable() - excluded.size)
        return slots, slots

    @abstractmethod
    def select(self, n: int, rng: np.random.Generator, excluded: IntArray = NONE) -> tuple[IntArray, FloatArray]:
        """Up to n distinct slots (n,) without the excluded ones, and the probability (n,) of each to come first.

        The selector must hold all excluded slots.
        """

    def select_repeated(self, n: int, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
        """n independent draws from all slots; empty if there are no slots. An order always draws its first slot."""
        slots, probabilities = self.select(1, rng)
        return np.repeat(slots, n), np.repeat(probabilities, n)


class Placed(Selector):
    """Keeps its slots in one array, and the position of each slot. Many slots are removed in one pass over arrays."""

    def __init__(self, columns: RowFacts) -> None:
        self._columns = columns
        self._slots = np.zeros(64, dtype=np.int64)
        """The slots that the selector has, and unused entries."""
        self._position = np.zeros(0, dtype=np.int64)
        """By slot: its index in `_slots`; -1: the selector does not have the slot."""
        self._count = 0
        """The number of slots that the selector has."""

    def _put(self, slots: IntArray, start: int) -> None:
        """Writes `slots` (n,) to [start, start + n) of `_slots`, which has room there, and notes their positions."""
        lacking = self._columns.order.size - self._position.size
        if lacking > 0:  # the columns have grown
            more = np.full(lacking, -1, dtype=np.int64)
            self._position = np.concatenate([self._position, more])
        self._slots[start : start + slots.size] = slots
        self._position[slots] = np.arange(start, start + slots.size)

    def selectable(self) -> int:
        return self._count

    def holds(self, slot: int) -> bool:
        return bool(slot < self._position.size and self._position[slot] >= 0)

    def check(self, slots: IntArray) -> None:
        assert self._count == slots.size, (self._count, slots.size)
        assert np.count_nonzero(self._position >= 0) == slots.size
        positions = self._position[slots]
        assert (positions >= 0).all(), "a slot has no position"
        assert np.array_equal(self._slots[positions], slots), "a position belongs to another slot"


class Fifo(Placed):
    """Selects by age, oldest first (or newest first). An operation is O(1) amortised for each slot.

    The array has the slots by ascending `order`. The first and the last entry in use are slots that were not deleted.
    Requeueing an item that lies between older and newer items is O(size).
    """

    def __init__(self, columns: RowFacts, newest_first: bool = False) -> None:
        super().__init__(columns)
        self._newest_first = newest_first
        # The entries in use are at [_start, _stop). A deleted slot leaves -1, until the entry is at an end or the array
        # is full.
        self._start = 0
        self._stop = 0

    def insert(self, slots: IntArray) -> None:
        """As in Selector. Usually all new slots are newer than the old ones, and go behind them."""
        order = self._columns.order
        if slots.size > 1 and (np.diff(order[slots]) < 0).any():  # requeued items come in any order
            slots = slots[np.argsort(order[slots])]
        # The new slots are in order now.
        if not self._count:
            self._start = self._stop = 0
        elif order.item(slots[0]) < order.item(self._slots[self._stop - 1]):  # some slots do not go behind all others
            # Slots that are older than all others go in front of them, if there is room.
            all_older = order.item(slots[-1]) < order.item(self._slots[self._start])
            has_room_in_front = self._start >= slots.size
            if all_older and has_room_in_front:
                self._start -= slots.size
                self._count += slots.size
                self._put(slots, self._start)
                return
            # Sort all slots, old and new. All of them are written and counted anew below, as in an empty selector.
            held = self._held()
            slots = np.concatenate([held, slots])
            slots = slots[np.argsort(order[slots], kind="stable")]
            self._start = self._stop = 0
            self._count -= held.size
        if self._stop + slots.size > self._slots.size:
            self._make_room(slots.size)
        self._put(slots, self._stop)
        self._stop += slots.size
        self._count += slots.size

    def _held(self) -> IntArray:
        """All slots of the selector, by ascending order."""
        slots = self._slots[self._start : self._stop]
        return slots[slots >= 0]

    def _make_room(self, n: int) -> None:
        """Moves all slots to a larger array, with room for n more behind them.

        Of the room beyond that, a quarter is in front, for requeued items.
        """
        held = self._held()
        capacity = max(64, power_of_two(2 * (held.size + n)))
        self._slots = np.full(capacity, -1, dtype=np.int64)
        self._start = (capacity - held.size - n) // 4
        self._stop = self._start + held.size
        self._put(held, self._start)

    def delete(self, slots: IntArray) -> None:
        """As in Selector. Deleted entries become -1, and are skipped at both ends."""
        self._slots[self._position[slots]] = -1
        self._position[slots] = -1
        self._count -= slots.size
        assert self._count >= 0, "slots are deleted that were not here"
        if not self._count:
            self._start = self._stop = 0
            return
        # Skip deleted entries at both ends.
        if self._slots.item(self._start) < 0:
            self._start += self._first_held(self._slots[self._start : self._stop])
        if self._slots.item(self._stop - 1) < 0:
            self._stop -= self._first_held(self._slots[self._start : self._stop][::-1])

    def check(self, slots: IntArray) -> None:
        super().check(slots)
        held = self._held()
        assert held.size == self._count, (held.size, self._count)
        assert (np.diff(self._columns.order[held]) > 0).all(), "the slots are not by ascending order"
        assert self._stop <= self._slots.size, (self._stop, self._slots.size)
        if held.size:
            assert self._slots[self._start] >= 0, self._start
            assert self._slots[self._stop - 1] >= 0, self._stop

    def _first_held(self, slots: IntArray) -> int:
        """The index of the first entry that is a slot, and not -1. There is such an entry.

        Looks at 16 entries, and then each time at 16 entries more than it has looked at until then.
        """
        scanned = 0
        while True:
            assert scanned < slots.size, "no slot is held"
            held = slots[scanned : 2 * scanned + 16] >= 0
            first = int(held.argmax())  # 0 if all are False
            if held[first]:
                return scanned + first
            scanned = 2 * scanned + 16

    def select(self, n: int, rng: np.random.Generator, excluded: IntArray = NONE) -> tuple[IntArray, FloatArray]:
        """As in Selector: the first n entries that are slots, and not excluded."""
        entries = self._slots[self._start : self._stop]
        if self._newest_first:
            entries = entries[::-1]
        length = n + excluded.size
        while True:  # looks at twice as many entries each time, until enough of them are slots
            first = entries[:length]
            chosen = first[first >= 0]
            if excluded.size:
                chosen = chosen[~np.isin(chosen, excluded)]
            if chosen.size >= n or length >= entries.size:
                return _certain(chosen[:n])
            length *= 2


class Heap(Selector):
    """Selects by priority, lowest first (or highest first), then by age. An operation is O(log size).

    With a half-life the rank is log2(priority) + version / half_life. At any current version, that gives the order of
    the effective priorities.
    """

    def __init__(self, columns: RowFacts, highest_first: bool = False, half_life: float | None = None) -> None:
        self._columns = columns
        self._half_life = half_life
        self._sign = -1.0 if highest_first else 1.0
        """The factor of all ranks, so that the lowest rank comes first in the tree."""
        self._tree = MinTree()
        """By slot: the pair of its rank and its order."""
        self._count = 0

    def insert(self, slots: IntArray) -> None:
        self._count += slots.size
        self.update(slots)

    def delete(self, slots: IntArray) -> None:
        self._count -= slots.size
        self._tree.clear(slots)

    def update(self, slots: IntArray) -> None:
        self._tree.put(slots, self._ranks(slots), self._columns.order[slots])

    def _ranks(self, slots: IntArray) -> FloatArray:
        """The rank (n,) of each of `slots` (n,). The lowest rank comes first."""
        ranks = self._columns.priority[slots]
        if self._half_life is not None:
            # Entries of priority 0 keep the value in `out`.
            logs = np.log2(ranks, out=np.full(slots.size, _LOG_OF_ZERO), where=ranks > 0)
            ranks = logs + half_lives(self._columns, slots, self._half_life)
        return self._sign * ranks

    def version_moved(self, before: int) -> None:
        if self._half_life is not None:
            self.update(recounted(self._columns, self._tree.positions(), before))

    def selectable(self) -> int:
        return self._count

    def holds(self, slot: int) -> bool:
        return self._tree.holds(slot)

    def check(self, slots: IntArray) -> None:
        """As in Selector. The tree must have the rank and the order of each slot."""
        self._tree.check()
        assert self._count == slots.size, (self._count, slots.size)
        assert np.array_equal(self._tree.positions(), np.sort(slots)), "the tree has other slots"
        pairs = self._tree.get(slots)
        assert np.array_equal(pairs.imag, self._columns.order[slots]), "a slot has the order of another item"
        assert np.array_equal(pairs.real, self._ranks(slots)), "a rank is not that of the priority"

    def select(self, n: int, rng: np.random.Generator, excluded: IntArray = NONE) -> tuple[IntArray, FloatArray]:
        slots = self._tree.first(n + excluded.size)
        if excluded.size:
            slots = slots[~np.isin(slots, excluded)]
        return _certain(slots[:n])


class Uniform(Placed):
    """Selects every item with the same probability. An operation is O(1) for each slot.

    The first `_count` entries of `_slots` are in use, in no order.
    """

    def insert(self, slots: IntArray) -> None:
        """As in Selector. The array doubles when it is full."""
        start = self._count
        self._count += slots.size
        while self._count > self._slots.size:
            self._slots = np.concatenate([self._slots, np.zeros_like(self._slots)])
        self._put(slots, start)

    def delete(self, slots: IntArray) -> None:
        """As in Selector. Other slots move into the gaps, so that the first `_count` entries of `_slots` are in use."""
        self._count -= slots.size
        assert self._count >= 0, "slots are deleted that were not here"
        gaps = self._position[slots]
        self._position[slots] = -1
        # The slots beyond the new count that are not deleted fill the gaps before the new count.
        last = self._slots[self._count : self._count + slots.size]
        last = last[self._position[last] >= 0]
        gaps = gaps[gaps < self._count]
        assert gaps.size == last.size, (gaps.size, last.size)
        self._slots[gaps] = last
        self._position[last] = gaps

    def check(self, slots: IntArray) -> None:
        super().check(slots)
        assert (self._position[slots] < self._count).all(), "a gap is left among the slots"

    def select(self, n: int, rng: np.random.Generator, excluded: IntArray = NONE) -> tuple[IntArray, FloatArray]:
        """As in Selector. All slots that are not excluded have the same probability."""
        # Draw more without replacement, then drop the excluded slots: the rest is a draw without replacement too.
        wanted = min(n + excluded.size, self._count)
        slots = NONE
        if wanted:
            slots = self._slots[rng.choice(self._count, wanted, replace=False)]
        if excluded.size:
            slots = slots[~np.isin(slots, excluded)]
        slots = slots[:n]
        probability = 1.0 / max(1, self._count - excluded.size)  # if all slots are excluded, there is no row to fill
        return slots, np.full(slots.size, probability)

    def select_repeated(self, n: int, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
        if not self._count:
            return NONE, np.zeros(0)
        slots = self._slots[rng.integers(self._count, size=n)]
        return slots, np.full(n, 1.0 / self._count)


def half_lives(columns: RowFacts, slots: IntArray, half_life: float) -> FloatArray:
    """The versions (n,) that `slots` (n,) count as, divided by the half-life.

    An item newer than the current version counts as current.
    """
    versions = np.minimum(columns.policy_version[slots], columns.current_version)
    return np.asarray(versions / half_life)


def recounted(columns: RowFacts, slots: IntArray, before: int) -> IntArray:
    """The slots, among `slots`, whose items count as another version than when the current version was `before`.

    An item counts as its own version or, if that is newer, as the current version. So only items that are newer than
    the smaller of the two current versions may count as another version.
    """
    return slots[columns.policy_version[slots] > min(before, columns.current_version)]


class Prioritized(Selector):
    """Draws in proportion to priority ** exponent (Schaul et al., arXiv 1511.05952). An operation is O(log size).

    An item of priority 0 is never drawn. `select` draws one slot after the other, each from the slots that are left.

    With a half-life the tree holds priority ** exponent * 2 ** ((version - reference) / half_life). The reference
    version follows the newest item in large strides. Each stride costs one pass over all items.
    """

    def __init__(self, columns: RowFacts, exponent: float = 1.0, half_life: float | None = None) -> None:
        self._columns = columns
        self._exponent = exponent
        self._half_life = half_life
        self._reference = 0.0
        """The version that weights are relative to, divided by the half-life."""
        self._tree = SumTree()
        """By slot: its weight."""

    def insert(self, slots: IntArray) -> None:
        self.update(slots)

    def delete(self, slots: IntArray) -> None:
        self._tree.set(slots, np.zeros(slots.size))

    def update(self, slots: IntArray) -> None:
        """As in Selector. Sets the weight of each slot, relative to the reference version."""
        priorities = self._columns.priority[slots]
        # Priority 0 means weight 0 with every exponent, but 0 ** 0 is 1.
        weights = np.where(priorities > 0, priorities**self._exponent, 0.0)
        if self._half_life is not None and slots.size:
            versions = half_lives(self._columns, slots, self._half_life)
            newest = float(versions.max())
            if newest > self._reference + _STRIDE:
                self._rebase(newest, slots)  # calls `update` again, for all items
                return
            weights *= np.exp2(versions - self._reference)
            # A weight that underflows to 0 would count as priority 0, and the item would never be drawn.
            weights = np.where(priorities > 0, np.maximum(weights, _LEAST_WEIGHT), 0.0)
        self._tree.set(slots, weights)

    def version_moved(self, before: int) -> None:
        """As in Selector. Only items that count as another version than before get another weight."""
        if self._half_life is None:
            return
        # After a rollback no item counts as newer than the current version. Nor may the reference be newer.
        current = self._columns.current_version / self._half_life
        if self._reference > current:
            self._rebase(current)
        else:
            self.update(recounted(self._columns, self._tree.positions(), before))

    def _rebase(self, reference: float, new: IntArray = NONE) -> None:
        """Makes `reference` the reference, and computes the weights of all items anew; O(size).

        `new` (n,): slots that are not in the tree yet, and that get a weight, too.
        """
        self._reference = reference
        self.update(np.union1d(self._tree.positions(), new))

    def selectable(self) -> int:
        return self._tree.positive

    def holds(self, slot: int) -> bool:
        return self._tree.is_positive(slot)

    def check(self, slots: IntArray) -> None:
        self._tree.check()
        held = self._tree.positions()
        assert np.isin(held, slots).all(), "the tree has a slot that is not here"
        assert (self._columns.priority[held] > 0).all(), "an item of priority 0 can be drawn"
        if self._half_life is None:
            weights = self._columns.priority[slots] ** self._exponent
            weights[self._columns.priority[slots] == 0] = 0.0
            assert np.array_equal(self._tree.get(slots), weights), "a weight is not that of the priority"
        else:
            positive = slots[self._columns.priority[slots] > 0]
            assert (self._tree.get(positive) >= _LEAST_WEIGHT).all(), "an item that counts can never be drawn"

    def weigh(self, excluded: IntArray = NONE) -> tuple[float, float]:
        """As in Selector; O(size). With a half-life, the weights are relative to the current version.

        The weights of tables on several servers can therefore be compared.
        """
        self._lift()
        slots = self._tree.positions()
        if excluded.size:  # not the sum less the excluded weights: beside a heavy weight, rounding loses light weights
            slots = slots[~np.isin(slots, excluded)]
        weights = self._tree.get(slots)
        total = float(weights.sum())
        squares = float(np.square(weights).sum())  # not np.dot, for which BLAS would start threads
        if self._half_life is None:
            return total, squares
        scale = float(np.exp2(self._reference - self._columns.current_version / self._half_life))
        return total * scale, squares * scale**2

    def select(self, n: int, rng: np.random.Generator, excluded: IntArray = NONE) -> tuple[IntArray, FloatArray]:
        """As in Selector. Draws one slot after the other, each from the slots that are left."""
        # Independent draws, without repetitions, are distributed as successive draws without replacement. So draw
        # independently, drop the repetitions, and set the weights of the drawn slots to 0. Then draw as many slots
        # again as are missing, until no slot is missing.
        n = min(n, self._tree.positive - excluded.size)
        self._lift()
        tree = self._tree
        # The slots whose weights are set to 0 below, the excluded slots first, and their weights until then. At the end
        # all of these weights are restored.
        hidden_slots = [excluded]
        hidden_weights = [tree.get(excluded)]
        tree.set(excluded, np.zeros(excluded.size))
        total = tree.total
        missing = n
        while missing:
            drawn = self._draw(missing, rng)
            _, first = np.unique(drawn, return_index=True)
            drawn = drawn[np.sort(first)]  # each slot once, in the order of the draws
            hidden_slots.append(drawn)
            hidden_weights.append(tree.get(drawn))
            missing -= drawn.size
            tree.set(drawn, np.zeros(drawn.size))
        slots = np.concatenate(hidden_slots)
        weights = np.concatenate(hidden_weights)
        assert slots.size == excluded.size + n, "each slot is drawn once"
        tree.set(slots, weights)
        return slots[excluded.size :], weights[excluded.size :] / (total or 1.0)  # a total of 0: nothing was drawn

    def select_repeated(self, n: int, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
        if not self._tree.positive:
            return NONE, np.zeros(0)
        self._lift()
        slots = self._draw(n, rng)
        return slots, self._tree.get(slots) / self._tree.total

    def _lift(self) -> None:
        """Moves the reference back to the version of the newest item if all items are far older than the reference.

        Relative to a much newer reference, their weights would be so small that rounding changes their proportions.
        """
        if self._half_life is None:
            return
        has_low_total = 0 < self._tree.total < _LOW_TOTAL  # 0: no item has a weight
        if not has_low_total:
            return
        newest = float(half_lives(self._columns, self._tree.positions(), self._half_life).max())
        if newest < self._reference:
            self._rebase(newest)

    def _draw(self, n: int, rng: np.random.Generator) -> IntArray:
        """n independent draws (n,) in proportion to the weights."""
        return self._tree.find(rng.random(n) * self._tree.total)


def _certain(slots: IntArray) -> tuple[IntArray, FloatArray]:
    """The slots (n,) of an order, and the probability of each to come first: 1 for the first slot, else 0."""
    probabilities = np.zeros(slots.size)
    probabilities[:1] = 1.0
    return slots, probabilities


S = TypeVar("S", np.float64, np.complex128)
"""The type of the nodes of a tree."""

_LOOP_BELOW = 16
"""Below this many leaves, a plain loop over one path after the other is faster than numpy calls for each level."""
_DENSE = 4
"""If a level has at most this many nodes for each leaf that is set, all nodes of the level are computed anew. That is
faster than choosing nodes, because it reads memory in order."""


class Tree(Generic[S]):
    """A complete tree in one array: the root at 1, the children of node i at 2i and 2i + 1, the leaves from `capacity`.

    The leaf of position p is node capacity + p. Each node is computed from its two children, never adjusted by a
    difference. So rounding errors do not pile up. Setting or finding m leaves is one pass over log2(capacity) levels.
    """

    _combine: ClassVar[np.ufunc]
    """Computes a node from its two children."""
    _nothing: Any
    """The value of a position that is not in use; of type S."""

    def __init__(self, capacity: int = 64) -> None:
        self._allocate(power_of_two(max(2, capacity)))

    def _allocate(self, capacity: int) -> None:
        """Makes the tree empty, with this many positions."""
        self.capacity = capacity
        self._nodes: npt.NDArray[S] = np.full(2 * capacity, self._nothing)
        # The memory of the nodes as floats, two for each complex number. Indexing a memoryview is much cheaper than
        # indexing an array.
        self._scalars = cast("memoryview[float]", self._nodes.view(np.float64).data)

    def positions(self) -> IntArray:
        """The positions that are in use, ascending; O(capacity)."""
        return np.flatnonzero(self._nodes[self.capacity :] != self._nothing)

    def get(self, positions: IntArray) -> npt.NDArray[S]:
        """The values (m,) of the leaves at `positions` (m,)."""
        return self._nodes[positions + self.capacity]

    def set(self, positions: IntArray, values: npt.NDArray[S]) -> None:
        """Sets the leaves at `positions` (m,) (distinct, any order) to `values` (m,); O(m log capacity)."""
        if positions.size == 0:
            return
        top = int(positions.max())
        if top >= self.capacity:
            self._grow(top + 1)
        if positions.size < _LOOP_BELOW:  # a loop is faster
            self._set_each(positions.tolist(), values.tolist())
        else:
            self._set_all(positions + self.capacity, values)

    @abstractmethod
    def _set_each(self, positions: list[int], values: list[Any]) -> None:
        """Sets one leaf after the other, and recomputes the nodes above each."""

    def _set_all(self, leaves: IntArray, values: npt.NDArray[S]) -> None:
        """Sets the nodes `leaves` (m,) at once, and recomputes the nodes above them, level by level."""
        nodes = self._nodes
        level = leaves  # (m,): of each leaf, the node above it in the current level. Nodes may repeat.
        width = self.capacity  # the number of nodes of the current level
        nodes[level] = values
        children_of = nodes.reshape(-1, 2)  # row i: the children of node i
        while width > _DENSE * leaves.size:
            width >>= 1
            level = level >> 1
            children = children_of.take(level, axis=0)
            nodes[level] = self._combine(children[:, 0], children[:, 1])
        self._recompute_above(width)

    def _recompute_above(self, width: int) -> None:
        """Recomputes all nodes above the level of `width` nodes."""
        while width > 1:
            children = self._nodes[width : 2 * width]
            width >>= 1
            parents = self._nodes[width : 2 * width]
            self._combine(children[0::2], children[1::2], out=parents)

    def check(self) -> None:
        """Asserts that each node equals the combination of its children, to the last bit: no node is ever adjusted."""
        assert self.capacity & (self.capacity - 1) == 0, self.capacity
        children = self._nodes[2:].reshape(-1, 2)  # row i: the children of node i + 1
        assert np.array_equal(self._nodes[1 : self.capacity], self._combine(children[:, 0], children[:, 1]))

    def _grow(self, needed: int) -> None:
        """Makes room for at least `needed` positions. The leaves keep their values."""
        old = self._nodes[self.capacity :]
        self._allocate(power_of_two(needed))
        self._nodes[self.capacity : self.capacity + old.size] = old
        self._recompute_above(self.capacity)


class SumTree(Tree[np.float64]):
    """Each node is the sum of its children. Drawing m positions is one pass over log2(capacity) levels."""

    _combine = np.add
    _nothing = 0.0

    def __init__(self, capacity: int = 64) -> None:
        super().__init__(capacity)
        self.positive = 0
        """The number of leaves above 0."""

    @property
    def total(self) -> float:
        return self._scalars[1]

    def is_positive(self, position: int) -> bool:
        return position < self.capacity and self._scalars[position + self.capacity] > 0

    def check(self) -> None:
        super().check()
        leaves = self._nodes[self.capacity :]
        assert (leaves >= 0).all(), "a weight is below 0"
        assert self.positive == np.count_nonzero(leaves), (self.positive, np.count_nonzero(leaves))

    def _set_each(self, positions: list[int], values: list[float]) -> None:
        """As in Tree. Also counts the leaves above 0."""
        nodes = self._scalars
        positive = self.positive
        for position, value in zip(positions, values, strict=True):
            node = position + self.capacity
            if nodes[node] > 0:
                positive -= 1
            if value > 0:
                positive += 1
            nodes[node] = value
            while node := node >> 1:  # the parent; 0: the root was the last node
                nodes[node] = nodes[2 * node] + nodes[2 * node + 1]
        self.positive = positive

    def _set_all(self, leaves: IntArray, values: FloatArray) -> None:
        before = np.count_nonzero(self._nodes[leaves])
        self.positive += int(np.count_nonzero(values) - before)
        super()._set_all(leaves, values)

    def find(self, targets: FloatArray) -> IntArray:
        """The positions (n,) at which the cumulative sum of the leaves passes each of `targets` (n,).

        0 <= target < total. All targets go down the tree together, one level at a time.
        """
        node = np.ones(targets.size, dtype=np.int64)  # (n,): of each target, its node in the current level
        rest = targets.copy()  # (n,): each target, less the sum of all leaves left of its node
        for _ in range(self.capacity.bit_length() - 1):
            node *= 2  # the left child
            left = self._nodes[node]
            # Never step into an empty subtree: with rounding, `rest` can reach the left sum while the right is empty.
            goes_right = (rest >= left) & (self._nodes[node + 1] > 0)
            rest -= np.where(goes_right, left, 0.0)
            node += goes_right
        return node - self.capacity  # no assert that these leaves are above 0: it took a tenth of the time of a draw


class MinTree(Tree[np.complex128]):
    """Each leaf is a pair of a rank and an order. Each node is the smaller of its children.

    All orders differ, so no two pairs are equal. A pair is stored as a complex number, rank + order * i, because numpy
    compares complex numbers by the real part and then by the imaginary part. Orders stay below 2**53. Finding the n
    smallest pairs is one pass over log2(capacity) levels.
    """

    _combine = np.minimum
    _nothing: Any = complex(math.inf, math.inf)

    def put(self, positions: IntArray, ranks: FloatArray, orders: IntArray) -> None:
        """Sets the pairs at `positions` (m,)."""
        pairs = np.empty(positions.size, dtype=np.complex128)
        pairs.real = ranks
        pairs.imag = orders
        self.set(positions, pairs)

    def clear(self, positions: IntArray) -> None:
        """Removes the pairs at `positions` (m,)."""
        self.set(positions, np.full(positions.size, self._nothing))

    def holds(self, position: int) -> bool:
        return position < self.capacity and self._scalars[2 * (position + self.capacity)] < math.inf

    def first(self, n: int) -> IntArray:
        """The positions of the n smallest pairs, or of all pairs if there are fewer. The smallest pair comes first."""
        if n == 1:
            return self._first()
        # Each node above one of the n smallest leaves is among the n smallest nodes of its level. So keep only these
        # nodes of each level, from the root down to the leaves.
        nodes = np.ones(1, dtype=np.int64)
        while nodes.size and nodes[0] < self.capacity:  # without nodes: n is 0
            nodes = np.concatenate([2 * nodes, 2 * nodes + 1])
            if nodes.size > n:
                nodes = nodes[np.argpartition(self._nodes[nodes], n - 1)[:n]]
        pairs = self._nodes[nodes]
        nodes = nodes[np.argsort(pairs)]
        in_use = np.count_nonzero(np.isfinite(pairs.real))  # free positions are infinite, so they are the last
        return nodes[:in_use] - self.capacity

    def _first(self) -> IntArray:
        """The position of the smallest pair (1,), by following the pair from the root to its leaf; empty: no pair."""
        nodes = self._scalars  # pairs, one after the other: node i at [2i], [2i + 1]
        node = 1
        rank = nodes[2]  # the pair of the root is the smallest pair
        order = nodes[3]
        if rank == math.inf:
            return np.zeros(0, dtype=np.int64)
        while node < self.capacity:
            node *= 2
            if nodes[2 * node] != rank or nodes[2 * node + 1] != order:
                node += 1
        return np.array([node - self.capacity])

    def _set_each(self, positions: list[int], values: list[complex]) -> None:
        """As in Tree. Stops at the first node above a leaf that does not change."""
        nodes = self._scalars  # pairs, one after the other: node i at [2i], [2i + 1]
        for position, value in zip(positions, values, strict=True):
            node = position + self.capacity
            nodes[2 * node] = value.real
            nodes[2 * node + 1] = value.imag
            while node := node >> 1:  # the parent; 0: the root was the last node
                left = 4 * node  # the index of the left child's pair, behind which the right child's pair stands
                rank = nodes[left]
                order = nodes[left + 1]
                right_rank = nodes[left + 2]
                if right_rank < rank or (right_rank == rank and nodes[left + 3] < order):
                    rank = right_rank
                    order = nodes[left + 3]
                if nodes[2 * node] == rank and nodes[2 * node + 1] == order:
                    break  # this node has not changed, so no node above it changes either
                nodes[2 * node] = rank
                nodes[2 * node + 1] = order
