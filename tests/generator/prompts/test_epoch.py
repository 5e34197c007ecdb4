"""Prompts of a table, each once an epoch, with a real server."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from replay_client import AsyncReplayClient
from replay_client.errors import LeaseEndedError, ReplayError
from replay_client.testing import PATIENCE, async_until
from replay_generator import GeneratorConfig, PromptError, RolloutGenerator
from replay_generator.prompts.prompt import cycle_prompts, epoch_order
from replay_generator.prompts.stored import StoredPrompt, decode_item, key_of
from replay_generator.testing import ScriptedEngine
from replay_server import ReplayServer, TableConfig
from tests.kit.generators import make_prompts
from tests.kit.processes import free_port

PROMPTS = TableConfig(name="prompts", sampler="fifo", max_times_sampled=1)
TABLES = (PROMPTS, TableConfig(name="rollouts"))


@asynccontextmanager
async def serving(*tables, **server):
    with ReplayServer(tables=tables or TABLES, port=0, **server) as running:
        async with AsyncReplayClient(running.address, timeout=20.0) as client:
            yield client


def by_length(row, text):
    return float(len(text))


def make_generator(client, rows=10, *, engine=None, reward=by_length, group_filter=None, on_group=None, **config):
    config = {"group_size": 3, "max_concurrent_groups": 2, "prompts_table": "prompts", "prompts_epochs": 1} | config
    return RolloutGenerator(
        client,
        engine or ScriptedEngine(),
        make_prompts(rows) if isinstance(rows, int) else rows,
        reward,
        GeneratorConfig(**config),
        group_filter=group_filter,
        on_group=on_group,
    )


async def made(client) -> list[str]:
    """The prompts of all groups, in the order of their inserts."""
    page = await client.list_items("rollouts", limit=10_000, descending=True)
    items = {item.key: item for item in await client.get([row.key for row in page])}
    return [items[row.key].group.prompt_id for row in page]


def names(count: int, times: int = 1) -> Counter:
    return Counter({f"p{index}": times for index in range(count)})


async def held(client) -> tuple[int, int]:
    table = (await client.server_info()).tables["prompts"]
    return table.size, table.reserved


async def none_is_drawn(client) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await held(client))[1]:
            await asyncio.sleep(0.01)


async def test_several_generators_make_each_prompt_once_an_epoch_in_the_order_of_the_seed():
    async with serving() as client:
        await asyncio.gather(*(make_generator(client, prompts_epochs=2).run() for _ in range(3)))
        order = await made(client)
        assert Counter(order) == names(10, 2)
        assert await held(client) == (1, 0)  # the cursor, which says that two epochs are through
    async with serving() as client:
        await make_generator(client, prompts_epochs=2, max_concurrent_groups=1).run()
        expected = [prompt.prompt_id for prompt in cycle_prompts(make_prompts(10), seed=0, epochs=2)]
        assert await made(client) == expected


async def test_a_generator_that_comes_when_the_epoch_is_through_has_nothing_to_do():
    async with serving() as client:
        await make_generator(client).run()
        await make_generator(client).run()
        assert Counter(await made(client)) == names(10)
        await make_generator(client, prompts_epochs=2).run()
        assert Counter(await made(client)) == names(10, 2)


async def test_what_a_generator_had_drawn_goes_to_others_when_it_stops_or_its_leases_end():
    async with serving() as client:
        stuck, engine = ScriptedEngine(hold=asyncio.Event()), ScriptedEngine(hold=asyncio.Event())
        dead = make_generator(client, engine=stuck, stop_grace=0.0)
        dying = asyncio.create_task(dead.run())
        await async_until(lambda: stuck.generating == 2)
        dead.stop()
        await dying
        await none_is_drawn(client)  # it has given them back
        # This one is not alive enough to renew anything: no generator, only its draws.
        await client.sample("prompts", 2, lease=1.0)
        engine.release()
        await make_generator(client, engine=engine).run()
        assert Counter(await made(client)) == names(10)


async def test_a_prompt_whose_group_is_left_out_for_what_it_is_is_done():
    def reward(row, text):
        if row["prompt_id"] == "p3":
            raise RuntimeError("no answer")
        return by_length(row, text)

    async with serving() as client:
        generator = make_generator(
            client, reward=reward, group_filter=lambda group: group.prompt_id != "p5", on_prompt_error="skip"
        )
        await generator.run()
        assert (generator.stats["groups_skipped"], generator.stats["groups_filtered"]) == (1, 1)
        assert Counter(await made(client)) == names(10) - Counter(("p3", "p5"))
        assert await held(client) == (1, 0)


async def test_a_group_whose_lease_the_server_has_forgotten_is_not_inserted():
    port, engine = free_port(), ScriptedEngine(hold=asyncio.Event())
    async with AsyncReplayClient(f"127.0.0.1:{port}", timeout=20.0) as client:
        with ReplayServer(tables=TABLES, port=port):
            slow = make_generator(client, engine=engine, max_concurrent_groups=1, max_groups=1)
            task = asyncio.create_task(slow.run())
            await async_until(lambda: engine.generating == 1)
        with ReplayServer(tables=TABLES, port=port):  # in memory: it begins anew
            await make_generator(client).run()
            engine.release()
            await task
            assert slow.stats["prompts_lost"] == 1
            assert slow.stats["tokens_wasted"] > 0
            assert Counter(await made(client)) == names(10)


@pytest.mark.parametrize("loaded", [0, 2, 4], ids=["nothing", "some", "all but the next cursor"])
async def test_another_generator_goes_on_where_a_dead_one_has_loaded(loaded):
    async with serving() as client:
        await make_generator(client, max_groups=0).run()
        (drawn,) = await client.sample("prompts", lease=1.0)
        cursor, rows = decode_item(drawn.payload), make_prompts(10)
        for position, row in enumerate(epoch_order(10, cursor.seed, 0)[:loaded]):
            prompt = StoredPrompt(rows[row], 0, position)
            await client.insert(prompt.encode(), {"prompts": 1.0}, key=key_of(cursor.run, 0, position))
        await asyncio.gather(*(make_generator(client).run() for _ in range(2)))
        assert Counter(await made(client)) == names(10)
        # Now it wakes up, and is late with all that it wanted to do.
        for position, row in enumerate(epoch_order(10, cursor.seed, 0)[:4]):
            prompt = StoredPrompt(rows[row], 0, position)
            await client.insert(prompt.encode(), {"prompts": 1.0}, key=key_of(cursor.run, 0, position))
        with pytest.raises(LeaseEndedError):
            await client.insert(cursor.encode(), {"prompts": 1.0}, closes=[drawn])
        await make_generator(client).run()
        assert Counter(await made(client)) == names(10)


async def test_an_emptied_table_is_loaded_anew():
    async with serving() as client:
        for _ in range(3):
            await make_generator(client).run()
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
    async with serving(TableConfig(name="prompts", **table), TableConfig(name="rollouts")) as client:
        with pytest.raises(ReplayError, match="table 'prompts' cannot hold the prompts of an epoch") as refused:
            await make_generator(client).run()
        assert words in str(refused.value)


async def test_other_prompts_than_those_that_are_loaded_are_refused_and_stop_nobody():
    async with serving() as client:
        await make_generator(client, max_groups=1).run()
        for rows, words in ((9, "loaded from 10 prompts, and this generator has 9"), (make_prompts(11)[1:], "others")):
            with pytest.raises(ReplayError, match=words):
                # All that is before the cursor may be drawn by anybody.
                await make_generator(client, rows, max_concurrent_groups=1).run()
        await make_generator(client).run()
        assert Counter(await made(client)) == names(10)


async def test_what_else_is_wrong_is_one_sentence():
    async with serving() as client:
        for rows, words in (
            ([], "the file has no rows"),
            ([{"prompt": "1", "image": object()}], "cannot be stored in a table"),
        ):
            with pytest.raises((ReplayError, PromptError), match=words):
                await make_generator(client, rows).run()
        with pytest.raises(ReplayError, match="'other' does not exist; there are prompts, rollouts"):
            await make_generator(client, prompts_table="other").run()
        with pytest.raises(ValueError, match="needs all prompts as rows by number"):
            make_generator(client, iter(()))
        with pytest.raises(ValueError, match="prompts_epochs needs a prompts_table"):
            make_generator(client, prompts_table=None)
