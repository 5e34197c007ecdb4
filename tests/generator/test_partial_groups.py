"""Partial groups: what one generator has finished another one goes on with, and nothing is played twice."""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_client import AsyncReplayClient
from replay_client.errors import ReplayError
from replay_generator import (
    GeneratorConfig,
    PromptError,
    Rollout,
    RolloutGenerator,
    RolloutPolicy,
    RolloutSequence,
    Task,
)
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.groups import partial_groups
from replay_generator.groups.codec import PartialGroupSpec, decode_rollout, encode_rollout
from replay_generator.groups.server import GeneratorServer
from replay_generator.prompts.prompt import Prompt
from replay_generator.rewards.functions import group_reward
from replay_generator.rollouts.rollout import PlayedRollout, single_turn
from replay_server import AdmissionConfig, ReplayServer, TableConfig
from tests.factories import PATIENCE, make_group
from tests.generator import test_generator_server
from tests.generator.factories import ScriptedEngine
from tests.kit.clocks import async_until, turns
from tests.kit.generators import make_prompts

pytestmark = pytest.mark.filterwarnings("error:coroutine:RuntimeWarning")

SIZE = 4


@contextmanager
def serving(
    *, groups: int = 1, partial_groups: str | None = "partial_groups", max_staleness: int | None = None
) -> Iterator[str]:
    """A server that lets so many groups be under way."""
    admission = AdmissionConfig(
        table="rollouts", fresh_groups_per_step=groups, max_staleness=0, permit_tables=partial_groups
    )
    tables = [TableConfig(name="rollouts", sampler="fifo", max_staleness=max_staleness)]
    with ReplayServer(tables=tables, port=0, admission=admission) as server:
        yield server.address


class Hook:
    """Plays rollouts one after the other as they are let go, and remembers which it began."""

    def __init__(self, *free: int, fails: tuple[int, ...] = (), info: Any = None) -> None:
        """`free`: numbers of rollouts that need not be let go."""
        self.free = set(free)
        self.fails = fails
        self.info = info
        self.gate = asyncio.Event()
        self.began: dict[str, list[int]] = defaultdict(list)
        self.ended = 0

    async def __call__(self, task: Task, policy: RolloutPolicy) -> Rollout:
        self.began[task.prompt_id].append(task.index)
        if task.index not in self.free:
            await self.gate.wait()
        if task.index in self.fails:
            raise RuntimeError("the environment broke")
        sequence = RolloutSequence(task.prompt_ids)
        sequence.append_completion(await policy.generate(sequence.token_ids))
        sequence.append_observation([9, task.index], text="said")
        sequence.append_completion(await policy.generate(sequence.token_ids))
        info = {"number": task.index} if self.info is None else self.info
        self.ended += 1
        return Rollout([sequence], reward=float(task.index), info=info, metrics={"steps": 2.0})


def zero(row: Any, text: str) -> float:
    return 0.0


@group_reward
def sum_of_numbers(row: Any, texts: list[str], rollouts: list[Rollout]) -> list[float]:
    """Needs all rollouts, what their hook has told of them, and the row of the prompt."""
    total = sum(rollout.info["number"] for rollout in rollouts)
    return [total + len(rollout.turns) / 10 + row["bonus"] for rollout in rollouts]


@asynccontextmanager
async def generating(
    address: str, hook: Any, *, engine: Any = None, reward: Any = sum_of_numbers, prompts: Any = None, **config: Any
) -> AsyncIterator[tuple[RolloutGenerator, AsyncReplayClient, asyncio.Task[None]]]:
    """A generator that runs until the end of the block, and then stops at once."""
    if prompts is None:
        prompts = [{"prompt": "+", "prompt_id": f"p{number}", "bonus": 100} for number in range(3)]
    settings = {
        "group_size": SIZE,
        "stop_grace": 0.0,
        "partial_groups_table": "partial_groups",
        "max_concurrent_groups": 2,
    } | config
    engine = engine or ScriptedEngine(completions=[Completion([7, 8], [-0.1, -0.2], "78", "stop", [])])
    async with test_generator_server.generating(
        address, engine, prompts=prompts, reward=reward, rollout=hook, **settings
    ) as running:
        yield running


async def counts(client: AsyncReplayClient) -> tuple[int, int, int]:
    info = (await client.server_info()).admission
    assert info is not None
    return info.accepted, info.running, info.partial_groups


async def inserted(client: AsyncReplayClient, count: int = 1) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await client.server_info()).tables["rollouts"].size < count:
            await asyncio.sleep(0.01)


async def waits_for_a_permit(client: AsyncReplayClient) -> None:
    async with asyncio.timeout(PATIENCE):
        while not (await client.server_info()).admission.acquiring.count:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)


async def stored(generator: RolloutGenerator, rollouts: int) -> None:
    await async_until(lambda: generator.stats["rollouts_stored"] >= rollouts)


async def test_a_group_that_two_generators_made_is_whole_and_nothing_in_it_was_played_twice():
    with serving() as address:
        first, second = Hook(0, 2), Hook()
        async with generating(address, first) as (generator, client, _task):
            await stored(generator, 2)
            assert await counts(client) == (0, 1, 1)
        second.gate.set()
        async with generating(address, second) as (generator, client, _task):
            await inserted(client)
            assert generator.stats["groups_resumed"] == 1
            assert generator.stats["tokens_resumed"] == 2 * 4
            assert (await client.server_info()).tables["partial_groups"].size == 0
            (sample,) = await client.sample("rollouts")
    group = sample.group
    assert second.began["p0"] == [1, 3]
    assert (first.began["p0"], group.prompt_id) == ([0, 1, 2, 3], "p0")
    assert [ids[3] for ids in group.completions()] == [0, 1, 2, 3]  # in their order, whoever made them
    assert group.extras["rewards/rollout"].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(group.extras["rewards/sum_of_numbers"], [6 + 0.4 + 100] * SIZE)
    assert group.extras["rewards/rollout/steps"].tolist() == [2.0] * SIZE
    assert group.meta["turns"][0] == [["prompt", 1], ["assistant", 2], ["tool", 2], ["assistant", 2]]


async def test_the_last_permit_may_be_that_of_a_dead_generator_and_its_group_is_found_while_others_wait():
    with serving() as address:
        hook = Hook(*range(SIZE))
        async with AsyncReplayClient(address) as dead:
            lease = await dead.acquire_permits(1)
            prompt = Prompt.of({"prompt": "+", "prompt_id": "of the dead", "bonus": 0})
            spec = PartialGroupSpec(77, prompt, [5], 0, SIZE, SamplingConfig())
            await dead.insert(spec.encode(), {"partial_groups": 1.0}, permits=lease)
            held = await dead.sample("partial_groups", lease=600.0)
            async with generating(address, hook) as (_, client, _task):
                await waits_for_a_permit(client)
                assert not hook.began
                await dead.acknowledge(held, requeue=True)  # as the end of its lease does
                await inserted(client)
                assert list(hook.began) == ["of the dead"]
                assert await counts(client) == (1, 0, 0)
                assert (await client.get([77]))[0].group.prompt_id == "of the dead"


async def test_rollouts_that_would_be_too_old_on_arrival_are_dropped_and_their_prompt_begins_anew(tmp_path):
    engine = ScriptedEngine(completions=[Completion([7], [-0.1], "7", "stop", [])])
    with serving(max_staleness=1) as address:
        first, second = Hook(0, 1), Hook(*range(SIZE))
        async with generating(address, first) as (generator, _client, _task):
            await stored(generator, 2)
        async with AsyncReplayClient(address) as trainer:
            await trainer.update_table("partial_groups", max_staleness=None)  # the server would drop it by itself
            await trainer.set_policy_version(3, weights=str(tmp_path))
        async with generating(address, second, engine=engine) as (generator, client, _task):
            await inserted(client)
            assert generator.stats["groups_aborted"] == 1
            (sample,) = await client.sample("rollouts")
            assert (sample.group.prompt_id, sample.group.policy_version) == ("p0", 3)
            await async_until(lambda: sorted(second.began["p0"])[:SIZE] == list(range(SIZE)))


async def test_after_its_time_a_group_is_inserted_with_the_rollouts_that_are_finished():
    with serving() as address:
        hook = Hook(1, 2)
        async with generating(address, hook, min_rollouts=2, group_timeout=0.3) as (generator, client, _task):
            await inserted(client)
            assert generator.stats["rollouts_failed"] == 2
            (sample,) = await client.sample("rollouts")
    assert sample.group.extras["rewards/rollout"].tolist() == [1, 2]


@pytest.mark.parametrize(("least", "groups"), [(3, 1), (None, 0)])
async def test_a_group_with_failed_rollouts_has_its_survivors_or_leaves_with_its_permit(least, groups):
    with serving(groups=2) as address:
        hook = Hook(*range(SIZE), fails=(2,))
        options = {"min_rollouts": least, "on_prompt_error": "skip", "max_groups": 1}
        async with generating(address, hook, **options) as (generator, client, task):
            await task
            assert await counts(client) == (groups, 0, 0)
            assert (await client.server_info()).tables["partial_groups"].size == 0
            assert generator.stats["groups_skipped"] == 1 - groups


async def test_who_finds_a_rollout_that_is_there_already_stops_and_the_next_one_sees_it():
    with serving() as address:
        hook = Hook()

        async def all_but_the_last(task: Task, policy: RolloutPolicy) -> Rollout:
            if task.index == SIZE - 1:  # a whole group would be inserted, and not stored
                await asyncio.Event().wait()
            return await hook(task, policy)

        async with AsyncReplayClient(address) as other:
            lease = await other.acquire_permits(1)
            spec = PartialGroupSpec(
                77, Prompt.of({"prompt": "+", "prompt_id": "p", "bonus": 0}), [5], 0, SIZE, SamplingConfig()
            )
            key = await other.insert(spec.encode(), {"partial_groups": 1.0}, permits=lease)
            async with generating(address, all_but_the_last, prompts=[], max_groups=1) as (generator, client, _task):
                await async_until(lambda: len(hook.began["p"]) == SIZE - 1)
                foreign = Rollout([RolloutSequence([5])], reward=50.0, info={"number": 1}, metrics={"steps": 2.0})
                foreign.sequences[0].append_completion(Completion([6, 6, 6], [-0.5] * 3, "666", "stop", [0] * 3))
                column = encode_rollout(PlayedRollout.of(foreign))
                await other.extend(key, {"rollout/1": column}, axes={"rollout/1": "group"})
                hook.gate.set()
                await async_until(lambda: generator.stats["leases_lost"] == 1)
            async with generating(address, Hook(*range(SIZE)), prompts=[]) as (_, client, _task):
                await inserted(client)
                (sample,) = await client.sample("rollouts")
    assert sample.group.extras["rewards/rollout"].tolist() == [0, 50, 2, 3]


async def test_who_finds_that_an_unfinished_group_is_gone_stops():
    hook = Hook()

    async def all_but_the_last(task: Task, policy: RolloutPolicy) -> Rollout:
        if task.index == SIZE - 1:
            await asyncio.Event().wait()
        return await hook(task, policy)

    with serving() as address:
        async with generating(address, all_but_the_last, max_groups=1, partial_groups_lease=3600.0) as (
            generator,
            client,
            _,
        ):
            await async_until(lambda: len(hook.began["p0"]) == SIZE - 1)
            await client.reset("partial_groups")
            hook.gate.set()
            await async_until(lambda: generator.stats["leases_lost"] == 1)


async def test_a_rollout_that_cannot_be_stored_is_said_and_counts_all_the_same(caplog, monkeypatch):
    monkeypatch.setattr(partial_groups, "TOGETHER", 0.0)
    with serving() as address, caplog.at_level(logging.WARNING):
        hook = Hook(*range(SIZE), fails=(3,), info={"number": 1, "what": object()})
        async with generating(address, hook, max_groups=1, min_rollouts=3) as (generator, client, task):
            await task
            assert generator.stats["rollouts_stored"] == 0
            assert await counts(client) == (1, 0, 0)
    assert "Rollout.info is stored until its group is finished, and holds what msgpack cannot" in caplog.text


async def test_a_prompt_whose_row_cannot_be_stored_is_named_and_its_permit_goes_back():
    with serving() as address:
        rows = [{"prompt": "+", "prompt_id": "odd", "bonus": object()}]
        async with generating(address, Hook(), prompts=rows) as (_, client, task):
            with pytest.raises(PromptError, match="prompt 'odd' cannot be stored in a table: an object"):
                await task
            assert await counts(client) == (0, 0, 0)


@pytest.mark.parametrize(
    ("partial_groups", "wanted", "words"),
    [
        (None, "partial_groups", "the server has no table 'partial_groups', only rollouts"),
        ("partial_groups", "other", "the server has no table 'other'"),
    ],
)
async def test_a_server_without_the_table_is_named_with_the_remedy(partial_groups, wanted, words):
    with serving(partial_groups=partial_groups) as address:
        async with generating(address, Hook(), **{"partial_groups_table": wanted}) as (_, _client, task):
            with pytest.raises(ReplayError, match=words):
                await task


async def test_over_shards_a_group_stays_where_its_permit_came_from():
    with serving(groups=2) as one, serving(groups=2) as other:  # of the run
        async with generating(f"{one},{other}", Hook(*range(SIZE)), max_groups=2, prompts=None) as (_, client, task):
            await task
            assert await counts(client) == (2, 0, 0)
        for address in (one, other):  # one permit each
            async with AsyncReplayClient(address) as client:
                assert await counts(client) == (1, 0, 0)
                assert (await client.server_info()).tables["rollouts"].size == 1


async def test_with_a_seed_a_group_has_the_completions_that_it_has_without_building():
    seeds = []
    for table in ("partial_groups", None):
        engine = ScriptedEngine()
        with serving() as address:
            options = {"sampling": SamplingConfig(seed=5), "max_groups": 1, "reward": lambda row, text: 1.0}
            async with generating(address, single_turn, engine=engine, partial_groups_table=table, **options) as (
                _,
                client,
                task,
            ):
                await task
                assert await counts(client) == (1, 0, 0)
        seeds.append(engine.seeds)
    assert seeds[0] == seeds[1]
    assert len(seeds[0]) == 1  # one request for all


async def test_what_a_dead_generator_has_not_finished_is_drawn_with_another_seed():
    async def first_turn(task: Task, policy: RolloutPolicy) -> Rollout:
        if task.index > 1 and not handed_over:
            await asyncio.Event().wait()
        return await single_turn(task, policy)

    engines, handed_over, options = [ScriptedEngine(), ScriptedEngine()], False, {"sampling": SamplingConfig(seed=5)}
    with serving() as address:
        async with generating(address, first_turn, engine=engines[0], reward=zero, **options) as (generator, _, _task):
            await stored(generator, 2)
        handed_over = True
        async with generating(address, first_turn, engine=engines[1], reward=zero, **options) as (_, client, _task):
            await inserted(client)
    assert engines[1].seeds
    assert not {*engines[0].seeds} & {*engines[1].seeds}


async def test_a_finished_rollout_that_waits_for_others_is_stored_when_the_generator_stops(monkeypatch):
    monkeypatch.setattr(partial_groups, "TOGETHER", 3600.0)
    first, second = Hook(1), Hook(*range(SIZE))
    with serving() as address:
        async with generating(address, first) as (generator, client, _task):
            await async_until(lambda: first.ended)
            await turns()
            assert generator.stats["rollouts_stored"] == 0
        async with generating(address, second) as (generator, client, _task):
            await inserted(client)
            assert generator.stats["tokens_resumed"] == 4
    assert second.began["p0"] == [0, 2, 3]


@pytest.mark.parametrize(("size", "requests"), [(0, [3]), (600_000, [1, 1, 1])], ids=["small", "large"])
async def test_rollouts_that_end_together_are_stored_by_one_request_unless_they_are_large(monkeypatch, size, requests):
    monkeypatch.setattr(partial_groups, "TOGETHER", 3600.0)  # the end of the generator ends the wait
    sent = []

    async def extend(self: AsyncReplayClient, key: Any, extras: Any, **options: Any) -> Any:
        sent.append(len(extras))
        return await send(self, key, extras, **options)

    send = AsyncReplayClient.extend
    monkeypatch.setattr(AsyncReplayClient, "extend", extend)
    with serving() as address:
        hook = Hook(0, 1, 2, info={"number": 1, "page": bytes(size)})
        async with generating(address, hook) as (generator, _client, _task):
            await async_until(lambda: hook.ended == 3)
            await turns()
        assert generator.stats["rollouts_stored"] == 3
    assert sent == requests


async def test_a_whole_group_that_is_inserted_at_once_needs_no_request_for_its_rollouts(monkeypatch):
    monkeypatch.setattr(partial_groups, "TOGETHER", 3600.0)
    with serving() as address:
        async with generating(address, Hook(*range(SIZE)), max_groups=1) as (generator, client, task):
            await task
            assert generator.stats["rollouts_stored"] == 0
            assert await counts(client) == (1, 0, 0)


async def test_the_last_rollouts_are_stored_while_the_rewards_take_their_time():
    judged, handed_over = threading.Event(), Hook()

    def slow(row: Any, text: str) -> float:
        assert judged.wait(PATIENCE)
        return 0.0

    with serving() as address:
        async with generating(address, Hook(*range(SIZE)), reward=slow) as (generator, _client, _task):
            await stored(generator, SIZE)
        judged.set()
        async with generating(address, handed_over, reward=slow) as (_, client, _task):
            await inserted(client)
    assert not handed_over.began["p0"]


async def test_the_last_rollouts_are_stored_while_the_insert_waits_for_room():
    admission = AdmissionConfig(
        table="rollouts", fresh_groups_per_step=2, max_staleness=0, permit_tables="partial_groups"
    )
    tables = [TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 1})]
    with ReplayServer(tables=tables, port=0, admission=admission) as server:
        async with generating(server.address, Hook(*range(SIZE)), max_groups=2) as (generator, client, task):
            await stored(generator, SIZE)
            for _ in range(2):
                await client.sample("rollouts")
            await task
            assert await counts(client) == (2, 0, 0)
            assert generator.stats["leases_lost"] == 0


async def test_rollouts_that_are_to_be_stored_when_the_insert_has_closed_their_group_are_no_lost_lease(monkeypatch):
    monkeypatch.setattr(partial_groups, "TOGETHER", 3600.0)
    send = GeneratorServer.insert

    async def insert(self: GeneratorServer, group: Any, work: Any) -> None:
        await send(self, group, work)
        await self.partial_groups.store(work)  # as if the answer to the insert had taken longer than TOGETHER

    monkeypatch.setattr(GeneratorServer, "insert", insert)
    with serving() as address:
        async with generating(address, Hook(*range(SIZE)), max_groups=1) as (generator, client, task):
            await task
            assert (generator.stats["leases_lost"], generator.stats["groups"]) == (0, 1)
            assert generator.stats["rollouts_stored"] == 0
            assert await counts(client) == (1, 0, 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"group_timeout": 1.0}, "group_timeout 1 needs partial_groups"),
        ({"group_timeout": 1.0, "partial_groups_table": "partial_groups"}, "group_timeout 1 needs partial_groups"),
        (
            {"partial_groups_table": "rollouts"},
            "partial_groups_table 'rollouts' is another table of this generator as well",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        GeneratorConfig(**fields)


texts = st.text(max_size=5)
numbers = st.floats(-100, 0, width=32) | st.just(float("nan"))


@st.composite
def sequences(draw: Any) -> RolloutSequence:
    sequence = RolloutSequence(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)), text=draw(texts))
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            n = draw(st.integers(0, 4))
            extras = {"hidden": np.full((n, 2), draw(st.integers(0, 9)), np.float32)} if draw(st.booleans()) else {}
            axes = {"hidden": "token"} if extras and draw(st.booleans()) else {}
            logprobs = draw(st.lists(numbers, min_size=n, max_size=n))
            mask = draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n))
            sequence.append_completion(
                Completion([1] * n, logprobs, draw(texts), "stop", [draw(st.integers(0, 9))] * n, mask, extras, axes)
            )
        else:
            sequence.append_observation(draw(st.lists(st.integers(0, 9), max_size=3)), role="tool", text=draw(texts))
    return sequence


@settings(max_examples=60, deadline=None)
@given(
    st.lists(sequences(), min_size=1, max_size=3),
    st.none() | st.floats(-5, 5),
    st.dictionaries(
        texts, st.integers().filter(lambda n: abs(n) < 2**60) | texts | st.lists(st.booleans()), max_size=3
    ),
)
def test_a_rollout_that_was_stored_is_the_rollout_that_was_played(played, reward, info):
    rollout = Rollout(played, reward, "ended", info, {"steps": 3.0})
    column = encode_rollout(PlayedRollout.of(rollout))
    again = decode_rollout(column).rollout
    assert (again.reward, again.finish_reason, again.info, again.metrics) == (reward, "ended", info, {"steps": 3.0})
    assert (again.turns, again.text) == (rollout.turns, rollout.text)
    for mine, theirs in zip(played, again.sequences, strict=True):
        assert (mine.token_ids, mine.sampled_mask, mine.head) == (theirs.token_ids, theirs.sampled_mask, theirs.head)
        assert (mine.policy_versions, mine.finish_reason) == (theirs.policy_versions, theirs.finish_reason)
        np.testing.assert_array_equal(mine.logprobs, theirs.logprobs)
        np.testing.assert_equal(mine.drawn, theirs.drawn)


def test_bytes_that_are_no_group_under_construction_are_refused_in_words():
    spec = PartialGroupSpec(1, make_prompts(1)[0], [5], 0, 4, SamplingConfig())
    payload = spec.encode()
    for damaged in (b"", payload[:40], b"\0" * 64, make_group().encode(), payload[:16] + b"\xc1" * (len(payload) - 16)):
        with pytest.raises(ValueError, match="partial group"):
            PartialGroupSpec.decode(damaged)
    assert PartialGroupSpec.decode(payload)[0] == spec
