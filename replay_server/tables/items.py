"""Items: what all tables share of their items, and which payloads the storage has to keep.

* A table holds each of its items once; an outstanding batch holds each of its rows once, and so does a reader of bytes.
* As long as anything holds an item, its payload is in the storage and its bytes count. After that both are gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from replay_server.errors import busy
from replay_server.tables.batches import InsertBatch
from replay_server.tables.payloads import Payload, Storage, read
from replay_server.tables.table import Table


class Watcher(Protocol):
    """Is told of every change, for example to record it on disk."""

    def changed(self, keys: Iterable[int]) -> None:
        """The records of these items may no longer be true."""

    def inserted(self, keys: Iterable[int]) -> None:
        """These keys became known."""

    def scope_changed(self, table: str, scope: str) -> None:
        """Keys were given out under this scope; "": any scope of the table may have changed."""

    def ended_changed(self, block: int) -> None:
        """This block of the ids of ended batches has changed."""

    def lease_changed(self, batch_id: int) -> None:
        """The reader of this batch has it now under a lease, or has it no longer."""

    def answers_changed(self, request_ids: Iterable[int]) -> None:
        """The answers to these requests are remembered, or forgotten."""


@dataclass(slots=True)
class Item:
    nbytes: int
    policy_version: int
    inserted_at: float
    """Seconds of the server's clock."""
    holders: int = 0
    unused_permit: bool = False
    """Inserted with a permit, and not sampled since."""
    forwarded: tuple[str, ...] = ()
    """Names of the tables that forwarded the item."""


class Items(dict[int, Item]):
    """All items, by key."""

    def __init__(self, storage: Storage, max_bytes: int | None, on_unused_permit: Callable[[], object]) -> None:
        """`on_unused_permit` is called when an item goes that was inserted with a permit and never sampled."""
        super().__init__()
        self.storage = storage
        self.max_bytes = math.inf if max_bytes is None else max_bytes
        self.bytes = 0
        self.freed = False
        """Whether bytes became free since this was last set to False."""
        self._on_unused_permit = on_unused_permit

    def insert(self, batch: InsertBatch, now: float, holders: int, permits: bool) -> None:
        """Keeps the payloads of a batch, for `holders` tables. `permits`: each row used one."""
        sizes, versions = batch.sizes.tolist(), batch.policy_versions.tolist()
        for key, nbytes, version in zip(batch.keys, sizes, versions, strict=True):
            self[key] = Item(nbytes, version, now, holders, permits)
        self.bytes += sum(sizes)
        self.storage.put(batch.keys, batch.payloads)

    def unused_permits(self) -> int:
        """How many items were inserted with a permit, and not sampled since."""
        return sum(item.unused_permit for item in self.values())

    def hold(self, keys: Iterable[int]) -> None:
        """Adds a holder to each of `keys`."""
        for key in keys:
            self[key].holders += 1

    def release(self, keys: Iterable[int]) -> None:
        """Removes a holder from each of `keys`; deletes the items that have none left."""
        gone, sizes = [], []
        for key in keys:
            item = self[key]
            item.holders -= 1
            if item.holders == 0:
                del self[key]
                self.bytes -= item.nbytes
                self.freed = True
                if item.unused_permit:
                    self._on_unused_permit()
                gone.append(key)
                sizes.append(item.nbytes)
        self.storage.delete(gone, sizes)

    def payloads(self, keys: Sequence[int]) -> Iterator[Payload]:
        """As `payloads.read`. The items must be held until all is read."""
        return read(self.storage, keys, [self[key].nbytes for key in keys])

    def why_full(self, nbytes: int) -> str | None:
        """Why the server has no room for `nbytes` more; None: it has."""
        if self.bytes + nbytes > self.max_bytes:
            return f"{self.bytes} bytes + {nbytes} > max_bytes {self.max_bytes}"
        return None

    def check_room(self, nbytes: int, tables: Sequence[Table]) -> None:
        """Raises Refused if `nbytes` more would not fit even if `tables` evicted all that they may."""
        if (why := self.why_full(nbytes)) is None:
            return
        evicting = [table for table in tables if table.config.when_full == "evict"]
        if not self._can_free(self.bytes + nbytes - self.max_bytes, evicting):
            names = ", ".join(table.name for table in tables)
            raise busy(f"the server is full: {why}, and {names} has too little to evict")

    def make_room(self, tables: Sequence[Table]) -> int:
        """Evicts from `tables`, as far as they evict, until the server is not full. Returns how many items are gone.

        The caller has called `check_room`.
        """
        before = len(self)
        while self.why_full(0):
            evicting = [table for table in tables if table.config.when_full == "evict"]
            max(evicting, key=lambda table: table.bytes).evict()
        return before - len(self)

    def _can_free(self, needed: float, tables: Sequence[Table]) -> bool:
        """Whether emptying `tables` would free `needed` bytes."""
        freed = 0
        for place, table in enumerate(tables):
            for key in table.columns.slots:
                if any(key in earlier for earlier in tables[:place]):
                    continue
                item = self[key]
                if item.holders == sum(key in other for other in tables):
                    freed += item.nbytes
                    if freed >= needed:
                        return True
        return False
