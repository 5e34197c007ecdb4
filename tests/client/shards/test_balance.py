"""Balanced draws over several shards: the shares are those of one table, however the values are spread.

Seeds are fixed where there are no processes, and each bound lets chance alone fail less than once in a million runs.
"""

import time
from collections import Counter

import numpy as np
import pytest

from replay_client import ReplayClient
from replay_client.shards.balance import BalancedBatch
from replay_protos import replay_pb2 as pb
from replay_protos.labels import labels_of
from replay_server import ReplayServer, TableConfig
from replay_server.tables.selecting.balance import ValueRows
from replay_server.tables.table import SampleRequest, Table
from tests.factories import make_group

WEIGHTS = {"math": 3.0, "code": 2.0, "law": 1.0}
SPREAD = [{"math": 4}, {"math": 30, "code": 25}, {"law": 3, "code": 1}]
"""Items of each value on each of three shards: `law` lives on one alone, and is soon used up."""
Z_LIMIT = 5.0


def make_table(items: dict[str, int], first_key: int, sampler: str, weights: dict[str, float] | None = None, **options):
    balance = {"tag": "environment", "weights": WEIGHTS if weights is None else weights}
    config = TableConfig(name="t", sampler=sampler, seed=first_key, balance=balance, **options)
    table = Table(config, time.monotonic, lambda columns, slots: columns.remove(slots))
    labels = [labels_of([], {"environment": value}) for value, n in items.items() for _ in range(n)]
    keys = list(range(first_key, first_key + len(labels)))
    ones = np.ones(len(keys), dtype=np.int64)
    if keys:
        table.insert(keys, 1.0 + np.array(keys) % 5, ones * 0, ones, labels)
    return table


class Merged:
    """Draws merged batches as a client does, but without a network. A key stands for its sample."""

    def __init__(self, tables: list[Table], rows: int, distinct: bool, seed: int) -> None:
        self.tables, self.rows, self.distinct = tables, rows, distinct
        self.rng = np.random.default_rng(seed)
        self.rounds = 0
        self.probabilities: dict[int, float] = {}
        self.value = {
            key: tag.values[tag.codes[slot]]
            for table in tables
            for tag in table.columns.tags.values()
            for key, slot in zip(table.columns.key.tolist(), range(table.columns.key.size), strict=True)
            if tag.codes[slot]
        }

    def weights(self, without: list[int]) -> list[pb.Weight]:
        request = SampleRequest(self.rows, 1, self.distinct, exclude=frozenset(without if self.distinct else ()))
        told = [vars(table.weigh(request)) for table in self.tables]
        return [pb.Weight(**each | {"values": [pb.ValueWeight(**vars(v)) for v in each["values"]]}) for each in told]

    def draw(self) -> list[int]:
        weights = self.weights([])
        batch = BalancedBatch(weights, self.rows, distinct=self.distinct, first=self.rounds, rng=self.rng)
        while not batch.is_complete:
            answers = []
            for table, part in zip(self.tables, batch.next_round(weights), strict=True):
                values = tuple(ValueRows(each.value, each.rows, each.share) for each in part)
                exclude = frozenset(batch.rows() if self.distinct else ())
                n = sum(each.rows for each in values)
                request = SampleRequest(n, n, self.distinct, exclude=exclude, values=values)
                answers.append([])
                if n:
                    drawn = table.draw(request, n)
                    table.take(drawn)
                    answers[-1] = drawn.keys.tolist()
                    self.probabilities |= zip(drawn.keys.tolist(), drawn.probabilities.tolist(), strict=True)
            batch.add(answers)
            weights = self.weights(batch.rows())
            self.rounds += 1
        return batch.rows()


def spread(sampler: str, **options) -> list[Table]:
    return [make_table(items, 1 + 100 * shard, sampler, **options) for shard, items in enumerate(SPREAD)]


def together(sampler: str) -> Table:
    """The items of all shards in one table, under the same keys and with the same priorities."""
    whole = make_table({}, 7, sampler)
    for part in spread(sampler):
        slots = part.columns.used()
        tag = part.columns.tags["environment"]
        labels = [labels_of([], {"environment": tag.values[code]}) for code in tag.codes[slots]]
        ones = np.ones(slots.size, dtype=np.int64)
        whole.insert(part.columns.key[slots].tolist(), part.columns.priority[slots], ones * 0, ones, labels)
    return whole


def z_score(counts: dict, expected: dict[object, float], variance: float = 1.0) -> float:
    """Of the chi-square statistic, by Wilson and Hilferty; `variance`: of a count, in units of its expectation."""
    degrees = len(expected) - 1
    statistic = sum((counts.get(key, 0) - mean) ** 2 / (variance * mean) for key, mean in expected.items())
    return ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))


@pytest.mark.parametrize("sampler", ["uniform", "prioritized", "fifo", "max_heap"])
@pytest.mark.parametrize(("rows", "distinct"), [(1, True), (9, False)], ids=["one row", "repeats"])
def test_the_shares_of_values_are_those_of_their_weights(sampler, rows, distinct):
    merged = Merged(spread(sampler), rows, distinct, seed=3)
    draws = 1_000 if rows == 1 else 6_000
    counts = Counter(merged.value[key] for _ in range(draws // rows) for key in merged.draw())
    total = sum(WEIGHTS.values())
    done = draws // rows * rows
    assert z_score(counts, {value: done * weight / total for value, weight in WEIGHTS.items()}) < Z_LIMIT


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
@pytest.mark.parametrize("rows", [3, 12])
def test_items_are_drawn_as_often_as_from_one_table(sampler, rows):
    """12 rows use up `law` in most batches, and its share then goes to the others."""
    batches = 3_600 // rows
    over_shards, over_one = Merged(spread(sampler), rows, True, seed=4), Merged([together(sampler)], rows, True, seed=5)
    merged = Counter(key for _ in range(batches) for key in over_shards.draw())
    single = Counter(key for _ in range(batches) for key in over_one.draw())
    # Half of both counts together is the estimate of what each expects. Draws without replacement vary less.
    expected = {key: (merged[key] + single[key]) / 2 for key in merged | single}
    assert len(expected) == 63
    assert z_score(merged, expected, variance=0.5) < Z_LIMIT
    law = sum(count for key, count in merged.items() if over_shards.value[key] == "law")
    assert law > batches * rows * 0.9 * min(1 / 6, 3 / rows)


@pytest.mark.parametrize("sampler", ["uniform", "prioritized", "fifo"])
def test_probabilities_are_those_of_one_table(sampler):
    over_shards, whole = Merged(spread(sampler), 63, True, seed=6), together(sampler)
    assert sorted(over_shards.draw()) == sorted(over_shards.value)
    batch = whole.draw(SampleRequest(63, 63), 63)
    single = dict(zip(batch.keys.tolist(), batch.probabilities.tolist(), strict=True))
    if sampler == "fifo":  # the first of each value on each shard is certain there
        assert sum(probability > 0 for probability in over_shards.probabilities.values()) == 5
        single = {key: probability for key, probability in single.items() if probability}
    assert {key: over_shards.probabilities[key] for key in single} == pytest.approx(single)


def test_heavy_tails_within_a_value_are_drawn_in_several_rounds_and_shares_stay():
    tables = spread("prioritized")
    for table in tables:
        slots = table.columns.used()
        heavy = 10.0 ** (np.arange(slots.size) % 7)
        table.update_priorities(table.columns.key[slots], heavy)
    merged = Merged(tables, 8, True, seed=8)
    batches = 400
    first = Counter(merged.value[merged.draw()[0]] for _ in range(batches))
    assert merged.rounds > batches
    total = sum(WEIGHTS.values())
    assert z_score(first, {value: batches * weight / total for value, weight in WEIGHTS.items()}) < Z_LIMIT


def test_an_order_holds_within_each_value_of_each_shard():
    merged = Merged(spread("fifo"), 40, True, seed=1)
    keys = merged.draw()
    for shard, items in enumerate(SPREAD):
        for value in items:
            drawn = [key for key in keys if key // 100 == shard and merged.value[key] == value]
            there = sorted(key for key, of in merged.value.items() if key // 100 == shard and of == value)
            assert drawn == there[: len(drawn)]


def test_a_shard_whose_rate_limiter_allows_nothing_gives_nothing_and_its_values_go_to_the_others():
    waits = make_table({"law": 3, "math": 1}, 300, "uniform", rate_limiter={"type": "min_size", "min_size": 9})
    merged = Merged([*spread("uniform")[:2], waits], 30, True, seed=1)
    assert Counter(merged.value[key] for key in merged.draw()).keys() == {"math", "code"}


def test_a_shard_that_gives_less_leaves_the_batch_incomplete_and_no_row_is_forgotten():
    merged = Merged(spread("uniform"), 20, True, seed=2)
    weights = merged.weights([])
    batch = BalancedBatch(weights, 20, distinct=True, first=0, rng=np.random.default_rng(0))
    parts = batch.next_round(weights)
    answers = [list(range(1000 * shard, 1000 * shard + sum(v.rows for v in part))) for shard, part in enumerate(parts)]
    answers[1].pop()
    assert batch.add(answers) == 19
    assert not batch.is_complete
    assert sorted(batch.rows()) == sorted(key for answer in answers for key in answer)


# ---------------------------------------------------------------------------------------------------- real servers


@pytest.fixture(scope="module")
def servers():
    """Three servers with the items of SPREAD."""
    config = TableConfig(name="pool", sampler="prioritized", balance={"tag": "environment", "weights": WEIGHTS})
    started = [ReplayServer([config], 0) for _ in SPREAD]
    for server, items in zip(started, SPREAD, strict=True):
        server.start()
        with ReplayClient(server.address, timeout=30.0) as client:
            for value, n in items.items():
                for row in range(n):
                    client.insert(make_group(), {"pool": 1.0 + row}, tags={"environment": value})
    yield started
    for server in started:
        server.stop(grace=0)


@pytest.mark.parametrize("shards", [[0, 1, 2], [1, 2]], ids=["three servers", "two of them"])
def test_batches_of_real_servers_have_the_shares_of_the_weights(servers, shards):
    batches, rows = 250, 8
    with ReplayClient([servers[shard].address for shard in shards], timeout=30.0) as client:
        drawn = [client.sample("pool", rows, distinct=False) for _ in range(batches)]
        everything = client.sample("pool", sum(sum(SPREAD[shard].values()) for shard in shards))
        info = client.server_info().tables["pool"]
    counts = Counter(sample.info.tags["environment"] for batch in drawn for sample in batch)
    total = sum(WEIGHTS.values())
    assert z_score(counts, {value: batches * rows * weight / total for value, weight in WEIGHTS.items()}) < Z_LIMIT
    # As drawn, 5 standard deviations: the places of a batch are alike.
    first = Counter(batch[0].info.tags["environment"] for batch in drawn)
    assert z_score(first, {value: batches * weight / total for value, weight in WEIGHTS.items()}) < Z_LIMIT
    assert len({sample.info.key for sample in everything}) == len(everything)
    assert sum(sample.info.probability for sample in everything) == pytest.approx(1.0)
    items = Counter()
    for shard in shards:
        items.update(SPREAD[shard])
    assert {value.name: (value.items, value.weight) for value in info.values} == {
        value: (items[value], weight) for value, weight in WEIGHTS.items()
    }


@pytest.mark.parametrize("sampler", ["prioritized", "fifo"])
def test_a_balanced_table_whose_items_are_used_up_gives_each_of_them_once(sampler):
    config = TableConfig(name="pool", sampler=sampler, balance={"tag": "environment"}, max_times_sampled=1)
    spread_over = [{"math": 20, "code": 3}, {"code": 40}]
    with ReplayServer([config], 0) as one, ReplayServer([config], 0) as other:
        inserted = set()
        for server, items in zip((one, other), spread_over, strict=True):
            with ReplayClient(server.address, timeout=30.0) as client:
                for value, n in items.items():
                    inserted |= {client.insert(b"x", {"pool": 1.0}, tags={"environment": value}) for _ in range(n)}
        drawn = []
        with ReplayClient([one.address, other.address], timeout=30.0) as client, client.sampler("pool", 7) as batches:
            for _ in range(len(inserted) // 7):
                drawn.append(next(batches))
        keys = [sample.info.key for batch in drawn for sample in batch]
        assert sorted(keys) == sorted(inserted)
        # Both values are drawn alike at first: 30 draws are all code once in 10^9 runs.
        values = [sample.info.tags["environment"] for batch in drawn for sample in batch]
        assert values.index("math") < 30


def test_a_table_that_balances_no_more_answers_a_draw_that_does_not_know_it_yet():
    config = TableConfig(name="pool", balance={"tag": "environment"})
    with ReplayServer([config], 0) as one, ReplayServer([config], 0) as other:
        for server in (one, other):
            with ReplayClient(server.address, timeout=30.0) as client:
                client.insert(b"x", {"pool": 1.0}, tags={"environment": "math"})
        with ReplayClient([one.address, other.address], timeout=30.0) as client:
            client.sample("pool", 2)
            client.update_table("pool", balance=None)
            assert len(client.sample("pool", 2, timeout=20.0)) == 2
            client.update_table("pool", balance={"tag": "environment"})
            assert len(client.sample("pool", 2, timeout=20.0)) == 2
