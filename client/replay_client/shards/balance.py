"""Balance over shards: a merged batch has the shares of values that one table would give it.

A shard alone cannot know them. It holds some of the values, and of each a part: a value that lives on one shard only
must come as often as its weight says, and not as often as that shard is asked. So the client chooses the values, as one
table does, and asks each shard for so many rows of each:

* Every shard tells the weight of each value that it has: the share that the table's `balance` gives it, and what its
  items weigh together. The first is the same everywhere, and the second is that of a table without balance.
* The value of each row is chosen by the shares, among those that some shard can still give. Nothing else decides this:
  neither the number of shards, nor how much of a value each of them has. So the shares are exactly those of one table,
  also where a batch uses up a value.
* Within a value the shards are what they are without balance, several parts of one table (`sampling.py`): each gives in
  proportion to what it has left of this value, or in turn. `rows_at_once` says how many rows of the value may be shared
  out before the shards weigh it again.
* Each shard draws so many rows of each value by its own sampler (`ValueRows`). The client puts them where the values
  stand in the batch.

If a shard gives less than it was asked for, because somebody else was faster, the whole batch goes back and is drawn
anew with new weights. Taking what came, and making up for the rest, would favour the values that are hard to exhaust.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from itertools import accumulate, islice

import numpy as np

from replay_client.records import Sample
from replay_client.shards.sharing import Weight, expected_rest, rows_at_once
from replay_protos import replay_pb2 as pb


class BalancedBatch:
    """A batch of a balanced table, while it is drawn from several shards in rounds."""

    def __init__(
        self, weights: Sequence[Weight], rows: int, *, distinct: bool, first: int, rng: np.random.Generator
    ) -> None:
        """`weights` are those of all shards before the first round. Ordered samplers begin with shard `first`."""
        self._distinct, self._first, self._rng = distinct, first, rng
        offers = Offers(weights, distinct, first, rng)
        self._shares, self._totals = offers.shares(), offers.totals()
        self._places = offers.choose(rows)
        """Of each row of the batch: its value, and the shard that gives it in the round that comes."""
        self._samples: list[Sample | None] = [None] * len(self._places)
        self._asked: list[list[pb.ValueRows]] = []
        """Of each shard in the last round."""
        self._others: list[Sample] = []
        """Rows of shards that gave less than they were asked for. Nobody knows which values they have."""

    @property
    def is_complete(self) -> bool:
        return None not in self._samples

    def rows(self) -> list[Sample]:
        """What came so far; of a complete batch all rows in their order."""
        return [sample for sample in self._samples if sample is not None] + self._others

    def next_round(self, weights: Sequence[Weight]) -> list[list[pb.ValueRows]]:
        """What to ask each shard for. `weights` are those of the shards now, without the rows that came before."""
        offers = Offers(weights, self._distinct, self._first, self._rng)
        missing = [row for row, sample in enumerate(self._samples) if sample is None]
        if len(missing) < len(self._samples):
            values = [self._places[row][0] for row in missing]
            for row, shard in zip(missing, offers.assign(values), strict=True):
                self._places[row] = self._places[row][0], shard
        most = {
            value: offers.rows_at_once(value, rows)
            for value, rows in Counter(self._places[row][0] for row in missing).items()
        }
        counts: list[Counter[str]] = [Counter() for _ in weights]
        for value, shard in (self._places[row] for row in missing):
            if most[value] and shard is not None:
                most[value] -= 1
                counts[shard][value] += 1
        self._asked = [
            [pb.ValueRows(value=value, rows=n, share=self._share(offers, value, shard)) for value, n in part.items()]
            for shard, part in enumerate(counts)
        ]
        return self._asked

    def _share(self, offers: Offers, value: str, shard: int) -> float:
        """What the shard multiplies the probability by that a row has among what the shard has left of the value."""
        return self._shares[value] * offers.part(value, shard, self._totals)

    def add(self, answers: Sequence[list[Sample]]) -> int:
        """Takes up what the shards gave in this round. Returns how many rows that are."""
        came: dict[tuple[str, int | None], deque[Sample]] = defaultdict(deque)
        for shard, (asked, samples) in enumerate(zip(self._asked, answers, strict=True)):
            if len(samples) < sum(each.rows for each in asked):
                self._others += samples
                continue
            rest = iter(samples)
            for each in asked:
                came[each.value, shard].extend(islice(rest, each.rows))
        for row, place in enumerate(self._places):
            if self._samples[row] is None and came[place]:
                self._samples[row] = came[place].popleft()
        return sum(map(len, answers))


class Offers:
    """What the shards have left of each value, while rows are shared out."""

    def __init__(self, weights: Sequence[Weight], distinct: bool, first: int, rng: np.random.Generator) -> None:
        self._distinct, self._first, self._rng = distinct, first, rng
        self._ordered = any(weight.ordered for weight in weights)
        self._parts: dict[str, list[Weight]] = {}
        """By value: the weight that each shard has in it, without its rate limiter."""
        self._weights: dict[str, float] = {}
        self._samples = [weight.samples for weight in weights]
        """How many samples the rate limiter of each shard allows."""
        for shard, weight in enumerate(weights):
            for each in weight.values:
                parts = self._parts.setdefault(each.value, [Weight() for _ in weights])
                parts[shard] = Weight(total=each.total, squares=each.squares, items=each.items)
                self._weights[each.value] = each.weight
        self._given: dict[str, list[int]] = {value: [0] * len(weights) for value in self._parts}
        self._rest = {value: [part.total for part in parts] for value, parts in self._parts.items()}

    def shares(self) -> dict[str, float]:
        """The probability of each value to be that of the next row."""
        alive = {value: weight for value, weight in self._weights.items() if self._open(value)}
        total = sum(alive.values())
        return {value: weight / total for value, weight in alive.items()}

    def totals(self) -> dict[str, float]:
        """What all items of each value weigh together."""
        return {value: sum(part.total for part in parts) for value, parts in self._parts.items()}

    def part(self, value: str, shard: int, totals: dict[str, float]) -> float:
        """The part of `totals` that a shard has in a value. 1 where items have an order: the first row is certain."""
        return 1.0 if self._ordered else self._parts[value][shard].total / totals[value]

    def rows_at_once(self, value: str, rows: int) -> int:
        """As the function of this name, for the rows of one value."""
        if self._ordered or not self._distinct or value not in self._parts:
            return rows
        return rows_at_once(self._parts[value], rows)

    def choose(self, rows: int) -> list[tuple[str, int | None]]:
        """The value and the shard of `rows` rows drawn one after the other; less, if the shards cannot give so many."""
        places: list[tuple[str, int | None]] = []
        values, ends = self._line()
        while values and len(places) < rows:
            # To draw a value that is used up again is to draw it from the others.
            value = values[min(bisect_right(ends, self._rng.random() * ends[-1]), len(values) - 1)]
            if (shard := self._take(value)) is None:
                values, ends = self._line()
            else:
                places.append((value, shard))
        return places

    def _line(self) -> tuple[list[str], list[float]]:
        """The values that can be chosen, and where their stretches of the cumulative sum of shares end."""
        shares = self.shares()
        return list(shares), list(accumulate(shares.values()))

    def assign(self, values: Sequence[str]) -> list[int | None]:
        """The shards that give rows of these values; None where none can."""
        return [self._take(value) for value in values]

    def _open(self, value: str) -> list[int]:
        """The shards that can give a row of `value`."""
        given, most = self._given.get(value, ()), self._parts.get(value, ())
        return [
            shard
            for shard, (count, part) in enumerate(zip(given, most, strict=True))
            if self._samples[shard] and part.items and not (self._distinct and count >= part.items)
        ]

    def _take(self, value: str) -> int | None:
        """The shard that gives the next row of `value`."""
        if not (shards := self._open(value)):
            return None
        given, rest = self._given[value], self._rest[value]
        if self._ordered:
            turn = self._first + sum(given)
            shard = min(shards, key=lambda index: (index - turn) % len(given))
        else:
            ends = list(accumulate(rest[index] for index in shards))
            shard = shards[min(bisect_right(ends, self._rng.random() * ends[-1]), len(shards) - 1)]
        given[shard] += 1
        self._samples[shard] -= 1
        if self._distinct:
            rest[shard] = expected_rest(self._parts[value][shard], given[shard])
        return shard
