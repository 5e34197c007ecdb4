"""Forwarding: an item that a reader uses for the first time joins another table too, with the priority it has here.

No bytes move, and nothing waits. The limiter of the target counts the item, and only what would refuse an insert there
can refuse it: that is counted at the table that forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from replay_server.tables.config import TableConfig
from replay_server.tables.extensions.extension import Extension
from replay_server.tables.items import Item
from replay_server.tables.rules import why_outdated
from replay_server.tables.table import SampleBatch, Table


class Forwarding(Extension):
    def __init__(self, let_go: Callable[[Table, Sequence[int]], None]) -> None:
        """`let_go` ends rows that are retained in the target: it has one row of an item at most."""
        self._let_go = let_go

    def concerns(self, table: TableConfig) -> bool:
        return table.forward_to is not None

    def on_take(self, table: Table, batch: SampleBatch) -> Iterable[Table]:
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

    on_lease = on_take

    def undo(self, key: int) -> bool:
        return not self.kernel.items[key].forwarded

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
            self._let_go(target, [key])
        items = self.kernel.items
        items.hold([key])
        versions, sizes = np.array([item.policy_version]), np.array([item.nbytes])
        target.insert([key], np.array([priority]), versions, sizes, items.labels([key]))
        target.counters.evicted_on_arrival += key not in target
        return True
