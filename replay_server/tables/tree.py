"""Tree: a value at each position, and each node above made of its two children, up to the root.

A tree is complete and lies in one array: the leaves at [capacity, 2 * capacity), the children of node i at 2i and
2i + 1. Nodes are recomputed from their children and never adjusted by differences, so rounding does not pile up under
churn. Setting m leaves is one pass over log2(capacity) levels.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from replay_server.tables.columns import IntArray

S = TypeVar("S", np.float64, np.complex128)

_LOOP_BELOW = 24
"""Below this many leaves a plain loop over one path after the other beats numpy's cost a call."""


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
        while width > leaves.size:
            width >>= 1
            level = level >> 1
            nodes[level] = self._combine(nodes[2 * level], nodes[2 * level + 1])
        self._recompute_above(width)

    def _recompute_above(self, width: int) -> None:
        """All nodes above the level of `width` nodes."""
        while width > 1:
            children = self._nodes[width : 2 * width]
            width >>= 1
            self._nodes[width : 2 * width] = self._combine(children[0::2], children[1::2])

    def _grow(self, needed: int) -> None:
        old = self._nodes[self.capacity :]
        self._allocate(1 << (needed - 1).bit_length())
        self._nodes[self.capacity : self.capacity + old.size] = old
        self._recompute_above(self.capacity)
