"""Budget: bounds the share of the server's time that the page uses."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from replay_client.errors import ServerUnavailableError

DEAREST = 1.0
"""Most seconds of credit that one call costs. A longer call does not cost more, because most of its duration is a wait
in the line of a busy server."""


class Budget:
    """Credit in seconds. It grows by `share` each second, up to `burst`, and each call costs its duration.

    The duration of a call includes its waiting time, so it is an upper bound of the server's work. A busy server makes
    calls longer, so the page slows down under load. `alike` states that all calls do the same work. Each call then
    costs the duration of the fastest recent call, because any longer duration is due to waiting. Calls run one at a
    time.
    """

    def __init__(
        self, share: float, burst: float, *, alike: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._durations: deque[float] = deque(maxlen=16 if alike else 1)
        """The seconds that each of the last 16 calls took; without `alike`, of the last call only. A call is added when
        it ends, and then costs the least of these numbers."""
        self._share = share
        self._burst = burst
        self._clock = clock
        self._credit = burst
        self._updated = clock()
        """The time of the clock at which `_credit` was computed."""
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
        """Waits for credit, then runs the block as one call.

        A background call waits until the credit is more than half of `burst`, so that half of `burst` is left to the
        calls of viewers.
        """
        floor = self._burst / 2 if background else 0.0  # the call must wait until the credit is above this
        while True:
            async with self._lock:
                if self.credit > floor:
                    begin = self._clock()
                    server_worked = True
                    try:
                        yield
                    except ServerUnavailableError:
                        server_worked = False  # nothing reached the server, so the call costs nothing
                        raise
                    finally:
                        if server_worked:
                            self._durations.append(self._clock() - begin)
                            # `_durations` says why the call costs the least of the durations.
                            self._credit -= min(DEAREST, *self._durations)
                    return
            # There is too little credit. Sleep without the lock, so that a call that needs less credit can run first.
            seconds_to_credit = (floor - self.credit) / self._share
            await asyncio.sleep(min(1.0, max(0.01, seconds_to_credit)))
