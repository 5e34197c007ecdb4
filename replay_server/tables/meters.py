"""Meters: counters, rates over the last minute, usual intervals between events, and draws per policy version."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from replay_server.tables.columns import IntArray

WINDOW = 60
"""Seconds over which rates are measured."""
_MOST_PAUSES = 256
"""The most pauses between arrivals that are remembered."""
_FEWEST = 3
"""The fewest steps or pauses from which a usual interval is computed. `ArrivalTimes.interval` needs the third longest
pause, so this is at least 3."""
_MOST_STEPS = 15
"""The most steps that are remembered."""


@dataclass
class Counters:
    """Counts since the start or the last reset. TableInfo in replay.proto has the same fields."""

    inserts: int = 0
    completions: int = 0
    completion_tokens: int = 0
    samples: int = 0
    consumed: int = 0
    deleted: int = 0
    evicted: int = 0
    evicted_on_arrival: int = 0
    evicted_unsampled: int = 0
    stale: int = 0
    stale_refused: int = 0
    duplicates: int = 0
    forwarded: int = 0
    forward_refused: int = 0
    extensions: int = 0
    retained_discarded: int = 0
    restored: int = 0
    undone: int = 0


class StepTimes:
    """Measures the usual duration of a step of the trainer: the median duration of the last steps.

    Stalls hardly change a median, unless most of these steps stall.
    """

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=_MOST_STEPS)
        """The seconds that each of the last steps took."""
        self._begun_at: float | None = None
        """The time at which the current step began; None: no step has begun."""

    def beat(self, now: float) -> None:
        """Notes that a step begins now, and that the step before it, if there was one, has ended."""
        if self._begun_at is not None:
            self._durations.append(now - self._begun_at)
        self._begun_at = now

    @property
    def interval(self) -> float:
        """The usual seconds of a step; 0: unknown, because fewer than three steps have ended."""
        if len(self._durations) < _FEWEST:
            return 0.0
        return median(self._durations)


class ArrivalTimes:
    """Measures the usual interval between bursts of arrivals.

    Arrivals come in bursts: all groups of a step arrive within seconds, and then none until the next step. Pauses
    within a burst are short, and pauses between two bursts are long. So the usual interval is the median of the long
    pauses.
    """

    def __init__(self, apart: float = 0.0) -> None:
        """`apart`: the fewest seconds between two counted arrivals. Arrivals that follow a counted one sooner are
        ignored."""
        self._apart = apart
        self._pauses: deque[float] = deque(maxlen=_MOST_PAUSES)
        """The seconds from each of the last counted arrivals to the next one."""
        self._counted_at: float | None = None
        """The time of the last counted arrival; None: nothing has arrived."""

    def beat(self, now: float) -> None:
        """Notes that something arrives now."""
        if self._counted_at is None:
            self._counted_at = now
            return
        pause = now - self._counted_at
        if pause >= self._apart:
            self._pauses.append(pause)
            self._counted_at = now

    def interval(self, step: float = 0.0) -> float:
        """The usual seconds between two bursts; 0: unknown, because there were fewer than three pauses.

        `step`: the usual seconds of a step of the trainer; 0: unknown. A pause is long if it lasts at least half as
        long as a step or as the third longest pause, whichever is shorter. If the step is unknown, only the third
        longest pause counts.

        Stalls are long pauses, too. One or two of them cannot be the third longest pause, so they do not decide which
        pauses are long. And stalls do not change the median much, unless most of the long pauses are stalls.
        """
        if len(self._pauses) < _FEWEST:
            return 0.0
        third_longest = sorted(self._pauses)[-3]
        reference = third_longest
        if step:
            reference = min(step, third_longest)
        shortest_long_pause = reference / 2
        return median(pause for pause in self._pauses if pause >= shortest_long_pause)


class Meter:
    """Sums what was added in the last minute, in one bucket for each second, and measures when additions come."""

    def __init__(self, now: float) -> None:
        self._started_at = now
        self._second = int(now)
        """The second of the newest bucket, in whole seconds of the clock."""
        self._buckets = [0.0] * WINDOW
        """The sums of the last WINDOW seconds. The sum of a second is at the index `second % WINDOW`."""
        self.last = now
        """The time of the last addition, or of the start."""
        self.arrivals = ArrivalTimes(apart=1.0)

    def add(self, amount: float, now: float) -> None:
        """Adds `amount` to the bucket of the second in which `now` lies."""
        self._advance(now)
        self._buckets[self._second % WINDOW] += amount
        self.last = now
        self.arrivals.beat(now)

    def per_second(self, now: float) -> float:
        """The mean amount per second of the last minute, or since the start if that was less than a minute ago."""
        self._advance(now)
        seconds = max(1.0, now - self._started_at)
        return sum(self._buckets) / min(seconds, WINDOW)

    def _advance(self, now: float) -> None:
        """Makes the bucket of `now` the newest one. Empties the buckets of the seconds that have begun since the last
        call, because these buckets still hold the sums of a minute ago."""
        second = int(now)
        if second <= self._second:
            return
        # After more than a minute, all WINDOW buckets are emptied, each of them once.
        last_to_empty = min(second, self._second + WINDOW)
        for new_second in range(self._second + 1, last_to_empty + 1):
            self._buckets[new_second % WINDOW] = 0.0
        self._second = second


class BlockedTime:
    """Measures the share of the last minute in which something was blocked."""

    def __init__(self, now: float) -> None:
        self._meter = Meter(now)
        """Sums the blocked seconds."""
        self.since: float | None = None
        """The time up to which blocked seconds have been counted; None: nothing is blocked."""

    def set(self, blocked: bool, now: float) -> None:
        """Notes that something is blocked from `now` on or, if `blocked` is False, that nothing is blocked."""
        self._count_until(now)
        self.since = now if blocked else None

    def share(self, now: float) -> float:
        """The blocked share of the last minute, from 0 to 1."""
        self._count_until(now)
        return min(1.0, self._meter.per_second(now))

    def _count_until(self, now: float) -> None:
        """Counts the blocked time from `since` until `now`. Counts nothing if nothing is blocked."""
        if self.since is None:
            return
        start = max(self.since, now - WINDOW)  # time before the last minute need not be counted
        # The loop adds the blocked time second by second, because each second has a bucket of its own in the meter.
        while start < now:
            next_second = float(int(start) + 1)
            end = min(now, next_second)
            assert start < end <= start + 1.0, (start, end)
            self._meter.add(end - start, start)
            start = end
        self.since = now


class FlowMeter:
    """Measures how many items are drawn for each policy version, and how stale they are, over the last versions.

    Draws before the trainer sets its first version do not count, because the number of versions before it is unknown.
    """

    def __init__(self, most_rises: int = 32) -> None:
        """`most_rises`: the number of rises of the policy version that are remembered. Each call of `move` that raises
        the policy version is one rise, by one version or by several."""
        self._rises: deque[tuple[int, int, int]] = deque(maxlen=most_rises)
        """The latest rises of the policy version, the oldest first. Each entry has three numbers: by how many versions
        the policy version rose, how many items were drawn at the version before the rise, and the total staleness of
        these items."""
        self._began = False
        """True once the trainer has set a version."""
        self._drawn = 0
        """The number of items drawn since the policy version changed last."""
        self._staleness = 0
        """The total staleness of the items that `_drawn` counts."""

    def draw(self, staleness: IntArray) -> None:
        """Counts drawn items. `staleness` (n,): by how many versions each item lags behind the policy."""
        self._drawn += staleness.size
        # After a rollback, an item may be newer than the policy. It then counts as not stale.
        self._staleness += int(np.maximum(staleness, 0).sum())

    def move(self, versions: int) -> None:
        """Notes that the policy version rises by `versions`.

        If `versions` is below 0, the trainer went back to an older version, and the count begins anew. If it is 0, the
        trainer sent the same version again, which changes nothing. The first call begins the count, whatever `versions`
        is.
        """
        if versions == 0 and self._began:
            return
        if versions < 0:
            self._rises.clear()
        elif self._began:
            self._rises.append((versions, self._drawn, self._staleness))
        self._began = True
        self._drawn = 0
        self._staleness = 0

    def measured(self) -> dict[str, Any] | None:
        """The fields of the message Flow of replay.proto; None: nothing was drawn between two versions yet.

        The field `versions` is the number of remembered rises of the policy version, one of which may be a rise by
        several versions. `drawn` is the mean number of items drawn for each version, and `staleness` the mean staleness
        of an item.
        """
        versions = 0
        drawn = 0
        staleness = 0
        for rise, drawn_before_rise, staleness_before_rise in self._rises:
            versions += rise
            drawn += drawn_before_rise
            staleness += staleness_before_rise
        assert versions >= len(self._rises), "the version rose by at least 1 each time"
        if not drawn:
            return None
        return {"versions": len(self._rises), "drawn": drawn / versions, "staleness": staleness / drawn}
