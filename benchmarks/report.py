"""The report of a run: tables for people, JSON for programs, and a chart."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.measure import CellResult, geometric_mean

FIGURES = ("ratio", "ours", "theirs", "tcp_ratio", "tcp")
"""The figures of a cell. Each is the median of its rounds."""


@dataclass(frozen=True)
class Goal:
    """A value that a set of cells should reach."""

    text: str
    value: float | None
    """The value that was reached; None: no cell was measured."""
    met: bool | None
    """True if the goal was reached; None: no cell was measured."""


@dataclass(frozen=True)
class Report:
    """All results of a run."""

    facts: dict[str, Any]
    """Machine, versions, settings."""
    cells: Sequence[CellResult]

    def goals(self) -> list[Goal]:
        """The goals, with the values of this run."""
        reverb = [cell for cell in self.cells if _is_reverb(cell)]
        host = [(cell.cell, cell.median("ratio")) for cell in reverb]
        tcp = [(cell.cell, cell.median("tcp_ratio") or cell.median("ratio")) for cell in reverb]
        every = [(cell.cell, cell.median("ratio")) for cell in self.cells]
        middle = "(4kB|40kB|106kB|400kB)"
        return [
            _goal("lowest ratio to Reverb of all cells, on one host", 1.0, min, host),
            _goal(
                "lowest ratio to Reverb with one writer or one reader, payloads of 4 kB to 400 kB, on one host",
                4.0,
                min,
                host,
                f"(insert|sample)/{middle}/1-",
            ),
            _goal(
                "lowest ratio to Reverb with four writers, payloads of 4 kB to 400 kB, on one host",
                2.5,
                min,
                host,
                f"insert/{middle}/4-w",
            ),
            _goal(
                "lowest ratio to Reverb for inserts and samples of 400 B and of 4 MB, on one host",
                3.0,
                min,
                host,
                "(insert|sample)/(400B|4MB)/",
            ),
            _goal("geometric mean of all ratios to Reverb, on one host", 3.0, geometric_mean, host),
            _goal("geometric mean of all ratios to Reverb, over TCP", 1.0, geometric_mean, tcp),
            _goal(
                "lowest ratio of this server's speed with 1e6 items to its speed with 1e3 items",
                1 / 1.5,
                min,
                every,
                "scaling/.*/1e6$",
            ),
            _goal(
                "lowest ratio of this server's bytes per second with payloads of 32 MB to those with payloads of 4 MB",
                1.0,
                min,
                every,
                "large/",
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        """The whole report as JSON."""
        cells = []
        for cell in self.cells:
            figures = {name: cell.median(name) for name in FIGURES}
            cells.append(asdict(cell) | figures)
        return {
            "facts": self.facts,
            "goals": [asdict(goal) for goal in self.goals()],
            "cells": cells,
        }

    def print(self, console: Console) -> None:
        """Prints a table for each system, and the goals."""
        for against in dict.fromkeys(cell.against for cell in self.cells):
            console.print(self._table(against))
        for goal in self.goals():
            if goal.value is not None:
                console.print(f"[{_color(bool(goal.met))}]{goal.value:6.2f}[/]  {goal.text}")
        failed = [cell for cell in self.cells if cell.error is not None]
        if failed:
            console.print(f"[red]{len(failed)} cells failed; their reasons are in the tables.[/]")

    def _table(self, against: str) -> Table:
        table = Table(title=f"ours against {against}; ratio above 1: ours is better", box=None, header_style="bold")
        table.add_column("cell")
        for column in ("ours", "theirs", "", "ratio", "of the rounds", "over TCP", "its ratio"):
            side: Literal["left", "right"] = "left" if column == "" else "right"  # the column of units has no name
            table.add_column(column, justify=side)
        for cell in self.cells:
            if cell.against != against:
                continue
            ratio, ours, theirs, tcp_ratio, tcp = map(cell.median, FIGURES)
            if ratio is None or ours is None or theirs is None:
                table.add_row(cell.cell, f"[red]failed[/] {cell.error}")
                continue
            ratios = [cell_round.ratio for cell_round in cell.rounds]
            table.add_row(
                cell.cell,
                _number(ours),
                _number(theirs),
                cell.unit,
                _colored(ratio),
                f"{min(ratios):.2f}-{max(ratios):.2f}",
                "" if tcp is None else _number(tcp),
                "" if tcp_ratio is None else _colored(tcp_ratio),
            )
        return table

    def draw(self, path: Path) -> None:
        """Draws a bar for each cell, on a logarithmic axis, and a dot for each of its rounds."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        cells = []
        for cell in self.cells:
            ratio = cell.median("ratio")
            if ratio is not None:
                cells.append((cell, ratio))
        if not cells:
            return
        figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.19 * len(cells)), layout="constrained")
        for row, (cell, ratio) in enumerate(cells):
            ratios = [cell_round.ratio for cell_round in cell.rounds]
            axes.barh(row, ratio - 1, left=1, color=f"tab:{_color(ratio >= 1)}", height=0.7)
            axes.scatter(ratios, [row] * len(ratios), color="black", s=6, zorder=2)
        axes.set_xscale("log")
        axes.axvline(1, color="black", linewidth=1)
        labels = [f"{cell.cell}  ({cell.against})" for cell, _ in cells]
        axes.set_yticks(range(len(cells)), labels, fontsize=7)
        axes.set_ylim(len(cells) - 0.5, -0.5)
        axes.set_xlabel("ratio, ours over theirs (above 1: ours is better)")
        axes.grid(axis="x", which="both", alpha=0.3)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)

    def save(self, folder: Path) -> None:
        """Writes benchmark.json and benchmark.png."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "benchmark.json").write_text(json.dumps(self.as_json(), indent=1) + "\n")
        self.draw(folder / "benchmark.png")


def _goal(
    text: str,
    bound: float,
    combine: Callable[[list[float]], float],
    cells: Sequence[tuple[str, float | None]],
    pattern: str = "",
) -> Goal:
    """The goal that the cells whose names match reach `bound`. A cell that was not measured misses it."""
    text = f"at least {bound:.3g}: {text}"
    matching = [ratio for name, ratio in cells if re.match(pattern, name)]
    ratios = [ratio for ratio in matching if ratio is not None]
    if not ratios:
        return Goal(text, value=None, met=None)
    value = combine(ratios)
    all_measured = len(ratios) == len(matching)
    return Goal(text, value, met=value >= bound and all_measured)


def _is_reverb(cell: CellResult) -> bool:
    """True for a cell with a goal against Reverb. Whole pipelines and the disk have no goal."""
    return cell.against == "reverb" and not cell.cell.startswith(("tokens/", "restart/", "checkpoint/"))


def _color(good: bool) -> str:
    return "green" if good else "red"


def _colored(ratio: float) -> str:
    """A ratio in the markup of rich."""
    return f"[{_color(ratio >= 1)}]{ratio:.2f}[/]"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
