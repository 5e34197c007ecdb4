"""The merged distribution of several shards is that of one table."""

import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from replay_client.shards.sharing import expected_rest, rows_at_once, share_in_turn, share_out
from replay_protos import replay_pb2 as pb
from replay_server import TableConfig
from replay_server.tables.table import SampleRequest, Table

SHARDS, ITEMS = 4, 60


def make_table(sampler: str, seed: int, priorities: dict[int, float], **options) -> Table:
    config = TableConfig(name="t", sampler=sampler, seed=seed, **options)
    table = Table(config, time.monotonic, lambda columns, slots: columns.remove(slots))
    keys, values = list(priorities), np.array(list(priorities.values()))
    ones = np.ones(len(keys), dtype=np.int64)
    if keys:
        table.insert(keys, values, ones * 0, ones)
    return table


def message(table: Table, request: SampleRequest) -> pb.Weight:
    return pb.Weight(**vars(table.weigh(request)))


class Merged:
    """Draws merged batches as a client does, but without a network. The tables keep their items, so weights hold."""

    def __init__(self, tables: list[Table], rows: int, distinct: bool, rng: np.random.Generator) -> None:
        self.tables, self.rows, self.distinct, self.rng = tables, rows, distinct, rng
        self.weights = [message(table, SampleRequest(rows, rows, distinct)) for table in tables]
        self.rounds = 0

    def draw(self) -> list[int]:
        """The keys of a batch."""
        keys: list[int] = []
        weights = self.weights
        while len(keys) < self.rows:
            if keys:
                rest = SampleRequest(self.rows, 1, self.distinct, exclude=frozenset(keys))
                weights = [message(table, rest) for table in self.tables]
            rows = self.rows_of_round(weights, self.rows - len(keys))
            counts = share_out(weights, rows, distinct=self.distinct, rng=self.rng)
            exclude = frozenset(keys)
            for table, count in zip(self.tables, counts, strict=True):
                if count:
                    batch = table.draw(SampleRequest(count, count, self.distinct, exclude=exclude), count)
                    table.take(batch)
                    keys += batch.keys.tolist()
            self.rounds += 1
        return keys

    def rows_of_round(self, weights: list[pb.Weight], rows: int) -> int:
        """How many of `rows` rows the next round draws."""
        return rows_at_once(weights, rows) if self.distinct else rows


def split(priorities: dict[int, float]) -> list[dict[int, float]]:
    """Unevenly: the shards have 6, 12, 18 and 24 of 60 items, and the heavy ones are on the first."""
    ends = [0, 6, 18, 36, 60]
    rows = sorted(priorities.items(), key=lambda item: -item[1])
    return [dict(rows[begin:end]) for begin, end in pairwise(ends)]


def chi_square(merged: Counter[int], single: Counter[int], draws: int) -> float:
    """Of two samples of `draws` draws each. Draws without replacement vary less, so it is at most this large."""
    return sum((merged[key] - single[key]) ** 2 / (merged[key] + single[key]) for key in merged | single)


LIMIT = 99.6
"""The 0.1 % quantile of chi-square with 59 degrees of freedom, from above."""


@pytest.mark.parametrize("sampler", ["prioritized", "uniform"])
@pytest.mark.parametrize(("rows", "distinct"), [(1, True), (20, True), (20, False)])
def test_a_hundred_thousand_draws_over_four_shards_are_those_of_one_table(sampler, rows, distinct):
    rng = np.random.default_rng(7)
    priorities = {key: float(weight) for key, weight in enumerate(rng.exponential(size=ITEMS) + 0.05, start=1)}
    shards = [make_table(sampler, seed, part) for seed, part in enumerate(split(priorities))]
    draws = 100_000 if rows > 1 else 10_000
    over_shards = Merged(shards, rows, distinct, rng)
    over_one = Merged([make_table(sampler, 11, priorities)], rows, distinct, rng)
    merged = Counter(key for _ in range(draws // rows) for key in over_shards.draw())
    single = Counter(key for _ in range(draws // rows) for key in over_one.draw())
    assert chi_square(merged, single, draws) < LIMIT


HEAVY_TAILS = {
    "one item has half of the weight": [59.0, *[1.0] * 59],
    "one item has nearly all": [1e9, *[1.0] * 59],
    "Zipf": [1 / rank for rank in range(1, 61)],
}


@pytest.mark.parametrize("rows", [8, 20])
@pytest.mark.parametrize("weights", HEAVY_TAILS.values(), ids=HEAVY_TAILS)
def test_distinct_batches_are_those_of_one_table_where_priorities_are_heavy_tailed(weights, rows):
    priorities = dict(enumerate(weights, start=1))
    parts = [{key: weight for key, weight in priorities.items() if key % 3 == shard} for shard in range(3)]
    rng = np.random.default_rng(17)
    over_shards = Merged([make_table("prioritized", seed, part) for seed, part in enumerate(parts)], rows, True, rng)
    over_one = Merged([make_table("prioritized", 11, priorities)], rows, True, rng)
    batches = 400
    merged = Counter(key for _ in range(batches) for key in over_shards.draw())
    single = Counter(key for _ in range(batches) for key in over_one.draw())
    assert chi_square(merged, single, batches * rows) < LIMIT
    assert over_one.rounds == batches  # one table shares nothing out


def test_what_is_drawn_at_once_depends_on_the_spread_of_weights_and_not_on_their_size():
    equal = [pb.Weight(total=30.0, squares=90.0, items=10), pb.Weight(total=5.0, squares=5.0, items=5)]
    assert rows_at_once(equal, 15) == 15
    half = pb.Weight(total=20.0, squares=110.0, items=11)
    assert rows_at_once([half, *equal], 15) < 8
    assert rows_at_once([half], 11) == 11  # nothing to share out
    alike = [pb.Weight(total=1000.0, squares=2000.0, items=1000)] * 4  # as of exponentially distributed weights
    assert rows_at_once(alike, 64) == 64


def test_the_share_of_a_shard_is_right_even_where_a_batch_takes_half_of_the_weight():
    rng = np.random.default_rng(3)
    priorities = {1: 8.0, 2: 8.0, **dict.fromkeys(range(3, 23), 1.0)}
    shards = [
        make_table("prioritized", 1, {1: 8.0, 2: 8.0}),
        make_table("prioritized", 2, dict.fromkeys(range(3, 23), 1.0)),
    ]
    batches, rows = 4000, 8
    over_shards = Merged(shards, rows, True, rng)
    over_one = Merged([make_table("prioritized", 5, priorities)], rows, True, rng)
    merged = sum(key <= 2 for _ in range(batches) for key in over_shards.draw())
    single = sum(key <= 2 for _ in range(batches) for key in over_one.draw())
    plain = sum(np.minimum(rng.multinomial(rows, [16 / 36, 20 / 36])[0], 2) for _ in range(batches))
    assert merged == pytest.approx(single, rel=0.02)
    assert plain != pytest.approx(single, rel=0.02)  # without the rule the heavy shard would get too much


def test_what_is_left_is_exact_for_equal_weights_and_0_when_all_is_drawn():
    equal = pb.Weight(total=50.0, squares=250.0, items=10, samples=99)
    assert [expected_rest(equal, drawn) for drawn in (0, 4, 9, 10)] == pytest.approx([50.0, 30.0, 5.0, 0.0])
    skewed = pb.Weight(total=10.0, squares=9.0**2 + 1.0, items=2, samples=99)
    assert expected_rest(skewed, 1) < 5.0
    assert expected_rest(skewed, 2) == 0.0


def test_weights_leave_out_what_the_request_leaves_out_and_say_what_may_be_drawn():
    table = make_table("prioritized", 0, {1: 1.0, 2: 2.0, 3: 0.0}, rate_limiter={"type": "min_size", "min_size": 2})
    assert table.weigh(SampleRequest(1, 1, exclude=frozenset([2]))).total == pytest.approx(1.0)
    heavy = make_table("prioritized", 0, {1: 1e20, 2: 2.0, 3: 1.0})
    assert heavy.weigh(SampleRequest(1, 1, exclude=frozenset([1]))).total == 3.0
    found = table.weigh(SampleRequest(1, 1))
    assert (found.total, found.squares, found.items, found.size) == (pytest.approx(3.0), pytest.approx(5.0), 2, 3)
    assert found.samples > 100
    assert not found.reason
    empty = make_table("fifo", 0, {}).weigh(SampleRequest(1, 1))
    assert (empty.total, empty.items, empty.ordered) == (0.0, 0, True)
    assert empty.reason


def test_aged_weights_of_two_tables_compare_whatever_their_newest_items_are():
    sampler = {"type": "prioritized", "half_life": 2.0}
    tables = []
    for versions in ([4], [4, 100]):
        table = make_table(sampler, 0, {})  # type: ignore[arg-type]
        table.set_policy_version(100)
        keys, ones = list(range(1, len(versions) + 1)), np.ones(len(versions))
        table.insert(keys, ones, np.array(versions), np.ones(len(versions), dtype=np.int64))
        tables.append(table)
    old, both = (table.weigh(SampleRequest(1, 1)) for table in tables)
    assert old.total == pytest.approx(2.0**-48)
    assert both.total == pytest.approx(1.0)


def make_queues(*sizes: int) -> list[pb.Weight]:
    tables = [
        make_table("fifo", 0, dict.fromkeys(range(100 * number + 1, 100 * number + 1 + size), 1.0))
        for number, size in enumerate(sizes)
    ]
    return [message(table, SampleRequest(1, 1)) for table in tables]


@pytest.mark.parametrize(
    ("rows", "first", "counts"), [(4, 0, [2, 0, 2]), (3, 2, [1, 0, 2]), (9, 1, [5, 0, 2])], ids=str
)
def test_queues_give_in_turn_and_those_with_nothing_are_passed_over(rows, first, counts):
    weights = make_queues(5, 0, 2)
    assert share_in_turn(weights, rows, distinct=True, first=first, ahead=1)[0] == counts


@pytest.mark.parametrize(("ahead", "shards_of_a_batch"), [(1, 4), (2, 2), (4, 1), (9, 1)])
def test_batches_that_are_drawn_ahead_ask_fewer_queues_each_and_all_alike_together(ahead, shards_of_a_batch):
    weights, turn, given = make_queues(99, 99, 99, 99), 3, np.zeros(4, dtype=int)
    for _ in range(4):
        counts, turn = share_in_turn(weights, 8, distinct=True, first=turn, ahead=ahead)
        assert sum(count > 0 for count in counts) == shards_of_a_batch
        given += counts
    assert given.tolist() == [8] * 4


def test_a_queue_whose_run_was_cut_short_is_first_in_the_next_batch():
    weights, turn, given = make_queues(99, 99, 99), 0, np.zeros(3, dtype=int)
    for _ in range(3):
        counts, turn = share_in_turn(weights, 10, distinct=True, first=turn, ahead=1)
        given += counts
    assert given.tolist() == [10] * 3


def test_a_rate_limiter_bounds_what_its_shard_gives():
    rng = np.random.default_rng(0)
    weights = [
        pb.Weight(total=100.0, squares=100.0, items=100, samples=2),
        pb.Weight(total=1.0, squares=1.0, items=9, samples=9),
    ]
    assert share_out(weights, 8, distinct=True, rng=rng) == [2, 6]
