"""Budget: bounds the share of the server's time that the page uses."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from replay_client.errors import ServerUnavailableError

DEAREST = 1.0
"""Most seconds of credit that one call costs. A longer call has mostly waited in line at a busy server."""


class Budget:
    """Credit in seconds. It grows by `share` each second, up to `burst`, and each call costs its duration.

    The duration includes waiting, so it is an upper bound of the server's work. A busy server makes calls longer, so
    the page slows down under load. With `alike`, all calls do the same work: each then costs the duration of the
    fastest recent call, because the rest is waiting. Calls run one at a time.
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
        """The credit now, in seconds; negative after an expensive call."""
        now = self._clock()
        self._credit = min(self._burst, self._credit + self._share * (now - self._updated))
        self._updated = now
        return self._credit

    @asynccontextmanager
    async def call(self, *, background: bool = False) -> AsyncGenerator[None]:
        """Waits for credit, then runs the block as one call. A background call leaves half of the credit to viewers."""
        floor = self._burst / 2 if background else 0.0
        while True:
            async with self._lock:
                if self.credit > floor:
                    begin = self._clock()
                    worked = True
                    try:
                        yield
                    except ServerUnavailableError:
                        worked = False  # nothing reached the server, so the call costs nothing
                        raise
                    finally:
                        if worked:
                            self._took.append(self._clock() - begin)
                            self._credit -= min(DEAREST, *self._took)
                    return
            seconds_to_credit = (floor - self.credit) / self._share
            await asyncio.sleep(min(1.0, max(0.01, seconds_to_credit)))
