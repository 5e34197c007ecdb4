"""Refusals: counts, by HTTP status, the requests of agents that the server of sessions refused lately."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from replay_generator.notices import beginning_of

REFUSED_SECONDS = 600.0
"""A refusal is counted for this many seconds."""
USUAL = frozenset((410, 426, 503))
"""Statuses that also occur in a healthy run, and are not counted. 410: the request came too late. 426: the request came
by a web socket. 503: the request asked for a rollout while no rollout waited for an agent."""
_MOST = 10_000
"""The most refusals that are remembered. If there are more, the oldest are forgotten."""
_MOST_REASON = 400
"""The most characters of a reason in the report to the server, as JSON."""


class Refusals:
    """The requests that were refused in the last REFUSED_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns the time in seconds."""
        self._clock = clock
        self._remembered: deque[tuple[float, int]] = deque(maxlen=_MOST)
        """The time and the status of each refusal, the oldest first."""
        self._reason = ""
        """The reason of the last refusal."""

    def count(self, status: int, reason: str) -> None:
        """Counts a request that was answered with this status. Does nothing if the status is no refusal, or if it is in
        USUAL."""
        if status < 400 or status in USUAL:
            return
        self._remembered.append((self._clock(), status))
        self._reason = beginning_of(reason, _MOST_REASON)

    def facts(self) -> dict[str, Any]:
        """The facts for the server: `refused`, the number of refusals by status, and `reason`, the reason of the last
        refusal. Empty: there were no refusals in the last REFUSED_SECONDS."""
        while self._remembered:  # forgets the refusals that are too old
            time_of_oldest, _ = self._remembered[0]
            if self._clock() - time_of_oldest <= REFUSED_SECONDS:
                break
            self._remembered.popleft()
        if not self._remembered:
            return {}
        by_status = Counter(status for _, status in self._remembered)
        refused = {str(status): by_status[status] for status in sorted(by_status)}
        return {"refused": refused, "reason": self._reason}
