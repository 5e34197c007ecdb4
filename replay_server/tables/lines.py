"""Lines: the requests that wait for one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from replay_server.tables.admission import Admission
from replay_server.tables.batches import InsertBatch, SampleBatch, SampleRequest
from replay_server.tables.insert_rules import Rows
from replay_server.tables.items import Items
from replay_server.tables.table import Table
from replay_server.tables.waiting import Line, Pending

SILENCE = 10.0
"""Seconds in which nobody inserted or sampled, after which a reason says so."""


class PendingInsert(Pending[None]):
    """One row that waits, in the lines of all its tables."""

    def __init__(
        self,
        insert: InsertBatch,
        rows: Rows,
        tables: Sequence[Table],
        since: float,
        deadline_at: float,
        evicted: list[tuple[int, str]],
    ) -> None:
        """`evicted` receives the key and the table if the row leaves the table as soon as it is inserted."""
        super().__init__(since, deadline_at)
        self.evicted = evicted
        self.insert = insert
        self.rows = rows
        self.tables = tables


class PendingSample(Pending[tuple[int, SampleBatch]]):
    def __init__(self, table: Table, request: SampleRequest, since: float, deadline_at: float) -> None:
        super().__init__(since, deadline_at)
        self.tables = [table]
        self.request = request

    @property
    def drawn(self) -> int | None:
        """The id of the batch, once it is drawn."""
        return None if self.value is None else self.value[0]


class Lines:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.inserts: Line[PendingInsert] = Line(clock)
        self.samples: Line[PendingSample] = Line(clock)


def any_insert_waits(tables: Iterable[Table], lines: Mapping[str, Lines]) -> bool:
    for table in tables:  # noqa: SIM110  # twice as fast as any() of a generator
        if lines[table.name].inserts:
            return True
    return False


def insertable_at_once(batch: InsertBatch, tables: Sequence[Table], items: Items, lines: Mapping[str, Lines]) -> int:
    """How many of the first rows can be inserted together with the same outcome as one after the other, at least 1.

    This is about order alone: what the rows change for each other. Whether they may enter, the insert rules say.
    """
    n, nbytes = len(batch), int(batch.sizes.sum())
    if items.why_full(nbytes) or len(set(batch.keys)) < n or any_insert_waits(tables, lines):
        return 1
    at_once: float = n
    for table in tables:
        at_once = min(at_once, table.insertable_at_once(nbytes))
        if lines[table.name].samples:
            # A waiting sample would be drawn between two rows. Only a fifo draws the same items after both rows, as
            # long as nothing is evicted.
            fifo = table.config.sampler.type == "fifo"
            at_once = min(at_once, table.config.max_size - table.size if fifo else 1)
    return max(1, int(at_once))


def silence(pending: PendingInsert | PendingSample, now: float, admission: Admission | None) -> str:
    """How long the side that `pending` waits for has done nothing, and whether generators wait for permits."""
    table = pending.tables[0]
    samples = isinstance(pending, PendingSample)
    seconds = now - (table.inserted if samples else table.sampled).last
    if seconds < SILENCE:
        return ""
    words = f"; nobody {'inserted' if samples else 'sampled'} for {seconds:.0f} s"
    if samples and admission is not None and len(admission.line):
        words += f", and generators wait for permits ({len(admission.line)})"
    return words
