"""Construction: groups under construction, which keep the permit that they came with until they are closed.

One table may hold such groups: `building` of [admission]. An item that comes into it with a permit is a building unit
from then on. The unit ends when its reader takes it, usually by the insert of the finished group that closes it, or
when the item leaves in any other way. A server knows the units from the items alone, so they outlive a restart and a
rollback as items do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from replay_server.errors import Refused, invalid
from replay_server.tables.config import TableConfig
from replay_server.tables.extensions.extension import Extension
from replay_server.tables.table import InsertBatch, SampleBatch, Table


class Construction(Extension):
    mark = 2

    def __init__(self, table: str) -> None:
        """`table`: that of groups under construction."""
        self.table = table
        self.marked = set()
        """The units, drawn ones included."""

    def concerns(self, table: TableConfig) -> bool:
        return table.name == self.table

    def why_not(self, insert: InsertBatch) -> Refused | None:
        if not insert.permits or len(insert.priorities) == 1 or self.table not in insert.priorities:
            return None
        return invalid(
            f"item {insert.keys[0]} comes with a permit into {', '.join(insert.priorities)}: a group under "
            f"construction, in {self.table!r}, is in no other table until it is closed"
        )

    def on_insert(self, insert: InsertBatch) -> Iterable[Table]:
        if insert.permits and self.table in insert.priorities:
            self.marked.update(insert.keys)
        return ()

    def on_take(self, table: Table, batch: SampleBatch) -> Iterable[Table]:
        self.marked.difference_update(batch.keys.tolist())
        return ()

    def on_item_gone(self, keys: Sequence[int]) -> None:
        self.marked.difference_update(keys)

    def load_marked(self, keys: Sequence[int]) -> None:
        loaded = np.array(keys, dtype=np.uint64)
        there = self.kernel.tables[self.table].columns.find(loaded) >= 0  # it may have had another name before
        self.marked.update(loaded[there].tolist())
