"""Sharing: computes how many rows of a batch each shard gives.

A batch is filled in steps. Each step chooses one shard, which gives several rows at once:

* A shard of a queue, or of another table that draws in an order, gives all rows that it has and the batch lacks.
* A shard of a pool gives the rows that the batch lacks, but at most an eighth of its items, and at least 1. Rows of one
  shard in one batch depend on each other, and the limit of an eighth keeps this dependence small.

A step chooses its shard at random, in proportion to `weight / (rows at once)`. So in one step, the expected number of
rows from a shard is the shard's share of the total weight times the expected number of rows of the step. Because this
holds for each step, it holds for the batch: of n rows, each shard gives n * share in expectation, however unequal the
shards are. This is exact for draws with repeats and for a uniform sampler. For distinct rows of a prioritized sampler
it is approximate, because each row removes its priority from the weight of its shard, and only the shard knows that
priority. `expected_rest` estimates the weight that is left.

A table may balance its draws over the values of a tag. Then the values of all rows are chosen first, by the shares that
a single table would give them. After that, the rows of each value are shared out in steps as above. So a value that
only one shard has is drawn as often as the weight of the value in the table's `balance` says.

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
"""In one step, a shard of a pool gives at most 1 / AT_ONCE of its items."""


def most_rows(weight: Weight, distinct: bool) -> int:
    """The number of rows that the shard can give now. With `distinct`, no item may be in the batch twice."""
    if distinct:
        return int(min(weight.items, weight.samples))
    return int(weight.samples) if weight.items else 0


def expected_rest(weight: Weight, drawn: int) -> float:
    """Estimates the weight that is left after a draw of `drawn` distinct rows.

    The estimate is total * (1 - drawn / items) ** (items / effective), where `effective` is total**2 / squares, Kish's
    effective sample size. It has the right slope at 0, because the first row removes squares / total in expectation. It
    is exact if all items have equal weights, and it is 0 when all items are drawn.
    """
    if drawn >= weight.items:
        return 0.0
    items = float(weight.items)
    if weight.squares > 0:
        effective = weight.total**2 / weight.squares
    else:
        effective = 1.0  # any number will do: no item has a weight, so `total` and the result are 0
    return float(weight.total * (1.0 - drawn / items) ** (items / effective))


def share_out(weights: Sequence[Weight], rows: int, *, distinct: bool, rng: np.random.Generator) -> list[int]:
    """Computes the number of rows that each shard gives, in the order of `weights`, at most `rows` together.

    The sum is less than `rows` only if the shards cannot give more.
    """
    counts = [0] * len(weights)
    rows_left = [most_rows(weight, distinct) for weight in weights]  # the rows that each shard can still give
    while missing := rows - sum(counts):
        at_once: list[int] = []  # the rows that each shard gives if this step chooses it
        chances: list[float] = []  # the chance of each shard to be chosen, up to a common factor
        for weight, count, left in zip(weights, counts, rows_left, strict=True):
            step_rows = min(missing, left, _most_at_once(weight, missing))
            # The chance is in proportion to weight / (rows at once), as the head of this module explains.
            chance = _weight_left(weight, count, distinct) / step_rows if step_rows else 0.0
            at_once.append(step_rows)
            chances.append(chance)
        index = _random_index(chances, rng)
        if index is None:  # no shard can give more
            break
        counts[index] += at_once[index]
        rows_left[index] -= at_once[index]
    return counts


def _most_at_once(weight: Weight, missing: int) -> int:
    """The most rows that a shard gives in one step, if the batch lacks `missing` rows."""
    if weight.ordered:
        return missing
    return max(1, weight.items // AT_ONCE)


def _weight_left(weight: Weight, drawn: int, distinct: bool) -> float:
    """The weight of a shard after it has given `drawn` rows to this batch."""
    if distinct and drawn:
        return expected_rest(weight, drawn)
    return weight.total


def share_values(
    weights: Sequence[Weight], rows: int, *, distinct: bool, rng: np.random.Generator
) -> list[list[pb.ValueRows]]:
    """Computes how many rows of each value each shard gives, at most `rows` together, for a table that balances values.

    The result has a list for each shard, in the order of `weights`.
    """
    rows_left = [int(weight.samples) for weight in weights]  # the rows that each shard can still give
    weights_of_values, balance = _by_value(weights)
    total_balance = sum(balance.values())
    planned: list[list[pb.ValueRows]] = [[] for _ in weights]
    chosen = _choose_values(balance, weights_of_values, rows, distinct=distinct, rng=rng)
    for value, count in chosen.items():
        value_weights = weights_of_values[value]
        # The rows of the values before this one have used up a part of what each shard can give.
        for value_weight, samples in zip(value_weights, rows_left, strict=True):
            value_weight.samples = samples
        total = sum(value_weight.total for value_weight in value_weights)
        counts = share_out(value_weights, count, distinct=distinct, rng=rng)
        for shard, shard_count in enumerate(counts):  # `shard` is the index of the shard in `weights`
            if not shard_count:
                continue
            rows_left[shard] -= shard_count
            # The shard reports the probability of a row among its own rows of this value. The factor `share` turns this
            # probability into the probability among all rows of all shards.
            share = balance[value] / total_balance
            value_weight = value_weights[shard]
            if not value_weight.ordered:  # in a table with an order, the first row of a value has the probability 1
                share *= value_weight.total / total
            planned[shard].append(pb.ValueRows(value=value, rows=shard_count, share=share))
    return planned


def _by_value(weights: Sequence[Weight]) -> tuple[dict[str, list[Weight]], dict[str, float]]:
    """Returns two dicts by value: what each shard offers of the value, and the weight of the value in `balance`.

    The first dict has a Weight for each shard, in the order of `weights`. The table's `balance` is the same on all
    shards. Values are left out if no shard can give rows of them.
    """
    weights_of_values: dict[str, list[Weight]] = {}
    balance: dict[str, float] = {}
    for shard, weight in enumerate(weights):  # `shard` is the index of the shard
        if not weight.samples:
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
    return weights_of_values, balance


def _choose_values(
    balance: dict[str, float],
    weights_of_values: dict[str, list[Weight]],
    rows: int,
    *,
    distinct: bool,
    rng: np.random.Generator,
) -> Counter[str]:
    """Chooses the values of up to `rows` rows, one row after the other. Returns the number of rows of each value.

    The value of each row is random, in proportion to `balance`. `weights_of_values` says how many items have a value.
    With `distinct`, a value is not chosen more often than it has items.
    """
    chosen: Counter[str] = Counter()
    items = {value: sum(weight.items for weight in weights) for value, weights in weights_of_values.items()}
    # With `distinct`, a value leaves this list when all of its items are drawn. A choice among the remaining values has
    # the same distribution as choices among all values that are repeated until one of the remaining values is chosen.
    open_values = [value for value in weights_of_values if items[value]]
    for _ in range(rows):
        index = _random_index([balance[value] for value in open_values], rng)
        if index is None:  # no value is left, or all that are left have weight 0
            break
        value = open_values[index]
        chosen[value] += 1
        if distinct and chosen[value] == items[value]:
            open_values.remove(value)
    return chosen


def _random_index(chances: Sequence[float], rng: np.random.Generator) -> int | None:
    """Chooses an index at random, in proportion to `chances`. Returns None if all chances are 0 or there are none."""
    # Each chance is the length of an interval. The intervals lie end to end, from 0 on, and interval i ends at ends[i].
    # The result is the index of the interval in which a random point lies.
    ends = list(accumulate(chances))
    if not ends or ends[-1] <= 0:
        return None
    point = rng.random() * ends[-1]
    return bisect_right(ends[:-1], point)  # without the last end, the index is in range even if `point` is rounded up


def use_up(weight: Weight, count: int, values: Sequence[pb.ValueRows]) -> None:
    """Reduces `weight` by the `count` rows that its shard has just been asked for.

    This is an estimate, for a draw before the shard reports its weight anew. `values` says how many of the rows have
    which value, if the table balances values.
    """
    if weight.items:
        share_left = 1.0 - min(1.0, count / weight.items)
    else:
        share_left = 0.0
    weight.total *= share_left
    weight.squares *= share_left
    weight.items = max(0, weight.items - count)
    weight.samples = max(0, weight.samples - count)
    rows_by_value = {value_rows.value: value_rows.rows for value_rows in values}
    for offered in weight.values:
        offered.items = max(0, offered.items - rows_by_value.get(offered.value, 0))
