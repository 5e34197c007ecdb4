"""Prompts of a table by how much they teach, with a real server."""

import asyncio
from collections import Counter

import pytest

from replay_client.errors import ReplayError
from replay_server import TableConfig
from tests.kit.prompts import CURRICULUM, made, make_curriculum, names, priorities
from tests.kit.servers import async_serving


async def test_prompts_stay_and_are_drawn_by_what_their_groups_have_taught():
    async with async_serving(CURRICULUM) as client:
        await make_curriculum(client, taught={"p1", "p2"}, max_groups=150).run()
        times, now = Counter(await made(client)), await priorities(client)
        assert now.keys() == names(10).keys()
        assert min(now["p1"], now["p2"]) > 0.2
        assert max(value for name, value in now.items() if name not in ("p1", "p2")) < 0.15
        # Each of these has a weight at least as high at every draw, and its own grows.
        assert min(times["p1"], times["p2"]) > max(times[name] for name in now if name not in ("p1", "p2"))


async def test_the_priority_is_the_running_mean_of_p_times_1_less_p_whichever_generator_made_the_groups():
    async with async_serving(CURRICULUM) as client:
        await make_curriculum(client, 1, max_groups=1).run()
        assert await priorities(client) == {"p0": pytest.approx(0.5 * 0.25 + 0.5 * 0.02)}
        await make_curriculum(client, 1, taught={"p0"}, max_groups=1).run()
        assert await priorities(client) == {"p0": pytest.approx(0.5 * 0.135 + 0.5 * 0.25)}


async def test_a_group_that_is_left_out_tells_what_its_prompt_teaches_all_the_same():
    async with async_serving(CURRICULUM) as client:
        await make_curriculum(client, 1, max_groups=1, group_filter=lambda group: False).run()
        assert await made(client) == []
        assert await priorities(client) == {"p0": pytest.approx(0.135)}
        assert (await client.server_info()).tables["prompts"].reserved == 0


async def test_generators_that_begin_at_once_and_again_load_each_prompt_once():
    async with async_serving(CURRICULUM) as client:
        await asyncio.gather(*(make_curriculum(client, max_groups=1).run() for _ in range(3)))
        assert len(await priorities(client)) == 10
        (row,) = await client.list_items("prompts", tags={"prompt_id": "p4"})
        await client.delete("prompts", [row.key])
        await make_curriculum(client, max_groups=1).run()
        assert "p4" not in await priorities(client)  # nobody brings back what a person has deleted
        await client.reset("prompts")
        await make_curriculum(client, max_groups=1).run()
        assert len(await priorities(client)) == 10


async def test_loading_that_was_cut_off_goes_on():
    async with async_serving(CURRICULUM) as client:
        await make_curriculum(client, max_groups=1).run()
        page = await client.list_items("prompts", limit=1000)
        whole = [row.key for row in page if row.tags.get("prompts") == "epoch 0, 10 of 10"]
        await client.delete("prompts", whole)  # as if the last line had not been reached
        await make_curriculum(client, max_groups=1).run()
        assert len(await priorities(client)) == 10


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"sampler": "fifo"}, 'write sampler = "prioritized"'),
        ({"sampler": "prioritized", "max_times_sampled": 1}, "max_times_sampled is 1; write 0"),
        ({"sampler": "prioritized", "max_size": 11}, "write max_size = 12 or more"),
    ],
    ids=["order", "leaves", "small"],
)
async def test_a_table_that_cannot_hold_a_curriculum_is_refused_with_the_remedy(table, words):
    async with async_serving([TableConfig(name="prompts", **table), TableConfig(name="rollouts")]) as client:
        with pytest.raises(ReplayError, match="cannot hold the prompts of a curriculum") as refused:
            await make_curriculum(client).run()
        assert words in str(refused.value)


async def test_other_prompts_than_those_of_the_table_are_refused():
    async with async_serving(CURRICULUM) as client:
        await make_curriculum(client, max_groups=1).run()
        with pytest.raises(ReplayError, match="loaded from 10 prompts, and this generator has 9"):
            await make_curriculum(client, 9).run()
        with pytest.raises(ValueError, match="has no epochs"):
            make_curriculum(client, prompts_epochs=1)
