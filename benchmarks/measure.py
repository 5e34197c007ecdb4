"""Measuring: rounds of ours and theirs in turn, and what comes out of them."""

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
    ours: float
    theirs: float
    ratio: float
    """Above 1: ours is better."""
    tcp: float | None = None
    """Ours with payloads over gRPC, as between two hosts."""
    tcp_ratio: float | None = None


@dataclass(frozen=True)
class CellResult:
    """One cell: its rounds, or why there are none."""

    cell: str
    against: str
    unit: str
    higher_is_better: bool
    rounds: tuple[Round, ...] = ()
    error: str | None = None

    def median(self, name: str) -> float | None:
        """Of a figure of the rounds; None where it was not measured. What slows both sides of a round leaves its ratio
        alone, so that of the cell is the median of theirs."""
        values = [value for each in self.rounds if (value := getattr(each, name)) is not None]
        return statistics.median(values) if values else None


@dataclass(frozen=True)
class Effort:
    """How much time to take."""

    seconds: float
    rounds: int


def measure(comparison: Comparison, effort: Effort, on_result: Callable[[CellResult], None]) -> None:
    """Measures all of a comparison; a measurement that fails is reported with its reason, and the next one follows."""
    ours, theirs = RunningSide(comparison.ours), RunningSide(comparison.theirs)
    tcp = None if comparison.tcp is None else RunningSide(comparison.tcp)
    try:
        for measurement in comparison.measurements:
            error, rounds = None, []
            try:
                rounds = _rounds(measurement, ours, theirs, tcp, effort)
            except Failed as failure:
                error = str(failure)
            for figure in measurement.figures:
                on_result(
                    CellResult(
                        figure.cell,
                        comparison.against,
                        figure.unit,
                        figure.higher_is_better,
                        tuple(each[figure.cell] for each in rounds),
                        error,
                    )
                )
    finally:
        ours.stop()
        theirs.stop()
        if tcp is not None:
            tcp.stop()


def _rounds(
    measurement: Measurement, ours: RunningSide, theirs: RunningSide, tcp: RunningSide | None, effort: Effort
) -> list[dict[str, Round]]:
    """Each round by cell. Every other one begins with theirs, so that a steady drift helps neither side."""
    sides = {
        "ours": (ours, replace(measurement.task, seconds=effort.seconds)),
        "theirs": (theirs, replace(measurement.their_task or measurement.task, seconds=effort.seconds)),
    }
    if tcp is not None:
        sides["ours over TCP"] = tcp, replace(measurement.task, seconds=effort.seconds)
    rounds = []
    for number in range(min(effort.rounds, measurement.rounds)):
        results = {}
        for name in sides if number % 2 == 0 else reversed(sides):
            side, task = sides[name]
            try:
                results[name] = side.measure(task, measurement.clients, measurement.beside)
            except Failed as failure:
                raise Failed(f"{name}: {failure}") from None
        rounds.append(
            {
                figure.cell: _round(figure, {name: figure.of(result) for name, result in results.items()})
                for figure in measurement.figures
            }
        )
    return rounds


def _round(figure: Figure, values: dict[str, float]) -> Round:
    ours, theirs, tcp = values["ours"], values["theirs"], values.get("ours over TCP")
    tcp_ratio = None if tcp is None else figure.ratio(tcp, theirs)
    return Round(ours, theirs, figure.ratio(ours, theirs), tcp, tcp_ratio)


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios)) if ratios else math.nan
