"""`replay demo --compare`: one start, the same number of generated groups, with the pool and without it.

    without/    16 fresh groups a step, and no pool
    with/       4 fresh groups a step, and up to 4 of the pool, with the loss that docs/learning.md recommends
    compare.png

Success is rare at the start, which is where the pool matters (docs/learning.md).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from replay_trainer.demo.picture import draw_comparison, running_mean
from replay_trainer.demo.run import (
    GROUP_SIZE,
    GROUPS_PER_STEP,
    SHARING,
    WITHOUT_POOL,
    DemoError,
    Variant,
    check_folder,
    run,
)
from replay_trainer.summary import read_metrics

RARE = 0.08
"""Solve rate at which the warm-up ends."""
COMPARED_STEPS = 60
"""Steps of the run without the pool. More would show more, and take longer than people wait: the other run has four
times as many, and trains on twice as many groups in all."""
VARIANTS: dict[str, Variant] = {"without": WITHOUT_POOL, "with": SHARING}
SMOOTHED_GROUPS = 320
"""Fresh groups in each running mean of the reward."""


def compare(out: Path, steps: int, seed: int, engine: str, target_solve_rate: float = RARE) -> None:
    """Runs both variants for as many fresh groups as `steps` steps have without the pool. Raises DemoError."""
    check_folder(out)
    for name in VARIANTS:
        shutil.rmtree(out / name, ignore_errors=True)
    curves = {}
    first: Path | None = None
    for name, variant in VARIANTS.items():
        Console().print(f"\n{name} the pool:", highlight=False)
        run(out / name, steps * GROUPS_PER_STEP // variant.fresh, seed, engine, target_solve_rate, variant, warm=first)
        first = first or out / name
        curves[name] = curve(read_metrics(out / name / "metrics.jsonl"), variant)
    if not all(rewards for _, rewards in curves.values()):
        raise DemoError("a run has no steps to compare")
    draw_comparison(curves, out / "compare.png")
    for line in summary(curves):
        Console().print(line, highlight=False, soft_wrap=True)
    Console().print(f"picture: {out / 'compare.png'}", highlight=False, soft_wrap=True)


def curve(metrics: list[dict[str, Any]], variant: Variant) -> tuple[list[float], list[float]]:
    """Of each step: the tokens of all fresh groups so far, and the running mean of their reward."""
    tokens, total = [], 0.0
    for line in metrics:
        total += line["fresh/groups"] * GROUP_SIZE * line["fresh/completion_length_mean"]
        tokens.append(total)
    return tokens, running_mean([line["fresh/reward_mean"] for line in metrics], SMOOTHED_GROUPS // variant.fresh)


def summary(curves: dict[str, tuple[list[float], list[float]]]) -> Iterator[str]:
    """Where each curve ended, and when the pool's reached the end of the other."""
    yield ""
    for name, (tokens, rewards) in curves.items():
        yield f"{name:<8} the pool: fresh reward {rewards[-1]:.3f} after {tokens[-1]:.0f} generated tokens"
    level = max(curves["without"][1])
    reached_at = {
        name: next((at for at, reward in zip(*curve, strict=True) if reward >= level), None)
        for name, curve in curves.items()
    }
    if reached_at["with"] is None:
        yield f"with the pool, the reward never reached {level:.3f}: one seed proves little, see docs/learning.md"
    else:
        yield (
            f"a fresh reward of {level:.3f} took {reached_at['without']:.0f} tokens without the pool, and "
            f"{reached_at['with']:.0f} with it"
        )
