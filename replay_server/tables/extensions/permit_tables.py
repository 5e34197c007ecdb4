"""PermitTables: the tables whose items hold permits. Such an item is a partial group, or a group without rewards.

The setting `permit_tables` of [admission] names these tables. An item that is inserted into one of them with a permit
is marked. A marked item holds its permit until its reader acknowledges the item, or until the item leaves in any other
way. The reader usually acknowledges the item by an insert that closes the item's batch. If this insert puts the
finished group into the admitted table, the group is accepted (`admission.py`). If the insert puts a group into one of
the permit tables, the new item is marked in the place of the old item. In this way a group keeps its permit from stage
to stage. The mark is a part of the item's record on disk, so the mark outlives a restart and a rollback if the item
does.
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
        """`tables`: the names of the permit tables."""
        self.tables = set(tables)
        self.marked = set()
        """The keys of the items that hold permits. An item whose batch is outstanding holds its permit, too."""

    def concerns(self, table: TableConfig) -> bool:
        return table.name in self.tables

    def why_not(self, insert: InsertBatch) -> Refused | None:
        """Refuses an item with a permit that enters one of these tables and another table at the same time."""
        if not insert.permits:
            return None
        if len(insert.priorities) == 1:  # the item enters one table only
            return None
        if self.tables.isdisjoint(insert.priorities):  # no permit table is among the tables that the item enters
            return None
        return invalid(
            f"item {insert.keys[0]} comes with a permit into {', '.join(insert.priorities)}: a partial "
            f"group is in no other table until it is closed"
        )

    def on_insert(self, insert: InsertBatch) -> Iterable[Table]:
        """Marks items that enter these tables with a permit, or in the place of a marked item."""
        if not self.tables.issuperset(insert.priorities):  # for example a finished group, for the admitted table
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
        """Marks those items of `keys` that are in a permit table.

        If the configuration has changed, the others may be in tables that are no permit tables any more.
        """
        loaded = np.array(keys, dtype=np.uint64)
        for name in self.tables:
            is_there = self.kernel.tables[name].columns.find(loaded) >= 0
            self.marked.update(loaded[is_there].tolist())


def closes(insert: InsertBatch, marked: Collection[int], kernel: Kernel) -> bool:
    """True if `insert` closes a batch with an item in `marked`. Then the new item takes the place of that item."""
    for batch_id in insert.closes:
        _, batch = kernel.batches[batch_id]  # the insert rules have checked that the batch is outstanding
        if any(key in marked for key in batch.keys.tolist()):
            return True
    return False
