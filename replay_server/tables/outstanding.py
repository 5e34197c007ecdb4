"""Outstanding batches: drawn, and neither acknowledged by their readers nor requeued.

* An outstanding batch holds each of its rows, so their payloads stay in the storage while they are sent.
* A table counts the rows of its outstanding batches, and reserves those that they have used up.
* Exactly one call of `acknowledge` or `requeue` ends a batch. How readers ended their last batches is remembered.
* A leased batch is in use by its reader. It stays outstanding when the server restarts.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from replay_protos.words import counted
from replay_server.errors import Refused, invalid, lease_ended, try_again
from replay_server.tables.columns import IntArray, KeyArray
from replay_server.tables.items import Items
from replay_server.tables.remembered import Remembered, Watcher
from replay_server.tables.table import SampleBatch, SampleRequest, Table
from replay_server.tables.waiting import Pending

MOST_ID = (1 << 63) - 1
"""The largest id of a batch."""
MAX_ACKNOWLEDGED = 1 << 18
"""Batches whose readers acknowledged them last, and may ask again."""
MAX_REQUEUED = 1 << 16
"""Batches whose readers requeued them last, and may ask again."""


class PendingSample(Pending[tuple[int, SampleBatch]]):
    def __init__(self, table: Table, request: SampleRequest, since: float, deadline_at: float) -> None:
        super().__init__(since, deadline_at)
        self.tables = [table]
        self.request = request


class OutstandingBatches:
    def __init__(self, items: Items, watchers: Sequence[Watcher]) -> None:
        self._items = items
        self._watchers = watchers
        self.by_id: dict[int, tuple[Table, SampleBatch]] = {}
        self.leased: dict[int, float] = {}
        """The seconds for which each batch is leased, of those that are in use."""
        self.on_closed: Callable[[int], object] = lambda _: None
        """Called with each batch that an insert has closed, and not its reader by the batch's id."""
        self.acknowledged: Remembered[None] = Remembered("acknowledged", MAX_ACKNOWLEDGED, watchers)
        self.requeued: Remembered[None] = Remembered("requeued", MAX_REQUEUED, watchers)

    def draw(self, table: Table, request: SampleRequest, n: int) -> tuple[int, SampleBatch]:
        """Draws n rows, which `table.why_no_sample` allows. Returns the id of the batch, and the batch."""
        batch = table.draw(request, n)
        return self._begin(table, batch, request.id or new_id()), batch

    def draw_keys(self, table: Table, keys: KeyArray, batch_id: int = 0, scope: str = "") -> int:
        """Draws those of these rows that are there. Returns the id of the batch; 0: it would be empty."""
        slots = table.columns.find(keys)
        if not (found := slots[slots >= 0]).size:
            return 0
        return self._begin(table, table.draw_slots(found, np.ones(found.size), scope), batch_id or new_id())

    def _begin(self, table: Table, batch: SampleBatch, batch_id: int) -> int:
        # The batch takes over the table's hold of a row that the table has reserved for it.
        self._items.hold(batch.keys[~batch.consumed].tolist())
        assert batch_id not in self.by_id, f"batch {batch_id} is outstanding already"
        self.by_id[batch_id] = (table, batch)
        return batch_id

    def _end(self, batch_id: int) -> tuple[Table, SampleBatch]:
        table, batch = self.by_id.pop(batch_id)
        if self.leased.pop(batch_id, None) is not None:
            for watcher in self._watchers:
                watcher.lease_changed(batch_id)
        return table, batch

    def is_outdated(self, batch_id: int) -> bool:
        """Whether a row of the batch has become too old, or its version was undone."""
        table, batch = self.by_id[batch_id]
        versions: list[int] = batch.policy_versions.tolist()
        return table.too_stale(min(versions)) or (table.undone > 0 and any(map(table.is_undone, versions)))

    def acknowledge(self, batch_id: int) -> list[Table]:
        """The batch is its reader's for good. Returns the tables that have changed."""
        table, batch = self._end(batch_id)
        keys: list[int] = batch.keys.tolist()
        self.acknowledged.remember([batch_id])
        for watcher in self._watchers:
            watcher.changed(keys)
            if batch.scope:
                watcher.scope_changed(table.name, batch.scope)
        table.count_sampled(batch)
        changed = [table]
        for hook in table.on_acknowledge:
            changed += hook(table, batch)
        consumed = table.acknowledge(batch)
        if consumed and (retained := table.columns.retained):
            keys = [key for key in keys if key not in retained]  # a retained row takes over the hold of the batch
        self._items.release(keys)
        return changed

    def close(self, batch_ids: Sequence[int]) -> list[Table]:
        """The reader's new item takes the place of these batches. Returns the tables that have changed."""
        changed = []
        for batch_id in batch_ids:
            changed += self.acknowledge(batch_id)
            self.on_closed(batch_id)
        return changed

    def why_not_closed(self, batch_ids: Sequence[int]) -> Refused | None:
        """Why an item cannot close these batches, or a segment stand on them; None: it can."""
        for batch_id in batch_ids:
            if batch_id not in self.by_id:
                became = "was acknowledged already" if batch_id in self.acknowledged else "has gone back to its table"
                return lease_ended(
                    f"the batch {batch_id} that the item or segment stands on {became}: its lease has ended, so "
                    f"another reader may have it; renew leases in time, or ask for longer ones"
                )
        return None

    def lease(self, batch_id: int, seconds: float) -> list[Table]:
        """The reader has the batch, under a lease. Returns the tables that have changed."""
        table, batch = self.by_id[batch_id]
        if self.leased.get(batch_id) == seconds:  # renewed: nothing to write
            return []
        self.leased[batch_id] = seconds
        for watcher in self._watchers:
            watcher.lease_changed(batch_id)
            watcher.changed(batch.keys.tolist())
        return [other for hook in table.on_lease for other in hook(table, batch)]

    def restore_lease(self, batch_id: int, table: Table | None, keys: KeyArray, scope: str, seconds: float) -> None:
        """Draws a leased batch of an older server again. All its items are in their tables.

        `table` None: it is not there any more.
        """
        if table is not None and self.draw_keys(table, keys, batch_id, scope):
            self.leased[batch_id] = seconds
        for watcher in self._watchers:
            watcher.lease_changed(batch_id)

    def requeue(self, batch_id: int, *, by_reader: bool = False) -> Table:
        """The batch returns to its table, as if it was never drawn. Returns the table."""
        table, batch = self._end(batch_id)
        if by_reader:
            self.requeued.remember([batch_id])
        self._items.hold(table.requeue(batch))
        self._items.release(batch.keys.tolist())
        table.drop_stale()
        table.drop_undone()
        return table

    def check(self, tables: Collection[Table]) -> None:
        """Asserts what the module states, of all tables of the server. A loop over the outstanding rows."""
        assert self.leased.keys() <= self.by_id.keys(), "a batch that has ended is leased"
        assert min(self.leased.values(), default=1.0) > 0, self.leased
        rows: Counter[str] = Counter()
        used_up: dict[str, set[int]] = {table.name: set() for table in tables}
        for batch_id, (table, batch) in self.by_id.items():
            assert batch_id not in self.acknowledged, f"batch {batch_id} has ended, and is outstanding"
            if batch.epoch == table.epoch:
                rows[table.name] += len(batch)
                used_up[table.name].update(batch.keys[batch.consumed].tolist())
        for table in tables:
            assert table.outstanding == rows[table.name], (table.name, table.outstanding, rows[table.name])
            assert table.columns.reserved.keys() == used_up[table.name], (table.name, used_up[table.name])

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


def new_id() -> int:
    """For a batch whose reader has chosen no id. It must not be mistaken for one of before a restart."""
    return secrets.randbits(63)


def why_never(table: Table, request: SampleRequest) -> Refused | None:
    """Why a request can never be served, in any state of the table; None: it can."""
    config = table.config
    if request.num_samples < 1:
        return invalid("a batch has at least 1 sample (num_samples, or batch_size of a sampler), not 0")
    if not 1 <= request.min_samples <= request.num_samples:
        return invalid(f"min_samples must be from 1 to num_samples = {request.num_samples}, not {request.min_samples}")
    if request.distinct and request.min_samples > config.max_size:
        return invalid(
            f"{request.min_samples} distinct samples of table {table.name!r} can never be there: its max_size is "
            f"{config.max_size}"
        )
    if request.min_samples > table.limiter.largest_batch():
        samples = counted(request.min_samples, "sample")
        return invalid(
            f"{samples} at once can never be drawn from table {table.name!r}: its rate limiter "
            f"({config.rate_limiter.type}) stops inserting at {table.limiter.largest_batch():.12g}; ask for fewer "
            f"or widen the limiter"
        )
    if not request.distinct and (request.scope or request.exclude or config.max_times_sampled):
        return invalid("repeats cannot be combined with scope, exclude or a table with max_times_sampled")
    if request.values:
        rows = [each.rows for each in request.values]
        if min(rows) < 1 or sum(rows) != request.num_samples:
            return invalid(
                f"the rows of the values of a draw must be above 0, and together num_samples = {request.num_samples}, "
                f"not {sum(rows)}"
            )
        if table.balanced is None:  # it did when its weights were asked for
            return try_again(f"table {table.name!r} does not balance its draws any more: ask without values")
    return None
