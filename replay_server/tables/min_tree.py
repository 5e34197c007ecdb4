"""MinTree: pairs (rank, order) at positions, of which the smallest come first."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from replay_server.tables.columns import FloatArray, IntArray
from replay_server.tables.tree import Tree


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
