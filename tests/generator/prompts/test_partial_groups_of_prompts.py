"""Prompts of a table whose groups are partial: a group takes the place of its prompt when it is opened."""

import asyncio
from collections import Counter

import pytest

from replay_client.errors import ReplayError, StaleItemError
from replay_client.testing import PATIENCE, async_until
from replay_generator.testing import ScriptedEngine
from replay_server import TableConfig
from tests.kit.prompts import (
    CURRICULUM,
    EPOCH,
    PARTIAL_GROUPS,
    made,
    make_curriculum,
    make_epoch,
    names,
    priorities,
)
from tests.kit.servers import async_serving


async def test_each_prompt_is_done_once_and_groups_of_a_dead_generator_are_finished_by_another():
    async with async_serving([*EPOCH, PARTIAL_GROUPS]) as client:
        stuck = ScriptedEngine(hold=asyncio.Event())
        settings = {"partial_groups_table": "partial_groups", "partial_groups_lease": 1.0}
        dead = asyncio.create_task(make_epoch(client, engine=stuck, stop_grace=0.0, **settings).run())
        async with asyncio.timeout(PATIENCE):
            while (await client.server_info()).tables["partial_groups"].reserved < 2:
                await asyncio.sleep(0.01)
        dead.cancel()
        await asyncio.gather(*(make_epoch(client, **settings).run() for _ in range(2)))
        assert Counter(await made(client)) == names(10)


async def test_a_prompt_comes_back_when_its_group_under_construction_is_refused_as_too_old():
    async with async_serving([EPOCH[0], TableConfig(name="rollouts", max_staleness=0), PARTIAL_GROUPS]) as client:
        engine = ScriptedEngine(hold=asyncio.Event())
        generator = make_epoch(
            client,
            3,
            engine=engine,
            partial_groups_table="partial_groups",
            follow_policy=False,
            max_groups=1,
            max_concurrent_groups=1,
        )
        task = asyncio.create_task(generator.run())
        await async_until(lambda: engine.generating)
        await client.set_policy_version(1)
        engine.release()
        await async_until(lambda: generator.stats["groups_refused_stale"])
        async with asyncio.timeout(PATIENCE):
            while (await client.server_info()).tables["partial_groups"].reserved:
                await asyncio.sleep(0.01)
        generator.stop()  # it waits for newer weights
        await task
        page = await client.list_items("prompts")
        assert Counter(str(item.tags.get("prompt_id")) for item in page if "prompt_id" in item.tags) == names(3)
        with pytest.raises(StaleItemError):
            await client.insert(b"", {"rollouts": 1.0})


async def test_a_table_of_groups_under_construction_that_would_lose_prompts_is_refused_with_the_remedy():
    async with async_serving([*EPOCH, TableConfig(name="partial_groups", max_staleness=4)]) as client:
        with pytest.raises(ReplayError, match=r"'partial_groups' has max_staleness 4: .* max_staleness = 1000000"):
            await make_epoch(client, partial_groups_table="partial_groups").run()


async def test_a_curriculum_learns_from_a_group_that_was_under_construction():
    async with async_serving([*CURRICULUM, PARTIAL_GROUPS]) as client:
        await make_curriculum(client, 1, max_groups=1, partial_groups_table="partial_groups").run()
        assert await priorities(client) == {"p0": pytest.approx(0.135)}
        assert (await client.server_info()).tables["prompts"].reserved == 0
