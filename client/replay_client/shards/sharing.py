"""Sharing: computes how many rows of a batch each shard gives.

A batch is filled in steps. In each step one shard is chosen, and gives `rows at once`:

* from a queue, or another table that draws in an order: all rows that it has, until the batch is full,
* from a pool: all missing rows, but at most an eighth of its items, and at least 1. Rows of one shard in one batch
  depend on each other, and the bound of an eighth keeps this dependence small.

The shard of a step is chosen at random, in proportion to `weight / rows at once`. So the expected number of its rows is
its share of the weight times the expected number of rows of the step. That holds for each step, so it holds for the
batch: of n rows, n * share are from each shard in expectation, however unequal the shards are. This is exact for draws
with repeats and for a uniform sampler. For distinct rows of a prioritized sampler it is approximate: each row takes
weight from its shard, and only the shard knows how much. `expected_rest` estimates it.

A table may balance its draws over the values of a tag. Then the values of all rows are chosen first, by the shares that
a single table would give them. After that, the rows of each value are shared out in steps as above. So a value that
only one shard has comes as often as its weight says.

The message Weight of replay.proto says what one shard can give to a draw.
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
"""A pool gives at most the share 1 / AT_ONCE of its items at once."""


def most_rows(weight: Weight, distinct: bool) -> int:
    """The number of rows that the shard can give now."""
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
    items = float(weight.items)
    effective = 1.0
    if weight.squares > 0:
        effective = weight.total**2 / weight.squares
    return float(weight.total * (1.0 - drawn / items) ** (items / effective))


def share_out(weights: Sequence[Weight], rows: int, *, distinct: bool, rng: np.random.Generator) -> list[int]:
    """The number of rows that each shard gives, in the order of `weights`, at most `rows` together."""
    counts = [0] * len(weights)
    left = [most_rows(weight, distinct) for weight in weights]
    while missing := rows - sum(counts):
        at_once: list[int] = []
        chances: list[float] = []
        for weight, count, rest in zip(weights, counts, left, strict=True):
            gives = min(missing, rest, _most_at_once(weight, missing))
            at_once.append(gives)
            chances.append(_weight_left(weight, count, distinct) / gives if gives else 0.0)
        index = _chosen(chances, rng)
        if index is None:
            break
        counts[index] += at_once[index]
        left[index] -= at_once[index]
    return counts


def _most_at_once(weight: Weight, missing: int) -> int:
    """The most rows that a shard gives when it is chosen once."""
    if weight.ordered:
        return missing
    return max(1, weight.items // AT_ONCE)


def _weight_left(weight: Weight, drawn: int, distinct: bool) -> float:
    """The weight of a shard that has given `drawn` rows to this batch."""
    if distinct and drawn:
        return expected_rest(weight, drawn)
    return weight.total


def share_values(
    weights: Sequence[Weight], rows: int, *, distinct: bool, rng: np.random.Generator
) -> list[list[pb.ValueRows]]:
    """For a table that balances: the rows of each value that each shard gives, at most `rows` together."""
    left = [int(weight.samples) for weight in weights]
    # The weight that each shard offers for a value, by the value.
    parts: dict[str, list[Weight]] = {}
    shares: dict[str, float] = {}
    for shard, weight in enumerate(weights):
        if not left[shard]:
            continue
        for offered in weight.values:
            if offered.value not in parts:
                parts[offered.value] = [Weight() for _ in weights]
            parts[offered.value][shard] = Weight(
                total=offered.total,
                squares=offered.squares,
                items=offered.items,
                ordered=weight.ordered,
            )
            shares[offered.value] = offered.weight
    total = sum(shares.values())
    planned: list[list[pb.ValueRows]] = [[] for _ in weights]
    for value, count in _choose_values(shares, parts, rows, distinct=distinct, rng=rng).items():
        for part, samples in zip(parts[value], left, strict=True):
            part.samples = samples
        of_value = sum(part.total for part in parts[value])
        counts = share_out(parts[value], count, distinct=distinct, rng=rng)
        for shard, shard_count in enumerate(counts):
            if not shard_count:
                continue
            left[shard] -= shard_count
            share = shares[value] / total
            part = parts[value][shard]
            if not part.ordered:  # in an order, the first row of a value has the probability 1
                share *= part.total / of_value
            planned[shard].append(pb.ValueRows(value=value, rows=shard_count, share=share))
    return planned


def _choose_values(
    shares: dict[str, float], parts: dict[str, list[Weight]], rows: int, *, distinct: bool, rng: np.random.Generator
) -> Counter[str]:
    """The number of rows of each value among `rows` rows that are drawn one after the other."""
    chosen: Counter[str] = Counter()
    items = {value: sum(part.items for part in of_value) for value, of_value in parts.items()}
    # A value leaves the list when it is used up. Drawing from the remaining values gives the same distribution as
    # drawing from all values until one that is not used up comes.
    open_values = [value for value in parts if items[value]]
    for _ in range(rows):
        index = _chosen([shares[value] for value in open_values], rng)
        if index is None:
            break
        value = open_values[index]
        chosen[value] += 1
        if distinct and chosen[value] == items[value]:
            open_values.remove(value)
    return chosen


def _chosen(chances: Sequence[float], rng: np.random.Generator) -> int | None:
    """A random index, in proportion to the chances; None if all chances are 0."""
    ends = list(accumulate(chances))
    if not ends or ends[-1] <= 0:
        return None
    return bisect_right(ends[:-1], rng.random() * ends[-1])


def use_up(weight: Weight, count: int, values: Sequence[pb.ValueRows]) -> None:
    """Subtracts from the weight the `count` rows that the shard gives, and those of each value, for the next draw."""
    left = 0.0
    if weight.items:
        left = 1.0 - min(1.0, count / weight.items)
    weight.total *= left
    weight.squares *= left
    weight.items = max(0, weight.items - count)
    weight.samples = max(0, weight.samples - count)
    rows_by_value = {part.value: part.rows for part in values}
    for offered in weight.values:
        offered.items = max(0, offered.items - rows_by_value.get(offered.value, 0))
