"""Sharing: computes how many rows of a batch each shard gives.

A batch is filled in steps. Each step chooses one shard, which gives several rows, the `rows at once`:

* from a queue, or another table that draws in an order: all rows that it has, until the batch is full,
* from a pool: all missing rows, but at most an eighth of its items, and at least 1. Rows of one shard in one batch
  depend on each other, and the bound of an eighth keeps this dependence small.

A step chooses its shard at random, in proportion to `weight / rows at once`. So the expected number of rows from a
shard is the shard's share of the weight times the expected number of rows of the step. That holds for each step, and
therefore for the batch: of n rows, n * share are from each shard in expectation, however unequal the shards are. This
is exact for draws with repeats and for a uniform sampler. For distinct rows of a prioritized sampler it is approximate:
each row removes its priority from the weight of its shard, and only the shard knows how much that is. `expected_rest`
estimates the rest.

A table may balance its draws over the values of a tag. Then the values of all rows are chosen first, by the shares that
a single table would give them. After that, the rows of each value are shared out in steps as above. So a value that
only one shard has is drawn as often as its weight says.

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
"""In one step, a shard of a pool gives at most the share 1 / AT_ONCE of its items."""


def most_rows(weight: Weight, distinct: bool) -> int:
    """The number of rows that the shard can give now. `distinct`: no item may be in the batch twice."""
    if distinct:
        return int(min(weight.items, weight.samples))
    return int(weight.samples) if weight.items else 0


def expected_rest(weight: Weight, drawn: int) -> float:
    """The weight that `drawn` distinct rows leave, in expectation: total * (1 - drawn / items) ** (items / effective).

    `effective` is total**2 / squares, Kish's effective sample size. The formula is an estimate. It has the right slope
    at 0 (the first row removes squares / total in expectation), it is exact if all items have equal weights, and it is
    0 when all items are drawn.
    """
    if drawn >= weight.items:
        return 0.0
    items = float(weight.items)
    effective = 1.0  # no item has a weight: `total` is 0, and the exponent does not matter
    if weight.squares > 0:
        effective = weight.total**2 / weight.squares
    return float(weight.total * (1.0 - drawn / items) ** (items / effective))


def share_out(weights: Sequence[Weight], rows: int, *, distinct: bool, rng: np.random.Generator) -> list[int]:
    """The number of rows that each shard gives, in the order of `weights`, at most `rows` together.

    The sum is less than `rows` only if the shards cannot give more.
    """
    counts = [0] * len(weights)
    left = [most_rows(weight, distinct) for weight in weights]  # the rows that each shard can still give
    while missing := rows - sum(counts):
        at_once: list[int] = []
        chances: list[float] = []
        for weight, count, rest in zip(weights, counts, left, strict=True):
            gives = min(missing, rest, _most_at_once(weight, missing))
            at_once.append(gives)
            # The chance is in proportion to weight / rows at once, as the head of this module explains.
            chances.append(_weight_left(weight, count, distinct) / gives if gives else 0.0)
        index = _random_index(chances, rng)
        if index is None:  # no shard can give more
            break
        counts[index] += at_once[index]
        left[index] -= at_once[index]
    return counts


def _most_at_once(weight: Weight, missing: int) -> int:
    """The most rows that a shard gives in one step, of the `missing` rows of the batch."""
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
    """For a table that balances: the rows of each value that each shard gives, at most `rows` together.

    The result has a list for each shard, in the order of `weights`.
    """
    left = [int(weight.samples) for weight in weights]  # the rows that each shard can still give
    # The weights that the shards offer for rows of a value, in the order of `weights`, by the value.
    weights_of_values: dict[str, list[Weight]] = {}
    # The weight of each value in the table's `balance`, which is the same on all shards, by the value.
    balance: dict[str, float] = {}
    for shard, weight in enumerate(weights):
        if not left[shard]:
            continue
        for offered in weight.values:
            if offered.value not in weights_of_values:
                weights_of_values[offered.value] = [Weight() for _ in weights]
            weights_of_values[offered.value][shard] = Weight(
                total=offered.total,
                squares=offered.squares,
                items=offered.items,
                ordered=weight.ordered,
            )
            balance[offered.value] = offered.weight
    total_balance = sum(balance.values())
    planned: list[list[pb.ValueRows]] = [[] for _ in weights]
    chosen = _choose_values(balance, weights_of_values, rows, distinct=distinct, rng=rng)
    for value, count in chosen.items():
        value_weights = weights_of_values[value]
        # The rows of earlier values have used up a part of what each shard can give.
        for value_weight, samples in zip(value_weights, left, strict=True):
            value_weight.samples = samples
        total = sum(value_weight.total for value_weight in value_weights)
        counts = share_out(value_weights, count, distinct=distinct, rng=rng)
        for shard, shard_count in enumerate(counts):
            if not shard_count:
                continue
            left[shard] -= shard_count
            # The shard reports the probability of a row within its own rows of this value. This factor makes it the
            # probability among all rows of all shards.
            share = balance[value] / total_balance
            value_weight = value_weights[shard]
            if not value_weight.ordered:  # in an order, the first row of a value has the probability 1
                share *= value_weight.total / total
            planned[shard].append(pb.ValueRows(value=value, rows=shard_count, share=share))
    return planned


def _choose_values(
    balance: dict[str, float],
    weights_of_values: dict[str, list[Weight]],
    rows: int,
    *,
    distinct: bool,
    rng: np.random.Generator,
) -> Counter[str]:
    """The number of rows of each value among `rows` rows that are drawn one after the other.

    Each row has a value at random, in proportion to `balance`. `weights_of_values` says how many items have a value.
    """
    chosen: Counter[str] = Counter()
    items = {value: sum(weight.items for weight in weights) for value, weights in weights_of_values.items()}
    # A value whose items are all drawn leaves the list. A draw among the remaining values has the same distribution as
    # draws among all values that are repeated until one of the remaining values is drawn.
    open_values = [value for value in weights_of_values if items[value]]
    for _ in range(rows):
        index = _random_index([balance[value] for value in open_values], rng)
        if index is None:  # all items are drawn
            break
        value = open_values[index]
        chosen[value] += 1
        if distinct and chosen[value] == items[value]:
            open_values.remove(value)
    return chosen


def _random_index(chances: Sequence[float], rng: np.random.Generator) -> int | None:
    """A random index, in proportion to the chances; None if all chances are 0, or there are none."""
    # The chances are laid end to end from 0 on. Index i is chosen if a random point falls before ends[i], and not
    # before ends[i - 1].
    ends = list(accumulate(chances))
    if not ends or ends[-1] <= 0:
        return None
    return bisect_right(ends[:-1], rng.random() * ends[-1])


def use_up(weight: Weight, count: int, values: Sequence[pb.ValueRows]) -> None:
    """Subtracts the rows that a shard gives from its weight, as an estimate for the next draw.

    `count` is the number of all these rows, and `values` has the number of rows of each value.
    """
    share_left = 0.0
    if weight.items:
        share_left = 1.0 - min(1.0, count / weight.items)
    weight.total *= share_left
    weight.squares *= share_left
    weight.items = max(0, weight.items - count)
    weight.samples = max(0, weight.samples - count)
    rows_by_value = {value_rows.value: value_rows.rows for value_rows in values}
    for offered in weight.values:
        offered.items = max(0, offered.items - rows_by_value.get(offered.value, 0))
