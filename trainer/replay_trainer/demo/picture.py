"""Draws the curves of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PANELS = {
    "Fresh reward": ("fresh/reward_mean", "mean reward of the groups generated for the step"),
    "Replaced groups": ("replay/groups_replaced", "groups without variance, replaced from the pool"),
    "Staleness": ("fresh/staleness_mean", "policy versions between generation and training"),
    "Importance ratio": ("correction/ratio_mean", "trainer / sampler, mean over tokens before truncation"),
}
"""Title of each panel: the metric, and what it is."""
SMOOTH = 10
"""Steps in the mean that is drawn over the values."""


def draw(metrics: list[dict[str, Any]], path: Path) -> None:
    """Writes a PNG with a panel for each of PANELS."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6), sharex=True)
    for axis, (title, (name, meaning)) in zip(axes.flat, PANELS.items(), strict=True):
        points = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
        steps, values = [step for step, _ in points], [value for _, value in points]
        axis.plot(steps, values, color="tab:blue", alpha=0.3, label="each step")
        axis.plot(steps, running_mean(values, SMOOTH), color="tab:blue", label=f"mean of the last {SMOOTH} steps")
        axis.set_title(f"{title}\n{meaning}", fontsize=9)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("training step")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_comparison(curves: dict[str, tuple[list[float], list[float]]], path: Path) -> None:
    """Writes a PNG with the fresh reward of each variant by generated tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    for name, (tokens, rewards) in curves.items():
        axis.plot([count / 1000 for count in tokens], rewards, label=f"{name} the pool")
    axis.set_xlabel("thousand generated tokens")
    axis.set_ylabel("mean reward of the groups generated now")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def running_mean(values: list[float], width: int) -> list[float]:
    """The mean of the last `width` values at each place."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(i + 1, width) for i in range(len(values))]
