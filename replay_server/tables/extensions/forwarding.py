"""Forwarding and copying: an item of one table joins another one too, with the priority it has here. No bytes move.

* A table forwards an item that a reader uses for the first time. The limiter of the target counts the item, and only
  what would refuse an insert there can refuse it: that is counted at the table that forwards.
* A table copies an item that enters it. The copy waits for no place, and is refused none. What is over the bounds of
  the copies is evicted, and counted. What only copies hold is gone for everything else: its permit is released, and
  its bytes are the first to go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from replay_server.errors import Refused, invalid
from replay_server.tables.config import TableConfig
from replay_server.tables.extensions.extension import Extension, Kernel
from replay_server.tables.items import Item
from replay_server.tables.rules import why_outdated
from replay_server.tables.table import InsertBatch, SampleBatch, Table


class Forwarding(Extension):
    def __init__(self, discard: Callable[[Table, Sequence[int]], None]) -> None:
        """`discard` ends rows that are retained in the target: it has one row of an item at most."""
        self._discard = discard

    def concerns(self, table: TableConfig) -> bool:
        return table.forward_to is not None

    def on_acknowledge(self, table: Table, batch: SampleBatch) -> Iterable[Table]:
        assert table.config.forward_to is not None
        if batch.epoch != table.epoch:
            return ()
        target = self.kernel.tables[table.config.forward_to]
        for key, priority in zip(batch.keys.tolist(), batch.priorities.tolist(), strict=True):
            item = self.kernel.items[key]
            if priority and table.name not in item.forwarded:
                item.forwarded += (table.name,)
                joined = target.has_or_may_return(key) or self._join(target, key, item, priority)
                table.counters.forwarded += joined
                table.counters.forward_refused += not joined
        return (target,)

    on_lease = on_acknowledge

    def _join(self, target: Table, key: int, item: Item, priority: float) -> bool:
        if (outdated := why_outdated(target, item.policy_version)) is not None:
            outdated.count()
            return False
        if (
            item.cost > (target.config.max_bytes or np.inf)
            or (target.config.when_full != "evict" and target.why_full(1, item.cost))
            or (target.balanced is not None and target.balanced.one_too_many([item.labels]) is not None)
        ):
            return False
        if key in target.columns.retained:
            self._discard(target, [key])
        items = self.kernel.items
        items.hold([key])
        versions, sizes = np.array([item.policy_version]), np.array([item.nbytes])
        joining = InsertBatch([key], {}, versions, sizes, (), labels=items.labels([key]))
        target.insert(joining, np.array([priority]))
        target.counters.evicted_on_arrival += key not in target
        return True


class Copying(Extension):
    def attach(self, kernel: Kernel) -> None:
        super().attach(kernel)
        tables, copies = kernel.tables.values(), kernel.items.copies
        self._copies = {table.name: copies[name] for table in tables if (name := table.config.copy_to) is not None}
        """By the table that is copied."""
        self._alone: dict[int, None] = {}
        """Keys that only copies held when they were last released, in this order."""

    def why_not(self, insert: InsertBatch) -> Refused | None:
        for source, copies in self._copies.items():
            if (name := copies.name) in insert.priorities:  # a key has one row in a table
                return invalid(f"item {insert.keys[0]} names {name!r}, which items of {source!r} join: leave it out")
        return None

    def on_insert(self, insert: InsertBatch) -> Iterable[Table]:
        changed = []
        for source, copies in self._copies.items():
            if (priorities := insert.priorities.get(source)) is not None:
                self.kernel.items.hold(insert.keys)
                copies.insert(insert, priorities)
                changed.append(copies)
        return changed

    def on_item_gone(self, keys: Sequence[int]) -> None:
        for key in keys:
            if key in self.kernel.items:
                self._alone[key] = None
            else:
                self._alone.pop(key, None)

    def spares(self, key: int) -> int:
        return sum(key in copies for copies in self._copies.values())

    def spare_keys(self) -> Iterable[int]:
        return self._alone

    def free(self, needed: float) -> bool:
        """Evicts items that nothing but copies holds, first those that have been alone for longest."""
        items, before = self.kernel.items, self.kernel.items.bytes
        while self._alone and items.bytes > before - needed:
            key = next(iter(self._alone))
            del self._alone[key]
            if items[key].holders == self.spares(key):
                for copies in self._copies.values():
                    if (slot := copies.columns.slot(key)) is not None:
                        copies.evict_slots(np.array([slot]))
        return items.bytes < before

    def check(self) -> None:
        super().check()
        assert self._alone.keys() <= self.kernel.items.keys(), self._alone.keys() - self.kernel.items.keys()

    def reconcile(self) -> None:
        for copies in self._copies.values():
            keys: list[int] = copies.columns.key[copies.columns.used()].tolist()
            self.on_item_gone([key for key in keys if self.kernel.items.lost(key)])
