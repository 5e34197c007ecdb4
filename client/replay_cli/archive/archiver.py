"""Archiver: writes the copies that a table makes of its items (`copy_to`) into segments, until a signal ends it.

    draw, under a lease ──▶ write into the open segment ──▶ finish it ──▶ acknowledge all that is in it

An item leaves the table of copies when the segment with the item is on the disk under its final name. So a kill loses
nothing. The items of the open segment come back to the table when their lease ends, and go into another segment. A kill
between the rename and the acknowledgement leaves items in two segments; readers count an item once, by its key.

The archiver is a client like any other, and nobody waits for it. It sleeps between two draws, so that the server has
time for other clients. If the archiver is slow or hangs, the table of copies evicts its oldest items, and counts them.
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
from replay_client.records import Sample, ServerInfo
from replay_client.waits import WaitLog
from replay_protos.words import counted

log = logging.getLogger("replay_cli.archive")

BYTES_PER_DRAW = 8 << 20
"""The approximate number of bytes of payloads in one draw."""
MOST_ROWS = 256
"""The most items of a draw."""
DRAW_SECONDS = 1.0
"""Seconds that a draw waits for items, if there are fewer than it asks for."""
REST = 9.0
"""The archiver sleeps nine times as long as a draw took, so the server spends at most a tenth of its time on it. A busy
server spends even less, because a draw then takes longer. Items that arrive faster wait in the table."""
MOST_REST = 1.0
"""The most seconds between two draws."""
LAST_SECONDS = 5.0
"""Seconds for which the archiver, after the signal to end, still draws waiting items."""
MOST_SILENCE = 600.0
"""Seconds without an answer of the server, after which the archiver gives up."""


@dataclass
class OpenSegment:
    """A segment that is being written, and the samples in it that are not acknowledged."""

    writer: SegmentWriter
    begun: float
    """The time at which the segment was opened, by the monotonic clock."""
    nbytes: int = 0
    """Bytes of the payloads in the segment."""
    samples: list[Sample] = field(default_factory=list)
    """The samples without their payloads."""


class Archiver:
    """Archives one table of copies.

    Raises ValueError if the table holds no copies, and OSError if the folder cannot be made.
    """

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
        """`say` gets a line for each finished segment. `table`: the table of copies; "": the only one of the server.

        A segment is finished after `segment_bytes` bytes of payloads or `segment_seconds` seconds. It has at most a
        quarter of the bytes that the server may hold, because the server holds them meanwhile. `lease`: seconds after
        which the items of a killed archiver come back to the table.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._client = client
        self._folder = folder
        self._say = say
        self._segment_seconds = segment_seconds
        self._lease = lease
        info = client.server_info()
        self._table, self._source = self._find_copies(info, table)
        self._most_bytes = segment_bytes
        quarter = info.max_bytes // 4
        if quarter:  # 0: the server has no limit
            self._most_bytes = min(segment_bytes, quarter)
        self._open: OpenSegment | None = None
        self._rows = 1
        """The number of items that the next draw asks for. Until the first draw, the size of the items is not known."""
        removed = remove_unfinished(folder)
        if removed:
            segments = counted(removed, "segment")
            log.warning("removed %s that a killed archiver left unfinished; the items come again", segments)

    def _find_copies(self, info: ServerInfo, table: str) -> tuple[str, str]:
        """The table of copies, and the table whose items are copied. Raises ValueError unless exactly one pair fits."""
        sources: dict[str, str] = {}
        for name, source in info.tables.items():
            copy_to = json.loads(source.config)["copy_to"]
            if copy_to is not None:
                sources[copy_to] = name
        copies = [name for name in sources if table in ("", name)]  # "": all of them
        if len(copies) != 1:
            names = ", ".join(sources) or "none, so set copy_to at the table whose groups are to be kept"
            raise ValueError(
                f"which table has the copies to archive? Those of the server at {self._client.address}: {names}"
            )
        return copies[0], sources[copies[0]]

    def run(self, ends: Callable[[], bool]) -> None:
        """Archives until `ends()` is true. Then draws waiting items for LAST_SECONDS, and finishes the open segment.

        Until `ends()` is true, `run` waits for a server that does not answer. After MOST_SILENCE it raises the error of
        the last request, ServerUnavailableError or ServerClosedError. Raises TableNotFoundError if the table of copies
        is gone.
        """
        waits = WaitLog("the archiver")  # logs that the archiver waits for the server, and that it goes on
        answered = time.monotonic()
        # The renewer keeps the leases of the samples in the open segment. Nothing is to be done for an item whose lease
        # is lost: the item comes again, and readers count it once.
        with self._client.auto_renew([], self._lease, lambda lost: None) as renewer:
            try:
                while not ends():
                    try:
                        begun = time.monotonic()
                        items = self._step(renewer, DRAW_SECONDS)
                        waits.go_on()
                        answered = time.monotonic()
                        if items:
                            time.sleep(min(REST * (answered - begun), MOST_REST))
                    except GONE as error:  # the errors of a server that does not answer now
                        if time.monotonic() - answered > MOST_SILENCE:
                            raise
                        waits.wait(f"waiting for {self._client.address}: {error}")
                        time.sleep(DRAW_SECONDS)
                last = time.monotonic() + LAST_SECONDS
                while self._step(renewer, 0.0) and time.monotonic() < last:
                    pass  # until no item waits, or the time is over
                self._finish(renewer)
            finally:
                self._give_up()  # after an error; otherwise no segment is open any more

    def _step(self, renewer: LeaseRenewer, seconds: float) -> int:
        """Waits for items at most `seconds`, and writes them. Finishes the open segment if it is large or old enough.

        Returns the number of items.
        """
        samples: list[Sample] = []
        with suppress(DeadlineExceededError):  # no item came within `seconds`
            samples = self._client.sample(self._table, self._rows, min_samples=1, timeout=seconds, lease=self._lease)
        if samples:
            renewer.add(samples)
            self._write(samples)
        segment = self._open
        if segment is not None:
            is_large = segment.nbytes >= self._most_bytes
            if is_large or time.monotonic() - segment.begun >= self._segment_seconds:
                self._finish(renewer)
        return len(samples)

    def _write(self, samples: list[Sample]) -> None:
        """Writes samples into the open segment, and sets the number of rows of the next draw by their size."""
        if self._open is None:
            self._open = OpenSegment(SegmentWriter(self._folder), time.monotonic())
        rows: list[Row] = []
        for sample in samples:
            rows += self._rows_of(sample)
        self._open.writer.add(rows)
        nbytes = sum(len(sample.payload) for sample in samples)
        self._open.nbytes += nbytes
        # The number of items of the same mean size that have BYTES_PER_DRAW together.
        wanted = len(samples) * BYTES_PER_DRAW // max(1, nbytes)
        self._rows = max(1, min(MOST_ROWS, wanted))
        self._open.samples += [Sample(sample.info, b"") for sample in samples]

    def _rows_of(self, sample: Sample) -> list[Row]:
        """The rows that a segment gets for a sample. They name the table that was copied, not the table of copies.

        The sample comes from the table of copies, so its `times_sampled` would count the draws of the archiver.
        """
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
        """Finishes the open segment, if there is one, and acknowledges its items."""
        segment = self._open
        if segment is None:
            return
        path = segment.writer.finish()
        self._open = None  # from here on, `_give_up` must not requeue the items, even if the acknowledgement fails
        renewer.forget(segment.samples)
        missing = self._client.acknowledge(segment.samples).missing
        if missing:  # these leases have ended, so the items may be back in the table
            keys = [sample.info.key for sample in segment.samples if sample.info.lease_id in missing]
            self._client.consume(self._table, keys)
        self._say(f"{path.name}: {counted(segment.writer.rows, 'item')}, {counted(segment.nbytes, 'byte')}")
        lacking = segment.writer.lacking
        if lacking:
            message = "%s: %s without columns that could not be written, but with the payload; the first is %s"
            log.warning(message, path.name, counted(len(lacking), "item"), lacking[0])

    def _give_up(self) -> None:
        """Discards the open segment, if there is one, and requeues its items if the server answers."""
        segment = self._open
        if segment is None:
            return
        self._open = None
        segment.writer.discard()
        try:
            self._client.acknowledge(segment.samples, requeue=True, timeout=1.0)
        except ReplayError:
            log.info("the server does not answer: the items come back when their lease ends")
