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
FIRST_CALLS = 4
"""The number of calls from which a budget for calls that are alike learns their price. The calls before cost nothing.
The first one also connects to the server, and on a busy machine each of so few may have waited."""


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
        self._alike = alike
        self._durations: deque[float] = deque(maxlen=16)
        """With `alike`: the seconds of the last 16 calls that did not fail. A call is added when it ends."""
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
                    try:
                        yield
                    except ServerUnavailableError:
                        raise  # nothing reached the server, so the call costs nothing
                    except BaseException:
                        self._pay(self._clock() - begin, failed=True)
                        raise
                    self._pay(self._clock() - begin)
                    return
            # There is too little credit. Sleep without the lock, so that a call that needs less credit can run first.
            seconds_to_credit = (floor - self.credit) / self._share
            await asyncio.sleep(min(1.0, max(0.01, seconds_to_credit)))

    def _pay(self, seconds: float, *, failed: bool = False) -> None:
        """Subtracts the price of a call that took this many seconds."""
        price = seconds
        if self._alike:
            if not failed:  # the duration of a call that failed, such as a timeout, says nothing about the others
                self._durations.append(seconds)
            price = min(self._durations) if len(self._durations) >= FIRST_CALLS else 0.0
        self._credit -= min(DEAREST, price)
