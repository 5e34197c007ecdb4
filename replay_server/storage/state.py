"""State: turns the changes of a buffer into records, and fills a new buffer from the records of an older one.

Outstanding batches are recorded as if they had not been drawn. After a crash no reader can acknowledge them any more,
so the restarted server has their items in their tables again. Leased batches are the exception: a lease has a record of
its own, and from this record the restarted server draws the batch again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_protos.labels import Labels, pack_labels
from replay_protos.words import counted
from replay_server.storage import records
from replay_server.storage.records import (
    CLOCK,
    FORWARDED,
    ITEM,
    LEASE,
    NUMBER,
    POLICY,
    REMEMBERED,
    RETAINED,
    RETAINED_WITH_PERMIT,
    ROW,
    SCOPE,
    TABLE,
    Delta,
    ItemRecords,
    RememberedIds,
    State,
    pack,
)
from replay_server.tables.buffer import Policy, ReplayBuffer
from replay_server.tables.columns import FloatArray, IntArray, KeyArray
from replay_server.tables.extensions.history import History
from replay_server.tables.items import Item
from replay_server.tables.table import Table

log = logging.getLogger("replay_server")

ITEMS_PER_SLICE = 1024
"""The number of items whose records are collected at once, before other requests run. It takes some 3 ms of CPU."""
_NO_OWNERS = np.zeros(0, np.int64)
_NO_ROWS = np.zeros(0, ROW)
_REPORTED = (SCOPE, LEASE)
"""The first bytes of the names of the state records whose changes the buffer reports. Of all other state records, the
collector itself finds those that have changed: it compares them with the records last written."""


class ChangeCollector:
    """Collects the changes of a buffer, as one of its watchers, and makes Deltas of them.

    The Delta of `collect`, together with the slices before it, leads from the state recorded last to the present state.
    """

    def __init__(self, buffer: ReplayBuffer, state: State | None = None) -> None:
        """`state` is the recorded state; None: nothing is recorded yet."""
        state = State() if state is None else state
        self._buffer = buffer
        self._offset = records.time_offset(state.values, buffer.clock())
        """Seconds to add to times of the buffer's clock to get recorded times."""
        self._clock_record = [records.boot_id(), self._offset]
        self._changed: set[int] = set()
        """The keys of items that have changed since they were last collected."""
        self._many_changed: list[KeyArray] = []
        """As `_changed`, for changes of many items at once: one array of keys for each such change."""
        # The first Delta must delete the outdated records of scopes. `_state_records` looks for them only if a scope
        # has changed, so the collector begins with the changed scope "", a name that no scope has.
        self._changed_scopes = {(name, "") for name in buffer.tables}
        self._changed_leases = set(buffer.outstanding.leased)  # the first Delta contains all leases
        self._scope_record_names = {(table, scope): name for name, (table, scope, _) in state.named(SCOPE).items()}
        """(table, scope) -> the name of the record of this scope."""
        # A server in memory begins a checkpoint without a recorded state, but its tables may have scopes already.
        self._changed_scopes |= self._present_scopes() - self._scope_record_names.keys()
        self._unrecorded_ids: dict[str, list[int]] = {kind: [] for kind in buffer.remembered}
        """Kind of remembered ids -> the ids that are in no record yet."""
        self._id_records: dict[str, deque[tuple[bytes, int]]] = {kind: deque() for kind in buffer.remembered}
        """Kind of remembered ids -> (name, newest id) of each record, the oldest record first. A record is deleted when
        the buffer has forgotten its newest id."""
        self._note_id_records(RememberedIds.all_of(state))
        self._unwritten: dict[bytes, bytes | None] = dict.fromkeys(state.damaged)
        """Changes of state records that the next Delta has to contain, because they could not be written. At first,
        these are the deletions of damaged records."""
        self._written: dict[bytes, bytes] = {}
        """The state records that were last written, except the records of scopes, leases and remembered ids."""
        for name, record in state.state_records.items():
            if not name.startswith((*_REPORTED, REMEMBERED)):
                self._written[name] = record
        self._record_numbers = count(_first_free_number(state))
        """The numbers for new records of scopes and remembered ids."""
        self._table_numbers = _numbers_of_tables(buffer, state)
        """Name of a table -> the number of the table in the records of rows."""
        self.changed(state.skipped)  # the first Delta deletes the records of damaged items

    # ------------------------------------------------------------------------------------------------ watching
    # The methods of a Watcher, which the buffer calls.

    def changed(self, keys: Iterable[int] | KeyArray) -> None:
        """Notes that the records of these items may be outdated."""
        if isinstance(keys, np.ndarray):
            if keys.size > ITEMS_PER_SLICE:  # to add a million keys to a set would hold up all clients
                self._many_changed.append(keys)
                return
            keys = keys.tolist()
        self._changed.update(keys)

    def remembered(self, kind: str, ids: Iterable[int]) -> None:
        self._unrecorded_ids[kind].extend(ids)

    def scope_changed(self, table: str, scope: str) -> None:
        self._changed_scopes.add((table, scope))

    def lease_changed(self, batch_id: int) -> None:
        self._changed_leases.add(batch_id)

    # ------------------------------------------------------------------------------------------------ collecting

    def slices(self) -> Iterator[Delta]:
        """Yields slices until few enough changed items are left for one call of `collect`.

        A slice is a Delta with the records of some changed items, as of the moment in which the caller asks for the
        slice. If an item changes after its slice, a later slice or the Delta of `collect` has the item again. So all
        slices, and then the Delta of `collect`, lead to the state at the moment of `collect`. Without this Delta, the
        slices are no consistent state.
        """
        # Items may change as fast as they are collected. So there are at most twice as many slices as are needed now.
        for _ in range(2 * self.pending() // ITEMS_PER_SLICE):
            if self.pending() <= ITEMS_PER_SLICE:
                return
            if self._many_changed:
                keys = self._many_changed.pop()
                if keys.size > ITEMS_PER_SLICE:  # the rest is for later slices
                    self._many_changed.append(keys[ITEMS_PER_SLICE:])
                yield self._items_delta(keys[:ITEMS_PER_SLICE].tolist())
            else:
                yield self._items_delta({self._changed.pop() for _ in range(ITEMS_PER_SLICE)})

    def _items_delta(self, keys: Collection[int]) -> Delta:
        """The records of these items as of now. Items that need no record any more are listed as removed."""
        present = sorted(key for key in keys if key in self._buffer.items)
        items = self.item_records(np.array(present, dtype=np.uint64))
        removed: list[int] = []
        if len(items) < len(keys):  # some items are gone, or only outstanding batches hold them
            recorded: list[int] = items.items["key"].tolist()
            removed = sorted(set(keys).difference(recorded))
        return Delta(items, removed)

    def collect(self) -> Delta:
        """Returns all changes that no Delta has yet, as of now."""
        keys = self._changed
        self._changed = set()  # for changes after this call
        for many_keys in self._many_changed:
            keys.update(many_keys.tolist())
        self._many_changed.clear()
        delta = self._items_delta(keys)
        changed_records = dict(self._state_records())
        # If a record has changed since its last change could not be written, the newer change is taken.
        delta.state_records = self._unwritten | changed_records
        self._unwritten = {}
        for kind, ids in self._unrecorded_ids.items():
            if ids:
                self._unrecorded_ids[kind] = []
                entry = self.remembered_ids(kind, ids)
                if entry.ids:  # empty if all of the ids are forgotten already
                    delta.remembered.append(entry)
            remembered = self._buffer.remembered[kind]
            id_records = self._id_records[kind]
            # Ids are forgotten oldest first: if the newest id of a record is forgotten, all its ids are.
            while id_records:
                name, newest_id = id_records[0]
                if newest_id in remembered:
                    break
                id_records.popleft()
                delta.state_records[name] = None
        return delta

    def remembered_ids(self, kind: str, ids: Iterable[int]) -> RememberedIds:
        """Makes a new record of those `ids` that are still remembered."""
        remembered = self._buffer.remembered[kind]
        still_remembered = [id for id in ids if id in remembered]
        answers: list[Any] | None = None
        if remembered.has_bytes:
            answers = [remembered.get(id) for id in still_remembered]
        return RememberedIds(
            name=REMEMBERED + NUMBER % next(self._record_numbers),
            kind=kind,
            ids=still_remembered,
            answers=answers,
        )

    def pending(self) -> int:
        """The most items that the next Delta can have. An item that changed several times may count several times."""
        return len(self._changed) + sum(keys.size for keys in self._many_changed)

    def written(self, delta: Delta) -> None:
        """Notes that `delta` is written, so that later Deltas leave out what has not changed since then."""
        for name, record in delta.state_records.items():
            if record is None:
                self._written.pop(name, None)
            elif not name.startswith(_REPORTED):
                self._written[name] = record
        self._note_id_records(delta.remembered)

    def _note_id_records(self, entries: Iterable[RememberedIds]) -> None:
        """Notes that these records of remembered ids are written."""
        for entry in entries:
            newest_id = entry.ids[-1]
            self._id_records[entry.kind].append((entry.name, newest_id))

    def not_written(self, delta: Delta) -> None:
        """Notes that `delta` could not be written, so that the next Delta contains its changes.

        If slices and the Delta of `collect` could not be written, call this for the slices first. Each call replaces
        the state records that the next Delta has to contain, and slices have no state records.
        """
        self.changed(delta.items.items["key"].astype(np.uint64))
        self.changed(delta.removed)
        # The next Delta makes a new record of these ids, because the buffer may have forgotten some of them by then: it
        # forgets the keys of inserts that it rolls back. They go before all ids that were noted since, which are newer.
        for entry in delta.remembered:
            self._unrecorded_ids[entry.kind][:0] = entry.ids
        # Only deletions, and the records whose changes the buffer reports, must be kept. All other records differ from
        # the records last written, so the next Delta contains them in any case.
        self._unwritten = {
            name: record for name, record in delta.state_records.items() if record is None or name.startswith(_REPORTED)
        }

    def item_records(self, keys: KeyArray) -> ItemRecords:
        """The records of the items with these keys (n,), in the same order. All keys must be in the buffer.

        Items that only batches hold are left out.
        """
        buffer = self._buffer
        table_owners, table_rows = self._rows_in_tables(keys)
        assert table_owners.size == 0 or table_owners.max() < keys.size, "a row belongs to no item"
        in_a_table = np.zeros(keys.size, dtype=np.bool_)
        in_a_table[table_owners] = True
        # (n,): the index that each item in a table has after the other items are left out. The entries of these other
        # items mean nothing.
        new_index = np.cumsum(in_a_table) - 1
        kept_keys = keys[in_a_table]
        items = list(map(buffer.items.__getitem__, kept_keys.tolist()))
        forwarded_owners, forwarded_rows = self._forwarded_rows(items)
        rows = np.concatenate([table_rows, forwarded_rows], dtype=ROW)
        owners = np.concatenate([new_index[table_owners], forwarded_owners])
        order = np.argsort(owners, kind="stable")  # sorts all rows by their items

        heads = np.zeros(kept_keys.size, dtype=ITEM)
        heads["key"] = kept_keys
        for name in ("policy_version", "nbytes", "inserted_at"):
            values = map(attrgetter(name), items)
            heads[name] = np.fromiter(values, dtype=ITEM[name], count=len(items))
        heads["inserted_at"] += self._offset
        for extension in buffer.extensions:
            marked = extension.marked  # the keys of the items that the extension has marked, because they hold permits
            if marked:
                is_marked = [key in marked for key in kept_keys.tolist()]
                heads["permit"][is_marked] = extension.mark
        packed_labels: list[bytes] = []
        if buffer.items.labelled:
            packed_labels = [pack_labels(item.labels) for item in items]
            heads["labels"] = list(map(len, packed_labels))
        return ItemRecords(
            items=heads,
            rows=rows[order],
            owners=owners[order],
            labels=np.frombuffer(b"".join(packed_labels), np.uint8),
        )

    def _rows_in_tables(self, keys: KeyArray) -> tuple[IntArray, npt.NDArray[np.void]]:
        """Returns (owners, rows) for the rows (m,) that the items of `keys` (n,) have in tables.

        The owner (m,) of a row is the index in `keys` of its item.
        """
        owners = [_NO_OWNERS]
        rows = [_NO_ROWS]
        for table in self._buffer.tables.values():
            table_owners, table_rows = rows_in_table(self._buffer, table, keys)
            if table_owners.size:
                # `rows_in_table` does not fill the column `table`, and its times are of the buffer's clock.
                table_rows["table"] = self._table_numbers[table.name]
                table_rows["inserted_at"] += self._offset
                owners.append(table_owners)
                rows.append(table_rows)
        return np.concatenate(owners), np.concatenate(rows, dtype=ROW)

    def _forwarded_rows(self, items: Sequence[Item]) -> tuple[IntArray, npt.NDArray[np.void]]:
        """Returns (owners, rows), with one row (m,) for each item and each table that has forwarded the item.

        The owner (m,) of a row is the index in `items` of its item. Such a row does not say that the item is in the
        table. It says that the table must not forward the item again after a restart.
        """
        owners: list[int] = []
        table_numbers: list[int] = []
        for index, item in enumerate(items):
            for name in item.forwarded:
                owners.append(index)
                table_numbers.append(self._table_numbers[name])
        rows = np.zeros(len(table_numbers), dtype=ROW)
        rows["table"] = table_numbers
        rows["kind"] = FORWARDED
        return np.array(owners, dtype=np.int64), rows

    def _state_records(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Yields name and bytes of each state record that has changed. None in the place of the bytes deletes it."""
        buffer = self._buffer
        policy = buffer.policy
        values: dict[bytes, Any] = {
            CLOCK: self._clock_record,
            POLICY: [policy.version, policy.weights, policy.set_at + self._offset],
        }
        for table_name, table in buffer.tables.items():
            number = self._table_numbers[table_name]
            # The counters, the rate limiter and the random state of the table. The name of the table is there, too,
            # because the name of the record has only the number of the table.
            values[TABLE + b"%d" % number] = table.state_dict()
        for extension in buffer.extensions:
            if extension.record:
                values[extension.record] = extension.state_dict(self._offset)
        # The records of tables and extensions that are no longer configured are deleted.
        for name in self._written.keys() - values.keys():
            yield name, None
        for name, value in values.items():
            record = pack(value)
            if self._written.get(name) != record:
                yield name, record
        if self._changed_scopes:
            yield from self._scope_records()
        for batch_id in sorted(self._changed_leases):
            yield LEASE + b"%d" % batch_id, self._lease_record(batch_id)
        self._changed_leases.clear()

    def _lease_record(self, batch_id: int) -> bytes | None:
        """The record of a lease; None: the lease has ended."""
        outstanding = self._buffer.outstanding
        seconds = outstanding.leased.get(batch_id)
        if seconds is None:
            return None
        table, batch = outstanding.by_id[batch_id]
        keys = batch.keys
        if batch.epoch != table.epoch:  # a reset has begun a new epoch, and has removed the items of this batch
            keys = keys[:0]
        packed_keys = keys.astype("<u8").tobytes()
        return pack([batch_id, table.name, batch.scope, seconds, packed_keys])

    def _present_scopes(self) -> set[tuple[str, str]]:
        """(table name, scope) for each scope that a table remembers."""
        present = set()
        for table in self._buffer.tables.values():
            for scope in table.scopes:
                present.add((table.name, scope))
        return present

    def _scope_records(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Yields the deletion of each outdated record of a scope, and a new record of each changed scope.

        Scopes are restored in the order of the names of their records, and the scope used last must come last. So a
        changed scope gets a new record, with a new highest number in its name. Scopes of a table that have changed
        between the same two Deltas get their new records in the order of their last use, the newest last.
        """
        changed = self._changed_scopes
        self._changed_scopes = set()
        buffer = self._buffer
        present = self._present_scopes()
        # The records of scopes that the tables have forgotten, and the old records of changed scopes.
        outdated = (self._scope_record_names.keys() - present) | (self._scope_record_names.keys() & changed)
        for table_and_scope in outdated:
            record_name = self._scope_record_names.pop(table_and_scope)
            yield record_name, None
        for table_name, table in buffer.tables.items():
            for scope in table.scopes:  # from the scope used longest ago to the current one
                if (table_name, scope) not in changed:
                    continue
                # Outstanding batches are recorded as if they had not been drawn.
                keys = table.scopes.keys_under(scope) - buffer.outstanding.drawn_in_scope(table, scope)
                packed_keys = np.array(sorted(keys), dtype="<u8").tobytes()
                record_name = SCOPE + NUMBER % next(self._record_numbers)
                self._scope_record_names[table_name, scope] = record_name
                yield record_name, pack([table_name, scope, packed_keys])


def _first_free_number(state: State) -> int:
    """The number after the highest number in the names of records of scopes and of remembered ids."""
    # `state.values` comes first, because it fills `state.damaged`. Damaged records have numbers, too.
    names = state.values.keys() | state.damaged
    highest = 0
    for name in names:
        if name.startswith((SCOPE, REMEMBERED)):
            _, _, number = name.rpartition(b"/")
            highest = max(highest, int(number))
    return highest + 1


def _numbers_of_tables(buffer: ReplayBuffer, state: State) -> dict[str, int]:
    """Table name -> number, for each table of the buffer: the recorded number or, for a new table, a free number."""
    recorded = {name: number for number, name in state.tables.items()}
    first_free = max(state.tables, default=0) + 1
    numbers: dict[str, int] = {}
    for index, name in enumerate(buffer.tables):
        free = first_free + index  # no other table of the buffer gets this number
        numbers[name] = recorded.get(name, free)
    return numbers


def rows_in_table(buffer: ReplayBuffer, table: Table, keys: KeyArray) -> tuple[IntArray, npt.NDArray[np.void]]:
    """Returns (owners, rows) for the rows (m,) that `table` has or retains of the items of `keys` (n,).

    The owner (m,) of a row is the index in `keys` of its item. The rows are as if outstanding batches were requeued.
    Times are seconds of the buffer's clock. The caller fills the column `table`.
    """
    columns = table.columns
    retained = columns.retained
    slots = columns.find_with_reserved(keys)  # (n,); -1: the item is not in the table
    if retained:
        absent = slots < 0
        slots[absent] = [retained.get(key, -1) for key in keys[absent].tolist()]
    owners = np.flatnonzero(slots >= 0)
    if not owners.size:
        return owners, _NO_ROWS
    row_slots = slots[owners]
    row_keys = keys[owners]
    rows = np.zeros(owners.size, dtype=ROW)
    for name in ("order", "times_sampled", "priority", "inserted_at"):
        rows[name] = getattr(columns, name)[row_slots]
    drawn_keys, draws = buffer.outstanding.drawn(table)  # the keys are ascending
    if drawn_keys.size:
        # Subtract the draws of outstanding batches. `indexes` (m,) is where `drawn_keys` has the key of each row. If
        # another key is there, no outstanding batch has the row.
        indexes = np.searchsorted(drawn_keys, row_keys).clip(max=drawn_keys.size - 1)
        is_drawn = drawn_keys[indexes] == row_keys
        rows["times_sampled"] -= np.where(is_drawn, draws[indexes], 0)
    history = History.of(buffer) if retained else None
    if history is not None:
        for row, key in enumerate(row_keys.tolist()):
            if key in retained:
                # A retained row was drawn exactly once. So its `times_sampled` need not be recorded, and this field has
                # the number of its consumption instead.
                consumed = history.rows[table.name, key]
                rows["times_sampled"][row] = consumed.number
                rows["kind"][row] = RETAINED_WITH_PERMIT if consumed.permit else RETAINED
    return owners, rows


def restore(buffer: ReplayBuffer, state: State) -> None:
    """Fills a new buffer from a state.

    Drops or evicts items that do not fit the buffer's configuration, and logs how many. Raises ValueError if a record
    is damaged that the server needs.
    """
    now = buffer.clock()
    values = state.values
    offset = records.time_offset(values, now)
    if POLICY in values:
        version, weights, set_at = values[POLICY]
        buffer.policy = Policy(version, weights, min(set_at - offset, now))  # `min`: the clock may have been set back
        for table in buffer.tables.values():
            table.set_policy_version(version)
    for value in state.named(TABLE).values():
        if value["name"] in buffer.tables:
            buffer.tables[value["name"]].load_state_dict(value)
    for extension in buffer.extensions:
        extension.load_state_dict(values.get(extension.record), offset, buffer.policy.version)
    for table_name, scope, packed_keys in state.named(SCOPE).values():
        if table_name in buffer.tables:
            scope_keys = np.frombuffer(packed_keys, dtype="<u8").tolist()
            buffer.tables[table_name].scopes.load(scope, scope_keys)
    _restore_items(buffer, state, offset)
    for entry in RememberedIds.all_of(state):
        remembered = buffer.remembered[entry.kind]
        if entry.answers is None:
            remembered.load(entry.ids)
        else:
            for id, answer in zip(entry.ids, entry.answers, strict=True):
                remembered.load([id], tuple(answer))
    # The readers of leased batches may be using the items already. So these batches are drawn first, and only then the
    # tables drop items that are stale or too many.
    for batch_id, table_name, scope, seconds, packed_keys in state.named(LEASE).values():
        table_of_lease = buffer.tables.get(table_name)
        keys = np.frombuffer(packed_keys, dtype="<u8").astype(np.uint64)
        buffer.outstanding.restore_lease(batch_id, table_of_lease, keys, scope, seconds)
    _fit_to_configuration(buffer)
    buffer.items.freed = False  # no insert waits for the bytes that were freed so far
    buffer.damaged += len(state.skipped)


def _fit_to_configuration(buffer: ReplayBuffer) -> None:
    """Removes the loaded items that the configuration does not allow any more, and logs how many are lost or evicted.

    Stale items are not logged, because their tables count them.
    """
    for extension in buffer.extensions:
        extension.reconcile()
    for table in buffer.tables.values():
        size_before = table.size
        # Evicts items. Returns the number of items that the counters count, but that were not loaded.
        lost = table.reconcile()
        if lost:
            log.warning("table %r: %s lost", table.name, counted(lost, "item"))
        evicted = size_before - table.size
        if evicted:
            log.warning("table %r: %s evicted, for its bounds are lower now", table.name, counted(evicted, "item"))
        table.drop_stale()
    bytes_before = buffer.items.bytes
    # Both log lines have the form of `why_full`: the bytes of the items + the bytes to come (0) > max_bytes.
    why_full = buffer.items.why_full(0, buffer.trained)
    if why_full:  # eviction cannot make the items fit, so nothing is evicted
        log.warning("%s: 0 items evicted, for too few can be", why_full)
        return
    evicted = buffer.items.make_room(buffer.trained)
    if evicted:
        items = counted(evicted, "item")
        log.warning("%d bytes + 0 > max_bytes %s: %s evicted", bytes_before, buffer.items.max_bytes, items)


def _restore_items(buffer: ReplayBuffer, state: State, offset: float) -> None:
    """Adds the items of a state, and their rows in tables. Items of tables that are not configured are dropped.

    `offset`: the seconds to subtract from recorded times to get times of the buffer's clock.
    """
    now = buffer.clock()
    items = state.items.items
    rows = state.items.rows
    owners = state.items.owners
    keys = items["key"]
    labels = state.items.labels_of_items()
    holders = np.zeros(keys.size, dtype=np.int64)  # (n,): the number of tables that hold each item
    table_names = state.tables  # by the numbers that the rows use
    # If the clock was set back, a time may lie in the future. It then becomes now.
    rows_inserted_at = np.minimum(rows["inserted_at"] - offset, now)
    items_inserted_at: list[float] = np.minimum(items["inserted_at"] - offset, now).tolist()
    is_forwarded = rows["kind"] == FORWARDED  # (m,): such a row only says that the table has forwarded the item
    for number, name in table_names.items():
        chosen = np.flatnonzero(~is_forwarded & (rows["table"] == number))  # the indexes of the rows of this table
        if not chosen.size:
            continue
        by_order = np.argsort(rows["order"][chosen], kind="stable")
        chosen = chosen[by_order]  # in the order in which the rows were inserted
        chosen_owners = owners[chosen]  # the indexes of their items
        table = buffer.tables.get(name)
        if table is None:
            dropped = counted(int(chosen_owners.size), "item")
            log.warning("table %r is not configured any more: %s dropped", name, dropped)
            for watcher in buffer.watchers:  # so that the next Delta rewrites or deletes the records
                watcher.changed(keys[chosen_owners].tolist())
            continue
        holders[chosen_owners] += 1
        chosen_labels: list[Labels] | None = None
        if labels is not None:
            chosen_labels = [labels[owner] for owner in chosen_owners.tolist()]
        _restore_rows(buffer, table, items[chosen_owners], rows[chosen], rows_inserted_at[chosen], chosen_labels)

    assert not buffer.items, "a state is restored into a buffer that has items"
    sizes: list[int] = items["nbytes"].tolist()
    versions: list[int] = items["policy_version"].tolist()
    loaded = list(map(Item, sizes, versions, items_inserted_at, holders.tolist()))
    forwarded_owners: list[int] = owners[is_forwarded].tolist()
    forwarded_tables: list[int] = rows["table"][is_forwarded].tolist()
    for owner, number in zip(forwarded_owners, forwarded_tables, strict=True):
        if table_names.get(number) in buffer.tables:
            item = loaded[owner]
            item.forwarded = (*item.forwarded, table_names[number])
    buffer.items.update(zip(keys.tolist(), loaded, strict=True))
    if labels is not None:
        buffer.items.label(keys.tolist(), labels)
    for extension in buffer.extensions:
        if extension.mark:
            is_marked = items["permit"] == extension.mark
            extension.load_marked(keys[is_marked].tolist())
    buffer.items.bytes += int(items["nbytes"].sum())  # the bytes of labels were added above, by `label`
    # Remove the items that are in no table of the configuration. An item is removed when its last holder releases it,
    # so these items get a holder for a moment.
    unheld = keys[holders == 0].tolist()
    buffer.items.hold(unheld)
    for watcher in buffer.watchers:
        watcher.changed(unheld)
    buffer.items.release(unheld)


def _restore_rows(
    buffer: ReplayBuffer,
    table: Table,
    items: npt.NDArray[np.void],
    rows: npt.NDArray[np.void],
    inserted_at: FloatArray,
    labels: list[Labels] | None,
) -> None:
    """Adds rows (n,) to their table, in the order in which they are given. `items` (n,) has the item of each row.

    Retained rows are first added like all others. Then they are retained again, as they were before the restart.
    """
    keys = items["key"]
    retained = rows["kind"] >= RETAINED
    # A retained row was drawn once. Its record has the number of its consumption in the place of `times_sampled`.
    times_sampled = np.where(retained, 1, rows["times_sampled"])
    table.add_rows(
        keys=keys.tolist(),
        priorities=rows["priority"],
        policy_versions=items["policy_version"],
        sizes=items["nbytes"],
        orders=rows["order"],
        inserted_at=inserted_at,
        times_sampled=times_sampled,
        labels=labels,
    )
    if retained.any():
        history = History.of(buffer)
        assert history is not None
        retained_keys = keys[retained]
        retained_rows = rows[retained]
        with_permit = retained_rows["kind"] == RETAINED_WITH_PERMIT
        table.retain(retained_keys)
        history.retain_again(
            table, retained_keys.tolist(), retained_rows["times_sampled"].tolist(), with_permit.tolist()
        )
