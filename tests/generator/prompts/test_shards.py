"""A table of prompts over two servers: each prompt lies on one of them."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from replay_client import AsyncReplayClient
from replay_client.errors import ReplayError
from replay_server import AdmissionConfig, ReplayServer
from tests.generator.prompts.test_curriculum import TABLES as CURRICULUM
from tests.generator.prompts.test_curriculum import make_curriculum, priorities
from tests.generator.prompts.test_epoch import TABLES, made, make_generator, names


@asynccontextmanager
async def two_servers(tables=TABLES, **settings):
    with (
        ReplayServer(tables=tables, port=0, **settings) as first,
        ReplayServer(tables=tables, port=0, **settings) as second,
    ):
        async with AsyncReplayClient([first.address, second.address], timeout=20.0) as client:
            yield client


async def test_over_two_servers_each_prompt_is_done_once():
    async with two_servers() as client:
        await asyncio.gather(*(make_generator(client, 40, prompts_epochs=2).run() for _ in range(2)))
        assert Counter(await made(client)) == names(40, 2)
        shards = (await client.server_info()).shards
        assert all(shard.tables["prompts"].inserts > 1 for shard in shards.values())


async def test_a_curriculum_over_two_servers_updates_each_prompt_where_it_lies():
    async with two_servers(CURRICULUM) as client:
        await make_curriculum(client, taught={"p1"}, max_groups=60).run()
        now = await priorities(client)
        assert len(now) == 10
        assert now["p1"] > 0.2


async def test_permits_and_a_table_of_prompts_over_two_servers_are_refused():
    async with two_servers(
        admission=AdmissionConfig(table="rollouts", fresh_groups_per_step=4, max_staleness=1)
    ) as client:
        with pytest.raises(ReplayError, match=r"does not go together with \[admission\]"):
            await make_generator(client).run()
