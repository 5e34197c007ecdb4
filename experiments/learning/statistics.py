"""Summarises curves: tokens to a level, areas, ends; medians over seeds, paired, with bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
GENERATED, TRAINED, STEPS, SECONDS, CPU_SECONDS, SOLVE_RATE = range(6)
"""Columns of a record's curve."""
RESAMPLES = 4000


def curve_of(record: dict[str, Any]) -> Floats:
    """The (points, 6) curve, its solve rate smoothed over three neighbouring points; the start stays as it is."""
    curve = np.array(record["curve"], dtype=np.float64)
    rates = curve[:, SOLVE_RATE].copy()
    for i in range(1, len(rates)):
        curve[i, SOLVE_RATE] = rates[max(1, i - 1) : i + 2].mean()
    return curve


def cost_at(curve: Floats, level: float, weights: Sequence[float]) -> float:
    """The weighted sum of the first five columns where the solve rate first reaches `level`; inf if it never does."""
    costs = curve[:, :SOLVE_RATE] @ np.asarray(weights, dtype=np.float64)
    rates = curve[:, SOLVE_RATE]
    reached = np.flatnonzero(rates >= level)
    if not reached.size:
        return math.inf
    last = int(reached[0])
    if last == 0:
        return float(costs[0])
    part = (level - rates[last - 1]) / (rates[last] - rates[last - 1])
    return float(costs[last - 1] + part * (costs[last] - costs[last - 1]))


def ratio_to(record: dict[str, Any], baseline: dict[str, Any], weights: Sequence[float]) -> float:
    """Cost of the arm over cost of the baseline, to the best solve rate that the baseline reaches in its budget.

    inf: the arm does not get there in its own budget. NaN: the baseline never rises above its start.
    """
    base = curve_of(baseline)
    level = float(base[:, SOLVE_RATE].max())
    if level <= base[0, SOLVE_RATE]:
        return math.nan
    return cost_at(curve_of(record), level, weights) / cost_at(base, level, weights)


def area(record: dict[str, Any]) -> float:
    """The mean solve rate over the budget of generated tokens."""
    curve = np.array(record["curve"], dtype=np.float64)
    tokens, rates = curve[:, GENERATED], curve[:, SOLVE_RATE]
    return float(np.trapezoid(rates, tokens) / (tokens[-1] - tokens[0]))


def end(record: dict[str, Any]) -> float:
    """The mean solve rate of the last three points."""
    return float(np.mean([point[SOLVE_RATE] for point in record["curve"][-3:]]))


def collapsed(record: dict[str, Any]) -> bool:
    """True if the run ended below its start."""
    return end(record) < record["curve"][0][SOLVE_RATE]


@dataclass(frozen=True)
class Interval:
    """A median over seeds and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """Of `values`, one a seed; seeds are drawn again with replacement RESAMPLES times. NaN are left out."""
    kept = np.array([value for value in values if not math.isnan(value)])
    if not kept.size:
        return Interval(math.nan, math.nan, math.nan)
    rng = np.random.default_rng(0)
    # Order statistics, and no interpolation between them: values may be inf.
    draws = np.sort(kept[rng.integers(kept.size, size=(RESAMPLES, kept.size))], axis=1)
    medians = np.sort([_middle(row) for row in draws])
    return Interval(
        _middle(np.sort(kept)), float(medians[int(0.025 * RESAMPLES)]), float(medians[int(0.975 * RESAMPLES)])
    )


def _middle(ascending: Floats) -> float:
    low, high = float(ascending[(len(ascending) - 1) // 2]), float(ascending[len(ascending) // 2])
    return high if math.isinf(high) else (low + high) / 2


def mean_interval(values: Sequence[float]) -> Interval:
    """As `interval`, of the mean (in `median`)."""
    kept = np.array(values, dtype=np.float64)
    if not kept.size:
        return Interval(math.nan, math.nan, math.nan)
    rng = np.random.default_rng(0)
    means = np.sort(kept[rng.integers(kept.size, size=(RESAMPLES, kept.size))].mean(axis=1))
    return Interval(float(kept.mean()), float(means[int(0.025 * RESAMPLES)]), float(means[int(0.975 * RESAMPLES)]))
