"""BlockedLog: logs the first request of a line when it has waited long, with the reason, and when it moves again."""

from __future__ import annotations

import asyncio
import logging

from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.lines import PendingInsert, PendingSample

log = logging.getLogger("replay_server")

LOG_AFTER = 30.0
"""Seconds of waiting after which a line is logged."""
_SECONDS_PER_LOOK = 5.0


class BlockedLog:
    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._logged: dict[tuple[str, str], PendingInsert | PendingSample] = {}
        """The waiting requests that were logged, by table and verb."""

    async def run(self) -> None:
        """Looks every few seconds. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(_SECONDS_PER_LOOK)
            self.look()

    def look(self) -> None:
        now = self._buffer.clock()
        for name, lines in self._buffer.lines.items():
            for verb, head in (("inserting", lines.inserts.head), ("sampling", lines.samples.head)):
                logged = self._logged.get((name, verb))
                if logged is not None and logged is not head:
                    log.info("%s: %s moves again after %.0f s", name, verb, now - logged.since)
                    del self._logged[name, verb]
                if head is not None and logged is not head and now - head.since >= LOG_AFTER:
                    log.warning("blocked for %.0f s: %s", now - head.since, self._buffer.why_waiting(head))
                    self._logged[name, verb] = head
