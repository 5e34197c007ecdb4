"""BlockedLog: logs which lines of waiting requests stand still for long, and when they move again."""

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
    """Logs once when a line has stood still for LOG_AFTER seconds, and once when the line moves again or is empty."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._logged: dict[str, float] = {}
        """Name of each line whose standstill was logged -> the time at which the standstill began, by the buffer's
        clock."""

    async def run(self) -> None:
        """Calls `look` every few seconds, until it is cancelled."""
        while True:
            await asyncio.sleep(_SECONDS_PER_LOOK)
            self.look()

    def look(self) -> None:
        """Logs the lines that stand still for long, and the logged lines that do so no more."""
        now = self._buffer.clock()
        for name, line, reason in self._lines():
            since = line.still_since  # the beginning of the standstill; None: the line does not stand still
            logged_since = self._logged.get(name)  # the beginning of the standstill that was logged; None: none was
            if logged_since is not None and since != logged_since:  # the standstill that was logged has ended
                change = "moves again" if line.moved_at > logged_since else "has nothing that waits any more"
                log.info("%s %s after %.0f s", name, change, now - logged_since)
                del self._logged[name]
                logged_since = None
            # An empty line has no reason. It may stand still, because its client may ask again, but is not logged.
            if since is not None and logged_since is None and reason is not None and now - since >= LOG_AFTER:
                log.warning("blocked for %.0f s: %s", now - since, reason)
                self._logged[name] = since

    def _lines(self) -> Iterator[tuple[str, Line[Any], str | None]]:
        """The name of each line, the line, and the reason why its first request waits; None: no request waits."""
        buffer = self._buffer
        for table, lines in buffer.lines.items():
            yield f"{table}: inserting", lines.inserts, self._why_waiting(lines.inserts)
            # The reader of a table of copies waits for the next item all the time, so its wait is not logged.
            if table not in buffer.items.copies:
                yield f"{table}: sampling", lines.samples, self._why_waiting(lines.samples)
        admission = Admission.of(buffer)
        if admission is not None:
            head = admission.line.head
            reason = None
            if head is not None:
                reason = f"permits: {admission.why_no_permits(head.count)}"
            yield "permits: acquiring", admission.line, reason

    def _why_waiting(self, line: Line[Any]) -> str | None:
        """Why the first request of the line waits; None: the line is empty."""
        return None if line.head is None else self._buffer.why_waiting(line.head)
