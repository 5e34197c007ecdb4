"""ReplayBuffer: all tables of a server over one set of payloads, and the operations that clients call.

Everything is synchronous and runs on one event loop, so each operation is atomic: it checks all of its request, then
applies all of it. A request that may not proceed becomes a Pending in the line of its table. After every change the
lines of the touched tables are served again, first come first served.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from replay_server.errors import (
    Refused,
    busy,
    closed,
    deadline,
    full,
    invalid,
    not_found,
    stale,
    storage_failed,
    too_large,
    try_again,
)
from replay_server.tables.admission import Admission
from replay_server.tables.batches import InsertBatch, SampleBatch, SampleRequest
from replay_server.tables.columns import FloatArray, IntArray, KeyArray
from replay_server.tables.config import MAX_PRIORITY, AdmissionConfig, TableConfig, explain
from replay_server.tables.payloads import DamagedPayloads, MemoryStorage, Payload, Storage, read
from replay_server.tables.table import Table
from replay_server.tables.waiting import Line, Pending

if TYPE_CHECKING:
    from replay_server.storage.collector import ChangeCollector

log = logging.getLogger("replay_server")

MAX_VERSION = 1 << 62
SEEN_KEYS = 1 << 18
"""How many of the last inserted keys are remembered, so that a retry is recognised after its item was consumed."""


@dataclass
class Policy:
    version: int = 0
    weights: str = ""
    set_at: float = 0.0


@dataclass(slots=True)
class Item:
    """What all tables share of a key."""

    nbytes: int
    policy_version: int
    inserted_at: float
    holders: int = 0
    """Tables and batches in hand that hold the key; at 0 the payload goes."""
    unused_permit: bool = False
    """Inserted with a permit and never sampled."""
    forwarded: tuple[str, ...] = ()
    """Tables that have passed it on."""


class PendingInsert(Pending[None]):
    """One row that waits."""

    def __init__(self, insert: InsertBatch, since: float, deadline_at: float) -> None:
        super().__init__(since, deadline_at)
        self.insert = insert


class PendingSample(Pending[tuple[int, SampleBatch]]):
    def __init__(self, table: Table, request: SampleRequest, since: float, deadline_at: float) -> None:
        super().__init__(since, deadline_at)
        self.table = table
        self.request = request

    @property
    def drawn(self) -> int | None:
        """The id of the batch, once there is one."""
        return None if self.value is None else self.value[0]


@dataclass
class Lines:
    """Who waits for one table."""

    inserts: Line[PendingInsert] = field(default_factory=Line)
    samples: Line[PendingSample] = field(default_factory=Line)


class ReplayBuffer:
    def __init__(
        self,
        tables: Iterable[TableConfig],
        clock: Callable[[], float],
        *,
        storage: Storage | None = None,
        admission: AdmissionConfig | None = None,
        max_bytes: int | None = None,
        max_payload_bytes: int = 1 << 30,
    ) -> None:
        self.clock = clock
        self.storage = MemoryStorage() if storage is None else storage
        self.tables = {config.name: Table(config, clock, self._left) for config in tables}
        self.lines = {name: Lines() for name in self.tables}
        self.admission = None if admission is None else Admission(admission, clock)
        self.max_bytes = math.inf if max_bytes is None else max_bytes
        self.max_payload_bytes = max_payload_bytes
        self.items: dict[int, Item] = {}
        self.bytes = 0
        self.policy = Policy(set_at=clock())
        self.on_policy: set[Callable[[], None]] = set()
        """Called after every change of the policy."""
        self._batches: dict[int, tuple[Table, SampleBatch]] = {}
        self._batch_ids = count(secrets.randbits(62) | 1)
        self._seen: set[int] = set()
        self.seen_order: deque[int] = deque()
        self._closed = False
        self.watchers: list[ChangeCollector] = []
        """Told of every change to items, by key."""
        self.damaged = 0
        """Items lost because their bytes in the storage were not what was written."""
        self._freed = False
        """Whether bytes became free since inserts that wait for the server's own bound were served."""

    def table(self, name: str) -> Table:
        try:
            return self.tables[name]
        except KeyError:
            raise not_found(f"no table {name[:100]!r}; tables: {', '.join(self.tables)}") from None

    def check_open(self) -> None:
        if self._closed:
            raise closed("the server is shutting down")

    # ------------------------------------------------------------------------------------------------ insert

    def insert(self, inserts: InsertBatch, deadline_at: float = math.inf) -> tuple[int, PendingInsert | None]:
        """Inserts rows from the first one on. Returns how many are in their tables, and what has to wait of the next.

        Raises Refused if the first row is refused; then nothing has changed. For all rows call it until none is left.
        """
        if (n := self._admissible(inserts)) > 1:
            chosen = inserts if n == len(inserts) else inserts[:n]
            tables = [self.tables[name] for name in chosen.priorities]
            self._apply(chosen, tables)
            self._progress(tables)
            return n, None
        insert = inserts if len(inserts) == 1 else inserts[:1]
        tables = self._check_insert(insert)
        if self._known(insert, tables):
            return 1, None
        self._check_state(insert, tables)
        if not self._anyone_waits_to_insert(tables) and not self._why_no_insert(insert, tables):
            self._make_room(insert, tables)
            self._apply(insert, tables)
            self._progress(tables)
            return 1, None
        pending = PendingInsert(insert, self.clock(), deadline_at)
        for table in tables:
            self.lines[table.name].inserts.join(pending)
        self._mark_blocked(tables)
        return 0, pending

    def _admissible(self, inserts: InsertBatch) -> int:
        """How many of the first rows may enter at once, with the same outcome as one after the other.

        The rules are those of one row below, decided for all rows together; where any row is special in any way this is
        0 and they are decided one by one.
        """
        n = len(inserts)
        if n == 1 or self._closed or not inserts.priorities:
            return 0
        nbytes = int(inserts.sizes.sum())
        if int(inserts.sizes.max()) > self.max_payload_bytes or self.bytes + nbytes > self.max_bytes:
            return 0
        if self.storage.why_full(nbytes):
            return 0
        room: float = n
        for name, priorities in inserts.priorities.items():
            table = self.tables.get(name)
            if (
                table is None
                or self.lines[name].inserts
                or not valid_priorities(priorities).all()
                or not 0 <= int(inserts.policy_versions.min()) <= int(inserts.policy_versions.max()) <= MAX_VERSION
                or table.too_stale(int(inserts.policy_versions.min()), self.policy.version)
                or (table.config.max_bytes is not None and table.bytes + nbytes > table.config.max_bytes)
            ):
                return 0
            room = min(room, table.room())
            if self.lines[name].samples:  # who waits is served between two rows, which makes a difference unless:
                room = min(room, table.config.max_size - table.size if table.config.sampler.type == "fifo" else 0)
        keys = set(inserts.keys)
        if len(keys) < n or not self._seen.isdisjoint(keys) or not self.items.keys().isdisjoint(keys):
            return 0
        return max(0, int(room))

    def _anyone_waits_to_insert(self, tables: list[Table]) -> bool:
        return any(self.lines[table.name].inserts for table in tables)

    def _check_insert(self, insert: InsertBatch) -> list[Table]:
        """What makes the item invalid, whatever the state of the server. Returns its tables."""
        self.check_open()
        key, nbytes, version = insert.keys[0], int(insert.sizes[0]), int(insert.policy_versions[0])
        if not 0 <= version <= MAX_VERSION:
            raise invalid(f"policy version {version} of item {key}: must be from 0 to {MAX_VERSION}")
        if not insert.priorities:
            raise invalid(f"item {key} names no table; tables: {', '.join(self.tables)}")
        tables = []
        for name, priorities in insert.priorities.items():
            table = self.table(name)
            if not 0 <= (priority := priorities[0]) <= MAX_PRIORITY:
                raise bad_priority(priority, f"item {key}, table {name!r}")
            if nbytes > (table.config.max_bytes or math.inf):
                raise too_large(
                    f"item of {nbytes} bytes; table {name!r} holds at most {table.config.max_bytes} (max_bytes)"
                )
            tables.append(table)
        limit = min(self.max_payload_bytes, self.max_bytes)
        if nbytes > limit:
            raise too_large(f"item of {nbytes} bytes; this server takes at most {limit}")
        return tables

    def _known(self, insert: InsertBatch, tables: list[Table]) -> bool:
        """Whether the key was inserted before: then this is a retry, and acknowledged without doing anything."""
        if insert.keys[0] not in self._seen and insert.keys[0] not in self.items:
            return False
        for table in tables:
            table.counters.duplicates += 1
        return True

    def _check_state(self, insert: InsertBatch, tables: list[Table]) -> None:
        """What refuses the item as things stand now."""
        version, nbytes = int(insert.policy_versions[0]), int(insert.sizes[0])
        if why := self.storage.why_full(nbytes):
            raise storage_failed(why)
        for table in tables:
            if table.too_stale(version, self.policy.version):
                table.counters.stale_refused += 1
                lag = self.policy.version - version
                raise stale(
                    f"item of policy version {version} lags {lag} behind the current "
                    f"{self.policy.version}; table {table.name!r} takes at most {table.config.max_staleness} "
                    f"(max_staleness)"
                )
            if table.config.when_full == "reject" and (why := table.why_full(nbytes)):
                raise full(f"table {table.name!r} is full: {why}, and when_full is 'reject'")

    def _why_no_insert(self, insert: InsertBatch, tables: list[Table]) -> str | None:
        nbytes = int(insert.sizes[0])
        for table in tables:
            if why := table.why_no_insert(nbytes):
                return f"{table.name}: inserting blocked: {why}"
            if table.config.when_full == "block" and (why := self._why_full(nbytes)):
                return f"{table.name}: inserting blocked: server: {why}"
        return None

    def _why_full(self, nbytes: int) -> str | None:
        if self.bytes + nbytes > self.max_bytes:
            return f"{self.bytes} bytes + {nbytes} > max_bytes {self.max_bytes}"
        return None

    def _make_room(self, insert: InsertBatch, tables: list[Table]) -> None:
        """Evicts from the item's tables until the server's own bound allows it; nothing if that cannot be reached."""
        nbytes = int(insert.sizes[0])
        if (why := self._why_full(nbytes)) is None:
            return
        evicting = [table for table in tables if table.config.when_full == "evict"]
        if not self._can_free(self.bytes + nbytes - self.max_bytes, evicting):
            raise busy(f"the server is full: {why}, and {', '.join(insert.priorities)} has too little to evict")
        self._evict(nbytes, evicting)

    def _evict(self, nbytes: int, tables: list[Table]) -> None:
        """Makes room for so many bytes, which emptying these tables would do."""
        while self._why_full(nbytes):
            max(tables, key=lambda table: table.bytes).evict()

    def _can_free(self, needed: float, tables: list[Table]) -> bool:
        """Whether emptying these tables would free so many bytes: only items that nobody else holds count."""
        freed = 0
        for place, table in enumerate(tables):
            for key in table.columns.slots:
                if any(key in earlier for earlier in tables[:place]):
                    continue
                item = self.items[key]
                if item.holders == sum(key in other for other in tables):
                    freed += item.nbytes
                    if freed >= needed:
                        return True
        return False

    def _apply(self, inserts: InsertBatch, tables: list[Table]) -> None:
        now, leased = self.clock(), bool(inserts.permits and self.admission is not None)
        sizes, versions = inserts.sizes.tolist(), inserts.policy_versions.tolist()
        for key, nbytes, version in zip(inserts.keys, sizes, versions, strict=True):
            self.items[key] = Item(nbytes, version, now, len(tables), leased)
        self.bytes += sum(sizes)
        self.storage.put(inserts.keys, inserts.payloads)
        for table in tables:
            table.insert(inserts.keys, inserts.priorities[table.name], inserts.policy_versions, inserts.sizes)
        self.remember(inserts.keys)
        for watcher in self.watchers:
            watcher.changed(inserts.keys)
            watcher.inserted(inserts.keys)
        if leased and self.admission is not None:
            for _ in inserts.keys:
                self.admission.accept(inserts.permits)

    # ------------------------------------------------------------------------------------------------ sample

    def sample(self, table_name: str, request: SampleRequest, deadline_at: float = math.inf) -> PendingSample:
        """Draws a batch, now or when it may be drawn; the result is its id, for `take` or `give_back`."""
        self.check_open()
        table = self.table(table_name)
        self._check_sample(table, request)
        pending = PendingSample(table, request, self.clock(), deadline_at)
        self.lines[table.name].samples.join(pending)
        self._progress([table])
        return pending

    def _check_sample(self, table: Table, request: SampleRequest) -> None:
        if not 1 <= request.min_samples <= request.num_samples:
            raise invalid(
                f"min_samples {request.min_samples} and num_samples {request.num_samples} must be 1 <= min <= num"
            )
        config = table.config
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

    def take(self, batch_id: int, *, sent: bool = False) -> bool:
        """The batch is its reader's from now on. False: something in it went stale, so it was given back instead.

        `sent`: the reader has it already, so that it is too late for that.
        """
        table, batch = self._batches[batch_id]
        if not sent and any(
            table.too_stale(version, self.policy.version) for version in batch.policy_versions.tolist()
        ):
            self.give_back(batch_id)
            return False
        del self._batches[batch_id]
        for watcher in self.watchers:
            watcher.changed(batch.keys.tolist())
            if batch.scope:
                watcher.scope_changed(table.name, batch.scope)
        for key in batch.keys.tolist():
            self.items[key].unused_permit = False
        table.take(batch)
        touched = [table]
        if table.config.forward_to is not None and batch.epoch == table.epoch:
            touched.append(self.tables[table.config.forward_to])
            for key, priority in zip(batch.keys.tolist(), batch.priorities.tolist(), strict=True):
                self._forward(key, priority, *touched)
        self._release(batch.keys.tolist())
        self._progress(touched)
        return True

    def _forward(self, key: int, priority: float, source: Table, target: Table) -> None:
        """A first sample joins `target`. It never waits: the limiter counts it, and only a full table can refuse it."""
        item = self.items[key]
        if priority == 0 or source.name in item.forwarded:
            return
        item.forwarded += (source.name,)
        if target.has_or_may_return(key):
            source.counters.forwarded += 1
            return
        if target.too_stale(item.policy_version, self.policy.version):
            target.counters.stale_refused += 1
            source.counters.forward_refused += 1
            return
        if item.nbytes > (target.config.max_bytes or math.inf) or (
            target.config.when_full != "evict" and target.why_full(item.nbytes)
        ):
            source.counters.forward_refused += 1
            return
        source.counters.forwarded += 1
        item.holders += 1
        target.insert([key], np.array([priority]), np.array([item.policy_version]), np.array([item.nbytes]))

    def give_back(self, batch_id: int) -> None:
        """The batch never reached its reader: everything is as if it had not been drawn."""
        table, batch = self._batches.pop(batch_id)
        for row in table.give_back(batch):
            self.items[int(batch.keys[row])].holders += 1
        self._release(batch.keys.tolist())
        table.drop_stale(self.policy.version)
        self._progress([table])

    def payloads(self, keys: Sequence[int]) -> Iterator[Payload]:
        """As storage.read; the items must be held till then. For those that are damaged there is `discard`."""
        return read(self.storage, keys, [self.items[key].nbytes for key in keys])

    def discard(self, keys: Iterable[int]) -> None:
        """Removes items whose payload is damaged from all tables."""
        for key in keys:
            log.error("item %d is removed: its payload on disk is damaged", key)
            self.damaged += 1
            for table in self.tables.values():
                if key in table:
                    table.delete([key])
        self._progress(self.tables.values())

    def discarded(self, damage: DamagedPayloads) -> Refused:
        """Removes the damaged items; what to end an answer with that had begun when the damage was found."""
        self.discard(damage.keys)
        return try_again(f"{damage}, and removed now: ask again")

    def hold(self, keys: Iterable[int]) -> None:
        """Keeps these items' payloads, which count until `release`, whatever becomes of the items."""
        for key in keys:
            self.items[key].holders += 1

    def release(self, keys: Sequence[int]) -> None:
        self._release(keys)
        if self._freed:
            self._progress(self.tables.values())

    def _draw(self, table: Table, request: SampleRequest, n: int) -> tuple[int, SampleBatch]:
        batch = table.draw(request, n)
        # The batch holds every row, so that a payload stays while it is being sent; a consumed row leaves its table.
        for key, consumed in zip(batch.keys.tolist(), batch.consumed.tolist(), strict=True):
            if not consumed:
                self.items[key].holders += 1
        batch_id = next(self._batch_ids)
        self._batches[batch_id] = (table, batch)
        return batch_id, batch

    def _left(self, keys: Sequence[int]) -> None:
        """These items have left a table."""
        for watcher in self.watchers:
            watcher.changed(keys)
        self._release(keys)

    def _release(self, keys: Sequence[int]) -> None:
        gone, sizes = [], []
        for key in keys:
            item = self.items[key]
            item.holders -= 1
            if item.holders == 0:
                del self.items[key]
                self.bytes -= item.nbytes
                self._freed = True
                if item.unused_permit and self.admission is not None:
                    self.admission.forget()
                gone.append(key)
                sizes.append(item.nbytes)
        self.storage.delete(gone, sizes)

    # ------------------------------------------------------------------------------------------------ waiting

    def time_out(self, pending: PendingInsert | PendingSample) -> None:
        """The deadline of `pending` has passed: a sample gets what is there if that is enough, all else the reason."""
        if pending.done:
            return
        if isinstance(pending, PendingSample):
            table, request = pending.table, pending.request
            n = table.most_available(request)
            if n >= request.min_samples and self.lines[table.name].samples.head is pending:
                pending.finish(self._draw(table, request, n))
            else:
                pending.fail(deadline(self.why_waiting(pending)))
        else:
            pending.fail(deadline(self.why_waiting(pending)))
        self._progress(self._tables_of(pending))

    def why_waiting(self, pending: PendingInsert | PendingSample) -> str:
        """The reason in words: "replay: sampling blocked: size 3 < min_size 5"."""
        tables = self._tables_of(pending)
        if isinstance(pending, PendingSample):
            # A batch that is too small for what was asked, yet enough, also waits for the rest.
            why = tables[0].why_no_sample(pending.request, pending.request.num_samples)
            why = f"{tables[0].name}: sampling blocked: {why}" if why else None
        else:
            why = self._why_no_insert(pending.insert, tables)
        if why:
            return why
        lines = self.lines[tables[0].name]
        if isinstance(pending, PendingSample):
            return f"{tables[0].name}: sampling blocked: {lines.samples.ahead_of(pending)} requests came first"
        return f"{tables[0].name}: inserting blocked: {lines.inserts.ahead_of(pending)} requests came first"

    def abandon(self, pending: PendingInsert | PendingSample) -> None:
        """The client of `pending` went away."""
        if not pending.done:
            pending.abandon()
            self._progress(self._tables_of(pending))

    def _tables_of(self, pending: PendingInsert | PendingSample) -> list[Table]:
        if isinstance(pending, PendingSample):
            return [pending.table]
        return [self.tables[name] for name in pending.insert.priorities]

    def _progress(self, tables: Iterable[Table]) -> None:
        """Serves the lines of `tables`, and of every table that this changes, until nothing more can proceed."""
        dirty = dict.fromkeys(table.name for table in tables)
        served = dict(dirty)
        while dirty:
            name = next(iter(dirty))
            del dirty[name]
            served[name] = None
            table, lines = self.tables[name], self.lines[name]
            changed = False
            while (sample := lines.samples.head) is not None:
                n = sample.request.num_samples
                if table.why_no_sample(sample.request, n):
                    break
                sample.finish(self._draw(table, sample.request, n))
                changed = True
            while (waiting := lines.inserts.head) is not None and self._serve_insert(waiting, dirty):
                changed = True
            if changed:
                dirty[name] = None
            if self._freed:
                self._freed = False
                dirty.update(dict.fromkeys(other for other, lines in self.lines.items() if lines.inserts))
        self._mark_blocked(self.tables[name] for name in served)

    def _serve_insert(self, pending: PendingInsert, dirty: dict[str, None]) -> bool:
        """Lets the first insert of a line in, if it is the first of all its lines and all its tables admit it."""
        insert = pending.insert
        tables = [self.tables[name] for name in insert.priorities]
        if any(self.lines[table.name].inserts.head is not pending for table in tables):
            return False
        try:
            if not self._known(insert, tables):
                self._check_state(insert, tables)
                if self._why_no_insert(insert, tables):
                    return False
                self._make_room(insert, tables)
                self._apply(insert, tables)
            pending.finish(None)
        except Refused as refusal:
            pending.fail(refusal)
        dirty.update(dict.fromkeys(insert.priorities))
        return True

    def _mark_blocked(self, tables: Iterable[Table]) -> None:
        for table in tables:
            lines = self.lines[table.name]
            for meter, blocked in (
                (table.insert_blocked, bool(lines.inserts)),
                (table.sample_blocked, bool(lines.samples)),
            ):
                if meter.blocked != blocked:
                    meter.set(blocked, self.clock())

    def close(self) -> None:
        """Refuses everything from now on and ends every wait."""
        self._closed = True
        refusal = closed("the server is shutting down")
        for lines in self.lines.values():
            for pending in [*lines.inserts, *lines.samples]:
                if not pending.done:
                    pending.fail(refusal)
        if self.admission is not None:
            for waiting in self.admission.line:
                waiting.fail(refusal)

    # ------------------------------------------------------------------------------------- update, delete, tables

    def update_priorities(self, table_name: str, keys: KeyArray, priorities: FloatArray) -> tuple[int, list[int]]:
        """Sets all of them or, if one is bad, none. Returns how many were set, and the keys that are missing."""
        table = self.table(table_name)
        if keys.size != priorities.size:
            raise invalid(f"{keys.size} keys and {priorities.size} priorities")
        bad = ~valid_priorities(priorities)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise bad_priority(priorities[row], f"key {int(keys[row])}, table {table_name!r}")
        result = table.update_priorities(keys, priorities)
        for watcher in self.watchers:
            watcher.changed(keys.tolist())
        self._progress([table])  # an item of priority 0 may have become selectable
        return result

    def delete(self, table_name: str, keys: Iterable[int]) -> list[int]:
        """Returns the keys that are not in the table."""
        table = self.table(table_name)
        missing = table.delete(keys)
        self._progress([table])
        return missing

    def reset(self, table_name: str = "") -> int:
        """Empties one table, or all (""), and sets its counters to 0. Returns how many items were removed."""
        tables = [self.table(table_name)] if table_name else list(self.tables.values())
        for watcher in self.watchers:
            for table in tables:
                watcher.changed(table.consumed_keys())
                watcher.scope_changed(table.name, "")
        removed = sum(table.reset() for table in tables)
        self._progress(tables)
        return removed

    def update_table(self, table_name: str, changes: dict[str, Any]) -> Table:
        """Changes the configuration of a table at run time; items and counters stay."""
        table = self.table(table_name)
        if fixed := changes.keys() & {"name", "forward_to", "seed"}:
            raise invalid(f"{', '.join(sorted(fixed))} of a table cannot change while the server runs")
        try:
            config = TableConfig.model_validate(table.config.model_dump(exclude_unset=True) | changes)
        except ValidationError as error:
            raise invalid(f"table {table_name!r}: {explain(error)}") from error
        table.configure(config)
        for insert in self.lines[table.name].inserts:
            self._fail_if_refused(insert, self._check_insert, insert.insert)
        for sample in self.lines[table.name].samples:
            self._fail_if_refused(sample, self._check_sample, table, sample.request)
        table.drop_stale(self.policy.version)
        self._progress(self.tables.values())  # who has ended waiting may have stood in the lines of others
        return table

    def _fail_if_refused(self, pending: Pending[Any], check: Callable[..., object], *args: Any) -> None:
        """Ends a wait that has become hopeless."""
        try:
            check(*args)
        except Refused as refusal:
            pending.fail(refusal)

    # ------------------------------------------------------------------------------------------------ policy

    def set_policy_version(self, version: int, weights: str, rollback: bool = False) -> Policy:
        """Sets the current version, drops what has become too stale, and lets waiting generators go on."""
        if not 0 <= version <= MAX_VERSION:
            raise invalid(f"policy version {version}: must be from 0 to {MAX_VERSION}")
        if version < self.policy.version and not rollback:
            raise invalid(
                f"policy version {version} is below the current {self.policy.version}; pass rollback=True (--rollback) "
                f"if the trainer really went back"
            )
        self.policy = Policy(version, weights, self.clock())
        for table in self.tables.values():
            table.set_policy_version(version)
            table.drop_stale(version)
            for pending in self.lines[table.name].inserts:
                self._fail_if_refused(pending, self._check_state, pending.insert, [table])
        if self.admission is not None:
            if rollback:
                self.admission.restart(version)
                for watcher in self.watchers:
                    watcher.changed(key for key, item in self.items.items() if item.unused_permit)
                for item in self.items.values():
                    item.unused_permit = False  # no longer among the accepted
            else:
                self.admission.set_version(version)
        self._progress(self.tables.values())
        for callback in list(self.on_policy):
            callback()
        return self.policy

    # ------------------------------------------------------------------------------------------------ state

    def remember(self, keys: Iterable[int]) -> None:
        """These keys have been inserted, most recently."""
        self._seen.update(keys)
        self.seen_order.extend(keys)
        while len(self.seen_order) > SEEN_KEYS:
            self._seen.discard(self.seen_order.popleft())

    def seen(self, keys: Iterable[int] | None = None) -> list[int]:
        """Those of `keys` (or all), in order, that a retry would be recognised by."""
        return [key for key in (self.seen_order if keys is None else keys) if key in self._seen]

    def drawn(self, table: Table) -> tuple[KeyArray, IntArray]:
        """The keys of the rows of `table` that are in hand, ascending, and how often each was drawn."""
        drawn = [batch.keys for of, batch in self._batches.values() if of is table and batch.epoch == table.epoch]
        return np.unique(np.concatenate(drawn or [np.zeros(0, np.uint64)]), return_counts=True)

    def drawn_in_scope(self, table: Table, scope: str) -> set[int]:
        """The keys in hand that were drawn under `scope`."""
        batches = [batch for of, batch in self._batches.values() if of is table and batch.scope == scope]
        return {key for batch in batches if batch.epoch == table.epoch for key in batch.keys.tolist()}

    def withdraw(self, keys: Iterable[int]) -> set[int]:
        """Takes back the insertion of items that could not be stored, but for those that somebody has drawn already.

        Returns the keys of those that are gone.
        """
        withdrawn: set[int] = set()
        for key in keys:
            item = self.items.get(key)
            holding = [table for table in self.tables.values() if key in table]
            if item is None or item.holders > len(holding) or item.forwarded:
                continue
            if any(table.columns.times_sampled[table.columns.slots[key]] for table in holding):
                continue
            withdrawn.add(key)
            self._seen.discard(key)
            for table in holding:
                table.withdraw([key])
        self._progress(self.tables.values())
        return withdrawn

    def load_policy(self, version: int, weights: str, set_at: float) -> None:
        self.policy = Policy(version, weights, set_at)
        for table in self.tables.values():
            table.set_policy_version(version)

    def load_items(self, items: Mapping[int, Item]) -> None:
        """Items whose rows are in their tables; those without any go, as when a batch in hand lets go of them."""
        self.items.update(items)
        self.bytes += sum(item.nbytes for item in items.values())
        unheld = [key for key, item in items.items() if item.holders == 0]
        for key in unheld:
            self.items[key].holders = 1
        self._left(unheld)

    def settle(self) -> None:
        """Makes what was loaded fit the configuration."""
        if self.admission is not None:
            self.admission.set_version(self.policy.version)
            self.admission.expire()
        for table in self.tables.values():
            size = table.size
            if lost := table.settle():
                log.warning("table %r: %d items are lost", table.name, lost)
            if evicted := size - table.size:
                log.warning("table %r: %d items evicted, for its bounds are lower now", table.name, evicted)
            table.drop_stale(self.policy.version)
        if why := self._why_full(0):
            evicting = [table for table in self.tables.values() if table.config.when_full == "evict"]
            before, fits = len(self.items), self._can_free(self.bytes - self.max_bytes, evicting)
            if fits:
                self._evict(0, evicting)
            log.warning("%s: %d items evicted%s", why, before - len(self.items), "" if fits else ", for too few can be")
        self._freed = False


def valid_priorities(priorities: FloatArray) -> npt.NDArray[np.bool_]:
    return np.asarray((priorities >= 0) & (priorities <= MAX_PRIORITY))


def bad_priority(priority: float, what: str) -> Refused:
    return invalid(f"priority {float(priority)} of {what}: must be a number from 0 to {MAX_PRIORITY:g}")
