"""What functions of users return beside numbers (test_user_code.py): it ends no run but by a sentence with its line."""

from typing import Any

import numpy as np
import pytest
import torch

from replay_client.testing import make_group
from replay_generator import GeneratorConfig, PromptError, Rollout, RolloutGenerator
from replay_generator.priorities import load_priority
from replay_generator.rewards.functions import Reward, RewardError, Scorer, group_reward
from replay_generator.rollouts.rollout import RolloutError, checked, single_turn
from replay_generator.rollouts.sessions.agents import result_of
from replay_generator.testing import ScriptedEngine
from replay_generator.user_code.calls import UserCodeError
from tests.generator import user_functions
from tests.generator.test_stages import between, sizes
from tests.kit.clients import RecordingClient
from tests.kit.generators import generate, make_prompts

TOO_LARGE = 1e300
"""For float32, in which groups have their rewards."""


async def scored(function: Any, weight: float = 1.0) -> list[float]:
    total, _ = await Scorer(Reward(function, weight, "odd")).score({}, ["a", "b"])
    return total.tolist()


def rollout(**fields: Any) -> Any:
    """A hook whose rollouts have these fields."""

    async def play(task: Any, policy: Any) -> Rollout:
        made = await single_turn(task, policy)
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    return play


# ------------------------------------------------------------------------------------------------ rewards


@pytest.mark.parametrize(
    "values",
    [np.array([1.0, 2.0], np.float32), torch.tensor([1.0, 2.0]), (1, 2), iter([1, 2])],
    ids=["array", "tensor", "tuple", "iterator"],
)
async def test_rewards_of_a_group_are_any_list(values):
    assert await scored(group_reward(lambda row, texts: values)) == [1.0, 2.0]


@pytest.mark.parametrize(
    "values",
    [None, 1.0, np.array(1.0), torch.tensor(1.0), "ab", b"ab", {0: 1.0, 1: 2.0}, user_functions.Odd()],
    ids=["None", "number", "array", "tensor", "text", "bytes", "dictionary", "ends the process"],
)
async def test_what_is_no_list_is_no_reward_of_a_group(values):
    with pytest.raises(RewardError, match=r".*, not one reward for each completion \(2\)"):
        await scored(group_reward(lambda row, texts: values))


async def test_a_reward_that_float32_cannot_hold_is_an_error_of_its_group():
    with pytest.raises(RewardError, match=r"\[1e\+300, 1e\+300\]: rewards must be finite, in float32 too"):
        await scored(lambda row, text: TOO_LARGE, weight=0.0)
    with pytest.raises(RewardError, match=r"the weighted sum of 'odd' is 1e\+60"):
        await scored(lambda row, text: 1e30, weight=1e30)
    with pytest.raises(PromptError, match=r"prompt 'p0': .*rewards must be finite"):
        await generate(RecordingClient(), ScriptedEngine(), single_turn, reward=lambda row, text: TOO_LARGE)


async def test_an_error_whose_message_ends_the_process_is_an_error_like_others():
    with pytest.raises(RewardError, match=r"'odd' raised UnreadableError: .*user_functions\.py, line"):
        await scored(user_functions.fails_without_words)
    with pytest.raises(PromptError, match="UnreadableError object"):
        await generate(RecordingClient(), ScriptedEngine(), user_functions.fails_without_words)


# ------------------------------------------------------------------------------------------------ hooks and agents


@pytest.mark.parametrize(
    "value", ["1.0", float("nan"), torch.tensor([1.0, 2.0]), user_functions.Odd()], ids=["text", "nan", "two", "ends"]
)
async def test_what_is_no_number_loses_the_rollout_of_its_hook_alone(value):
    client = RecordingClient()

    async def sometimes(task: Any, policy: Any) -> Rollout:
        return await rollout(reward=value if task.index == 0 else 1.0)(task, policy)

    stats = await generate(client, ScriptedEngine(), sometimes, reward=None, min_rollouts=1)
    group = client.inserts[0][0]
    assert group.rewards.tolist() == [1.0] * 3
    assert "no group can hold: the reward is " in group.meta["failures"][0]
    assert stats["rollouts_failed"] == 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"reward": TOO_LARGE}, r"the reward is 1e\+300: give a number"),
        ({"metrics": {"turns": "3"}}, "the metric 'turns' is '3': give a number"),
        ({"metrics": {"turns": np.array([1.0, 2.0])}}, "the metric 'turns' is array"),
        ({"metrics": {"turns": user_functions.Odd()}}, "the metric 'turns' is <"),
        ({"metrics": None}, "metrics must be numbers by name, not None"),
        ({"metrics": [1.0]}, r"metrics must be numbers by name, not \[1.0\]"),
        ({"info": None}, "info must be a dictionary, not None"),
        ({"finish_reason": 1}, "finish_reason must be a text, not 1"),
        ({"finish_reason": np.array([1.0, 2.0])}, "finish_reason must be a text, not array"),
        ({"finish_reason": user_functions.Odd()}, "finish_reason must be a text, not <"),
    ],
    ids=[
        "a reward that is too large",
        "a text",
        "an array",
        "a metric that ends the process",
        "no metrics",
        "a list of metrics",
        "no info",
        "a number as the reason",
        "an array as the reason",
        "a reason that ends the process",
    ],
)
async def test_what_is_no_field_of_a_rollout_loses_it_with_a_sentence(fields, says):
    with pytest.raises(PromptError, match=says):
        await generate(RecordingClient(), ScriptedEngine(), rollout(**fields))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("token_ids", [1, 2, 3, 4]),
        ("token_ids", ["a"]),
        ("token_ids", None),
        ("logprobs", [-0.5]),
        ("logprobs", ["x", "y", "z"]),
        ("logprobs", [float("inf")] * 3),
        ("policy_versions", [0]),
        ("sampled_mask", []),
        ("turns", ["a turn"]),
        ("drawn", [1]),
    ],
)
async def test_a_sequence_whose_parts_do_not_fit_loses_its_own_rollout(part, value):
    async def sometimes(task: Any, policy: Any) -> Rollout:
        made = await single_turn(task, policy)
        if task.index == 0:
            setattr(made.sequences[0], part, value)
        return made

    client = RecordingClient()
    stats = await generate(client, ScriptedEngine(), sometimes, min_rollouts=1)
    assert stats["rollouts_failed"] == 1
    assert len(client.inserts[0][0].rewards) == 3


async def test_rollouts_that_do_not_go_together_are_skipped_with_their_group():
    async def differs(task: Any, policy: Any) -> Rollout:
        made = await single_turn(task, policy)
        width = 1 + task.index
        extras = {"entropy": np.zeros((len(made.sequences[0].token_ids), width), np.float32)}
        made.sequences[0].drawn = [(0, extras, {"entropy": "token"})]
        return made

    client = RecordingClient()
    stats = await generate(client, ScriptedEngine(), differs, on_prompt_error="skip")
    assert stats["groups_skipped"] == 1
    assert client.inserts == []


async def test_a_metric_that_is_unknown_is_left_out():
    client = RecordingClient()
    await generate(client, ScriptedEngine(), rollout(metrics={"turns": None, "calls": 2}))
    assert client.inserts[0][0].extras["rewards/rollout/calls"].tolist() == [2.0] * 4
    assert "rewards/rollout/turns" not in client.inserts[0][0].extras


def test_what_a_hook_returns_in_the_place_of_a_rollout_is_shown_whatever_its_class_does():
    with pytest.raises(RolloutError, match=r"the hook returned <.*Odd object.*, not a Rollout"):
        checked(user_functions.Odd())


@pytest.mark.parametrize("value", ["1.0", np.str_("1.0"), b"1.0", float("nan"), 1j, [1.0]], ids=str)
def test_an_agent_that_ends_with_another_value_has_failed(value):
    with pytest.raises(ValueError, match="reward must be a"):
        result_of(value, needs_reward=True)
    with pytest.raises(ValueError, match=r"metrics.turns must be a"):
        result_of({"metrics": {"turns": value}}, needs_reward=False)


# ------------------------------------------------------------------------------------------------ other functions


@pytest.mark.parametrize(
    ("value", "kept"),
    [(True, 1), (np.bool_(True), 1), (torch.tensor(True), 1), (None, 0), (np.bool_(False), 0), (0, 0)],
    ids=["True", "bool of numpy", "tensor", "None", "False of numpy", "0"],
)
async def test_a_filter_of_groups_returns_what_is_true_or_false(value, kept):
    assert len(await filtered(lambda group: value)) == kept


@pytest.mark.parametrize(
    "value", [np.array([1, 2]), torch.tensor([1, 2]), user_functions.Odd()], ids=["array", "tensor", "ends the process"]
)
async def test_a_filter_that_decides_nothing_is_an_error_with_its_line(value):
    says = r"function '<lambda>' returned .*, which is neither true nor false: .*test_user_values\.py, line"
    with pytest.raises(UserCodeError, match=says):
        await filtered(lambda group: value)


async def test_an_async_function_where_nobody_awaits_is_an_error_and_no_group_is_kept_for_it():
    async def later(*args: Any) -> bool:
        return False

    says = r"function 'later' is async, and here nobody awaits it: write it without async \(.*test_user_values\.py"
    with pytest.raises(UserCodeError, match=says):
        await filtered(later)
    with pytest.raises(UserCodeError, match=says):
        load_priority(later)(make_group())


async def filtered(group_filter: Any) -> list[Any]:
    """The groups that a generator inserts with this filter."""
    client = RecordingClient()
    config = GeneratorConfig(max_groups=1, group_size=2)
    await RolloutGenerator(
        client, ScriptedEngine(), make_prompts(), lambda row, text: 1.0, config, group_filter=group_filter
    ).run()
    return client.inserts


@pytest.mark.parametrize(
    "value",
    [1.0, "1.0", np.float32(1), torch.tensor(1.0), [make_group()], user_functions.Odd()],
    ids=["number", "text", "number of numpy", "tensor", "list", "ends the process"],
)
async def test_a_stage_that_returns_no_group_ends_with_a_sentence_and_gives_its_item_back(value):
    async with between(lambda sample: value, 1) as (client, _, running):
        says = r"function '<lambda>' returned .*: return a RolloutGroup, a Handoff, or None \(.*test_user_values\.py"
        with pytest.raises(UserCodeError, match=says):
            await running
        assert await sizes(client) == [1, 0, 0]
