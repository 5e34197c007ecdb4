"""Outstanding batches: batches that were drawn, and that are neither acknowledged by their readers nor requeued yet.

* An outstanding batch holds the item of each of its rows, so the payloads stay in the storage while they are sent.
* A batch has used up a row if its draw was the last one that `max_times_sampled` allows for the row.
* A table counts the rows of its outstanding batches, and reserves the rows that these batches have used up.
* Exactly one call of `acknowledge` or `requeue` ends a batch. The server remembers the ids of the last batches that
  readers acknowledged, and of the last batches that they requeued.
* A leased batch is in use by its reader, and stays outstanding when the server restarts.
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
"""The number of acknowledged batches that are remembered, because their readers may repeat the acknowledgement."""
MAX_REQUEUED = 1 << 16
"""The number of batches requeued by their readers that are remembered, because the readers may repeat the request."""


class PendingSample(Pending[tuple[int, SampleBatch]]):
    """A request for a batch, which waits in the line of its table. Its result is the id of the batch and the batch."""

    def __init__(self, table: Table, request: SampleRequest, since: float, deadline_at: float) -> None:
        super().__init__(since, deadline_at)
        self.tables = [table]
        self.request = request


class OutstandingBatches:
    """All outstanding batches of the server, and their leases."""

    def __init__(self, items: Items, watchers: Sequence[Watcher]) -> None:
        self._items = items
        self._watchers = watchers
        self.by_id: dict[int, tuple[Table, SampleBatch]] = {}
        """By id of the batch: its table, and the batch."""
        self.leased: dict[int, float] = {}
        """By id of each leased batch: the seconds of its lease."""
        self.on_closed: Callable[[int], object] = lambda _: None
        """Called with the id of each batch that an insert has closed. It is not called for a batch that its reader
        acknowledges."""
        self.acknowledged: Remembered[None] = Remembered("acknowledged", MAX_ACKNOWLEDGED, watchers)
        """The ids of the batches that were acknowledged or closed last."""
        self.requeued: Remembered[None] = Remembered("requeued", MAX_REQUEUED, watchers)
        """The ids of the batches that readers requeued last."""

    def draw(self, table: Table, request: SampleRequest, n: int) -> tuple[int, SampleBatch]:
        """Draws a batch of n rows. Returns the id of the batch, and the batch.

        The caller has checked with `table.why_no_sample` that the table allows this draw.
        """
        batch = table.draw(request, n)
        return self._begin(table, batch, request.id or new_id()), batch

    def draw_keys(self, table: Table, keys: KeyArray, batch_id: int = 0, scope: str = "") -> int:
        """Draws exactly the rows of those `keys` that the table has, as one batch. Returns the id of the batch; 0: the
        table has none of the keys, so there is no batch.

        `batch_id` 0: the batch gets a new id.
        """
        slots = table.columns.find(keys)
        slots = slots[slots >= 0]  # the slot of a key that the table lacks is -1
        if not slots.size:
            return 0
        batch = table.draw_slots(slots, np.ones(slots.size), scope)  # not drawn by chance: all probabilities are 1
        return self._begin(table, batch, batch_id or new_id())

    def _begin(self, table: Table, batch: SampleBatch, batch_id: int) -> int:
        """Makes a drawn batch outstanding. Returns its id."""
        # From now on, the batch holds the item of each of its rows. If the draw has used up the row, the table does not
        # hold the item any more, so the batch takes over its hold, and the number of holders stays the same. If not,
        # the table still holds the item, and the batch is one more holder.
        self._items.hold(batch.keys[~batch.consumed].tolist())
        assert batch_id not in self.by_id, f"batch {batch_id} is outstanding already"
        self.by_id[batch_id] = (table, batch)
        return batch_id

    def _end(self, batch_id: int) -> tuple[Table, SampleBatch]:
        """Removes a batch, and its lease, from the outstanding batches. Returns its table and the batch.

        The caller then has to tell the table, which still counts the rows of the batch as outstanding.
        """
        table, batch = self.by_id.pop(batch_id)
        if self.leased.pop(batch_id, None) is not None:
            for watcher in self._watchers:
                watcher.lease_changed(batch_id)
        return table, batch

    def is_outdated(self, batch_id: int) -> bool:
        """True if any row of the batch has become too stale, or its policy version was undone."""
        table, batch = self.by_id[batch_id]
        versions: list[int] = batch.policy_versions.tolist()
        if table.too_stale(min(versions)):
            return True
        if not table.undone:  # the most frequent case
            return False
        return any(table.is_undone(version) for version in versions)

    def acknowledge(self, batch_id: int) -> list[Table]:
        """Ends a batch that its reader has for good. Returns the tables that have changed."""
        table, batch = self._end(batch_id)
        keys: list[int] = batch.keys.tolist()
        self.acknowledged.remember([batch_id])
        for watcher in self._watchers:
            watcher.changed(keys)
            if batch.scope:
                watcher.scope_changed(table.name, batch.scope)
        # This comes before the hooks, because `count_sampled` would not find the rows that a hook retains.
        table.count_sampled(batch)
        changed = [table]
        # One of the hooks may retain used-up rows for a rollback (history.py). `table.acknowledge` removes the others.
        for hook in table.on_acknowledge:
            changed += hook(table, batch)
        consumed = table.acknowledge(batch)
        retained = table.columns.retained
        if consumed and retained:
            # A retained row takes over the batch's hold of its item. So the batch releases only the other items.
            # A table that retains rows draws each row only once, so each of its batches uses up all of its rows.
            keys = [key for key in keys if key not in retained]
        self._items.release(keys)
        return changed

    def close(self, batch_ids: Sequence[int]) -> list[Table]:
        """Acknowledges these batches, which an inserted item closes. Returns the tables that have changed."""
        changed = []
        for batch_id in batch_ids:
            changed += self.acknowledge(batch_id)
            self.on_closed(batch_id)
        return changed

    def why_not_closed(self, batch_ids: Sequence[int]) -> Refused | None:
        """The reason to refuse an item that would close these batches, or a segment that was made from them.

        None: there is no reason, because all of the batches are outstanding.
        """
        for batch_id in batch_ids:
            if batch_id in self.by_id:
                continue
            if batch_id in self.acknowledged:
                became = "was acknowledged already"
            else:
                became = "has gone back to its table"
            return lease_ended(
                f"the batch {batch_id} that the item or segment stands on {became}: its lease has ended, so "
                f"another reader may have it; renew leases in time, or ask for longer ones"
            )
        return None

    def lease(self, batch_id: int, seconds: float) -> list[Table]:
        """Notes that the reader has a lease of the batch for `seconds`. Returns the tables that have changed.

        The lease does not end by itself here: the caller requeues the batch when the time is over.
        """
        table, batch = self.by_id[batch_id]
        if self.leased.get(batch_id) == seconds:  # the reader renews its lease, so no record on disk changes
            return []
        self.leased[batch_id] = seconds
        for watcher in self._watchers:
            watcher.lease_changed(batch_id)
            watcher.changed(batch.keys.tolist())
        changed: list[Table] = []
        for hook in table.on_lease:
            changed += hook(table, batch)
        return changed

    def restore_lease(self, batch_id: int, table: Table | None, keys: KeyArray, scope: str, seconds: float) -> None:
        """Draws a batch anew that was leased before the server restarted, and leases it again.

        Call it after all items have been loaded into their tables. The lease ends if `table` is None, because the table
        is not configured any more, or if the table has none of the `keys`.
        """
        if table is not None and self.draw_keys(table, keys, batch_id, scope):
            self.leased[batch_id] = seconds
        # The watchers must also hear of a lease that ends here, because they delete its record.
        for watcher in self._watchers:
            watcher.lease_changed(batch_id)

    def requeue(self, batch_id: int, *, by_reader: bool = False) -> Table:
        """Returns the rows of a batch to their table, as if they had not been drawn. Returns the table.

        Drops the rows that have become too stale since the draw, and those whose policy version was undone.
        `by_reader`: True if the reader has asked for the requeue. Then the id is remembered, because the reader may
        repeat its request.
        """
        table, batch = self._end(batch_id)
        if by_reader:
            self.requeued.remember([batch_id])
        returned = table.requeue(batch)
        # An item without a holder is deleted. So the table first becomes a holder of the rows that have returned to it,
        # and only then the batch releases all of its rows.
        self._items.hold(returned)
        self._items.release(batch.keys.tolist())
        # A reserved row counts as gone. So if a returned row has become too stale or undone while it was reserved, it
        # was not dropped then, and is dropped now.
        table.drop_stale()
        table.drop_undone()
        return table

    def check(self, tables: Collection[Table]) -> None:
        """Asserts what the docstring of this module says about `tables`, which are all tables of the server.

        O(outstanding rows).
        """
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
        """The different keys (n,) of the outstanding rows of `table`, ascending, and how often (n,) each was drawn."""
        keys_of_batches = [batch.keys for batch in self._batches_of(table)]
        if not keys_of_batches:
            # Each commit calls this method for each table, and np.unique takes 10 us even for an empty array.
            return np.zeros(0, np.uint64), np.zeros(0, np.int64)
        return np.unique(np.concatenate(keys_of_batches), return_counts=True)

    def drawn_in_scope(self, table: Table, scope: str) -> set[int]:
        """The keys of the outstanding rows of `table` that were drawn under `scope`."""
        keys: set[int] = set()
        for batch in self._batches_of(table):
            if batch.scope == scope:
                keys.update(batch.keys.tolist())
        return keys

    def _batches_of(self, table: Table) -> list[SampleBatch]:
        """The outstanding batches of `table` that were drawn after its last reset."""
        return [batch for owner, batch in self.by_id.values() if owner is table and batch.epoch == table.epoch]


def new_id() -> int:
    """A random id, for a batch whose reader has chosen none. It is random, so that it differs from the ids of batches
    from before a restart."""
    return secrets.randbits(63)


def why_never(table: Table, request: SampleRequest) -> Refused | None:
    """The reason why a request can never be served, whatever items the table will have; None: it may be served."""
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
        return _why_never_values(table, request)
    return None


def _why_never_values(table: Table, request: SampleRequest) -> Refused | None:
    """The reason to refuse a request that says how many rows of each tag value to draw; None: it may be served."""
    rows = [value_rows.rows for value_rows in request.values]  # the number of rows of each value
    if min(rows) < 1 or sum(rows) != request.num_samples:
        return invalid(
            f"the rows of the values of a draw must be above 0, and together num_samples = {request.num_samples}, "
            f"not {sum(rows)}"
        )
    if table.balanced is None:  # the configuration has changed since the client asked for the weights of the values
        return try_again(f"table {table.name!r} does not balance its draws any more: ask without values")
    return None
