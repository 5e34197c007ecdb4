"""Scores by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_client.scoring import (
    carries_gradient,
    group_advantages,
    group_learnability,
    group_priority,
    is_zero_variance,
    trained_advantages,
    trained_priority,
)
from replay_client.testing import make_group


def test_advantages_of_binary_rewards_by_hand():
    # mean 0.25, std (Bessel) = sqrt((3 * 0.0625 + 0.5625) / 3) = 0.5
    advantages = group_advantages([1, 0, 0, 0])
    assert advantages.dtype == np.float32
    assert advantages == pytest.approx([0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001])


def test_without_scaling_only_the_mean_is_taken_off():
    assert group_advantages([1, 0, 0, 0], scale="none") == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_a_group_without_variance_has_no_advantage_and_no_priority():
    assert group_advantages([1, 1, 1]).tolist() == [0, 0, 0]
    assert group_priority([1, 1, 1], [0, 0, 0]) == 0.0
    assert group_priority([0.3], [0.0]) == 0.0


def test_priority_is_the_sum_of_absolute_advantages_times_the_spread():
    assert group_priority([1, 0, 0, 0], group_advantages([1, 0, 0, 0])) == pytest.approx(1.5 / 0.5001 * 0.5)


def test_learnability_of_binary_rewards_is_p_times_one_minus_p():
    for solved in range(9):
        rewards = [1.0] * solved + [0.0] * (8 - solved)
        assert group_learnability(rewards) == pytest.approx(solved / 8 * (1 - solved / 8))
    assert group_learnability([0.5, 1.5, 0.5, 1.5]) == pytest.approx(0.25)
    assert group_learnability([0.3]) == 0.0


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=16))
def test_advantages_sum_to_nothing_and_priority_is_never_negative(rewards):
    advantages = group_advantages(rewards)
    assert advantages.shape == (len(rewards),)
    assert abs(float(advantages.sum())) < 1e-2 * len(rewards)
    assert group_priority(rewards, advantages) >= 0
    assert is_zero_variance(rewards) == (max(rewards) - min(rewards) <= 1e-6)


@pytest.mark.parametrize("rewards", [[], [math.nan, 1.0], [math.inf], [[1.0, 2.0]]])
def test_bad_rewards_are_refused(rewards):
    with pytest.raises(ValueError, match="rewards must"):
        group_advantages(rewards)


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="'batch'"):
        group_advantages([1.0, 0.0], scale="batch")


def group_of(rewards, advantages=None, **fields):
    group = make_group(rewards=rewards, **fields)
    if advantages is not None:
        group.advantages = np.array(advantages, np.float32)
    return group


def trajectories(loss_mask=None, token_advantages=None, **fields):
    """Two rollouts: one of two sequences with two tokens each, and one of one sequence with one token."""
    fields = {"completions": [[5, 6], [7, 8], [9]], "rewards": [1.0, 0.0, 0.0]} | fields
    group = make_group(**fields)
    return replace(
        group,
        sequence_counts=[2, 1],
        rewards=group.rewards[:2],
        advantages=group_advantages(group.rewards[:2]),
        loss_mask=loss_mask,
        token_advantages=token_advantages,
    )


LATE = [False, False, False, True, False]
EVERYWHERE = {None: True, "group": True, "batch": True, "none": True}
NOWHERE = dict.fromkeys(EVERYWHERE, False)
NO_MASK = {"completions": [[5], [6]], "loss_mask": [False, False]}
AVERAGE = {"completions": [[5], [6], [7]], "loss_mask": [False, True, False]}
CONTEXTS = {"completions": [[5], [6]], "logprobs": math.nan, "context_lengths": [1, 1]}
NEITHER = {None: False, "group": False}
CARRIES = {
    "rewards that differ": (group_of([1.0, 0.0]), {None: True, "group": True, "batch": True, "none": True}),
    "equal rewards": (group_of([1.0, 1.0]), NEITHER | {"batch": False, "none": False}),
    "one with an advantage": (group_of([1.0], [0.7]), {None: True, "group": False, "batch": False, "none": False}),
    "one without": (group_of([1.0], [0.0]), NEITHER),
    "equal rewards with advantages from a baseline": (group_of([1.0, 1.0], [0.5, 0.5]), {None: True, "group": False}),
    "advantages that are all 0": (group_of([1.0, 0.0], [0.0, 0.0]), {None: False, "group": True}),
    "rewards that differ by rounding": (group_of([0.1, 0.1 + 4e-7], [-2e-3, 2e-3]), NEITHER),
    "a small advantage": (group_of([1.0, 0.0], [1e-4, 0.0]), {None: True}),
    "every token masked": (group_of([1.0, 0.0], **NO_MASK), NEITHER),
    "the only completion that is trained on is average": (group_of([1.0, 0.5, 0.0], **AVERAGE), NEITHER),
    "the only completion with tokens is average": (group_of([1.0, 0.5, 0.0], completions=[[], [6], []]), NEITHER),
    "a rollout whose second sequence alone is trained on": (trajectories(LATE), EVERYWHERE),
    "several sequences and equal rewards": (trajectories(rewards=[1.0, 1.0, 1.0]), NOWHERE),
    "advantages of tokens behind equal rewards": (
        trajectories(rewards=[1.0, 1.0, 1.0], token_advantages=[0, 0, 0, 1e-4, 0]),
        EVERYWHERE,
    ),
    "advantages of tokens that are all 0": (trajectories(token_advantages=np.zeros(5)), NOWHERE),
    "advantages of tokens that are masked": (trajectories(LATE, token_advantages=[1, 1, 1, 0, 1]), NOWHERE),
    "nothing but contexts": (group_of([1.0, 0.0], **CONTEXTS), NEITHER),
}


@pytest.mark.parametrize(("group", "carries"), CARRIES.values(), ids=CARRIES)
def test_a_group_carries_a_gradient_if_what_is_trained_on_has_an_advantage(group, carries):
    assert {scale: carries_gradient(group, scale) for scale in carries} == carries


def test_a_gradient_of_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="'std'"):
        carries_gradient(make_group(), "std")


def test_the_priority_of_a_group_of_one_is_its_advantage():
    assert group_priority([0.3], [-0.7]) == pytest.approx(0.7)


def test_what_is_not_trained_on_counts_for_nothing_and_a_rollout_once_whatever_its_sequences():
    one_each = make_group(rewards=[1.0, 0.0], completions=[[5, 6, 7, 8], [9]])
    assert trained_advantages(trajectories()).tolist() == trained_advantages(one_each).tolist()
    assert trained_priority(trajectories()) == trained_priority(one_each)
    assert trained_priority(one_each) == group_priority(one_each.rewards, one_each.advantages) > 0
    assert trained_advantages(trajectories(LATE)).tolist() == [one_each.advantages[0], 0.0]
    assert trained_priority(trajectories([False] * 5)) == 0.0


def test_the_priority_of_advantages_of_tokens_is_their_mean_size_over_each_rollout():
    equal = {"rewards": [1.0, 1.0, 1.0], "loss_mask": [True, True, False, True, True]}
    group = trajectories(**equal, token_advantages=[1.0, -2.0, 9.0, 0.0, -0.5])
    assert trained_advantages(group).tolist() == [1.0, 0.5]
    assert trained_priority(group) == 1.5
