"""Forwarding and copying: an item of one table also joins another table, with the same priority.

Both tables share the item and its payload, so no bytes are copied.

* A table forwards an item when a reader acknowledges or leases the item for the first time. The target's rate limiter
  counts the item as an insert. The target refuses the item for the reasons for which it would refuse an insert. A full
  target that does not evict refuses the item, too. The table that forwards counts these refusals.
* A table copies an item when the item enters. A copy never waits, and is never refused. A table of copies that exceeds
  its bounds evicts items, and counts them. An item that only tables of copies hold counts as gone, although it is still
  in these tables. So its permit is released, and when the server needs room, such items are removed first.
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
    """Adds each item to the table `forward_to` when a reader acknowledges or leases the item for the first time."""

    def __init__(self, discard: Callable[[Table, Sequence[int]], None]) -> None:
        """`discard(target, keys)` removes the retained rows of these keys from `target`.

        It is called before an item joins `target` again, because a table has at most one row of a key.
        """
        self._discard = discard

    def concerns(self, table: TableConfig) -> bool:
        return table.forward_to is not None

    def on_acknowledge(self, table: Table, batch: SampleBatch) -> Iterable[Table]:
        """Forwards the items of the batch, except items of priority 0 and items that this table forwarded before."""
        assert table.config.forward_to is not None
        if batch.epoch != table.epoch:  # a reset has removed these items
            return ()
        target = self.kernel.tables[table.config.forward_to]
        keys = batch.keys.tolist()
        priorities = batch.priorities.tolist()
        for key, priority in zip(keys, priorities, strict=True):
            item = self.kernel.items[key]
            if not priority or table.name in item.forwarded:
                continue
            item.forwarded += (table.name,)
            is_there = target.has_or_may_return(key)  # another table may have forwarded the item
            if is_there or self._join(target, key, item, priority):
                table.counters.forwarded += 1
            else:
                table.counters.forward_refused += 1
        return (target,)

    # A lease forwards the items, too. The acknowledgement of that batch then forwards nothing, because `item.forwarded`
    # names the table already.
    on_lease = on_acknowledge

    def _join(self, target: Table, key: int, item: Item, priority: float) -> bool:
        """Inserts an item into `target`. Returns False if the target refuses the item."""
        outdated = why_outdated(target, item.policy_version)
        if outdated is not None:
            outdated.count()
            return False
        most_bytes = target.config.max_bytes or np.inf
        if item.cost > most_bytes:
            return False
        if target.config.when_full != "evict" and target.why_full(1, item.cost):
            return False
        if target.balanced is not None and target.balanced.one_too_many([item.labels]) is not None:
            return False
        if key in target.columns.retained:  # the new row takes the place of a row that the target consumed earlier
            self._discard(target, [key])
        items = self.kernel.items
        items.hold([key])  # for the new row of `target`
        joining = InsertBatch(
            keys=[key],
            priorities={},  # `Table.insert` gets the priority as an argument
            policy_versions=np.array([item.policy_version]),
            sizes=np.array([item.nbytes]),
            payloads=(),  # the payload is stored already
            labels=items.labels([key]),
        )
        target.insert(joining, np.array([priority]))
        if key not in target:  # the remover of `target` has chosen the new row
            target.counters.evicted_on_arrival += 1
        return True


class Copying(Extension):
    """Adds each item that enters a table to the table `copy_to`, too."""

    def attach(self, kernel: Kernel) -> None:
        """As in Extension. Also finds the tables that copy their items, and for each of them the table of copies."""
        super().attach(kernel)
        self._copies_by_source: dict[str, Table] = {}
        """The table of the copies, by the name of the table that copies its items."""
        for table in kernel.tables.values():
            if table.config.copy_to is not None:
                self._copies_by_source[table.name] = kernel.items.copies[table.config.copy_to]
        self._only_copied: dict[int, None] = {}
        """The keys of items that only tables of copies held when their last other holder released them.

        The first key is that of the oldest release. Since its release, a batch of copies or a reader of bytes may hold
        an item, too. This is a dict because a set has no order. Its values mean nothing.
        """

    def why_not(self, insert: InsertBatch) -> Refused | None:
        """Refuses an insert that names a table of copies, because the item might join that table twice."""
        for source, copies in self._copies_by_source.items():
            name = copies.name
            if name in insert.priorities:
                return invalid(f"item {insert.keys[0]} names {name!r}, which items of {source!r} join: leave it out")
        return None

    def on_insert(self, insert: InsertBatch) -> Iterable[Table]:
        """Adds the items to the tables of copies of those tables that the items enter."""
        changed = []
        for source, copies in self._copies_by_source.items():
            priorities = insert.priorities.get(source)
            if priorities is not None:
                self.kernel.items.hold(insert.keys)  # for the new rows of the table of copies
                copies.insert(insert, priorities)
                changed.append(copies)
        return changed

    def on_item_gone(self, keys: Sequence[int]) -> None:
        """Notes the items that only copies hold from now on, and forgets the items that nothing holds."""
        for key in keys:
            if key in self.kernel.items:  # copies still hold the item
                self._only_copied[key] = None
            else:
                self._only_copied.pop(key, None)

    def spares(self, key: int) -> int:
        return sum(key in copies for copies in self._copies_by_source.values())

    def spare_keys(self) -> Iterable[int]:
        return self._only_copied

    def free(self, needed: float) -> bool:
        """Evicts items that only copies hold, in the order in which the items lost their other holders."""
        items = self.kernel.items
        bytes_before = items.bytes
        while self._only_copied and items.bytes > bytes_before - needed:
            key = next(iter(self._only_copied))
            del self._only_copied[key]
            # If a batch or a reader of bytes holds the item, too, the item is noted again when that holder releases it.
            only_rows = items[key].holders == self.spares(key)
            if only_rows:
                self._evict(key)
        return items.bytes < bytes_before

    def _evict(self, key: int) -> None:
        """Removes an item from all tables of copies."""
        for copies in self._copies_by_source.values():
            slot = copies.columns.slot(key)
            if slot is not None:
                copies.evict_slots(np.array([slot]))

    def check(self) -> None:
        super().check()
        assert self._only_copied.keys() <= self.kernel.items.keys(), self._only_copied.keys() - self.kernel.items.keys()

    def reconcile(self) -> None:
        """Notes the items that only copies hold after a restart, each table's items in the order of their insertion."""
        for copies in self._copies_by_source.values():
            slots = copies.columns.used()
            keys: list[int] = copies.columns.key[slots].tolist()
            only_copied = [key for key in keys if self.kernel.items.lost(key)]
            self.on_item_gone(only_copied)
