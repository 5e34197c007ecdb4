"""Balanced tables in server processes: two shards with unequal values, both killed in the middle of draws and back."""

from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest

from replay_client import ReplayClient
from tests.factories import free_port, server_process, until

CONFIG = """
[server]
data_dir = "{data}"

[[tables]]
name = "rollouts"
rate_limiter = {{ type = "queue", max_size = 512 }}
forward_to = "replay"

[[tables]]
name = "replay"
sampler = "prioritized"
remover = "min_heap"
index = ["level"]
balance = {{ tag = "environment", weights = {{ math = 2.0, code = 1.0, broken = 0.0 }} }}
"""
ITEMS = [{"math": 3, "code": 40, "broken": 5}, {"code": 20, None: 8}]
"""Of each value on each server; None: without the tag."""
SHARES = {"math": 0.5, "code": 0.25, None: 0.25}


def start_both(stack, tmp_path, addresses):
    servers = []
    for number, address in enumerate(addresses):
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        config = CONFIG.format(data=folder / "data")
        servers.append(stack.enter_context(server_process(folder, config, address=address)))
    return servers


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
    with ExitStack() as stack:
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        servers = start_both(stack, tmp_path, addresses)
        keys = {}
        for address, items in zip(addresses, ITEMS, strict=True):
            with ReplayClient(address, timeout=30.0) as client:
                for value, n in items.items():
                    for level in range(n):
                        tags = {"level": level} | ({} if value is None else {"environment": value})
                        keys[client.insert(b"x", {"rollouts": 1.0 + level}, tags=tags)] = tags
                client.sample("rollouts", sum(items.values()))  # forwards all of them to the pool
        with ReplayClient(addresses, timeout=30.0) as client:
            check_shares(client)
            outstanding = client.sample("replay", 40, lease=600.0)
            assert len({sample.info.key for sample in outstanding}) == 40
            for server in servers:
                server.kill()
        start_both(stack, tmp_path, addresses)
        with ReplayClient(addresses, timeout=30.0) as client:
            check_shares(client)
            listed = client.list_items("replay", limit=1000).items
            assert {item.key: item.tags for item in listed} == keys
            found = client.list_items("replay", tags={"level": 2, "environment": "math"})
            assert [keys[item.key] for item in found.items] == [{"environment": "math", "level": 2}]
            everything = client.sample("replay", 71)
            assert len({sample.info.key for sample in everything}) == 71  # all but those of weight 0
            assert sum(sample.info.probability for sample in everything) == pytest.approx(1.0)
