"""Archiver: writes what passes through a server into segments, and why items left its tables.

    draw, under a lease ──▶ write into the open segment ──▶ finish it ──▶ acknowledge all that is in it

An item leaves the table `archive` when the segment that has it is on the disk under its name. So a kill loses nothing.
What was in the open segment comes back to the table when its lease ends, and goes into another segment. A kill between
the name and the acknowledgement leaves items in two segments; readers count an item once, by its key. The same holds
for departures: the server forgets them when they are confirmed, which is after they are written.

The archiver is a client like any other, and one that nobody waits for. It rests between two draws, so that the server
has its time for others. If it is slow or stands still, the table `archive` lets its oldest items go, and counts them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from replay_cli.archive.rows import Row
from replay_cli.archive.segments import (
    FATE_COLUMNS,
    FATES,
    GROUP_COLUMNS,
    GROUP_ROWS,
    GROUPS,
    SegmentWriter,
    remove_unfinished,
    write_segment,
)
from replay_client import ReplayClient
from replay_client.errors import (
    GONE,
    DeadlineExceededError,
    ReplayError,
)
from replay_client.records import Sample

log = logging.getLogger("replay_cli.archive")

BYTES_PER_DRAW = 8 << 20
"""Payload bytes that a draw should have."""
MOST_ROWS = 256
"""Rows that a draw has at most."""
DRAW_SECONDS = 1.0
"""Seconds that a draw waits for its rows, if fewer are there."""
REST = 9.0
"""The archiver rests nine times as long as a draw took. So the server works for it a tenth of the time at most,
and less when it is busy, for then a draw takes longer. What comes faster waits in the table meanwhile."""
MOST_REST = 1.0
"""Seconds that it rests at most."""
LAST_SECONDS = 5.0
"""Seconds for which an archiver that is to end still draws what waits."""


@dataclass(frozen=True)
class ArchiverConfig:
    """When a segment is finished, and for how long the archiver may be silent."""

    segment_bytes: int = 64 << 20
    """Payload bytes after which a segment is finished."""
    segment_seconds: float = 60.0
    """Seconds after which it is finished, though it is smaller."""
    lease: float = 60.0
    """Seconds after which the items of a killed archiver come back to the table."""


@dataclass
class OpenSegment:
    """A segment that is being written, and the samples in it that are not acknowledged."""

    writer: SegmentWriter
    begun: float
    renewed: float
    nbytes: int = 0
    samples: list[Sample] = field(default_factory=list)
    """Without their payloads."""


class Archiver:
    """Archives one server. Raises ValueError if it has no [archive], or `folder` is none."""

    def __init__(self, client: ReplayClient, folder: Path, config: ArchiverConfig, say: Callable[[str], None]) -> None:
        """`say` gets a line for each finished segment."""
        folder.mkdir(parents=True, exist_ok=True)
        self._client, self._folder, self._config, self._say = client, folder, config, say
        tables = client.server_info().tables.values()
        found = [(table.name, table.archive_of) for table in tables if table.archive_of]
        if not found:
            raise ValueError(f"the server at {client.address} has no [archive]: set `dir` there")
        [(self._table, self._source)] = found
        self._open: OpenSegment | None = None
        self._rows = 1
        """The number of rows that the next draw asks for."""
        self._looked = 0.0
        """When the departures were read last."""
        if removed := remove_unfinished(folder):
            log.warning("removed %d segments that a killed archiver left unfinished; their items come again", removed)

    def run(self, ends: Callable[[], bool]) -> None:
        """Archives until `ends`. Then what still waits gets LAST_SECONDS, and the open segment is finished.

        While the server does not answer, this waits for it.
        """
        silent = False
        try:
            while not ends():
                try:
                    begun = time.monotonic()
                    came = self.step(DRAW_SECONDS)
                    silent = False
                    if came:
                        time.sleep(min(REST * (time.monotonic() - begun), MOST_REST))
                except GONE:
                    if not silent:
                        log.warning("%s does not answer: waiting for it", self._client.address)
                    silent = True
                    time.sleep(DRAW_SECONDS)
            last = time.monotonic() + LAST_SECONDS
            while self.step(0.0) and time.monotonic() < last:
                pass
            self._finish()
            self._record_departures()
        except GONE as error:
            log.warning("%s", error)
        finally:
            self._give_up()

    def step(self, seconds: float) -> int:
        """Draws items, for at most `seconds`, and writes them; finishes the open segment if its time has come.

        Returns the number of items.
        """
        samples: list[Sample] = []
        with suppress(DeadlineExceededError):
            samples = self._client.sample(
                self._table, self._rows, min_samples=1, timeout=seconds, lease=self._config.lease
            )
        now = time.monotonic()
        if samples:
            self._write(samples, now)
        segment = self._open
        if segment is not None and (
            segment.nbytes >= self._config.segment_bytes or now - segment.begun >= self._config.segment_seconds
        ):
            self._finish()
        elif segment is not None and now - segment.renewed > self._config.lease / 3:
            segment.renewed = now
            self._client.renew(segment.samples, self._config.lease)
        if now - self._looked >= self._config.segment_seconds:
            self._record_departures()
        return len(samples)

    def _write(self, samples: list[Sample], now: float) -> None:
        if self._open is None:
            self._open = OpenSegment(SegmentWriter(self._folder, GROUPS, GROUP_COLUMNS), now, now)
        self._open.writer.add([row for sample in samples for row in self._rows_of(sample)])
        nbytes = sum(len(sample.payload) for sample in samples)
        self._open.nbytes += nbytes
        self._rows = max(1, min(MOST_ROWS, len(samples) * BYTES_PER_DRAW // max(1, nbytes)))
        self._open.samples += [Sample(sample.info, b"") for sample in samples]

    def _rows_of(self, sample: Sample) -> list[Row]:
        info = sample.info
        facts = {
            "key": str(info.key),
            "table": self._source,
            "priority": info.priority,
            "age": info.age,
            "policy_version": info.policy_version,
            "staleness": info.staleness,
            "times_sampled": 0,
            "bytes": len(sample.payload),
            "tags": info.tags,
        }
        return [row | {"inserted_at": time.time() - info.age} for row in GROUP_ROWS.rows(facts, sample.payload)]

    def _finish(self) -> None:
        """Finishes the open segment, and lets the server forget what is in it."""
        if (segment := self._open) is None:
            return
        path = segment.writer.finish()
        self._open = None
        if missing := self._client.acknowledge(segment.samples).missing:  # their leases ended, so they may be back
            keys = [sample.info.key for sample in segment.samples if sample.info.lease in missing]
            self._client.take(self._table, keys)
        self._say(f"{path.name}: {segment.writer.rows} items, {segment.nbytes} bytes")
        if lacking := segment.writer.lacking:
            said = "%s: %d items lack columns that could not be written, and have their payload; the first is %s"
            log.warning(said, path.name, len(lacking), lacking[0])

    def _record_departures(self) -> None:
        self._looked = time.monotonic()
        confirmed = 0
        while True:
            found = self._client.departures(confirmed)
            if not found.departures:
                return
            rows = [asdict(each) | {"key": str(each.key)} for each in found.departures]
            write_segment(self._folder, FATES, FATE_COLUMNS, rows)
            confirmed = found.next

    def _give_up(self) -> None:
        """Gives back what is in the open segment, as far as the server answers."""
        if (segment := self._open) is None:
            return
        self._open = None
        segment.writer.discard()
        try:
            self._client.acknowledge(segment.samples, give_back=True, timeout=1.0)
        except ReplayError:
            log.info("the server does not answer: the items come back when their lease ends")


def be_modest() -> None:
    """Lets every other process of the machine go first."""
    os.nice(19)
