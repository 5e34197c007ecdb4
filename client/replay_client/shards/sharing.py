"""Sharing: how many rows of a merged batch each shard gives. `sampling.py` says by which rules, and why.

A weight tells what one shard could be drawn for: the message Weight of replay.proto.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from replay_protos import replay_pb2 as pb

Weight = pb.Weight
"""The rows and the total priority that one shard offers to a draw, as replay.proto documents them."""

_AT_ONCE = 0.5
"""The part of its effective sample size that a shard may give in one round, where its weights have a spread of 1. With
half as much, batches are no closer to those of one table."""
_NO_SPREAD = 1e-9
"""Equal weights have less, by rounding."""


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
    if not drawn:
        return weight.total
    items, effective = float(weight.items), weight.total**2 / weight.squares if weight.squares > 0 else 1.0
    return float(weight.total * (1.0 - drawn / items) ** (items / effective))


def rows_at_once(weights: Sequence[Weight], rows: int) -> int:
    """How many of `rows` distinct rows to share out before the shards weigh again what is left; at least 1.

    `spread` stands for the variance of the weight that a row takes, in units of its squared mean. It is 0 where all
    weights are equal, and at most 1 or sqrt(effective) - 1, whatever the weights are. The larger it is, the smaller the
    part of its effective sample size that a shard may give at once.
    """
    giving = [weight for weight in weights if weight.items and weight.squares > 0]
    if len(giving) < 2:
        return rows
    total, most = sum(weight.total for weight in giving), float(rows)
    for weight in giving:
        effective = weight.total**2 / weight.squares
        spread = min(weight.items / effective - 1.0, max(1.0, math.sqrt(effective) - 1.0))
        if spread > _NO_SPREAD:
            most = min(most, _AT_ONCE * effective / math.sqrt(spread) * total / weight.total)
    return max(1, math.floor(most))


def share_in_turn(
    weights: Sequence[Weight], rows: int, *, distinct: bool, first: int, ahead: int
) -> tuple[list[int], int]:
    """How many rows each shard of ordered samplers gives, at most `rows` together, and which one is next.

    Beginning with shard `first`, each gives a run: its part of `ahead` batches of `rows` rows, at most a batch.
    """
    left = [most_rows(weight, distinct) for weight in weights]
    counts, turn = [0] * len(weights), first
    run = min(rows, math.ceil(rows * ahead / max(1, sum(limit > 0 for limit in left))))
    while rows and any(left):
        index = turn % len(weights)
        given = min(run, left[index], rows)
        counts[index] += given
        left[index] -= given
        rows -= given
        turn += given == run or not left[index]  # else the run was cut short, and goes on with the next batch
    return counts, turn


def share_out(weights: Sequence[Weight], rows: int, *, distinct: bool, rng: np.random.Generator) -> list[int]:
    """How many rows each shard gives by its weight, at most `rows` together."""
    most = [most_rows(weight, distinct) for weight in weights]
    counts = [0] * len(weights)
    rest = [weight.total if limit else 0.0 for weight, limit in zip(weights, most, strict=True)]
    for number in rng.random(rows).tolist():
        if (total := sum(rest)) <= 0:
            break
        target, index = number * total, 0
        while index < len(rest) - 1 and target >= rest[index]:
            target -= rest[index]
            index += 1
        if not rest[index]:  # rounding went past the last shard that has something
            index = max(range(len(rest)), key=rest.__getitem__)
        counts[index] += 1
        if counts[index] >= most[index]:
            rest[index] = 0.0
        elif distinct:
            rest[index] = expected_rest(weights[index], counts[index])
    return counts


def share_of_total(weights: Sequence[Weight], index: int) -> float:
    """The probability that the first row comes from this shard."""
    total = sum(weight.total for weight in weights)
    return weights[index].total / total if total > 0 else 0.0


def use_up(weight: Weight, count: int, values: Sequence[pb.ValueRows]) -> None:
    """The shard gives `count` rows, or so many of each value, and they will not be there for the next draw."""
    weight.items = max(0, weight.items - count)
    weight.samples = max(0, weight.samples - count)
    given = {each.value: each.rows for each in values}
    for each in weight.values:
        each.items = max(0, each.items - given.get(each.value, 0))
