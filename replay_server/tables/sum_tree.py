"""SumTree: numbers at positions, drawn in proportion to their size."""

from __future__ import annotations

import numpy as np

from replay_server.tables.columns import FloatArray, IntArray
from replay_server.tables.tree import Tree


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
