"""Snapshot: what of a buffer is kept, as records, and a buffer filled from them.

What is in hand (prefetched, leased) is kept as if it had not been drawn: after a crash nobody can take it any more, so
it is back in its table. A Collector hears of changes and turns them into records; each Delta leads from the state of
the last one to the state of the moment, across all tables.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from replay_server.storage.records import (
    FORWARDED,
    IN_TABLE,
    ITEM,
    ROW,
    Damaged,
    Items,
    Piece,
    join_items,
    pack,
    pack_items,
    unpack,
)
from replay_server.tables.buffer import Item, ReplayBuffer
from replay_server.tables.columns import IntArray

log = logging.getLogger("replay_server")

_TABLE, _SCOPE, _POLICY, _ADMISSION = b"table/", b"scope/", b"policy", b"admission"


def wall_offset(clock: float) -> float:
    """What turns seconds of the server's clock, which shows `clock`, into wall-clock seconds."""
    return time.time() - clock


@dataclass
class Delta:
    """All that changed since the Delta before."""

    items: list[tuple[int, bytes]]
    """(key, record), ascending."""
    removed: list[int]
    """Keys of items that are gone; some may never have been written."""
    pieces: list[Piece]
    """Tables, scopes, policy, admission."""
    seen: list[int]
    """Inserted keys, in order."""

    def __bool__(self) -> bool:
        return bool(self.items or self.removed or self.pieces or self.seen)


@dataclass
class State:
    """A whole buffer but for its payloads."""

    pieces: dict[bytes, bytes] = field(default_factory=dict)
    items: Items = field(default_factory=lambda: join_items([]))
    seen: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    """Keys of items that are left out because their bytes are not what was written."""
    damaged: int = 0
    """Other records that are left out for that reason."""


class Collector:
    """Hears of changes and turns them into records."""

    def __init__(self, buffer: ReplayBuffer, state: State | None = None) -> None:
        """`state` is what has been written so far."""
        state = State() if state is None else state
        self._buffer = buffer
        self._offset = wall_offset(buffer.clock())
        self._keys: set[int] = set()
        self._scopes: set[tuple[str, str]] = set()
        self._seen: list[int] = []
        self._written = dict(state.pieces)
        """The pieces as they were last written."""
        self._again: list[Piece] = []
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
        self._again = [piece for piece in delta.pieces if piece.record is None or piece.name.startswith(_SCOPE)]

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

    def _pieces(self) -> Iterator[Piece]:
        """The small records that are not as they were last written."""
        buffer, offset = self._buffer, self._offset
        values: list[tuple[bytes, Any]] = [
            (_TABLE + b"%d" % self._tables[name], table.state_dict()) for name, table in buffer.tables.items()
        ]
        policy = buffer.policy
        values.append((_POLICY, [policy.version, policy.weights, policy.set_at + offset]))
        if buffer.admission is not None:
            values.append((_ADMISSION, buffer.admission.state_dict(offset)))
        if not self._started:  # what belongs to tables and to an [admission] that are no longer configured
            self._started = True
            kept = {name for name, _ in values}
            yield from (Piece(name, None) for name in self._written if name not in kept and not name.startswith(_SCOPE))
            self._scopes.update((name, "") for name in buffer.tables)
        for name, value in values:
            if self._written.get(name) != (record := pack(value)):
                yield Piece(name, record)
        if self._scopes:
            yield from self._scope_pieces()

    def _scope_pieces(self) -> Iterator[Piece]:
        changed, self._scopes = self._scopes, set()
        tables = self._buffer.tables
        for name in {name for name, _ in changed}:
            prefix = _SCOPE + b"%d/" % self._tables[name]
            kept = {prefix + xxh3_128_digest(scope.encode()) for scope in tables[name].scopes}
            yield from (Piece(old, None) for old in self._written if old.startswith(prefix) and old not in kept)
        for name, scope in changed:
            if (keys := tables[name].scopes.get(scope)) is not None:
                given = keys - self._buffer.drawn_in_scope(tables[name], scope)
                record = pack([name, scope, next(self._stamps), np.array(sorted(given), dtype="<u8").tobytes()])
                yield Piece(_SCOPE + b"%d/" % self._tables[name] + xxh3_128_digest(scope.encode()), record)


def table_numbers(state: State) -> dict[int, str]:
    """The tables that the rows of `state` name by number. Raises ValueError if that cannot be told."""
    return {
        int(name.removeprefix(_TABLE)): _unpack(name, record)["name"]
        for name, record in state.pieces.items()
        if name.startswith(_TABLE)
    }


def _unpack(name: bytes, record: bytes) -> Any:
    try:
        return unpack(record)
    except Damaged:
        raise ValueError(f"the record {name.decode(errors='replace')!r} is damaged") from None


def restore(buffer: ReplayBuffer, state: State) -> None:
    """Fills a new buffer. What does not fit its configuration is handled and said in the log."""
    offset = wall_offset(buffer.clock())
    scopes: list[Any] = []
    for name, record in state.pieces.items():
        if name.startswith(_SCOPE):
            try:
                scopes.append(unpack(record))
            except Damaged:
                state.damaged += 1
            continue
        value = _unpack(name, record)
        if name.startswith(_TABLE) and value["name"] in buffer.tables:
            buffer.tables[value["name"]].load_state_dict(value)
        elif name == _POLICY:
            buffer.load_policy(value[0], value[1], value[2] - offset)
        elif name == _ADMISSION and buffer.admission is not None:
            buffer.admission.load_state_dict(value, offset)
    for table_name, scope, _, keys in sorted(scopes, key=lambda value: value[2]):
        if table_name in buffer.tables:
            buffer.tables[table_name].scopes[scope] = set(np.frombuffer(keys, dtype="<u8").tolist())
    with _no_garbage_collection():  # it would walk through millions of new objects again and again
        _restore_items(buffer, state, offset)
    buffer.remember(state.seen)
    buffer.settle()


def _restore_items(buffer: ReplayBuffer, state: State, offset: float) -> None:
    items, rows, owners = state.items.items, state.items.rows, state.items.owners
    keys, in_table = items["key"], rows["kind"] == IN_TABLE
    holders = np.zeros(keys.size, dtype=np.int64)
    names = table_numbers(state)
    for number, name in names.items():
        chosen = np.flatnonzero(in_table & (rows["table"] == number))
        chosen = chosen[np.argsort(rows["order"][chosen], kind="stable")]
        mine, own = rows[chosen], owners[chosen]
        if name in buffer.tables:
            holders[own] += 1
            buffer.tables[name].load_rows(
                keys[own],
                mine["priority"],
                items["policy_version"][own],
                items["nbytes"][own],
                mine["order"],
                mine["inserted_at"] - offset,
                mine["times_sampled"],
            )
            continue
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
        (items["inserted_at"] - offset).tolist(),
        holders.tolist(),
        (items["unused_permit"] != 0).tolist(),
    )
    loaded = {key: Item(*shared) for key, *shared in zip(*columns, strict=True)}
    for owner, tables in forwarded.items():
        loaded[columns[0][owner]].forwarded = tables
    buffer.load_items(loaded)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
