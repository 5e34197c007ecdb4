"""A table of prompts over two servers: each prompt lies on one of them."""

import asyncio
from collections import Counter

import pytest

from replay_client.errors import ReplayError
from tests.kit.prompts import CURRICULUM, EPOCH, made, make_curriculum, make_epoch, names, priorities
from tests.kit.stack import Stack


async def test_over_two_servers_each_prompt_is_done_once():
    async with Stack(tables=EPOCH, servers=2) as stack:
        client = stack.client
        await asyncio.gather(*(make_epoch(client, 40, prompts_epochs=2).run() for _ in range(2)))
        assert Counter(await made(client)) == names(40, 2)
        shards = (await client.server_info()).shards
        assert all(shard.tables["prompts"].inserts > 1 for shard in shards.values())


async def test_a_curriculum_over_two_servers_updates_each_prompt_where_it_lies():
    async with Stack(tables=CURRICULUM, servers=2) as stack:
        client = stack.client
        await make_curriculum(client, taught={"p1"}, max_groups=60).run()
        now = await priorities(client)
        assert len(now) == 10
        assert now["p1"] > 0.2


async def test_permits_and_a_table_of_prompts_over_two_servers_are_refused():
    async with Stack(tables=EPOCH, servers=2, groups=4, admission={"max_staleness": 1}) as stack:
        with pytest.raises(ReplayError, match=r"does not go together with \[admission\]"):
            await make_epoch(stack.client).run()
