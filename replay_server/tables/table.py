"""Table: the items of one table and every change to them. Nothing here waits and nothing here knows about gRPC.

An item is a key with its columns; its payload belongs to the buffer, which counts the tables and batches that hold it:

    insert ──▶ in the table ──draw──▶ in the table and in a SampleBatch ──take──▶ in the table, or consumed
                    │                              └────────────give_back──▶ as before the draw
                    └── evicted, deleted, stale: gone
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_server.storage.records import ROW
from replay_server.tables.batches import SampleBatch, SampleRequest
from replay_server.tables.columns import Columns, FloatArray, IntArray, KeyArray
from replay_server.tables.config import TableConfig
from replay_server.tables.meters import BlockedTime, Meter
from replay_server.tables.selectors import effective_priorities

ITEM_ORDERS = ("age", "priority", "policy_version", "times_sampled", "size")
_MAX_SCOPES = 1024
"""Scopes remembered by a table; the one used longest ago is forgotten first."""
_MAX_SCOPED_KEYS = 1 << 20
"""Keys remembered by all scopes of a table together, but for those of the current scope that are still here."""


@dataclass
class Counters:
    """What happened since the start or the last reset; the fields of TableInfo of the same names."""

    inserts: int = 0
    samples: int = 0
    consumed: int = 0
    deleted: int = 0
    evicted: int = 0
    evicted_unsampled: int = 0
    stale: int = 0
    stale_refused: int = 0
    duplicates: int = 0
    forwarded: int = 0
    forward_refused: int = 0


@dataclass
class Table:
    config: TableConfig
    clock: Callable[[], float]
    """Seconds; never goes back."""
    on_leave: Callable[[Sequence[int]], None]
    """Called with the keys of items that leave the table, except those that leave into a SampleBatch."""
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.config.seed)
        self.inserted = Meter(self.clock())
        self.sampled = Meter(self.clock())
        self.insert_blocked = BlockedTime(self.clock())
        self.sample_blocked = BlockedTime(self.clock())
        self._order = 0
        self.epoch = 0
        self._clear(current_version=0)

    def _clear(self, current_version: int) -> None:
        self.columns = Columns(current_version)
        self.limiter = self.config.rate_limiter.build()
        self.sampler = self.config.sampler.build(self.columns)
        # One structure serves both roles where they agree, as in a queue.
        same = self.config.remover == self.config.sampler
        self.remover = self.sampler if same else self.config.remover.build(self.columns)
        self.bytes = 0
        self.outstanding = 0
        """Rows of batches that are neither taken nor given back."""
        self._consumed: dict[int, tuple[SampleBatch, int]] = {}
        """Rows in hand that left the table with their draw, by key: other batches in hand may hold the same item."""
        self.scopes: OrderedDict[str, set[int]] = OrderedDict()
        self._trim_scopes_at = _MAX_SCOPED_KEYS
        self.epoch += 1

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def size(self) -> int:
        return len(self.columns)

    def __contains__(self, key: int) -> bool:
        return key in self.columns.slots

    def has_or_may_return(self, key: int) -> bool:
        """Whether the item is here, or left with a batch that may still give it back."""
        return key in self or key in self._consumed

    def consumed_keys(self) -> list[int]:
        """Items that left with batches in hand."""
        return list(self._consumed)

    # ------------------------------------------------------------------------------------------------ insert

    def why_no_insert(self, nbytes: int) -> str | None:
        """Why an item of `nbytes` has to wait; None: it may come in."""
        if not self.limiter.can_insert(1):
            return self.limiter.why_no_insert(1)
        if self.config.when_full == "block":
            return self.why_full(nbytes)
        return None

    def why_full(self, nbytes: int) -> str | None:
        """Which bound an item of `nbytes` would break."""
        if self.size >= self.config.max_size:
            return f"size {self.size} = max_size {self.config.max_size}"
        if self.config.max_bytes is not None and self.bytes + nbytes > self.config.max_bytes:
            return f"{self.bytes} bytes + {nbytes} > max_bytes {self.config.max_bytes}"
        return None

    def too_stale(self, policy_version: int, current: int) -> bool:
        return self.config.max_staleness is not None and current - policy_version > self.config.max_staleness

    def room(self) -> float:
        """How many items could come in now, one after the other, if bytes do not matter; evicting only from a Fifo.

        Where another remover would have to choose, this ends: each choice depends on the insert before it.
        """
        most = self.limiter.most_inserts()
        if self.config.when_full == "evict" and self.config.remover.type == "fifo":
            return min(most, self.config.max_size)
        return min(most, self.config.max_size - self.size)

    def insert(self, keys: Sequence[int], priorities: FloatArray, policy_versions: IntArray, sizes: IntArray) -> None:
        """Adds items, after making room for all of them. The caller has asked `why_no_insert`, or `room`."""
        n, nbytes = len(keys), int(sizes.sum())
        while self.size and (
            self.size + n > self.config.max_size
            or (self.config.max_bytes is not None and self.bytes + nbytes > self.config.max_bytes)
        ):
            self.evict(max(1, self.size + n - self.config.max_size))
        now = self.clock()
        orders = np.arange(self._order + 1, self._order + n + 1)
        self._order += n
        self._add(keys, priorities, policy_versions, sizes, orders, now, 0)
        self.limiter.inserts += n
        self.counters.inserts += n
        self.inserted.add(n, now)

    def evict(self, n: int = 1) -> None:
        """Removes n items that the remover names."""
        slots, _ = self.remover.select(n, self.rng)
        if slots.size < n:  # `prioritized` does not name items of priority 0; of them the oldest go
            others = self.columns.used()
            slots = np.concatenate([slots, others[~np.isin(others, slots)]])[:n]
        self.counters.evicted += n
        self.counters.evicted_unsampled += int((self.columns.times_sampled[slots] == 0).sum())
        self.limiter.deletes += n
        self._remove(slots)

    def _add(
        self,
        keys: Sequence[int],
        priorities: FloatArray,
        policy_versions: IntArray,
        sizes: IntArray,
        orders: IntArray,
        inserted_at: FloatArray | float,
        times_sampled: IntArray | int,
    ) -> None:
        columns = self.columns
        slots = columns.add(keys)
        columns.priority[slots] = priorities
        columns.policy_version[slots] = policy_versions
        columns.order[slots] = orders
        columns.inserted_at[slots] = inserted_at
        columns.size[slots] = sizes
        columns.times_sampled[slots] = times_sampled
        self.bytes += int(sizes.sum())
        self.sampler.insert(slots)
        if self.remover is not self.sampler:
            self.remover.insert(slots)

    def _remove(self, slots: IntArray, leaves: bool = True) -> None:
        if not slots.size:
            return
        self.sampler.delete(slots)
        if self.remover is not self.sampler:
            self.remover.delete(slots)
        self.bytes -= int(self.columns.size[slots].sum())
        keys = self.columns.remove(slots)
        if leaves:
            self.on_leave(keys)

    # ------------------------------------------------------------------------------------------------ sample

    def available(self, request: SampleRequest) -> int:
        """How many rows a batch for `request` could have, the limiter apart."""
        selectable = self.sampler.selectable()
        if not request.distinct:
            return request.num_samples if selectable else 0
        return selectable - len(self._excluded(request))

    def why_no_sample(self, request: SampleRequest, n: int) -> str | None:
        """Why a batch of n rows has to wait; None: it may be drawn."""
        if not self.limiter.can_sample(n):
            return self.limiter.why_no_sample(n)
        if (available := self.available(request)) < n:
            excluded = len(self._excluded(request))
            left_out = f", {excluded} excluded" if excluded else ""
            if unselectable := self.size - self.sampler.selectable():
                left_out += f", {unselectable} of priority 0"
            return f"{available} of {n} samples available (size {self.size}{left_out})"
        return None

    def most_available(self, request: SampleRequest) -> int:
        """The largest batch that could be drawn for `request` now, at most what it asks for."""
        return int(max(0, min(request.num_samples, self.limiter.most_samples(), self.available(request))))

    def draw(self, request: SampleRequest, n: int) -> SampleBatch:
        """Draws n rows. The caller has asked `why_no_sample`."""
        columns = self.columns
        if request.distinct:
            excluded = np.array(sorted(self._excluded(request)), dtype=np.int64)
            slots, probabilities = self.sampler.select(n, self.rng, excluded)
        else:
            slots, probabilities = self.sampler.select_repeated(n, self.rng)
        assert slots.size == n, (slots.size, n)
        np.add.at(columns.times_sampled, slots, 1)
        times_sampled = columns.times_sampled[slots]
        limit = self.config.max_times_sampled
        batch = SampleBatch(
            keys=columns.key[slots],
            priorities=columns.priority[slots],
            probabilities=probabilities,
            policy_versions=columns.policy_version[slots],
            inserted_at=columns.inserted_at[slots],
            times_sampled=times_sampled,
            sizes=columns.size[slots],
            orders=columns.order[slots],
            consumed=times_sampled >= limit if limit else np.zeros(n, dtype=np.bool_),
            table_size=self.size,
            scope=request.scope,
            epoch=self.epoch,
        )
        if request.scope:
            self._scope(request.scope).update(batch.keys.tolist())
        self._remove(slots[batch.consumed], leaves=False)
        for row in np.flatnonzero(batch.consumed).tolist():
            self._consumed[int(batch.keys[row])] = (batch, row)
        consumed = int(batch.consumed.sum())
        self.limiter.samples += n
        self.limiter.deletes += consumed
        self.counters.samples += n
        self.counters.consumed += consumed
        self.sampled.add(n, self.clock())
        self.outstanding += n
        return batch

    def take(self, batch: SampleBatch) -> None:
        """The batch is its reader's now."""
        if batch.epoch != self.epoch:
            return
        self.outstanding -= len(batch)
        for key in batch.keys[batch.consumed].tolist():
            del self._consumed[key]

    def give_back(self, batch: SampleBatch) -> list[int]:
        """Undoes the draw. Returns the rows that are in the table again; the others stay gone (reset, deleted)."""
        if batch.epoch != self.epoch:
            return []
        n, consumed = len(batch), int(batch.consumed.sum())
        self.outstanding -= n
        self.limiter.samples -= n
        self.limiter.deletes -= consumed
        self.counters.samples -= n
        self.counters.consumed -= consumed
        if batch.scope:
            self._scope(batch.scope).difference_update(batch.keys.tolist())
        back = batch.consumed
        for key in batch.keys[back].tolist():
            del self._consumed[key]
        if back.any():
            self._add(
                batch.keys[back].tolist(),
                batch.priorities[back],
                batch.policy_versions[back],
                batch.sizes[back],
                batch.orders[back],
                batch.inserted_at[back],
                batch.times_sampled[back] - 1,
            )
        for key in batch.keys[~back].tolist():
            if (slot := self.columns.slots.get(key)) is not None:
                self.columns.times_sampled[slot] -= 1
            elif (last := self._consumed.get(key)) is not None:
                last[0].times_sampled[last[1]] -= 1
        rows: list[int] = np.flatnonzero(back).tolist()
        return rows

    def _excluded(self, request: SampleRequest) -> set[int]:
        """The slots that `request` must not get and that the sampler might name."""
        keys: Iterable[int] = request.exclude
        if request.scope and (given := self.scopes.get(request.scope)):
            keys = given | request.exclude
        found = {slot for key in keys if (slot := self.columns.slots.get(key)) is not None}
        return {slot for slot in found if self.sampler.holds(slot)} if found else found

    def _scope(self, name: str) -> set[int]:
        keys = self.scopes.setdefault(name, set())
        self.scopes.move_to_end(name)
        if len(self.scopes) > _MAX_SCOPES:
            self.scopes.popitem(last=False)
        if (total := sum(map(len, self.scopes.values()))) > self._trim_scopes_at:
            # Keys that have left do not come again; of the rest, the scopes used longest ago are forgotten.
            for known in self.scopes.values():
                known.intersection_update([key for key in known if self.has_or_may_return(key)])
            total = sum(map(len, self.scopes.values()))
            while len(self.scopes) > 1 and total > _MAX_SCOPED_KEYS // 2:
                total -= len(self.scopes.popitem(last=False)[1])
            self._trim_scopes_at = max(_MAX_SCOPED_KEYS, 2 * total)
        return keys

    # ------------------------------------------------------------------------------------- update, delete, stale, reset

    def update_priorities(self, keys: KeyArray, priorities: FloatArray) -> tuple[int, list[int]]:
        """Sets the priorities (validated by the caller); of a key named twice the last counts.

        Returns how many items were updated, and the keys that are missing.
        """
        slots, missing = self.columns.find(keys), []
        if (absent := slots < 0).any():
            missing = list(dict.fromkeys(keys[absent].tolist()))
            slots, priorities = slots[~absent], priorities[~absent]
        last = self.columns.last_rows(slots)
        slots, priorities = slots[last], priorities[last]
        self.columns.priority[slots] = priorities
        self.sampler.update(slots)
        if self.remover is not self.sampler:
            self.remover.update(slots)
        return slots.size, missing

    def withdraw(self, keys: Sequence[int]) -> None:
        """Takes back the insertion of items that nobody has drawn."""
        self.limiter.inserts -= len(keys)
        self.counters.inserts -= len(keys)
        self._remove(self.columns.find(np.array(keys, dtype=np.uint64)))

    def delete(self, keys: Iterable[int]) -> list[int]:
        """Removes items. Returns missing keys."""
        wanted = dict.fromkeys(keys)
        found = [slot for key in wanted if (slot := self.columns.slots.get(key)) is not None]
        missing = [key for key in wanted if key not in self.columns.slots]
        self.counters.deleted += len(found)
        self.limiter.deletes += len(found)
        self._remove(np.array(found, dtype=np.int64))
        return missing

    def set_policy_version(self, current: int) -> None:
        """From now on priorities age against `current`, where a selector has a half-life."""
        before, self.columns.current_version = self.columns.current_version, current
        self.sampler.version_moved(before)
        if self.remover is not self.sampler:
            self.remover.version_moved(before)

    def drop_stale(self, current: int) -> int:
        """Drops every item that lags by more than `max_staleness`. Returns how many.

        To the limiter a stale drop is a delete, after the samples that the item still owed: it can give none any more,
        and the difference between inserts and samples, which bounds a queue, would otherwise never come down again.
        """
        if self.config.max_staleness is None or not self.size:
            return 0
        slots = self.columns.occupied()
        slots = slots[current - self.columns.policy_version[slots] > self.config.max_staleness]
        owed = np.maximum(0.0, self.limiter.samples_per_insert - self.columns.times_sampled[slots])
        self._remove(slots)
        self.limiter.deletes += slots.size
        self.limiter.samples += float(owed.sum())
        self.counters.stale += slots.size
        return int(slots.size)

    def reset(self) -> int:
        """Removes all items and sets all counters to 0. Returns how many items there were."""
        keys = list(self.columns.slots)
        self.counters = Counters()
        self._clear(self.columns.current_version)
        self.on_leave(keys)
        return len(keys)

    # ------------------------------------------------------------------------------------------------ look inside

    def select_items(
        self,
        *,
        order_by: str,
        descending: bool,
        min_priority: float,
        max_priority: float,
        min_version: float,
        max_version: float,
    ) -> IntArray:
        """The slots of the items within the bounds (all inclusive), by one of ITEM_ORDERS; ties older first."""
        columns, slots = self.columns, self.columns.used()
        priority, version = columns.priority[slots], columns.policy_version[slots]
        slots = slots[
            (priority >= min_priority)
            & (priority <= max_priority)
            & (version >= min_version)
            & (version <= max_version)
        ]
        if order_by == "age":  # ascending age: the youngest first
            return slots if descending else slots[::-1]
        values = getattr(columns, order_by)[slots]
        return slots[np.argsort(-values if descending else values, kind="stable")]

    def effective_priorities(self, slots: IntArray) -> FloatArray:
        """The priorities (n,) of `slots` (n,) as the sampler weighs them: after its exponent, and aged."""
        sampler = self.config.sampler
        return effective_priorities(self.columns, slots, sampler.exponent, sampler.half_life)

    def configure(self, config: TableConfig) -> None:
        """Puts another configuration (of the same name) into force, keeping items and counters."""
        assert config.name == self.name
        old, self.config = self.config, config
        limiter = config.rate_limiter.build()
        limiter.inserts, limiter.samples = self.limiter.inserts, self.limiter.samples
        limiter.deletes = self.limiter.deletes
        self.limiter = limiter
        if (config.sampler, config.remover) != (old.sampler, old.remover):
            self.sampler = config.sampler.build(self.columns)
            same = config.remover == config.sampler
            self.remover = self.sampler if same else config.remover.build(self.columns)
            slots = self.columns.used()
            if slots.size:
                self.sampler.insert(slots)
                if not same:
                    self.remover.insert(slots)
        self._fit()

    def _fit(self) -> None:
        """Lets go of what the configuration does not keep."""
        if (limit := self.config.max_times_sampled) and self.size:
            slots = self.columns.used()
            used_up = slots[self.columns.times_sampled[slots] >= limit]
            self.counters.consumed += used_up.size
            self.limiter.deletes += used_up.size
            self._remove(used_up)
        while self.size > self.config.max_size or self.bytes > (self.config.max_bytes or math.inf):
            self.evict(max(1, self.size - self.config.max_size))

    def counts(self) -> dict[str, int]:
        return {item.name: getattr(self.counters, item.name) for item in fields(Counters)}

    # ------------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """All but items and scopes, as if what is in hand had been given back."""
        limiter, consumed, rng = self.limiter, len(self._consumed), self.rng.bit_generator.state
        return {
            "name": self.name,
            "order": self._order,
            "limiter": [limiter.inserts, limiter.samples - self.outstanding, limiter.deletes - consumed],
            "counters": self.counts()
            | {"samples": self.counters.samples - self.outstanding, "consumed": self.counters.consumed - consumed},
            "rng": [
                rng["state"]["state"].to_bytes(16),
                rng["state"]["inc"].to_bytes(16),
                rng["has_uint32"],
                rng["uinteger"],
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order = state["order"]
        self.limiter.inserts, self.limiter.samples, self.limiter.deletes = state["limiter"]
        self.counters = Counters(**state["counters"])
        current, increment, has_uint32, uinteger = state["rng"]
        self.rng.bit_generator.state = {
            "bit_generator": "PCG64",
            "state": {"state": int.from_bytes(current), "inc": int.from_bytes(increment)},
            "has_uint32": has_uint32,
            "uinteger": uinteger,
        }

    def rows(self, keys: KeyArray, drawn: KeyArray, times: IntArray) -> tuple[IntArray, npt.NDArray[np.void]]:
        """Rows (m,) of those of `keys` (n,) that would be here if nothing were in hand, and their places in `keys`.

        `drawn`, ascending, are the keys of rows in hand, and `times` how often each of them was drawn. Times are of the
        server's clock, and the column `table` is for the caller to fill.
        """
        slots, columns = self.columns.find(keys), self.columns
        places = np.flatnonzero(slots >= 0)
        rows = np.zeros(places.size, dtype=ROW)
        for name in ("order", "times_sampled", "priority", "inserted_at"):
            rows[name] = getattr(columns, name)[slots[places]]
        if self._consumed:
            lent = [
                (
                    place,
                    (0, 0, batch.orders[row], batch.times_sampled[row], batch.priorities[row], batch.inserted_at[row]),
                )
                for place, (batch, row) in enumerate(map(self._consumed.get, keys.tolist(), repeat((None, 0))))
                if batch is not None
            ]
            places = np.concatenate([places, np.array([place for place, _ in lent], dtype=np.int64)])
            rows = np.concatenate([rows, np.array([row for _, row in lent], dtype=ROW)])
        if drawn.size:
            at = np.searchsorted(drawn, keys[places]).clip(max=drawn.size - 1)
            rows["times_sampled"] -= np.where(drawn[at] == keys[places], times[at], 0)
        return places, rows

    def load_rows(
        self,
        keys: KeyArray,
        priorities: FloatArray,
        policy_versions: IntArray,
        sizes: IntArray,
        orders: IntArray,
        inserted_at: FloatArray,
        times_sampled: IntArray,
    ) -> None:
        """Puts items back, in their order, as they were. The counters know of them already."""
        if keys.size:
            self._add(keys.tolist(), priorities, policy_versions, sizes, orders, inserted_at, times_sampled)

    def settle(self) -> int:
        """Makes the counters fit the loaded items, and these the configuration. Returns how many were missing."""
        lost = self.limiter.size - self.size
        self.limiter.deletes += lost
        if self.config.when_full == "evict":  # elsewhere what was in hand may be too much for a while
            self._fit()
        return lost
