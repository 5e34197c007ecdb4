"""`make demo DEMO_ARGS=--compare`: three ways to fill a training step, three seeds each, and one picture of them.

All runs of a seed begin with the same warm start, and generate the same number of groups. Success is rare at the start,
because a pool matters most if success is rare.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from examples.demo.picture import figure_of, running_mean
from examples.demo.run import DemoError, check_folder, run
from examples.demo.variants import GROUP_SIZE, GROUPS_PER_STEP, SUMS, Variant, changed
from replay_trainer.metrics import read_metrics

Curve = tuple[Sequence[float], Sequence[float]]
"""Numbers of generated tokens, ascending, and for each number the mean reward of the groups generated last."""

_PLAIN = {"generate": {"max_tokens": 9}, "train": {"zero_variance": "none", "learning_rate": 1e-4}}
_QUEUE, _POOL = SUMS["serve"]["tables"]
_SHORT_QUEUE = {**_QUEUE, "rate_limiter": {"type": "queue", "max_size": GROUPS_PER_STEP}}
_QUARTER = {"train": {"groups_per_step": GROUPS_PER_STEP // 4}, "serve": {"tables": [_SHORT_QUEUE, _POOL]}}
_RECIPE = {
    "generate": {"priority": "learnability"},
    "train": {
        "zero_variance": None,
        "groups_per_step": 8,
        "replay_share": 0.5,
        "replay_rollouts": "right",
        "correction": None,
    },
    "serve": {
        "tables": [
            _SHORT_QUEUE,
            {
                "name": "replay",
                "sampler": {"type": "prioritized", "exponent": 0.6},
                "remover": "min_heap",
                "seed": 0,
                "max_size": 256,
            },
        ]
    },
}
_REINFORCE = {"objective": "bypass_reinforce", "clip_min": 1.0, "clip_max": 1.0}
PLAIN = Variant(changed(SUMS, _PLAIN), task="steps")
QUARTER = Variant(changed(PLAIN.sections, _QUARTER), task="steps")
RECIPE = Variant(changed(changed(PLAIN.sections, _RECIPE), {"train": {"correction": _REINFORCE}}), task="steps")
ARMS = {"plain": PLAIN, "quarter": QUARTER, "recipe": RECIPE}
"""The variants that are compared, by name."""
FRESH = {"plain": GROUPS_PER_STEP, "quarter": GROUPS_PER_STEP // 4, "recipe": GROUPS_PER_STEP // 4}
"""The number of fresh groups in a step of each arm."""
ABOUT = {
    "plain": "plain: 16 fresh groups a step",
    "quarter": "quarter: 4 fresh groups a step",
    "recipe": "recipe: 4 fresh groups, and the right answers of 4 stored ones",
}
RARE = 0.08
"""Solve rate at which the warm-up ends."""
COMPARED_STEPS = 48
"""Steps of the plain run. The other runs have four times as many steps, with a quarter of the fresh groups."""
SEEDS = 3
SMOOTHED_GROUPS = 320
"""Fresh groups in each running mean of the reward."""


def compare(out: Path, steps: int, seed: int, engine: str, target_solve_rate: float = RARE, seeds: int = SEEDS) -> None:
    """Runs every arm from `seeds` warm starts. Each run generates as many groups as `steps` steps of the plain arm.

    Raises DemoError.
    """
    check_folder(out)
    curves: dict[str, list[Curve]] = {name: [] for name in ARMS}
    trained: dict[str, float] = {}
    for arm_seed in range(seed, seed + seeds):
        for name, variant in ARMS.items():
            folder = out / f"{name}-{arm_seed}"
            shutil.rmtree(folder, ignore_errors=True)
            Console().print(f"\n{ABOUT[name]}; seed {arm_seed}:", highlight=False)
            # The plain run of a seed makes the warm start, and the other runs copy it.
            start = None if name == "plain" else out / f"plain-{arm_seed}"
            arm_steps = steps * GROUPS_PER_STEP // FRESH[name]
            run(folder, arm_steps, arm_seed, engine, target_solve_rate, variant, start)
            metrics = read_metrics(folder / "metrics.jsonl")
            if not metrics:
                raise DemoError(f"{folder} has no steps to compare")
            curves[name].append(curve(metrics, FRESH[name]))
            trained[name] = trained.get(name, 0) + sum(line["train/tokens"] for line in metrics)
    text = compared(curves, trained)
    titled = {ABOUT[name]: runs for name, runs in curves.items()}
    draw_comparison(titled, out / "compare.png", text)
    Console().print(f"\n{text}\npicture: {out / 'compare.png'}", highlight=False, soft_wrap=True)


def curve(metrics: Sequence[Mapping[str, Any]], fresh: int, smoothed: int = SMOOTHED_GROUPS) -> Curve:
    """For each step, the tokens of all fresh groups so far, and the mean reward of the last `smoothed` of these groups.

    The curve begins when there are half as many groups, because the mean of a few groups is mostly luck.
    """
    tokens = np.cumsum([line["fresh/groups"] * GROUP_SIZE * line["fresh/completion_length_mean"] for line in metrics])
    rewards = running_mean([line["fresh/reward_mean"] for line in metrics], smoothed // fresh)
    first = min(len(metrics), smoothed // fresh // 2) - 1
    return tokens.tolist()[first:], rewards[first:]


def compared(curves: Mapping[str, Sequence[Curve]], trained: Mapping[str, float]) -> str:
    """A line for each arm: its last rewards, and the generated tokens that it needs to reach plain's best reward.

    These tokens are given as a share of those that plain needs.
    `trained`: the number of tokens that all runs of an arm trained on.
    """
    lines = []
    for name, runs in curves.items():
        ends = ", ".join(f"{rewards[-1]:.2f}" for _, rewards in runs)
        cost = trained[name] / sum(tokens[-1] for tokens, _ in runs)
        needed = ""
        if name != "plain":
            shares = [share_needed(arm, plain) for arm, plain in zip(runs, curves["plain"], strict=True)]
            words = ", ".join(map(shown, sorted(shares)))
            needed = f"; plain's best with {shown(median(shares))} of its generated tokens ({words})"
        lines.append(f"{name}: reward {ends} at the end{needed}; {cost:.1f} trained tokens for a generated one")
    return "\n".join(lines)


def share_needed(arm: Curve, plain: Curve) -> float:
    """The tokens to reach plain's best reward: those of the arm, divided by those of plain. inf: the arm never does."""
    _, plain_rewards = plain
    level = max(plain_rewards)
    return tokens_to(level, arm) / tokens_to(level, plain)


def tokens_to(level: float, curve: Curve) -> float:
    """The generated tokens at which a curve first reaches a mean reward; inf if it never does."""
    for tokens, reward in zip(*curve, strict=True):
        if reward >= level:
            return tokens
    return math.inf


def shown(share: float) -> str:
    """A share in words."""
    return f"{share:.2f}" if math.isfinite(share) else "never"


def draw_comparison(curves: Mapping[str, Sequence[Curve]], path: Path, text: str = "") -> None:
    """Writes a PNG: for each name, the mean reward of its runs over the generated tokens.

    A band reaches from the lowest to the highest run. `text` stands below.
    """
    with figure_of(path, figsize=(9, 5.5)) as (figure, axis):
        for name, runs in curves.items():
            # The range in which all runs have values.
            first = max(tokens[0] for tokens, _ in runs)
            last = min(tokens[-1] for tokens, _ in runs)
            at = np.linspace(first, last, 100)
            rewards = np.array([np.interp(at, *curve) for curve in runs])
            axis.plot(at / 1000, rewards.mean(axis=0), label=name)
            axis.fill_between(at / 1000, rewards.min(axis=0), rewards.max(axis=0), alpha=0.15)
        axis.set_xlabel("thousand generated tokens")
        axis.set_ylabel("mean reward of the groups generated now")
        axis.grid(alpha=0.3)
        axis.legend()
        figure.text(0.02, 0.02, text, fontsize=7)
        figure.tight_layout(rect=(0, 0.03 * len(text.splitlines()), 1, 1))
