"""State: turns the changes of a buffer into records, and fills a new buffer from the records of an older one.

Outstanding batches are recorded as if they had not been drawn. After a crash no reader can take them any more, so their
items are back in their table. A lease has a record beside them: a restart draws its batch again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from replay_protos.labels import pack_labels
from replay_server.storage import records
from replay_server.storage.records import (
    CLOCK,
    FORWARDED,
    ITEM,
    KEPT,
    KEPT_WITH_PERMIT,
    LEASE,
    POLICY,
    REMEMBERED,
    ROW,
    SCOPE,
    TABLE,
    Damaged,
    Delta,
    ItemRecords,
    RememberedIds,
    State,
    StateRecord,
    pack,
    table_numbers,
    unpack,
    unpack_named,
)
from replay_server.tables.buffer import Policy, ReplayBuffer
from replay_server.tables.columns import IntArray, KeyArray
from replay_server.tables.extensions.history import Consumed, History
from replay_server.tables.items import Item
from replay_server.tables.table import Table

log = logging.getLogger("replay_server")

ITEMS_PER_SLICE = 1024
"""Items whose records are collected before other requests run: some 3 ms of CPU."""
_NO_OWNERS, _NO_ROWS = np.zeros(0, np.int64), np.zeros(0, ROW)
_KEPT = (SCOPE, LEASE, REMEMBERED)
"""Names of the records that come only when they have changed, and not each time as of the moment."""


class ChangeCollector:
    """Collects changes of a buffer; each Delta leads from the recorded state to the state of the moment."""

    def __init__(self, buffer: ReplayBuffer, state: State | None = None) -> None:
        """`state` is what is recorded already."""
        state = State() if state is None else state
        self._buffer = buffer
        self._offset = records.time_offset(state.state_records, buffer.clock())
        self._clock_record = [records.boot_id(), self._offset]
        self._changed: set[int] = set()
        self._many_changed: list[KeyArray] = []
        """Keys of large changes."""
        self._changed_scopes: set[tuple[str, str]] = set()
        # A checkpoint contains those that there are. A scope it does not need.
        self._changed_leases = set(buffer.outstanding.leased)
        self._remembered: dict[str, list[int]] = {kind: [] for kind in buffer.remembered}
        """Ids that no record has yet."""
        self._ends: dict[str, deque[tuple[bytes, int]]] = {kind: deque() for kind in buffer.remembered}
        """The records of remembered ids, and the newest id in each. A record goes when that id is forgotten."""
        remembered = RememberedIds.all_of(state)
        self._unwritten = [StateRecord(entry.name, None) for entry in remembered if entry.kind not in self._ends]
        """State records that could not be written, and that would not come again by themselves."""
        self._add_ends(remembered)
        self._written = {
            name: record for name, record in state.state_records.items() if not name.startswith(REMEMBERED)
        }
        """The state records that were last written."""
        self._removed_obsolete = False
        # The wall clock may have been set back.
        self._stamps = count(max(time.time_ns(), _last_stamp(state, remembered) + 1))
        """Scopes and remembered ids are restored in this order."""
        numbers = {name: number for number, name in table_numbers(state).items()}
        free = max(numbers.values(), default=0) + 1
        self._tables = {name: numbers.get(name, free + place) for place, name in enumerate(buffer.tables)}
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
        unwritten, self._unwritten = self._unwritten, []
        delta.state_records = [*unwritten, *self._state_records()]
        for kind, ids in self._remembered.items():
            if ids:
                self._remembered[kind] = []
                if (entry := self.remembered_ids(kind, ids)).ids:
                    delta.remembered.append(entry)
                    delta.state_records.append(entry.record())
            ends = self._ends[kind]
            while ends and ends[0][1] not in buffer.remembered[kind]:
                delta.state_records.append(StateRecord(ends.popleft()[0], None))
        return delta

    def remembered_ids(self, kind: str, ids: Iterable[int]) -> RememberedIds:
        """Those of `ids` that are still remembered, for a record of their own."""
        remembered, stamp = self._buffer.remembered[kind], next(self._stamps)
        there = [one for one in ids if one in remembered]
        answers = [remembered.get(one) for one in there] if remembered.has_bytes else None
        return RememberedIds(REMEMBERED + b"%d" % stamp, kind, stamp, there, answers)

    def pending(self) -> int:
        """The most items that the next Delta can have."""
        return len(self._changed) + sum(keys.size for keys in self._many_changed)

    def written(self, delta: Delta) -> None:
        """`delta` is written."""
        for name, record in delta.state_records:
            if record is None:
                self._written.pop(name, None)
            elif not name.startswith(REMEMBERED):
                self._written[name] = record
        self._add_ends(delta.remembered)

    def _add_ends(self, entries: Iterable[RememberedIds]) -> None:
        """These records are written."""
        for entry in entries:
            if entry.kind in self._ends:
                self._ends[entry.kind].append((entry.name, entry.ids[-1]))

    def not_written(self, delta: Delta) -> None:
        """`delta` could not be written, so the next Delta has to contain it."""
        self.changed(delta.items.items["key"].astype(np.uint64))
        self.changed(delta.removed)
        for entry in delta.remembered:  # not its record: some of the inserts may be rolled back now
            self._remembered[entry.kind][:0] = entry.ids
        named = {entry.name for entry in delta.remembered}
        # All other state records come again by themselves, because they differ from what was last written.
        self._unwritten = [
            entry
            for entry in delta.state_records
            if entry.record is None or (entry.name.startswith(_KEPT) and entry.name not in named)
        ]

    def item_records(self, keys: KeyArray) -> ItemRecords:
        """The records of `keys`, in the same order, all of them in the buffer. Items that only batches hold are left
        out."""
        buffer, offset, history = self._buffer, self._offset, History.of(self._buffer)
        found = list(map(buffer.items.__getitem__, keys.tolist()))
        owners: list[IntArray] = []
        rows: list[npt.NDArray[np.void]] = []
        for table in buffer.tables.values():
            of_items, of_table = rows_in_table(table, keys, *buffer.outstanding.drawn(table))
            if of_items.size:
                of_table["table"], of_table["inserted_at"] = self._tables[table.name], of_table["inserted_at"] + offset
                owners.append(of_items)
                rows.append(of_table)
            if history is not None and table.columns.retained:
                of_items, of_table = kept_rows(table, keys, history)
                of_table["table"], of_table["inserted_at"] = self._tables[table.name], of_table["inserted_at"] + offset
                owners.append(of_items)
                rows.append(of_table)
        in_a_table = np.zeros(keys.size, dtype=np.bool_)
        for of_items in owners:
            in_a_table[of_items] = True
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
        if len(owners) == 1 and owners[0].size == keys.size and not forwarded:  # a row each: the most frequent case
            records = ItemRecords(items, rows[0], owners[0])
        else:
            all_owners, all_rows = np.concatenate([_NO_OWNERS, *owners]), np.concatenate([_NO_ROWS, *rows])
            kept = in_a_table[all_owners]
            order = np.argsort(all_owners[kept], kind="stable")
            renumbered = np.cumsum(in_a_table) - 1
            records = ItemRecords(items[in_a_table], all_rows[kept][order], renumbered[all_owners[kept][order]])
        if buffer.items.labelled:
            packed = [pack_labels(item.labels) for item, there in zip(found, in_a_table.tolist(), strict=True) if there]
            records.items["labels"] = [len(labels) for labels in packed]
            records.labels = np.frombuffer(b"".join(packed), np.uint8)
        return records

    def _state_records(self) -> Iterator[StateRecord]:
        """The state records that differ from what was last written."""
        buffer, offset = self._buffer, self._offset
        values: list[tuple[bytes, Any]] = [
            (TABLE + b"%d" % self._tables[name], table.state_dict()) for name, table in buffer.tables.items()
        ]
        policy = buffer.policy
        values.append((CLOCK, self._clock_record))
        values.append((POLICY, [policy.version, policy.weights, policy.set_at + offset]))
        values += [(each.record, each.state_dict(offset)) for each in buffer.extensions if each.record]
        if not self._removed_obsolete:  # records of tables and extensions that are no longer configured
            self._removed_obsolete = True
            kept = {name for name, _ in values}
            obsolete = [name for name in self._written if name not in kept and not name.startswith(_KEPT)]
            yield from (StateRecord(name, None) for name in obsolete)
            self._changed_scopes.update((name, "") for name in buffer.tables)
        for name, value in values:
            if self._written.get(name) != (record := pack(value)):
                yield StateRecord(name, record)
        if self._changed_scopes:
            yield from self._scope_records()
        for batch_id in sorted(self._changed_leases):
            yield StateRecord(LEASE + b"%d" % batch_id, self._lease_record(batch_id))
        self._changed_leases.clear()

    def _lease_record(self, batch_id: int) -> bytes | None:
        outstanding = self._buffer.outstanding
        if (seconds := outstanding.leased.get(batch_id)) is None:
            return None
        table, batch = outstanding.by_id[batch_id]
        # Batches of before a reset change nothing any more.
        keys = batch.keys if batch.epoch == table.epoch else batch.keys[:0]
        return pack([batch_id, table.name, batch.scope, seconds, keys.astype("<u8").tobytes()])

    def _scope_records(self) -> Iterator[StateRecord]:
        changed, self._changed_scopes = self._changed_scopes, set()
        tables = self._buffer.tables
        for name in {name for name, _ in changed}:
            prefix = SCOPE + b"%d/" % self._tables[name]
            kept = {prefix + xxh3_128_digest(scope.encode()) for scope in tables[name].scopes}
            yield from (StateRecord(old, None) for old in self._written if old.startswith(prefix) and old not in kept)
        for name, scope in changed:
            if scope in tables[name].scopes:
                given = tables[name].scopes.given(scope) - self._buffer.outstanding.drawn_in_scope(tables[name], scope)
                record = pack([name, scope, next(self._stamps), np.array(sorted(given), dtype="<u8").tobytes()])
                yield StateRecord(SCOPE + b"%d/" % self._tables[name] + xxh3_128_digest(scope.encode()), record)


def _last_stamp(state: State, remembered: Sequence[RememberedIds]) -> int:
    """The highest stamp of the scopes and remembered ids that are recorded."""
    stamps = [0, *(entry.stamp for entry in remembered)]
    for name, record in state.state_records.items():
        if name.startswith(SCOPE):
            with suppress(Damaged):
                stamps.append(unpack(record)[2])
    return max(stamps)


def rows_in_table(
    table: Table, keys: KeyArray, drawn: KeyArray, times: IntArray
) -> tuple[IntArray, npt.NDArray[np.void]]:
    """The rows (m,) of `keys` (n,) in `table`, as if outstanding batches were given back; and whose they are (m,).

    `drawn`, ascending, are the keys of outstanding rows, and `times` how often each was drawn. Times are seconds of the
    server's clock. The column `table` is left for the caller.
    """
    columns = table.columns
    slots = columns.find_with_reserved(keys)
    places = np.flatnonzero(slots >= 0)
    if not places.size:
        return _NO_OWNERS, _NO_ROWS
    rows = np.zeros(places.size, dtype=ROW)
    for name in ("order", "times_sampled", "priority", "inserted_at"):
        rows[name] = getattr(columns, name)[slots[places]]
    if drawn.size:
        at = np.searchsorted(drawn, keys[places]).clip(max=drawn.size - 1)
        rows["times_sampled"] -= np.where(drawn[at] == keys[places], times[at], 0)
    return places, rows


def kept_rows(table: Table, keys: KeyArray, history: History) -> tuple[IntArray, npt.NDArray[np.void]]:
    """As `rows_in_table`, the rows of `keys` that the table has consumed and keeps."""
    kept, columns = table.columns.retained, table.columns
    names: list[int] = keys.tolist()
    places = [place for place, key in enumerate(names) if key in kept]
    slots = [kept[names[place]] for place in places]
    consumed = [history.rows[table.name, names[place]] for place in places]
    rows = np.zeros(len(places), dtype=ROW)
    for name in ("order", "priority", "inserted_at"):
        rows[name] = getattr(columns, name)[slots]
    rows["times_sampled"] = [each.number for each in consumed]
    rows["kind"] = [KEPT_WITH_PERMIT if each.permit else KEPT for each in consumed]
    return np.array(places, dtype=np.int64), rows


def restore(buffer: ReplayBuffer, state: State) -> None:
    """Fills a new buffer. Items that do not fit its configuration are dropped or evicted, and logged."""
    now = buffer.clock()
    offset = records.time_offset(state.state_records, now)
    scopes: list[Any] = []
    of_extensions: dict[bytes, dict[str, Any]] = {}
    leases: list[Any] = []
    for name, record in state.state_records.items():
        if name.startswith(REMEMBERED):
            continue
        if name.startswith((SCOPE, LEASE)):
            try:
                (scopes if name.startswith(SCOPE) else leases).append(unpack(record))
            except Damaged:
                state.damaged += 1
            continue
        value = unpack_named(name, record)
        if name.startswith(TABLE) and value["name"] in buffer.tables:
            buffer.tables[value["name"]].load_state_dict(value)
        elif name == POLICY:
            buffer.policy = Policy(value[0], value[1], min(value[2] - offset, now))
            for table in buffer.tables.values():
                table.set_policy_version(buffer.policy.version)
        elif name != CLOCK:
            of_extensions[name] = value
    for extension in buffer.extensions:
        extension.load_state_dict(of_extensions.get(extension.record), offset, buffer.policy.version)
    for table_name, scope, _, keys in sorted(scopes, key=lambda value: value[2]):
        if table_name in buffer.tables:
            buffer.tables[table_name].scopes.load(scope, np.frombuffer(keys, dtype="<u8").tolist())
    _restore_items(buffer, state, offset)
    for entry in RememberedIds.all_of(state):
        if (remembered := buffer.remembered.get(entry.kind)) is None:
            state.damaged += 1
        elif entry.answers is None:
            remembered.load(entry.ids)
        else:
            for one, answer in zip(entry.ids, entry.answers, strict=True):
                remembered.load([one], tuple(answer))
    # Before the tables drop what is stale or too much: these items are in their readers' hands.
    for batch_id, table_name, scope, seconds, keys in leases:
        leased = np.frombuffer(keys, dtype="<u8").astype(np.uint64)
        buffer.outstanding.restore_lease(batch_id, table_name, leased, scope, seconds)
    reconcile(buffer)


def _restore_items(buffer: ReplayBuffer, state: State, offset: float) -> None:
    now = buffer.clock()
    items, rows, owners = state.items.items, state.items.rows, state.items.owners
    keys, of_table, kept = items["key"], rows["kind"] != FORWARDED, rows["kind"] >= KEPT
    labels = state.items.labels_of_items()
    holders = np.zeros(keys.size, dtype=np.int64)
    names = table_numbers(state)
    for number, name in names.items():
        chosen = np.flatnonzero(of_table & (rows["table"] == number))
        chosen = chosen[np.argsort(rows["order"][chosen], kind="stable")]
        mine, own, consumed = rows[chosen], owners[chosen], kept[chosen]
        if own.size and name in buffer.tables:
            holders[own] += 1
            buffer.tables[name].add_rows(
                keys[own].tolist(),
                mine["priority"],
                items["policy_version"][own],
                items["nbytes"][own],
                mine["order"],
                np.minimum(mine["inserted_at"] - offset, now),  # nothing comes from the future: the clock was set back
                np.where(consumed, 1, mine["times_sampled"]),
                None if labels is None else [labels[owner] for owner in own.tolist()],
            )
            if consumed.any():
                _keep(buffer, buffer.tables[name], keys[own[consumed]], mine[consumed])
            continue
        if own.size:
            log.warning("table %r is not configured any more: its %d items are dropped", name, own.size)
            for watcher in buffer.watchers:
                watcher.changed(keys[own].tolist())
    forwarded: dict[int, tuple[str, ...]] = {}
    passed = np.flatnonzero(rows["kind"] == FORWARDED)
    for owner, number in zip(owners[passed].tolist(), rows["table"][passed].tolist(), strict=True):
        if names.get(number) in buffer.tables:
            forwarded[owner] = (*forwarded.get(owner, ()), names[number])
    columns = (
        keys.tolist(),
        items["nbytes"].tolist(),
        items["policy_version"].tolist(),
        np.minimum(items["inserted_at"] - offset, now).tolist(),
        holders.tolist(),
    )
    loaded = dict(zip(columns[0], map(Item, *columns[1:]), strict=True))
    for owner, tables in forwarded.items():
        loaded[columns[0][owner]].forwarded = tables
    buffer.items.update(loaded)
    if labels is not None:
        buffer.items.label(columns[0], labels)
    for extension in buffer.extensions:
        if extension.mark:
            extension.load_marked(keys[items["permit"] == extension.mark].tolist())
    buffer.items.bytes += int(items["nbytes"].sum())
    unheld = keys[holders == 0].tolist()  # they are in no table that is configured
    buffer.items.hold(unheld)
    for watcher in buffer.watchers:
        watcher.changed(unheld)
    buffer.items.release(unheld)


def _keep(buffer: ReplayBuffer, table: Table, keys: KeyArray, rows: npt.NDArray[np.void]) -> None:
    """These rows (n,), which are in the table, were consumed and kept before."""
    table.retain(keys)
    numbers, permits = rows["times_sampled"].tolist(), (rows["kind"] == KEPT_WITH_PERMIT).tolist()
    history = History.of(buffer)
    assert history is not None
    history.keep_again(table, keys.tolist(), map(Consumed, numbers, permits))


def reconcile(buffer: ReplayBuffer) -> None:
    """Makes all that was loaded fit the configuration. What that costs is logged."""
    for extension in buffer.extensions:
        extension.reconcile()
    for table in buffer.tables.values():
        size = table.size
        if lost := table.reconcile():
            log.warning("table %r: %d items are lost", table.name, lost)
        if evicted := size - table.size:
            log.warning("table %r: %d items evicted, for its bounds are lower now", table.name, evicted)
        table.drop_stale()
    nbytes = buffer.items.bytes
    if why := buffer.items.why_full(0, buffer.trained):
        log.warning("%s: 0 items evicted, for too few can be", why)
    elif evicted := buffer.items.make_room(buffer.trained):
        log.warning("%d bytes + 0 > max_bytes %s: %d items evicted", nbytes, buffer.items.max_bytes, evicted)
    buffer.items.freed = False
