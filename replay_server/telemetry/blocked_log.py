"""BlockedLog: a line in the log when a request has waited for long, with the reason, and one when it moves again."""

from __future__ import annotations

import asyncio
import logging

from replay_server.tables.buffer import PendingInsert, PendingSample, ReplayBuffer

log = logging.getLogger("replay_server")

AFTER = 30.0
"""Seconds of waiting that are worth a line."""
_EVERY = 5.0


class BlockedLog:
    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._told: dict[tuple[str, str], PendingInsert | PendingSample] = {}

    async def run(self) -> None:
        """Looks every few seconds, until it is cancelled."""
        while True:
            await asyncio.sleep(_EVERY)
            self.look()

    def look(self) -> None:
        now = self._buffer.clock()
        for name, lines in self._buffer.lines.items():
            for verb, head in (("inserting", lines.inserts.head), ("sampling", lines.samples.head)):
                told = self._told.get((name, verb))
                if told is not None and told is not head:
                    log.info("%s: %s moves again after %.0f s", name, verb, now - told.since)
                    del self._told[name, verb]
                if head is not None and told is not head and now - head.since >= AFTER:
                    log.warning("blocked for %.0f s: %s", now - head.since, self._buffer.why_waiting(head))
                    self._told[name, verb] = head
