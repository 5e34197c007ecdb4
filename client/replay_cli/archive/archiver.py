"""Archiver: writes the copies that a table makes of its items (`copy_to`) into segments, until nobody needs it.

    draw, under a lease ──▶ write into the open segment ──▶ finish it ──▶ acknowledge all that is in it

An item leaves the copies when the segment that has it is on the disk under its name. So a kill loses nothing. What was
in the open segment comes back to the table when its lease ends, and goes into another segment. A kill between the name
and the acknowledgement leaves items in two segments; readers count an item once, by its key.

The archiver is a client like any other, and one that nobody waits for. It rests between two draws, so that the server
has its time for others. If it is slow or stands still, the copies let their oldest items go, and count them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from replay_cli.archive.rows import Row
from replay_cli.archive.segments import GROUP_ROWS, SegmentWriter, remove_unfinished
from replay_client import LeaseRenewer, ReplayClient
from replay_client.errors import GONE, DeadlineExceededError, ReplayError
from replay_client.records import Sample
from replay_client.waits import WaitLog
from replay_protos.words import counted

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
MOST_SILENCE = 600.0
"""Seconds without an answer of the server, after which nobody needs its archiver any more."""


@dataclass
class OpenSegment:
    """A segment that is being written, and the samples in it that are not acknowledged."""

    writer: SegmentWriter
    begun: float
    nbytes: int = 0
    samples: list[Sample] = field(default_factory=list)
    """Without their payloads."""


class Archiver:
    """Archives one table. Raises ValueError if it is none of copies, or `folder` is no folder."""

    def __init__(
        self,
        client: ReplayClient,
        folder: Path,
        say: Callable[[str], None],
        *,
        table: str = "",
        segment_bytes: int = 64 << 20,
        segment_seconds: float = 60.0,
        lease: float = 60.0,
    ) -> None:
        """`say` gets a line for each finished segment. `table`: that of the copies; "": the only one of the server.

        A segment is finished after so many bytes of payloads, at most a quarter of what the server may hold, for it
        holds them meanwhile; or after so many seconds. `lease`: seconds after which the items of a killed archiver come
        back to the table.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._client, self._folder, self._say = client, folder, say
        self._segment_seconds, self._lease = segment_seconds, lease
        info = client.server_info()
        sources = {json.loads(each.config)["copy_to"]: name for name, each in info.tables.items()}
        copies = [name for name in sources if name is not None and table in ("", name)]
        if len(copies) != 1:
            names = ", ".join(filter(None, sources)) or "none, so set copy_to at the table whose groups are to be kept"
            raise ValueError(f"which table has the copies to archive? Those of the server at {client.address}: {names}")
        [self._table] = copies
        self._source = sources[self._table]
        self._most_bytes = min(segment_bytes, info.max_bytes // 4 or segment_bytes)
        self._open: OpenSegment | None = None
        self._rows = 1
        """The number of rows that the next draw asks for."""
        if removed := remove_unfinished(folder):
            segments = counted(removed, "segment")
            log.warning("removed %s that a killed archiver left unfinished; the items come again", segments)

    def run(self, ends: Callable[[], bool]) -> None:
        """Archives until `ends`. Then what still waits gets LAST_SECONDS, and the open segment is finished.

        While the server does not answer, this waits for it. Raises ServerUnavailableError after MOST_SILENCE, and
        TableNotFoundError if there are no copies any more.
        """
        waits, answered = WaitLog("the archiver"), time.monotonic()
        with self._client.auto_renew([], self._lease, lambda lost: None) as renewer:
            try:
                while not ends():
                    try:
                        begun = time.monotonic()
                        came = self._step(renewer, DRAW_SECONDS)
                        waits.go_on()
                        answered = time.monotonic()
                        if came:
                            time.sleep(min(REST * (answered - begun), MOST_REST))
                    except GONE as error:
                        if time.monotonic() - answered > MOST_SILENCE:
                            raise
                        waits.wait(f"waiting for {self._client.address}: {error}")
                        time.sleep(DRAW_SECONDS)
                last = time.monotonic() + LAST_SECONDS
                while self._step(renewer, 0.0) and time.monotonic() < last:
                    pass
                self._finish(renewer)
            finally:
                self._give_up()

    def _step(self, renewer: LeaseRenewer, seconds: float) -> int:
        """Draws items, for at most `seconds`, and writes them; finishes the open segment if its time has come.

        Returns the number of items.
        """
        samples: list[Sample] = []
        with suppress(DeadlineExceededError):
            samples = self._client.sample(self._table, self._rows, min_samples=1, timeout=seconds, lease=self._lease)
        if samples:
            renewer.add(samples)
            self._write(samples)
        if (segment := self._open) is not None and (
            segment.nbytes >= self._most_bytes or time.monotonic() - segment.begun >= self._segment_seconds
        ):
            self._finish(renewer)
        return len(samples)

    def _write(self, samples: list[Sample]) -> None:
        if self._open is None:
            self._open = OpenSegment(SegmentWriter(self._folder), time.monotonic())
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

    def _finish(self, renewer: LeaseRenewer) -> None:
        """Finishes the open segment, and lets the server forget what is in it."""
        if (segment := self._open) is None:
            return
        path = segment.writer.finish()
        self._open = None
        renewer.forget(segment.samples)
        if missing := self._client.acknowledge(segment.samples).missing:  # their leases ended, so they may be back
            keys = [sample.info.key for sample in segment.samples if sample.info.lease_id in missing]
            self._client.consume(self._table, keys)
        self._say(f"{path.name}: {counted(segment.writer.rows, 'item')}, {counted(segment.nbytes, 'byte')}")
        if lacking := segment.writer.lacking:
            message = "%s: %s without columns that could not be written, but with the payload; the first is %s"
            log.warning(message, path.name, counted(len(lacking), "item"), lacking[0])

    def _give_up(self) -> None:
        """Requeues what is in the open segment, as far as the server answers."""
        if (segment := self._open) is None:
            return
        self._open = None
        segment.writer.discard()
        try:
            self._client.acknowledge(segment.samples, requeue=True, timeout=1.0)
        except ReplayError:
            log.info("the server does not answer: the items come back when their lease ends")
