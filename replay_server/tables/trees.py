"""Trees: SumTree draws positions in proportion to numbers, and MinTree finds the positions with the smallest pairs.

Invariants of both:

* A tree is complete and lies in one array: the leaves at [capacity, 2 * capacity), the children of node i at 2i and
  2i + 1.
* Each node is computed from its two children, never adjusted by a difference. So rounding errors do not pile up.
* Setting or finding m leaves is one pass over log2(capacity) levels.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from replay_server.tables.columns import FloatArray, IntArray

S = TypeVar("S", np.float64, np.complex128)

_LOOP_BELOW = 16
"""Below this many leaves a plain loop over one path after the other beats numpy's cost a call."""
_DENSE = 4
"""A level with at most this many nodes for each leaf that is set is computed as a whole: that reads it in order."""


class Tree(Generic[S]):
    _combine: ClassVar[np.ufunc]
    """Makes a node of its children."""
    _nothing: Any
    """The value of a position that is not in use; of type S."""

    def __init__(self, capacity: int = 64) -> None:
        self._allocate(1 << max(1, capacity - 1).bit_length())

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        self._nodes: npt.NDArray[S] = np.full(2 * capacity, self._nothing)
        # Indexing a memoryview is much cheaper than indexing an array.
        self._scalars = cast("memoryview[float]", self._nodes.view(np.float64).data)

    def get(self, positions: IntArray) -> npt.NDArray[S]:
        return self._nodes[positions + self.capacity]

    def set(self, positions: IntArray, values: npt.NDArray[S]) -> None:
        """Sets the leaves at `positions` (m,) (distinct, any order) to `values` (m,); O(m log capacity)."""
        if positions.size == 0:
            return
        if (top := int(positions.max())) >= self.capacity:
            self._grow(top + 1)
        if positions.size < _LOOP_BELOW:
            self._set_each(positions.tolist(), values.tolist())
        else:
            self._set_all(positions + self.capacity, values)

    @abstractmethod
    def _set_each(self, positions: list[int], values: list[Any]) -> None:
        """Goes up from one leaf after the other."""

    def _set_all(self, leaves: IntArray, values: npt.NDArray[S]) -> None:
        """Goes up from all leaves at once."""
        nodes, level, width = self._nodes, leaves, self.capacity
        nodes[level] = values
        siblings = nodes.reshape(-1, 2)
        while width > _DENSE * leaves.size:
            width >>= 1
            level = level >> 1
            children = siblings.take(level, axis=0)
            nodes[level] = self._combine(children[:, 0], children[:, 1])
        self._recompute_above(width)

    def _recompute_above(self, width: int) -> None:
        """All nodes above the level of `width` nodes."""
        while width > 1:
            children = self._nodes[width : 2 * width]
            width >>= 1
            self._combine(children[0::2], children[1::2], out=self._nodes[width : 2 * width])

    def _grow(self, needed: int) -> None:
        old = self._nodes[self.capacity :]
        self._allocate(1 << (needed - 1).bit_length())
        self._nodes[self.capacity : self.capacity + old.size] = old
        self._recompute_above(self.capacity)


class SumTree(Tree[np.float64]):
    """Each node is the sum of its children. Drawing m positions is one pass over log2(capacity) levels."""

    _combine = np.add
    _nothing = 0.0

    def __init__(self, capacity: int = 64) -> None:
        super().__init__(capacity)
        self.positive = 0
        """How many leaves are above 0."""

    @property
    def total(self) -> float:
        return self._scalars[1]

    def is_positive(self, position: int) -> bool:
        return self._scalars[position + self.capacity] > 0

    def _set_each(self, positions: list[int], values: list[float]) -> None:
        nodes = self._scalars
        for position, value in zip(positions, values, strict=True):
            node = position + self.capacity
            self.positive += (value > 0) - (nodes[node] > 0)
            nodes[node] = value
            while node := node >> 1:
                nodes[node] = nodes[2 * node] + nodes[2 * node + 1]

    def _set_all(self, leaves: IntArray, values: FloatArray) -> None:
        self.positive += int(np.count_nonzero(values) - np.count_nonzero(self._nodes[leaves]))
        super()._set_all(leaves, values)

    def find(self, targets: FloatArray) -> IntArray:
        """The positions whose stretch of the cumulative sum holds each of `targets` (0 <= target < total)."""
        node = np.ones(targets.size, dtype=np.int64)
        rest = targets.copy()
        for _ in range(self.capacity.bit_length() - 1):
            node *= 2
            left = self._nodes[node]
            # Never step into an empty subtree: with rounding, `rest` can reach the left sum although nothing is right.
            right = (rest >= left) & (self._nodes[node + 1] > 0)
            rest -= np.where(right, left, 0.0)
            node += right
        return node - self.capacity


class MinTree(Tree[np.complex128]):
    """Each node is the smaller of its children. No order is there twice, so no two pairs are equal.

    Pairs are complex numbers, because numpy compares those by the real part and then by the imaginary one; orders stay
    below 2**53. Finding the n smallest is one pass over log2(capacity) levels.
    """

    _combine = np.minimum
    _nothing: Any = complex(math.inf, math.inf)

    def put(self, positions: IntArray, ranks: FloatArray, orders: IntArray) -> None:
        """Sets the pairs at `positions` (m,)."""
        pairs = np.empty(positions.size, dtype=np.complex128)
        pairs.real, pairs.imag = ranks, orders
        self.set(positions, pairs)

    def clear(self, positions: IntArray) -> None:
        """Takes `positions` (m,) out."""
        self.set(positions, np.full(positions.size, self._nothing))

    def holds(self, position: int) -> bool:
        return position < self.capacity and self._scalars[2 * (position + self.capacity)] < math.inf

    def first(self, n: int) -> IntArray:
        """The positions of the n smallest pairs (all, if there are fewer), ascending."""
        if n == 1:
            return self._first()
        # A leaf of the n smallest has only nodes of the n smallest of their levels above it.
        nodes = np.ones(1, dtype=np.int64)
        while nodes.size and nodes[0] < self.capacity:
            nodes = np.concatenate([2 * nodes, 2 * nodes + 1])
            if nodes.size > n:
                nodes = nodes[np.argpartition(self._nodes[nodes], n - 1)[:n]]
        pairs = self._nodes[nodes]
        nodes = nodes[np.argsort(pairs)]
        return nodes[: np.count_nonzero(np.isfinite(pairs.real))] - self.capacity

    def _first(self) -> IntArray:
        nodes, node = self._scalars, 1
        rank, order = nodes[2], nodes[3]
        if rank == math.inf:
            return np.zeros(0, dtype=np.int64)
        while node < self.capacity:
            node *= 2
            if nodes[2 * node] != rank or nodes[2 * node + 1] != order:
                node += 1
        return np.array([node - self.capacity])

    def _set_each(self, positions: list[int], values: list[complex]) -> None:
        nodes = self._scalars  # pairs, one after the other: node i at [2i], [2i + 1]
        for position, value in zip(positions, values, strict=True):
            node = position + self.capacity
            nodes[2 * node], nodes[2 * node + 1] = value.real, value.imag
            while node := node >> 1:
                child = 4 * node
                rank, order = nodes[child], nodes[child + 1]
                if (right := nodes[child + 2]) < rank or (right == rank and nodes[child + 3] < order):
                    rank, order = right, nodes[child + 3]
                if nodes[2 * node] == rank and nodes[2 * node + 1] == order:
                    break  # nor does anything change above it
                nodes[2 * node], nodes[2 * node + 1] = rank, order
