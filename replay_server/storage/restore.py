"""Restore: fills a new buffer from the records of an older one."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from replay_server.errors import Refused
from replay_server.storage import records
from replay_server.storage.records import (
    ADMISSION,
    ANSWER,
    ENDED,
    FORWARDED,
    IN_TABLE,
    LEASE,
    POLICY,
    SCOPE,
    TABLE,
    Damaged,
    State,
    table_numbers,
    unpack,
    unpack_named,
)
from replay_server.tables.answers import Answer
from replay_server.tables.buffer import Policy, ReplayBuffer
from replay_server.tables.items import Item

log = logging.getLogger("replay_server")


def restore(buffer: ReplayBuffer, state: State) -> None:
    """Fills a new buffer. Items that do not fit its configuration are dropped or evicted, and logged."""
    now = buffer.clock()
    offset = records.time_offset(state.state_records, now)
    scopes: list[Any] = []
    admission: dict[str, Any] | None = None
    ended: list[tuple[int, list[int]]] = []
    leases: list[Any] = []
    answers: list[Any] = []
    for name, record in state.state_records.items():
        if name.startswith((SCOPE, ENDED, LEASE, ANSWER)):
            try:
                value = unpack(record)
            except Damaged:
                state.damaged += 1
                continue
            if name.startswith(SCOPE):
                scopes.append(value)
            elif name.startswith(ANSWER):
                answers.append(value)
            elif name.startswith(LEASE):
                leases.append(value)
            else:
                ended.append((value[0], np.frombuffer(value[1], dtype="<u8").tolist()))
            continue
        value = unpack_named(name, record)
        if name.startswith(TABLE) and value["name"] in buffer.tables:
            buffer.tables[value["name"]].load_state_dict(value)
        elif name == POLICY:
            load_policy(buffer, Policy(value[0], value[1], min(value[2] - offset, now)))
        elif name == ADMISSION:
            admission = value
    if buffer.admission is not None:
        buffer.admission.load_state_dict(admission, offset, buffer.policy.version)
    for table_name, scope, _, keys in sorted(scopes, key=lambda value: value[2]):
        if table_name in buffer.tables:
            buffer.tables[table_name].scopes.load(scope, np.frombuffer(keys, dtype="<u8").tolist())
    with no_garbage_collection():
        _restore_items(buffer, state, offset)
    buffer.known_keys.remember(state.known_keys)
    buffer.outstanding.ended.load(ended)
    buffer.answers.load((request_id, Answer(*answer)) for _, request_id, *answer in sorted(answers))
    # Before the tables drop what is stale or too much: these items are in their readers' hands.
    for batch_id, table_name, scope, seconds, keys in leases:
        leased = np.frombuffer(keys, dtype="<u8").astype(np.uint64)
        buffer.outstanding.restore_lease(batch_id, table_name, leased, scope, seconds)
    reconcile(buffer)


def _restore_items(buffer: ReplayBuffer, state: State, offset: float) -> None:
    now = buffer.clock()
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
                np.minimum(mine["inserted_at"] - offset, now),  # nothing comes from the future: the clock was set back
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
        np.minimum(items["inserted_at"] - offset, now).tolist(),
        holders.tolist(),
        (items["unused_permit"] != 0).tolist(),
    )
    loaded = dict(zip(columns[0], map(Item, *columns[1:]), strict=True))
    for owner, tables in forwarded.items():
        loaded[columns[0][owner]].forwarded = tables
    load_items(buffer, loaded, int(items["nbytes"].sum()), keys[holders == 0].tolist())


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Many new objects would make it walk through all of them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load_policy(buffer: ReplayBuffer, policy: Policy) -> None:
    buffer.policy = policy
    for table in buffer.tables.values():
        table.set_policy_version(policy.version)


def load_items(buffer: ReplayBuffer, loaded: Mapping[int, Item], nbytes: int, unheld: Sequence[int]) -> None:
    """Restores items of `nbytes` in all, whose rows are in their tables already. Those without any row are deleted."""
    items = buffer.items
    items.update(loaded)
    items.bytes += nbytes
    items.hold(unheld)
    buffer.left(unheld)


def reconcile(buffer: ReplayBuffer) -> None:
    """Makes all that was loaded fit the configuration. What that costs is logged."""
    if buffer.admission is not None:
        buffer.admission.expire()
    for table in buffer.tables.values():
        size = table.size
        if lost := table.reconcile():
            log.warning("table %r: %d items are lost", table.name, lost)
        if evicted := size - table.size:
            log.warning("table %r: %d items evicted, for its bounds are lower now", table.name, evicted)
        table.drop_stale(buffer.policy.version)
    if why := buffer.items.why_full(0):
        tables = list(buffer.tables.values())
        try:
            buffer.items.check_room(0, tables)
            log.warning("%s: %d items evicted", why, buffer.items.make_room(tables))
        except Refused:
            log.warning("%s: 0 items evicted, for too few can be", why)
    buffer.items.freed = False
