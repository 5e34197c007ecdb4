"""Partial groups: what one generator has finished another one goes on with, and nothing is played twice."""

import asyncio
import logging
import threading
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_client import AsyncReplayClient
from replay_client.errors import PayloadTooLargeError, ReplayError
from replay_client.testing import PATIENCE, async_until, make_group
from replay_generator import (
    GeneratorConfig,
    PromptError,
    Rollout,
    RolloutPolicy,
    RolloutSequence,
    Task,
)
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.groups import partial_groups
from replay_generator.groups.codec import PartialGroupSpec, decode_rollout, encode_rollout
from replay_generator.groups.partial_groups import PartialGroup, StoredPartialGroups
from replay_generator.groups.server import GeneratorServer
from replay_generator.prompts.prompt import Prompt
from replay_generator.prompts.queue import DrawnPrompt
from replay_generator.rewards.functions import group_reward
from replay_generator.rollouts.rollout import PlayedRollout, single_turn
from replay_generator.testing import ScriptedEngine
from replay_server import TableConfig
from tests.kit.clocks import turns
from tests.kit.engines import SAID
from tests.kit.generators import Hook, make_prompts, zero
from tests.kit.scoring import PROMPTS, SIZE
from tests.kit.stack import Counts

pytestmark = pytest.mark.filterwarnings("error:coroutine:RuntimeWarning")


@group_reward
def sum_of_numbers(row: Any, texts: list[str], rollouts: list[Rollout]) -> list[float]:
    """Needs all rollouts, what their hook has told of them, and the row of the prompt."""
    total = sum(rollout.info["number"] for rollout in rollouts)
    return [total + len(rollout.turns) / 10 + row["bonus"] for rollout in rollouts]


@pytest.fixture
def make_stack(make_stack):
    """Runs of one group at a time, whose generators store what they have finished, and stop at once."""
    generator = {
        "completions": [SAID],
        "prompts": PROMPTS,
        "reward": sum_of_numbers,
        "group_size": SIZE,
        "stop_grace": 0.0,
        "partial_groups_table": "partial_groups",
        "max_concurrent_groups": 2,
    }
    return partial(make_stack, groups=1, permit_tables="partial_groups", generator=generator)


async def test_a_group_that_two_generators_made_is_whole_and_nothing_in_it_was_played_twice(stack):
    first, second = Hook(0, 2), Hook()
    generator = await stack.generate(first)
    await generator.counted("rollouts_stored", 2)
    assert await stack.counts() == Counts(running=1, partial_groups=1)
    await generator.stop()
    second.gate.set()
    generator = await stack.generate(second)
    await stack.inserted()
    assert generator.stats["groups_resumed"] == 1
    assert generator.stats["tokens_resumed"] == 2 * 4
    assert await stack.holds("partial_groups") == 0
    (sample,) = await stack.client.sample("rollouts")
    await generator.stop()
    group = sample.group
    assert second.began["p0"] == [1, 3]
    assert first.began["p0"] == [0, 1, 2, 3]
    assert group.prompt_id == "p0"
    assert [ids[3] for ids in group.completions()] == [0, 1, 2, 3]  # in their order, whoever made them
    assert group.extras["rewards/rollout"].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(group.extras["rewards/sum_of_numbers"], [6 + 0.4 + 100] * SIZE)
    assert group.extras["rewards/rollout/steps"].tolist() == [2.0] * SIZE
    assert group.meta["turns"][0] == [["prompt", 1], ["assistant", 2], ["tool", 2], ["assistant", 2]]


async def test_a_group_that_is_drawn_before_its_insert_is_answered_is_held_like_any_other(stack):
    """As when the answer is lost with the connection: another group that begins draws the item meanwhile."""
    stored, told = asyncio.Event(), asyncio.Event()

    async def answer(call, *arguments, held=None, counts_as="", **options):
        result = await call(*arguments, **options)
        if call == stack.client.insert:
            stored.set()
            await told.wait()
        return result

    config = GeneratorConfig(group_size=SIZE, partial_groups_table="partial_groups")
    groups = StoredPartialGroups(stack.client, config, Counter(), answer)
    prompt = Prompt.of({"prompt": "+", "prompt_id": "late"})
    spec = PartialGroupSpec(77, prompt, [5], 0, SIZE, SamplingConfig())
    permit = await stack.client.acquire_permits(1)
    opening = asyncio.create_task(groups.open(PartialGroup(spec, DrawnPrompt(prompt)), permit, 0))
    await stored.wait()
    drawn = await groups.next(surely=True)
    assert drawn.spec.prompt.prompt_id == "late"
    told.set()
    await opening
    groups.check()
    await groups.requeue_all()


async def test_the_last_permit_may_be_that_of_a_dead_generator_and_its_group_is_found_while_others_wait(stack):
    hook = Hook(*range(SIZE))
    async with AsyncReplayClient(stack.address) as dead:
        lease = await dead.acquire_permits(1)
        prompt = Prompt.of({"prompt": "+", "prompt_id": "of the dead", "bonus": 0})
        spec = PartialGroupSpec(77, prompt, [5], 0, SIZE, SamplingConfig())
        await dead.insert(spec.encode(), {"partial_groups": 1.0}, permits=lease)
        held = await dead.sample("partial_groups", lease=600.0)
        await stack.generate(hook)
        await stack.permit_is_awaited()
        assert not hook.began
        await dead.acknowledge(held, requeue=True)  # as the end of its lease does
        await stack.inserted()
        assert list(hook.began) == ["of the dead"]
        assert await stack.counts() == Counts(accepted=1)
        assert (await stack.client.get([77]))[0].group.prompt_id == "of the dead"


async def test_rollouts_that_would_be_too_old_on_arrival_are_dropped_and_their_prompt_begins_anew(make_stack, tmp_path):
    engine = ScriptedEngine(completions=[Completion([7], [-0.1], "7", "stop", [])])
    stack = await make_stack(tables=[TableConfig(name="rollouts", sampler="fifo", max_staleness=1)])
    first, second = Hook(0, 1), Hook(*range(SIZE))
    generator = await stack.generate(first)
    await generator.counted("rollouts_stored", 2)
    await generator.stop()
    async with AsyncReplayClient(stack.address) as trainer:
        await trainer.update_table("partial_groups", max_staleness=None)  # the server would drop it by itself
        await trainer.set_policy_version(3, weights=str(tmp_path))
    generator = await stack.generate(second, engine=engine)
    await stack.inserted()
    assert generator.stats["groups_aborted"] == 1
    (sample,) = await stack.client.sample("rollouts")
    assert sample.group.prompt_id == "p0"
    assert sample.group.policy_version == 3
    await async_until(lambda: sorted(second.began["p0"])[:SIZE] == list(range(SIZE)))


async def test_after_its_time_a_group_is_inserted_with_the_rollouts_that_are_finished(stack):
    hook = Hook(1, 2)
    generator = await stack.generate(hook, min_rollouts=2, group_timeout=0.3)
    await stack.inserted()
    assert generator.stats["rollouts_failed"] == 2
    (sample,) = await stack.client.sample("rollouts")
    await generator.stop()
    assert sample.group.extras["rewards/rollout"].tolist() == [1, 2]


@pytest.mark.parametrize(("least", "groups"), [(3, 1), (None, 0)])
async def test_a_group_with_failed_rollouts_has_its_survivors_or_leaves_with_its_permit(make_stack, least, groups):
    stack = await make_stack(groups=2)
    hook = Hook(*range(SIZE), fails=(2,))
    options = {"min_rollouts": least, "on_prompt_error": "skip", "max_groups": 1}
    generator = await stack.generate(hook, **options)
    await generator.task
    assert await stack.counts() == Counts(accepted=groups)
    assert await stack.holds("partial_groups") == 0
    assert generator.stats["groups_skipped"] == 1 - groups


async def test_who_finds_a_rollout_that_is_there_already_stops_and_the_next_one_sees_it(stack):
    hook = Hook()

    async def all_but_the_last(task: Task, policy: RolloutPolicy) -> Rollout:
        if task.index == SIZE - 1:  # a whole group would be inserted, and not stored
            await asyncio.Event().wait()
        return await hook(task, policy)

    async with AsyncReplayClient(stack.address) as other:
        lease = await other.acquire_permits(1)
        spec = PartialGroupSpec(
            77, Prompt.of({"prompt": "+", "prompt_id": "p", "bonus": 0}), [5], 0, SIZE, SamplingConfig()
        )
        key = await other.insert(spec.encode(), {"partial_groups": 1.0}, permits=lease)
        generator = await stack.generate(all_but_the_last, prompts=[], max_groups=1)
        await async_until(lambda: len(hook.began["p"]) == SIZE - 1)
        foreign = Rollout([RolloutSequence([5])], reward=50.0, info={"number": 1}, metrics={"steps": 2.0})
        foreign.sequences[0].append_completion(Completion([6, 6, 6], [-0.5] * 3, "666", "stop", [0] * 3))
        column = encode_rollout(PlayedRollout.of(foreign))
        await other.extend(key, {"rollout/1": column}, axes={"rollout/1": "group"})
        hook.gate.set()
        await generator.counted("leases_lost")
        await generator.stop()
        generator = await stack.generate(Hook(*range(SIZE)), prompts=[])
        await stack.inserted()
        (sample,) = await stack.client.sample("rollouts")
        await generator.stop()
    assert sample.group.extras["rewards/rollout"].tolist() == [0, 50, 2, 3]


async def test_who_finds_that_an_unfinished_group_is_gone_stops(stack):
    hook = Hook()

    async def all_but_the_last(task: Task, policy: RolloutPolicy) -> Rollout:
        if task.index == SIZE - 1:
            await asyncio.Event().wait()
        return await hook(task, policy)

    generator = await stack.generate(all_but_the_last, max_groups=1, partial_groups_lease=3600.0)
    await async_until(lambda: len(hook.began["p0"]) == SIZE - 1)
    await stack.client.reset("partial_groups")
    hook.gate.set()
    await generator.counted("leases_lost")


async def test_a_rollout_that_cannot_be_stored_is_said_and_counts_all_the_same(stack, caplog, monkeypatch):
    monkeypatch.setattr(partial_groups, "TOGETHER", 0.0)
    with caplog.at_level(logging.WARNING):
        hook = Hook(*range(SIZE), fails=(3,), info={"number": 1, "what": object()})
        generator = await stack.generate(hook, max_groups=1, min_rollouts=3)
        await generator.task
        assert generator.stats["rollouts_stored"] == 0
        assert await stack.counts() == Counts(accepted=1)
        await generator.stop()
    assert "Rollout.info is stored until its group is finished, and holds what msgpack cannot" in caplog.text


async def test_a_prompt_whose_row_cannot_be_stored_is_named_and_its_permit_goes_back(stack):
    rows = [{"prompt": "+", "prompt_id": "odd", "bonus": object()}]
    generator = await stack.generate(Hook(), prompts=rows)
    with pytest.raises(PromptError, match="prompt 'odd' cannot be stored in a table: an object"):
        await generator.task
    assert await stack.counts() == Counts()


async def test_the_prompt_of_a_rollout_that_is_too_large_for_the_server_is_named(stack, monkeypatch):
    async def extend(*_: Any, **options: Any) -> None:
        raise PayloadTooLargeError("9000 bytes > max_bytes 100")

    monkeypatch.setattr(AsyncReplayClient, "extend", extend)
    rows = [{"prompt": "+", "prompt_id": "long", "bonus": 0}]
    generator = await stack.generate(Hook(0), prompts=rows)  # the others are still played when the first is stored
    with pytest.raises(PromptError, match="prompt 'long': a rollout of its group cannot be stored: 9000 bytes"):
        await generator.task


@pytest.mark.parametrize(
    ("partial_groups", "wanted", "words"),
    [
        (None, "partial_groups", "the server has no table 'partial_groups', only rollouts"),
        ("partial_groups", "other", "the server has no table 'other'"),
    ],
)
async def test_a_server_without_the_table_is_named_with_the_remedy(make_stack, partial_groups, wanted, words):
    stack = await make_stack(permit_tables=partial_groups)
    generator = await stack.generate(Hook(), **{"partial_groups_table": wanted})
    with pytest.raises(ReplayError, match=words):
        await generator.task


async def test_over_shards_a_group_stays_where_its_permit_came_from(make_stack):
    stack = await make_stack(groups=2, servers=2)  # of the run
    generator = await stack.generate(Hook(*range(SIZE)), max_groups=2)
    await generator.task
    assert await stack.counts() == Counts(accepted=2)
    await generator.stop()
    for address in stack.addresses:  # one permit each
        shard = await (await stack.connect(address)).server_info()
        assert shard.admission is not None
        assert shard.admission.accepted == 1
        assert shard.admission.running == 0
        assert shard.tables["rollouts"].size == 1


async def test_with_a_seed_a_group_has_the_completions_that_it_has_without_building(make_stack):
    seeds = []
    for table in ("partial_groups", None):
        stack = await make_stack()
        engine = ScriptedEngine()
        options = {"sampling": SamplingConfig(seed=5), "max_groups": 1, "reward": lambda row, text: 1.0}
        generator = await stack.generate(single_turn, engine=engine, partial_groups_table=table, **options)
        await generator.task
        assert await stack.counts() == Counts(accepted=1)
        await generator.stop()
        seeds.append(engine.seeds)
    assert seeds[0] == seeds[1]
    assert len(seeds[0]) == 1  # one request for all


async def test_what_a_dead_generator_has_not_finished_is_drawn_with_another_seed(stack):
    async def first_turn(task: Task, policy: RolloutPolicy) -> Rollout:
        if task.index > 1 and not handed_over:
            await asyncio.Event().wait()
        return await single_turn(task, policy)

    engines, handed_over, options = [ScriptedEngine(), ScriptedEngine()], False, {"sampling": SamplingConfig(seed=5)}
    generator = await stack.generate(first_turn, engine=engines[0], reward=zero, **options)
    await generator.counted("rollouts_stored", 2)
    await generator.stop()
    handed_over = True
    generator = await stack.generate(first_turn, engine=engines[1], reward=zero, **options)
    await stack.inserted()
    await generator.stop()
    assert engines[1].seeds
    assert not {*engines[0].seeds} & {*engines[1].seeds}


async def test_a_finished_rollout_that_waits_for_others_is_stored_when_the_generator_stops(stack, monkeypatch):
    monkeypatch.setattr(partial_groups, "TOGETHER", 3600.0)
    first, second = Hook(1), Hook(*range(SIZE))
    generator = await stack.generate(first)
    await async_until(lambda: first.ended)
    await turns()
    assert generator.stats["rollouts_stored"] == 0
    await generator.stop()
    generator = await stack.generate(second)
    await stack.inserted()
    assert generator.stats["tokens_resumed"] == 4
    await generator.stop()
    assert second.began["p0"] == [0, 2, 3]


@pytest.mark.parametrize(("size", "requests"), [(0, [3]), (600_000, [1, 1, 1])], ids=["small", "large"])
async def test_rollouts_that_end_together_are_stored_by_one_request_unless_they_are_large(
    stack, monkeypatch, size, requests
):
    monkeypatch.setattr(partial_groups, "TOGETHER", 3600.0)  # the end of the generator ends the wait
    sent = []

    async def extend(self: AsyncReplayClient, key: Any, extras: Any, **options: Any) -> Any:
        sent.append(len(extras))
        return await send(self, key, extras, **options)

    send = AsyncReplayClient.extend
    monkeypatch.setattr(AsyncReplayClient, "extend", extend)
    hook = Hook(0, 1, 2, info={"number": 1, "page": bytes(size)})
    generator = await stack.generate(hook)
    await async_until(lambda: hook.ended == 3)
    await turns()
    await generator.stop()
    assert generator.stats["rollouts_stored"] == 3
    assert sent == requests


async def test_a_whole_group_that_is_inserted_at_once_needs_no_request_for_its_rollouts(stack, monkeypatch):
    monkeypatch.setattr(partial_groups, "TOGETHER", 3600.0)
    generator = await stack.generate(Hook(*range(SIZE)), max_groups=1)
    await generator.task
    assert generator.stats["rollouts_stored"] == 0
    assert await stack.counts() == Counts(accepted=1)


async def test_the_last_rollouts_are_stored_while_the_rewards_take_their_time(stack):
    judged, handed_over = threading.Event(), Hook()

    def slow(row: Any, text: str) -> float:
        assert judged.wait(PATIENCE)
        return 0.0

    generator = await stack.generate(Hook(*range(SIZE)), reward=slow)
    await generator.counted("rollouts_stored", SIZE)
    await generator.stop()
    judged.set()
    generator = await stack.generate(handed_over, reward=slow)
    await stack.inserted()
    await generator.stop()
    assert not handed_over.began["p0"]


async def test_the_last_rollouts_are_stored_while_the_insert_waits_for_room(make_stack):
    tables = [TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 1})]
    stack = await make_stack(groups=2, tables=tables)
    generator = await stack.generate(Hook(*range(SIZE)), max_groups=2)
    await generator.counted("rollouts_stored", SIZE)
    for _ in range(2):
        await stack.client.sample("rollouts")
    await generator.task
    assert await stack.counts() == Counts(accepted=2)
    assert generator.stats["leases_lost"] == 0


async def test_rollouts_that_are_to_be_stored_when_the_insert_has_closed_their_group_are_no_lost_lease(
    stack, monkeypatch
):
    monkeypatch.setattr(partial_groups, "TOGETHER", 3600.0)
    send = GeneratorServer.insert

    async def insert(self: GeneratorServer, group: Any, work: Any) -> None:
        await send(self, group, work)
        await self.partial_groups.store(work)  # as if the answer to the insert had taken longer than TOGETHER

    monkeypatch.setattr(GeneratorServer, "insert", insert)
    generator = await stack.generate(Hook(*range(SIZE)), max_groups=1)
    await generator.task
    assert generator.stats["leases_lost"] == 0
    assert generator.stats["groups"] == 1
    assert generator.stats["rollouts_stored"] == 0
    assert await stack.counts() == Counts(accepted=1)


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
    assert again.reward == reward
    assert again.finish_reason == "ended"
    assert again.info == info
    assert again.metrics == {"steps": 3.0}
    assert again.turns == rollout.turns
    assert again.text == rollout.text
    for mine, theirs in zip(played, again.sequences, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.sampled_mask == theirs.sampled_mask
        assert mine.head == theirs.head
        assert mine.policy_versions == theirs.policy_versions
        assert mine.finish_reason == theirs.finish_reason
        np.testing.assert_array_equal(mine.logprobs, theirs.logprobs)
        np.testing.assert_equal(mine.drawn, theirs.drawn)


def test_bytes_that_are_no_group_under_construction_are_refused_in_words():
    spec = PartialGroupSpec(1, make_prompts(1)[0], [5], 0, 4, SamplingConfig())
    payload = spec.encode()
    for damaged in (b"", payload[:40], b"\0" * 64, make_group().encode(), payload[:16] + b"\xc1" * (len(payload) - 16)):
        with pytest.raises(ValueError, match="partial group"):
            PartialGroupSpec.decode(damaged)
    assert PartialGroupSpec.decode(payload)[0] == spec
