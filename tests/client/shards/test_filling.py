"""Batches are filled from shard after shard. No server runs here: the client has a fake transport to tables."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice

import numpy as np
import pytest

from replay_client import AsyncReplayClient, connection
from replay_client.errors import DeadlineExceededError
from replay_client.shards.sampling import WEIGHTS_AGE
from tests.client.fake_server import FakeServer
from tests.client.shards.conftest import PATIENCE
from tests.client.shards.test_sharing import Z_LIMIT, z_score
from tests.kit.clocks import turns

SIZES = (40, 64, 96, 200)


def make_servers(sampler: str) -> tuple[list[FakeServer], dict[int, float]]:
    """Unequal ones, the heavy items on the first, and the priority of each item."""
    weights = np.sort(np.random.default_rng(5).exponential(size=sum(SIZES)) + 0.05)[::-1]
    priorities = {key: float(weight) for key, weight in enumerate(weights, start=1)}
    rows = iter(priorities.items())
    return [FakeServer(sampler, dict(islice(rows, size))) for size in SIZES], priorities


@asynccontextmanager
async def client_of(servers, monkeypatch) -> AsyncIterator[AsyncReplayClient]:
    by_address = {f"127.0.0.1:{port}": server for port, server in enumerate(servers, start=1)}
    monkeypatch.setattr(connection, "open_transport", lambda access: by_address[access.address])
    async with AsyncReplayClient(list(by_address), timeout=PATIENCE) as client:
        yield client


async def z_of(client, priorities: dict[int, float], rows: int, draws: int, *, distinct: bool, uniform: bool) -> float:
    await asyncio.sleep(1.1 * WEIGHTS_AGE)  # no answer from before holds
    counts: Counter[int] = Counter()
    for _ in range(draws // rows):
        batch = [sample.info.key for sample in await client.sample("pool", rows, distinct=distinct)]
        assert len(batch) == rows
        assert len(set(batch)) == rows or not distinct
        counts.update(batch)
    assert counts.keys() <= priorities.keys()
    weights = dict.fromkeys(priorities, 1.0) if uniform else priorities
    total = sum(weights.values())
    return z_score(counts, {key: counts.total() * weight / total for key, weight in weights.items() if weight})


@pytest.mark.parametrize("draws", [6_000, pytest.param(100_000, marks=pytest.mark.long)])
@pytest.mark.parametrize(("sampler", "distinct"), [("prioritized", False), ("uniform", False), ("uniform", True)])
async def test_draws_follow_the_priorities_also_after_updates_and_with_a_shard_away(
    sampler, distinct, draws, monkeypatch
):
    servers, priorities = make_servers(sampler)
    wanted = {"rows": 5, "draws": draws, "distinct": distinct, "uniform": sampler == "uniform"}
    async with client_of(servers, monkeypatch) as client:
        assert await z_of(client, priorities, **wanted) < Z_LIMIT
        if sampler == "prioritized":
            changed = {key: 3.0 * weight if key % 2 else 0.0 for key, weight in [*priorities.items()][::3]}
            for server in servers:
                server.table.update_priorities(np.array([*changed], np.uint64), np.array([*changed.values()]))
            priorities |= changed
            assert await z_of(client, priorities, **wanted) < Z_LIMIT
        servers[0].go()
        await turns()  # the client hears of it
        left = {key: weight for key, weight in priorities.items() if key > SIZES[0]}
        assert await z_of(client, left, **wanted) < Z_LIMIT


async def test_a_pool_gives_a_batch_with_one_message_to_one_shard(monkeypatch):
    servers, _ = make_servers("prioritized")
    async with client_of(servers, monkeypatch) as client:
        await client.sample("pool", 5, lease=60.0)  # asks all of them for their weights
        for server in servers:
            server.requests.clear()
        for _ in range(20):
            await client.sample("pool", 5, lease=60.0)
        assert sum(len(server.requests) for server in servers) == 20


async def test_what_another_reader_was_faster_to_take_comes_from_the_other_shards(monkeypatch):
    servers, priorities = make_servers("uniform")
    everything = sum(SIZES)
    async with client_of(servers, monkeypatch) as client:
        assert len(await client.sample("pool", everything)) == everything
        excluded = range(1, 100)  # the first shard has none of the others, and the client does not know that
        batch = await client.sample("pool", everything - 99, exclude=excluded)
        assert {sample.info.key for sample in batch} == set(range(100, everything + 1))
        with pytest.raises(DeadlineExceededError, match=f"{everything - 99} of {everything} samples available"):
            await client.sample("pool", everything, exclude=excluded, timeout=0.0)
        requeued = sum(len(request.requeue) for server in servers for request in server.requests)
        assert requeued  # nothing stays drawn
        assert priorities
