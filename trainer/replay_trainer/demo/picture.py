"""The picture of a run: its curves out of metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PANELS = {
    "fresh reward": ("fresh/reward_mean", "mean reward of the groups generated now"),
    "groups replaced": ("replay/groups_replaced", "of each step's groups"),
    "staleness": ("fresh/staleness_mean", "policy versions, fresh groups"),
    "importance ratio": ("correction/ratio_mean", "trainer / sampler, before truncation"),
}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that is still being written is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def draw(metrics: list[dict[str, Any]], path: Path) -> None:
    """Writes a PNG with a panel for each of PANELS."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6), sharex=True)
    for axis, (title, (name, unit)) in zip(axes.flat, PANELS.items(), strict=True):
        points = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
        steps, values = [step for step, _ in points], [value for _, value in points]
        axis.plot(steps, values, color="tab:blue", alpha=0.3)
        axis.plot(steps, running_mean(values, 10), color="tab:blue")
        axis.set_title(f"{title} ({unit})", fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def running_mean(values: list[float], width: int) -> list[float]:
    """The mean of the last `width` values at each place."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(i + 1, width) for i in range(len(values))]
