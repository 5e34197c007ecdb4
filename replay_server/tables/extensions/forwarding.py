"""Forwarding and copying: an item of one table joins another table too, with the same priority. No bytes move.

* A table forwards an item when a reader uses the item for the first time. The limiter of the target counts the item.
  The target refuses the item for the reasons for which it would refuse an insert. The table that forwards counts these
  refusals.
* A table copies an item when the item enters. A copy never waits, and is never refused. A table of copies that exceeds
  its bounds evicts items, and counts them. An item that only copies hold is gone for everything else: its permit is
  released, and its bytes are freed first.
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
    """Puts each item into the `forward_to` of its table when a reader uses it for the first time."""

    def __init__(self, discard: Callable[[Table, Sequence[int]], None]) -> None:
        """`discard` removes rows that the target retains: a table has at most one row of an item."""
        self._discard = discard

    def concerns(self, table: TableConfig) -> bool:
        return table.forward_to is not None

    def on_acknowledge(self, table: Table, batch: SampleBatch) -> Iterable[Table]:
        assert table.config.forward_to is not None
        if batch.epoch != table.epoch:
            return ()
        target = self.kernel.tables[table.config.forward_to]
        keys = batch.keys.tolist()
        priorities = batch.priorities.tolist()
        for key, priority in zip(keys, priorities, strict=True):
            item = self.kernel.items[key]
            if not priority or table.name in item.forwarded:
                continue
            item.forwarded += (table.name,)
            if target.has_or_may_return(key) or self._join(target, key, item, priority):
                table.counters.forwarded += 1
            else:
                table.counters.forward_refused += 1
        return (target,)

    # A lease is a first use too. A later acknowledgement finds the table in `item.forwarded`.
    on_lease = on_acknowledge

    def _join(self, target: Table, key: int, item: Item, priority: float) -> bool:
        """Inserts an item into `target`. Returns False if the target refuses the item."""
        outdated = why_outdated(target, item.policy_version)
        if outdated is not None:
            outdated.count()
            return False
        if item.cost > (target.config.max_bytes or np.inf):
            return False
        if target.config.when_full != "evict" and target.why_full(1, item.cost):
            return False
        if target.balanced is not None and target.balanced.one_too_many([item.labels]) is not None:
            return False
        if key in target.columns.retained:
            self._discard(target, [key])
        items = self.kernel.items
        items.hold([key])
        joining = InsertBatch(
            keys=[key],
            priorities={},
            policy_versions=np.array([item.policy_version]),
            sizes=np.array([item.nbytes]),
            payloads=(),
            labels=items.labels([key]),
        )
        target.insert(joining, np.array([priority]))
        if key not in target:
            target.counters.evicted_on_arrival += 1
        return True


class Copying(Extension):
    """Puts each item that enters a table into the `copy_to` of the table, too."""

    def attach(self, kernel: Kernel) -> None:
        super().attach(kernel)
        self._copies: dict[str, Table] = {}
        """By name of the table that is copied: the table of its copies."""
        for table in kernel.tables.values():
            if table.config.copy_to is not None:
                self._copies[table.name] = kernel.items.copies[table.config.copy_to]
        self._alone: dict[int, None] = {}
        """The keys of items that only copies held when the items were last released, in the order of these releases.

        A dict is a set that has an order: the values mean nothing.
        """

    def why_not(self, insert: InsertBatch) -> Refused | None:
        for source, copies in self._copies.items():
            name = copies.name
            if name in insert.priorities:  # a key has one row in a table
                return invalid(f"item {insert.keys[0]} names {name!r}, which items of {source!r} join: leave it out")
        return None

    def on_insert(self, insert: InsertBatch) -> Iterable[Table]:
        changed = []
        for source, copies in self._copies.items():
            priorities = insert.priorities.get(source)
            if priorities is not None:
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
        """Evicts items that only copies hold, in the order in which the items lost their other holders."""
        items = self.kernel.items
        before = items.bytes
        while self._alone and items.bytes > before - needed:
            key = next(iter(self._alone))
            del self._alone[key]
            if items[key].holders == self.spares(key):
                self._evict(key)
        return items.bytes < before

    def _evict(self, key: int) -> None:
        """Removes an item from all tables of copies."""
        for copies in self._copies.values():
            slot = copies.columns.slot(key)
            if slot is not None:
                copies.evict_slots(np.array([slot]))

    def check(self) -> None:
        super().check()
        assert self._alone.keys() <= self.kernel.items.keys(), self._alone.keys() - self.kernel.items.keys()

    def reconcile(self) -> None:
        for copies in self._copies.values():
            keys: list[int] = copies.columns.key[copies.columns.used()].tolist()
            self.on_item_gone([key for key in keys if self.kernel.items.lost(key)])
