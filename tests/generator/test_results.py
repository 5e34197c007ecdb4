"""What a rollout ends with: a result that no group can hold is refused where it comes in, and loses no more."""

import json
from typing import Any

import pytest

from replay_generator import (
    GeneratorConfig,
    PromptError,
    Rollout,
    RolloutGenerator,
    RolloutPolicy,
    RolloutSequence,
    ScorerConfig,
    Task,
)
from replay_generator.rewards.functions import Reward
from replay_generator.stages.scorer import GroupScorer
from replay_generator.testing import ScriptedEngine
from replay_server import AdmissionConfig, TableConfig
from tests.generator.sessions.test_remote import running
from tests.kit.clients import RecordingClient
from tests.kit.engines import SAID
from tests.kit.generators import generate, make_prompts, zero
from tests.kit.servers import async_serving

HALF = "\ud800"
"""Half of a surrogate pair."""
RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a reward beyond float32": ({"reward": 1e39}, "the reward is 1e+39: give a number from -1e+09 to 1e+09"),
    "a reward that no trainer can use": ({"reward": -2e9}, "the reward is -2000000000.0"),
    "a reward of 400 digits": ({"reward": 10**400}, "reward"),
    "a reward that is infinite": ({"reward": float("-inf")}, "reward"),
    "a reward that is no number": ({"reward": float("nan")}, "reward"),
    "a metric beyond float32": ({"reward": 1, "metrics": {"steps": -1e39}}, "the metric 'steps' is -1e+39"),
    "a metric of 400 digits": ({"reward": 1, "metrics": {"steps": 10**400}}, "steps"),
    "a long name": ({"reward": 1, "metrics": {"x" * 300: 1}}, "the name of a metric must have 1 to 200 bytes"),
    "a long name of few letters": ({"reward": 1, "metrics": {"\U0001f600" * 60: 1}}, "has 240"),
    "an empty name": ({"reward": 1, "metrics": {"": 1}}, "the name of a metric must have 1 to 200 bytes"),
    "half a surrogate": ({"reward": 1, "metrics": {HALF: 1}}, ""),
    "a line break": ({"reward": 1, "metrics": {"a\nb": 1}}, "printable characters only"),
    "a zero byte": ({"reward": 1, "metrics": {"a\0": 1}}, "printable characters only"),
    "the name of offsets": ({"reward": 1, "metrics": {"a/offsets": 1}}, "must not end with '/offsets'"),
    "many metrics": ({"reward": 1, "metrics": {f"m{n}": n for n in range(5000)}}, "5000 metrics: give at most 256"),
}


def cases(**more: tuple[dict[str, Any], str]) -> Any:
    table = RESULTS | more
    return pytest.mark.parametrize(("said", "says"), list(table.values()), ids=list(table))


@cases(
    info=({"reward": 1, "info": {"big": 1 << 70}}, "Rollout.info"),
    surrogate=({"reward": 1, "info": {"text": HALF}}, ""),
    unknown=({"reward": 1, HALF: 1}, ""),
)
async def test_an_end_that_no_group_can_hold_is_refused_and_the_agent_may_end_the_rollout_otherwise(said, says):
    async with running(group_size=1) as run:
        offer = await run.taken()
        await run.ask(offer)
        body = json.dumps(said)
        async with run.http.post(f"{run.url}/sessions/{offer['id']}/end", data=body) as response:
            assert response.status == 400
            assert says in await response.text()
        status, _ = await run.end(offer, reward=1e9, metrics={"x" * 200: -3.4e38})
        assert status == 200
        group = await run.group()
    assert group.rewards.tolist() == [1e9]


async def test_an_end_that_is_nested_without_end_is_refused():
    async with running(group_size=1) as run:
        offer = await run.taken()
        await run.ask(offer)
        body = '{"reward": 1, "info": {"a": ' + "[" * 200_000 + "]" * 200_000 + "}}"
        async with run.http.post(f"{run.url}/sessions/{offer['id']}/end", data=body) as response:
            assert response.status == 400
        await run.end(offer, reward=1.0)
        await run.group()


async def test_a_failure_in_words_that_are_no_text_fails_its_rollout_alone():
    async with running(group_size=2, min_rollouts=1) as run:
        for said in ({"failed": f"{HALF} is lost"}, {"reward": 1.0}):
            offer = await run.taken()
            await run.ask(offer)
            body = json.dumps(said)
            async with run.http.post(f"{run.url}/sessions/{offer['id']}/end", data=body) as response:
                assert response.status == 200
        group = await run.group()
    assert "is lost" in group.meta["failures"][0]


# ------------------------------------------------------------------------------------------------ hooks


def ends_with(**fields: Any) -> Any:
    """A hook whose second rollout ends with these fields."""

    async def hook(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        sequence.append_completion(await policy.generate(task.prompt_ids))
        return Rollout([sequence], **(fields if task.index == 1 else {"reward": float(task.index)}))

    return hook


@cases(
    text=({"reward": "1.0"}, "the reward is '1.0'"),
    no_mapping=({"metrics": [1.0]}, "metrics must be numbers by name"),
    no_name=({"metrics": {1: 1.0}}, "the name of a metric must be a text"),
    finish_reason=({"finish_reason": HALF}, "finish_reason must have printable characters"),
)
async def test_a_hook_whose_rollout_no_group_can_hold_loses_this_rollout_alone(said, says):
    client = RecordingClient()
    engine = ScriptedEngine(completions=[SAID])
    await generate(client, engine, ends_with(**said), reward=None, group_size=3, min_rollouts=2)
    group = client.inserts[0][0]
    assert group.rewards.tolist() == [0.0, 2.0]
    assert "no group can hold" in group.meta["failures"][0]
    assert says in group.meta["failures"][0]


async def test_a_role_of_a_turn_that_is_no_text_loses_its_rollout_alone():
    async def hook(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        if task.index == 1:
            sequence.append_observation([5], role=HALF)
        sequence.append_completion(await policy.generate(sequence.token_ids))
        return Rollout([sequence])

    client = RecordingClient()
    await generate(client, ScriptedEngine(completions=[SAID]), hook, group_size=3, min_rollouts=2)
    assert "the role of a turn must have printable characters" in client.inserts[0][0].meta["failures"][0]


# ------------------------------------------------------------------------------------------------ reward functions


def sometimes(value: Any) -> Any:
    def reward(row: Any, text: str) -> Any:
        return value if row["prompt_id"] == "p1" else 1.0

    return reward


@pytest.mark.parametrize(
    ("value", "weight", "says"),
    [
        (1e39, 1.0, "must be finite, in float32 too"),
        (-1e39, 1.0, "must be finite, in float32 too"),
        (10**400, 1.0, "too large"),
        (1e10, 1.0, "no trainer can use a reward beyond"),
        (1e8, 1e300, "no trainer can use a reward beyond"),
    ],
    ids=["beyond float32", "below float32", "400 digits", "beyond what trainers use", "times its weight"],
)
async def test_a_reward_that_no_group_can_hold_skips_its_group_and_the_run_goes_on(value, weight, says, caplog):
    rewards = [Reward(sometimes(value), weight, "odd"), Reward(zero, 1.0, "zero")]
    if weight > 1:
        rewards[0] = Reward(lambda row, text: value if row["prompt_id"] == "p1" else 0.0, weight, "odd")
    client = RecordingClient()
    generator = RolloutGenerator(
        client,  # type: ignore[arg-type]
        ScriptedEngine(),
        make_prompts(3),
        rewards,
        GeneratorConfig(group_size=2, on_prompt_error="skip"),
    )
    await generator.run()
    assert sorted(group.prompt_id for group, _ in client.inserts) == ["p0", "p2"]
    assert generator.stats["groups_skipped"] == 1
    assert says in caplog.text


@pytest.mark.parametrize("name", ["x" * 300, HALF, "a\nb", "rollout/steps", "a/offsets"], ids=ascii)
def test_a_reward_function_with_a_name_that_no_group_can_hold_is_refused_before_the_run(name):
    with pytest.raises(ValueError, match="reward function"):
        Reward(zero, 1.0, name)


async def test_rollouts_whose_sum_is_no_reward_end_a_run_that_raises_with_their_prompt():
    hook = ends_with(reward=9e8)
    with pytest.raises(PromptError, match=r"prompt 'p0': the weighted sum of 'huge', 'rollout' is 1.8e\+09"):
        await generate(
            RecordingClient(),
            ScriptedEngine(completions=[SAID]),
            hook,
            reward=Reward(lambda row, text: 9e8, 1.0, "huge"),
            group_size=2,
        )


# ------------------------------------------------------------------------------------------------ the server refuses


def priority(group: Any) -> float:
    """More than a table takes, for one prompt."""
    return 1e308 if group.prompt_id == "p1" else 1.0


TAGGED = [{"prompt": f"{index}+1=", "prompt_id": f"p{index}", "tags": {}} for index in range(3)]
TAGGED[1] |= {"tags": {f"tag{number}": number for number in range(8)}}
"""Beside the tag of the generator these are nine."""


@pytest.mark.parametrize("partial_groups", [None, "partial_groups"])
@pytest.mark.parametrize("why", ["a priority", "tags"])
async def test_a_group_that_the_server_refuses_is_skipped_and_counted_and_its_permit_goes_back(
    why, partial_groups, caplog
):
    config: dict[str, Any] = {"group_size": 2, "max_concurrent_groups": 1, "partial_groups_table": partial_groups}
    config |= {"priority": priority} if why == "a priority" else {"tags": {"environment": "math"}}
    tables = [TableConfig(name="rollouts")]
    if partial_groups is not None:
        tables.append(TableConfig(name=partial_groups))
    permits = AdmissionConfig(table="rollouts", fresh_groups_per_step=8, max_staleness=1, permit_tables=partial_groups)
    async with async_serving(tables, admission=permits) as client:
        generator = RolloutGenerator(client, ScriptedEngine(), TAGGED, zero, GeneratorConfig(**config))
        await generator.run()
        info = await client.server_info()
    assert generator.stats["groups"] == 2
    assert generator.stats["groups_refused"] == 1
    assert generator.stats["groups_skipped"] == 1
    assert "prompt 'p1': its group is refused: " in caplog.text
    assert info.tables["rollouts"].size == 2
    assert info.admission is not None
    assert info.admission.running == 0


async def test_a_server_that_refuses_all_groups_ends_the_run_in_its_words():
    async with async_serving([TableConfig(name="rollouts")]) as client:
        config = GeneratorConfig(group_size=1, priority=lambda group: 1e308)
        with pytest.raises(PromptError, match=r"100 groups in a row were skipped, .* its group is refused: "):
            await RolloutGenerator(client, ScriptedEngine(), make_prompts(), zero, config).run()


async def test_a_scored_group_that_the_server_refuses_is_counted_and_the_scorer_goes_on(caplog):
    tables = [TableConfig(name="unscored", max_times_sampled=1), TableConfig(name="rollouts")]
    async with async_serving(tables) as client:
        config = GeneratorConfig(group_size=2, unscored_table="unscored")
        await RolloutGenerator(client, ScriptedEngine(), make_prompts(3), None, config).run()
        scorer = GroupScorer(client, zero, ScorerConfig("unscored", priority=priority, max_items=3))
        await scorer.run()
        info = await client.server_info()
    assert info.tables["rollouts"].size == 2
    assert info.tables["unscored"].size == 0
    assert scorer.stats["groups_refused"] == 1
    assert "prompt 'p1'" in caplog.text or "its group is refused" in caplog.text


async def test_a_scorers_reward_beyond_float32_leaves_its_group_out_and_the_scorer_goes_on(monkeypatch):
    monkeypatch.setattr("replay_generator.stages.scorer._PAUSE", 0.0)
    tables = [TableConfig(name="unscored", max_times_sampled=1), TableConfig(name="rollouts")]
    async with async_serving(tables) as client:
        config = GeneratorConfig(group_size=2, unscored_table="unscored")
        await RolloutGenerator(client, ScriptedEngine(), make_prompts(3), None, config).run()
        scorer = GroupScorer(client, sometimes(1e39), ScorerConfig("unscored", max_items=3))
        await scorer.run()
        info = await client.server_info()
    assert info.tables["rollouts"].size == 2
    assert scorer.stats["groups_skipped"] == 1
