"""Alarms: warnings about correction metrics that show a run in danger. Each is logged once, with its remedy.

The limits come from verl's guide to rollout correction.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Alarm:
    """A metric of `correct`, the values that trigger the alarm, and the remedy."""

    metric: str
    triggered_by: Callable[[float], bool]
    safe: str
    remedy: str


ALARMS = (
    Alarm(
        "ratio_mean",
        lambda value: not 0.5 <= value <= 2.0,
        "between 0.5 and 2",
        "the sampler and the trainer compute different things: compare temperature, top_p and logprobs mode of the "
        "sampler, and its weights with the published ones",
    ),
    Alarm(
        "ess",
        lambda value: value < 0.3,
        "at least 0.3",
        "a few tokens carry the gradient: lower clip_max, take level='token', or allow less staleness",
    ),
    Alarm(
        "kl",
        lambda value: abs(value) > 0.1,
        "between -0.1 and 0.1 nats",
        "the data is far from the policy: lower max_staleness of the tables or the learning rate",
    ),
    Alarm(
        "chi2",
        lambda value: value > 1.0,
        "at most 1",
        "single tokens have huge ratios: take action='mask', a rejection by k3 or a veto",
    ),
)


class Alarms:
    """Remembers which alarms were triggered."""

    def __init__(self) -> None:
        self._triggered: set[str] = set()

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """Log and return the warnings that these metrics trigger for the first time. NaN triggers none."""
        warnings = []
        for alarm in ALARMS:
            value = metrics.get(alarm.metric, math.nan)
            if alarm.metric in self._triggered or math.isnan(value) or not alarm.triggered_by(value):
                continue
            self._triggered.add(alarm.metric)
            warnings.append(
                f"correction/{alarm.metric} is {value:.3g}, safe is {alarm.safe}: {alarm.remedy} (said once)"
            )
            logger.warning("%s", warnings[-1])
        return warnings
