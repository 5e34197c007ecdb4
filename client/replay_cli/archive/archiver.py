"""Archiver: writes the copies that a table makes of its items (`copy_to`) into segments, until a signal ends it.

    draw, under a lease ──▶ write into the open segment ──▶ finish it ──▶ acknowledge all that is in it

An item leaves the table of copies when the segment with the item is on the disk under its final name. So nothing is
lost if the archiver is killed: the items of the open segment come back to the table when their lease ends, and go into
another segment. After a kill between the rename and the acknowledgement, items are in two segments, but readers count
an item once, by its key.

The archiver is a client like any other, and nobody waits for it. It sleeps between two draws, so that the server has
time for other clients. If the archiver is slow or hangs, the table of copies evicts its oldest items, and counts the
evicted items.
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
"""Seconds for which a draw waits, if there are fewer items than it asks for."""
REST = 9.0
"""The archiver sleeps nine times as long as a draw took, so the server spends at most a tenth of its time on the
archiver. A busy server spends even less, because a draw from it takes longer. Items that arrive faster than they are
drawn wait in the table."""
MOST_REST = 1.0
"""The most seconds between two draws."""
LAST_SECONDS = 5.0
"""Seconds for which the archiver still draws waiting items after the signal to end."""
MOST_SILENCE = 600.0
"""Seconds without an answer of the server after which the archiver gives up."""


@dataclass
class OpenSegment:
    """A segment that is being written, and the samples in it that are not acknowledged."""

    writer: SegmentWriter
    begun: float
    """The time at which the segment was opened, by the monotonic clock."""
    nbytes: int = 0
    """Bytes of the payloads in the segment."""
    samples: list[Sample] = field(default_factory=list)
    """The samples in the segment, without their payloads."""


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

        A segment is finished after `segment_bytes` bytes of payloads or `segment_seconds` seconds. It takes at most a
        quarter of the bytes that the server may hold, because the server keeps the items of a segment until the segment
        is finished. `lease`: seconds after which the items of a killed archiver come back to the table.
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
        self._num_to_draw = 1
        """The number of items that the next draw asks for; 1 for the first draw, because the size of the items is not
        known yet."""
        removed = remove_unfinished(folder)
        if removed:
            segments = counted(removed, "segment")
            log.warning("removed %s that a killed archiver left unfinished; the items come again", segments)

    def _find_copies(self, info: ServerInfo, table: str) -> tuple[str, str]:
        """The table of copies, and the table whose items are copied. Raises ValueError unless exactly one pair fits.

        `table`: the table of copies; "": any.
        """
        sources: dict[str, str] = {}  # table of copies -> the table whose items are copied
        for name, source in info.tables.items():
            copy_to = json.loads(source.config)["copy_to"]
            if copy_to is not None:
                sources[copy_to] = name
        copies = [name for name in sources if table in ("", name)]
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
        answered_at = time.monotonic()
        # The renewer keeps the leases of the samples in the open segment. Nothing needs to be done for an item whose
        # lease is lost, because the item comes again, and readers count it once.
        with self._client.auto_renew([], self._lease, lambda lost: None) as renewer:
            try:
                while not ends():
                    try:
                        begun_at = time.monotonic()
                        num_items = self._step(renewer, DRAW_SECONDS)
                        waits.go_on()
                        answered_at = time.monotonic()
                        if num_items:
                            time.sleep(min(REST * (answered_at - begun_at), MOST_REST))
                    except GONE as error:  # the errors of a server that does not answer now
                        if time.monotonic() - answered_at > MOST_SILENCE:
                            raise
                        waits.wait(f"waiting for {self._client.address}: {error}")
                        time.sleep(DRAW_SECONDS)
                draws_until = time.monotonic() + LAST_SECONDS
                while True:
                    num_items = self._step(renewer, 0.0)
                    if num_items == 0 or time.monotonic() >= draws_until:
                        break
                self._finish(renewer)
            finally:
                self._give_up()  # has an effect only after an error, because otherwise no segment is open any more

    def _step(self, renewer: LeaseRenewer, seconds: float) -> int:
        """Draws items, for which it waits at most `seconds`, and writes them into the open segment. Then finishes the
        segment if it is large or old enough.

        Returns the number of drawn items.
        """
        samples: list[Sample] = []
        with suppress(DeadlineExceededError):  # no item came within `seconds`
            samples = self._client.sample(
                self._table, self._num_to_draw, min_samples=1, timeout=seconds, lease=self._lease
            )
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
        """Writes samples into the open segment, and opens one if there is none. Sets the number of items that the next
        draw asks for, by the size of these samples."""
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
        self._num_to_draw = max(1, min(MOST_ROWS, wanted))
        self._open.samples += [Sample(sample.info, b"") for sample in samples]

    def _rows_of(self, sample: Sample) -> list[Row]:
        """The rows that a segment gets for a sample. They name the table that was copied, not the table of copies."""
        info = sample.info
        facts = {
            "key": str(info.key),
            "table": self._source,
            "priority": info.priority,
            "age": info.age,
            "policy_version": info.policy_version,
            "staleness": info.staleness,
            "times_sampled": 0,  # not that of `info`, which counts the draws of the archiver from the table of copies
            "bytes": len(sample.payload),
            "tags": info.tags,
        }
        rows = GROUP_ROWS.rows(facts, sample.payload)
        return [row | {"inserted_at": time.time() - info.age} for row in rows]

    def _finish(self, renewer: LeaseRenewer) -> None:
        """Finishes the open segment, if there is one, and acknowledges its items."""
        segment = self._open
        if segment is None:
            return
        path = segment.writer.finish()
        self._open = None  # from here on, `_give_up` must not requeue the items, even if the acknowledgement fails
        renewer.forget(segment.samples)
        ended_leases = self._client.acknowledge(segment.samples).missing
        if ended_leases:  # the items of these leases may be back in the table
            keys = [sample.info.key for sample in segment.samples if sample.info.lease_id in ended_leases]
            self._client.consume(self._table, keys)
        self._say(f"{path.name}: {counted(segment.writer.rows, 'item')}, {counted(segment.nbytes, 'byte')}")
        lacking = segment.writer.lacking  # a message for each item
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
