"""Groups that get their rewards elsewhere: from a generator without a reward function, by a scorer, to the trainer."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest

from replay_client import AsyncReplayClient
from replay_client.errors import ReplayError
from replay_client.records import read_described
from replay_client.testing import PATIENCE, async_until
from replay_generator import GeneratorConfig, GroupScorer, PromptError, Rollout, RolloutGenerator, ScorerConfig
from replay_generator.rewards.functions import group_reward
from replay_generator.stages import scorer as scorer_module
from replay_generator.stages import stage as stage_module
from replay_generator.testing import ScriptedEngine
from replay_server import AdmissionConfig, ReplayServer, TableConfig
from replay_trainer.groups import why_unusable
from tests.generator import test_generator_server
from tests.generator.test_partial_groups import PROMPTS, SIZE, sum_of_numbers
from tests.kit.engines import SAID
from tests.kit.generators import Hook

STAGES = ("partial_groups", "unscored")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(scorer_module, "_PAUSE", 0.0)


@contextmanager
def serving(groups: int = 4, partial_groups: Any = STAGES, max_staleness: int | None = None, **rollouts: Any) -> Any:
    admission = AdmissionConfig(
        table="rollouts", fresh_groups_per_step=groups, max_staleness=0, permit_tables=partial_groups
    )
    tables = [TableConfig(name="rollouts", sampler="fifo", max_staleness=max_staleness, **rollouts)]
    with ReplayServer(tables=tables, port=0, admission=admission) as server:
        yield server.address


@asynccontextmanager
async def generating_partially(
    address: str, hook: Any, *, engine: Any = None, reward: Any = sum_of_numbers, prompts: Any = None, **config: Any
) -> AsyncIterator[tuple[RolloutGenerator, AsyncReplayClient, asyncio.Task[None]]]:
    """A generator that runs until the end of the block, and then stops at once."""
    if prompts is None:
        prompts = PROMPTS
    settings = {
        "group_size": SIZE,
        "stop_grace": 0.0,
        "partial_groups_table": "partial_groups",
        "max_concurrent_groups": 2,
    } | config
    engine = engine or ScriptedEngine(completions=[SAID])
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


def generating(address: str, hook: Any = None, **config: Any) -> Any:
    hook = Hook(*range(SIZE)) if hook is None else hook
    return generating_partially(
        address,
        hook,
        reward=None,
        **{"partial_groups_table": None, "unscored_table": "unscored", "max_groups": 1} | config,
    )


async def play(address: str, hook: Any = None, **config: Any) -> None:
    """Inserts groups without rewards, three unless told otherwise."""
    async with generating(address, hook, **{"max_groups": 3} | config) as (_, _client, task):
        await task


@asynccontextmanager
async def scoring(
    address: str, reward: Any, **config: Any
) -> AsyncIterator[tuple[GroupScorer, AsyncReplayClient, Any]]:
    """A scorer that runs until the end of the block."""
    group_filter = config.pop("group_filter", None)
    async with AsyncReplayClient(address, 10.0) as client:
        scorer = GroupScorer(client, reward, ScorerConfig("unscored", **config), group_filter=group_filter)
        task = asyncio.create_task(scorer.run())
        try:
            yield scorer, client, task
        finally:
            scorer.stop()
            await asyncio.gather(task, return_exceptions=True)


async def by_row(row: Any, text: str, rollout: Rollout) -> float:
    """Needs what only the generator saw: the row, the turns, and what the hook told."""
    return row["bonus"] + rollout.info["number"] + len(rollout.turns) / 10


@pytest.mark.parametrize("partial_groups", [None, "partial_groups"])
async def test_permits_and_versions_are_those_of_the_generation_from_the_rollouts_to_the_trainer(partial_groups):
    with serving() as address:
        await play(address, partial_groups_table=partial_groups, max_groups=1, tags={"environment": "sums"})
        async with AsyncReplayClient(address) as client:
            assert await counts(client) == (0, 1, 1)
            for version in (1, 2):
                await client.set_policy_version(version)
        async with scoring(address, by_row) as (scorer, client, _):
            await inserted(client)
            assert await counts(client) == (1, 0, 0)
            (sample,) = await client.sample("rollouts")
            assert (sample.info.policy_version, sample.info.staleness) == (0, 2)
            assert sample.info.tags == {"environment": "sums"}
            info = await client.server_info()
            assert info.tables["unscored"].size == info.tables["partial_groups"].size == 0
            roles = [each.role for each in info.clients if read_described(each.settings).get("part") == "scorer"]
            assert roles == ["scorer"]
    group = sample.group
    np.testing.assert_allclose(group.extras["rewards/by_row"], [100.4, 101.4, 102.4, 103.4], rtol=1e-6)
    assert group.extras["rewards/rollout/steps"].tolist() == [2.0] * SIZE
    assert (group.prompt_id, group.policy_version, group.advantages.any()) == ("p0", 0, True)
    assert [ids[3] for ids in group.completions()] == [0, 1, 2, 3]
    assert scorer.stats["groups"] == 1


async def test_a_group_that_is_too_old_when_it_is_scored_gives_its_permit_back():
    with serving(max_staleness=1) as address:
        await play(address, max_groups=1)
        began = asyncio.Event()

        async def slow(row: Any, text: str) -> float:
            began.set()
            async with AsyncReplayClient(address) as trainer:
                for version in (1, 2):
                    await trainer.set_policy_version(version)
            return 1.0

        async with scoring(address, slow) as (scorer, client, _):
            await began.wait()
            await async_until(lambda: scorer.stats["groups_refused_stale"] == 1)
            assert await counts(client) == (0, 0, 0)


async def test_who_dies_leaves_its_groups_to_another_one_and_their_results_count_once():
    with serving() as address:
        await play(address)
        stuck = asyncio.Event()

        async def hangs(row: Any, text: str) -> float:
            stuck.set()
            return await asyncio.Event().wait()

        async with AsyncReplayClient(address) as dead:
            held = await dead.sample("unscored", 3, lease=600.0)
            async with scoring(address, by_row) as (scorer, client, _):
                await client.describe({"part": "here"})
                await dead.acknowledge(held, requeue=True)  # as the end of its lease does
                await inserted(client, 3)
                with pytest.raises(ReplayError):  # what the dead one would have said
                    await dead.insert(b"late", {"rollouts": 1.0}, closes=held[:1])
                assert await counts(client) == (3, 0, 0)
                assert scorer.stats["groups"] == 3
        async with scoring(address, hangs) as (scorer, client, _):
            await play(address, max_groups=1)
            await stuck.wait()
        async with AsyncReplayClient(address) as client:  # who stops requeues it
            info = await client.server_info()
            assert (info.tables["unscored"].size, info.tables["unscored"].reserved) == (1, 0)


async def test_three_scorers_share_the_groups_and_a_slow_one_takes_fewer():
    asked, gate = Counter[str](), asyncio.Event()

    async def at_once(row: Any, text: str) -> float:
        asked["fast"] += 1
        return 1.0

    async def slow(row: Any, text: str) -> float:
        asked["slow"] += 1
        await gate.wait()
        return 1.0

    with serving(groups=12) as address:
        prompts = [{"prompt": "+", "prompt_id": f"p{number}", "bonus": 0} for number in range(12)]
        async with (
            scoring(address, slow, concurrency=2) as (held, _, _),
            scoring(address, at_once) as (first, _, _),
            scoring(address, at_once) as (second, client, _),
        ):
            await play(address, prompts=prompts, max_groups=12)
            await inserted(client, 12 - (1 if asked["slow"] else 0))
            assert asked["slow"] <= 2
            gate.set()
            await inserted(client, 12)
            assert sum(each.stats["groups"] for each in (held, first, second)) == 12
            assert await counts(client) == (12, 0, 0)


async def test_rewards_are_asked_for_again_and_a_rollout_without_one_leaves_its_group():
    asked = Counter[int]()

    async def fails(row: Any, text: str, rollout: Rollout) -> float:
        number = rollout.info["number"]
        asked[number] += 1
        if number == 3 or (number == 1 and asked[1] < 3):
            raise RuntimeError("the sandbox is away")
        return float(number)

    with serving() as address:
        await play(address, max_groups=1)
        async with scoring(address, fails, min_rollouts=3) as (scorer, client, _):
            await inserted(client)
            (sample,) = await client.sample("rollouts")
            assert scorer.stats["rollouts_failed"] == 1
    assert asked == {0: 1, 1: 3, 2: 1, 3: 3}
    np.testing.assert_allclose(sample.group.rewards, [0, 2, 4])  # beside those of the hook
    (why,) = sample.group.meta["failures"]
    assert "the sandbox is away" in why


@pytest.mark.parametrize("whole", [False, True])
async def test_a_group_that_cannot_be_scored_is_dropped_with_its_permit_and_its_reason(caplog, whole):
    def fails(row: Any, texts: Any) -> Any:
        raise RuntimeError("the judge is out")

    with serving() as address:
        await play(address)
        async with scoring(address, group_reward(fails) if whole else fails, attempts=2) as (scorer, client, _):
            await async_until(lambda: scorer.stats["groups_skipped"] == 3)
            assert await counts(client) == (0, 0, 0)
            assert (await client.server_info()).tables["rollouts"].size == 0
    assert f"{SIZE} of {SIZE} rollouts failed" in caplog.text
    assert "the judge is out" in caplog.text


async def test_a_reward_that_takes_too_long_has_failed_and_when_all_groups_fail_the_run_ends(monkeypatch):
    monkeypatch.setattr(stage_module, "_MOST_SKIPPED", 2)

    async def hangs(row: Any, text: str) -> float:
        return await asyncio.Event().wait()

    with serving() as address:
        await play(address)
        async with scoring(address, hangs, reward_timeout=0.05, attempts=1) as (_, _client, task):
            with pytest.raises(PromptError, match=r"2 groups in a row were skipped.*took longer than 0.05 s"):
                await task
        async with AsyncReplayClient(address) as client:
            left = (await client.server_info()).tables["unscored"]
            assert left.size <= 1  # the third may have been too late as well, before the run ended
            assert left.size == (await counts(client))[2]


async def test_a_function_of_whole_groups_sees_all_rollouts_and_the_group_filter_sees_the_scored_group():
    @group_reward
    def ranked(row: Any, texts: list[str], rollouts: list[Rollout]) -> list[float]:
        return [float(len(rollouts))] * len(texts)

    with serving() as address:
        await play(address, max_groups=2)
        group_filter = lambda group: group.prompt_id == "p1"  # noqa: E731
        async with scoring(address, ranked, group_filter=group_filter) as (scorer, client, _):
            await inserted(client)
            await async_until(lambda: scorer.stats["groups_filtered"] == 1)
            (sample,) = await client.sample("rollouts")
            assert await counts(client) == (1, 0, 0)
    assert sample.group.extras["rewards/ranked"].tolist() == [SIZE] * SIZE


async def test_groups_that_teach_nothing_can_be_left_out_and_their_permits_go_back():
    async def against_the_hook(row: Any, text: str, rollout: Rollout) -> float:
        return -rollout.info["number"] if row["prompt_id"] == "p0" else 0.0

    with serving() as address:
        await play(address)
        async with scoring(address, against_the_hook, drop_zero_variance=True) as (scorer, client, _):
            await inserted(client, 2)
            await async_until(lambda: scorer.stats["groups_filtered"] == 1)
            assert await counts(client) == (2, 0, 0)


async def test_why_the_generator_lacks_rollouts_arrives_with_the_scored_group():
    with serving() as address:
        await play(address, Hook(*range(SIZE), fails=(2,)), max_groups=1, min_rollouts=3)
        async with scoring(address, by_row) as (_, client, _task):
            await inserted(client)
            (sample,) = await client.sample("rollouts")
    assert sample.group.group_size == 3
    assert "the environment broke" in sample.group.meta["failures"][0]


async def test_a_trainer_that_is_handed_a_group_without_rewards_says_so():
    with serving() as address:
        await play(address, max_groups=1)
        async with AsyncReplayClient(address) as client:
            (sample,) = await client.sample("unscored")
    assert "without rewards" in why_unusable(sample)
    assert "replay score" in why_unusable(sample)


@pytest.mark.parametrize(
    ("partial_groups", "words"),
    [
        ((), "the server has no table 'unscored'"),
        (("partial_groups",), "has no table 'unscored'.*add it to permit_tables"),
    ],
)
async def test_a_server_that_does_not_know_the_table_is_named_by_generator_and_scorer(partial_groups, words):
    with serving(partial_groups=partial_groups) as address:
        async with generating(address) as (_, _client, task):
            with pytest.raises(ReplayError, match=words):
                await task
        async with scoring(address, by_row) as (_, _client, task):
            with pytest.raises(ReplayError, match=words):
                await task


async def test_permits_that_nobody_would_count_are_refused():
    admission = AdmissionConfig(table="rollouts", fresh_groups_per_step=2, max_staleness=0)
    tables = [TableConfig(name="rollouts"), TableConfig(name="unscored", sampler="fifo")]
    with ReplayServer(tables=tables, port=0, admission=admission) as server:
        async with generating(server.address) as (_, _client, task):
            with pytest.raises(ReplayError, match="without 'unscored': nobody counts the permits"):
                await task


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


async def test_a_generator_of_unscored_groups_has_no_reward_function_and_no_group_filter():
    with serving() as address, pytest.raises(ValueError, match="belong to the scorer"):
        async with generating_partially(address, Hook(), unscored_table="unscored"):
            pass


async def test_a_filter_of_the_caller_counts_beside_drop_zero_variance():
    seen: list[float] = []

    def group_filter(group: Any) -> bool:
        seen.append(float(group.rewards.sum()))
        return False

    with serving() as address:
        await play(address, max_groups=1)
        config = {"drop_zero_variance": True, "max_items": 1, "group_filter": group_filter}
        async with scoring(address, by_row_index, **config) as (scorer, client, task):
            await task
            assert scorer.stats["groups_filtered"] == 1
            assert (await client.server_info()).tables["rollouts"].size == 0
    assert len(seen) == 1


async def by_row_index(row: Any, text: str, rollout: Rollout) -> float:
    return float(rollout.info["number"])
