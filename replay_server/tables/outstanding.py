"""Outstanding batches were drawn, and are neither acknowledged by their readers nor requeued.

* An outstanding batch holds each of its rows, so their payloads stay in the storage while they are sent.
* A table counts the rows of its outstanding batches, and reserves the rows that the batches have used up.
* Exactly one call of `acknowledge` or `requeue` ends a batch. The server remembers the last batches that readers
  acknowledged, and the last batches that they requeued.
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
"""The number of acknowledged batches that are remembered, because their readers may repeat the acknowledgement."""
MAX_REQUEUED = 1 << 16
"""The number of batches requeued by their readers that are remembered, because the readers may repeat the request."""


class PendingSample(Pending[tuple[int, SampleBatch]]):
    """A request for a batch, which waits in the line of its table. The value is the id of the batch, and the batch."""

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
        """Called with the id of each batch that an insert has closed, and not when the reader acknowledges a batch."""
        self.acknowledged: Remembered[None] = Remembered("acknowledged", MAX_ACKNOWLEDGED, watchers)
        """The ids of the batches that were acknowledged or closed last."""
        self.requeued: Remembered[None] = Remembered("requeued", MAX_REQUEUED, watchers)
        """The ids of the batches that readers requeued last."""

    def draw(self, table: Table, request: SampleRequest, n: int) -> tuple[int, SampleBatch]:
        """Draws n rows, which `table.why_no_sample` allows. Returns the id of the batch, and the batch."""
        batch = table.draw(request, n)
        return self._begin(table, batch, request.id or new_id()), batch

    def draw_keys(self, table: Table, keys: KeyArray, batch_id: int = 0, scope: str = "") -> int:
        """Draws the rows of the `keys` that the table has. Returns the id of the batch; 0: the table has none of them.

        `batch_id` 0: the batch gets a new id.
        """
        slots = table.columns.find(keys)
        slots = slots[slots >= 0]
        if not slots.size:
            return 0
        batch = table.draw_slots(slots, np.ones(slots.size), scope)  # not drawn by chance: all probabilities are 1
        return self._begin(table, batch, batch_id or new_id())

    def _begin(self, table: Table, batch: SampleBatch, batch_id: int) -> int:
        """Makes a drawn batch outstanding. Returns its id."""
        # The batch holds the item of each row. If the draw has used up a row, the row has left the table, and the batch
        # takes over the table's hold. For each other row, the table stays a holder, and the batch becomes another one.
        self._items.hold(batch.keys[~batch.consumed].tolist())
        assert batch_id not in self.by_id, f"batch {batch_id} is outstanding already"
        self.by_id[batch_id] = (table, batch)
        return batch_id

    def _end(self, batch_id: int) -> tuple[Table, SampleBatch]:
        """Removes an outstanding batch and its lease. Returns its table and the batch, whose rows are still drawn."""
        table, batch = self.by_id.pop(batch_id)
        if self.leased.pop(batch_id, None) is not None:
            for watcher in self._watchers:
                watcher.lease_changed(batch_id)
        return table, batch

    def is_outdated(self, batch_id: int) -> bool:
        """True if a row of the batch has become too old, or the version of a row was undone."""
        table, batch = self.by_id[batch_id]
        versions: list[int] = batch.policy_versions.tolist()
        if table.too_stale(min(versions)):
            return True
        if not table.undone:  # the most frequent case
            return False
        return any(table.is_undone(version) for version in versions)

    def acknowledge(self, batch_id: int) -> list[Table]:
        """The reader has the batch for good. Returns the tables that have changed."""
        table, batch = self._end(batch_id)
        keys: list[int] = batch.keys.tolist()
        self.acknowledged.remember([batch_id])
        for watcher in self._watchers:
            watcher.changed(keys)
            if batch.scope:
                watcher.scope_changed(table.name, batch.scope)
        table.count_sampled(batch)  # before the hooks, because it does not find rows that are retained
        changed = [table]
        for hook in table.on_acknowledge:  # here the history retains rows, which `table.acknowledge` then spares
            changed += hook(table, batch)
        consumed = table.acknowledge(batch)
        retained = table.columns.retained
        if consumed and retained:
            # A retained row is a holder in place of the batch. A table that retains rows draws each row only once.
            keys = [key for key in keys if key not in retained]
        self._items.release(keys)
        return changed

    def close(self, batch_ids: Sequence[int]) -> list[Table]:
        """Acknowledges the batches that a new item closes. Returns the tables that have changed."""
        changed = []
        for batch_id in batch_ids:
            changed += self.acknowledge(batch_id)
            self.on_closed(batch_id)
        return changed

    def why_not_closed(self, batch_ids: Sequence[int]) -> Refused | None:
        """Why a new item cannot close these batches, or a segment made from them is refused.

        None: all of them are outstanding.
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
        """Notes that the reader has a lease of the batch. Returns the tables that have changed.

        The caller requeues the batch when the lease ends.
        """
        table, batch = self.by_id[batch_id]
        if self.leased.get(batch_id) == seconds:  # the lease is renewed, which changes no record on disk
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
        """Draws again a batch that was leased before the restart. Call it when the items are in their tables.

        `table` None: the table is not configured any more, so the lease ends.
        """
        if table is not None and self.draw_keys(table, keys, batch_id, scope):
            self.leased[batch_id] = seconds
        for watcher in self._watchers:  # also if the lease has ended, so that its record is deleted
            watcher.lease_changed(batch_id)

    def requeue(self, batch_id: int, *, by_reader: bool = False) -> Table:
        """The batch returns to its table, as if it was never drawn. Returns the table.

        Rows that have become too old meanwhile, or whose version was undone, are dropped.
        `by_reader`: the reader has asked for it, and may ask again.
        """
        table, batch = self._end(batch_id)
        if by_reader:
            self.requeued.remember([batch_id])
        # An item exists as long as a table or a batch holds it. The table holds the rows that the batch had used up
        # again, before the batch releases all of its rows.
        returned = table.requeue(batch)
        self._items.hold(returned)
        self._items.release(batch.keys.tolist())
        # While a batch has used up a row, the row counts as gone. So earlier calls of these methods did not drop it.
        table.drop_stale()
        table.drop_undone()
        return table

    def check(self, tables: Collection[Table]) -> None:
        """Asserts the statements of the module, for all tables of the server. This loops over all outstanding rows."""
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
        """The keys (n,) of the outstanding rows of `table`, ascending, and the number (n,) of draws of each."""
        drawn = [batch.keys for batch in self._batches_of(table)]
        if not drawn:  # np.unique takes 10 us even for no keys, and each commit calls this for each table
            return np.zeros(0, np.uint64), np.zeros(0, np.int64)
        return np.unique(np.concatenate(drawn), return_counts=True)

    def drawn_in_scope(self, table: Table, scope: str) -> set[int]:
        """The keys of outstanding rows of `table` that were drawn under `scope`."""
        keys: set[int] = set()
        for batch in self._batches_of(table):
            if batch.scope == scope:
                keys.update(batch.keys.tolist())
        return keys

    def _batches_of(self, table: Table) -> list[SampleBatch]:
        """The outstanding batches of `table`, without batches from before its last reset."""
        return [batch for owner, batch in self.by_id.values() if owner is table and batch.epoch == table.epoch]


def new_id() -> int:
    """A random id for a batch whose reader has chosen no id. So no batch from before a restart has the same id."""
    return secrets.randbits(63)


def why_never(table: Table, request: SampleRequest) -> Refused | None:
    """Why a request can never be served, whatever items the table will have; None: it can be served."""
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
    """Why a request that names the rows of each value can never be served; None: it can be served."""
    rows = [value_rows.rows for value_rows in request.values]
    if min(rows) < 1 or sum(rows) != request.num_samples:
        return invalid(
            f"the rows of the values of a draw must be above 0, and together num_samples = {request.num_samples}, "
            f"not {sum(rows)}"
        )
    if table.balanced is None:  # the table balanced its draws when the client asked for its weights
        return try_again(f"table {table.name!r} does not balance its draws any more: ask without values")
    return None
