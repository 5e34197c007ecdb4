"""Shared prefixes: which sequences of a batch begin alike, so that a packed row has each shared prefix once.

    four sequences     in order        new in the packed row
    1 2 3 4            1 2 3 4         1 2 3 4
    1 2 7 8            1 2 3 5               5     3 tokens are shared with the sequence before
    1 2 3 5            1 2 7 8             7 8     2 tokens are shared
    1 2 7 8 9          1 2 7 8 9               9   all of the sequence before

This is a trie of tokens, without its nodes. In the order of their tokens, no earlier sequence shares more with one than
its neighbour does. So one number for each sequence says all: how many tokens it shares with the one before it. Of any
choice of the sequences these numbers are known too: the smallest number between two of them. A shared prompt is the
simplest case. A turn that goes on from the one before, a system prompt of several groups, and two equal completions are
further ones, and nobody has to say which it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Tokens that follow one another in a packed row: what one sequence adds to those before it."""

    length: int
    """Tokens, at least 1."""
    before: tuple[tuple[int, int], ...]
    """(index of an earlier run, its first tokens to take): what precedes these tokens in their sequence, in order.
    Each token attends to all of it, and to its own run up to itself."""


Layout = tuple[Run, ...]


@dataclass(frozen=True)
class SharedPrefixes:
    """The shared prefixes of B sequences."""

    order_B: Ints
    """The indices of the sequences, in the order of their tokens."""
    shared_B: Ints
    """The number of first tokens that each sequence of `order_B` shares with the sequence before it; 0 for the first.
    """

    @classmethod
    def of(cls, sequences: Sequence[npt.NDArray[Any]]) -> SharedPrefixes:
        """The shared prefixes of sequences of token ids, which have one dtype."""
        # Any order of single tokens will do, so that of their bytes does: sequences that begin alike become neighbours.
        keys = [sequence.tobytes() for sequence in sequences]
        order = sorted(range(len(sequences)), key=keys.__getitem__)
        shared = [0] * len(order)
        for place in range(1, len(order)):
            shared[place] = _common(sequences[order[place - 1]], sequences[order[place]])
        return cls(np.array(order, np.int64), np.array(shared, np.int64))

    def select(self, rows: Ints) -> SharedPrefixes:
        """The shared prefixes of the sequences `rows`, none of them twice: sequence i is then `rows[i]`."""
        place_B = np.empty_like(self.order_B)
        place_B[self.order_B] = np.arange(self.order_B.size)
        order_B = np.argsort(place_B[rows])
        places_B = place_B[rows][order_B]
        assert (np.diff(places_B) > 0).all(), "a sequence is chosen twice"
        shared_B = np.zeros_like(order_B)
        if rows.size > 1:
            # The smallest number after a sequence, up to and with the next one of the choice.
            shared_B[1:] = np.minimum.reduceat(self.shared_B[: places_B[-1] + 1], places_B[:-1] + 1)
        return SharedPrefixes(order_B, shared_B)

    def layout(self, lengths_B: Ints) -> Layout:
        """The runs of the packed row of sequences with these lengths. A sequence that shares all of its tokens adds no
        run."""
        runs: list[Run] = []
        # The runs before the next token of the current sequence: (run, place of its first token there, tokens).
        path: list[tuple[int, int, int]] = []
        for row, shared in zip(self.order_B.tolist(), self.shared_B.tolist(), strict=True):
            while path and path[-1][1] >= shared:
                path.pop()
            if path:
                run, first, tokens = path[-1]
                path[-1] = run, first, min(tokens, shared - first)
            new = int(lengths_B[row]) - shared
            assert new >= 0, f"sequence {row} shares more tokens than it has"
            assert sum(tokens for _, _, tokens in path) == shared, f"the runs before sequence {row} are not its prefix"
            if new:
                before = tuple((run, tokens) for run, _, tokens in path)
                path.append((len(runs), shared, new))
                runs.append(Run(new, before))
        return tuple(runs)


def _common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Tokens that both begin with."""
    length = min(a.size, b.size)
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
