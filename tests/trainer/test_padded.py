"""Groups as padded tensors: where each value stands, and that nothing is lost on the way back."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_client import RolloutGroup
from replay_client.testing import make_group
from replay_trainer import PaddedBatch, from_padded, to_padded


def make_groups() -> list[RolloutGroup]:
    return [
        make_group(
            rewards=[1.0, 0.0],
            prompt=[3, 4, 5],
            completions=[[6, 7, 8], []],
            logprobs=[-0.5, math.nan, -0.25],
            loss_mask=[True, False, True],
            sampling={"temperature": 0.5},
        ),
        make_group(rewards=[0.0, 1.0, 1.0], prompt=[9], completions=[[10], [11, 12], [13]], logprobs=-1.5),
    ]


def test_prompts_end_where_completions_begin():
    padded = to_padded(make_groups())
    assert padded.prompt_ids_BP.tolist() == [[3, 4, 5]] * 2 + [[0, 0, 9]] * 3
    assert padded.prompt_mask_BP.int().tolist() == [[1, 1, 1]] * 2 + [[0, 0, 1]] * 3
    assert padded.completion_ids_BT.tolist() == [[6, 7, 8], [0] * 3, [10, 0, 0], [11, 12, 0], [13, 0, 0]]
    assert padded.completion_mask_BT.int().tolist() == [[1, 1, 1], [0] * 3, [1, 0, 0], [1, 1, 0], [1, 0, 0]]
    assert padded.loss_mask_BT.int().tolist() == [[1, 0, 1], [0] * 3, [1, 0, 0], [1, 1, 0], [1, 0, 0]]
    assert padded.input_ids_BS[3].tolist() == [0, 0, 9, 11, 12, 0]
    assert padded.attention_mask_BS[3].tolist() == [0, 0, 1, 1, 1, 0]
    assert padded.position_ids_BS[3].tolist() == [0, 0, 0, 1, 2, 2]
    assert padded.rewards_B.tolist() == [1, 0, 0, 1, 1]
    assert padded.group_B.tolist() == [0, 0, 1, 1, 1]
    assert padded.temperature_B.tolist() == [0.5, 0.5, 1, 1, 1]


def test_every_tensor_can_be_written_to():
    decoded = [RolloutGroup.decode(group.encode()) for group in make_groups()]
    assert not decoded[0].advantages.flags.writeable
    for tensor in vars(to_padded(decoded)).values():
        if tensor is not None:  # token advantages, which no group here has
            tensor[0] = 0


def test_no_groups_make_a_batch_without_rows():
    padded = to_padded([])
    assert padded.input_ids_BS.shape == (0, 2)
    assert from_padded(padded) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 4), min_size=1, max_size=4)), max_size=4))
def test_groups_come_back_as_they_were(shapes):
    groups = [
        make_group(
            prompt=list(range(1, prompt + 1)),
            lengths=lengths,
            seed=index,
            sampling={"temperature": 0.5 + index},
            version=7,
            rewards=[float(j % 2) for j in range(len(lengths))],
        )
        for index, (prompt, lengths) in enumerate(shapes)
    ]
    assert from_padded(to_padded(groups), policy_version=7) == groups


def test_tensors_from_elsewhere_become_groups_that_the_server_takes():
    (group,) = from_padded(
        PaddedBatch(
            prompt_ids_BP=torch.tensor([[5, 6, 0], [5, 6, 0]]),  # padded on the right
            prompt_mask_BP=torch.tensor([[1, 1, 0], [1, 1, 0]]),
            completion_ids_BT=torch.tensor([[7, 8], [9, 0]]),
            completion_mask_BT=torch.tensor([[1, 1], [1, 0]]),
            loss_mask_BT=torch.tensor([[1, 0], [1, 0]]),
            rollout_logprobs_BT=torch.tensor([[-0.5, -1.0], [-2.0, 99.0]]),
            rewards_B=torch.tensor([1.0, 0.0]),
            advantages_B=torch.tensor([1.0, -1.0], requires_grad=True),
            group_B=torch.tensor([4, 4]),
            temperature_B=torch.ones(2),
        ),
        policy_version=3,
        sampling={"top_p": 1.0},
    )
    assert group.prompt_ids.tolist() == [5, 6]
    assert [row.tolist() for row in group.completions()] == [[7, 8], [9]]
    assert group.rollout_logprobs.tolist() == [-0.5, -1.0, -2.0]
    assert group.loss_mask is not None
    assert group.loss_mask.tolist() == [True, False, True]
    assert group.policy_version == 3
    assert group.sampling == {"temperature": 1.0, "top_p": 1.0}
    assert RolloutGroup.decode(group.encode()) == group


@pytest.mark.parametrize("numbers", [[-1, -1, 0, 1, 2], [-2, -1, -1, 7, 3], [4, 4, -1, 0, 5]])
def test_rollouts_and_groups_may_have_any_numbers(numbers):
    padded = to_padded(make_groups())
    changed = {"rollout_B": torch.tensor(numbers), "rewards_B": torch.ones(5), "advantages_B": torch.zeros(5)}
    changed["group_B"] = torch.tensor([-1] * 3 + [0] * 2)
    changed["temperature_B"] = torch.ones(5)
    first, second = from_padded(replace(padded, **changed))
    groups_of_rollouts = [numbers[:3], numbers[3:]]
    assert [first.group_size, second.group_size] == [len(set(rollouts)) for rollouts in groups_of_rollouts]
    assert [first.num_sequences, second.num_sequences] == [3, 2]
    assert replace(padded, **changed).rollouts.first_J.tolist() == [numbers.index(n) for n in dict.fromkeys(numbers)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"completion_mask_BT": [[1, 0, 1], [0] * 3, [1, 0, 0], [1, 1, 0], [1, 0, 0]]}, "has a gap in row 0"),
        ({"rewards_B": [1.0, 0.0]}, r"rewards_B has shape \(2,\), and B is 5"),
        ({"group_B": [0, 1, 0, 1, 1]}, "rows of group 0 must follow one another"),
        ({"temperature_B": [1.0, 0.5, 1.0, 1.0, 1.0]}, "have one temperature"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(fields, words):
    changed = {name: torch.tensor(np.array(value)) for name, value in fields.items()}
    with pytest.raises(ValueError, match=words):
        from_padded(replace(to_padded(make_groups()), **changed))
