"""Sharing: how many rows of a batch each shard gives.

A batch is filled from shard after shard. A shard that is chosen gives so many rows at once:

* of a queue, or another table that draws in an order: what is there, until the batch is full,
* of a pool: all rows, if they are at most an eighth of its items, and else an eighth, at least 1. Rows of one shard in
  one batch depend on each other, and an eighth keeps that small.

The next shard is chosen by chance, in proportion to `weight / rows at once`. Its rows then are, in expectation, its
share of the weight times the rows of the step. That holds for each step, so it holds for the batch: n rows have
n * share rows of each shard, however unequal the shards are. With repeats this is exact, and for a uniform sampler too.
Distinct rows of a prioritized one deplete the weight of their shard, by how much only it knows: `expected_rest`.

A table that balances its draws over the values of a tag: the values of all rows are chosen first, by the shares that
one table would give them, and then each value is filled in this way. So a value that lives on one shard alone comes as
often as its weight says.

A weight tells what one shard could be drawn for: the message Weight of replay.proto.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from replay_protos import replay_pb2 as pb

Weight = pb.Weight
"""The rows and the total priority that one shard offers to a draw, as replay.proto documents them."""

AT_ONCE = 8
"""A pool gives one of so many of its items at once."""


def most_rows(weight: Weight, distinct: bool) -> int:
    """Returns how many rows the shard can give now."""
    if distinct:
        return int(min(weight.items, weight.samples))
    return int(weight.samples) if weight.items else 0


def expected_rest(weight: Weight, drawn: int) -> float:
    """The weight that `drawn` distinct rows leave, in expectation: total * (1 - drawn / items) ** (items / effective).

    `effective` is total**2 / squares, Kish's effective sample size. The formula has the right slope at 0 (a row takes
    squares / total in expectation), is exact where all weights are equal, and is 0 when all items are drawn.
    """
    if drawn >= weight.items:
        return 0.0
    items, effective = float(weight.items), weight.total**2 / weight.squares if weight.squares > 0 else 1.0
    return float(weight.total * (1.0 - drawn / items) ** (items / effective))


def share_out(weights: Sequence[Weight], rows: int, *, distinct: bool, rng: np.random.Generator) -> list[int]:
    """How many rows each shard gives, at most `rows` together."""
    counts, left = [0] * len(weights), [most_rows(weight, distinct) for weight in weights]
    while missing := rows - sum(counts):
        at_once = [
            min(missing, rest, missing if weight.ordered else max(1, weight.items // AT_ONCE))
            for weight, rest in zip(weights, left, strict=True)
        ]
        chances = [
            (expected_rest(weight, count) if distinct and count else weight.total) / most if most else 0.0
            for weight, count, most in zip(weights, counts, at_once, strict=True)
        ]
        if (index := _chosen(chances, rng)) is None:
            break
        counts[index] += at_once[index]
        left[index] -= at_once[index]
    return counts


def share_values(
    weights: Sequence[Weight], rows: int, *, distinct: bool, rng: np.random.Generator
) -> list[list[pb.ValueRows]]:
    """Of a table that balances: how many rows of each value each shard gives, at most `rows` together."""
    left = [int(weight.samples) for weight in weights]
    parts: dict[str, list[Weight]] = {}
    shares: dict[str, float] = {}
    for shard, weight in enumerate(weights):
        for each in weight.values if left[shard] else ():
            parts.setdefault(each.value, [Weight() for _ in weights])[shard] = Weight(
                total=each.total, squares=each.squares, items=each.items, ordered=weight.ordered
            )
            shares[each.value] = each.weight
    total = sum(shares.values())
    planned: list[list[pb.ValueRows]] = [[] for _ in weights]
    for value, count in _choose_values(shares, parts, rows, distinct=distinct, rng=rng).items():
        for part, samples in zip(parts[value], left, strict=True):
            part.samples = samples
        of_value = sum(part.total for part in parts[value])
        for shard, n in enumerate(share_out(parts[value], count, distinct=distinct, rng=rng)):
            if n:
                left[shard] -= n
                part = parts[value][shard]
                # Where items have an order, the first row of a value is certain.
                share = shares[value] / total * (1.0 if part.ordered else part.total / of_value)
                planned[shard].append(pb.ValueRows(value=value, rows=n, share=share))
    return planned


def _choose_values(
    shares: dict[str, float], parts: dict[str, list[Weight]], rows: int, *, distinct: bool, rng: np.random.Generator
) -> Counter[str]:
    """How many of `rows` rows, drawn one after the other, have each value."""
    chosen: Counter[str] = Counter()
    there = {value: sum(part.items for part in of_value) for value, of_value in parts.items()}
    open_values = [value for value, items in there.items() if items]
    for _ in range(rows):
        # To draw a value that is used up again is to draw it from the others.
        if (index := _chosen([shares[value] for value in open_values], rng)) is None:
            break
        value = open_values[index]
        chosen[value] += 1
        if distinct and chosen[value] == there[value]:
            open_values.remove(value)
    return chosen


def _chosen(chances: Sequence[float], rng: np.random.Generator) -> int | None:
    """The index of one of these, by chance; None: nothing can be chosen."""
    ends = list(accumulate(chances))
    if not ends or ends[-1] <= 0:
        return None
    return bisect_right(ends[:-1], rng.random() * ends[-1])


def use_up(weight: Weight, count: int, values: Sequence[pb.ValueRows]) -> None:
    """The shard gives `count` rows, or so many of each value, and they will not be there for the next draw."""
    stay = 1.0 - min(1.0, count / weight.items) if weight.items else 0.0
    weight.total, weight.squares = weight.total * stay, weight.squares * stay
    weight.items = max(0, weight.items - count)
    weight.samples = max(0, weight.samples - count)
    rows_by_value = {each.value: each.rows for each in values}
    for each in weight.values:
        each.items = max(0, each.items - rows_by_value.get(each.value, 0))
