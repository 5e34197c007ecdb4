"""PermitTables: tables of partial groups. Each partial group keeps its permit until it is closed.

The tables `permit_tables` of [admission] hold partial groups. An item that comes into one of them with a permit is a
unit from then on. The unit ends when its reader acknowledges the item, or when the item leaves in any other way. The
reader usually acknowledges the item by inserting the finished group, which closes the batch of the item. If an insert
into one of these tables closes a unit, the new item is the unit from then on. In this way a group goes from stage to
stage with its permit. The record of an item says whether the item is a unit, so units outlive a restart and a rollback
as items do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from replay_server.errors import Refused, invalid
from replay_server.tables.config import TableConfig
from replay_server.tables.extensions.extension import Extension, Kernel
from replay_server.tables.table import InsertBatch, SampleBatch, Table


class PermitTables(Extension):
    """The partial groups that hold permits."""

    mark = 2

    def __init__(self, tables: Collection[str]) -> None:
        """`tables`: the names of the tables of partial groups."""
        self.tables = set(tables)
        self.marked = set()
        """The units, drawn ones included."""

    def concerns(self, table: TableConfig) -> bool:
        return table.name in self.tables

    def why_not(self, insert: InsertBatch) -> Refused | None:
        if not insert.permits:
            return None
        if len(insert.priorities) == 1:
            return None
        if self.tables.isdisjoint(insert.priorities):
            return None
        return invalid(
            f"item {insert.keys[0]} comes with a permit into {', '.join(insert.priorities)}: a partial "
            f"group is in no other table until it is closed"
        )

    def on_insert(self, insert: InsertBatch) -> Iterable[Table]:
        if not self.tables.issuperset(insert.priorities):
            return ()
        if insert.permits or closes(insert, self.marked, self.kernel):
            self.marked.update(insert.keys)
        return ()

    def on_acknowledge(self, table: Table, batch: SampleBatch) -> Iterable[Table]:
        self.marked.difference_update(batch.keys.tolist())
        return ()

    def on_item_gone(self, keys: Sequence[int]) -> None:
        self.marked.difference_update(keys)

    def load_marked(self, keys: Sequence[int]) -> None:
        loaded = np.array(keys, dtype=np.uint64)
        # The configuration may have changed. An item is a unit only if its table is still a table of partial groups.
        for table in self.tables:
            there = self.kernel.tables[table].columns.find(loaded) >= 0
            self.marked.update(loaded[there].tolist())


def closes(insert: InsertBatch, units: Collection[int], kernel: Kernel) -> bool:
    """True if an insert closes a batch with one of these units, and so takes the place of the unit."""
    for batch_id in insert.closes:
        _, batch = kernel.batches[batch_id]
        if any(key in units for key in batch.keys.tolist()):
            return True
    return False
