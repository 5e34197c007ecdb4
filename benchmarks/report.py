"""The report: a table for people, JSON for programs, a chart."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import CellResult, geometric_mean

FIGURES = ("ratio", "ours", "theirs", "tcp_ratio", "tcp")
"""Of a cell: each is the median of its rounds."""


@dataclass(frozen=True)
class Goal:
    """What a set of cells should reach; `value` is None where none of them was measured."""

    text: str
    value: float | None
    met: bool | None


@dataclass(frozen=True)
class Report:
    """All results of a run."""

    facts: dict[str, Any]
    """Machine, versions, settings."""
    cells: Sequence[CellResult]

    def goals(self) -> list[Goal]:
        reverb = [cell for cell in self.cells if _is_reverb(cell)]
        host = [(cell.cell, cell.median("ratio")) for cell in reverb]
        tcp = [(cell.cell, cell.median("tcp_ratio") or cell.median("ratio")) for cell in reverb]
        every = [(cell.cell, cell.median("ratio")) for cell in self.cells]
        middle = "(4kB|40kB|106kB|400kB)"
        return [
            _goal("lowest ratio to Reverb of all cells, on one host", 1.0, min, host),
            _goal(
                "lowest ratio to Reverb with one writer or one reader, payloads of 4 kB to 400 kB, on one host",
                *(4.0, min, host, f"(insert|sample)/{middle}/1-"),
            ),
            _goal(
                "lowest ratio to Reverb with four writers, payloads of 4 kB to 400 kB, on one host",
                *(2.5, min, host, f"insert/{middle}/4-w"),
            ),
            _goal(
                "lowest ratio to Reverb for inserts and samples of 400 B and of 4 MB, on one host",
                *(3.0, min, host, "(insert|sample)/(400B|4MB)/"),
            ),
            _goal("geometric mean of all ratios to Reverb, on one host", 3.0, geometric_mean, host),
            _goal("geometric mean of all ratios to Reverb, over TCP", 1.0, geometric_mean, tcp),
            _goal(
                "lowest ratio of this server's speed with 1e6 items to its speed with 1e3 items",
                *(1 / 1.5, min, every, "scaling/.*/1e6$"),
            ),
            _goal(
                "lowest ratio of this server's bytes per second with payloads of 32 MB to those with payloads of 4 MB",
                *(1.0, min, every, "large/"),
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "facts": self.facts,
            "goals": [asdict(goal) for goal in self.goals()],
            "cells": [asdict(cell) | {name: cell.median(name) for name in FIGURES} for cell in self.cells],
        }

    def print(self, console: Console) -> None:
        for against in dict.fromkeys(cell.against for cell in self.cells):
            console.print(self._table(against))
        for goal in self.goals():
            if goal.value is not None:
                console.print(f"[{_color(bool(goal.met))}]{goal.value:6.2f}[/]  {goal.text}")
        if failed := [cell for cell in self.cells if cell.error is not None]:
            console.print(f"[red]{len(failed)} cells failed; their reasons are in the tables.[/]")

    def _table(self, against: str) -> Table:
        table = Table(title=f"ours against {against}; ratio above 1: ours is better", box=None, header_style="bold")
        table.add_column("cell")
        for column in ("ours", "theirs", "", "ratio", "of the rounds", "over TCP", "its ratio"):
            table.add_column(column, justify="left" if column == "" else "right")
        for cell in self.cells:
            if cell.against != against:
                continue
            ratio, ours, theirs, tcp_ratio, tcp = map(cell.median, FIGURES)
            if ratio is None or ours is None or theirs is None:
                table.add_row(cell.cell, f"[red]failed[/] {cell.error}")
                continue
            ratios = [each.ratio for each in cell.rounds]
            table.add_row(
                cell.cell,
                _number(ours),
                _number(theirs),
                cell.unit,
                f"[{_color(ratio >= 1)}]{ratio:.2f}[/]",
                f"{min(ratios):.2f}-{max(ratios):.2f}",
                "" if tcp is None else _number(tcp),
                "" if tcp_ratio is None else f"[{_color(tcp_ratio >= 1)}]{tcp_ratio:.2f}[/]",
            )
        return table

    def draw(self, path: Path) -> None:
        """A bar for each cell, on a logarithmic axis, and a dot for each of its rounds."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        cells = [(cell, ratio) for cell in self.cells if (ratio := cell.median("ratio")) is not None]
        if not cells:
            return
        figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.19 * len(cells)), layout="constrained")
        for row, (cell, ratio) in enumerate(cells):
            ratios = [each.ratio for each in cell.rounds]
            axes.barh(row, ratio - 1, left=1, color="tab:green" if ratio >= 1 else "tab:red", height=0.7)
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
    """That the cells whose names match reach `bound`. One that was not measured misses it."""
    found = [ratio for name, ratio in cells if re.match(pattern, name)]
    ratios = [ratio for ratio in found if ratio is not None]
    value = combine(ratios) if ratios else None
    met = None if value is None else value >= bound and len(ratios) == len(found)
    return Goal(f"at least {bound:.3g}: {text}", value, met)


def _is_reverb(cell: CellResult) -> bool:
    """A message, or what one process takes. Whole pipelines and the disk have no goal."""
    return cell.against == "reverb" and not cell.cell.startswith(("tokens/", "restart/", "checkpoint/"))


def _color(good: bool) -> str:
    return "green" if good else "red"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
