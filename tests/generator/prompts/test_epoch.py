"""Prompts of a table, each once an epoch, with a real server."""

import asyncio
from collections import Counter

import pytest

from replay_client.errors import LeaseEndedError, ReplayError
from replay_client.testing import PATIENCE, async_until
from replay_generator import PromptError
from replay_generator.prompts.prompt import cycle_prompts, epoch_order
from replay_generator.prompts.stored import StoredPrompt, decode_item, key_of
from replay_generator.testing import ScriptedEngine
from replay_server import TableConfig
from tests.kit.generators import by_length, make_prompts
from tests.kit.prompts import EPOCH, held, made, make_epoch, names
from tests.kit.servers import async_serving


async def none_is_drawn(client) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await held(client))[1]:
            await asyncio.sleep(0.01)


async def test_several_generators_make_each_prompt_once_an_epoch_in_the_order_of_the_seed():
    async with async_serving(EPOCH) as client:
        await asyncio.gather(*(make_epoch(client, prompts_epochs=2).run() for _ in range(3)))
        order = await made(client)
        assert Counter(order) == names(10, 2)
        assert await held(client) == (1, 0)  # the cursor, which says that two epochs are through
    async with async_serving(EPOCH) as client:
        await make_epoch(client, prompts_epochs=2, max_concurrent_groups=1).run()
        expected = [prompt.prompt_id for prompt in cycle_prompts(make_prompts(10), seed=0, epochs=2)]
        assert await made(client) == expected


async def test_a_generator_that_comes_when_the_epoch_is_through_has_nothing_to_do():
    async with async_serving(EPOCH) as client:
        await make_epoch(client).run()
        await make_epoch(client).run()
        assert Counter(await made(client)) == names(10)
        await make_epoch(client, prompts_epochs=2).run()
        assert Counter(await made(client)) == names(10, 2)


async def test_what_a_generator_had_drawn_goes_to_others_when_it_stops_or_its_leases_end():
    async with async_serving(EPOCH) as client:
        stuck, engine = ScriptedEngine(hold=asyncio.Event()), ScriptedEngine(hold=asyncio.Event())
        dead = make_epoch(client, engine=stuck, stop_grace=0.0)
        dying = asyncio.create_task(dead.run())
        await async_until(lambda: stuck.generating == 2)
        dead.stop()
        await dying
        await none_is_drawn(client)  # it has given them back
        # This one is not alive enough to renew anything: no generator, only its draws.
        await client.sample("prompts", 2, lease=1.0)
        engine.release()
        await make_epoch(client, engine=engine).run()
        assert Counter(await made(client)) == names(10)


async def test_a_prompt_whose_group_is_left_out_for_what_it_is_is_done():
    def reward(row, text):
        if row["prompt_id"] == "p3":
            raise RuntimeError("no answer")
        return by_length(row, text)

    async with async_serving(EPOCH) as client:
        generator = make_epoch(
            client, reward=reward, group_filter=lambda group: group.prompt_id != "p5", on_prompt_error="skip"
        )
        await generator.run()
        assert generator.stats["groups_skipped"] == 1
        assert generator.stats["groups_filtered"] == 1
        assert Counter(await made(client)) == names(10) - Counter(("p3", "p5"))
        assert await held(client) == (1, 0)


async def test_a_group_whose_lease_the_server_has_forgotten_is_not_inserted(make_stack):
    engine = ScriptedEngine(hold=asyncio.Event())
    stack = await make_stack(tables=EPOCH, timeout=20.0)
    slow = make_epoch(stack.client, engine=engine, max_concurrent_groups=1, max_groups=1)
    task = asyncio.create_task(slow.run())
    await async_until(lambda: engine.generating == 1)
    stack.kill()
    stack.restart()  # in memory: it begins anew
    await make_epoch(stack.client).run()
    engine.release()
    await task
    assert slow.stats["prompts_lost"] == 1
    assert slow.stats["tokens_wasted"] > 0
    assert Counter(await made(stack.client)) == names(10)


@pytest.mark.parametrize("loaded", [0, 2, 4], ids=["nothing", "some", "all but the next cursor"])
async def test_another_generator_goes_on_where_a_dead_one_has_loaded(loaded):
    async with async_serving(EPOCH) as client:
        await make_epoch(client, max_groups=0).run()
        (drawn,) = await client.sample("prompts", lease=1.0)
        cursor, rows = decode_item(drawn.payload), make_prompts(10)
        for position, row in enumerate(epoch_order(10, cursor.seed, 0)[:loaded]):
            prompt = StoredPrompt(rows[row], 0, position)
            await client.insert(prompt.encode(), {"prompts": 1.0}, key=key_of(cursor.run, 0, position))
        await asyncio.gather(*(make_epoch(client).run() for _ in range(2)))
        assert Counter(await made(client)) == names(10)
        # Now it wakes up, and is late with all that it wanted to do.
        for position, row in enumerate(epoch_order(10, cursor.seed, 0)[:4]):
            prompt = StoredPrompt(rows[row], 0, position)
            await client.insert(prompt.encode(), {"prompts": 1.0}, key=key_of(cursor.run, 0, position))
        with pytest.raises(LeaseEndedError):
            await client.insert(cursor.encode(), {"prompts": 1.0}, closes=[drawn])
        await make_epoch(client).run()
        assert Counter(await made(client)) == names(10)


async def test_an_emptied_table_is_loaded_anew():
    async with async_serving(EPOCH) as client:
        for _ in range(3):
            await make_epoch(client).run()
            await client.reset("prompts")
        assert Counter(await made(client)) == names(10, 3)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"sampler": "uniform", "max_times_sampled": 1}, 'write sampler = "fifo"'),
        ({"sampler": "fifo"}, "max_times_sampled is 0; write 1"),
        ({"sampler": "fifo", "max_times_sampled": 1, "max_size": 1000}, "write max_size = 16384 or more"),
        ({"rate_limiter": {"type": "queue", "max_size": 9}}, "holds 9 items"),
        ({"sampler": "fifo", "max_times_sampled": 1, "max_staleness": 4}, "max_staleness 4 would drop prompts"),
        ({"sampler": "fifo", "max_times_sampled": 1, "rate_limiter": {"type": "min_size", "min_size": 2}}, "hold"),
        ({"sampler": "fifo", "max_times_sampled": 1, "requires": ["values"]}, "requires values"),
    ],
    ids=["order", "stays", "small", "queue", "stale", "limiter", "columns"],
)
async def test_a_table_that_cannot_hold_an_epoch_is_refused_with_the_remedy(table, words):
    async with async_serving([TableConfig(name="prompts", **table), TableConfig(name="rollouts")]) as client:
        with pytest.raises(ReplayError, match="table 'prompts' cannot hold the prompts of an epoch") as refused:
            await make_epoch(client).run()
        assert words in str(refused.value)


async def test_other_prompts_than_those_that_are_loaded_are_refused_and_stop_nobody():
    async with async_serving(EPOCH) as client:
        await make_epoch(client, max_groups=1).run()
        for rows, words in ((9, "loaded from 10 prompts, and this generator has 9"), (make_prompts(11)[1:], "others")):
            with pytest.raises(ReplayError, match=words):
                # All that is before the cursor may be drawn by anybody.
                await make_epoch(client, rows, max_concurrent_groups=1).run()
        await make_epoch(client).run()
        assert Counter(await made(client)) == names(10)


async def test_what_else_is_wrong_is_one_sentence():
    async with async_serving(EPOCH) as client:
        for rows, words in (
            ([], "the file has no rows"),
            ([{"prompt": "1", "image": object()}], "cannot be stored in a table"),
        ):
            with pytest.raises((ReplayError, PromptError), match=words):
                await make_epoch(client, rows).run()
        with pytest.raises(ReplayError, match="'other' does not exist; there are prompts, rollouts"):
            await make_epoch(client, prompts_table="other").run()
        with pytest.raises(ValueError, match="needs all prompts as rows by number"):
            make_epoch(client, iter(()))
        with pytest.raises(ValueError, match="prompts_epochs needs a prompts_table"):
            make_epoch(client, prompts_table=None)
