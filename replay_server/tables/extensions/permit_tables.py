"""PermitTables: tables of partial groups, which keep the permit that they came with until they are closed.

The tables `permit_tables` of [admission] hold such groups. An item that comes into one of them with a permit is a unit
from then on. The unit ends when its reader acknowledges it, usually by the insert of the finished group that closes it,
or when the item leaves in any other way. An insert into one of these tables that closes a unit makes the new item the
unit: so a group goes from stage to stage with its permit. A server knows the units from the items alone, so they
outlive a restart and a rollback as items do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from replay_server.errors import Refused, invalid
from replay_server.tables.config import TableConfig
from replay_server.tables.extensions.extension import Extension, Kernel
from replay_server.tables.table import InsertBatch, SampleBatch, Table


class PermitTables(Extension):
    mark = 2

    def __init__(self, tables: Collection[str]) -> None:
        """`tables`: those of partial groups."""
        self.tables = {*tables}
        self.marked = set()
        """The units, drawn ones included."""

    def concerns(self, table: TableConfig) -> bool:
        return table.name in self.tables

    def why_not(self, insert: InsertBatch) -> Refused | None:
        if not insert.permits or len(insert.priorities) == 1 or self.tables.isdisjoint(insert.priorities):
            return None
        return invalid(
            f"item {insert.keys[0]} comes with a permit into {', '.join(insert.priorities)}: a partial "
            f"group is in no other table until it is closed"
        )

    def on_insert(self, insert: InsertBatch) -> Iterable[Table]:
        if self.tables.issuperset(insert.priorities) and (insert.permits or closes(insert, self.marked, self.kernel)):
            self.marked.update(insert.keys)
        return ()

    def on_acknowledge(self, table: Table, batch: SampleBatch) -> Iterable[Table]:
        self.marked.difference_update(batch.keys.tolist())
        return ()

    def on_item_gone(self, keys: Sequence[int]) -> None:
        self.marked.difference_update(keys)

    def load_marked(self, keys: Sequence[int]) -> None:
        loaded = np.array(keys, dtype=np.uint64)
        for table in self.tables:  # it may have had another name before
            there = self.kernel.tables[table].columns.find(loaded) >= 0
            self.marked.update(loaded[there].tolist())


def closes(insert: InsertBatch, units: Collection[int], kernel: Kernel) -> bool:
    """Whether an insert takes the place of one of these items."""
    return any(key in units for each in insert.closes for key in kernel.batches[each][1].keys.tolist())
