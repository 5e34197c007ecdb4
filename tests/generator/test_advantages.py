"""Advantages by a function of the user's own: they are stored as it returns them, and each mistake is one sentence."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from replay_client.advantages import ADVANTAGES_BY
from replay_client.errors import ReplayError
from replay_client.rollout import RolloutGroup
from replay_client.scoring import carries_gradient, group_advantages
from replay_client.testing import PATIENCE
from replay_generator import GeneratorConfig, PromptError, ScorerConfig
from replay_generator.rewards.functions import Reward
from replay_generator.testing import ScriptedEngine
from tests.generator import own_advantages
from tests.kit.clients import RecordingClient
from tests.kit.generators import Hook, make_generator, played
from tests.kit.scoring import UNSCORED, play

OWN = "tests.generator.own_advantages"


async def groups_of(count: int = 1, **options: Any) -> list[RolloutGroup]:
    """The groups that a generator inserts."""
    client = RecordingClient()
    await make_generator(client, ScriptedEngine(), max_groups=count, **options).run()
    return [group for group, _ in client.inserts]


def others_of(rewards_G: np.ndarray) -> list[np.float32]:
    """The advantages of leave-one-out, rollout by rollout."""
    rewards = rewards_G.tolist()
    means = [np.mean(rewards[:index] + rewards[index + 1 :]) for index in range(len(rewards))]
    return [np.float32(reward - mean) for reward, mean in zip(rewards, means, strict=True)]


# ------------------------------------------------------------------------------------------------ what it computes


@pytest.mark.parametrize(("name", "scale"), [("as_built_in", "group"), ("without_division", "none")])
async def test_a_function_equal_to_the_built_in_one_makes_the_same_bits(name, scale):
    (built_in,) = await groups_of(scale_rewards=scale)
    (own,) = await groups_of(advantages=f"{OWN}:{name}")
    assert own.meta.pop(ADVANTAGES_BY) == f"{OWN}:{name}"
    assert own.encode() == built_in.encode()


async def test_the_advantages_are_those_that_the_function_returns():
    (group,) = await groups_of(advantages=f"{OWN}:leave_one_out")
    assert np.allclose(group.advantages, others_of(group.rewards), rtol=0, atol=1e-6)
    assert group.advantages.any()


async def test_a_function_itself_is_taken_and_named():
    (group,) = await groups_of(advantages=own_advantages.leave_one_out)
    assert group.meta[ADVANTAGES_BY] == "leave_one_out"


async def test_a_function_gets_the_row_the_lengths_and_the_rewards_of_each_function():
    seen: dict[str, Any] = {}

    def noting(rewards_G, row, lengths_G, rewards_by_function):
        seen.update(rewards_G=rewards_G, row=row, lengths_G=lengths_G, by_function=rewards_by_function)
        return rewards_G

    def length(row: Any, text: str) -> float:
        return float(len(text))

    def abstains(row: Any, text: str) -> float | None:
        return 4.0 if text == "9" else None

    (group,) = await groups_of(
        prompts=[{"prompt": "+", "prompt_id": "p0", "difficulty": 2}],
        reward=[length, Reward(abstains, weight=0.5)],
        advantages=noting,
        group_size=3,
    )
    assert seen["rewards_G"].dtype == np.float64
    assert seen["rewards_G"].tolist() == [2.0, 0.0, 3.0]
    assert group.rewards.tolist() == [2.0, 0.0, 3.0]
    assert seen["row"]["difficulty"] == 2
    assert seen["lengths_G"].tolist() == [3, 0, 1]
    assert seen["by_function"]["length"].tolist() == [2.0, 0.0, 1.0]
    assert np.array_equal(seen["by_function"]["abstains"], [np.nan, np.nan, 4.0], equal_nan=True)


async def test_lengths_do_not_count_what_a_tool_wrote():
    seen = []

    def noting(rewards_G, lengths_G):
        seen.append(lengths_G.tolist())
        return rewards_G

    group = await played(Hook(0, 1, 2, 3), advantages=noting)
    assert seen[-1] == [int(group.trained_mask[span].sum()) for span in group.rollout_spans()]
    assert sum(seen[-1]) < group.num_tokens


async def test_a_function_with_any_parameters_gets_all_facts_by_name():
    seen: list[set[str]] = []

    def noting(rewards_G, **facts):
        seen.append({*facts})
        return rewards_G

    await groups_of(advantages=noting)
    assert seen == [{"row", "lengths_G", "rewards_by_function"}]


async def test_a_function_that_changes_its_rewards_changes_no_group():
    def changing(rewards_G):
        rewards_G -= rewards_G.mean()
        return rewards_G

    (group,) = await groups_of(advantages=changing)
    assert group.rewards.tolist() == [2.0, 0.0, 1.0, 2.0]
    assert group.advantages.tolist() == [0.75, -1.25, -0.25, 0.75]


async def test_a_function_is_called_for_one_group_at_a_time_and_beside_the_event_loop():
    running, most, threads = 0, 0, set()

    def slow(rewards_G, row):
        nonlocal running, most
        running += 1
        most = max(most, running)
        threads.add(threading.current_thread() is threading.main_thread())
        threading.Event().wait(0.01)
        running -= 1
        return rewards_G

    await groups_of(6, advantages=slow, max_concurrent_groups=6)
    assert most == 1
    assert threads == {False}


async def test_equal_rewards_with_advantages_of_their_own_carry_a_gradient():
    def same(row: Any, text: str) -> float:
        return 1.0

    options = {"reward": same, "group_filter": carries_gradient}
    (group,) = await groups_of(advantages=f"{OWN}:above_half", **options)
    assert group.advantages.tolist() == [0.5] * 4
    client = RecordingClient()
    await make_generator(client, ScriptedEngine(), max_groups=1, **options).run()
    assert client.inserts == []


def test_group_advantages_takes_a_function_too():
    rewards = [1.0, 0.0, 0.5]
    assert group_advantages(rewards, advantages=f"{OWN}:as_built_in").tolist() == group_advantages(rewards).tolist()
    by_length = lambda rewards_G, lengths_G: rewards_G / lengths_G  # noqa: E731
    found = group_advantages(rewards, advantages=by_length, facts={"lengths_G": np.array([2, 4, 5])})
    assert found.tolist() == np.float32([0.5, 0.0, 0.1]).tolist()
    assert found.dtype == np.float32
    with pytest.raises(ValueError, match=r"raised TypeError: .*missing 1 required positional argument: 'lengths_G'"):
        group_advantages(rewards, advantages=by_length)


# ------------------------------------------------------------------------------------------------ the scorer


async def test_a_scorer_computes_the_advantages_by_the_function_and_a_generator_without_rewards_does_not(make_stack):
    async def by_number(row: Any, text: str, rollout: Any) -> float:
        return float(rollout.info["number"] ** 2)

    stack = await make_stack(**UNSCORED)
    await play(stack)
    await stack.score(by_number, advantages=f"{OWN}:leave_one_out")
    await stack.inserted()
    (sample,) = await stack.client.sample("rollouts")
    assert np.allclose(sample.group.advantages, others_of(sample.group.rewards), rtol=0, atol=1e-5)
    assert sample.group.meta[ADVANTAGES_BY] == f"{OWN}:leave_one_out"


async def test_a_scorer_with_a_function_equal_to_the_built_in_one_makes_the_same_bits(make_stack):
    groups = []
    for options in ({}, {"advantages": f"{OWN}:as_built_in"}):
        stack = await make_stack(**UNSCORED)
        await play(stack)
        await stack.score(lambda row, text: 1.0, **options)
        await stack.inserted()
        (sample,) = await stack.client.sample("rollouts")
        groups.append(sample.group)
    built_in, own = groups
    assert own.advantages.any()
    assert own.advantages.tobytes() == built_in.advantages.tobytes()
    assert own.rewards.tobytes() == built_in.rewards.tobytes()


async def test_a_scorer_drops_the_group_for_which_the_function_fails_and_goes_on(make_stack, caplog):
    def fails_for_p1(rewards_G, row):
        return rewards_G * (np.nan if row["prompt_id"] == "p1" else 1.0)

    stack = await make_stack(**UNSCORED)
    await play(stack, max_groups=3)
    scorer = await stack.score(lambda row, text: 1.0, advantages=fails_for_p1)
    await stack.inserted(2)
    await scorer.counted("groups_skipped")
    assert "prompt 'p1': the advantage function" in caplog.text


# ------------------------------------------------------------------------------------------------ mistakes


MISTAKES = [
    ("nowhere:f", "advantages 'nowhere:f': No module named 'nowhere'"),
    ("leave_one_out", "advantages must be 'package.module:function', not 'leave_one_out'"),
    (f"{OWN}:missing", f"advantages '{OWN}:missing': module '{OWN}' has no attribute 'missing'"),
    (f"{OWN}:not_a_function", "is a int, which cannot be called"),
    (f"{OWN}:is_async", "is async: write it without async"),
    (f"{OWN}:takes_a_row_first", r"has the parameters \(row, rewards_G\), and is called with the rewards alone"),
    (f"{OWN}:takes_more", "missing a required argument: 'difficulty'.* parameters named row, lengths_G, rewards_by_f"),
    (f"{OWN}:of_one_rollout", r"returned an array of shape \(1,\): return one number for each of the 4 rollouts"),
    (f"{OWN}:of_each_token", r"returned an array of shape \(4, 3\): return one number for each of the 4 rollouts"),
    (f"{OWN}:forgets_to_return", r"returned None: return one number for each of the 4 rollouts, .* shape \(4,\)"),
    (f"{OWN}:as_texts", r"returned \['0.0', '1.0', '0.0', '1.0'\]: return one number"),
    (f"{OWN}:raises", r"raised AttributeError: .*no_such_method.* \(.*own_advantages.py, line \d+\)"),
    (f"{OWN}:ends_the_process", r"raised SystemExit: 3 \(.*own_advantages.py, line \d+\)"),
    (
        f"{OWN}:divides_by_the_spread",
        r"returned nan for rollout 0 of a group with the rewards \[1.0, 1.0, 1.0, 1.0\]: return numbers within .* 0",
    ),
]


@pytest.mark.parametrize(("name", "message"), MISTAKES)
@pytest.mark.parametrize("part", ["generator", "scorer"])
def test_a_mistake_is_one_sentence_at_the_start(part, name, message):
    settings = {
        "generator": partial(GeneratorConfig, group_size=4),
        "scorer": partial(ScorerConfig, "unscored"),
    }
    with pytest.raises(ValueError, match=message) as refusal:
        settings[part](advantages=name)
    assert "\n" not in str(refusal.value)


def test_a_function_that_asks_for_a_row_is_not_called_before_there_is_one():
    GeneratorConfig(advantages=f"{OWN}:by_row")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_rewards": "none"}, "takes the place of scale_rewards 'none': leave one of them out"),
        (
            {"unscored_table": "unscored"},
            "the groups of unscored_table 'unscored' have none yet: give it to the scorer",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GeneratorConfig(advantages=f"{OWN}:leave_one_out", **options)
    if "scale_rewards" in options:
        with pytest.raises(ValueError, match=message):
            ScorerConfig("unscored", advantages=f"{OWN}:leave_one_out", **options)


async def test_a_group_for_which_the_function_fails_is_left_out_and_the_run_goes_on(caplog):
    def fails_at_first(rewards_G, row):
        if row["prompt_id"] == "p0":
            raise KeyError("difficulty")
        return np.full(len(rewards_G), np.nan if row["prompt_id"] == "p1" else 1.0)

    client = RecordingClient()
    generator = make_generator(
        client, ScriptedEngine(), max_groups=3, advantages=fails_at_first, on_prompt_error="skip"
    )
    await generator.run()
    assert [group.prompt_id for group, _ in client.inserts] == ["p2"]
    assert generator.stats["groups_skipped"] == 2
    assert "raised KeyError: 'difficulty' (" in caplog.text
    assert "returned nan for rollout 0 of a group with the rewards [2.0, 0.0, 1.0, 2.0]" in caplog.text


@pytest.mark.parametrize("how", [SystemExit(3), KeyboardInterrupt(), ZeroDivisionError("division by zero")])
async def test_a_failure_ends_a_run_that_skips_nothing_with_one_sentence(how):
    def fails(rewards_G, row):
        raise how

    with pytest.raises(PromptError, match=f"prompt 'p0': the advantage function .* raised {type(how).__name__}") as end:
        await groups_of(advantages=fails)
    assert "test_advantages.py, line" in str(end.value)
    assert "\n" not in str(end.value)


async def test_a_function_that_hangs_has_failed_after_the_time_of_a_reward_function():
    never = threading.Event()

    def hangs(rewards_G, row):
        never.wait()
        return rewards_G

    try:
        with pytest.raises(PromptError, match=r"took longer than 0.05 s \(reward_timeout\)"):
            await groups_of(advantages=hangs, reward_timeout=0.05)
    finally:
        never.set()


# ------------------------------------------------------------------------------------------------ the trainer's scaling


OWN_ADVANTAGES: dict[str, Any] = {"max_groups": 1, "advantages": f"{OWN}:leave_one_out"}


async def test_a_generator_does_not_start_where_a_trainer_would_scale_its_advantages_again(stack):
    await stack.client.describe({"part": '"trainer"', "scale_rewards": '"group"'})
    generator = await stack.generate(**OWN_ADVANTAGES)
    with pytest.raises(ReplayError, match=r"trainer .*: scale_rewards = 'group' of the trainer would put other adv"):
        await asyncio.wait_for(generator.task, PATIENCE)


async def test_a_scorer_does_not_start_where_a_trainer_would_scale_its_advantages_again(make_stack):
    stack = await make_stack(**UNSCORED)
    await play(stack)
    await stack.client.describe({"part": '"trainer"', "scale_rewards": '"batch"'})
    scorer = await stack.score(lambda row, text: 1.0, advantages=f"{OWN}:leave_one_out")
    with pytest.raises(ReplayError, match=f"that '{OWN}:leave_one_out' computes .*: leave one of the two"):
        await asyncio.wait_for(scorer.task, PATIENCE)


@pytest.mark.parametrize("says", [{}, {"scale_rewards": "null"}, {"scale_rewards": "[3]"}])
async def test_a_generator_starts_beside_a_trainer_that_scales_nothing(stack, says):
    await stack.client.describe({"part": '"trainer"'} | says)
    generator = await stack.generate(**OWN_ADVANTAGES)
    await asyncio.wait_for(generator.task, PATIENCE)
    assert generator.stats["groups"] == 1


async def test_a_trainer_that_has_left_refuses_nothing(stack):
    trainer = await stack.connect()
    await trainer.describe({"part": '"trainer"', "scale_rewards": '"group"'})
    await trainer.leave()
    generator = await stack.generate(**OWN_ADVANTAGES)
    await asyncio.wait_for(generator.task, PATIENCE)
    assert generator.stats["groups"] == 1
