"""Insert rules decide which items enter their tables, wait, or are refused, and which items may grow.

* Each rule is stated once, for several rows together: it looks at the sums and extremes of the rows. The sums and
  extremes of a single row are its own values.
* If the rows together break no rule, no single row breaks a rule. If the rows together break a rule, it may be that
  only some rows break it. The caller then decides the first row alone.
* Rules change nothing. The caller counts, refuses, waits, or inserts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from replay_server.errors import Code, Refused, full, invalid, storage_failed, too_large
from replay_server.tables.balance import Balanced
from replay_server.tables.columns import MAX_BALANCED, FloatArray
from replay_server.tables.config import MAX_PRIORITY
from replay_server.tables.items import Items
from replay_server.tables.remembered import Remembered
from replay_server.tables.table import InsertBatch, Table
from replay_server.tables.waiting import Pending

MAX_VERSION = 1 << 62
"""The largest policy version."""
WhyNot = Callable[[Sequence[int]], Refused | None]
"""The type of OutstandingBatches.why_not_closed."""


class PendingInsert(Pending[None]):
    """One row that waits, in the lines of all its tables."""

    def __init__(self, insert: InsertBatch, tables: Sequence[Table], since: float, deadline_at: float) -> None:
        super().__init__(since, deadline_at)
        self.insert = insert
        self.tables = tables


class Known:
    """The item was inserted before. The insert is a retry, and is confirmed without any effect."""


class Blocked:
    """The item has to wait."""


class Outdated(Refused):
    """An item is too stale for the table, or its policy version was undone."""

    def __init__(self, table: Table, counter: str, why: str) -> None:
        """`counter`: the name of the table's counter of such refusals. `why` begins with the version of the item."""
        super().__init__(Code.FAILED_PRECONDITION, f"item of policy version {why}")
        self.table = table
        self.counter = counter

    def count(self, insert: InsertBatch | None = None) -> None:
        """Counts the refusal at the table.

        `insert`: the row that a client inserts. If it is too stale, it counts by its tags, too. None: another table
        forwards the item, whose refusal is not counted by tags.
        """
        counters = self.table.counters
        setattr(counters, self.counter, getattr(counters, self.counter) + 1)
        if insert is not None and self.counter == "stale_refused":
            self.table.refuse_stale(insert)


def why_outdated(table: Table, version: int) -> Outdated | None:
    """Why the table refuses an item of this version: it is too old, or was undone; None: the version is allowed."""
    current = table.columns.current_version
    if table.too_stale(version):
        why = (
            f"{version} lags {current - version} behind the current {current}; table {table.name!r} takes at most "
            f"{table.config.max_staleness} (max_staleness)"
        )
        return Outdated(table, "stale_refused", why)
    if table.is_undone(version):
        why = (
            f"{version}, which a rollback to version {current} has undone: generate with the weights of version "
            f"{current}"
        )
        return Outdated(table, "undone", why)
    return None


class InsertRules:
    """The decision on each insert and each segment, from the state of items and tables."""

    def __init__(
        self, items: Items, known_keys: Remembered[frozenset[str]], why_not_closed: WhyNot, max_payload_bytes: int
    ) -> None:
        """`known_keys`: by the key of an earlier insert, the tables that this insert named.

        `why_not_closed` is the method of OutstandingBatches. `max_payload_bytes`: the most bytes of one item.
        """
        self._items = items
        self._known_keys = known_keys
        self._why_not_closed = why_not_closed
        self._max_bytes = min(max_payload_bytes, items.max_bytes)
        """The most bytes of one item."""

    def verdict(self, batch: InsertBatch, tables: Sequence[Table]) -> Refused | Known | Blocked | None:
        """The decision on all rows of `batch` together; None: they may enter `tables` now.

        Refused, Known and Blocked may be true of only some of the rows.
        """
        refusal = self.why_invalid(batch, tables)
        if refusal is not None:
            return refusal
        # The item of a forgotten key may still be here.
        is_known = self._known_keys.any_of(batch.keys) or not self._items.keys().isdisjoint(batch.keys)
        if is_known:
            return self._why_no_retry(batch) or Known()
        if batch.closes:
            refusal = self._why_not_closed(batch.closes)
            if refusal is not None:
                return refusal
        refusal = self.why_refused(batch, tables)
        if refusal is not None:
            return refusal
        for table in tables:
            if table.balanced is not None:  # such a table has a bound on the values of its tag
                refusal = _why_not_balanced(table, table.balanced, batch)
                if refusal is not None:
                    return refusal
        if self.why_blocked(batch, tables) is not None:
            return Blocked()
        return None

    def _why_no_retry(self, batch: InsertBatch) -> Refused | None:
        """Why an insert with a known key is refused: it names other tables than the first insert; None: it is a retry.

        If it were confirmed as a retry, the item would be in none of the tables that this insert names. Only the first
        row is looked at, because the caller does not use this result for a batch of several rows.
        """
        before = self._known_keys.get(batch.keys[0])
        if before is None:  # nobody knows the tables any more: the key is forgotten, or the server was restarted
            return None
        if before == batch.priorities.keys():  # the same names of tables
            return None
        return invalid(
            f"key {batch.keys[0]} was inserted into {', '.join(sorted(before))}, and now comes for "
            f"{', '.join(sorted(batch.priorities))}: a retry names the same tables, and another item needs another key"
        )

    def why_invalid(self, batch: InsertBatch, tables: Sequence[Table]) -> Refused | None:
        """Why the rows are refused, whatever the server holds; None: they are valid.

        The errors name the first row, even if only another row is invalid. For several rows, the caller then ignores
        the error, and decides the first row alone.
        """
        if batch.oldest < 0 or batch.newest > MAX_VERSION:
            return invalid(f"policy version {batch.newest} of item {batch.keys[0]}: must be from 0 to {MAX_VERSION}")
        for table in tables:
            priorities = batch.priorities[table.name]
            if not are_priorities(priorities):
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
        """Why the rows are refused in the current state of the server; None: they are not refused."""
        why = self._items.storage.why_full(batch.nbytes)
        if why:
            return storage_failed(why)
        for table in tables:
            refusal = why_outdated(table, batch.oldest)  # if any row is too stale, the oldest row is
            if refusal is not None:
                return refusal
            if len(batch) > 1:
                # A version between those of the oldest and the newest row may be undone, even if neither of them is. In
                # place of the newest row, this checks the newest undone version, if that lies between them. It may
                # refuse rows of which none is undone: then the caller decides the rows one by one.
                newest_undone = min(batch.newest, table.undone)
                refusal = why_outdated(table, max(batch.oldest, newest_undone))
                if refusal is not None:
                    return refusal
            if table.config.when_full == "reject":
                why = table.why_full(len(batch), batch.nbytes)
                if why:
                    return full(f"table {table.name!r} is full: {why}, and when_full is 'reject'")
        return None

    def why_blocked(self, batch: InsertBatch, tables: Sequence[Table]) -> str | None:
        """Why the rows have to wait; None: no rule holds them back. Inserts that wait already are not considered."""
        for table in tables:
            why = table.why_no_insert(len(batch), batch.nbytes)
            if why:
                return f"{table.name}: inserting blocked: {why}"
            if table.config.when_full == "block":  # otherwise a full server evicts items, or refuses the insert
                why = self._items.why_full(batch.nbytes)
                if why:
                    return f"{table.name}: inserting blocked: server: {why}"
        return None

    def why_cannot_grow(self, key: int, nbytes: int, tables: Sequence[Table]) -> Refused | None:
        """Why a segment of `nbytes` cannot be appended to an item; None: it can.

        `tables` have the item, or may get it back from a batch. No item is evicted to make room for a segment, because
        other clients may wait for that item.
        """
        before = self._items[key].cost
        after = before + nbytes
        what = f"item {key} of {before} bytes with a segment of {nbytes}"
        if after > self._max_bytes:
            return too_large(f"{what}; this server takes items of at most {self._max_bytes} bytes")
        for table in tables:
            bound = table.config.max_bytes
            if after > (bound or math.inf):
                return too_large(f"{what}; table {table.name!r} holds at most {bound} bytes (max_bytes)")
            if key in table:  # a reserved row does not count for the table's bytes
                why = table.why_full(0, nbytes)
                if why:
                    remedy = "raise max_bytes, or bound it by max_size"
                    return full(f"{what}: table {table.name!r} is full: {why}; {remedy}")
        why = self._items.why_full(nbytes)
        if why:
            return full(f"{what}: the server is full: {why}; raise max_bytes, or let tables hold less")
        why = self._items.storage.why_full(nbytes)
        if why:
            return storage_failed(why)
        return None


def _why_not_balanced(table: Table, balanced: Balanced, batch: InsertBatch) -> Refused | None:
    """Why `table`, which balances its draws by `balanced`, refuses the rows; None: their tag values fit."""
    value = balanced.one_too_many(batch.labels)
    if value is None:
        return None
    return invalid(
        f"tag {balanced.tag.name!r} of an item is {value[:40]!r}, and table {table.name!r} balances "
        f"{MAX_BALANCED} values of it already: balance a tag with fewer values"
    )


def are_priorities(values: FloatArray) -> bool:
    """True if all `values` (n,) are numbers from 0 to MAX_PRIORITY."""
    if values.size == 1:  # 10 times as fast as reducing an array of one element
        return 0 <= values.item() <= MAX_PRIORITY
    if values.size == 0:  # min() and max() of an empty array raise an error
        return True
    # If a value is NaN, the minimum is NaN, and the comparison fails.
    return bool(values.min() >= 0 and values.max() <= MAX_PRIORITY)


def bad_priority(value: float, what: str) -> Refused:
    """The error for a priority that is no number, or out of range. `what` names the item with this priority."""
    return invalid(f"priority {float(value)} of {what}: must be a number from 0 to {MAX_PRIORITY:g}")
