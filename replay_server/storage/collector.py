"""ChangeCollector: is told of every change of a buffer, and turns the changes into records.

Outstanding batches are recorded as if they had not been drawn. After a crash no reader can take them any more, so their
items are back in their table.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from replay_server.storage import records
from replay_server.storage.records import (
    ADMISSION,
    FORWARDED,
    ITEM,
    POLICY,
    ROW,
    SCOPE,
    TABLE,
    Delta,
    Items,
    State,
    StateRecord,
    pack,
    pack_items,
    table_numbers,
)
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.columns import IntArray


class ChangeCollector:
    """Hears of changes and turns them into records."""

    def __init__(self, buffer: ReplayBuffer, state: State | None = None) -> None:
        """`state` is what has been written so far."""
        state = State() if state is None else state
        self._buffer = buffer
        self._offset = records.wall_offset(buffer.clock())
        self._keys: set[int] = set()
        self._scopes: set[tuple[str, str]] = set()
        self._seen: list[int] = []
        self._written = dict(state.pieces)
        """The pieces as they were last written."""
        self._again: list[StateRecord] = []
        """Pieces that could not be written."""
        self._started = False
        self._stamps = count(time.time_ns())
        """Scopes are restored in the order in which they were last used."""
        numbers = {name: number for number, name in table_numbers(state).items()}
        free = max(numbers.values(), default=0) + 1
        self._tables = {name: numbers.get(name, free + place) for place, name in enumerate(buffer.tables)}
        self.changed(state.skipped)

    def changed(self, keys: Iterable[int]) -> None:
        """Items whose record may no longer be true."""
        self._keys.update(keys)

    def inserted(self, keys: Iterable[int]) -> None:
        self._seen.extend(keys)

    def scope_changed(self, table: str, scope: str) -> None:
        self._scopes.add((table, scope))

    def collect(self) -> Delta:
        """What changed since the last time, as of now."""
        buffer = self._buffer
        keys, self._keys = self._keys, set()
        seen, self._seen = self._seen, []
        there = [key for key in keys if key in buffer.items]
        items = self.items(np.array(sorted(there), dtype=np.uint64))
        packed = pack_items(items)
        kept = {key for key, _ in packed}
        again, self._again = self._again, []
        return Delta(packed, sorted(keys - kept), [*again, *self._pieces()], buffer.seen(seen))

    def pending(self) -> int:
        """Items that the next Delta will have, at most."""
        return len(self._keys)

    def written(self, delta: Delta) -> None:
        """The Delta is where it belongs."""
        for name, record in delta.pieces:
            if record is None:
                self._written.pop(name, None)
            else:
                self._written[name] = record

    def not_written(self, delta: Delta) -> None:
        """The Delta could not be written: all of it has to come again."""
        self._keys.update(key for key, _ in delta.items)
        self._keys.update(delta.removed)
        self._seen[:0] = delta.seen
        # The others differ from what was written last, so they come again anyhow.
        self._again = [piece for piece in delta.pieces if piece.record is None or piece.name.startswith(SCOPE)]

    def items(self, keys: npt.NDArray[np.uint64]) -> Items:
        """Those of the items `keys`, which the buffer has, that would be in a table if nothing were in hand."""
        buffer, offset = self._buffer, self._offset
        names: list[int] = keys.tolist()
        found = [buffer.items[key] for key in names]
        places: list[IntArray] = []
        rows: list[npt.NDArray[np.void]] = []
        for table in buffer.tables.values():
            at, columns = table.rows(keys, *buffer.drawn(table))
            columns["table"], columns["inserted_at"] = self._tables[table.name], columns["inserted_at"] + offset
            places.append(at)
            rows.append(columns)
        held = np.zeros(keys.size, dtype=np.bool_)
        held[np.concatenate(places)] = True
        forwarded = [
            (place, self._tables[name]) for place, item in enumerate(found) if item.forwarded for name in item.forwarded
        ]
        if forwarded:
            passed = np.zeros(len(forwarded), dtype=ROW)
            passed["table"], passed["kind"] = [table for _, table in forwarded], FORWARDED
            places.append(np.array([place for place, _ in forwarded]))
            rows.append(passed)
        owners, all_rows = np.concatenate(places), np.concatenate(rows)
        kept = held[owners]
        order = np.argsort(owners[kept], kind="stable")
        renumbered = np.cumsum(held) - 1
        items = np.zeros(keys.size, dtype=ITEM)
        items["key"] = keys
        items["policy_version"] = [item.policy_version for item in found]
        items["nbytes"] = [item.nbytes for item in found]
        items["inserted_at"] = [item.inserted_at + offset for item in found]
        items["unused_permit"] = [item.unused_permit for item in found]
        return Items(items[held], all_rows[kept][order], renumbered[owners[kept][order]])

    def _pieces(self) -> Iterator[StateRecord]:
        """The small records that are not as they were last written."""
        buffer, offset = self._buffer, self._offset
        values: list[tuple[bytes, Any]] = [
            (TABLE + b"%d" % self._tables[name], table.state_dict()) for name, table in buffer.tables.items()
        ]
        policy = buffer.policy
        values.append((POLICY, [policy.version, policy.weights, policy.set_at + offset]))
        if buffer.admission is not None:
            values.append((ADMISSION, buffer.admission.state_dict(offset)))
        if not self._started:  # what belongs to tables and to an [admission] that are no longer configured
            self._started = True
            kept = {name for name, _ in values}
            yield from (
                StateRecord(name, None) for name in self._written if name not in kept and not name.startswith(SCOPE)
            )
            self._scopes.update((name, "") for name in buffer.tables)
        for name, value in values:
            if self._written.get(name) != (record := pack(value)):
                yield StateRecord(name, record)
        if self._scopes:
            yield from self._scope_pieces()

    def _scope_pieces(self) -> Iterator[StateRecord]:
        changed, self._scopes = self._scopes, set()
        tables = self._buffer.tables
        for name in {name for name, _ in changed}:
            prefix = SCOPE + b"%d/" % self._tables[name]
            kept = {prefix + xxh3_128_digest(scope.encode()) for scope in tables[name].scopes}
            yield from (StateRecord(old, None) for old in self._written if old.startswith(prefix) and old not in kept)
        for name, scope in changed:
            if (keys := tables[name].scopes.get(scope)) is not None:
                given = keys - self._buffer.drawn_in_scope(tables[name], scope)
                record = pack([name, scope, next(self._stamps), np.array(sorted(given), dtype="<u8").tobytes()])
                yield StateRecord(SCOPE + b"%d/" % self._tables[name] + xxh3_128_digest(scope.encode()), record)
