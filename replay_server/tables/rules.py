"""Insert rules decide which items enter their tables, wait, or are refused, and which items may grow.

* Each rule is written for a batch of rows, and looks only at the sums and extremes of the batch. If the batch has only
  one row, these are the values of the row.
* If a batch breaks no rule, none of its rows breaks a rule. If a batch breaks a rule, perhaps only some of its rows
  break it. Then the caller applies the rules to the first row alone.
* Rules change nothing. The caller counts, refuses or inserts the rows, or lets them wait.
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
"""The type of the method `OutstandingBatches.why_not_closed`, which takes ids of batches."""


class PendingInsert(Pending[None]):
    """The insert of one row that has to wait. It waits in the lines of all its tables."""

    def __init__(self, insert: InsertBatch, tables: Sequence[Table], since: float, deadline_at: float) -> None:
        super().__init__(since, deadline_at)
        self.insert = insert
        self.tables = tables


class Known:
    """A verdict: the item was inserted before. The insert is a retry, and is confirmed without any effect."""


class Blocked:
    """A verdict: the item has to wait."""


class Outdated(Refused):
    """The refusal of an item that is too stale for the table, or whose policy version was undone."""

    def __init__(self, table: Table, counter: str, why: str) -> None:
        """`counter`: the name of the table's counter of such refusals. `why`: the end of the message, which begins with
        the policy version of the item."""
        super().__init__(Code.FAILED_PRECONDITION, f"item of policy version {why}")
        self.table = table
        self.counter = counter

    def count(self, insert: InsertBatch | None = None) -> None:
        """Counts the refusal at the table. A row that a client inserts and that is too stale also counts by its tags.

        `insert`: this row; None: the item came from another table that forwards to this one.
        """
        counters = self.table.counters
        setattr(counters, self.counter, getattr(counters, self.counter) + 1)
        if insert is not None and self.counter == "stale_refused":
            self.table.refuse_stale(insert)


def why_outdated(table: Table, version: int) -> Outdated | None:
    """The refusal of an item of this policy version, because the version is too old or was undone; None: the table
    allows it."""
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
    """Decides on each insert and each segment, from the current state of items and tables."""

    def __init__(
        self, items: Items, known_keys: Remembered[frozenset[str]], why_not_closed: WhyNot, max_payload_bytes: int
    ) -> None:
        """`known_keys`: the keys of earlier inserts, each with the names of the tables that the insert named.

        `why_not_closed` is the method of OutstandingBatches. `max_payload_bytes`: the most bytes of one item, as the
        server is configured.
        """
        self._items = items
        self._known_keys = known_keys
        self._why_not_closed = why_not_closed
        self._max_bytes = min(max_payload_bytes, items.max_bytes)
        """The most bytes of one item. An item with more bytes than the server may hold is never allowed."""

    def verdict(self, batch: InsertBatch, tables: Sequence[Table]) -> Refused | Known | Blocked | None:
        """The decision on all rows of `batch` together; None: they may enter `tables` now.

        Refused, Known and Blocked may be true of only some of the rows.
        """
        refusal = self.why_invalid(batch, tables)
        if refusal is not None:
            return refusal
        # Both are asked, because a key may be forgotten while its item is still here.
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
            if table.balanced is not None:  # a table that balances its draws bounds the number of values of its tag
                refusal = _why_not_balanced(table, table.balanced, batch)
                if refusal is not None:
                    return refusal
        if self.why_blocked(batch, tables) is not None:
            return Blocked()
        return None

    def _why_no_retry(self, batch: InsertBatch) -> Refused | None:
        """The refusal of an insert with a known key that names other tables than the first insert of the key.

        None: the insert counts as a retry. With other tables it must not count as one, because the client would then
        believe that the item is in these tables.

        Looks only at the first row, because the caller does not use this result for a batch of several rows.
        """
        key = batch.keys[0]
        tables_before = self._known_keys.get(key)
        if tables_before is None:  # the tables are unknown: the key is forgotten, or the server was restarted
            return None
        if tables_before == batch.priorities.keys():  # the keys of `priorities` are names of tables
            return None
        return invalid(
            f"key {key} was inserted into {', '.join(sorted(tables_before))}, and now comes for "
            f"{', '.join(sorted(batch.priorities))}: a retry names the same tables, and another item needs another key"
        )

    def why_invalid(self, batch: InsertBatch, tables: Sequence[Table]) -> Refused | None:
        """The refusal of rows that are invalid, whatever the server holds; None: they are valid.

        The error names the first row, even if only another row is invalid. If there are several rows, the caller does
        not use the error, but applies the rules to the first row alone.
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
        """The refusal of the rows in the current state of the server; None: they are not refused."""
        why = self._items.storage.why_full(batch.nbytes)
        if why:
            return storage_failed(why)
        for table in tables:
            refusal = why_outdated(table, batch.oldest)  # if any row is too stale, the oldest row is
            if refusal is not None:
                return refusal
            if len(batch) > 1:
                # The undone versions are those from the one after the current version up to `table.undone`. A row may
                # have one of them even if the oldest row is older and the newest row is newer than all of them. So this
                # checks `table.undone` if it lies between both. This may refuse rows of which none is undone, but then
                # the caller applies the rules to the rows one by one.
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
        """The reason why the rows have to wait; None: no rule holds them back.

        Does not consider that other inserts may wait already, and that the rows may have to wait behind them.
        """
        for table in tables:
            why = table.why_no_insert(len(batch), batch.nbytes)
            if why:
                return f"{table.name}: inserting blocked: {why}"
            if table.config.when_full == "block":  # for other tables, a full server evicts items or refuses the insert
                why = self._items.why_full(batch.nbytes)
                if why:
                    return f"{table.name}: inserting blocked: server: {why}"
        return None

    def why_cannot_grow(self, key: int, nbytes: int, tables: Sequence[Table]) -> Refused | None:
        """The reason why a segment of `nbytes` cannot be appended to an item; None: it can.

        `tables`: the tables that have the item, or may get it back from a batch. A table evicts no items to make room
        for a segment, because other clients may wait for the evicted items.
        """
        bytes_before = self._items[key].cost
        bytes_after = bytes_before + nbytes
        what = f"item {key} of {bytes_before} bytes with a segment of {nbytes}"
        if bytes_after > self._max_bytes:
            return too_large(f"{what}; this server takes items of at most {self._max_bytes} bytes")
        for table in tables:
            bound = table.config.max_bytes
            if bytes_after > (bound or math.inf):
                return too_large(f"{what}; table {table.name!r} holds at most {bound} bytes (max_bytes)")
            if key in table:  # otherwise a batch reserves the row, and the bytes of the table do not count it
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
    """The refusal of rows whose tag values are too many for `table`, which balances its draws; None: the values fit.

    `balanced`: the sampler of the table.
    """
    value = balanced.one_too_many(batch.labels)
    if value is None:
        return None
    return invalid(
        f"tag {balanced.tag.name!r} of an item is {value[:40]!r}, and table {table.name!r} balances "
        f"{MAX_BALANCED} values of it already: balance a tag with fewer values"
    )


def are_priorities(values: FloatArray) -> bool:
    """True if all `values` (n,) are numbers from 0 to MAX_PRIORITY, and none of them is NaN."""
    if values.size == 1:  # 10 times as fast as reducing an array of one element
        return 0 <= values.item() <= MAX_PRIORITY
    if values.size == 0:  # min() and max() of an empty array raise an error
        return True
    # If any value is NaN, the minimum is NaN, which is not >= 0.
    return bool(values.min() >= 0 and values.max() <= MAX_PRIORITY)


def bad_priority(value: float, what: str) -> Refused:
    """The error for a priority that is NaN or out of range. `what`: the item with this priority, in words."""
    return invalid(f"priority {float(value)} of {what}: must be a number from 0 to {MAX_PRIORITY:g}")
