"""Refusals: counts the requests of agents that the address of the sessions refused lately, by their status."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from replay_generator.notices import beginning_of

REFUSED_SECONDS = 600.0
"""Refusals are counted for so long."""
USUAL = frozenset((410, 426, 503))
"""Part of the work: a request that comes too late, one by a web socket, and one for a rollout when none waits."""
_MOST = 10_000
"""Refusals that are counted at most."""
_MOST_REASON = 400
"""Characters of a reason, as JSON."""


class Refusals:
    """The requests that were refused in the last REFUSED_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: deque[tuple[float, int]] = deque(maxlen=_MOST)
        """When, and the status."""
        self._reason = ""

    def count(self, status: int, reason: str) -> None:
        """Count a request that was answered with this status."""
        if status < 400 or status in USUAL:
            return
        self._last.append((self._clock(), status))
        self._reason = beginning_of(reason, _MOST_REASON)

    def facts(self) -> dict[str, Any]:
        """How many there were by status, and why the last one was refused; empty: there was none."""
        while self._last and self._clock() - self._last[0][0] > REFUSED_SECONDS:
            self._last.popleft()
        if not self._last:
            return {}
        by_status = Counter(status for _, status in self._last)
        return {"refused": {str(status): by_status[status] for status in sorted(by_status)}, "reason": self._reason}
