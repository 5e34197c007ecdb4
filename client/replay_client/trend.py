"""Trend: computes if a metric of a run rises or falls, by one rule for all programs that show it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, variance

from replay_protos.words import counted

EDGE = 10
"""The number of steps at the beginning, and at the end, whose means are compared."""
_SURE = 3.0
"""A change counts from this number of standard errors on. In fewer than one of a hundred runs, noise alone makes such a
change."""
_LEAST = 0.01
"""The smallest change that counts, as a share of the larger mean."""
_LARGEST = 1e150
"""The largest |value|. A larger value counts as no value, because the square of a difference would overflow."""


class Direction(StrEnum):
    """The direction in which a metric changes."""

    UP = "up"
    FLAT = "flat"
    DOWN = "down"
    NOT_KNOWN = "not known"


@dataclass(frozen=True)
class Trend:
    """The change of a metric from its first steps to its last ones."""

    direction: Direction
    steps: int
    """Steps with a value."""
    first: float | None = None
    """The mean of the first EDGE steps; None: not known."""
    last: float | None = None
    """The mean of the last EDGE steps; None: not known."""

    def __str__(self) -> str:
        """`up, from 0.19 to 0.41 (means of 10 steps) over 60 steps`, or why the trend is not known."""
        if self.first is None or self.last is None:
            if not self.steps:
                return "not known: no step has a value"
            if self.steps < 2 * EDGE:
                has = "has" if self.steps == 1 else "have"
                return f"not known yet: {counted(self.steps, 'step')} {has} a value, and {2 * EDGE} are needed"
            return f"not known: none of the last {EDGE} steps has a value"
        means = f"from {self.first:.3g} to {self.last:.3g} (means of {EDGE} steps)"
        return f"{self.direction}, {means} over {counted(self.steps, 'step')}"


def trend_of(values: Sequence[float | None]) -> Trend:
    """The trend of a metric, from its value in each step of a run, the oldest first. None or NaN: no value.

    A value beyond 1e150 counts as no value. n is the number of steps with a value. a and b are the means of the first
    and of the last EDGE = 10 of these steps, with the sample variances s² and t². The metric goes up if

        b - a >= max(3 * sqrt((s² + t²) / EDGE), 0.01 * max(|a|, |b|))  and  b != a,

    down if a - b is as large, and otherwise the metric is flat. So the unit of the metric does not matter. The trend is
    not known if n < 2 * EDGE, or if none of the last EDGE steps of the run has a value.
    """
    known = _known(values)
    recent = _known(values[-EDGE:])
    if len(known) < 2 * EDGE or not recent:
        return Trend(direction=Direction.NOT_KNOWN, steps=len(known))
    first = fmean(known[:EDGE])
    last = fmean(known[-EDGE:])
    error = math.sqrt((variance(known[:EDGE]) + variance(known[-EDGE:])) / EDGE)
    change = last - first
    smallest_change = max(_SURE * error, _LEAST * max(abs(first), abs(last)))
    direction = Direction.FLAT
    if change and abs(change) >= smallest_change:  # `smallest_change` is 0 if all values are 0
        direction = Direction.UP if change > 0 else Direction.DOWN
    return Trend(direction=direction, steps=len(known), first=first, last=last)


def _known(values: Sequence[float | None]) -> list[float]:
    """The values that count. NaN is left out, because a comparison with NaN is False."""
    return [value for value in values if value is not None and abs(value) <= _LARGEST]
