"""Drawing: how many rows of a batch each shard gives, so that the merged batch is one of a single table.

* `uniform`: a shard is drawn in proportion to the items that it has left. This is exact.
* `prioritized`: in proportion to its total effective priority. This is exact for the first row, and for all rows of a
  batch that allows repeats. Each further distinct row is drawn from what the rows before have left. Which items those
  are only their shard knows, so the weight that is left is an expectation: see `expected_rest`.
* Every other sampler has an order of its own. The shards that have something give in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay_protos import replay_pb2 as pb

Weight = pb.Weight
"""What one shard could give, as replay.proto documents it."""


def most_rows(weight: Weight, distinct: bool) -> int:
    """How many rows the shard could give now."""
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


def share_out(
    weights: Sequence[Weight], rows: int, *, distinct: bool, first: int, rng: np.random.Generator
) -> list[int]:
    """How many rows each shard gives, at most `rows` together. Ordered samplers begin with shard `first`."""
    most = [most_rows(weight, distinct) for weight in weights]
    counts = [0] * len(weights)
    if any(weight.ordered for weight in weights):
        turn = first
        while rows and any(count < limit for count, limit in zip(counts, most, strict=True)):
            index = turn % len(weights)
            if counts[index] < most[index]:
                counts[index] += 1
                rows -= 1
            turn += 1
        return counts
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
