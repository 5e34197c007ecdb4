"""Trend: computes if a metric of a run rises or falls. All programs that show trends use this one rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, variance

from replay_protos.words import counted

EDGE = 10
"""The number of steps at each end of a run: the mean of the first EDGE steps is compared with that of the last EDGE
steps."""
_MIN_STANDARD_ERRORS = 3.0
"""The smallest change that counts, in standard errors. In fewer than one of a hundred runs, noise alone makes a change
of this size."""
_MIN_SHARE = 0.01
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
    """The number of steps with a value."""
    first: float | None = None
    """The mean of the first EDGE steps with a value; None: the trend is not known."""
    last: float | None = None
    """The mean of the last EDGE steps with a value; None: the trend is not known."""

    def __str__(self) -> str:
        """A text such as `up, from 0.19 to 0.41 (means of 10 steps) over 60 steps`. If the trend is not known, the text
        says why."""
        if self.first is None or self.last is None:
            if not self.steps:
                return "not known: no step has a value"
            if self.steps < 2 * EDGE:
                verb = "has" if self.steps == 1 else "have"
                return f"not known yet: {counted(self.steps, 'step')} {verb} a value, and {2 * EDGE} are needed"
            return f"not known: none of the last {EDGE} steps has a value"
        means = f"from {self.first:.3g} to {self.last:.3g} (means of {EDGE} steps)"
        return f"{self.direction}, {means} over {counted(self.steps, 'step')}"


def trend_of(values: Sequence[float | None]) -> Trend:
    """Computes the trend of a metric. `values` has the value of the metric in each step of a run, the oldest first.

    A step has no value if its value is None, NaN or beyond 1e150. n is the number of steps with a value. The first
    EDGE = 10 of these steps have the mean a and the sample variance s², and the last EDGE of them have the mean b and
    the sample variance t². The metric goes up if

        b - a >= max(3 * sqrt((s² + t²) / EDGE), 0.01 * max(|a|, |b|))  and  b != a.

    The metric goes down if the same is true of a - b. Otherwise the metric is flat. The unit of the metric does not
    matter, because both sides of the comparison have this unit. The trend is not known if n < 2 * EDGE, or if none of
    the last EDGE steps of the run has a value.
    """
    known = _known(values)
    recent = _known(values[-EDGE:])
    if len(known) < 2 * EDGE or not recent:
        return Trend(direction=Direction.NOT_KNOWN, steps=len(known))
    first = fmean(known[:EDGE])
    last = fmean(known[-EDGE:])
    standard_error = math.sqrt((variance(known[:EDGE]) + variance(known[-EDGE:])) / EDGE)
    change = last - first
    smallest_change = max(_MIN_STANDARD_ERRORS * standard_error, _MIN_SHARE * max(abs(first), abs(last)))
    # If all values are 0, `smallest_change` is 0, so `change` is also compared with 0.
    if change > 0 and change >= smallest_change:
        direction = Direction.UP
    elif change < 0 and -change >= smallest_change:
        direction = Direction.DOWN
    else:
        direction = Direction.FLAT
    return Trend(direction=direction, steps=len(known), first=first, last=last)


def _known(values: Sequence[float | None]) -> list[float]:
    """The values without None, NaN and values beyond _LARGEST. NaN is left out because a comparison with NaN is
    False."""
    return [value for value in values if value is not None and abs(value) <= _LARGEST]
