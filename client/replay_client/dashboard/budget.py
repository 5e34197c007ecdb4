"""Budget: bounds the share of time in which the server works for the page."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from replay_client.errors import ServerUnavailableError

DEAREST = 1.0
"""Seconds that one call costs at most. A call that takes longer mostly waited in line at a busy server."""


class Budget:
    """Credit in seconds of calls: it grows by `share` each second, up to `burst`, and each call costs what it took.

    What a call took is more than what the server spent on it, and it grows while the server is busy: under load the
    page slows down by itself. Of calls that are all `alike` each costs what the fastest of the last ones took: the rest
    of its time went by in line. Calls run one at a time.
    """

    def __init__(
        self, share: float, burst: float, *, alike: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._took: deque[float] = deque(maxlen=16 if alike else 1)
        self._share = share
        self._burst = burst
        self._clock = clock
        self._credit = burst
        self._updated = clock()
        self._lock = asyncio.Lock()

    @property
    def credit(self) -> float:
        """Seconds of calls that may be made now; negative after a dear call."""
        now = self._clock()
        self._credit = min(self._burst, self._credit + self._share * (now - self._updated))
        self._updated = now
        return self._credit

    @asynccontextmanager
    async def call(self, *, background: bool = False) -> AsyncGenerator[None]:
        """Waits for credit, then runs the block as one call. A background call leaves half of the credit to others."""
        floor = self._burst / 2 if background else 0.0
        while True:
            async with self._lock:
                if self.credit > floor:
                    begin, worked = self._clock(), True
                    try:
                        yield
                    except ServerUnavailableError:
                        worked = False
                        raise
                    finally:
                        if worked:
                            self._took.append(self._clock() - begin)
                            self._credit -= min(DEAREST, *self._took)
                    return
            await asyncio.sleep(min(1.0, max(0.01, (floor - self.credit) / self._share)))
