"""Stages of a user's own: a function between two tables."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import pytest

from replay_client import AsyncReplayClient
from replay_client.records import read_described
from replay_client.testing import async_until, make_group
from replay_generator import Handoff, StageConfig
from replay_generator.stages.stage import Stage
from replay_server import ReplayServer, TableConfig

NAMES = ("fresh", "rollouts", "others")


@asynccontextmanager
async def between(work: Any, groups: int, **config: Any) -> Any:
    """A stage from "fresh", with so many groups there, that runs until the end of the block."""
    tables = [TableConfig(name=name, sampler="fifo", max_times_sampled=1) for name in NAMES]
    with ReplayServer(tables=tables, port=0) as server:
        async with AsyncReplayClient(server.address) as client, AsyncReplayClient(server.address) as own:
            for number in range(groups):
                group = make_group(prompt_id=f"p{number}", version=number)
                await client.insert(group, {"fresh": 1.0}, tags={"number": number})
            await client.set_policy_version(5)
            stage = Stage(own, work, StageConfig("fresh", **config))
            running = asyncio.create_task(stage.run())
            try:
                yield client, stage, running
            finally:
                stage.stop()
                await asyncio.gather(running, return_exceptions=True)


async def sizes(client: AsyncReplayClient) -> list[int]:
    tables = (await client.server_info()).tables
    return [tables[name].size + tables[name].reserved for name in NAMES]


async def test_a_function_rewrites_routes_filters_and_refuses_and_the_stage_counts(caplog):
    def work(sample: Any) -> Any:
        match sample.group.prompt_id:
            case "p0":
                return None
            case "p1":
                raise ValueError("p1 has no answer")
            case "p2":
                return Handoff(b"bytes", {"others": 2.0}, tags={"kind": "odd"})
        sample.group.meta["seen"] = True
        return sample.group

    async with between(work, 4, max_items=4) as (client, stage, running):
        await running
        assert await sizes(client) == [0, 1, 1]
        (group,), (other,) = await client.sample("rollouts"), await client.sample("others")
        assert group.group.meta["seen"]
        assert group.info.tags == {"number": 3}
        assert group.info.staleness == 2
        assert bytes(other.payload) == b"bytes"
        assert other.info.tags == {"kind": "odd"}
        assert other.info.staleness == 3
        assert stage.stats["groups"] == 1
        assert stage.stats["groups_skipped"] == 1
        assert "p1 has no answer" in caplog.text


async def test_another_error_ends_the_run_and_what_was_under_way_goes_back():
    async def work(sample: Any) -> Any:
        if sample.group.prompt_id == "p2":
            raise RuntimeError("broken")
        await asyncio.Event().wait()

    async with between(work, 3) as (client, _, running):
        with pytest.raises(RuntimeError, match="broken"):
            await running
        assert await sizes(client) == [3, 0, 0]


async def test_who_loses_its_lease_stops_at_once_and_who_scores_is_known_to_the_server():
    begun, stopped = asyncio.Event(), asyncio.Event()
    held = []

    async def work(sample: Any) -> Any:
        held.append(sample)
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with between(work, 1, lease=0.4) as (client, stage, _):
        await begun.wait()
        (told,) = [each for each in (await client.server_info()).clients if read_described(each.settings)]
        assert told.role == "stage"
        await client.acknowledge(held, requeue=True)  # as the end of its lease does
        await stopped.wait()
        await async_until(lambda: stage.stats["leases_lost"] == 1)


async def test_an_object_whose_call_is_async_is_a_stage():
    class Work:
        async def __call__(self, sample: Any) -> Any:
            await asyncio.sleep(0)
            return sample.group

    async with between(Work(), 2, max_items=2) as (client, stage, running):
        await running
        assert await sizes(client) == [0, 2, 0]
        assert stage.stats["groups"] == 2
