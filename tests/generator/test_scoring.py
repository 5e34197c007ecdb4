"""Groups that get their rewards elsewhere: from a generator without a reward function, by a scorer, to the trainer."""

import asyncio
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

from replay_client import AsyncReplayClient
from replay_client.errors import ReplayError
from replay_client.records import read_described
from replay_generator import GeneratorConfig, PromptError, Rollout, ScorerConfig
from replay_generator.rewards.functions import group_reward
from replay_generator.stages import scorer as scorer_module
from replay_generator.stages import stage as stage_module
from replay_server import TableConfig
from replay_trainer.groups import why_unusable
from tests.kit.generators import Hook
from tests.kit.scoring import SIZE, UNSCORED, play
from tests.kit.stack import Counts


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(scorer_module, "_PAUSE", 0.0)


@pytest.fixture
def make_stack(make_stack):
    return partial(make_stack, **UNSCORED)


async def by_row(row: Any, text: str, rollout: Rollout) -> float:
    """Needs what only the generator saw: the row, the turns, and what the hook told."""
    return row["bonus"] + rollout.info["number"] + len(rollout.turns) / 10


@pytest.mark.parametrize("partial_groups", [None, "partial_groups"])
async def test_permits_and_versions_are_those_of_the_generation_from_the_rollouts_to_the_trainer(stack, partial_groups):
    await play(stack, partial_groups_table=partial_groups, tags={"environment": "sums"})
    assert await stack.counts() == Counts(running=1, partial_groups=1)
    for version in (1, 2):
        await stack.at(version)
    scorer = await stack.score(by_row)
    await stack.inserted()
    assert await stack.counts() == Counts(accepted=1)
    (sample,) = await stack.client.sample("rollouts")
    assert sample.info.policy_version == 0
    assert sample.info.staleness == 2
    assert sample.info.tags == {"environment": "sums"}
    assert await stack.holds("unscored") == 0
    assert await stack.holds("partial_groups") == 0
    clients = (await stack.info()).clients
    roles = [each.role for each in clients if read_described(each.settings).get("part") == "scorer"]
    assert roles == ["scorer"]
    group = sample.group
    np.testing.assert_allclose(group.extras["rewards/by_row"], [100.4, 101.4, 102.4, 103.4], rtol=1e-6)
    assert group.extras["rewards/rollout/steps"].tolist() == [2.0] * SIZE
    assert group.prompt_id == "p0"
    assert group.policy_version == 0
    assert group.advantages.any()
    assert [ids[3] for ids in group.completions()] == [0, 1, 2, 3]
    assert scorer.stats["groups"] == 1


async def test_a_group_that_is_too_old_when_it_is_scored_gives_its_permit_back(make_stack):
    stack = await make_stack(tables=[TableConfig(name="rollouts", sampler="fifo", max_staleness=1)])
    await play(stack)

    async def slow(row: Any, text: str) -> float:
        for version in (1, 2):
            await stack.at(version)
        return 1.0

    scorer = await stack.score(slow)
    await scorer.counted("groups_refused_stale")
    assert scorer.stats["groups_refused_stale"] == 1
    assert await stack.counts() == Counts()


async def test_who_dies_leaves_its_groups_to_another_one_and_their_results_count_once(stack):
    await play(stack, max_groups=3)
    stuck = asyncio.Event()

    async def hangs(row: Any, text: str) -> float:
        stuck.set()
        return await asyncio.Event().wait()

    async with AsyncReplayClient(stack.address) as dead:
        held = await dead.sample("unscored", 3, lease=600.0)
        scorer = await stack.score(by_row)
        await scorer.client.describe({"part": "here"})
        await dead.acknowledge(held, requeue=True)  # as the end of its lease does
        await stack.inserted(3)
        with pytest.raises(ReplayError):  # what the dead one would have said
            await dead.insert(b"late", {"rollouts": 1.0}, closes=held[:1])
        assert await stack.counts() == Counts(accepted=3)
        assert scorer.stats["groups"] == 3
        await scorer.stop()
    scorer = await stack.score(hangs)
    await play(stack)
    await stuck.wait()
    await scorer.stop()
    unscored = (await stack.info()).tables["unscored"]
    assert unscored.size == 1  # who stops requeues it
    assert unscored.reserved == 0


async def test_three_scorers_share_the_groups_and_a_slow_one_takes_fewer(make_stack):
    asked, gate = Counter[str](), asyncio.Event()

    async def at_once(row: Any, text: str) -> float:
        asked["fast"] += 1
        return 1.0

    async def slow(row: Any, text: str) -> float:
        asked["slow"] += 1
        await gate.wait()
        return 1.0

    stack = await make_stack(groups=12)
    prompts = [{"prompt": "+", "prompt_id": f"p{number}", "bonus": 0} for number in range(12)]
    scorers = [
        await stack.score(slow, concurrency=2),
        await stack.score(at_once),
        await stack.score(at_once),
    ]
    await play(stack, prompts=prompts, max_groups=12)
    await stack.inserted(12 - (1 if asked["slow"] else 0))
    assert asked["slow"] <= 2
    gate.set()
    await stack.inserted(12)
    assert sum(each.stats["groups"] for each in scorers) == 12
    assert await stack.counts() == Counts(accepted=12)


async def test_rewards_are_asked_for_again_and_a_rollout_without_one_leaves_its_group(stack):
    asked = Counter[int]()

    async def fails(row: Any, text: str, rollout: Rollout) -> float:
        number = rollout.info["number"]
        asked[number] += 1
        if number == 3 or (number == 1 and asked[1] < 3):
            raise RuntimeError("the sandbox is away")
        return float(number)

    await play(stack)
    scorer = await stack.score(fails, min_rollouts=3)
    await stack.inserted()
    (sample,) = await stack.client.sample("rollouts")
    assert scorer.stats["rollouts_failed"] == 1
    assert asked == {0: 1, 1: 3, 2: 1, 3: 3}
    np.testing.assert_allclose(sample.group.rewards, [0, 2, 4])  # beside those of the hook
    (why,) = sample.group.meta["failures"]
    assert "the sandbox is away" in why


@pytest.mark.parametrize("whole", [False, True])
async def test_a_group_that_cannot_be_scored_is_dropped_with_its_permit_and_its_reason(stack, caplog, whole):
    def fails(row: Any, texts: Any) -> Any:
        raise RuntimeError("the judge is out")

    await play(stack, max_groups=3)
    scorer = await stack.score(group_reward(fails) if whole else fails, attempts=2)
    await scorer.counted("groups_skipped", 3)
    assert await stack.counts() == Counts()
    assert await stack.holds() == 0
    assert f"{SIZE} of {SIZE} rollouts failed" in caplog.text
    assert "the judge is out" in caplog.text


async def test_a_reward_that_takes_too_long_has_failed_and_when_all_groups_fail_the_run_ends(stack, monkeypatch):
    monkeypatch.setattr(stage_module, "_MOST_SKIPPED", 2)

    async def hangs(row: Any, text: str) -> float:
        return await asyncio.Event().wait()

    await play(stack, max_groups=3)
    scorer = await stack.score(hangs, reward_timeout=0.05, attempts=1)
    with pytest.raises(PromptError, match=r"2 groups in a row were skipped.*took longer than 0.05 s"):
        await scorer.task
    await scorer.stop()
    left = await stack.holds("unscored")
    assert left <= 1  # the third may have been too late as well, before the run ended
    assert left == (await stack.counts()).partial_groups


async def test_a_function_of_whole_groups_sees_all_rollouts_and_the_group_filter_sees_the_scored_group(stack):
    @group_reward
    def ranked(row: Any, texts: list[str], rollouts: list[Rollout]) -> list[float]:
        return [float(len(rollouts))] * len(texts)

    await play(stack, max_groups=2)
    scorer = await stack.score(ranked, group_filter=lambda group: group.prompt_id == "p1")
    await stack.inserted()
    await scorer.counted("groups_filtered")
    assert scorer.stats["groups_filtered"] == 1
    (sample,) = await stack.client.sample("rollouts")
    assert await stack.counts() == Counts(accepted=1)
    assert sample.group.extras["rewards/ranked"].tolist() == [SIZE] * SIZE


async def test_groups_that_teach_nothing_can_be_left_out_and_their_permits_go_back(stack):
    async def against_the_hook(row: Any, text: str, rollout: Rollout) -> float:
        return -rollout.info["number"] if row["prompt_id"] == "p0" else 0.0

    await play(stack, max_groups=3)
    scorer = await stack.score(against_the_hook, drop_zero_variance=True)
    await stack.inserted(2)
    await scorer.counted("groups_filtered")
    assert scorer.stats["groups_filtered"] == 1
    assert await stack.counts() == Counts(accepted=2)


async def test_why_the_generator_lacks_rollouts_arrives_with_the_scored_group(stack):
    await play(stack, Hook(*range(SIZE), fails=(2,)), min_rollouts=3)
    await stack.score(by_row)
    await stack.inserted()
    (sample,) = await stack.client.sample("rollouts")
    assert sample.group.group_size == 3
    assert "the environment broke" in sample.group.meta["failures"][0]


async def test_a_trainer_that_is_handed_a_group_without_rewards_says_so(stack):
    await play(stack)
    (sample,) = await stack.client.sample("unscored")
    assert "without rewards" in why_unusable(sample)
    assert "replay score" in why_unusable(sample)


@pytest.mark.parametrize(
    ("partial_groups", "words"),
    [
        ((), "the server has no table 'unscored'"),
        (("partial_groups",), "has no table 'unscored'.*add it to permit_tables"),
    ],
)
async def test_a_server_that_does_not_know_the_table_is_named_by_generator_and_scorer(
    make_stack, partial_groups, words
):
    stack = await make_stack(permit_tables=partial_groups)
    generator = await stack.generate(Hook())
    with pytest.raises(ReplayError, match=words):
        await generator.task
    scorer = await stack.score(by_row)
    with pytest.raises(ReplayError, match=words):
        await scorer.task


async def test_permits_that_nobody_would_count_are_refused(make_stack):
    tables = [TableConfig(name="rollouts"), TableConfig(name="unscored", sampler="fifo")]
    stack = await make_stack(tables=tables, groups=2, permit_tables=None)
    generator = await stack.generate(Hook())
    with pytest.raises(ReplayError, match="without 'unscored': nobody counts the permits"):
        await generator.task


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"unscored_table": "rollouts"}, "unscored_table 'rollouts' is another table of this generator as well"),
        ({"unscored_table": "x", "partial_groups_table": "x"}, "unscored_table 'x' is another table"),
        ({"unscored_table": "x", "prompts_table": "p", "prompts_mode": "curriculum"}, "orders by rewards"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        GeneratorConfig(**settings)


def test_a_scorer_has_two_tables():
    with pytest.raises(ValueError, match="'rollouts' is where they come from"):
        ScorerConfig("rollouts")


async def test_a_generator_of_unscored_groups_has_no_reward_function_and_no_group_filter(stack):
    for options in ({"reward": by_row}, {"group_filter": bool}):
        with pytest.raises(ValueError, match="belong to the scorer"):
            await stack.generate(Hook(), **options)


async def test_a_filter_of_the_caller_counts_beside_drop_zero_variance(stack):
    seen: list[float] = []

    def group_filter(group: Any) -> bool:
        seen.append(float(group.rewards.sum()))
        return False

    await play(stack)
    scorer = await stack.score(by_row_index, drop_zero_variance=True, max_items=1, group_filter=group_filter)
    await scorer.task
    assert scorer.stats["groups_filtered"] == 1
    assert await stack.holds() == 0
    assert len(seen) == 1


async def by_row_index(row: Any, text: str, rollout: Rollout) -> float:
    return float(rollout.info["number"])
