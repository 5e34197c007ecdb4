"""FailureWatch and LengthWatch: notice that many rollouts fail, or are cut off long before their `max_tokens`.

The generator or the scorer reports this to the server (`describe`); `replay doctor` shows it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from replay_generator.notices import Watch, beginning_of

LAST_ROLLOUTS = 64
"""The number of rollouts that are judged. Failures are judged by whole groups: the last ones that have at most so many
rollouts together, or the last one alone."""
LEAST_ROLLOUTS = 16
"""The least number of rollouts that allows a judgement."""
MOST_REASON = 400
"""The most characters of the reason of a failure, as JSON."""


class FailureWatch(Watch):
    """Counts the rollouts that failed, among those of the last groups."""

    def __init__(self) -> None:
        self._groups: deque[tuple[int, int]] = deque()
        """The last groups, each with its number of rollouts and how many of these failed."""
        self._rollouts = 0
        """The rollouts of these groups together."""
        self._reason = ""

    def record(self, finished: int, failed: int, reason: str = "") -> None:
        """Counts a group. `reason`: the error of one of its rollouts that failed."""
        self._groups.append((finished + failed, failed))
        self._rollouts += finished + failed
        while self._rollouts > LAST_ROLLOUTS and len(self._groups) > 1:
            rollouts, _ = self._groups.popleft()
            self._rollouts -= rollouts
        if failed:
            self._reason = beginning_of(reason, MOST_REASON)

    @property
    def description(self) -> dict[str, str]:
        """The report for the server, JSON by name; empty: at most half of the rollouts failed."""
        rollouts = self._rollouts
        failed = sum(failed for _, failed in self._groups)
        if rollouts < LEAST_ROLLOUTS or failed <= rollouts / 2:
            return {}
        facts = {"failed": failed, "rollouts": rollouts, "reason": self._reason}
        return {"failures": json.dumps(facts)}


class LengthWatch(Watch):
    """Counts the rollouts that ended for their length with less than half of `max_tokens`, among the last ones.

    Each is one completion of its prompt: agents and hooks may ask for less, or have other limits.
    """

    def __init__(self) -> None:
        self._cut: deque[int] = deque(maxlen=LAST_ROLLOUTS)
        """One entry for each of the last rollouts: its number of tokens if it was cut off early, otherwise -1."""
        self._max_tokens = 0

    def record(self, lengths: npt.NDArray[np.integer], reasons: Sequence[str], max_tokens: int) -> None:
        """`lengths` (G,): tokens of each rollout. `reasons`: why each ended."""
        self._max_tokens = max_tokens
        for length, reason in zip(lengths.tolist(), reasons, strict=True):
            if reason == "length" and length < max_tokens / 2:
                self._cut.append(length)
            else:
                self._cut.append(-1)

    @property
    def description(self) -> dict[str, str]:
        """The report for the server, JSON by name; empty: at most a tenth of the rollouts was cut off early."""
        cut = [length for length in self._cut if length >= 0]
        if len(self._cut) < LEAST_ROLLOUTS or len(cut) <= len(self._cut) / 10:
            return {}
        facts = {"cut": len(cut), "rollouts": len(self._cut), "longest": max(cut), "max_tokens": self._max_tokens}
        return {"cut_early": json.dumps(facts)}
