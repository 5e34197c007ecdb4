"""BlockedLog: logs a line in which requests have waited long and none was served, and when it moves again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.extensions.admission import Admission
from replay_server.tables.waiting import Line

log = logging.getLogger("replay_server")

LOG_AFTER = 30.0
"""Seconds of standstill after which a line is logged."""
_SECONDS_PER_LOOK = 5.0


class BlockedLog:
    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._logged: dict[str, float] = {}
        """The lines that were logged: since when they stand still."""

    async def run(self) -> None:
        """Looks every few seconds. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(_SECONDS_PER_LOOK)
            self.look()

    def look(self) -> None:
        now = self._buffer.clock()
        for name, line, reason in self._lines():
            since = line.still_since
            logged = self._logged.get(name)
            if logged is not None and since != logged:
                became = "moves again" if line.moved_at > logged else "has nothing that waits any more"
                log.info("%s %s after %.0f s", name, became, now - logged)
                del self._logged[name]
                logged = None
            # A line without a head is between two attempts of its client.
            if since is not None and logged is None and reason is not None and now - since >= LOG_AFTER:
                log.warning("blocked for %.0f s: %s", now - since, reason)
                self._logged[name] = since

    def _lines(self) -> Iterator[tuple[str, Line[Any], str | None]]:
        """Every line, what it is for, and why its first request waits; None: there is none."""
        buffer, admission = self._buffer, Admission.of(self._buffer)
        for name, lines in buffer.lines.items():
            inserts, samples = lines.inserts, lines.samples
            yield f"{name}: inserting", inserts, buffer.why_waiting(inserts.head) if inserts.head else None
            if name not in buffer.items.copies:  # their reader waits for the next item all the time
                yield f"{name}: sampling", samples, buffer.why_waiting(samples.head) if samples.head else None
        if admission is not None:
            line, head = admission.line, admission.line.head
            yield "permits: acquiring", line, f"permits: {admission.why_no_permits(head.count)}" if head else None
