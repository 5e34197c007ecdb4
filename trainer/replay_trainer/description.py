"""Metrics that describe groups, and the few facts about each group that ranks exchange for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replay_client import Sample
from replay_client.scoring import Scale, carries_gradient
from replay_trainer.batching import Batch


@dataclass(frozen=True)
class GroupFacts:
    """One group without its tokens."""

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: int
    """Completions that the length limit ended."""
    staleness: int
    """Policy versions it lagged when it was drawn."""
    age: float
    """Seconds since it was inserted."""
    times_sampled: int
    carries_gradient: bool

    @classmethod
    def of(cls, sample: Sample, scale: Scale | None = None) -> GroupFacts:
        """`scale`: as in `carries_gradient`."""
        group = sample.group
        return cls(
            rewards=tuple(group.rewards.tolist()),
            lengths=tuple(group.sampled_lengths.tolist()),
            truncated=(group.finish_reasons or ()).count("length"),
            staleness=sample.info.staleness,
            age=sample.info.age,
            times_sampled=sample.info.times_sampled,
            carries_gradient=carries_gradient(group, scale),
        )


def describe_groups(groups: Sequence[GroupFacts]) -> dict[str, float]:
    """Metrics of a batch of groups; NaN if it has none."""
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [length for group in groups for length in group.lengths]
    staleness = [group.staleness for group in groups]
    spreads = [_spread(group.rewards) for group in groups]
    return {
        "groups": len(groups),
        "reward_mean": mean(rewards),
        "reward_std": mean(spreads),
        "zero_variance_fraction": mean([float(not group.carries_gradient) for group in groups]),
        "completion_length_mean": mean(lengths),
        "completion_length_max": max(lengths, default=math.nan),
        "truncated_fraction": sum(group.truncated for group in groups) / len(lengths) if lengths else math.nan,
        "staleness_mean": mean(staleness),
        "staleness_max": max(staleness, default=math.nan),
        "age_mean": mean([group.age for group in groups]),
    }


def describe_replayed(groups: Sequence[GroupFacts]) -> dict[str, float]:
    """Metrics of the groups from the pool; NaN if there are none."""
    ages, staleness = [group.age for group in groups], [group.staleness for group in groups]
    return {
        "age_mean": mean(ages),
        "age_max": max(ages, default=math.nan),
        "staleness_mean": mean(staleness),
        "staleness_max": max(staleness, default=math.nan),
        "times_sampled_mean": mean([group.times_sampled for group in groups]),
        "reward_mean": mean([reward for group in groups for reward in group.rewards]),
        "group_size_mean": mean([len(group.rewards) for group in groups]),
    }


def group_drifts(batch: Batch, logprobs_BT: Tensor) -> list[float]:
    """How far the policy moved away from each group of the batch: |mean over its tokens of log(π/b)|, in nats.

    `logprobs_BT`: log π, π being the current policy; b wrote the tokens. 0 if no log b of the group is known.
    """
    known_BT = batch.mask_BT & ~batch.rollout_logprobs_BT.isnan()
    difference_BT = torch.where(known_BT, logprobs_BT - batch.rollout_logprobs_BT, 0.0)
    sum_B, tokens_B = difference_BT.sum(dim=1).cpu().numpy(), known_BT.sum(dim=1).cpu().numpy()
    groups = len(batch.prompt_lengths_U)
    sum_U = np.bincount(batch.group_B, weights=sum_B, minlength=groups)
    tokens_U = np.bincount(batch.group_B, weights=tokens_B, minlength=groups)
    drifts: list[float] = np.abs(sum_U / np.maximum(tokens_U, 1)).tolist()
    return drifts


def describe_drifts(drifts: Sequence[float]) -> dict[str, float]:
    """Metrics of `group_drifts`; NaN if there are none."""
    return {"drift_mean": mean(drifts), "drift_max": max(drifts, default=math.nan)}


def mean(values: Sequence[float]) -> float:
    """NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def _spread(rewards: Sequence[float]) -> float:
    """Standard deviation with Bessel's correction; 0 for a single reward."""
    if len(rewards) < 2:
        return 0.0
    center = mean(rewards)
    return math.sqrt(sum((reward - center) ** 2 for reward in rewards) / (len(rewards) - 1))
