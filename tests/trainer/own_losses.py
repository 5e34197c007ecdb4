"""Loss functions of a user, for tests: right ones, and one for each way of being wrong."""

from __future__ import annotations

import torch

from replay_trainer import LossInputs, loss_function


@loss_function(aggregate_like="dapo", reads_whole_rollouts=False)
def dapo(inputs: LossInputs):
    """The trainer's own dapo, written as a user would."""
    least = 1 - inputs.config.epsilon
    most = 1 + inputs.config.clip_high
    clipped_BT = inputs.ratio_BT.clamp(least, most)
    loss_BT = -torch.minimum(inputs.ratio_BT * inputs.advantages_BT, clipped_BT * inputs.advantages_BT)
    return loss_BT, {"tokens_below": inputs.ratio_BT < least}


@loss_function(aggregate_like="grpo")
def gspo(inputs: LossInputs):
    """The trainer's own gspo: the loss of a token needs all tokens of its rollout."""
    tokens_B1 = inputs.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    difference_BT = inputs.logprobs_BT - inputs.old_logprobs_BT
    mean_BT = (difference_BT.sum(dim=1, keepdim=True) / tokens_B1).expand_as(difference_BT)
    ratio_BT = mean_BT.clamp(-20.0, 20.0).exp()
    clipped_BT = ratio_BT.clamp(1 - inputs.config.epsilon, 1 + inputs.config.clip_high)
    return -torch.minimum(ratio_BT * inputs.advantages_BT, clipped_BT * inputs.advantages_BT), {}


@loss_function(aggregate_like="dr_grpo")
def divides_by_length(inputs: LossInputs):
    return -inputs.ratio_BT * inputs.advantages_BT, {}


def undecorated(inputs: LossInputs):
    return -inputs.ratio_BT * inputs.advantages_BT, {"halves": 0.5}


def raises(inputs: LossInputs):
    return inputs.no_such_field, {}


def is_a_sum(inputs: LossInputs):
    return (-inputs.ratio_BT * inputs.advantages_BT).sum(), {}


def is_a_row_for_each(inputs: LossInputs):
    return (-inputs.ratio_BT * inputs.advantages_BT).sum(dim=1), {}


def without_metrics(inputs: LossInputs):
    return -inputs.ratio_BT * inputs.advantages_BT


def metrics_in_a_list(inputs: LossInputs):
    return -inputs.ratio_BT * inputs.advantages_BT, ["ratio"]


def odd_metric(inputs: LossInputs):
    return -inputs.ratio_BT * inputs.advantages_BT, {"ratio": "large"}


def detached(inputs: LossInputs):
    return -inputs.ratio_BT.detach() * inputs.advantages_BT, {}


def depends_on_something_else(inputs: LossInputs):
    return torch.zeros_like(inputs.ratio_BT, requires_grad=True) * inputs.advantages_BT, {}


def is_nan(inputs: LossInputs):
    return -inputs.ratio_BT * inputs.advantages_BT * torch.nan, {}


def gradient_is_nan(inputs: LossInputs):
    """sqrt has an infinite slope at 0, and 0 times infinity is NaN."""
    return (inputs.log_ratio_BT * 0.0).sqrt() * inputs.advantages_BT, {}


def teaches_nothing(inputs: LossInputs):
    return inputs.ratio_BT * 0.0, {}


def nan_for_longer_rollouts(inputs: LossInputs):
    """The made-up rollouts of the check have at most three tokens."""
    loss_BT = -inputs.ratio_BT * inputs.advantages_BT
    long_B1 = inputs.mask_BT.sum(dim=1, keepdim=True) > 4
    return torch.where(long_B1, torch.nan, loss_BT), {}


not_a_function = 3
