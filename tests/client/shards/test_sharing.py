"""How many rows each shard gives of a batch: in expectation its share, so that batches are like those of one table.

Seeds are fixed, and each bound lets chance alone fail less than once in a million runs.
"""

import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from replay_client.shards.sharing import AT_ONCE, Weight, expected_rest, share_out, share_values
from replay_protos import replay_pb2 as pb
from replay_protos.labels import labels_of
from replay_server import TableConfig
from replay_server.tables.balance import ValueRows
from replay_server.tables.table import SampleRequest, Table
from tests.kit.tables import insert_rows, remove_rows

SIZES = (8, 64, 128, 192, 256)
"""Items of each shard. The heavy ones are on the first ones."""
Z_LIMIT = 5.0


def make_table(sampler: str, seed: int, priorities: dict[int, float], **options) -> Table:
    config = TableConfig(name="t", sampler=sampler, seed=seed, **options)
    table = Table(config, time.monotonic, remove_rows, lambda keys: None)
    if priorities:
        insert_rows(table, priorities)
    return table


def message(table: Table, request: SampleRequest) -> pb.Weight:
    return pb.Weight(**table.weigh(request))


class Merged:
    """Fills batches from shard after shard as a client does, but without a network. The tables keep their items."""

    def __init__(self, tables: list[Table], rows: int, distinct: bool, seed: int = 7) -> None:
        self.tables, self.rows, self.distinct = tables, rows, distinct
        self.rng = np.random.default_rng(seed)
        self.weights = [message(table, SampleRequest(rows, rows, distinct)) for table in tables]
        self.asked = 0
        """Shards that were asked."""
        self.probabilities: dict[int, float] = {}

    def draw(self) -> list[int]:
        """The keys of a batch."""
        keys: list[int] = []
        if self.weights[0].values:
            values = share_values(self.weights, self.rows, distinct=self.distinct, rng=self.rng)
            counts = [sum(each.rows for each in part) for part in values]
        else:
            counts = share_out(self.weights, self.rows, distinct=self.distinct, rng=self.rng)
            values = [[] for _ in counts]
        for table, count, part in zip(self.tables, counts, values, strict=True):
            if count:
                of_value = tuple(ValueRows(each.value, each.rows, each.share) for each in part)
                batch = table.draw(SampleRequest(count, count, self.distinct, values=of_value), count)
                table.acknowledge(batch)
                keys += batch.keys.tolist()
                self.probabilities |= zip(batch.keys.tolist(), batch.probabilities.tolist(), strict=True)
                self.asked += 1
        return keys


def split(priorities: dict[int, float]) -> list[dict[int, float]]:
    """Unevenly, the heavy ones first."""
    ends = np.cumsum([0, *SIZES]).tolist()
    rows = sorted(priorities.items(), key=lambda item: -item[1])
    return [dict(rows[begin:end]) for begin, end in pairwise(ends)]


def z_score(counts: dict, expected: dict, variance: float = 1.0, degrees: int = 0) -> float:
    """Of the chi-square statistic, by Wilson and Hilferty; `variance`: of a count, in units of its expectation."""
    degrees = degrees or len(expected) - 1
    statistic = sum((counts.get(key, 0) - mean) ** 2 / (variance * mean) for key, mean in expected.items())
    return ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))


def z_of_two(merged: Counter, single: Counter) -> float:
    """Of two samples of as many draws each. Half of both counts together is the estimate of what each expects."""
    return z_score(merged, {key: (merged[key] + single[key]) / 2 for key in merged | single}, variance=0.5)


@pytest.mark.parametrize("draws", [8_000, pytest.param(100_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("sampler", ["prioritized", "uniform"])
@pytest.mark.parametrize(("rows", "distinct"), [(1, True), (8, True), (8, False), (24, False)])
def test_draws_over_unequal_shards_are_those_of_one_table(sampler, rows, distinct, draws):
    """8 rows are an eighth of the second shard, and all that the first has: it gives one at once."""
    weights = np.random.default_rng(7).exponential(size=sum(SIZES)) + 0.05
    priorities = {key: float(weight) for key, weight in enumerate(weights, start=1)}
    shards = Merged([make_table(sampler, seed, part) for seed, part in enumerate(split(priorities))], rows, distinct)
    one = Merged([make_table(sampler, 11, priorities)], rows, distinct)
    batches = draws // rows
    merged, single = (Counter(key for _ in range(batches) for key in side.draw()) for side in (shards, one))
    assert merged.total() == single.total() == batches * rows
    assert z_of_two(merged, single) < Z_LIMIT


@pytest.mark.parametrize("rows", [1, 5, 48])
def test_a_shard_gives_its_share_of_rows_whatever_the_sizes_of_shards_are(rows):
    weights = [Weight(total=w, squares=1.0, items=n, samples=999) for w, n in ((3.0, 1), (1.0, 40), (4.0, 900))]
    rng, batches = np.random.default_rng(1), 8_000
    given = sum(np.array(share_out(weights, rows, distinct=False, rng=rng)) for _ in range(batches)) / (batches * rows)
    # A batch has a binomial number of rows of a shard, or up to `rows` times its variance. Five standard deviations.
    assert given == pytest.approx([3 / 8, 1 / 8, 4 / 8], abs=5 * 0.5 / np.sqrt(batches))


def test_a_pool_gives_all_rows_of_a_batch_up_to_an_eighth_of_its_items_and_else_an_eighth_at_once():
    rng = np.random.default_rng(2)
    large = [Weight(total=90.0, squares=90.0, items=90, samples=99)] * 4
    for _ in range(100):
        assert sorted(share_out(large, 90 // AT_ONCE, distinct=True, rng=rng)) == [0, 0, 0, 11]
    asked = [sum(map(bool, share_out(large, 44, distinct=True, rng=rng))) for _ in range(100)]
    assert 2 < np.mean(asked) <= 4


def test_a_queue_gives_what_is_there_and_the_next_one_gives_the_rest():
    rng = np.random.default_rng(3)
    queues = [Weight(total=20.0, squares=20.0, items=20, samples=20, ordered=True) for _ in range(3)]
    for rows, counts in ((20, [0, 0, 20]), (48, [8, 20, 20]), (60, [20, 20, 20]), (64, [20, 20, 20])):
        assert sorted(share_out(queues, rows, distinct=True, rng=rng)) == counts
    queues[1] = Weight()
    assert share_out(queues, 40, distinct=True, rng=rng) == [20, 0, 20]


def test_what_is_left_is_exact_for_equal_weights_and_0_when_all_is_drawn():
    equal = pb.Weight(total=50.0, squares=250.0, items=10, samples=99)
    assert [expected_rest(equal, drawn) for drawn in (0, 4, 9, 10)] == pytest.approx([50.0, 30.0, 5.0, 0.0])
    skewed = pb.Weight(total=10.0, squares=9.0**2 + 1.0, items=2, samples=99)
    assert expected_rest(skewed, 1) < 5.0
    assert expected_rest(skewed, 2) == 0.0


def test_weights_leave_out_what_the_request_leaves_out_and_say_what_may_be_drawn():
    table = make_table("prioritized", 0, {1: 1.0, 2: 2.0, 3: 0.0}, rate_limiter={"type": "min_size", "min_size": 2})
    assert message(table, SampleRequest(1, 1, exclude=frozenset([2]))).total == pytest.approx(1.0)
    heavy = make_table("prioritized", 0, {1: 1e20, 2: 2.0, 3: 1.0})
    assert message(heavy, SampleRequest(1, 1, exclude=frozenset([1]))).total == 3.0
    found = message(table, SampleRequest(1, 1))
    assert found.total == pytest.approx(3.0)
    assert found.squares == pytest.approx(5.0)
    assert found.items == 2
    assert found.size == 3
    assert found.samples > 100
    assert not found.reason
    empty = message(make_table("fifo", 0, {}), SampleRequest(1, 1))
    assert empty.total == 0.0
    assert empty.items == 0
    assert empty.ordered
    assert empty.reason


def test_aged_weights_of_two_tables_compare_whatever_their_newest_items_are():
    sampler = {"type": "prioritized", "half_life": 2.0}
    tables = []
    for versions in ([4], [4, 100]):
        table = make_table(sampler, 0, {})  # type: ignore[arg-type]
        table.set_policy_version(100)
        insert_rows(table, dict.fromkeys(range(1, len(versions) + 1), 1.0), versions)
        tables.append(table)
    old, both = (message(table, SampleRequest(1, 1)) for table in tables)
    assert old.total == pytest.approx(2.0**-48)
    assert both.total == pytest.approx(1.0)


def test_a_rate_limiter_bounds_what_its_shard_gives():
    rng = np.random.default_rng(0)
    weights = [
        pb.Weight(total=100.0, squares=100.0, items=100, samples=2),
        pb.Weight(total=1.0, squares=1.0, items=9, samples=9),
    ]
    assert share_out(weights, 8, distinct=True, rng=rng) == [2, 6]


# ------------------------------------------------------------------------------------------------------------ balance

WEIGHTS = {"math": 3.0, "code": 2.0, "law": 1.0}
SPREAD = [{"math": 4}, {"math": 30, "code": 25}, {"law": 3, "code": 1}]
"""Items of each value on each of three shards: `law` lives on one alone, and is soon used up."""


def make_balanced(items: dict[str, int], first_key: int, sampler: str, **options) -> Table:
    labels = [labels_of([], {"environment": value}) for value, n in items.items() for _ in range(n)]
    table = make_table(sampler, first_key, {}, balance={"tag": "environment", "weights": WEIGHTS}, **options)
    insert_rows(table, {key: 1.0 + key % 5 for key in range(first_key, first_key + len(labels))}, labels=labels)
    return table


def spread(sampler: str, **options) -> list[Table]:
    return [make_balanced(items, 1 + 100 * shard, sampler, **options) for shard, items in enumerate(SPREAD)]


VALUE = {
    1 + 100 * shard + row: value
    for shard, items in enumerate(SPREAD)
    for row, value in enumerate(value for value, n in items.items() for _ in range(n))
}
"""Of each key."""


def together(sampler: str) -> Table:
    """The items of all shards in one table, under the same keys and with the same priorities."""
    whole = make_table(sampler, 7, {}, balance={"tag": "environment", "weights": WEIGHTS})
    for key, value in VALUE.items():
        insert_rows(whole, {key: 1.0 + key % 5}, labels=[labels_of([], {"environment": value})])
    return whole


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
@pytest.mark.parametrize("rows", [3, 12])
def test_items_of_a_balanced_table_are_drawn_as_often_as_from_one_table(sampler, rows):
    """12 rows use up `law` in most batches, and its share then goes to the others."""
    batches = 3_600 // rows
    over_shards, over_one = Merged(spread(sampler), rows, True, seed=4), Merged([together(sampler)], rows, True, seed=5)
    merged = Counter(key for _ in range(batches) for key in over_shards.draw())
    single = Counter(key for _ in range(batches) for key in over_one.draw())
    assert len(merged | single) == 63
    assert z_of_two(merged, single) < Z_LIMIT
    law = sum(count for key, count in merged.items() if VALUE[key] == "law")
    assert law > batches * rows * 0.9 * min(1 / 6, 3 / rows)


@pytest.mark.parametrize("sampler", ["uniform", "prioritized", "fifo"])
def test_probabilities_of_a_balanced_table_are_those_of_one_table(sampler):
    over_shards, whole = Merged(spread(sampler), 63, True, seed=6), together(sampler)
    assert sorted(over_shards.draw()) == sorted(VALUE)
    batch = whole.draw(SampleRequest(63, 63), 63)
    single = dict(zip(batch.keys.tolist(), batch.probabilities.tolist(), strict=True))
    if sampler == "fifo":  # the first of each value on each shard is certain there
        assert sum(probability > 0 for probability in over_shards.probabilities.values()) == 5
        single = {key: probability for key, probability in single.items() if probability}
    assert {key: over_shards.probabilities[key] for key in single} == pytest.approx(single)


def test_a_shard_whose_rate_limiter_allows_nothing_gives_nothing_and_its_values_go_to_the_others():
    waits = make_balanced({"law": 3, "math": 1}, 300, "uniform", rate_limiter={"type": "min_size", "min_size": 9})
    keys = Merged([*spread("uniform")[:2], waits], 30, True, seed=1).draw()
    assert {VALUE[key] for key in keys} == {"math", "code"}
