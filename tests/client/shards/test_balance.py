"""Balanced draws over several real servers: the shares are those of one table, however the values are spread."""

from collections import Counter

import pytest

from replay_client import ReplayClient
from replay_client.testing import make_group
from replay_server import ReplayServer, TableConfig
from tests.client.shards.test_sharing import SPREAD, WEIGHTS, Z_LIMIT, z_score


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
