"""The trend of a metric: one series a line."""

from __future__ import annotations

import math
import random

import pytest

from replay_client.trend import EDGE, Direction, trend_of

NAN = math.nan


def noisy(first: float, last: float, noise: float, steps: int = 60, seed: int = 0) -> list[float | None]:
    """A line with noise of this standard deviation."""
    numbers = random.Random(seed)
    line = [first + (last - first) * step / (steps - 1) for step in range(steps)]
    return [value + numbers.gauss(0.0, noise) for value in line]


TRENDS: dict[str, tuple[list[float | None], Direction, str]] = {
    "rising": (noisy(0.2, 0.4, 0.0), Direction.UP, "up, from 0.215 to 0.385 (means of 10 steps) over 60 steps"),
    "falling": (noisy(0.41, 0.19, 0.05), Direction.DOWN, "down, from "),
    "flat": ([0.4] * 60, Direction.FLAT, "flat, from 0.4 to 0.4 (means of 10 steps) over 60 steps"),
    "all rewards are 0": ([0.0] * 60, Direction.FLAT, "flat, from 0 to 0"),
    "noise": (noisy(0.4, 0.4, 0.2), Direction.FLAT, "flat, from "),
    "a rise within the noise": (noisy(0.40, 0.42, 0.2), Direction.FLAT, "flat, from "),
    "a rise beyond the noise": (noisy(0.2, 0.6, 0.1), Direction.UP, "up, from "),
    "a change of less than a hundredth": (noisy(0.4, 0.402, 0.0), Direction.FLAT, "flat, from "),
    "negative rewards that come closer to 0": (noisy(-5.0, -2.0, 0.3), Direction.UP, "up, from -"),
    "risen, and fallen half as far since": (
        [*noisy(0.2, 0.8, 0.0, 40), *noisy(0.8, 0.5, 0.0, 40)], Direction.UP, "up, from ",
    ),
    "as few steps as can be": ([0.1] * EDGE + [0.9] * EDGE, Direction.UP, "up, from 0.1 to 0.9 (means of 10 steps)"),
    "too few steps": ([0.1] * EDGE + [0.9] * (EDGE - 1), Direction.NOT_KNOWN, "not known yet: 19 steps have a value"),
    "one step": ([0.1], Direction.NOT_KNOWN, "not known yet: 1 step has a value, and 20 are needed"),
    "no step": ([], Direction.NOT_KNOWN, "not known: no step has a value"),
    "no step has the metric": ([None] * 60, Direction.NOT_KNOWN, "not known: no step has a value"),
    "every value is NaN": ([NAN] * 60, Direction.NOT_KNOWN, "not known: no step has a value"),
    "some values are NaN": ([NAN if step % 3 == 0 else step / 60 for step in range(60)], Direction.UP, "up, from "),
    "some are infinite": ([math.inf, *noisy(0.5, 0.1, 0.0), -math.inf], Direction.DOWN, "down, from "),
    "some are too large to be squared": (
        [1e200, *noisy(0.5, 0.1, 0.0), -1e200], Direction.DOWN, "down, from ",
    ),
    "every value is too large to be squared": (
        [1e200, -1e200] * 20, Direction.NOT_KNOWN, "not known: no step has a value",
    ),
    "every value is too large to be added": ([1e308] * 40, Direction.NOT_KNOWN, "not known: no step has a value"),
    "NaN since ten steps": ([*noisy(0.2, 0.6, 0.0), *[NAN] * EDGE], Direction.NOT_KNOWN, "none of the last 10 steps"),
    "a metric that began late": ([*[None] * 40, *noisy(0.2, 0.6, 0.0, 20)], Direction.UP, "over 20 steps"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRENDS)
def test_a_trend_is_what_a_person_sees(name):
    values, direction, words = TRENDS[name]
    trend = trend_of(values)
    assert trend.direction is direction
    assert words in str(trend)
    assert (trend.first is None) == (direction is Direction.NOT_KNOWN)


@pytest.mark.parametrize("scale", [1e-6, 100.0, 1e9])
@pytest.mark.parametrize("name", TRENDS)
def test_the_unit_of_a_metric_does_not_matter(name, scale):
    values, direction, _ = TRENDS[name]
    scaled = [None if value is None else scale * value for value in values]
    assert trend_of(scaled).direction is direction


@pytest.mark.parametrize("name", TRENDS)
def test_a_negative_series_goes_the_other_way(name):
    values, direction, _ = TRENDS[name]
    negative = [None if value is None else -value for value in values]
    opposite = {Direction.UP: Direction.DOWN, Direction.DOWN: Direction.UP}
    assert trend_of(negative).direction is opposite.get(direction, direction)


def test_noise_alone_has_no_trend_in_99_of_100_runs():
    trends = [trend_of(noisy(0.4, 0.4, 0.1, seed=seed)).direction for seed in range(1000)]
    assert sum(direction is not Direction.FLAT for direction in trends) <= 10
