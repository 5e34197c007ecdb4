"""SumTree: numbers at positions, drawn in proportion to their size.

A complete binary tree in one array: the leaves at [capacity, 2 * capacity), each inner node the sum of its two
children. Nodes are recomputed from their children and never adjusted by differences, so rounding does not pile up under
churn. Setting m leaves and drawing m are each one pass over log2(capacity) levels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Below this many leaves a plain loop over one path after the other beats numpy's cost a call.
_LOOP_BELOW = 24


class SumTree:
    def __init__(self, capacity: int = 64) -> None:
        self._allocate(1 << max(1, capacity - 1).bit_length())

        self.positive = 0
        """How many leaves are above 0."""

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        self._nodes = np.zeros(2 * capacity)
        self._scalars = self._nodes.data  # indexing a memoryview is much cheaper than indexing an array

    @property
    def total(self) -> float:
        return self._scalars[1]

    def get(self, positions: IntArray) -> FloatArray:
        return self._nodes[positions + self.capacity]

    def is_positive(self, position: int) -> bool:
        return self._scalars[position + self.capacity] > 0

    def set(self, positions: IntArray, values: FloatArray) -> None:
        """Sets the leaves at `positions` (distinct, any order) to numbers from 0; O(m log capacity)."""
        if positions.size == 0:
            return
        if (top := int(positions.max())) >= self.capacity:
            self._grow(top + 1)
        if positions.size < _LOOP_BELOW:
            nodes = self._scalars
            for position, value in zip(positions.tolist(), values.tolist(), strict=True):
                node = position + self.capacity
                self.positive += (value > 0) - (nodes[node] > 0)
                nodes[node] = value
                node >>= 1
                while node:
                    nodes[node] = nodes[2 * node] + nodes[2 * node + 1]
                    node >>= 1
            return
        level = positions + self.capacity
        self.positive += int(np.count_nonzero(values) - np.count_nonzero(self._nodes[level]))
        self._nodes[level] = values
        while level[0] > 1:
            level = level >> 1
            self._nodes[level] = self._nodes[2 * level] + self._nodes[2 * level + 1]

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

    def _grow(self, needed: int) -> None:
        old = self._nodes[self.capacity :]
        self._allocate(1 << (needed - 1).bit_length())
        self._nodes[self.capacity : self.capacity + old.size] = old
        level = self.capacity
        while level > 1:
            level >>= 1
            children = self._nodes[2 * level : 4 * level]
            self._nodes[level : 2 * level] = children[0::2] + children[1::2]
