"""Selectors choose the next item, for sampling and for removal.

A selector keeps an order or a distribution over the slots of one table's Columns. `select(n)` returns n distinct slots,
in the selector's order or in the order in which they were drawn, and the probability with which each of them comes
first. The slots stay in the selector. Of items that an order ranks equally, the older one comes first.

Selectors by priority keep a tree with a value for each slot. `Prioritized` keeps weights in a SumTree, which draws
slots in proportion to the weights. `Heap` keeps pairs of a rank and an order in a MinTree, which finds the slots with
the smallest pairs.

Freshness (after arXiv 2604.16918): with a half-life of h policy versions, the weight of an item halves for each h
versions that the item lags by.

* When the current version moves, all weights change by the same factor. So the order of the weights and their shares of
  the sum stay the same. A selector therefore keeps weights relative to a fixed version, the reference version, and
  changes none of them when the current version moves.
* After a rollback an item may be newer than the current version. The item then counts as one of the current version.
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
"""The most half-lives by which the newest item may be newer than the reference version. Such an item weighs 2 ** 50
times as much as an item of the reference version, and this weight is still finite."""
_LEAST_WEIGHT = 1e-300
"""The smallest weight of an item whose priority is above 0."""
_LOW_TOTAL = 1e-100
"""If the sum of all weights is below this, the reference version may be far newer than all items (see
`Prioritized._lift_weights`)."""
_LOG_OF_ZERO = -1e300
"""Stands for log2(0), so that priority 0 ranks below all other priorities. It is finite, because an infinite rank marks
a position of the tree that is not in use."""


class Selector(ABC):
    """An order or a distribution over slots.

    `update` and `version_moved` do nothing here, and `weigh` and `select_repeated` suit an order. A subclass overrides
    those that do not suit it.
    """

    @abstractmethod
    def insert(self, slots: IntArray) -> None:
        """Adds `slots` (n,), which the selector does not have yet. The caller has filled the columns of these slots."""

    @abstractmethod
    def delete(self, slots: IntArray) -> None:
        """Removes slots. The caller frees them afterwards."""

    def update(self, slots: IntArray) -> None:  # noqa: B027  # most selectors ignore priorities
        """Takes over the new priorities of these slots. The caller has written them to the columns."""

    def version_moved(self, before: int) -> None:  # noqa: B027
        """Adapts to a change of the current policy version, from `before` to the version in the columns."""

    @abstractmethod
    def selectable(self) -> int:
        """The number of distinct slots that `select` can return."""

    @abstractmethod
    def holds(self, slot: int) -> bool:
        """True if `select` can return this slot."""

    @abstractmethod
    def check(self, slots: IntArray) -> None:
        """Asserts that the selector has exactly these distinct slots (n,), and that its values fit the columns.

        An implementation makes passes over whole arrays, because a loop over slots would be too slow.
        """

    def weigh(self, excluded: IntArray = NONE) -> tuple[float, float]:
        """The sum of the weights of all slots that are not excluded, and the sum of the squares of these weights.

        The selector must hold all excluded slots. Unless a subclass overrides this method, every slot weighs 1.
        """
        count = float(self.selectable() - excluded.size)
        return count, count

    @abstractmethod
    def select(self, n: int, rng: np.random.Generator, excluded: IntArray = NONE) -> tuple[IntArray, FloatArray]:
        """Chooses n distinct slots that are not excluded. If there are fewer such slots, it chooses all of them.

        Returns the slots (n,), and the probability (n,) with which each of them comes first. The selector must hold all
        excluded slots.
        """

    def select_repeated(self, n: int, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
        """Draws n times from all slots, independently, so slots may repeat. An order always draws its first slot.

        Returns the slots (n,), and the probability (n,) of each. Both are empty if there are no slots.
        """
        slots, probabilities = self.select(1, rng)
        return np.repeat(slots, n), np.repeat(probabilities, n)


class Placed(Selector):
    """A selector that keeps its slots in one array, and notes the position of each slot in that array.

    So it can remove many slots in one pass over arrays.
    """

    def __init__(self, columns: RowFacts) -> None:
        self._columns = columns
        self._slots = np.zeros(64, dtype=np.int64)
        """The slots that the selector has, and unused entries."""
        self._position = np.zeros(0, dtype=np.int64)
        """By slot: its index in `_slots`; -1: the selector does not have the slot."""
        self._count = 0
        """The number of slots that the selector has."""

    def _put(self, slots: IntArray, start: int) -> None:
        """Writes `slots` (n,) to `_slots[start : start + n]`, and notes their positions. `_slots` is long enough."""
        lacking = self._columns.order.size - self._position.size
        if lacking > 0:  # the columns have grown
            no_positions = np.full(lacking, -1, dtype=np.int64)
            self._position = np.concatenate([self._position, no_positions])
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

    The array has the slots by ascending `order`. The first and the last entry in use are always slots, and never the -1
    of a deleted slot. Inserting a requeued item between older and newer items is O(size).
    """

    def __init__(self, columns: RowFacts, newest_first: bool = False) -> None:
        super().__init__(columns)
        self._newest_first = newest_first
        # The entries in use are `_slots[_start:_stop]`. A deleted slot leaves -1 there, until this entry is at an end
        # of the range, or until all slots are moved.
        self._start = 0
        self._stop = 0

    def insert(self, slots: IntArray) -> None:
        """As in Selector. Usually all new slots are newer than the slots that are held, and go behind them."""
        order = self._columns.order
        if slots.size > 1 and (np.diff(order[slots]) < 0).any():  # requeued items come in any order
            slots = slots[np.argsort(order[slots])]
        # The new slots are now sorted by age.
        if not self._count:
            self._start = self._stop = 0
        elif order.item(slots[0]) < order.item(self._slots[self._stop - 1]):  # a new slot is older than a held slot
            # If all new slots are older than all held slots, they go in front of these, if there is room.
            all_older = order.item(slots[-1]) < order.item(self._slots[self._start])
            has_room_in_front = self._start >= slots.size
            if all_older and has_room_in_front:
                self._start -= slots.size
                self._count += slots.size
                self._put(slots, self._start)
                return
            # Otherwise sort all slots, held and new. The lines below then write and count all of them, as if all were
            # new slots of an empty selector.
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
        """All slots of the selector, by ascending `order`."""
        slots = self._slots[self._start : self._stop]
        return slots[slots >= 0]

    def _make_room(self, n: int) -> None:
        """Moves all slots to a new array, which has room for n more slots behind them.

        Of the room that these n slots will leave, a quarter is in front of the slots, for requeued items.
        """
        held = self._held()
        capacity = max(64, power_of_two(2 * (held.size + n)))
        self._slots = np.full(capacity, -1, dtype=np.int64)
        self._start = (capacity - held.size - n) // 4
        self._stop = self._start + held.size
        self._put(held, self._start)

    def delete(self, slots: IntArray) -> None:
        """As in Selector. The entries of the slots become -1. Such entries at both ends go out of use."""
        self._slots[self._position[slots]] = -1
        self._position[slots] = -1
        self._count -= slots.size
        assert self._count >= 0, "slots are deleted that were not here"
        if not self._count:
            self._start = self._stop = 0
            return
        # Make the range in use begin and end with a slot again.
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

    def _first_held(self, entries: IntArray) -> int:
        """The index of the first of `entries` that is a slot, and not -1. There must be such an entry.

        Looks at the first 16 entries, then at the next 32, then at the next 64, and so on.
        """
        start = 0
        length = 16
        while True:
            assert start < entries.size, "no slot is held"
            is_slot = entries[start : start + length] >= 0
            first = int(is_slot.argmax())  # 0 if all are False
            if is_slot[first]:
                return start + first
            start += length
            length *= 2

    def select(self, n: int, rng: np.random.Generator, excluded: IntArray = NONE) -> tuple[IntArray, FloatArray]:
        """As in Selector. Chooses the first n slots that are not excluded."""
        entries = self._slots[self._start : self._stop]
        if self._newest_first:
            entries = entries[::-1]
        length = n + excluded.size
        while True:  # looks at the first `length` entries, and doubles `length` until enough of them can be chosen
            first_entries = entries[:length]
            chosen = first_entries[first_entries >= 0]
            if excluded.size:
                chosen = chosen[~np.isin(chosen, excluded)]
            if chosen.size >= n or length >= entries.size:
                return _with_probabilities(chosen[:n])
            length *= 2


class Heap(Selector):
    """Selects by priority, lowest first (or highest first), then by age. An operation is O(log size).

    The rank of an item is its priority or, with a half-life, log2(priority) + version / half_life.

    With a half-life, priorities age: the item now has the priority * 2 ** ((version - current_version) / half_life).
    The log2 of this is the rank less current_version / half_life, a term that is the same for all items. So the ranks
    give the right order at any current version.
    """

    def __init__(self, columns: RowFacts, highest_first: bool = False, half_life: float | None = None) -> None:
        self._columns = columns
        self._half_life = half_life
        self._sign = -1.0 if highest_first else 1.0
        """The factor of all ranks: -1 if the highest priority comes first, because the tree finds the lowest ranks."""
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
        priorities = self._columns.priority[slots]
        if self._half_life is None:
            return self._sign * priorities
        logs = np.full(slots.size, _LOG_OF_ZERO)
        np.log2(priorities, out=logs, where=priorities > 0)  # the entries of priority 0 stay as they are
        return self._sign * (logs + half_lives(self._columns, slots, self._half_life))

    def version_moved(self, before: int) -> None:
        """As in Selector. Only items that count as another version than before get another rank."""
        if self._half_life is None:
            return
        slots = self._tree.positions()
        self.update(recounted(self._columns, slots, before))

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
        return _with_probabilities(slots[:n])


class Uniform(Placed):
    """Selects every item with the same probability. An operation is O(1) for each slot.

    The first `_count` entries of `_slots` are in use, in no order.
    """

    def insert(self, slots: IntArray) -> None:
        """As in Selector. Doubles the length of the array until the slots fit."""
        start = self._count
        self._count += slots.size
        while self._count > self._slots.size:
            self._slots = np.concatenate([self._slots, np.zeros_like(self._slots)])
        self._put(slots, start)

    def delete(self, slots: IntArray) -> None:
        """As in Selector. Slots from the end of the array move into the gaps that the deleted slots leave."""
        self._count -= slots.size
        assert self._count >= 0, "slots are deleted that were not here"
        gaps = self._position[slots]
        self._position[slots] = -1
        # The entries from index `_count` on go out of use. Those of their slots that are not deleted move into the gaps
        # before this index.
        moved = self._slots[self._count : self._count + slots.size]
        moved = moved[self._position[moved] >= 0]
        gaps = gaps[gaps < self._count]
        assert gaps.size == moved.size, (gaps.size, moved.size)
        self._slots[gaps] = moved
        self._position[moved] = gaps

    def check(self, slots: IntArray) -> None:
        super().check(slots)
        assert (self._position[slots] < self._count).all(), "a gap is left among the slots"

    def select(self, n: int, rng: np.random.Generator, excluded: IntArray = NONE) -> tuple[IntArray, FloatArray]:
        """As in Selector. All slots that are not excluded have the same probability."""
        # What is left of a draw without replacement after the excluded slots are dropped is a draw without replacement
        # from the other slots. So draw as many more slots as are excluded, and drop the excluded ones.
        wanted = min(n + excluded.size, self._count)
        slots = NONE
        if wanted:
            slots = self._slots[rng.choice(self._count, wanted, replace=False)]
        if excluded.size:
            slots = slots[~np.isin(slots, excluded)]
        slots = slots[:n]
        others = self._count - excluded.size  # 0: all slots are excluded, and `slots` is empty
        probability = 1.0 / max(1, others)
        return slots, np.full(slots.size, probability)

    def select_repeated(self, n: int, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
        if not self._count:
            return NONE, np.zeros(0)
        slots = self._slots[rng.integers(self._count, size=n)]
        return slots, np.full(n, 1.0 / self._count)


def half_lives(columns: RowFacts, slots: IntArray, half_life: float) -> FloatArray:
    """The versions (n,) as which the items of `slots` (n,) count, in half-lives: each version divided by `half_life`.

    An item that is newer than the current version counts as one of the current version.
    """
    versions = np.minimum(columns.policy_version[slots], columns.current_version)
    return np.asarray(versions / half_life)


def recounted(columns: RowFacts, slots: IntArray, before: int) -> IntArray:
    """Those of `slots` whose items may count as another version now than when the current version was `before`.

    An item counts as its own version or, if its own version is newer than the current version, as the current version.
    So only an item that is newer than the smaller of the two current versions may count as another version now.
    """
    return slots[columns.policy_version[slots] > min(before, columns.current_version)]


class Prioritized(Selector):
    """Draws in proportion to priority ** exponent (Schaul et al., arXiv 1511.05952). An operation is O(log size).

    An item of priority 0 is never drawn. `select` draws one slot after the other, each from the slots that are left.

    With a half-life, the weight of an item is priority ** exponent * 2 ** ((version - reference) / half_life). Moving
    the reference version costs a pass over all items. So the reference version follows the newest item only in strides
    of more than _STRIDE half-lives.
    """

    def __init__(self, columns: RowFacts, exponent: float = 1.0, half_life: float | None = None) -> None:
        self._columns = columns
        self._exponent = exponent
        self._half_life = half_life
        self._reference = 0.0
        """The reference version, in half-lives: divided by the half-life."""
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
                self._rebase(newest, slots)  # calls `update` again, for these slots and all others
                return
            weights *= np.exp2(versions - self._reference)
            # A weight that underflows to 0 would count as priority 0, and the item would never be drawn.
            weights = np.where(priorities > 0, np.maximum(weights, _LEAST_WEIGHT), 0.0)
        self._tree.set(slots, weights)

    def version_moved(self, before: int) -> None:
        """As in Selector. Only items that count as another version than before get another weight."""
        if self._half_life is None:
            return
        current = self._columns.current_version / self._half_life
        if self._reference > current:
            # After this rollback all items count as older than the reference. So move the reference back, too.
            self._rebase(current)
            return
        slots = self._tree.positions()
        self.update(recounted(self._columns, slots, before))

    def _rebase(self, reference: float, more: IntArray = NONE) -> None:
        """Makes `reference` (in half-lives) the reference version, and computes the weights of all items anew; O(size).

        `more` (n,): slots that get a weight even if they are not in the tree yet.
        """
        self._reference = reference
        slots = np.union1d(self._tree.positions(), more)
        self.update(slots)

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
        self._lift_weights()
        slots = self._tree.positions()
        # The weights of the other slots are summed anew. If a heavy excluded weight were subtracted from the sum of all
        # weights instead, rounding would lose the light weights.
        if excluded.size:
            slots = slots[~np.isin(slots, excluded)]
        weights = self._tree.get(slots)
        total = float(weights.sum())
        squares = float(np.square(weights).sum())  # not np.dot, for which BLAS would start threads
        if self._half_life is None:
            return total, squares
        current = self._columns.current_version / self._half_life
        scale = float(np.exp2(self._reference - current))
        return total * scale, squares * scale**2

    def select(self, n: int, rng: np.random.Generator, excluded: IntArray = NONE) -> tuple[IntArray, FloatArray]:
        """As in Selector. Draws one slot after the other, each from the slots that are left."""
        # If the repetitions are dropped from independent draws, the rest is distributed like successive draws without
        # replacement. So draw independently, drop the repetitions, and set the weights of the drawn slots to 0. Then
        # draw as many slots as are still missing, and so on, until no slot is missing.
        n = min(n, self._tree.positive - excluded.size)
        self._lift_weights()
        tree = self._tree
        # The slots whose weights are set to 0 below, and the weights that they had before. At the end all of these
        # weights are restored. The excluded slots are first.
        hidden_slots = [excluded]
        hidden_weights = [tree.get(excluded)]
        tree.set(excluded, np.zeros(excluded.size))
        total = tree.total
        missing = n
        while missing:
            drawn = self._draw(missing, rng)
            _, first_draws = np.unique(drawn, return_index=True)  # the index of the first draw of each slot
            drawn = drawn[np.sort(first_draws)]  # each slot once, in the order of the draws
            hidden_slots.append(drawn)
            hidden_weights.append(tree.get(drawn))
            missing -= drawn.size
            tree.set(drawn, np.zeros(drawn.size))
        slots = np.concatenate(hidden_slots)
        weights = np.concatenate(hidden_weights)
        assert slots.size == excluded.size + n, "each slot is drawn once"
        tree.set(slots, weights)
        drawn_slots = slots[excluded.size :]
        probabilities = weights[excluded.size :] / (total or 1.0)  # if the total is 0, nothing was drawn
        return drawn_slots, probabilities

    def select_repeated(self, n: int, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
        if not self._tree.positive:
            return NONE, np.zeros(0)
        self._lift_weights()
        slots = self._draw(n, rng)
        return slots, self._tree.get(slots) / self._tree.total

    def _lift_weights(self) -> None:
        """Moves the reference back to the version of the newest item if the sum of all weights is very small.

        The sum is very small if all items are far older than the reference. Without this move, their weights would be
        so small that rounding changes their proportions.
        """
        if self._half_life is None:
            return
        has_low_total = 0 < self._tree.total < _LOW_TOTAL  # if the total is 0, no item has a weight
        if not has_low_total:
            return
        versions = half_lives(self._columns, self._tree.positions(), self._half_life)
        newest = float(versions.max())
        if newest < self._reference:
            self._rebase(newest)

    def _draw(self, n: int, rng: np.random.Generator) -> IntArray:
        """Draws n slots (n,) independently, in proportion to the weights."""
        targets = rng.random(n) * self._tree.total
        return self._tree.find(targets)


def _with_probabilities(slots: IntArray) -> tuple[IntArray, FloatArray]:
    """Returns `slots` (n,) of an order, and the probability (n,) of each to come first: 1 for the first, else 0."""
    probabilities = np.zeros(slots.size)
    probabilities[:1] = 1.0
    return slots, probabilities


S = TypeVar("S", np.float64, np.complex128)
"""The type of the nodes of a tree."""

_LOOP_BELOW = 16
"""To set fewer leaves than this, a plain loop over the path of each leaf is faster than numpy calls for each level."""
_DENSE = 4
"""If a level has at most this many nodes for each leaf that is set, all nodes above this level are computed anew. That
is faster than to compute only the nodes above the set leaves, because it reads memory in order."""


class Tree(Generic[S]):
    """A complete binary tree in one array. Each position has a leaf with the value of the position.

    The root is node 1, the children of node i are nodes 2i and 2i + 1, and the leaf of position p is node capacity + p.
    A node above the leaves is always computed from its two children, and never adjusted by a difference, so rounding
    errors do not pile up. Setting or finding m leaves is one pass over log2(capacity) levels.
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
        # A view of the nodes as floats, with two floats for each complex number. For single entries, indexing a
        # memoryview is much cheaper than indexing an array.
        self._scalars = cast("memoryview[float]", self._nodes.view(np.float64).data)

    def positions(self) -> IntArray:
        """The positions that are in use, ascending; O(capacity)."""
        return np.flatnonzero(self._nodes[self.capacity :] != self._nothing)

    def get(self, positions: IntArray) -> npt.NDArray[S]:
        """The values (m,) of the leaves at `positions` (m,)."""
        return self._nodes[positions + self.capacity]

    def set(self, positions: IntArray, values: npt.NDArray[S]) -> None:
        """Sets the leaves at `positions` (m,) to `values` (m,); O(m log capacity).

        The positions are distinct, in any order, and may lie beyond the capacity: the tree then grows.
        """
        if positions.size == 0:
            return
        highest = int(positions.max())
        if highest >= self.capacity:
            self._grow(highest + 1)
        if positions.size < _LOOP_BELOW:
            self._set_each(positions.tolist(), values.tolist())
        else:
            self._set_all(positions + self.capacity, values)

    @abstractmethod
    def _set_each(self, positions: list[int], values: list[Any]) -> None:
        """Sets one leaf after the other, and recomputes the nodes above each leaf."""

    def _set_all(self, leaves: IntArray, values: npt.NDArray[S]) -> None:
        """Sets the nodes `leaves` (m,) at once, and recomputes the nodes above them, level by level."""
        nodes = self._nodes
        nodes[leaves] = values
        children_of = nodes.reshape(-1, 2)  # row i: the children of node i
        width = self.capacity  # the number of nodes of the current level
        ancestors = leaves  # (m,): of each leaf, its ancestor in the current level. Ancestors may repeat.
        while width > _DENSE * leaves.size:
            width >>= 1
            ancestors = ancestors >> 1
            children = children_of.take(ancestors, axis=0)
            nodes[ancestors] = self._combine(children[:, 0], children[:, 1])
        self._recompute_above(width)

    def _recompute_above(self, width: int) -> None:
        """Recomputes all nodes above the level of `width` nodes."""
        while width > 1:
            children = self._nodes[width : 2 * width]
            width >>= 1
            parents = self._nodes[width : 2 * width]
            self._combine(children[0::2], children[1::2], out=parents)

    def check(self) -> None:
        """Asserts that each node above the leaves equals the combination of its children, to the last bit."""
        assert self.capacity & (self.capacity - 1) == 0, self.capacity
        children = self._nodes[2:].reshape(-1, 2)  # row i: the children of node i + 1
        assert np.array_equal(self._nodes[1 : self.capacity], self._combine(children[:, 0], children[:, 1]))

    def _grow(self, needed: int) -> None:
        """Makes room for at least `needed` positions. The leaves keep their values."""
        leaves = self._nodes[self.capacity :]
        self._allocate(power_of_two(needed))
        self._nodes[self.capacity : self.capacity + leaves.size] = leaves
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
        """The sum of all leaves."""
        return self._scalars[1]  # the root

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
            while node := node >> 1:  # the parent of the last node; 0 if that was the root
                nodes[node] = nodes[2 * node] + nodes[2 * node + 1]
        self.positive = positive

    def _set_all(self, leaves: IntArray, values: FloatArray) -> None:
        before = np.count_nonzero(self._nodes[leaves])
        self.positive += int(np.count_nonzero(values) - before)
        super()._set_all(leaves, values)

    def find(self, targets: FloatArray) -> IntArray:
        """Finds for each of `targets` (n,) the position (n,) at which the running sum of the leaves exceeds the target.

        0 <= target < total. All targets go down the tree together, one level at a time.
        """
        node = np.ones(targets.size, dtype=np.int64)  # (n,): of each target, its node in the current level
        rest = targets.copy()  # (n,): each target, less the sum of all leaves left of its node
        for _ in range(self.capacity.bit_length() - 1):
            node *= 2  # the left child
            left_sum = self._nodes[node]
            right_sum = self._nodes[node + 1]
            # Because of rounding, `rest` can reach the left sum although the right subtree has only zeros. Never step
            # into such a subtree.
            goes_right = (rest >= left_sum) & (right_sum > 0)
            rest -= np.where(goes_right, left_sum, 0.0)
            node += goes_right
        # No assert checks that these leaves are above 0, because it would take a tenth of the time of a draw.
        return node - self.capacity


class MinTree(Tree[np.complex128]):
    """Each leaf is a pair of a rank and an order. Each node above the leaves equals the smaller of its children.

    All orders differ, so no two pairs are equal. A pair is stored as a complex number, rank + order * i, because numpy
    compares complex numbers by the real part and then by the imaginary part. Orders stay below 2**53, so a float holds
    them exactly. Finding the n smallest pairs is one pass over log2(capacity) levels.
    """

    _combine = np.minimum
    _nothing: Any = complex(math.inf, math.inf)

    def put(self, positions: IntArray, ranks: FloatArray, orders: IntArray) -> None:
        """Sets the pairs at `positions` (m,) to `ranks` (m,) and `orders` (m,)."""
        pairs = np.empty(positions.size, dtype=np.complex128)
        pairs.real = ranks
        pairs.imag = orders
        self.set(positions, pairs)

    def clear(self, positions: IntArray) -> None:
        """Removes the pairs at `positions` (m,)."""
        self.set(positions, np.full(positions.size, self._nothing))

    def holds(self, position: int) -> bool:
        """True if there is a pair at this position."""
        return position < self.capacity and self._scalars[2 * (position + self.capacity)] < math.inf

    def first(self, n: int) -> IntArray:
        """The positions of the n smallest pairs, or of all pairs if there are fewer. The smallest pair comes first."""
        if n == 1:
            return self._first()
        # Each ancestor of one of the n smallest leaves is among the n smallest nodes of its level. So go down from the
        # root to the leaves, and keep only the n smallest nodes of each level.
        nodes = np.ones(1, dtype=np.int64)
        while nodes.size and nodes[0] < self.capacity:  # `nodes` becomes empty if n is 0
            nodes = np.concatenate([2 * nodes, 2 * nodes + 1])
            if nodes.size > n:
                nodes = nodes[np.argpartition(self._nodes[nodes], n - 1)[:n]]
        pairs = self._nodes[nodes]
        nodes = nodes[np.argsort(pairs)]
        in_use = np.count_nonzero(np.isfinite(pairs.real))
        return nodes[:in_use] - self.capacity  # positions that are not in use have infinite ranks, so they come last

    def _first(self) -> IntArray:
        """The position of the smallest pair, as an array (1,), which is empty if there is no pair.

        The smallest pair is the pair of the root. So this method goes from the root down to the leaf with this pair.
        """
        nodes = self._scalars  # node i has its rank at index 2i, and its order at index 2i + 1
        node = 1
        rank = nodes[2]
        order = nodes[3]
        if rank == math.inf:
            return np.zeros(0, dtype=np.int64)
        while node < self.capacity:
            node *= 2  # the left child
            if nodes[2 * node] != rank or nodes[2 * node + 1] != order:
                node += 1  # the right child has the pair
        return np.array([node - self.capacity])

    def _set_each(self, positions: list[int], values: list[complex]) -> None:
        """As in Tree. On the way up from a leaf, stops at the first node whose pair stays the same."""
        nodes = self._scalars  # node i has its rank at index 2i, and its order at index 2i + 1
        for position, value in zip(positions, values, strict=True):
            node = position + self.capacity
            nodes[2 * node] = value.real
            nodes[2 * node + 1] = value.imag
            while node := node >> 1:  # the parent of the last node; 0 if that was the root
                left = 4 * node  # the index of the left child's rank. Its order and the right child's pair follow.
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
