"""Metrics of a step: facts about its groups, times of its parts, and alarms. Also writes the summary of a run in a few
lines."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replay_client import Sample
from replay_client.run_metrics import CORRECTION, watched
from replay_client.scoring import carries_gradient
from replay_client.words import counted
from replay_trainer.batching import Batch

logger = logging.getLogger(__name__)

RATIO_STEPS = 64
"""The number of last steps over which LengthRatio compares lengths."""

Metrics = dict[str, float]
"""The metrics of one step. `replay_client.run_metrics` declares each."""


@dataclass(frozen=True)
class GroupFacts:
    """One group without its tokens."""

    key: int
    prompt_id: str
    policy_version: int
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    """For each rollout, the tokens of all its sequences after their contexts."""
    truncated: int
    """Rollouts that the length limit ended."""
    staleness: int
    """Policy versions by which the group lagged behind when it was drawn."""
    age: float
    """Seconds from the insert of the group to its draw."""
    times_sampled: int
    carries_gradient: bool
    """True if a step can learn from the group."""

    @classmethod
    def of(cls, sample: Sample, informs: bool | None = None) -> GroupFacts:
        """The facts of a sample. `informs`: the value of the field `carries_gradient`; None: the result of
        `replay_client.scoring.carries_gradient`."""
        group = sample.group
        return cls(
            key=sample.info.key,
            prompt_id=group.prompt_id,
            policy_version=group.policy_version,
            rewards=tuple(group.rewards.tolist()),
            lengths=tuple(group.rollout_lengths.tolist()),
            truncated=(group.finish_reasons or ()).count("length"),
            staleness=sample.info.staleness,
            age=sample.info.age,
            times_sampled=sample.info.times_sampled,
            carries_gradient=carries_gradient(group) if informs is None else informs,
        )


def describe_groups(groups: Sequence[GroupFacts]) -> dict[str, float]:
    """Metrics of a batch of groups. Without groups, all but `groups` are NaN."""
    lengths = [length for group in groups for length in group.lengths]
    truncated = sum(group.truncated for group in groups)
    return {
        "groups": len(groups),
        "reward_mean": _reward_mean(groups),
        "reward_std": mean([_spread(group.rewards) for group in groups]),
        "zero_variance_fraction": mean([float(not group.carries_gradient) for group in groups]),
        **mean_and_max("completion_length", lengths),
        "truncated_fraction": truncated / len(lengths) if lengths else math.nan,
        **mean_and_max("staleness", [group.staleness for group in groups]),
        "age_mean": mean([group.age for group in groups]),
    }


def describe_replayed(groups: Sequence[GroupFacts]) -> dict[str, float]:
    """Metrics of the groups that were drawn from the pool. Without such groups, all are NaN."""
    return {
        **mean_and_max("age", [group.age for group in groups]),
        **mean_and_max("staleness", [group.staleness for group in groups]),
        "times_sampled_mean": mean([group.times_sampled for group in groups]),
        "reward_mean": _reward_mean(groups),
        "group_size_mean": mean([len(group.rewards) for group in groups]),
    }


def _reward_mean(groups: Sequence[GroupFacts]) -> float:
    return mean([reward for group in groups for reward in group.rewards])


def group_drifts(batch: Batch, logprobs_BT: Tensor) -> list[float]:
    """The distance of the policy from each group of the batch: |mean over the group's tokens of log(π/b)|, in nats.

    π is the current policy, and b is the policy that wrote the tokens. `logprobs_BT`: log π. Tokens whose log b is
    unknown are left out. The distance of a group without other tokens is 0.
    """
    known_BT = batch.mask_BT & ~batch.rollout_logprobs_BT.isnan()
    difference_BT = torch.where(known_BT, logprobs_BT - batch.rollout_logprobs_BT, 0.0)
    sum_B = difference_BT.sum(dim=1).cpu().numpy()
    tokens_B = known_BT.sum(dim=1).cpu().numpy()
    num_groups = len(batch.prompt_lengths_U)
    sum_U = np.bincount(batch.group_B, weights=sum_B, minlength=num_groups)
    tokens_U = np.bincount(batch.group_B, weights=tokens_B, minlength=num_groups)
    drifts: list[float] = np.abs(sum_U / np.maximum(tokens_U, 1)).tolist()
    return drifts


def mean_and_max(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean and the maximum of the values; NaN if there are none."""
    return {f"{name}_mean": mean(values), f"{name}_max": max(values, default=math.nan)}


def mean(values: Sequence[float]) -> float:
    """The mean of the values; NaN if there are none."""
    return sum(values) / len(values) if values else math.nan


def _spread(rewards: Sequence[float]) -> float:
    """Standard deviation with Bessel's correction; 0 for a single reward."""
    return float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0


class StepTimers:
    """Seconds spent in each part of a step, by name."""

    def __init__(self) -> None:
        self._lapped_at = time.perf_counter()
        """The time of the last call of `lap`, or of the construction."""
        self._seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Counts the time since the last call of `lap`, or since the construction, as time of the part `name`."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._lapped_at
        self._lapped_at = now

    def collect(self) -> dict[str, float]:
        """Returns the seconds of all parts, and their sum as "step". Sets the seconds of all parts to zero."""
        seconds = self._seconds
        self._seconds = {}
        return {**seconds, "step": sum(seconds.values())}


@dataclass(frozen=True)
class Lengths:
    """A number of completions, and the number of their tokens."""

    completions: int = 0
    tokens: int = 0

    def __sub__(self, earlier: Lengths) -> Lengths:
        return Lengths(self.completions - earlier.completions, self.tokens - earlier.tokens)

    @property
    def mean(self) -> float:
        """The mean number of tokens of a completion; NaN if there are no completions."""
        return self.tokens / self.completions if self.completions > 0 else math.nan


class LengthRatio:
    """Mean length of the completions trained on, divided by the mean length of all generated completions, over the last
    steps.

    A ratio below 1 means that long completions are lost between generator and trainer. The server counts the generated
    completions: those of each group that is inserted, or that is refused as too stale. So groups that the server drops
    later are counted too. A group that a generator gives up is not counted, because it has no length.
    """

    def __init__(self, *, whole: bool) -> None:
        """`whole`: True if the run begins now, so that everything that the server has counted belongs to this run."""
        self._trained = Lengths()
        self._totals: deque[tuple[Lengths, Lengths]] = deque(maxlen=RATIO_STEPS + 1)
        """(total trained on, total generated) after each of the last steps, oldest first."""
        if whole:
            self._totals.append((Lengths(), Lengths()))

    def add(self, trained: Sequence[int], generated: Lengths | None) -> float:
        """Counts a step that trained on completions of the lengths `trained`. Returns the ratio after this step.

        `generated`: the total that the server has counted; None: the server did not answer. Returns NaN if the ratio is
        not known.
        """
        self._trained = Lengths(self._trained.completions + len(trained), self._trained.tokens + sum(trained))
        if generated is None:
            return math.nan
        if self._totals:
            _, last_generated = self._totals[-1]
            if generated.completions < last_generated.completions:
                self._totals.clear()  # the server has begun to count anew
        self._totals.append((self._trained, generated))
        # The oldest totals are those before the first step that the ratio covers.
        first_trained, first_generated = self._totals[0]
        trained_mean = (self._trained - first_trained).mean
        generated_mean = (generated - first_generated).mean  # NaN without completions, 0 if all are empty
        return trained_mean / generated_mean if generated_mean else math.nan


class Alarms:
    """Warns of each unhealthy metric once."""

    def __init__(self) -> None:
        self._triggered: set[str] = set()
        """The names of the metrics that a warning was given for."""

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """Logs and returns a warning for each of these metrics of `correct` that is unhealthy for the first time. A
        metric that is NaN causes no warning."""
        warnings = []
        # `watched` yields the metrics that have a healthy range.
        for full_name, healthy, remedy in watched(CORRECTION):
            name = full_name.removeprefix("correction/")
            value = metrics.get(name, math.nan)
            if name not in self._triggered and healthy.excludes(value):
                self._triggered.add(name)
                warning = (
                    f"{full_name} is {value:.3g}, safe is {healthy.least:g} to {healthy.most:g}: {remedy} (said once)"
                )
                warnings.append(warning)
                logger.warning("%s", warning)
        return warnings


Line = Mapping[str, Any]
"""One line of a metrics.jsonl: the metrics of a step by name."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, without an unfinished last line."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def summary(lines: Sequence[Line]) -> Iterator[str]:
    """Yields the lines of a summary of a run. `lines`: the lines of its metrics.jsonl, at least one."""
    # The number of first steps, and of last steps, that the summary compares: a quarter of all steps, from 1 to 10.
    edge = max(1, min(10, len(lines) // 4))
    seconds = sum(line["time/step"] for line in lines)
    yield (
        f"fresh reward        {_mean_of('fresh/reward_mean', lines[:edge]):.3f} in the first {_steps(edge)}, "
        f"{_mean_of('fresh/reward_mean', lines[-edge:]):.3f} in the last {_steps(edge)}"
    )
    evaluated = [line for line in lines if line.get("eval/reward_mean") is not None]
    if evaluated:
        shown = evaluated[:1]
        if len(evaluated) > 1:  # the last evaluation is another than the first
            shown.append(evaluated[-1])
        rewards = ", ".join(f"{line['eval/reward_mean']:.3f} at step {line['step']}" for line in shown)
        yield f"evaluation reward   {rewards}"
    yield (
        f"zero variance       {_mean_of('fresh/zero_variance_fraction', lines):.0%} of the fresh groups, "
        f"{_mean_of('train/zero_variance_fraction', lines):.0%} of the groups trained on"
    )
    yield (
        f"replaced groups     {sum(line['replay/groups_replaced'] for line in lines):.0f} of "
        f"{sum(line['fresh/groups'] for line in lines):.0f}"
    )
    yield (
        f"staleness           {_versions('fresh/staleness_mean', lines)} (fresh groups), "
        f"{_versions('replay/staleness_mean', lines)} (replayed groups)"
    )
    clipped = _mean_of("correction/clipped_fraction", lines)
    if math.isnan(clipped):
        weights = "weights off"
    else:  # the correction has one ratio for each token, or for each sequence
        weights = f"{clipped:.2%} of the ratios clamped or masked"
    yield f"importance weights  mean ratio {_mean_of('correction/ratio_mean', lines):.4f}, {weights}"
    tokens = sum(line["train/tokens"] for line in lines)
    yield f"speed               {tokens / seconds:.0f} tokens/s trained, {seconds / len(lines):.2f} s a step"


def _versions(name: str, lines: Sequence[Line]) -> str:
    """The mean of the staleness `name`, such as "1.50 versions"; "nothing" if no line has this metric."""
    staleness = _mean_of(name, lines)
    return "nothing" if math.isnan(staleness) else f"{staleness:.2f} versions"


def _mean_of(name: str, lines: Sequence[Line]) -> float:
    """The mean of a metric over the lines that have it; NaN if no line has it."""
    return mean([line[name] for line in lines if line.get(name) is not None])


def _steps(count: int) -> str:
    """The words after "in the first": "step" for one step, otherwise for example "10 steps"."""
    return "step" if count == 1 else counted(count, "step")
