"""Meters: counters, rates over the last minute, usual intervals, and flow by policy version."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from replay_server.tables.columns import IntArray

WINDOW = 60
"""Seconds over which rates are measured."""
_PAUSES = 256
"""The most pauses between arrivals that are remembered."""
_LONGEST = 3
"""Pauses are compared with the third longest pause. An interval is unknown until there are three steps or pauses."""
_STEPS = 15
"""The most steps from which the usual length of a step is measured."""


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
    """The usual length of a step: the median of the last steps. Stalls do not change it unless most steps stall."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_STEPS)
        """The seconds of each of the last steps."""
        self._begun: float | None = None
        """The time at which the current step began; None: no step has begun."""

    def beat(self, now: float) -> None:
        """A step ends, and the next one begins."""
        if self._begun is not None:
            self._steps.append(now - self._begun)
        self._begun = now

    @property
    def interval(self) -> float:
        """The usual seconds of a step; 0: unknown, because fewer than three steps have ended."""
        if len(self._steps) < _LONGEST:
            return 0.0
        return median(self._steps)


class ArrivalTimes:
    """The usual interval between arrivals.

    Arrivals come in bursts: a step's groups within seconds, then nothing until the next step. Only the interval between
    bursts counts. So the usual interval is the median of the long pauses.
    """

    def __init__(self, apart: float = 0.0) -> None:
        """An arrival less than `apart` seconds after the last counted arrival is not counted itself."""
        self._apart = apart
        self._pauses: deque[float] = deque(maxlen=_PAUSES)
        """The seconds between the last counted arrivals."""
        self._begun: float | None = None
        """The time of the last counted arrival; None: nothing has arrived."""

    def beat(self, now: float) -> None:
        """Something arrives now."""
        if self._begun is None:
            self._begun = now
            return
        pause = now - self._begun
        if pause >= self._apart:
            self._pauses.append(pause)
            self._begun = now

    def interval(self, step: float = 0.0) -> float:
        """Seconds between two bursts; 0: unknown, because there were fewer than three pauses.

        `step`: the usual seconds of a step of the trainer; 0: unknown. A pause is long if it lasts at least half a
        step. Then stalls do not change the interval unless most long pauses are stalls. If the step is unknown, or
        fewer than three pauses are as long as a step, a pause is long if it lasts at least half of the third longest
        pause. Then one or two stalls do not change the interval.
        """
        if len(self._pauses) < _LONGEST:
            return 0.0
        third_longest = sorted(self._pauses)[-_LONGEST]
        reference = third_longest
        if step:
            reference = min(step, third_longest)
        shortest_long_pause = reference / 2
        return median(pause for pause in self._pauses if pause >= shortest_long_pause)


class Meter:
    """A sum over the last minute, in buckets of a second, and the usual interval between additions."""

    def __init__(self, now: float) -> None:
        self._started = now
        self._second = int(now)
        """The second up to which buckets have been emptied."""
        self._buckets = [0.0] * WINDOW
        """By second, modulo WINDOW: the sum of what was added in the second."""
        self.last = now
        """The time of the last addition, or of the start."""
        self.arrivals = ArrivalTimes(apart=1.0)

    def add(self, amount: float, now: float) -> None:
        """Adds `amount` to the sum of the second `now`."""
        self._advance(now)
        self._buckets[self._second % WINDOW] += amount
        self.last = now
        self.arrivals.beat(now)

    def per_second(self, now: float) -> float:
        """The mean over the last minute, or over the time since the start if that is less."""
        self._advance(now)
        return sum(self._buckets) / min(WINDOW, max(1.0, now - self._started))

    def _advance(self, now: float) -> None:
        """Empties the buckets of the seconds since the last call: they hold sums of a minute ago."""
        second = int(now)
        if second <= self._second:
            return
        last = min(second, self._second + WINDOW)  # after a longer time, each bucket is emptied only once
        for new_second in range(self._second + 1, last + 1):
            self._buckets[new_second % WINDOW] = 0.0
        self._second = second


class BlockedTime:
    """The share of the last minute in which something was blocked."""

    def __init__(self, now: float) -> None:
        self._meter = Meter(now)
        """Counts blocked seconds."""
        self.since: float | None = None
        """The time up to which blocked seconds have been counted; None: nothing is blocked."""

    def set(self, blocked: bool, now: float) -> None:
        """Notes that something is blocked from `now` on, or that nothing is."""
        self._settle(now)
        self.since = now if blocked else None

    def share(self, now: float) -> float:
        """The blocked share of the last minute, from 0 to 1."""
        self._settle(now)
        return min(1.0, self._meter.per_second(now))

    def _settle(self, now: float) -> None:
        """Counts the blocked seconds until now."""
        if self.since is None:
            return
        start = max(self.since, now - WINDOW)  # earlier seconds have left the window
        while start < now:  # up to the next full second each time, so that every bucket holds at most a second
            end = min(now, float(int(start) + 1))
            assert start < end <= start + 1.0, (start, end)
            self._meter.add(end - start, start)
            start = end
        self.since = now


class FlowMeter:
    """The number of items drawn from one policy version to the next, and their staleness, over the last versions.

    Draws before the first version do not count, because nobody knows over how many versions they were made.
    """

    def __init__(self, versions: int = 32) -> None:
        """`versions`: the most changes of the version that are remembered."""
        self._finished: deque[tuple[int, int, int]] = deque(maxlen=versions)
        """For each change of the version: by how many it rose, the items drawn before it, and their total staleness."""
        self._began = False
        """True if the trainer has set a version."""
        self._drawn = self._staleness = 0  # since the version changed last

    def draw(self, staleness: IntArray) -> None:
        """Counts drawn items, with the staleness (n,) of each in versions."""
        self._drawn += staleness.size
        self._staleness += int(np.maximum(staleness, 0).sum())  # after a rollback, an item may be newer than the policy

    def move(self, versions: int) -> None:
        """The policy version rises by `versions`.

        Below 0: the trainer went back to an older version, and the count begins anew. 0: the trainer sent the same
        version again, which changes nothing. The first call begins the count, whatever `versions` is.
        """
        if versions == 0 and self._began:
            return
        if versions < 0:
            self._finished.clear()
        elif self._began:
            self._finished.append((versions, self._drawn, self._staleness))
        self._began = True
        self._drawn = self._staleness = 0

    def measured(self) -> dict[str, Any] | None:
        """The fields of the message Flow of replay.proto; None: nothing was drawn between two versions yet.

        These are the number of changes of the version, the mean number of items drawn for each version, and the mean
        staleness of an item. One change may raise the version by several versions.
        """
        versions = 0
        drawn = 0
        staleness = 0
        for rise, drawn_before, total_staleness in self._finished:
            versions += rise
            drawn += drawn_before
            staleness += total_staleness
        assert versions >= len(self._finished), "the version rose by at least 1 each time"
        if not drawn:
            return None
        return {"versions": len(self._finished), "drawn": drawn / versions, "staleness": staleness / drawn}
