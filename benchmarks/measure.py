"""Measures comparisons: rounds of ours and theirs in turn, and their results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.cells import Comparison, Figure, Measurement
from benchmarks.processes import Failed
from benchmarks.sides import RunningSide


@dataclass(frozen=True)
class Round:
    """The values of one round of a cell."""

    ours: float
    theirs: float
    ratio: float
    """The ratio of both; above 1, ours is better."""
    tcp: float | None = None
    """The value of ours with payloads over gRPC, as between two hosts."""
    tcp_ratio: float | None = None
    """The ratio of `tcp` and theirs."""


@dataclass(frozen=True)
class CellResult:
    """One cell: its rounds, or the error because of which there are none."""

    cell: str
    against: str
    unit: str
    higher_is_better: bool
    rounds: tuple[Round, ...] = ()
    error: str | None = None

    def median(self, name: str) -> float | None:
        """The median of a field of the rounds; None: it was not measured.

        The ratio of a cell is the median of the ratios of its rounds: what slows both sides of a round leaves the ratio
        of the round alone.
        """
        values = [getattr(cell_round, name) for cell_round in self.rounds]
        measured = [value for value in values if value is not None]
        return statistics.median(measured) if measured else None


@dataclass(frozen=True)
class Effort:
    """The time that a measurement takes."""

    seconds: float
    rounds: int


def measure(comparison: Comparison, effort: Effort, on_result: Callable[[CellResult], None]) -> None:
    """Measures all of a comparison. A measurement that fails is reported with its reason, and the next one follows."""
    ours = RunningSide(comparison.ours)
    theirs = RunningSide(comparison.theirs)
    tcp = None if comparison.tcp is None else RunningSide(comparison.tcp)
    try:
        for measurement in comparison.measurements:
            error = None
            rounds = []
            try:
                rounds = _rounds(measurement, ours, theirs, tcp, effort)
            except Failed as failure:
                error = str(failure)
            for figure in measurement.figures:
                result = CellResult(
                    cell=figure.cell,
                    against=comparison.against,
                    unit=figure.unit,
                    higher_is_better=figure.higher_is_better,
                    rounds=tuple(by_cell[figure.cell] for by_cell in rounds),
                    error=error,
                )
                on_result(result)
    finally:
        ours.stop()
        theirs.stop()
        if tcp is not None:
            tcp.stop()


def _rounds(
    measurement: Measurement, ours: RunningSide, theirs: RunningSide, tcp: RunningSide | None, effort: Effort
) -> list[dict[str, Round]]:
    """The results of each round, by cell. Every second round begins with theirs, so that a drift helps neither side."""
    task = replace(measurement.task, seconds=effort.seconds)
    their_task = replace(measurement.their_task or measurement.task, seconds=effort.seconds)
    sides = {"ours": (ours, task), "theirs": (theirs, their_task)}
    if tcp is not None:
        sides["ours over TCP"] = (tcp, task)
    rounds = []
    for number in range(min(effort.rounds, measurement.rounds)):
        results = {}
        for name in sides if number % 2 == 0 else reversed(sides):
            side, task = sides[name]
            try:
                results[name] = side.measure(task, measurement.clients, measurement.beside)
            except Failed as failure:
                raise Failed(f"{name}: {failure}") from None
        by_cell = {}
        for figure in measurement.figures:
            values = {name: figure.of(result) for name, result in results.items()}
            by_cell[figure.cell] = _round(figure, values)
        rounds.append(by_cell)
    return rounds


def _round(figure: Figure, values: dict[str, float]) -> Round:
    ours = values["ours"]
    theirs = values["theirs"]
    tcp = values.get("ours over TCP")
    tcp_ratio = None if tcp is None else figure.ratio(tcp, theirs)
    return Round(ours, theirs, figure.ratio(ours, theirs), tcp, tcp_ratio)


def geometric_mean(ratios: list[float]) -> float:
    """The geometric mean; NaN without ratios."""
    if not ratios:
        return math.nan
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
