"""`make demo DEMO_ARGS=--compare`: three ways to fill a training step, three seeds each, and one picture of them.

The runs of a seed begin with one warm start and generate the same number of groups. Success is rare at the start, which
is where a pool matters.
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
"""Generated tokens, ascending, and the mean reward of what was generated there."""

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
FRESH = {"plain": GROUPS_PER_STEP, "quarter": GROUPS_PER_STEP // 4, "recipe": GROUPS_PER_STEP // 4}
"""Fresh groups of a step."""
ABOUT = {
    "plain": "plain: 16 fresh groups a step",
    "quarter": "quarter: 4 fresh groups a step",
    "recipe": "recipe: 4 fresh groups, and the right answers of 4 stored ones",
}
RARE = 0.08
"""Solve rate at which the warm-up ends."""
COMPARED_STEPS = 48
"""Steps of the plain run; the others have four times as many, of a quarter of the groups."""
SEEDS = 3
SMOOTHED_GROUPS = 320
"""Fresh groups in each running mean of the reward."""


def compare(out: Path, steps: int, seed: int, engine: str, target_solve_rate: float = RARE, seeds: int = SEEDS) -> None:
    """Runs every arm from `seeds` warm starts, for as many groups as `steps` plain steps have. Raises DemoError."""
    check_folder(out)
    curves: dict[str, list[Curve]] = {name: [] for name in ARMS}
    trained: dict[str, float] = {}
    for each in range(seed, seed + seeds):
        for name, variant in ARMS.items():
            folder = out / f"{name}-{each}"
            shutil.rmtree(folder, ignore_errors=True)
            Console().print(f"\n{ABOUT[name]}; seed {each}:", highlight=False)
            start = None if name == "plain" else out / f"plain-{each}"
            run(folder, steps * GROUPS_PER_STEP // FRESH[name], each, engine, target_solve_rate, variant, start)
            metrics = read_metrics(folder / "metrics.jsonl")
            if not metrics:
                raise DemoError(f"{folder} has no steps to compare")
            curves[name].append(curve(metrics, FRESH[name]))
            trained[name] = trained.get(name, 0) + sum(line["train/tokens"] for line in metrics)
    said = compared(curves, trained)
    draw_comparison({ABOUT[name]: found for name, found in curves.items()}, out / "compare.png", said)
    Console().print(f"\n{said}\npicture: {out / 'compare.png'}", highlight=False, soft_wrap=True)


def curve(metrics: Sequence[Mapping[str, Any]], fresh: int, smoothed: int = SMOOTHED_GROUPS) -> Curve:
    """Of each step: the tokens of all fresh groups so far, and the mean reward of the last `smoothed` of them.

    It begins where half as many groups are there: the mean of a few groups is mostly luck.
    """
    tokens = np.cumsum([line["fresh/groups"] * GROUP_SIZE * line["fresh/completion_length_mean"] for line in metrics])
    rewards = running_mean([line["fresh/reward_mean"] for line in metrics], smoothed // fresh)
    first = min(len(metrics), smoothed // fresh // 2) - 1
    return tokens.tolist()[first:], rewards[first:]


def compared(curves: Mapping[str, Sequence[Curve]], trained: Mapping[str, float]) -> str:
    """What the runs say: the share of plain's generated tokens that each arm needs to plain's best reward.

    `trained`: tokens that all runs of an arm trained on.
    """
    lines = []
    for name, runs in curves.items():
        ends = ", ".join(f"{rewards[-1]:.2f}" for _, rewards in runs)
        cost = trained[name] / sum(tokens[-1] for tokens, _ in runs)
        needed = ""
        if name != "plain":
            shares = [share_needed(*pair) for pair in zip(runs, curves["plain"], strict=True)]
            each = ", ".join(map(shown, sorted(shares)))
            needed = f"; plain's best with {shown(median(shares))} of its generated tokens ({each})"
        lines.append(f"{name}: reward {ends} at the end{needed}; {cost:.1f} trained tokens for a generated one")
    return "\n".join(lines)


def share_needed(arm: Curve, plain: Curve) -> float:
    """Tokens that an arm needs to plain's best reward, of those that plain needs; inf if it never gets there."""
    level = max(plain[1])
    of_arm, of_plain = (
        next((at for at, reward in zip(*each, strict=True) if reward >= level), math.inf) for each in (arm, plain)
    )
    return of_arm / of_plain


def shown(share: float) -> str:
    return f"{share:.2f}" if math.isfinite(share) else "never"


def draw_comparison(curves: Mapping[str, Sequence[Curve]], path: Path, said: str = "") -> None:
    """Writes a PNG: for each name the mean of its runs by generated tokens, and a band from the least to the most."""
    with figure_of(path, figsize=(9, 5.5)) as (figure, axis):
        for name, runs in curves.items():
            at = np.linspace(max(tokens[0] for tokens, _ in runs), min(tokens[-1] for tokens, _ in runs), 100)
            rewards = np.array([np.interp(at, *each) for each in runs])
            axis.plot(at / 1000, rewards.mean(axis=0), label=name)
            axis.fill_between(at / 1000, rewards.min(axis=0), rewards.max(axis=0), alpha=0.15)
        axis.set_xlabel("thousand generated tokens")
        axis.set_ylabel("mean reward of the groups generated now")
        axis.grid(alpha=0.3)
        axis.legend()
        figure.text(0.02, 0.02, said, fontsize=7)
        figure.tight_layout(rect=(0, 0.03 * len(said.splitlines()), 1, 1))
