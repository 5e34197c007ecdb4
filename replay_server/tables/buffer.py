"""ReplayBuffer: all tables of a server over one set of payloads, and the operations that clients call.

Every operation is a plain function that runs on the event loop from its beginning to its end. It checks its whole
request first, and then applies all of it. So tables need no locks, and no client sees half of a change.

The insert rules decide whether the rows of an insert enter their tables, wait, or are refused. A table decides whether
a batch may be drawn from it now. A request that has to wait becomes a Pending in the line of each of its tables, and
the caller gets the Pending at once. Nobody polls, because each operation that changes a table ends with `_progress`.
`_progress` serves the first request of each line of the table, then the lines of all tables that this changes, until no
first request can be served. So a wait ends within the operation that makes its end possible. Requests are served in the
order in which they came, whatever the event loop runs next. The rule that holds a request back also says why, so each
wait has a reason in words.

An operation on a million rows takes some passes over arrays, and no loop over the rows. The objects of rows that have
left are cleared away afterwards, in slices (`items.py`).

* A drawn batch is outstanding until `acknowledge` or `requeue` ends it. Exactly one call of these two does so.
* A row of several tables waits in the lines of all of them, and enters all of them at once.
* Extensions act within these operations, in the order that `table.py` states.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from replay_protos.labels import labels_of
from replay_protos.settings import explain
from replay_protos.words import counted
from replay_server.errors import Refused, busy, closed, deadline, invalid, listed_tables, not_found, try_again
from replay_server.tables.columns import MAX_BALANCED, Columns, FloatArray, IntArray, KeyArray
from replay_server.tables.config import TableConfig
from replay_server.tables.extensions.extension import Extension, PolicyChange, ShardIndex, hooks
from replay_server.tables.items import ROWS_PER_SLICE, DamagedPayloads, Items, Storage
from replay_server.tables.meters import StepTimes
from replay_server.tables.outstanding import OutstandingBatches, PendingSample, why_never
from replay_server.tables.remembered import Remembered, Watcher
from replay_server.tables.rules import (
    MAX_VERSION,
    Blocked,
    InsertRules,
    Known,
    Outdated,
    PendingInsert,
    are_priorities,
    bad_priority,
)
from replay_server.tables.table import InsertBatch, Payload, SampleRequest, Table
from replay_server.tables.waiting import Line

QUIET_SECONDS = 10.0
"""If nobody has inserted for this many seconds, the reason why a sample waits says so. If nobody has sampled for this
many seconds, the reason why an insert waits says so."""


class Lines:
    """The requests that wait for one table: inserts in one line, samples in another."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.inserts: Line[PendingInsert] = Line(clock)
        self.samples: Line[PendingSample] = Line(clock)


def any_insert_waits(tables: Iterable[Table], lines: Mapping[str, Lines]) -> bool:
    """True if an insert into one of `tables` waits."""
    for table in tables:  # noqa: SIM110  # twice as fast as any() of a generator
        if lines[table.name].inserts:
            return True
    return False


def insertable_at_once(batch: InsertBatch, tables: Sequence[Table], items: Items, lines: Mapping[str, Lines]) -> int:
    """The number of rows at the start of `batch` that may be inserted together; at least 1.

    The outcome must be the same as if the rows were inserted one after the other. So this function looks only at the
    effect of the rows on each other. The insert rules decide which rows may enter.
    """
    n = len(batch)
    nbytes = batch.nbytes
    if items.bytes + nbytes > items.max_bytes:  # the first rows may evict items, and a later row may have to wait
        return 1
    if len(set(batch.keys)) < n:  # the second row with a key counts as a retry of the first
        return 1
    if any_insert_waits(tables, lines):  # the first row has to wait behind that insert
        return 1
    for table in tables:
        if lines[table.name].samples:
            # If the rows were inserted one by one, the waiting sample could be drawn between two of them. Only a fifo
            # draws the same items after all rows as between them, as long as nothing is evicted. So a fifo must have
            # room for all n rows.
            if table.config.sampler.type != "fifo" or table.balanced is not None:
                return 1
            n = min(n, table.config.max_size - table.size)
        # `nbytes` are the bytes of all rows, and n rows may have fewer. So n may become smaller than necessary, but it
        # is never too large.
        while n > 1 and not table.fits_at_once(n, nbytes):
            n //= 2
    return max(1, n)


def quiet_time(pending: PendingInsert | PendingSample, now: float, extensions: Iterable[Extension]) -> str:
    """Says for how long the other side of a wait has done nothing, as in "; nobody sampled for 12 s".

    A waiting insert waits for clients that sample, and a waiting sample for clients that insert. If nobody inserts and
    generators wait themselves, for example for permits, the words also say this. Returns "" if the other side has been
    active in the last QUIET_SECONDS.
    """
    table = pending.tables[0]
    if isinstance(pending, PendingInsert):
        seconds = now - table.sampled.last
        if seconds < QUIET_SECONDS:
            return ""
        return f"; nobody sampled for {seconds:.0f} s"
    seconds = now - table.inserted.last
    if seconds < QUIET_SECONDS:
        return ""
    words = f"; nobody inserted for {seconds:.0f} s"
    for extension in extensions:
        for name, line in extension.lines.items():
            if len(line):
                words += f", and generators wait for {name} ({len(line)})"
    return words


log = logging.getLogger("replay_server")

MAX_KNOWN_KEYS = 1 << 18
"""The most keys of inserts that are remembered."""
MAX_ANSWERS = 1 << 16
"""The most answers to other calls that are remembered."""
MAX_ANSWER_BYTES = 64 << 20
"""The most bytes of all remembered answers together."""


@lru_cache(1 << 10)
def _set_of(names: tuple[str, ...]) -> frozenset[str]:
    """The set of these names of tables. It is cached, so that keys share it, because 200,000 sets would take 50 MB."""
    return frozenset(names)


@dataclass
class Policy:
    """The trainer's current policy, as the trainer announced it."""

    version: int = 0
    weights: str = ""
    """The location of the weights; empty: the trainer named none."""
    set_at: float = 0.0
    """The time at which the trainer announced the policy, in seconds of the server's clock."""


class ReplayBuffer:
    """All tables of a server, with their items, waiting requests and outstanding batches."""

    def __init__(
        self,
        tables: Iterable[TableConfig],
        clock: Callable[[], float],
        storage: Storage,
        *,
        extensions: Sequence[Extension] = (),
        max_bytes: int | None = None,
        max_payload_bytes: int = 1 << 30,
        rows_per_slice: int = ROWS_PER_SLICE,
    ) -> None:
        """`max_bytes`: the most bytes of all items; None: no bound. `max_payload_bytes`: the most bytes of one item.

        `rows_per_slice`: the number of rows that are cleared away in one step. If more rows leave at once, they are
        cleared away in several steps.
        """
        self.clock = clock
        self.storage = storage
        self.max_payload_bytes = max_payload_bytes
        self.items = Items(self.storage, max_bytes, rows_per_slice)
        self.tables = {config.name: Table(config, clock, self.left, self.items.labels) for config in tables}
        names_of_copies = {table.config.copy_to for table in self.tables.values()}
        self.items.copies = {name: table for name, table in self.tables.items() if name in names_of_copies}
        self.trained = [table for name, table in self.tables.items() if name not in names_of_copies]
        """The tables that trainers and generators use: all tables except tables of copies."""
        self.lines = {name: Lines(clock) for name in self.tables}
        self.policy = Policy(set_at=clock())
        self.versions = StepTimes()
        """The times between policy versions."""
        self.on_policy: set[Callable[[], None]] = set()
        """Called after every change of the policy."""
        self.watchers: list[Watcher] = []
        """Notified of every change. A storage on disk adds its watcher here."""
        self.outstanding = OutstandingBatches(self.items, self.watchers)
        self.batches = self.outstanding.by_id
        """By id: the outstanding batches, each with its table."""
        self.known_keys: Remembered[frozenset[str]] = Remembered("keys", MAX_KNOWN_KEYS, self.watchers)
        """By key: the tables that the insert of the item named. A retry is recognized even when the item is gone."""
        self.answers: Remembered[tuple[bytes, bytes]] = Remembered(
            "answers", MAX_ANSWERS, self.watchers, most_bytes=MAX_ANSWER_BYTES
        )
        """By the number that a client gave its request: the digest of the request, and the answer."""
        all_remembered = (self.known_keys, self.outstanding.acknowledged, self.outstanding.requeued, self.answers)
        self.remembered: dict[str, Remembered[Any]] = {ids.kind: ids for ids in all_remembered}
        """By kind: the remembered ids of this kind."""
        self.damaged = 0
        """The number of items that were lost because their bytes in the storage had changed."""
        self._rules = InsertRules(self.items, self.known_keys, self.outstanding.why_not_closed, max_payload_bytes)
        self._closed = False
        self.extensions = extensions
        self._attach(extensions)

    def _attach(self, extensions: Sequence[Extension]) -> None:
        """Attaches the extensions to this buffer, and collects their hooks.

        A hook that gets a table is called only for tables that the extension concerns. The hooks that free bytes are
        called only for an extension that concerns at least one table of trainers or generators, because any other
        extension has no bytes to free.
        """
        for extension in extensions:
            extension.attach(self)
        self._why_not_hooks = hooks(extensions, "why_not")
        self._on_insert_hooks = hooks(extensions, "on_insert")
        self._progress_hooks = hooks(extensions, "progress")
        self.items.on_gone = hooks(extensions, "on_item_gone")
        for table in self.tables.values():
            concerned = [extension for extension in extensions if extension.concerns(table.config)]
            table.on_acknowledge = hooks(concerned, "on_acknowledge")
            table.on_lease = hooks(concerned, "on_lease")
        can_free = []
        for extension in extensions:
            if any(extension.concerns(table.config) for table in self.trained):
                can_free.append(extension)
        self.items.spares = hooks(can_free, "spares")
        self.items.spare_keys = hooks(can_free, "spare_keys")
        self.items.frees = hooks(can_free, "free")

    def table(self, name: str) -> Table:
        """The table of this name. Raises Refused if there is none."""
        try:
            return self.tables[name]
        except KeyError:
            raise not_found(f"no table {name[:100]!r}; {listed_tables(self.tables, name)}") from None

    def check_open(self) -> None:
        """Raises Refused if the server is shutting down."""
        if self._closed:
            raise closed("the server is shutting down")

    # ------------------------------------------------------------------------------------------------ insert

    def insert(self, batch: InsertBatch, deadline_at: float = math.inf) -> tuple[int, PendingInsert | None]:
        """Inserts the first rows of `batch`, as many as possible in one step.

        Returns the number of rows that are in their tables now. If this number is 0, the first row has to wait, and is
        also returned as a pending insert. To insert all rows, call this until no row is left. Raises Refused if the
        first row is refused. Then no row has entered a table.
        """
        self.check_open()
        if not batch.priorities:
            raise invalid(f"item {batch.keys[0]} names no table; {listed_tables(self.tables)}")
        tables = [self.table(name) for name in batch.priorities]
        for why_not in self._why_not_hooks:
            refusal = why_not(batch)
            if refusal is not None:
                raise refusal
        n = len(batch)
        rows = batch  # the first n rows
        if n > 1:
            n = insertable_at_once(batch, tables, self.items, self.lines)
            if n < len(batch):
                rows = batch[:n]
        self.items.clear_left(rows.nbytes)
        verdict = self._rules.verdict(rows, tables)
        if n > 1 and verdict is not None:  # the verdict may be true of only some rows, so decide on the first row alone
            n = 1
            rows = batch[:1]
            verdict = self._rules.verdict(rows, tables)
        # From here on, the verdict is true of all of `rows`, because it is None or there is only one row.
        if isinstance(verdict, Refused):
            self._count(verdict, tables, rows)
            raise verdict
        if isinstance(verdict, Known):
            self._count(verdict, tables, rows)
            return 1, None  # the row is a retry, and its first insert has put it into its tables
        is_blocked = verdict is not None  # of the verdicts, only Blocked is left
        # If another insert waits already, the new insert waits behind it. `rows` is a single row in this case, too,
        # because `insertable_at_once` returns 1 then.
        if is_blocked or any_insert_waits(tables, self.lines):
            pending = PendingInsert(rows, tables, self.clock(), deadline_at)
            for table in tables:
                self.lines[table.name].inserts.join(pending)
            return 0, pending
        changed = self._enter(rows, tables)
        self._progress(changed)
        return n, None

    def _count(self, verdict: Refused | Known, tables: Iterable[Table], insert: InsertBatch) -> None:
        """Counts an insert that is a retry or is outdated. Other inserts are not counted here."""
        if isinstance(verdict, Known):
            for table in tables:
                table.counters.duplicates += 1
        elif isinstance(verdict, Outdated):
            verdict.count(insert)

    def _enter(self, insert: InsertBatch, tables: Sequence[Table]) -> Sequence[Table]:
        """Inserts rows that the rules allow, and acknowledges the batches that they close.

        Returns the tables that have changed. Raises Refused if the server is full and cannot evict enough. Then nothing
        has changed.
        """
        why_full = self.items.why_full(insert.nbytes, tables)
        if why_full:
            names = ", ".join(table.name for table in tables)
            raise busy(f"the server is full: {why_full}, and {names} has too little to evict")
        self.items.free(insert.nbytes)
        evicted_before = [table.counters.evicted for table in tables]
        self.items.insert(insert, self.clock(), len(tables))
        changed = list(tables)
        for hook in self._on_insert_hooks:
            changed += hook(insert)
        for table in tables:
            table.insert(insert, insert.priorities[table.name])
            self.lines[table.name].inserts.moved()
        self.known_keys.remember(insert.keys, _set_of(tuple(insert.priorities)))
        for watcher in self.watchers:
            watcher.changed(insert.keys)
        self.items.make_room(tables)  # after the insert, so that the removers choose among old and new items
        for table, count_before in zip(tables, evicted_before, strict=True):
            if table.counters.evicted > count_before:
                evicted_keys = table.columns.absent(insert.keys)  # the new rows that the remover chose at once
                table.counters.evicted_on_arrival += len(evicted_keys)
                insert.evicted.extend((key, table.name) for key in evicted_keys)
        if insert.closes:
            # If all tables have evicted a new item at once, `items` does not have it any more.
            self.items.closing.update(key for key in insert.keys if key in self.items)
            changed += self.outstanding.close(insert.closes)
        return changed

    def extend(self, key: int, names: Collection[str], segment: Payload) -> Sequence[str] | None:
        """Appends a segment, which has columns with these names, to the payload of an item.

        Rows of the item that waited only for these columns can be drawn afterwards.

        Returns an empty sequence if the segment was appended. In all other cases, nothing has changed. If the item has
        some of these columns already, returns the names of those. If the item is gone, returns None. If the segment is
        not allowed, raises Refused.
        """
        self.check_open()
        if not names:
            raise invalid(f"a segment of item {key} names no column: name those that it has")
        tables = [table for table in self.trained if table.has_or_may_return(key)]
        if not tables:
            return None
        old_labels = self.items[key].labels
        present = old_labels.columns.intersection(names)
        if present:
            return sorted(present)
        try:
            labels = labels_of(old_labels.columns.union(names), old_labels.tags)
        except ValueError as error:
            raise invalid(f"item {key}: {error}") from None
        nbytes = sum(map(len, segment))
        cost = nbytes + labels.nbytes - old_labels.nbytes
        self.items.clear_left(cost)
        refusal = self._rules.why_cannot_grow(key, cost, tables)
        if refusal is not None:
            raise refusal
        self.items.free(cost)
        self.items.extend(key, labels, segment, nbytes)
        # A table of copies may exceed its bounds after this. Its next insert evicts the excess.
        completed = []  # the tables in which the item's row has waited, and now has all columns that it needs
        for table in self.tables.values():
            if table.extend(key, nbytes, cost, labels):
                completed.append(table)
        for watcher in self.watchers:
            watcher.changed([key])
        self._progress(completed)
        return ()

    # ------------------------------------------------------------------------------------------------ sample

    def sample(self, table_name: str, request: SampleRequest, deadline_at: float = math.inf) -> PendingSample:
        """Draws a batch, now or as soon as it may be drawn. Returns the request, which may still wait.

        When the request has ended, its value is the id of the batch, and the batch. Raises Refused if the request can
        never be served.
        """
        self.check_open()
        table = self.table(table_name)
        refusal = why_never(table, request)
        if refusal is not None:
            raise refusal
        pending = PendingSample(table, request, self.clock(), deadline_at)
        self.lines[table.name].samples.join(pending)
        self._progress([table])
        return pending

    def acknowledge(self, batch_id: int, *, sent: bool = False, lease: float = 0.0) -> bool:
        """Acknowledges a batch for its reader or, with `lease`, gives the reader a lease of the batch.

        Returns False if a row of the batch has become too stale, or if its version was undone. Then the batch is
        requeued instead. `sent`: True if the reader may have used the batch already. Then its rows are not checked.
        `lease`: the seconds of the lease; 0: no lease.
        """
        if not sent and self.outstanding.is_outdated(batch_id):
            self.requeue(batch_id)
            return False
        if lease:
            changed = self.outstanding.lease(batch_id, lease)
        else:
            changed = self.outstanding.acknowledge(batch_id)
        self._progress(changed)
        return True

    def requeue(self, batch_id: int, *, by_reader: bool = False) -> None:
        """Returns the rows of a batch to their table, as if they had not been drawn.

        `by_reader`: True if the reader has asked for this. Then the id is remembered, because the reader may ask again.
        """
        table = self.outstanding.requeue(batch_id, by_reader=by_reader)
        self._progress([table])

    def discard(self, keys: Iterable[int]) -> None:
        """Removes the items with these keys from all tables, because their payloads are damaged."""
        for key in keys:
            log.error("item %d is removed: its payload on disk is damaged", key)
            self.damaged += 1
            for table in self.tables.values():
                if key in table:
                    table.delete([key])
        self._progress(self.tables.values())

    def refuse_damaged(self, damage: DamagedPayloads) -> Refused:
        """Removes the damaged items. Returns the error for a client that may have a part of the response already."""
        self.discard(damage.keys)
        return try_again(f"{damage}, and removed now: ask again")

    def release(self, keys: Sequence[int]) -> None:
        """Removes a holder from each of these items. If this frees bytes, serves the requests that wait for bytes."""
        self.items.release(keys)
        self._progress(())

    def left(self, columns: Columns, slots: IntArray) -> None:
        """Clears away rows that leave their table.

        A few rows are cleared away immediately. Many rows are queued, and cleared away in slices later. Each table
        calls this function (`Table.on_leave`).
        """
        items = self.items
        columns.leave(slots)
        for watcher in self.watchers:
            watcher.changed(columns.key[slots])
        if slots.size > items.leaving.rows_per_slice:
            items.leaving.add(columns, slots)
            # Try the waiting inserts again, because an insert can clear away as many of these rows as it needs.
            items.freed = True
            # Normally the hooks hear of an item when it is cleared away (`items.release`). But a marked item may hold a
            # permit, which must become free now. So call the hooks now, with the marked items that are lost. A hook may
            # unmark items, so compute the list again for each hook.
            for hook in items.on_gone:
                lost: list[int] = []
                for extension in self.extensions:
                    lost.extend(key for key in extension.marked if items.lost(key))
                hook(lost)
        else:
            items.release(columns.free(slots))

    # ------------------------------------------------------------------------------------------------ waiting

    def time_out(self, pending: PendingInsert | PendingSample) -> None:
        """Ends `pending` at its deadline.

        The first sample of a line gets the available rows, if these are at least min_samples. Every other request fails
        with the reason of its wait.
        """
        if pending.done:
            return
        if isinstance(pending, PendingSample):
            self._time_out_sample(pending)
        else:
            pending.fail(deadline(self.why_waiting(pending)))
        self._progress(pending.tables)

    def _time_out_sample(self, pending: PendingSample) -> None:
        """Ends `pending` with the rows that are available or, if these are fewer than min_samples, with an error."""
        table = pending.tables[0]
        request = pending.request
        if self.lines[table.name].samples.head is pending:
            n = table.most_available(request)
        else:
            n = 0  # the available rows are for the first request of the line, even if it still waits for more rows
        if n >= request.min_samples:
            pending.finish(self.outstanding.draw(table, request, n))
        else:
            pending.fail(deadline(self.why_waiting(pending)))

    def why_waiting(self, pending: PendingInsert | PendingSample) -> str:
        """The reason why `pending` waits, in words.

        An example for a table `replay`: "replay: sampling blocked: items there: 3, wanted: 5 (size 3 < min_size 5)".
        """
        table = pending.tables[0]
        if isinstance(pending, PendingSample):
            what = "sampling"
            # A sample waits for num_samples until its deadline, even if min_samples are available.
            why = table.why_no_sample(pending.request, pending.request.num_samples)
            if why:
                why = f"{table.name}: sampling blocked: {why}"
        else:
            what = "inserting"
            why = self._rules.why_blocked(pending.insert, pending.tables)
        if why:
            return why + quiet_time(pending, self.clock(), self.extensions)
        # No rule holds the request back, so it waits for the requests before it.
        earlier = pending.lines[0].ahead_of(pending)
        return f"{table.name}: {what} blocked: {counted(earlier, 'request')} came first"

    def abandon(self, pending: PendingInsert | PendingSample) -> None:
        """Ends `pending`, because its client went away."""
        if not pending.done:
            pending.abandon()
            self._progress(pending.tables)

    def _progress(self, tables: Iterable[Table]) -> None:
        """Serves the lines of `tables`, and of every table that this changes, until nothing more can proceed."""
        # The names of the tables whose lines are to be served, in this order. This dict serves as an ordered set.
        to_serve = {table.name: None for table in tables}
        while to_serve or self.items.freed:
            if self.items.freed:  # bytes are free, and inserts into any table may have waited for them
                self.items.freed = False
                for name, lines in self.lines.items():
                    if lines.inserts:
                        to_serve[name] = None
                continue  # if no insert waits, `to_serve` may still be empty
            name = next(iter(to_serve))
            del to_serve[name]
            table = self.tables[name]
            lines = self.lines[name]
            changed = False
            while (sample := lines.samples.head) is not None:
                n = sample.request.num_samples
                if table.why_no_sample(sample.request, n):
                    break
                sample.finish(self.outstanding.draw(table, sample.request, n))
                changed = True
            while (insert := lines.inserts.head) is not None:
                if not self._serve_insert(insert, to_serve):
                    break
                changed = True
            if changed:  # serve this table once more, because its inserts may have made samples possible
                to_serve[name] = None
        for progress in self._progress_hooks:  # each serves the requests that wait for its extension
            progress()

    def _serve_insert(self, pending: PendingInsert, to_serve: dict[str, None]) -> bool:
        """Ends the first insert of a line, if it does not have to wait any more. Returns False if it still has to wait.

        Adds to `to_serve` the names of the tables whose lines this changes.
        """
        for table in pending.tables:  # the row enters all its tables at once, so it must be first in all their lines
            if self.lines[table.name].inserts.head is not pending:
                return False
        self.items.clear_left(pending.insert.nbytes)
        verdict = self._rules.verdict(pending.insert, pending.tables)
        if isinstance(verdict, Blocked):
            return False
        if verdict is None:
            try:
                changed = self._enter(pending.insert, pending.tables)
                to_serve.update(dict.fromkeys(table.name for table in changed))
            except Refused as refusal:
                verdict = refusal
        else:
            self._count(verdict, pending.tables, pending.insert)
        if isinstance(verdict, Refused):
            pending.fail(verdict)
        else:  # the row has entered its tables, or it is a retry of an insert that has entered them before
            pending.finish(None)
        # The insert has left the lines of all its tables, so another insert is the first now.
        to_serve.update(dict.fromkeys(pending.insert.priorities))
        return True

    # ------------------------------------------------------------------------------------------------ invariants

    def check_totals(self) -> None:
        """Asserts that all counts of items agree. A server calls this when it has started."""
        # The server calls neither `check` nor `check_each_item`, because they take longer. For 50,000 items in two
        # tables, `check_totals` takes about 1 % of the time of the restore, `check` 15 %, and `check_each_item` 43 %.
        for table in self.tables.values():
            table.check_totals()
            assert table.columns.current_version == self.policy.version, (table.name, self.policy)
        self.items.check()
        self.outstanding.check(self.tables.values())
        for extension in self.extensions:
            extension.check()

    def check(self) -> None:
        """Asserts what the modules of this folder state. Tests call it after each operation.

        It takes some passes over arrays, and no loop over items.
        """
        self.check_totals()
        for table in self.tables.values():
            table.check()
        for lines in self.lines.values():
            lines.inserts.check()
            lines.samples.check()
        for table in self.tables.values():
            self._check_waits(table)
        for kind in self.remembered.values():
            kind.check()

    def _check_waits(self, table: Table) -> None:
        """Asserts that the first requests of the table's lines cannot be served: otherwise they would not wait.

        An insert may still wait although it would be refused now, for example because a batch that it closes has ended.
        The end of this batch changes no table of the insert, so nothing has served the lines of these tables.
        """
        lines = self.lines[table.name]
        sample = lines.samples.head
        if sample is not None:
            assert table.why_no_sample(sample.request, sample.request.num_samples) is not None, sample.request
        insert = lines.inserts.head
        if insert is not None:
            is_first_everywhere = all(self.lines[other.name].inserts.head is insert for other in insert.tables)
            if is_first_everywhere:
                verdict = self._rules.verdict(insert.insert, insert.tables)
                assert verdict is not None, (table.name, insert.insert)

    def check_each_item(self) -> None:
        """Asserts the number of holders of each item, by a loop over items, rows and keys.

        Only tests call it, because it takes almost half as long as the restore of a server. Call it while no bytes are
        sent to a reader, because the reader also holds the items, and this function does not count readers.
        """
        # By key: one holder for each row that is leaving, that is here, that is retained, or that is in a batch.
        holders: Counter[int] = Counter(self.items.leaving.keys())
        for table in self.tables.values():
            table.columns.check_each_key()
            holders.update(table.columns.key[table.columns.occupied()].tolist())
            holders.update(list(table.columns.retained))  # a list of keys, because a Counter adds the values of a dict
        for _, batch in self.batches.values():
            holders.update(batch.keys.tolist())
        self.items.check_each(holders)
        self.storage.check({key: item.nbytes for key, item in self.items.items()})

    def close(self) -> None:
        """Refuses all inserts and samples from now on, and ends every wait."""
        self._closed = True
        refusal = closed("the server is shutting down")
        for lines in self.lines.values():
            for pending in [*lines.inserts, *lines.samples]:
                if not pending.done:  # the `on_done` of an earlier request may have ended this request, too
                    pending.fail(refusal)
        for extension in self.extensions:
            for line in extension.lines.values():
                for waiting in line:
                    waiting.fail(refusal)

    # ------------------------------------------------------------------------------------- update, delete, tables

    def update_priorities(self, table_name: str, keys: KeyArray, priorities: FloatArray) -> tuple[int, list[int]]:
        """Sets all priorities or, if one is invalid, none. Returns how many were set, and the missing keys."""
        table = self.table(table_name)
        if keys.size != priorities.size:
            raise invalid(f"{keys.size} keys and {priorities.size} priorities")
        if not are_priorities(priorities):
            for row in range(priorities.size):
                if not are_priorities(priorities[row : row + 1]):
                    raise bad_priority(priorities[row], f"key {int(keys[row])}, table {table_name!r}")
        result = table.update_priorities(keys, priorities)
        for watcher in self.watchers:
            watcher.changed(keys)
        self._progress([table])  # an item of priority 0 may have become selectable
        return result

    def delete(self, table_name: str, keys: Sequence[int]) -> list[int]:
        """Removes items from a table. Returns the keys that are not in the table."""
        table = self.table(table_name)
        missing = table.delete(keys)
        self._progress([table])
        return missing

    def roll_back(self, keys: Iterable[int]) -> set[int]:
        """Undoes inserts that could not be written to disk. Returns the keys of the undone inserts.

        The inserts of two kinds of items are not undone: items that were drawn since their insert, because readers may
        use them already, and items whose insert has closed batches, because these batches stay acknowledged.
        """
        undone: set[int] = set()
        for key in keys:
            item = self.items.get(key)
            holding = [table for table in self.tables.values() if key in table]
            if item is None or item.forwarded:  # the item is gone, or it was drawn: only drawn items are forwarded
                continue
            # If the item has more holders than its rows in these tables, a batch or a reader may hold it.
            if item.holders > len(holding) or key in self.items.closing:
                continue
            # If the batch of a draw was acknowledged, it holds the item no more, but the row still counts the draw.
            draws = [table.columns.times_sampled[table.columns.slot(key)] for table in holding]
            if any(draws):
                continue
            undone.add(key)
            self.known_keys.forget(key)
            for table in holding:
                table.roll_back([key])
        self._progress(self.tables.values())
        return undone

    def reset(self, table_name: str = "") -> int:
        """Empties one table, or all tables if `table_name` is "", and sets their counters to 0.

        Returns how many items were removed.
        """
        tables = [self.table(table_name)] if table_name else list(self.tables.values())
        for watcher in self.watchers:
            for table in tables:
                # Notify of the keys of reserved rows here. For all other rows, `left` notifies the watchers.
                watcher.changed(list(table.columns.reserved))
                watcher.scope_changed(table.name, "")
        for table in tables:
            for extension in self.extensions:
                extension.on_reset(table)
        removed = sum(table.reset() for table in tables)
        self._progress(tables)
        return removed

    def update_table(self, table_name: str, changes: dict[str, Any]) -> Table:
        """Changes the configuration of a table while the server runs. Items stay if the new configuration allows them.

        Counters stay, too. `changes`: name of a setting -> its new value. Raises Refused if a setting cannot change
        while the server runs, or if the new configuration is invalid.
        """
        table = self.table(table_name)
        fixed = changes.keys() & {"name", "forward_to", "copy_to", "seed", "retain_consumed"}
        if fixed:
            raise invalid(f"{', '.join(sorted(fixed))} of a table cannot change while the server runs")
        try:
            # The dump has only settings that were set. If it had a default value that the new type of a sampler or
            # limiter ignores, the validation would refuse this value.
            settings = table.config.model_dump(exclude_unset=True) | changes
            config = TableConfig.model_validate(settings)
        except ValidationError as error:
            raise invalid(f"table {table_name!r}: {explain(error)}") from error
        tags = table.tags_for(config)
        if config.balance is not None:
            value_count = len(tags[config.balance.tag])
            if value_count > MAX_BALANCED:
                raise invalid(
                    f"table {table_name!r}: balance: its items have {value_count} values of the tag "
                    f"{config.balance.tag!r}, and at most {MAX_BALANCED} can be balanced"
                )
        table.configure(config, tags)
        self._refuse_hopeless(table)
        table.drop_stale()
        # Serve all tables, because an insert that was refused here may have been the first in lines of other tables.
        self._progress(self.tables.values())
        return table

    def _refuse_hopeless(self, table: Table) -> None:
        """Refuses the waiting requests of a table that can never be served with the new configuration of the table."""
        for insert in self.lines[table.name].inserts:
            refusal = self._rules.why_invalid(insert.insert, insert.tables)
            if refusal is not None:
                insert.fail(refusal)
        for sample in self.lines[table.name].samples:
            refusal = why_never(table, sample.request)
            if refusal is not None:
                sample.fail(refusal)

    # ------------------------------------------------------------------------------------------------ policy

    def set_policy_version(
        self,
        version: int,
        weights: str,
        rollback: bool = False,
        shard_index: ShardIndex | None = None,
        state: str = "",
    ) -> Policy:
        """Sets the current version, drops items that have become too stale, and lets waiting generators go on.

        `weights`: the location of the weights; "": the trainer names none. `rollback`: True if the trainer goes back to
        `version`. `shard_index`, `state`: as in PolicyChange. Raises Refused if the version is not allowed. Then
        nothing has changed.
        """
        if not 0 <= version <= MAX_VERSION:
            raise invalid(f"policy version {version}: must be from 0 to {MAX_VERSION}")
        change = PolicyChange(
            before=self.policy.version, version=version, rollback=rollback, shard_index=shard_index, state=state
        )
        if version < change.before and not rollback:
            raise invalid(
                f"policy version {version} is below the current {change.before}; pass rollback=True (--rollback) "
                f"if the trainer really went back"
            )
        for extension in self.extensions:
            refusal = extension.why_no_policy(change)
            if refusal is not None:
                raise refusal
        # If the trainer saves a state after it has set the version, it sends the same version again to name the state.
        # This is no new step.
        only_names_state = bool(state) and version == change.before
        if not only_names_state:
            self.versions.beat(self.clock())
        self.policy = Policy(version, weights, set_at=self.clock())
        if rollback:
            rise = -1  # any number below 0 makes the flow begin anew
        else:
            rise = version - change.before
        for table in self.tables.values():
            table.set_policy_version(version)
            table.flow.move(rise)
            table.drop_stale()
        for extension in self.extensions:
            extension.on_policy(change)
        # The new version may outdate waiting inserts. Refuse these inserts even if they are not the first in a line.
        for table in self.tables.values():
            for pending in self.lines[table.name].inserts:
                refusal = self._rules.why_refused(pending.insert, [table])
                if refusal is not None:
                    self._count(refusal, [table], pending.insert)
                    pending.fail(refusal)
        self._progress(self.tables.values())
        for callback in list(self.on_policy):  # a copy, because a callback may change the set
            callback()
        return self.policy
