"""Outstanding batches: drawn, and neither taken by their readers nor given back.

* An outstanding batch holds each of its rows, so their payloads stay in the storage while they are sent.
* Exactly one call of `take` or `give_back` ends a batch. How readers ended their last batches is remembered.
* A leased batch is in use by its reader. Its rows are forwarded, and it stays outstanding when the server restarts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from replay_server.errors import Refused, invalid, lease_ended, try_again
from replay_server.tables.columns import IntArray, KeyArray
from replay_server.tables.items import Items, Kept
from replay_server.tables.remembered import Remembered, Watcher
from replay_server.tables.table import SampleBatch, SampleRequest, Table
from replay_server.tables.waiting import Pending

MOST_ID = (1 << 63) - 1
"""The largest id of a batch."""
MAX_TAKEN = 1 << 18
"""Batches whose readers took them last, and may ask again."""
MAX_GIVEN_BACK = 1 << 16
"""Batches whose readers gave them back last, and may ask again."""


class PendingSample(Pending[tuple[int, SampleBatch]]):
    def __init__(self, table: Table, request: SampleRequest, since: float, deadline_at: float) -> None:
        super().__init__(since, deadline_at)
        self.tables = [table]
        self.request = request

    @property
    def drawn(self) -> int | None:
        """The id of the batch, once it is drawn."""
        return None if self.value is None else self.value[0]


class OutstandingBatches:
    def __init__(
        self,
        tables: Mapping[str, Table],
        items: Items,
        watchers: Sequence[Watcher],
        history: Kept,
        admitted: str,
        building: str,
    ) -> None:
        """`admitted`: the table whose inserts need permits. `building`: that of groups under construction. "": none."""
        self._tables = tables
        self._items = items
        self._watchers = watchers
        self._history = history
        self._admitted = admitted
        self._building = building
        self.by_id: dict[int, tuple[Table, SampleBatch]] = {}
        self.leased: dict[int, float] = {}
        """The seconds for which each batch is leased, of those that are in use."""
        self.on_closed: Callable[[int], object] = lambda _: None
        """Called with each batch that an insert has closed, and not its reader by the batch's id."""
        self.taken: Remembered[None] = Remembered("taken", MAX_TAKEN, watchers)
        self.given_back: Remembered[None] = Remembered("given back", MAX_GIVEN_BACK, watchers)

    def __len__(self) -> int:
        return len(self.by_id)

    def draw(self, table: Table, request: SampleRequest, n: int) -> tuple[int, SampleBatch]:
        """Draws n rows, which `table.why_no_sample` allows. Returns the id of the batch, and the batch."""
        batch = table.draw(request, n)
        return self._begin(table, batch, request.id or new_id()), batch

    def draw_keys(self, table: Table, keys: Sequence[int]) -> tuple[int | None, list[int]]:
        """Draws the rows of these keys. Returns the id of the batch, None if it is empty, and the missing keys."""
        slots = table.columns.find(np.array(list(dict.fromkeys(keys)), dtype=np.uint64))
        missing = [key for key in dict.fromkeys(keys) if key not in table]
        found = slots[slots >= 0]
        if not found.size:
            return None, missing
        return self._begin(table, table.draw_slots(found, np.ones(found.size)), new_id()), missing

    def _begin(self, table: Table, batch: SampleBatch, batch_id: int) -> int:
        # The batch takes over the table's hold of a row that the table has reserved for it.
        self._items.hold(batch.keys[~batch.consumed].tolist())
        self.by_id[batch_id] = (table, batch)
        return batch_id

    def _end(self, batch_id: int) -> tuple[Table, SampleBatch]:
        table, batch = self.by_id.pop(batch_id)
        if self.leased.pop(batch_id, None) is not None:
            for watcher in self._watchers:
                watcher.lease_changed(batch_id)
        return table, batch

    def has_stale_row(self, batch_id: int, policy_version: int) -> bool:
        """Whether a row of the batch has become too old, or its version was undone."""
        table, batch = self.by_id[batch_id]
        versions: list[int] = batch.policy_versions.tolist()
        if self._history.undone > policy_version and any(
            self._history.is_undone(version, policy_version) for version in versions
        ):
            return True
        return any(table.too_stale(version, policy_version) for version in versions)

    def take(self, batch_id: int, policy_version: int) -> list[Table]:
        """The batch is its reader's for good. Forwards its rows. Returns the tables that have changed."""
        table, batch = self._end(batch_id)
        keys: list[int] = batch.keys.tolist()
        self.taken.remember([batch_id])
        for watcher in self._watchers:
            watcher.changed(keys)
            if batch.scope:
                watcher.scope_changed(table.name, batch.scope)
        permits: set[int] = set()
        if table.name == self._admitted:
            permits = self._items.unused_permits.intersection(keys)
            self._items.unused_permits -= permits
        elif self._building and table.name == self._building:
            self._items.building.difference_update(keys)
        kept = table.take(batch, keep=self._history.keeps(table))
        if kept:
            self._history.keep(table, kept, permits)
            keys = batch.keys[~batch.consumed].tolist()  # a kept row takes over the hold of the batch
        changed = [table, *self._forward_rows(table, batch, policy_version)]
        self._items.release(keys)
        return changed

    def close(self, batch_ids: Sequence[int], policy_version: int) -> list[Table]:
        """The reader's new item takes the place of these batches. Returns the tables that have changed."""
        changed = []
        for batch_id in batch_ids:
            changed += self.take(batch_id, policy_version)
            self.on_closed(batch_id)
        return changed

    def any_building(self, batch_ids: Sequence[int]) -> bool:
        """Whether one of these batches has a group under construction, whose permit the item gets that closes it."""
        return any(not self._items.building.isdisjoint(self.by_id[each][1].keys.tolist()) for each in batch_ids)

    def why_not_closed(self, batch_ids: Sequence[int]) -> Refused | None:
        """Why an item cannot close these batches; None: it can."""
        for batch_id in batch_ids:
            if batch_id not in self.by_id:
                became = "was taken already" if batch_id in self.taken else "has gone back to its table"
                return lease_ended(
                    f"the batch {batch_id} that the item closes {became}: its lease has ended, so another reader may "
                    f"have it; renew leases in time, or ask for longer ones"
                )
        return None

    def lease(self, batch_id: int, seconds: float, policy_version: int) -> list[Table]:
        """The reader has the batch, under a lease. Forwards its rows. Returns the tables that have changed."""
        table, batch = self.by_id[batch_id]
        if self.leased.get(batch_id) == seconds:  # renewed: nothing to write
            return []
        self.leased[batch_id] = seconds
        for watcher in self._watchers:
            watcher.lease_changed(batch_id)
            watcher.changed(batch.keys.tolist())
        return self._forward_rows(table, batch, policy_version)

    def restore_lease(self, batch_id: int, table_name: str, keys: KeyArray, scope: str, seconds: float) -> None:
        """Draws a leased batch of an older server again. All its items are in their tables."""
        if (table := self._tables.get(table_name)) is not None:
            slots = table.columns.find(keys)
            if (found := slots[slots >= 0]).size:
                self._begin(table, table.draw_slots(found, np.ones(found.size), scope), batch_id)
                self.leased[batch_id] = seconds
        for watcher in self._watchers:
            watcher.lease_changed(batch_id)

    def give_back(self, batch_id: int, policy_version: int, *, by_reader: bool = False) -> Table:
        """The batch returns to its table, as if it was never drawn. Returns the table."""
        table, batch = self._end(batch_id)
        if by_reader:
            self.given_back.remember([batch_id])
        self._items.hold(table.give_back(batch))
        self._items.release(batch.keys.tolist())
        table.drop_stale(policy_version)
        if self._history.undone > policy_version:
            table.drop_versions(policy_version, self._history.undone)
        return table

    def drawn(self, table: Table) -> tuple[KeyArray, IntArray]:
        """The keys of the outstanding rows of `table`, ascending, and how often each was drawn."""
        drawn = [batch.keys for of, batch in self.by_id.values() if of is table and batch.epoch == table.epoch]
        if not drawn:  # np.unique takes 10 us for nothing, and a commit asks for each table
            return np.zeros(0, np.uint64), np.zeros(0, np.int64)
        return np.unique(np.concatenate(drawn), return_counts=True)

    def drawn_in_scope(self, table: Table, scope: str) -> set[int]:
        """The keys of outstanding rows of `table` that were drawn under `scope`."""
        batches = [batch for of, batch in self.by_id.values() if of is table and batch.scope == scope]
        return {key for batch in batches if batch.epoch == table.epoch for key in batch.keys.tolist()}

    def unused_permits(self) -> int:
        """How many items with an unused permit have left all tables, so that they go when their batches end."""
        items = self._items
        tables = [table for table in self._tables.values() if table is not items.archive]
        keys = {key for _, batch in self.by_id.values() for key in batch.keys.tolist() if key in items.unused_permits}
        return sum(not any(table.has_or_may_return(key) for table in tables) for key in keys)

    def _forward_rows(self, table: Table, batch: SampleBatch, policy_version: int) -> list[Table]:
        """Returns the table that the rows were forwarded to, if there is one."""
        if table.config.forward_to is None or batch.epoch != table.epoch:
            return []
        target = self._tables[table.config.forward_to]
        for key, priority in zip(batch.keys.tolist(), batch.priorities.tolist(), strict=True):
            self._forward(key, priority, table, target, policy_version)
        return [target]

    def _forward(self, key: int, priority: float, source: Table, target: Table, policy_version: int) -> None:
        """Forwards an item at its first sample."""
        # Forwarding never waits: the limiter of `target` counts the item, and only a full table can refuse it.
        item = self._items[key]
        if priority == 0 or source.name in item.forwarded:
            return
        item.forwarded += (source.name,)
        if target.has_or_may_return(key):
            source.counters.forwarded += 1
            return
        if target.too_stale(item.policy_version, policy_version):
            target.counters.stale_refused += 1
            source.counters.forward_refused += 1
            return
        if self._history.is_undone(item.policy_version, policy_version):
            target.counters.undone += 1
            source.counters.forward_refused += 1
            return
        if (
            item.cost > (target.config.max_bytes or np.inf)
            or (target.config.when_full != "evict" and target.why_full(1, item.cost))
            or (target.balanced is not None and target.balanced.one_too_many([item.labels]) is not None)
        ):
            source.counters.forward_refused += 1
            return
        source.counters.forwarded += 1
        if key in target.columns.kept:  # the same item cannot have two rows in a table
            self._history.let_go(target, [key])
        self._items.hold([key])
        versions, sizes = np.array([item.policy_version]), np.array([item.nbytes])
        target.insert([key], np.array([priority]), versions, sizes, self._items.labels([key]))
        target.counters.evicted_on_arrival += key not in target


def new_id() -> int:
    """For a batch whose reader has chosen no id. It must not be mistaken for one of before a restart."""
    return secrets.randbits(63)


def check_sample(table: Table, request: SampleRequest) -> None:
    """Raises Refused for a request that can never be served."""
    config = table.config
    if request.num_samples < 1:
        raise invalid("a batch has at least 1 sample (num_samples, or batch_size of a sampler), not 0")
    if not 1 <= request.min_samples <= request.num_samples:
        raise invalid(f"min_samples must be from 1 to num_samples = {request.num_samples}, not {request.min_samples}")
    if request.distinct and request.min_samples > config.max_size:
        raise invalid(
            f"{request.min_samples} distinct samples of table {table.name!r} can never be there: its max_size is "
            f"{config.max_size}"
        )
    if request.min_samples > table.limiter.largest_batch():
        raise invalid(
            f"{request.min_samples} samples at once can never be drawn from table {table.name!r}: its rate limiter "
            f"({config.rate_limiter.type}) stops inserting at {table.limiter.largest_batch():.12g}; ask for fewer "
            f"or widen the limiter"
        )
    if not request.distinct and (request.scope or request.exclude or config.max_times_sampled):
        raise invalid("repeats cannot be combined with scope, exclude or a table with max_times_sampled")
    if request.values:
        rows = [each.rows for each in request.values]
        if min(rows) < 1 or sum(rows) != request.num_samples:
            raise invalid(
                f"the rows of the values of a draw must be above 0, and together num_samples = {request.num_samples}, "
                f"not {sum(rows)}"
            )
        if table.balanced is None:  # it did when its weights were asked for
            raise try_again(f"table {table.name!r} does not balance its draws any more: ask without values")
