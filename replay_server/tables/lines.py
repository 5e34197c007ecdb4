"""Lines: the requests that wait for one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replay_server.tables.batches import InsertBatch, SampleBatch, SampleRequest
from replay_server.tables.insert_rules import Rows
from replay_server.tables.table import Table
from replay_server.tables.waiting import Line, Pending


class PendingInsert(Pending[None]):
    """One row that waits, in the lines of all its tables."""

    def __init__(
        self, insert: InsertBatch, rows: Rows, tables: Sequence[Table], since: float, deadline_at: float
    ) -> None:
        super().__init__(since, deadline_at)
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
