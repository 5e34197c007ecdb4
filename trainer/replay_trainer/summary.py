"""Sums a training run up, out of the lines of its metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl. Leaves out a last line that is still being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def summary(lines: Sequence[Line]) -> Iterator[str]:
    """Yields what the steps of `lines` came to, a line each. Needs at least one step."""
    edge = max(1, min(10, len(lines) // 4))
    seconds = sum(line["time/step"] for line in lines)
    yield (
        f"fresh reward        {mean('fresh/reward_mean', lines[:edge]):.3f} in the first {_steps(edge)}, "
        f"{mean('fresh/reward_mean', lines[-edge:]):.3f} in the last {_steps(edge)}"
    )
    evaluated = [line for line in lines if line.get("eval/reward_mean") is not None]
    if evaluated:
        shown = evaluated[:1] + evaluated[1:][-1:]
        rewards = ", ".join(f"{line['eval/reward_mean']:.3f} at step {line['step']}" for line in shown)
        yield f"evaluation reward   {rewards}"
    yield (
        f"zero variance       {mean('fresh/zero_variance_fraction', lines):.0%} of the fresh groups, "
        f"{mean('train/zero_variance_fraction', lines):.0%} of the groups trained on"
    )
    yield (
        f"replaced groups     {sum(line['replay/groups_replaced'] for line in lines):.0f} of "
        f"{sum(line['fresh/groups'] for line in lines):.0f}"
    )
    yield (
        f"staleness           {mean('fresh/staleness_mean', lines):.2f} versions (fresh groups), "
        f"{mean('replay/staleness_mean', lines):.2f} versions (replayed groups)"
    )
    yield (
        f"importance weights  mean ratio {mean('correction/ratio_mean', lines):.4f}, "
        f"{mean('correction/clipped_fraction', lines):.2%} of the tokens truncated"
    )
    yield (
        f"speed               {sum(line['train/tokens'] for line in lines) / seconds:.0f} tokens/s trained, "
        f"{seconds / len(lines):.2f} s a step"
    )


def mean(name: str, lines: Sequence[Line]) -> float:
    """The mean of a metric over the lines that have it; NaN if none has."""
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else math.nan


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
