"""Insert rules: which items may enter their tables, which have to wait, and which are refused; and which may grow.

* Each rule is stated once, for some rows together. It looks at their sums and extremes; one row is its own extreme.
* Rows that together break no rule break none one by one. If they break one, the caller decides the first row alone.
* Rules change nothing. The caller counts, refuses, waits, or inserts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from replay_server.errors import Code, Refused, full, invalid, storage_failed, too_large
from replay_server.tables.columns import MAX_BALANCED, FloatArray
from replay_server.tables.config import MAX_PRIORITY
from replay_server.tables.items import Items
from replay_server.tables.remembered import Remembered
from replay_server.tables.table import InsertBatch, Table
from replay_server.tables.waiting import Pending

MAX_VERSION = 1 << 62
WhyNot = Callable[[Sequence[int]], Refused | None]


class PendingInsert(Pending[None]):
    """One row that waits, in the lines of all its tables."""

    def __init__(self, insert: InsertBatch, tables: Sequence[Table], since: float, deadline_at: float) -> None:
        super().__init__(since, deadline_at)
        self.insert = insert
        self.tables = tables


class Known:
    """The item was inserted before. The insert is a retry, and is acknowledged without any effect."""


class Blocked:
    """The item has to wait."""


class Outdated(Refused):
    """An item is too stale for the table, or its policy version was undone."""

    def __init__(self, table: Table, counter: str, why: str) -> None:
        """`counter`: of the table, which counts such refusals."""
        super().__init__(Code.FAILED_PRECONDITION, f"item of policy version {why}")
        self.table = table
        self.counter = counter

    def count(self, insert: InsertBatch | None = None) -> None:
        """`insert`: the row that a client brought; None: the item comes out of another table."""
        counters = self.table.counters
        setattr(counters, self.counter, getattr(counters, self.counter) + 1)
        if insert is not None and self.counter == "stale_refused":
            self.table.refuse_stale(insert)


def why_outdated(table: Table, version: int) -> Outdated | None:
    """Why an item of this version is too old for the table, or does not count any more; None: it is not."""
    current = table.columns.current_version
    if table.too_stale(version):
        why = f"{version} lags {current - version} behind the current {current}; table {table.name!r} takes at most "
        return Outdated(table, "stale_refused", f"{why}{table.config.max_staleness} (max_staleness)")
    if table.is_undone(version):
        why = f"{version}, which a rollback to version {current} has undone: generate with the weights of version "
        return Outdated(table, "undone", f"{why}{current}")
    return None


class InsertRules:
    def __init__(
        self, items: Items, known_keys: Remembered[frozenset[str]], why_not_closed: WhyNot, max_payload_bytes: int
    ) -> None:
        """`why_not_closed`: as OutstandingBatches.why_not_closed."""
        self._items = items
        self._known_keys = known_keys
        self._why_not_closed = why_not_closed
        self._max_bytes = min(max_payload_bytes, items.max_bytes)

    def verdict(self, batch: InsertBatch, tables: Sequence[Table]) -> Refused | Known | Blocked | None:
        """What is to become of all rows of `batch`; None: they may enter `tables` now."""
        if (refusal := self.why_invalid(batch, tables)) is not None:
            return refusal
        if self._known_keys.any_of(batch.keys) or not self._items.keys().isdisjoint(batch.keys):
            return self._why_no_retry(batch) or Known()
        if batch.closes and (refusal := self._why_not_closed(batch.closes)) is not None:
            return refusal
        if (refusal := self.why_refused(batch, tables)) is not None:
            return refusal
        for table in tables:
            if (balanced := table.balanced) is not None and (value := balanced.one_too_many(batch.labels)) is not None:
                return invalid(
                    f"tag {balanced.tag.name!r} of an item is {value[:40]!r}, and table {table.name!r} balances "
                    f"{MAX_BALANCED} values of it already: balance a tag with fewer values"
                )
        return None if self.why_blocked(batch, tables) is None else Blocked()

    def _why_no_retry(self, batch: InsertBatch) -> Refused | None:
        """Why the first row is refused, whose key is known. Acknowledged, it would be in none of its tables."""
        before = self._known_keys.get(batch.keys[0])
        if before is None or before == batch.priorities.keys():
            return None
        return invalid(
            f"key {batch.keys[0]} was inserted into {', '.join(sorted(before))}, and now comes for "
            f"{', '.join(sorted(batch.priorities))}: a retry names the same tables, and another item needs another key"
        )

    def why_invalid(self, batch: InsertBatch, tables: Sequence[Table]) -> Refused | None:
        """Why the rows are refused in any state of the server."""
        if not (batch.oldest >= 0 and batch.newest <= MAX_VERSION):
            return invalid(f"policy version {batch.newest} of item {batch.keys[0]}: must be from 0 to {MAX_VERSION}")
        for table in tables:
            if not are_priorities(priorities := batch.priorities[table.name]):
                return bad_priority(priorities[0], f"item {batch.keys[0]}, table {table.name!r}")
            if batch.largest > (table.config.max_bytes or math.inf):
                return too_large(
                    f"item of {batch.largest} bytes; table {table.name!r} holds at most {table.config.max_bytes} "
                    f"(max_bytes)"
                )
        if batch.largest > self._max_bytes:
            return too_large(f"item of {batch.largest} bytes; this server takes at most {self._max_bytes}")
        return None

    def why_refused(self, batch: InsertBatch, tables: Sequence[Table]) -> Refused | None:
        """Why the rows are refused in the current state of the server."""
        if why := self._items.storage.why_full(batch.nbytes):
            return storage_failed(why)
        for table in tables:
            if (refusal := why_outdated(table, batch.oldest)) is not None:
                return refusal
            # The newest of several rows may be beyond all versions that were undone. Then they are decided one by one.
            if len(batch) > 1 and (refusal := why_outdated(table, min(batch.newest, table.undone))) is not None:
                return refusal
            if table.config.when_full == "reject" and (why := table.why_full(len(batch), batch.nbytes)):
                return full(f"table {table.name!r} is full: {why}, and when_full is 'reject'")
        return None

    def why_blocked(self, batch: InsertBatch, tables: Sequence[Table]) -> str | None:
        """Why the rows have to wait, apart from other inserts that came first."""
        for table in tables:
            if why := table.why_no_insert(len(batch), batch.nbytes):
                return f"{table.name}: inserting blocked: {why}"
            if table.config.when_full == "block" and (why := self._items.why_full(batch.nbytes)):
                return f"{table.name}: inserting blocked: server: {why}"
        return None

    def why_cannot_grow(self, key: int, nbytes: int, tables: Sequence[Table]) -> Refused | None:
        """Why a segment of so many bytes cannot be appended to an item, which is in these tables; None: it can.

        Nothing is evicted for a segment: that could cost items which others wait for.
        """
        before = self._items[key].cost
        what, after = f"item {key} of {before} bytes with a segment of {nbytes}", before + nbytes
        if after > self._max_bytes:
            return too_large(f"{what}; this server takes items of at most {self._max_bytes} bytes")
        for table in tables:
            if after > (table.config.max_bytes or math.inf):
                bound = table.config.max_bytes
                return too_large(f"{what}; table {table.name!r} holds at most {bound} bytes (max_bytes)")
            if key in table and (why := table.why_full(0, nbytes)):
                return full(f"{what}: table {table.name!r} is full: {why}; raise max_bytes, or bound it by max_size")
        if why := self._items.why_full(nbytes):
            return full(f"{what}: the server is full: {why}; raise max_bytes, or let tables hold less")
        if why := self._items.storage.why_full(nbytes):
            return storage_failed(why)
        return None


def are_priorities(values: FloatArray) -> bool:
    """Whether all `values` (n,) are numbers from 0 to MAX_PRIORITY."""
    if values.size == 1:  # 10 times as fast as reducing an array of one element
        return 0 <= values.item() <= MAX_PRIORITY
    return values.size == 0 or bool(values.min() >= 0 and values.max() <= MAX_PRIORITY)  # min and max of NaN are NaN


def bad_priority(value: float, what: str) -> Refused:
    return invalid(f"priority {float(value)} of {what}: must be a number from 0 to {MAX_PRIORITY:g}")
