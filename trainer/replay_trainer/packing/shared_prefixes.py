"""Shared prefixes: which sequences of a batch begin alike, so that a packed row has each shared prefix once.

    four sequences     in order        new in the packed row
    1 2 3 4            1 2 3 4         1 2 3 4
    1 2 7 8            1 2 3 5               5     3 tokens are shared with the sequence before
    1 2 3 5            1 2 7 8             7 8     2 tokens are shared
    1 2 7 8 9          1 2 7 8 9               9   all of the sequence before

This is a trie of tokens, without its nodes. The sequences are sorted by their tokens, so no earlier sequence shares
more tokens with a sequence than its neighbour does. One number for each sequence is therefore enough: the number of
tokens that it shares with the sequence before it. If only some of the sequences are chosen, two neighbours among the
chosen sequences share the smallest of the numbers between them.

A shared prompt is the simplest case. Other cases are a turn that continues the turn before, a system prompt of several
groups, and two equal completions. The code treats all cases alike.
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
    """The tokens that one sequence adds to a packed row, without those that it shares with the sequence before it. They
    follow one another in the row."""

    length: int
    """Tokens, at least 1."""
    before: tuple[tuple[int, int], ...]
    """Pairs (index of an earlier run, number of its first tokens): the tokens that precede this run in its sequence, in
    order. Each token of this run attends to all of them, and to the tokens of this run up to itself."""


Layout = tuple[Run, ...]


@dataclass(frozen=True)
class SharedPrefixes:
    """The shared prefixes of B sequences."""

    order_B: Ints
    """The indices of the sequences, sorted by the tokens of the sequences."""
    shared_B: Ints
    """In the order of `order_B`: the number of first tokens that the sequence shares with the sequence before it; 0 for
    the first sequence."""

    @classmethod
    def of(cls, sequences: Sequence[npt.NDArray[Any]]) -> SharedPrefixes:
        """The shared prefixes of sequences of token ids, which all have the same dtype."""
        # Sequences that begin alike become neighbours, whatever the order of the tokens is. The order of their bytes is
        # taken, because sorting by bytes is quick.
        keys = [sequence.tobytes() for sequence in sequences]
        order = sorted(range(len(sequences)), key=keys.__getitem__)
        shared = [0] * len(order)
        for index in range(1, len(order)):
            before = sequences[order[index - 1]]
            shared[index] = _num_shared(before, sequences[order[index]])
        return cls(np.array(order, np.int64), np.array(shared, np.int64))

    def select(self, rows: Ints) -> SharedPrefixes:
        """The shared prefixes of the sequences `rows`, which must be distinct. Sequence i of the result is
        `rows[i]`."""
        # The rank of each sequence: its index in `self.order_B`.
        rank_B = np.empty_like(self.order_B)
        rank_B[self.order_B] = np.arange(self.order_B.size)
        chosen_ranks = rank_B[rows]
        order_B = np.argsort(chosen_ranks)
        sorted_ranks = chosen_ranks[order_B]
        assert (np.diff(sorted_ranks) > 0).all(), "a sequence is chosen twice"
        shared_B = np.zeros_like(order_B)
        if rows.size > 1:
            # Chosen sequences that are neighbours now, of ranks p < q, share min(self.shared_B[p + 1 : q + 1]) tokens.
            # Each of these slices ends where the next one begins, so `reduceat` computes all minima at once.
            starts = sorted_ranks[:-1] + 1
            shared_B[1:] = np.minimum.reduceat(self.shared_B[: sorted_ranks[-1] + 1], starts)
        return SharedPrefixes(order_B, shared_B)

    def layout(self, lengths_B: Ints) -> Layout:
        """The runs of the packed row of sequences with these lengths.

        A sequence that shares all of its tokens adds no run.
        """
        runs: list[Run] = []
        # The runs of which the sequence consists so far. Each has (index of the run in `runs`, position of its first
        # token in the sequence, number of its first tokens that are in the sequence).
        path: list[tuple[int, int, int]] = []
        for row, shared in zip(self.order_B.tolist(), self.shared_B.tolist(), strict=True):
            # `path` still has the runs of the sequence before. Cut it off after `shared` tokens: remove the runs that
            # begin later, and shorten the last run that is left.
            while path and path[-1][1] >= shared:
                path.pop()
            if path:
                run, first, tokens = path[-1]
                path[-1] = (run, first, min(tokens, shared - first))
            num_new = int(lengths_B[row]) - shared
            assert num_new >= 0, f"sequence {row} shares more tokens than it has"
            assert sum(tokens for _, _, tokens in path) == shared, f"the runs before sequence {row} are not its prefix"
            if num_new:
                before = tuple((run, tokens) for run, _, tokens in path)
                path.append((len(runs), shared, num_new))
                runs.append(Run(num_new, before))
        return tuple(runs)


def _num_shared(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """The number of first tokens that both sequences share."""
    length = min(a.size, b.size)
    if length == 0:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())  # the first True, or 0 if no element is True
    return first if differs[first] else length
