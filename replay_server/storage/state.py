"""State: turns the changes of a buffer into records, and fills a new buffer from the records of an older one.

Outstanding batches are recorded as if they had not been drawn. After a crash no reader can take them any more, so their
items are back in their table. A lease has a record beside them: a restart draws its batch again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_protos.labels import pack_labels
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
from replay_server.tables.columns import IntArray, KeyArray
from replay_server.tables.extensions.history import History
from replay_server.tables.items import Item
from replay_server.tables.table import Table

log = logging.getLogger("replay_server")

ITEMS_PER_SLICE = 1024
"""Items whose records are collected before other requests run: some 3 ms of CPU."""
_NO_OWNERS, _NO_ROWS = np.zeros(0, np.int64), np.zeros(0, ROW)
_ONCE = (SCOPE, LEASE)
"""Names of the state records that come only when they have changed, and not each time as of the moment."""


class ChangeCollector:
    """Collects changes of a buffer; each Delta leads from the recorded state to the state of the moment."""

    def __init__(self, buffer: ReplayBuffer, state: State | None = None) -> None:
        """`state` is what is recorded already."""
        state = State() if state is None else state
        self._buffer = buffer
        self._offset = records.time_offset(state.values, buffer.clock())
        self._clock_record = [records.boot_id(), self._offset]
        self._changed: set[int] = set()
        self._many_changed: list[KeyArray] = []
        """Keys of large changes."""
        self._changed_scopes = {(name, "") for name in buffer.tables}
        # A checkpoint contains those that there are. A scope it does not need.
        self._changed_leases = set(buffer.outstanding.leased)
        self._scopes = {(table, scope): name for name, (table, scope, _) in state.named(SCOPE).items()}
        """The names of the records of scopes."""
        self._remembered: dict[str, list[int]] = {kind: [] for kind in buffer.remembered}
        """Ids that no record has yet."""
        self._ends: dict[str, deque[tuple[bytes, int]]] = {kind: deque() for kind in buffer.remembered}
        """The records of remembered ids, and the newest id in each. A record goes when that id is forgotten."""
        self._add_ends(RememberedIds.all_of(state))
        self._unwritten: dict[bytes, bytes | None] = dict.fromkeys(state.damaged)
        """State records that could not be written, and that would not come again by themselves."""
        self._written = {
            name: record for name, record in state.state_records.items() if not name.startswith((*_ONCE, REMEMBERED))
        }
        """The state records that were last written."""
        names = state.values.keys() | state.damaged
        numbers = [int(name.rpartition(b"/")[2]) for name in names if name.startswith((SCOPE, REMEMBERED))]
        self._numbers = count(max(numbers, default=0) + 1)
        """Of the records of scopes and remembered ids."""
        tables = {name: number for number, name in state.tables.items()}
        free = max(state.tables, default=0) + 1
        self._tables = {name: tables.get(name, free + place) for place, name in enumerate(buffer.tables)}
        self.changed(state.skipped)

    # ------------------------------------------------------------------------------------------------ watching

    def changed(self, keys: Iterable[int] | KeyArray) -> None:
        if isinstance(keys, np.ndarray):
            if keys.size > ITEMS_PER_SLICE:
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
        """While more has changed than `collect` is to take at once: the records of some items, each slice as of the
        moment when it is asked for.

        What has changed again since its slice, `collect` has too. So all slices and then `collect`, applied in this
        order, lead to the state of the moment of `collect`, and only together.
        """
        for _ in range(2 * self.pending() // ITEMS_PER_SLICE):  # more may change meanwhile, without end
            if self.pending() <= ITEMS_PER_SLICE:
                return
            if self._many_changed:
                keys = self._many_changed.pop()
                if keys.size > ITEMS_PER_SLICE:
                    self._many_changed.append(keys[ITEMS_PER_SLICE:])
                yield self._items_delta(keys[:ITEMS_PER_SLICE].tolist())
            else:
                yield self._items_delta({self._changed.pop() for _ in range(ITEMS_PER_SLICE)})

    def _items_delta(self, keys: Collection[int]) -> Delta:
        there = sorted(key for key in keys if key in self._buffer.items)
        items = self.item_records(np.array(there, dtype=np.uint64))
        removed = sorted(set(keys).difference(items.items["key"].tolist())) if len(items) < len(keys) else []
        return Delta(items, removed)

    def collect(self) -> Delta:
        """Everything that changed since the last call, as of now."""
        buffer = self._buffer
        keys, self._changed = self._changed, set()
        keys.update(*(many.tolist() for many in self._many_changed))
        self._many_changed.clear()
        delta = self._items_delta(keys)
        delta.state_records = self._unwritten | dict(self._state_records())
        self._unwritten = {}
        for kind, ids in self._remembered.items():
            if ids:
                self._remembered[kind] = []
                if (entry := self.remembered_ids(kind, ids)).ids:
                    delta.remembered.append(entry)
            ends = self._ends[kind]
            while ends and ends[0][1] not in buffer.remembered[kind]:
                delta.state_records[ends.popleft()[0]] = None
        return delta

    def remembered_ids(self, kind: str, ids: Iterable[int]) -> RememberedIds:
        """Those of `ids` that are still remembered, for a record of their own."""
        remembered = self._buffer.remembered[kind]
        there = [one for one in ids if one in remembered]
        answers = [remembered.get(one) for one in there] if remembered.has_bytes else None
        return RememberedIds(REMEMBERED + NUMBER % next(self._numbers), kind, there, answers)

    def pending(self) -> int:
        """The most items that the next Delta can have."""
        return len(self._changed) + sum(keys.size for keys in self._many_changed)

    def written(self, delta: Delta) -> None:
        """`delta` is written."""
        for name, record in delta.state_records.items():
            if record is None:
                self._written.pop(name, None)
            elif not name.startswith(_ONCE):
                self._written[name] = record
        self._add_ends(delta.remembered)

    def _add_ends(self, entries: Iterable[RememberedIds]) -> None:
        """These records are written."""
        for entry in entries:
            self._ends[entry.kind].append((entry.name, entry.ids[-1]))

    def not_written(self, delta: Delta) -> None:
        """`delta` could not be written, so the next Delta has to contain it."""
        self.changed(delta.items.items["key"].astype(np.uint64))
        self.changed(delta.removed)
        for entry in delta.remembered:  # not its record: some of the inserts may be rolled back now
            self._remembered[entry.kind][:0] = entry.ids
        # All others come again by themselves, because they differ from what was last written.
        self._unwritten = {
            name: record for name, record in delta.state_records.items() if record is None or name.startswith(_ONCE)
        }

    def item_records(self, keys: KeyArray) -> ItemRecords:
        """The records of `keys`, in the same order, all of them in the buffer. Items that only batches hold are left
        out."""
        buffer, offset = self._buffer, self._offset
        places, rows = [_NO_OWNERS], [_NO_ROWS]
        for table in buffer.tables.values():
            of_items, of_table = rows_in_table(buffer, table, keys)
            if of_items.size:
                of_table["table"], of_table["inserted_at"] = self._tables[table.name], of_table["inserted_at"] + offset
                places.append(of_items)
                rows.append(of_table)
        of_rows = np.concatenate(places)
        assert of_rows.size == 0 or of_rows.max() < keys.size, "a row belongs to no item"
        in_a_table = np.zeros(keys.size, dtype=np.bool_)
        in_a_table[of_rows] = True
        owners = [(np.cumsum(in_a_table) - 1)[of_rows]]
        keys = keys[in_a_table]
        found = list(map(buffer.items.__getitem__, keys.tolist()))
        forwarded = [
            (place, self._tables[name]) for place, item in enumerate(found) if item.forwarded for name in item.forwarded
        ]
        if forwarded:
            passed = np.zeros(len(forwarded), dtype=ROW)
            passed["table"], passed["kind"] = [table for _, table in forwarded], FORWARDED
            owners.append(np.array([place for place, _ in forwarded]))
            rows.append(passed)
        items = np.zeros(keys.size, dtype=ITEM)
        items["key"] = keys
        for name in ("policy_version", "nbytes", "inserted_at"):
            items[name] = np.fromiter(map(attrgetter(name), found), dtype=ITEM[name], count=len(found))
        for extension in buffer.extensions:
            if marked := extension.marked:
                items["permit"][[key in marked for key in keys.tolist()]] = extension.mark
        items["inserted_at"] += offset
        of_rows = np.concatenate(owners)
        order = np.argsort(of_rows, kind="stable")
        packed = [pack_labels(item.labels) for item in found] if buffer.items.labelled else []
        items["labels"] = list(map(len, packed)) or 0
        labels = np.frombuffer(b"".join(packed), np.uint8)
        return ItemRecords(items, np.concatenate(rows, dtype=ROW)[order], of_rows[order], labels)

    def _state_records(self) -> Iterator[tuple[bytes, bytes | None]]:
        """The state records that differ from what was last written."""
        buffer, offset = self._buffer, self._offset
        policy = buffer.policy
        values: dict[bytes, Any] = {
            CLOCK: self._clock_record,
            POLICY: [policy.version, policy.weights, policy.set_at + offset],
        }
        values |= {TABLE + b"%d" % self._tables[name]: table.state_dict() for name, table in buffer.tables.items()}
        values |= {each.record: each.state_dict(offset) for each in buffer.extensions if each.record}
        for name in self._written.keys() - values.keys():  # of tables and extensions that are no longer configured
            yield name, None
        for name, value in values.items():
            if self._written.get(name) != (record := pack(value)):
                yield name, record
        if self._changed_scopes:
            yield from self._scope_records()
        for batch_id in sorted(self._changed_leases):
            yield LEASE + b"%d" % batch_id, self._lease_record(batch_id)
        self._changed_leases.clear()

    def _lease_record(self, batch_id: int) -> bytes | None:
        outstanding = self._buffer.outstanding
        if (seconds := outstanding.leased.get(batch_id)) is None:
            return None
        table, batch = outstanding.by_id[batch_id]
        # Batches of before a reset change nothing any more.
        keys = batch.keys if batch.epoch == table.epoch else batch.keys[:0]
        return pack([batch_id, table.name, batch.scope, seconds, keys.astype("<u8").tobytes()])

    def _scope_records(self) -> Iterator[tuple[bytes, bytes | None]]:
        changed, self._changed_scopes = self._changed_scopes, set()
        buffer = self._buffer
        there = {(table.name, scope) for table in buffer.tables.values() for scope in table.scopes}
        for of in (self._scopes.keys() - there) | (self._scopes.keys() & changed):
            yield self._scopes.pop(of), None
        for name, scope in changed & there:
            table = buffer.tables[name]
            keys_given_out = table.scopes.keys_under(scope) - buffer.outstanding.drawn_in_scope(table, scope)
            self._scopes[name, scope] = record = SCOPE + NUMBER % next(self._numbers)
            yield record, pack([name, scope, np.array(sorted(keys_given_out), dtype="<u8").tobytes()])


def rows_in_table(buffer: ReplayBuffer, table: Table, keys: KeyArray) -> tuple[IntArray, npt.NDArray[np.void]]:
    """The rows (m,) of `keys` (n,) in `table`, as if outstanding batches were requeued, and of those that it has
    consumed and keeps; and whose they are (m,).

    Times are seconds of the server's clock. The column `table` is left for the caller.
    """
    columns, retained = table.columns, table.columns.retained
    slots = columns.find_with_reserved(keys)
    if retained:
        absent = slots < 0
        slots[absent] = [retained.get(key, -1) for key in keys[absent].tolist()]
    places = np.flatnonzero(slots >= 0)
    if not places.size:
        return places, _NO_ROWS
    rows = np.zeros(places.size, dtype=ROW)
    for name in ("order", "times_sampled", "priority", "inserted_at"):
        rows[name] = getattr(columns, name)[slots[places]]
    drawn, times = buffer.outstanding.drawn(table)
    if drawn.size:
        at = np.searchsorted(drawn, keys[places]).clip(max=drawn.size - 1)
        rows["times_sampled"] -= np.where(drawn[at] == keys[places], times[at], 0)
    if retained and (history := History.of(buffer)) is not None:
        for row, key in enumerate(keys[places].tolist()):
            if key in retained:
                number, permit = history.rows[table.name, key]
                rows["times_sampled"][row], rows["kind"][row] = number, RETAINED + permit
    return places, rows


def restore(buffer: ReplayBuffer, state: State) -> None:
    """Fills a new buffer. Items that do not fit its configuration are dropped or evicted, and logged."""
    now, values = buffer.clock(), state.values
    offset = records.time_offset(values, now)
    if POLICY in values:
        version, weights, set_at = values[POLICY]
        buffer.policy = Policy(version, weights, min(set_at - offset, now))
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
            for one, answer in zip(entry.ids, entry.answers, strict=True):
                remembered.load([one], tuple(answer))
    # Before the tables drop what is stale or too much: these items are in their readers' hands.
    for batch_id, table_name, scope, seconds, keys in state.named(LEASE).values():
        leased = np.frombuffer(keys, dtype="<u8").astype(np.uint64)
        buffer.outstanding.restore_lease(batch_id, buffer.tables.get(table_name), leased, scope, seconds)
    # Makes all that was loaded fit the configuration. What that costs is logged.
    for extension in buffer.extensions:
        extension.reconcile()
    for table in buffer.tables.values():
        size = table.size
        if lost := table.reconcile():
            log.warning("table %r: %s lost", table.name, counted(lost, "item"))
        if evicted := size - table.size:
            log.warning("table %r: %s evicted, for its bounds are lower now", table.name, counted(evicted, "item"))
        table.drop_stale()
    nbytes = buffer.items.bytes
    if why := buffer.items.why_full(0, buffer.trained):
        log.warning("%s: 0 items evicted, for too few can be", why)
    elif evicted := buffer.items.make_room(buffer.trained):
        items = counted(evicted, "item")
        log.warning("%d bytes + 0 > max_bytes %s: %s evicted", nbytes, buffer.items.max_bytes, items)
    buffer.items.freed = False
    buffer.damaged += len(state.skipped)


def _restore_items(buffer: ReplayBuffer, state: State, offset: float) -> None:
    now = buffer.clock()
    items, rows, owners = state.items.items, state.items.rows, state.items.owners
    keys, of_table, retained = items["key"], rows["kind"] != FORWARDED, rows["kind"] >= RETAINED
    labels = state.items.labels_of_items()
    holders = np.zeros(keys.size, dtype=np.int64)
    names = state.tables
    for number, name in names.items():
        chosen = np.flatnonzero(of_table & (rows["table"] == number))
        chosen = chosen[np.argsort(rows["order"][chosen], kind="stable")]
        table_rows = rows[chosen]
        own = owners[chosen]
        consumed = retained[chosen]
        if own.size and (table := buffer.tables.get(name)) is not None:
            holders[own] += 1
            table.add_rows(
                keys[own].tolist(),
                table_rows["priority"],
                items["policy_version"][own],
                items["nbytes"][own],
                table_rows["order"],
                # Nothing comes from the future: the clock was set back.
                np.minimum(table_rows["inserted_at"] - offset, now),
                np.where(consumed, 1, table_rows["times_sampled"]),
                None if labels is None else [labels[owner] for owner in own.tolist()],
            )
            if consumed.any():
                history = History.of(buffer)
                assert history is not None
                table.retain(retained_keys := keys[own[consumed]])
                numbers, permits = table_rows["times_sampled"][consumed], table_rows["kind"][consumed] > RETAINED
                history.retain_again(table, retained_keys.tolist(), numbers.tolist(), permits.tolist())
            continue
        if own.size:
            dropped = counted(int(own.size), "item")
            log.warning("table %r is not configured any more: %s dropped", name, dropped)
            for watcher in buffer.watchers:
                watcher.changed(keys[own].tolist())
    assert not buffer.items, "a state is restored into a buffer that has items"
    columns = (items["nbytes"], items["policy_version"], np.minimum(items["inserted_at"] - offset, now), holders)
    loaded = list(map(Item, *(column.tolist() for column in columns)))
    passed = np.flatnonzero(rows["kind"] == FORWARDED)
    for owner, number in zip(owners[passed].tolist(), rows["table"][passed].tolist(), strict=True):
        if names.get(number) in buffer.tables:
            loaded[owner].forwarded = (*loaded[owner].forwarded, names[number])
    buffer.items.update(zip(keys.tolist(), loaded, strict=True))
    if labels is not None:
        buffer.items.label(keys.tolist(), labels)
    for extension in buffer.extensions:
        if extension.mark:
            extension.load_marked(keys[items["permit"] == extension.mark].tolist())
    buffer.items.bytes += int(items["nbytes"].sum())
    unheld = keys[holders == 0].tolist()  # they are in no table that is configured
    buffer.items.hold(unheld)
    for watcher in buffer.watchers:
        watcher.changed(unheld)
    buffer.items.release(unheld)
