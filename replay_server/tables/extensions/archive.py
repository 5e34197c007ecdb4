"""Archive: items of one table join a table `archive` as they enter, until a reader has written them to files.

* It waits for no place there, and is refused none. What is over the bounds of `archive` is evicted, and counted.
* What only the archive holds is gone for everything else: its permit is given back, and its bytes are the first to go.
* The departures of all other tables are recorded beside, so that the files can say what became of each item.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from replay_server.errors import Refused, invalid
from replay_server.tables.config import ARCHIVE, ArchiveConfig, TableConfig
from replay_server.tables.extensions.extension import Extension, Kernel
from replay_server.tables.items import InsertBatch
from replay_server.tables.table import Table

MAX_DEPARTED = 1 << 20
"""Keys of items that left, and whose reader has not confirmed them."""


@dataclass(frozen=True, slots=True)
class Departed:
    """Items that left a table together, and why."""

    number: int
    """That of its first key. Later departures have higher numbers, also after a restart."""
    table: str
    reason: str
    """consumed, evicted, stale, deleted or reset."""
    time: float
    """Seconds since the epoch."""
    policy_version: int
    """The current one at that time."""
    keys: Sequence[int]


class DepartureLog:
    """The last departures, until the archiver confirms that it has written them. In memory only.

    Of more than MAX_DEPARTED keys the oldest are forgotten, and counted.
    """

    def __init__(self, wall_clock_ns: Callable[[], int]) -> None:
        self._wall_clock_ns = wall_clock_ns
        self._next = wall_clock_ns()
        self._departures: deque[Departed] = deque()
        self._keys = 0
        self.lost = 0
        """Keys that were forgotten before anybody confirmed them."""

    def add(self, table: str, reason: str, policy_version: int, keys: Sequence[int]) -> None:
        if not len(keys):
            return
        time = self._wall_clock_ns() / 1e9
        self._departures.append(Departed(self._next, table, reason, time, policy_version, keys))
        self._next += len(keys)
        self._keys += len(keys)
        while self._keys > MAX_DEPARTED:
            self.lost += self._forget()

    def read(self, confirmed: int, limit: int) -> tuple[list[Departed], int]:
        """Forgets what has a number below `confirmed`. Returns the oldest departures, and what confirms them.

        They have `limit` keys together, or the first one alone has more.
        """
        while self._departures and self._departures[0].number < confirmed:
            self._forget()
        found: list[Departed] = []
        for departure in self._departures:
            limit -= len(departure.keys)
            if found and limit < 0:
                return found, departure.number
            found.append(departure)
        return found, self._next

    def _forget(self) -> int:
        n = len(self._departures.popleft().keys)
        self._keys -= n
        return n


class Archiving(Extension):
    def __init__(self, config: ArchiveConfig, source: str) -> None:
        """`source`: the table whose items are archived."""
        self.declares = (config.declared(),)
        self.source = source
        self.departures = DepartureLog(time.time_ns)
        self._alone: dict[int, None] = {}
        """Keys that only the archive held when they were last released, in this order."""

    def attach(self, kernel: Kernel) -> None:
        super().attach(kernel)
        self.table = kernel.tables[ARCHIVE]

    def concerns(self, table: TableConfig) -> bool:
        return table.name != ARCHIVE

    def why_not(self, insert: InsertBatch) -> Refused | None:
        if ARCHIVE not in insert.priorities:  # a key has one row in a table
            return None
        return invalid(f"item {insert.keys[0]} names {ARCHIVE!r}, which items of {self.source!r} join: leave it out")

    def on_insert(self, insert: InsertBatch) -> Iterable[Table]:
        if (priorities := insert.priorities.get(self.source)) is None:
            return ()
        self.kernel.items.hold(insert.keys)
        self.table.insert(insert.keys, priorities, insert.policy_versions, insert.sizes, insert.labels)
        return (self.table,)

    def on_leave(self, table: Table, reason: str, keys: Sequence[int]) -> None:
        self.departures.add(table.name, reason, table.columns.current_version, keys)

    def on_item_gone(self, keys: Sequence[int]) -> None:
        for key in keys:
            if key in self.kernel.items:
                self._alone[key] = None
            else:
                self._alone.pop(key, None)

    def spares(self, key: int) -> int:
        return key in self.table

    def spare_keys(self) -> Iterable[int]:
        return self._alone

    def free(self, needed: float) -> bool:
        """Evicts the item that it has held alone for longest, if it still does."""
        if not self._alone:
            return False
        key = next(iter(self._alone))
        del self._alone[key]
        if self.kernel.items[key].holders == 1 and (slot := self.table.columns.slot(key)) is not None:
            self.table.evict_slots(np.array([slot]))
        return True

    def free_all(self) -> None:
        """Evicts all that nothing else holds."""
        while self.free(1):
            pass

    def reconcile(self) -> None:
        items, columns = self.kernel.items, self.table.columns
        keys: list[int] = columns.key[columns.used()].tolist()
        self._alone = dict.fromkeys(key for key in keys if items[key].holders == 1)
