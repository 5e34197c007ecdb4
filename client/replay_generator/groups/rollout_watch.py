"""FailureWatch and LengthWatch: notice that many rollouts fail, or are cut off long before their `max_tokens`.

The generator or the scorer reports this to the server (`describe`), and `replay doctor` shows it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from replay_generator.notices import Watch, beginning_of

LAST_ROLLOUTS = 64
"""The number of rollouts that are judged. Failures are judged by whole groups: by the last groups that together have at
most LAST_ROLLOUTS rollouts, or by the last group alone if it has more."""
LEAST_ROLLOUTS = 16
"""The least number of rollouts from which anything is reported."""
MOST_REASON = 400
"""The most characters of the reason of a failure, as JSON."""


class FailureWatch(Watch):
    """Counts the rollouts that failed, among the rollouts of the last groups."""

    def __init__(self) -> None:
        self._groups: deque[tuple[int, int]] = deque()
        """The last groups: for each the number of its rollouts, and the number of those that failed."""
        self._rollouts = 0
        """The number of rollouts of these groups together."""
        self._reason = ""
        """The error of the last rollout that failed."""

    def record(self, finished: int, failed: int, reason: str = "") -> None:
        """Counts a group of `finished` and `failed` rollouts. `reason`: the error of a rollout that failed."""
        size = finished + failed
        self._groups.append((size, failed))
        self._rollouts += size
        while self._rollouts > LAST_ROLLOUTS and len(self._groups) > 1:
            oldest_size, _ = self._groups.popleft()
            self._rollouts -= oldest_size
        if failed:
            self._reason = beginning_of(reason, MOST_REASON)

    @property
    def description(self) -> dict[str, str]:
        """The report for the server, as JSON by its name; empty: too few rollouts, or at most half of them failed."""
        rollouts = self._rollouts
        failed = sum(failed_in_group for _, failed_in_group in self._groups)
        if rollouts < LEAST_ROLLOUTS or failed <= rollouts / 2:
            return {}
        facts = {"failed": failed, "rollouts": rollouts, "reason": self._reason}
        return {"failures": json.dumps(facts)}


class LengthWatch(Watch):
    """Counts, among the last rollouts, those with the finish reason "length" and fewer than `max_tokens` / 2 tokens.

    Record only rollouts that are one completion of their prompt, because agents and hooks may request fewer tokens, or
    have other limits.
    """

    def __init__(self) -> None:
        self._cut: deque[int] = deque(maxlen=LAST_ROLLOUTS)
        """One entry for each of the last rollouts: its number of tokens if it was cut off early, otherwise -1."""
        self._max_tokens = 0
        """The `max_tokens` of the last group."""

    def record(self, lengths: npt.NDArray[np.integer], reasons: Sequence[str], max_tokens: int) -> None:
        """Counts the G rollouts of a group. `lengths` (G,): their numbers of tokens. `reasons`: their finish reasons.

        `max_tokens`: the most tokens that each rollout was to have.
        """
        self._max_tokens = max_tokens
        for length, reason in zip(lengths.tolist(), reasons, strict=True):
            if reason == "length" and length < max_tokens / 2:
                self._cut.append(length)
            else:
                self._cut.append(-1)

    @property
    def description(self) -> dict[str, str]:
        """The report for the server, as JSON by its name; empty: too few rollouts, or at most a tenth was cut early."""
        cut = [length for length in self._cut if length >= 0]  # -1: the rollout was not cut off early
        if len(self._cut) < LEAST_ROLLOUTS or len(cut) <= len(self._cut) / 10:
            return {}
        facts = {"cut": len(cut), "rollouts": len(self._cut), "longest": max(cut), "max_tokens": self._max_tokens}
        return {"cut_early": json.dumps(facts)}
