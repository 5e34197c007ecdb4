"""Draws the picture of a demo: a panel for each metric, with the running mean over the values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PANELS = {
    "Fresh reward": ("fresh/reward_mean", "mean reward of the groups generated for the step"),
    "Replaced groups": ("replay/groups_replaced", "groups without variance, replaced from the pool"),
    "Staleness": ("fresh/staleness_mean", "policy versions between generation and training"),
    "Importance ratio": ("correction/ratio_mean", "trainer / sampler, mean over tokens before truncation"),
}
"""The metric of each panel and its meaning, by the title of the panel."""
CALLED = "called"
"""The name of a metric: the share of rollouts that called the tool, at each version of the policy."""
TOOL_PANELS = {
    "Fresh reward": PANELS["Fresh reward"],
    "Replaced groups": PANELS["Replaced groups"],
    "Tool calls": (CALLED, "share of the rollouts that called the calculator"),
    "Importance ratio": PANELS["Importance ratio"],
}
SMOOTH = 10
"""Steps in the mean that is drawn over the values."""


def draw(metrics: list[dict[str, Any]], path: Path, panels: Mapping[str, tuple[str, str]] = PANELS) -> None:
    """Write a PNG with a panel for each of the four `panels`."""
    with figure_of(path, 2, 2, figsize=(10, 6), sharex=True) as (figure, axes):
        for axis, (title, (name, meaning)) in zip(axes.flat, panels.items(), strict=True):
            points = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
            steps = [step for step, _ in points]
            values = [value for _, value in points]
            axis.plot(steps, values, color="tab:blue", alpha=0.3, label="each step")
            axis.plot(steps, running_mean(values, SMOOTH), color="tab:blue", label=f"mean of the last {SMOOTH} steps")
            axis.set_title(f"{title}\n{meaning}", fontsize=9)
            axis.grid(alpha=0.3)
        for axis in axes[1]:
            axis.set_xlabel("training step")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=2, frameon=False)
        figure.tight_layout(rect=(0, 0.05, 1, 1))


@contextmanager
def figure_of(path: Path, *shape: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes. The figure is saved to `path` at the end of the block."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*shape, **options)
    yield figure, axes
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def running_mean(values: list[float], width: int) -> list[float]:
    """The mean of the last `width` values at each position."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(sum(window) / len(window))
    return means
