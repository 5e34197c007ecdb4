"""ChangeCollector: is told of every change of a buffer, and turns the changes into records.

Outstanding batches are recorded as if they had not been drawn. After a crash no reader can take them any more, so their
items are back in their table. A lease has a record beside them: a restart draws its batch again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from replay_server.storage import records
from replay_server.storage.records import (
    ADMISSION,
    ANSWER,
    CLOCK,
    ENDED,
    FORWARDED,
    ITEM,
    LEASE,
    POLICY,
    ROW,
    SCOPE,
    TABLE,
    Damaged,
    Delta,
    ItemRecords,
    State,
    StateRecord,
    pack,
    pack_items,
    table_numbers,
    unpack,
)
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.columns import IntArray, KeyArray
from replay_server.tables.items import Item
from replay_server.tables.table import Table

_KEPT = (SCOPE, ENDED, LEASE, ANSWER)
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
        self._changed_scopes: set[tuple[str, str]] = set()
        self._changed_ended: set[int] = set()
        # A checkpoint contains those that there are. An answer or a scope it does not need.
        self._changed_leases = set(buffer.outstanding.leased)
        self._changed_answers: dict[int, None] = {}
        self._inserted: list[int] = []
        self._written = dict(state.state_records)
        """The state records that were last written."""
        self._unwritten: list[StateRecord] = []
        """State records that could not be written, and that would not come again by themselves."""
        self._removed_obsolete = False
        self._stamps = count(max(time.time_ns(), _last_stamp(state) + 1))  # the wall clock may have been set back
        """Scopes are restored in the order in which they were last used."""
        numbers = {name: number for number, name in table_numbers(state).items()}
        free = max(numbers.values(), default=0) + 1
        self._tables = {name: numbers.get(name, free + place) for place, name in enumerate(buffer.tables)}
        self.changed(state.skipped)

    # ------------------------------------------------------------------------------------------------ watching

    def changed(self, keys: Iterable[int]) -> None:
        self._changed.update(keys)

    def inserted(self, keys: Iterable[int]) -> None:
        self._inserted.extend(keys)

    def scope_changed(self, table: str, scope: str) -> None:
        self._changed_scopes.add((table, scope))

    def ended_changed(self, block: int) -> None:
        self._changed_ended.add(block)

    def lease_changed(self, batch_id: int) -> None:
        self._changed_leases.add(batch_id)

    def answers_changed(self, request_ids: Iterable[int]) -> None:
        self._changed_answers.update(dict.fromkeys(request_ids))

    # ------------------------------------------------------------------------------------------------ collecting

    def collect(self) -> Delta:
        """Everything that changed since the last call, as of now."""
        buffer = self._buffer
        keys, self._changed = self._changed, set()
        inserted, self._inserted = self._inserted, []
        there = [key for key in keys if key in buffer.items]
        packed = pack_items(self.item_records(np.array(sorted(there), dtype=np.uint64)))
        kept = {key for key, _ in packed}
        unwritten, self._unwritten = self._unwritten, []
        state_records = [*unwritten, *self._state_records()]
        return Delta(packed, sorted(keys - kept), state_records, buffer.known_keys.among(inserted))

    def pending(self) -> int:
        """The most items that the next Delta can have."""
        return len(self._changed)

    def written(self, delta: Delta) -> None:
        """`delta` is written."""
        for name, record in delta.state_records:
            if record is None:
                self._written.pop(name, None)
            else:
                self._written[name] = record

    def not_written(self, delta: Delta) -> None:
        """`delta` could not be written, so the next Delta has to contain it."""
        self._changed.update(key for key, _ in delta.items)
        self._changed.update(delta.removed)
        self._inserted[:0] = delta.known_keys
        # All other state records come again by themselves, because they differ from what was last written.
        self._unwritten = [
            entry for entry in delta.state_records if entry.record is None or entry.name.startswith(_KEPT)
        ]

    def item_records(self, keys: npt.NDArray[np.uint64], found: Sequence[Item] | None = None) -> ItemRecords:
        """The records of `keys`, in the same order, all of them in the buffer; `found` are their items, if known. Items
        that only batches hold are left out."""
        buffer, offset = self._buffer, self._offset
        if found is None:
            found = [buffer.items[key] for key in keys.tolist()]
        owners: list[IntArray] = []
        rows: list[npt.NDArray[np.void]] = []
        for table in buffer.tables.values():
            of_items, of_table = rows_in_table(table, keys, *buffer.outstanding.drawn(table))
            of_table["table"], of_table["inserted_at"] = self._tables[table.name], of_table["inserted_at"] + offset
            owners.append(of_items)
            rows.append(of_table)
        in_a_table = np.zeros(keys.size, dtype=np.bool_)
        in_a_table[np.concatenate(owners)] = True
        forwarded = [
            (place, self._tables[name]) for place, item in enumerate(found) if item.forwarded for name in item.forwarded
        ]
        if forwarded:
            passed = np.zeros(len(forwarded), dtype=ROW)
            passed["table"], passed["kind"] = [table for _, table in forwarded], FORWARDED
            owners.append(np.array([place for place, _ in forwarded]))
            rows.append(passed)
        all_owners, all_rows = np.concatenate(owners), np.concatenate(rows)
        kept = in_a_table[all_owners]
        order = np.argsort(all_owners[kept], kind="stable")
        renumbered = np.cumsum(in_a_table) - 1
        items = np.zeros(keys.size, dtype=ITEM)
        items["key"] = keys
        for name in ("policy_version", "nbytes", "inserted_at", "unused_permit"):
            items[name] = np.fromiter(map(attrgetter(name), found), dtype=ITEM[name], count=len(found))
        items["inserted_at"] += offset
        return ItemRecords(items[in_a_table], all_rows[kept][order], renumbered[all_owners[kept][order]])

    def _state_records(self) -> Iterator[StateRecord]:
        """The state records that differ from what was last written."""
        buffer, offset = self._buffer, self._offset
        values: list[tuple[bytes, Any]] = [
            (TABLE + b"%d" % self._tables[name], table.state_dict()) for name, table in buffer.tables.items()
        ]
        policy = buffer.policy
        values.append((CLOCK, self._clock_record))
        values.append((POLICY, [policy.version, policy.weights, policy.set_at + offset]))
        if buffer.admission is not None:
            admission = buffer.admission.state_dict(offset)
            # Items that only batches hold are not recorded, so nothing would give their permits back after a restart.
            admission["accepted"] -= buffer.outstanding.unused_permits()
            values.append((ADMISSION, admission))
        if not self._removed_obsolete:  # records of tables, and of an [admission], that are no longer configured
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
        for block in sorted(self._changed_ended):
            ids = buffer.outstanding.ended.block(block)
            packed = None if ids is None else pack([block, np.array(ids, dtype="<u8").tobytes()])
            yield StateRecord(ENDED + b"%d" % block, packed)
        self._changed_ended.clear()
        for batch_id in sorted(self._changed_leases):
            yield StateRecord(LEASE + b"%d" % batch_id, self._lease_record(batch_id))
        self._changed_leases.clear()
        for request_id in self._changed_answers:
            answer = buffer.answers.get(request_id)
            packed = None if answer is None else pack([next(self._stamps), request_id, *answer])
            yield StateRecord(ANSWER + b"%d" % request_id, packed)
        self._changed_answers.clear()

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


def _last_stamp(state: State) -> int:
    """The highest stamp of the scopes and answers that are recorded."""
    stamps = [0]
    for name, record in state.state_records.items():
        if name.startswith((SCOPE, ANSWER)):
            with suppress(Damaged):
                value = unpack(record)
                stamps.append(value[2] if name.startswith(SCOPE) else value[0])
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
    rows = np.zeros(places.size, dtype=ROW)
    for name in ("order", "times_sampled", "priority", "inserted_at"):
        rows[name] = getattr(columns, name)[slots[places]]
    if drawn.size:
        at = np.searchsorted(drawn, keys[places]).clip(max=drawn.size - 1)
        rows["times_sampled"] -= np.where(drawn[at] == keys[places], times[at], 0)
    return places, rows
