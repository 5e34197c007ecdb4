"""WaitLog: tells a person that something waits, at once, then every 30 s, and when it goes on."""

from __future__ import annotations

import logging
import time

from replay_client.heartbeat import beat

logger = logging.getLogger(__name__)

LOG_SECONDS = 30.0
"""Between two lines about waiting, also about waits that follow each other."""
_SHORT_WAIT = 1.0
"""Seconds. The end of a shorter wait is not worth a line."""


class WaitLog:
    """One log for all waits of a kind, however many are under way at once."""

    def __init__(self, end: str = "the generator goes on") -> None:
        """`end`: what the line about the end of a wait says."""
        self._end = end
        self._since: float | None = None
        self._next_line = 0.0
        self._logged = False

    def wait(self, reason: str) -> None:
        """An attempt has failed and will be made again."""
        beat()
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now < self._next_line:
            return
        waited = now - self._since
        logger.warning("%s%s", reason, f" (for {waited:.0f} s now)" if waited > _SHORT_WAIT else "")
        self._next_line, self._logged = now + LOG_SECONDS, True

    def go_on(self) -> None:
        """An attempt has succeeded."""
        if self._logged and self._since is not None and (waited := time.monotonic() - self._since) > _SHORT_WAIT:
            logger.warning("%s after %.0f s", self._end, waited)
        self._since, self._logged = None, False
