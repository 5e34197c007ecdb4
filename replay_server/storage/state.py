"""State: turns the changes of a buffer into records, and fills a new buffer from the records of an older one.

Outstanding batches are recorded as if they had not been drawn. After a crash no reader can acknowledge them any more,
so their items are in their table again. Leased batches are the exception: a lease has a record of its own, by which the
restarted server draws the batch again.
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
"""Items whose records are collected before other requests run. This number takes some 3 ms of CPU."""
_NO_OWNERS = np.zeros(0, np.int64)
_NO_ROWS = np.zeros(0, ROW)
_REPORTED = (SCOPE, LEASE)
"""The first bytes of the names of state records whose changes the buffer reports. The collector finds the changes of
all other state records itself: it compares them with the records last written."""


class ChangeCollector:
    """Collects changes of a buffer, as one of its watchers.

    Each Delta leads from the state recorded last to the present state.
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
        # The first Delta contains all leases. It also deletes outdated records of scopes. The name "", which no scope
        # has, makes it look for them.
        self._changed_scopes = {(name, "") for name in buffer.tables}
        self._changed_leases = set(buffer.outstanding.leased)
        self._scopes = {(table, scope): name for name, (table, scope, _) in state.named(SCOPE).items()}
        """By table and scope: the name of the record of the scope."""
        # A checkpoint of a server in memory begins without a recorded state, when scopes were used already.
        self._changed_scopes |= self._present_scopes() - self._scopes.keys()
        self._remembered: dict[str, list[int]] = {kind: [] for kind in buffer.remembered}
        """The remembered ids that are in no record yet."""
        self._ends: dict[str, deque[tuple[bytes, int]]] = {kind: deque() for kind in buffer.remembered}
        """By kind of remembered ids: the name of each record and the newest id in it, the oldest record first. When the
        buffer has forgotten that id, the record is deleted."""
        self._add_ends(RememberedIds.all_of(state))
        self._unwritten: dict[bytes, bytes | None] = dict.fromkeys(state.damaged)
        """Changes of state records that the next Delta has to repeat, because they could not be written. At first: the
        deletion of damaged records."""
        self._written: dict[bytes, bytes] = {}
        """The state records that were last written, except the records of scopes, leases and remembered ids."""
        for name, record in state.state_records.items():
            if not name.startswith((*_REPORTED, REMEMBERED)):
                self._written[name] = record
        self._numbers = count(_first_free_number(state))
        """The numbers for new records of scopes and remembered ids."""
        self._tables = _numbers_of_tables(buffer, state)
        """The numbers of the tables in the records of rows, by name."""
        self.changed(state.skipped)  # the first Delta deletes the records of damaged items

    # ------------------------------------------------------------------------------------------------ watching
    # The methods of a Watcher, which the buffer calls.

    def changed(self, keys: Iterable[int] | KeyArray) -> None:
        """Notes that the records of these items may no longer be true."""
        if isinstance(keys, np.ndarray):
            if keys.size > ITEMS_PER_SLICE:  # to add a million keys to a set would hold up all clients
                self._many_changed.append(keys)
                return
            keys = keys.tolist()
        self._changed.update(keys)

    def remembered(self, kind: str, ids: Iterable[int]) -> None:
        self._remembered[kind].extend(ids)

    def scope_changed(self, table: str, scope: str) -> None:
        self._changed_scopes.add((table, scope))

    def lease_changed(self, batch_id: int) -> None:
        self._changed_leases.add(batch_id)

    # ------------------------------------------------------------------------------------------------ collecting

    def slices(self) -> Iterator[Delta]:
        """Yields the records of some changed items at a time, until few enough are left for one call of `collect`.

        Each slice has the state of the moment in which it is asked for. If an item of a slice changes again, `collect`
        has the item too. All slices and the Delta of `collect` after them therefore lead to the state of the moment of
        `collect`. Only all of them together are a consistent state.
        """
        # At most twice as many slices as are needed now, because items may change as fast as they are collected.
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
        """The records of these items as of now. Items without a record are listed as removed."""
        present = sorted(key for key in keys if key in self._buffer.items)
        items = self.item_records(np.array(present, dtype=np.uint64))
        removed: list[int] = []
        if len(items) < len(keys):  # items are gone, or are in no table any more and held only by outstanding batches
            recorded: list[int] = items.items["key"].tolist()
            removed = sorted(set(keys).difference(recorded))
        return Delta(items, removed)

    def collect(self) -> Delta:
        """Everything that changed since the last call, as of now."""
        keys = self._changed
        self._changed = set()  # for changes after this call
        for many_keys in self._many_changed:
            keys.update(many_keys.tolist())
        self._many_changed.clear()
        delta = self._items_delta(keys)
        # A record that has changed once more replaces the change that could not be written.
        delta.state_records = self._unwritten | dict(self._state_records())
        self._unwritten = {}
        for kind, ids in self._remembered.items():
            if ids:
                self._remembered[kind] = []
                entry = self.remembered_ids(kind, ids)
                if entry.ids:  # empty if all of the ids are forgotten already
                    delta.remembered.append(entry)
            remembered = self._buffer.remembered[kind]
            ends = self._ends[kind]
            # Ids are forgotten oldest first: if the newest id of a record is forgotten, all its ids are.
            while ends and ends[0][1] not in remembered:
                name, _ = ends.popleft()
                delta.state_records[name] = None
        return delta

    def remembered_ids(self, kind: str, ids: Iterable[int]) -> RememberedIds:
        """A new record with the `ids` that are still remembered."""
        remembered = self._buffer.remembered[kind]
        still_remembered = [id for id in ids if id in remembered]
        return RememberedIds(
            name=REMEMBERED + NUMBER % next(self._numbers),
            kind=kind,
            ids=still_remembered,
            answers=[remembered.get(id) for id in still_remembered] if remembered.has_bytes else None,
        )

    def pending(self) -> int:
        """The most items that the next Delta can have."""
        return len(self._changed) + sum(keys.size for keys in self._many_changed)

    def written(self, delta: Delta) -> None:
        """Notes that `delta` is written, so that later ones leave out what has not changed since."""
        for name, record in delta.state_records.items():
            if record is None:
                self._written.pop(name, None)
            elif not name.startswith(_REPORTED):
                self._written[name] = record
        self._add_ends(delta.remembered)

    def _add_ends(self, entries: Iterable[RememberedIds]) -> None:
        """Notes that these records are written."""
        for entry in entries:
            newest_id = entry.ids[-1]
            self._ends[entry.kind].append((entry.name, newest_id))

    def not_written(self, delta: Delta) -> None:
        """Notes that `delta` could not be written, so that the next Delta contains its changes.

        Call this for slices before the Delta of `collect`: it replaces `_unwritten`, and slices have no state records.
        """
        self.changed(delta.items.items["key"].astype(np.uint64))
        self.changed(delta.removed)
        # The next Delta makes a new record of the ids, because the buffer may forget some of them meanwhile, when it
        # rolls inserts back.
        for entry in delta.remembered:
            self._remembered[entry.kind][:0] = entry.ids
        # Only deletions and the records whose changes the buffer reports must be kept. The next Delta contains all
        # other records anyway, because they differ from the records last written.
        self._unwritten = {
            name: record for name, record in delta.state_records.items() if record is None or name.startswith(_REPORTED)
        }

    def item_records(self, keys: KeyArray) -> ItemRecords:
        """The records of the items with these keys (n,), in the same order. All keys must be in the buffer.

        Items that only batches hold are left out.
        """
        buffer = self._buffer
        table_owners, rows = self._rows_in_tables(keys)
        assert table_owners.size == 0 or table_owners.max() < keys.size, "a row belongs to no item"
        in_a_table = np.zeros(keys.size, dtype=np.bool_)
        in_a_table[table_owners] = True
        # (n,): the index of each item when items in no table are left out. Meaningless for the latter.
        new_index = np.cumsum(in_a_table) - 1
        keys = keys[in_a_table]
        items = list(map(buffer.items.__getitem__, keys.tolist()))
        forwarded_owners, forwarded_rows = self._forwarded_rows(items)
        owners = np.concatenate([new_index[table_owners], forwarded_owners])
        order = np.argsort(owners, kind="stable")  # sorts all rows by their items

        heads = np.zeros(keys.size, dtype=ITEM)
        heads["key"] = keys
        for name in ("policy_version", "nbytes", "inserted_at"):
            heads[name] = np.fromiter(map(attrgetter(name), items), dtype=ITEM[name], count=len(items))
        heads["inserted_at"] += self._offset
        for extension in buffer.extensions:
            marked = extension.marked  # the keys of the items that the extension has marked, because they hold permits
            if marked:
                is_marked = [key in marked for key in keys.tolist()]
                heads["permit"][is_marked] = extension.mark
        packed_labels: list[bytes] = []
        if buffer.items.labelled:
            packed_labels = [pack_labels(item.labels) for item in items]
            heads["labels"] = list(map(len, packed_labels))
        return ItemRecords(
            items=heads,
            rows=np.concatenate([rows, forwarded_rows], dtype=ROW)[order],
            owners=owners[order],
            labels=np.frombuffer(b"".join(packed_labels), np.uint8),
        )

    def _rows_in_tables(self, keys: KeyArray) -> tuple[IntArray, npt.NDArray[np.void]]:
        """The owner (m,) of each row, as an index in `keys` (n,), and the rows (m,) that these keys have in tables."""
        owners = [_NO_OWNERS]
        rows = [_NO_ROWS]
        for table in self._buffer.tables.values():
            # `rows_in_table` leaves the number of the table open, and its times are of the buffer's clock.
            table_owners, table_rows = rows_in_table(self._buffer, table, keys)
            if table_owners.size:
                table_rows["table"] = self._tables[table.name]
                table_rows["inserted_at"] += self._offset
                owners.append(table_owners)
                rows.append(table_rows)
        return np.concatenate(owners), np.concatenate(rows, dtype=ROW)

    def _forwarded_rows(self, items: Sequence[Item]) -> tuple[IntArray, npt.NDArray[np.void]]:
        """One row for each table that has forwarded an item: the owners (m,), as indexes in `items`, and the rows (m,).

        These rows stand for no row of a table. After a restart they say that the table must not forward the item again.
        """
        owners: list[int] = []
        tables: list[int] = []
        for index, item in enumerate(items):
            for name in item.forwarded:
                owners.append(index)
                tables.append(self._tables[name])
        rows = np.zeros(len(tables), dtype=ROW)
        rows["table"] = tables
        rows["kind"] = FORWARDED
        return np.array(owners, dtype=np.int64), rows

    def _state_records(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Yields name and bytes of each state record that has changed; None in the place of the bytes deletes it."""
        buffer = self._buffer
        policy = buffer.policy
        values: dict[bytes, Any] = {
            CLOCK: self._clock_record,
            POLICY: [policy.version, policy.weights, policy.set_at + self._offset],
        }
        for table_name, table in buffer.tables.items():
            # Counters, rate limiter and random state of the table, and its name: the record's name has only a number.
            values[TABLE + b"%d" % self._tables[table_name]] = table.state_dict()
        for extension in buffer.extensions:
            if extension.record:
                values[extension.record] = extension.state_dict(self._offset)
        for name in self._written.keys() - values.keys():  # of tables and extensions that are no longer configured
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
        # A reset of the table begins a new epoch, and removes the items of earlier batches.
        keys = batch.keys if batch.epoch == table.epoch else batch.keys[:0]
        return pack([batch_id, table.name, batch.scope, seconds, keys.astype("<u8").tobytes()])

    def _present_scopes(self) -> set[tuple[str, str]]:
        """The scopes that the tables remember, each with the name of its table."""
        present = set()
        for table in self._buffer.tables.values():
            for scope in table.scopes:
                present.add((table.name, scope))
        return present

    def _scope_records(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Yields the changes of records of scopes: the deletions of outdated records, and new records in their place.

        A changed scope gets a new record, because the order of the names is the order in which scopes are restored.
        Scopes that have changed since the same Delta get their new records in the order of their last use, the newest
        last.
        """
        changed = self._changed_scopes
        self._changed_scopes = set()
        buffer = self._buffer
        present = self._present_scopes()
        # The records of scopes that the tables have forgotten, and the old records of changed scopes.
        outdated = (self._scopes.keys() - present) | (self._scopes.keys() & changed)
        for table_and_scope in outdated:
            yield self._scopes.pop(table_and_scope), None
        for name, table in buffer.tables.items():
            for scope in table.scopes:
                if (name, scope) not in changed:
                    continue
                # Outstanding batches are recorded as if they had not been drawn.
                keys_given_out = table.scopes.keys_under(scope) - buffer.outstanding.drawn_in_scope(table, scope)
                record = SCOPE + NUMBER % next(self._numbers)
                self._scopes[name, scope] = record
                yield record, pack([name, scope, np.array(sorted(keys_given_out), dtype="<u8").tobytes()])


def _first_free_number(state: State) -> int:
    """The number after the highest number in the names of recorded scopes and remembered ids."""
    names = state.values.keys() | state.damaged  # `values` sets `damaged`: a damaged record has a number, too
    highest = 0
    for name in names:
        if name.startswith((SCOPE, REMEMBERED)):
            _, _, number = name.rpartition(b"/")
            highest = max(highest, int(number))
    return highest + 1


def _numbers_of_tables(buffer: ReplayBuffer, state: State) -> dict[str, int]:
    """A number for each table of the buffer: the recorded number or, for a new table, a free one."""
    recorded = {name: number for number, name in state.tables.items()}
    first_free = max(state.tables, default=0) + 1
    return {name: recorded.get(name, first_free + index) for index, name in enumerate(buffer.tables)}


def rows_in_table(buffer: ReplayBuffer, table: Table, keys: KeyArray) -> tuple[IntArray, npt.NDArray[np.void]]:
    """The owner (m,) of each row, as an index in `keys` (n,), and the rows (m,) that `table` has or retains of them.

    The rows are as if outstanding batches were requeued. Times are seconds of the server's clock. The caller fills the
    column `table`.
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
    rows = np.zeros(owners.size, dtype=ROW)
    for name in ("order", "times_sampled", "priority", "inserted_at"):
        rows[name] = getattr(columns, name)[slots[owners]]
    drawn, times = buffer.outstanding.drawn(table)  # keys, ascending, and how often each was drawn
    if drawn.size:  # takes the draws of outstanding batches back
        # For each row, the index in `drawn` at which its key would be. Another key there: no batch has the row.
        at = np.searchsorted(drawn, keys[owners]).clip(max=drawn.size - 1)
        rows["times_sampled"] -= np.where(drawn[at] == keys[owners], times[at], 0)
    history = History.of(buffer) if retained else None
    if history is not None:
        for row, key in enumerate(keys[owners].tolist()):
            if key in retained:
                # A retained row was consumed by its only draw, so this column has room for the number of consumption.
                consumed = history.rows[table.name, key]
                rows["times_sampled"][row] = consumed.number
                rows["kind"][row] = RETAINED_WITH_PERMIT if consumed.permit else RETAINED
    return owners, rows


def restore(buffer: ReplayBuffer, state: State) -> None:
    """Fills a new buffer from a state. Items that do not fit the buffer's configuration are dropped or evicted, and
    logged.

    Raises ValueError if a record is damaged that the server needs.
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
    for table_name, scope, keys in state.named(SCOPE).values():
        if table_name in buffer.tables:
            buffer.tables[table_name].scopes.load(scope, np.frombuffer(keys, dtype="<u8").tolist())
    _restore_items(buffer, state, offset)
    for entry in RememberedIds.all_of(state):
        remembered = buffer.remembered[entry.kind]
        if entry.answers is None:
            remembered.load(entry.ids)
        else:
            for id, answer in zip(entry.ids, entry.answers, strict=True):
                remembered.load([id], tuple(answer))
    # Leased batches are drawn before the tables drop items that are stale or too many, because their readers may use
    # the items already.
    for batch_id, table_name, scope, seconds, keys in state.named(LEASE).values():
        leased = np.frombuffer(keys, dtype="<u8").astype(np.uint64)
        buffer.outstanding.restore_lease(batch_id, buffer.tables.get(table_name), leased, scope, seconds)
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
        size = table.size
        lost = table.reconcile()  # items that the counters count, and that were not loaded; also evicts
        if lost:
            log.warning("table %r: %s lost", table.name, counted(lost, "item"))
        evicted = size - table.size
        if evicted:
            log.warning("table %r: %s evicted, for its bounds are lower now", table.name, counted(evicted, "item"))
        table.drop_stale()
    nbytes = buffer.items.bytes
    # Both log lines have the form of `why_full`: the bytes here + the bytes to come (0) > max_bytes.
    why_full = buffer.items.why_full(0, buffer.trained)
    if why_full:  # eviction cannot make the items fit, so nothing is evicted
        log.warning("%s: 0 items evicted, for too few can be", why_full)
        return
    evicted = buffer.items.make_room(buffer.trained)
    if evicted:
        items = counted(evicted, "item")
        log.warning("%d bytes + 0 > max_bytes %s: %s evicted", nbytes, buffer.items.max_bytes, items)


def _restore_items(buffer: ReplayBuffer, state: State, offset: float) -> None:
    """Adds the items of a state, and their rows in tables. Items of tables that are not configured are dropped.

    `offset`: seconds that recorded times are ahead of the buffer's clock.
    """
    now = buffer.clock()
    items = state.items.items
    rows = state.items.rows
    owners = state.items.owners
    keys = items["key"]
    labels = state.items.labels_of_items()
    holders = np.zeros(keys.size, dtype=np.int64)  # (n,): the number of tables that hold each item
    names = state.tables  # by the numbers that the rows use
    # If the clock was set back, a time may lie in the future.
    rows_inserted_at = np.minimum(rows["inserted_at"] - offset, now)
    items_inserted_at: list[float] = np.minimum(items["inserted_at"] - offset, now).tolist()
    forwarded = rows["kind"] == FORWARDED  # (m,): such rows only say that the table has forwarded the item
    for number, name in names.items():
        chosen = np.flatnonzero(~forwarded & (rows["table"] == number))  # the rows of this table
        if not chosen.size:
            continue
        chosen = chosen[np.argsort(rows["order"][chosen], kind="stable")]  # in the order of their insertion
        own = owners[chosen]  # the indexes of their items
        table = buffer.tables.get(name)
        if table is None:
            dropped = counted(int(own.size), "item")
            log.warning("table %r is not configured any more: %s dropped", name, dropped)
            for watcher in buffer.watchers:  # so that the next Delta rewrites or deletes the records
                watcher.changed(keys[own].tolist())
            continue
        holders[own] += 1
        own_labels = None if labels is None else [labels[owner] for owner in own.tolist()]
        _restore_rows(buffer, table, items[own], rows[chosen], rows_inserted_at[chosen], own_labels)

    assert not buffer.items, "a state is restored into a buffer that has items"
    sizes: list[int] = items["nbytes"].tolist()
    versions: list[int] = items["policy_version"].tolist()
    loaded = list(map(Item, sizes, versions, items_inserted_at, holders.tolist()))
    for owner, number in zip(owners[forwarded].tolist(), rows["table"][forwarded].tolist(), strict=True):
        if names.get(number) in buffer.tables:
            item = loaded[owner]
            item.forwarded = (*item.forwarded, names[number])
    buffer.items.update(zip(keys.tolist(), loaded, strict=True))
    if labels is not None:
        buffer.items.label(keys.tolist(), labels)
    for extension in buffer.extensions:
        if extension.mark:
            extension.load_marked(keys[items["permit"] == extension.mark].tolist())
    buffer.items.bytes += int(items["nbytes"].sum())  # the bytes of labels were added above, by `label`
    # Items that are in no table of the configuration are removed. An item leaves when its last holder releases it, so
    # these items are held for a moment.
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
    """Adds rows (n,) to their table, in their order. `items` (n,) has the item of each row.

    Retained rows are added as all others, and then retained again, as when they were consumed.
    """
    keys = items["key"]
    retained = rows["kind"] >= RETAINED
    table.add_rows(
        keys=keys.tolist(),
        priorities=rows["priority"],
        policy_versions=items["policy_version"],
        sizes=items["nbytes"],
        orders=rows["order"],
        inserted_at=inserted_at,
        times_sampled=np.where(retained, 1, rows["times_sampled"]),  # a retained row has another number there
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
