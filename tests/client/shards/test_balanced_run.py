"""Balanced tables in server processes: two shards with unequal values, both killed in the middle of draws and back."""

from collections import Counter

import numpy as np
import pytest

from replay_client import ReplayClient
from replay_client.testing import until
from tests.kit.processes import Servers

CONFIG = """
server.data_dir = "{folder}"
tables = [
    { name = "rollouts", rate_limiter = { type = "queue", max_size = 512 }, forward_to = "replay" },
    { name = "replay", sampler = "prioritized", remover = "min_heap", index = ["level"], balance = BALANCE },
]
""".replace("BALANCE", '{ tag = "environment", weights = { math = 2.0, code = 1.0, broken = 0.0 } }')
ITEMS = [{"math": 3, "code": 40, "broken": 5}, {"code": 20, None: 8}]
"""Of each value on each server; None: without the tag."""
SHARES = {"math": 0.5, "code": 0.25, None: 0.25}


def check_shares(client):
    """2,000 draws: each count lies within 6 standard deviations, which chance misses once in 10^8 runs."""
    until(lambda: not client.server_info().gone)  # a server that does not answer yet gives nothing to a draw
    draws = 2000
    samples = [each for _ in range(5) for each in client.sample("replay", draws // 5, distinct=False)]
    counts = Counter(sample.info.tags.get("environment") for sample in samples)
    for value, share in SHARES.items():
        assert abs(counts[value] - draws * share) <= 6 * np.sqrt(draws * share * (1 - share)), counts
    assert sum(counts.values()) == draws


def test_shares_and_tags_outlive_the_kill_of_both_servers(tmp_path):
    with Servers(tmp_path, [CONFIG] * 2) as servers:
        keys = {}
        for address, items in zip(servers.addresses, ITEMS, strict=True):
            with ReplayClient(address, timeout=30.0) as client:
                for value, n in items.items():
                    for level in range(n):
                        tags = {"level": level} | ({} if value is None else {"environment": value})
                        keys[client.insert(b"x", {"rollouts": 1.0 + level}, tags=tags)] = tags
                client.sample("rollouts", sum(items.values()))  # forwards all of them to the pool
        with ReplayClient(servers.address, timeout=30.0) as client:
            check_shares(client)
            outstanding = client.sample("replay", 40, lease=600.0)
            assert len({sample.info.key for sample in outstanding}) == 40
            for number in range(2):
                servers.kill(number)
        for number in range(2):
            servers.restart(number)
        with ReplayClient(servers.address, timeout=30.0) as client:
            check_shares(client)
            listed = client.list_items("replay", limit=1000).items
            assert {item.key: item.tags for item in listed} == keys
            found = client.list_items("replay", tags={"level": 2, "environment": "math"})
            assert [keys[item.key] for item in found.items] == [{"environment": "math", "level": 2}]
            everything = client.sample("replay", 71)
            assert len({sample.info.key for sample in everything}) == 71  # all but those of weight 0
            assert sum(sample.info.probability for sample in everything) == pytest.approx(1.0)
