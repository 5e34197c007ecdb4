"""Table: the items of one table, and every change to them. No function here blocks.

    insert ──▶ selectable ──draw──▶ outstanding ──acknowledge──▶ selectable or, after its last draw, gone
                    │                     └──────requeue───────▶ selectable, as before the draw
                    └──evict, delete, or drop as stale or undone──▶ gone

A table has four kinds of parts:

* The columns hold the facts of the items, one array for each fact, so that a draw of a hundred rows is one pass over
  arrays.
* The sampler and the remover are selectors over the slots of these columns. A selector knows an order or a
  distribution, but no limits of the table. The methods `_show` and `_hide` add rows to both selectors and remove rows
  from both, so that both hold the same rows, except rows that wait. A row waits if its item lacks a column, such as
  teacher_logprobs, that the table requires. The remover holds such a row, but the sampler does not.
* The rate limiter knows only the numbers of inserts, samples and deletes. It does not know the items.
* The scopes know which keys were drawn under which scope.

These rules hold:

* An outstanding row stays selectable, unless the draw was its last one (max_times_sampled). After its last draw, the
  row is reserved, which means that it counts as gone (`columns.py`). If its batch is requeued, the row returns. If its
  batch is acknowledged, the row is removed, unless an extension retains it.
* After `requeue` everything is as if the batch had not been drawn: items, counters, limiter, scopes.
* A reset starts a new epoch. Batches of an older epoch change nothing any more.
* The limiter's size is the number of items here, and `bytes` is the sum of their costs. This holds before and after
  each change, but not while a change runs.
* The table does not own payloads. It calls `on_leave` with the rows that it no longer holds.

Extensions (`extensions/`) act within a change of a table, in this order: copying, history, permit tables, admission,
forwarding. Copying comes before history so that, when the server needs room, copies are discarded before retained rows.
History comes before admission so that history can note whether a consumed row used a permit, before admission forgets
this. Permit tables come before admission, because admission counts the partial groups of the permit tables. Forwarding
comes last, when everything else about a batch is done.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_protos.labels import Labels
from replay_server.tables.balance import Balanced, ValueRows
from replay_server.tables.columns import (
    SELECTABLE,
    WAITING,
    Columns,
    FloatArray,
    IntArray,
    KeyArray,
    TagColumn,
    WaitingRows,
    costs,
    total,
)
from replay_server.tables.config import TableConfig
from replay_server.tables.meters import Counters, FlowMeter, Meter
from replay_server.tables.remembered import Scopes
from replay_server.tables.tag_counts import Event, TagCounts

Payload = tuple[bytes | memoryview, ...]
"""The bytes of one item, in the chunks in which they came. A chunk that is a view keeps its whole message in memory, so
the chunk must be most of that message."""


@dataclass(slots=True)  # not frozen, because a frozen object takes four times as long to create
class InsertBatch:
    """Items that are inserted into the same tables together. They may have to wait before they enter these tables.

    The batch has n rows, one for each item. The insert rules read the totals and extremes of the rows: `nbytes`,
    `largest`, `oldest` and `newest`.
    """

    keys: Sequence[int]
    priorities: Mapping[str, FloatArray]
    """Name of each table that the items enter -> the priorities (n,) of the rows in that table."""
    policy_versions: IntArray
    sizes: IntArray
    """The bytes of each payload."""
    payloads: Sequence[Payload]
    permits: int = 0
    """Id of the grant from which each row uses one permit; 0: the rows use no permits."""
    labels: Sequence[Labels] | None = None
    """The labels of each row; None: no row has labels."""
    closes: Sequence[int] = ()
    """Ids of batches that are acknowledged when the only row enters its tables. Empty if there are several rows."""
    moved: bool = False
    """True if another server has granted the permits that the rows use."""
    completions: Sequence[int] = ()
    """The number of completions of the group in each row; empty: unknown."""
    completion_tokens: Sequence[int] = ()
    """The number of tokens of all completions of the group in each row; empty: unknown."""
    evicted: list[tuple[int, str]] = field(default_factory=list)
    """(key, name of the table) of each row that a table evicts as soon as the row is inserted. The buffer fills this
    list."""
    nbytes: int = field(init=False)
    """Bytes of the payloads and labels of all rows."""
    largest: int = field(init=False)
    """Bytes of the payload and labels of the largest row."""
    oldest: int = field(init=False)
    """Policy version of the oldest row."""
    newest: int = field(init=False)
    """Policy version of the newest row."""

    def __post_init__(self) -> None:
        """Computes the totals and extremes of the rows. Without rows, they stay unset."""
        row_bytes = costs(self.sizes, self.labels)
        versions = self.policy_versions
        if len(self.keys) == 1:  # `item` takes a tenth of the time of `sum`, `max` or `min`
            self.nbytes = self.largest = row_bytes.item()
            self.oldest = self.newest = versions.item()
        elif self.keys:
            self.nbytes = row_bytes.sum().item()
            self.largest = row_bytes.max().item()
            self.oldest = versions.min().item()
            self.newest = versions.max().item()

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, rows: slice) -> InsertBatch:
        """Returns a batch of these rows. The new batch shares the list `evicted` with this batch."""
        return replace(
            self,
            keys=self.keys[rows],
            priorities={table: priorities[rows] for table, priorities in self.priorities.items()},
            policy_versions=self.policy_versions[rows],
            sizes=self.sizes[rows],
            payloads=self.payloads[rows],
            labels=None if self.labels is None else self.labels[rows],
            completions=self.completions[rows],
            completion_tokens=self.completion_tokens[rows],
        )


@dataclass
class SampleRequest:
    """The properties of the batch that a reader asks for."""

    num_samples: int
    """Rows of the batch."""
    min_samples: int
    """The fewest rows with which the reader is content at its deadline."""
    distinct: bool = True
    """False: a row may be drawn several times."""
    scope: str = ""
    """No row that was drawn under this scope is drawn again; "": no scope."""
    exclude: frozenset[int] = frozenset()
    """Keys of rows that are not drawn."""
    id: int = 0
    """The id of the batch; 0: the server chooses one."""
    values: tuple[ValueRows, ...] = ()
    """For a table that balances its draws: the number of rows to draw of each tag value. The numbers sum to
    num_samples. Empty: the table chooses the numbers."""


@dataclass
class SampleBatch:
    """Items that were drawn together. The arrays (n,) have the facts of the rows at the time of the draw."""

    keys: KeyArray
    orders: IntArray
    """The `order` of each row in the table. It distinguishes the row from a later row with the same key."""
    priorities: FloatArray
    probabilities: FloatArray
    """The probability of each row to be drawn first."""
    policy_versions: IntArray
    inserted_at: FloatArray
    """The time at which each item was inserted, in seconds of the server's clock."""
    times_sampled: IntArray
    """The number of draws of each row, this draw included."""
    sizes: IntArray
    """The bytes of each payload."""
    consumed: npt.NDArray[np.bool_]
    """True for each row whose last draw this was. The table reserves these rows until the batch ends."""
    table_size: int
    """Items in the table before the draw."""
    scope: str
    """The scope of the request; "": no scope."""
    epoch: int
    """The epoch of the table at the draw."""

    def __len__(self) -> int:
        return int(self.keys.size)


@dataclass
class Table:
    """The items of one table, with its selectors, limiter, scopes and counters."""

    config: TableConfig
    clock: Callable[[], float]
    """The server's clock, in seconds, which never goes back."""
    on_leave: Callable[[Columns, IntArray], None]
    """Called with the columns of the table and the slots of items that leave it. The function must call `leave` of
    these columns with these slots, and then `free`, at once or later. It is not called for reserved rows, because
    `Columns.remove_reserved` frees their slots."""
    labels_of: Callable[[Sequence[int]], Sequence[Labels] | None]
    """Returns the labels of the items with these keys; None: no item has labels."""
    on_acknowledge: Sequence[Callable[[Table, SampleBatch], Iterable[Table]]] = ()
    """Hooks of extensions, called when a reader acknowledges a batch. Each returns the other tables that it changed."""
    on_lease: Sequence[Callable[[Table, SampleBatch], Iterable[Table]]] = ()
    """Hooks of extensions, called when a reader gets a lease of a batch. From then on, the reader uses the batch, but
    may still lose it. Each hook returns the other tables that it changed."""
    counters: Counters = field(default_factory=Counters)
    undone: int = 0
    """The newest policy version that a rollback has undone. All versions above the current version, up to and including
    this one, are undone."""

    def __post_init__(self) -> None:
        self.name = self.config.name
        self.rng = np.random.default_rng(self.config.seed)
        self._rng_seen: tuple[Mapping[str, Any], str] = ({}, "")
        """The state of the random generator when it was last recorded, and the same state as JSON."""
        self.inserted = Meter(self.clock())
        """Counts inserted items."""
        self.sampled = Meter(self.clock())
        """Counts drawn rows."""
        self.flow = FlowMeter()
        """Counts the drawn items if the table draws each item only once. Otherwise it counts nothing."""
        self.waits_since = self.clock()
        """The time at which a waiting row was last extended or, if that is later, at which a row began to wait while no
        other row waited. It means nothing while no row waits."""
        self._order = 0
        """The number of items inserted until now, which is the `order` of the last of them."""
        self.epoch = 0
        """Rises with each reset. A batch of an older epoch changes nothing any more."""
        self._clear(current_version=0)

    def _clear(self, current_version: int) -> None:
        """Makes the table empty, with a new limiter and new scopes, and starts a new epoch."""
        self.columns = Columns(current_version, self.config.indexed)
        self.tag_counts = {name: TagCounts(name) for name in self.columns.tags}
        self.limiter = self.config.rate_limiter.build()
        self._build_selectors()
        self.bytes = 0
        """The sum of the costs of all items that are here."""
        self.outstanding = 0
        """Rows of batches that are neither acknowledged nor requeued."""
        self.scopes = Scopes(self.has_or_may_return)
        self.epoch += 1

    def _build_selectors(self) -> None:
        """Makes an empty sampler, an empty remover and an empty set of waiting rows, as the configuration says."""
        config = self.config
        columns = self.columns
        self.waiting = WaitingRows(columns, config.requires)
        self.balanced: Balanced | None = None
        """The sampler, if the table balances its draws; else None."""
        if config.balance is None:
            self.sampler = config.sampler.build(columns)
        else:
            self.balanced = Balanced(columns, config.balance.tag, config.balance.weights, config.sampler.build)
            self.sampler = self.balanced
        # If sampler and remover have the same configuration, one selector serves as both. There are two exceptions. If
        # rows may wait, only the remover holds the waiting rows. If the table balances, only the sampler balances.
        needs_own_remover = config.remover != config.sampler or config.requires or self.balanced is not None
        if needs_own_remover:
            self.remover = config.remover.build(columns)
        else:
            self.remover = self.sampler

    @property
    def size(self) -> int:
        return len(self.columns)

    def __contains__(self, key: int) -> bool:
        return key in self.columns

    def has_or_may_return(self, key: int) -> bool:
        """True if the item is here, or an outstanding batch may requeue it."""
        return key in self.columns or key in self.columns.reserved

    # ------------------------------------------------------------------------------------------------ insert

    def why_no_insert(self, n: int, nbytes: int) -> str | None:
        """Why n items of `nbytes` together have to wait; None: they may be inserted now."""
        why = None
        if not self.limiter.can_insert(n):
            why = self.limiter.why_no_insert(n)
        elif self.config.when_full == "block":
            why = self.why_full(n, nbytes)
        if why:
            waiting_rows = self.waiting.words()
            if waiting_rows:  # rows that wait for columns take room in the table, so they may be the cause
                return f"{why}; {waiting_rows}"
        return why

    def why_full(self, n: int, nbytes: int) -> str | None:
        """The bound that n more items, with `nbytes` more bytes together, would break; None: they fit.

        If n is 0, for example for a segment, only the bytes are checked.
        """
        config = self.config
        if n and self.size + n > config.max_size:
            return f"size {self.size} = max_size {config.max_size}"
        if config.max_bytes is not None and self.bytes + nbytes > config.max_bytes:
            return f"{self.bytes} bytes + {nbytes} > max_bytes {config.max_bytes}"
        return None

    def too_stale(self, version: int) -> bool:
        """True if an item of this policy version lags by more than max_staleness."""
        most = self.config.max_staleness
        return most is not None and self.columns.current_version - version > most

    def is_undone(self, version: int) -> bool:
        """True if a rollback has undone the version, and the trainer has not reached this version again since then."""
        return self.columns.current_version < version <= self.undone

    def fits_at_once(self, n: int, nbytes: int) -> bool:
        """True if n items of `nbytes` together may be inserted now with the same outcome as one after the other.

        The items must fit without eviction, because most removers would choose anew after each item. A fifo is the
        exception: it evicts the oldest items, whatever is inserted. So with a fifo, the items may also exceed
        `max_size`. But they must not exceed `max_bytes`, because then the number of evicted items would depend on the
        size of each item.
        """
        config = self.config
        if n > config.max_size:
            return False
        evicts_in_order = config.when_full == "evict" and config.remover.type == "fifo"
        items_that_must_fit = 0 if evicts_in_order else n  # for 0 items, `why_full` checks only the bytes
        if self.why_full(items_that_must_fit, nbytes) is not None:
            return False
        return self.limiter.can_insert(n)

    def insert(self, batch: InsertBatch, priorities: FloatArray) -> None:
        """Inserts items with these priorities (n,), then evicts the excess. The caller has checked the insert rules.

        The remover chooses among the old items and the new ones, so a new item may leave at once.
        """
        n = len(batch)
        now = self.clock()
        orders = np.arange(self._order + 1, self._order + n + 1)
        self._order += n
        self.add_rows(
            keys=batch.keys,
            priorities=priorities,
            policy_versions=batch.policy_versions,
            sizes=batch.sizes,
            orders=orders,
            inserted_at=now,
            times_sampled=0,
            labels=batch.labels,
        )
        self.limiter.inserts += n
        self.counters.inserts += n
        self.inserted.add(n, now)
        self._count_generated(batch)
        assert self.limiter.size == self.size, (self.limiter, self.size)
        self._evict_excess()

    def refuse_stale(self, batch: InsertBatch) -> None:
        """Counts the groups of an insert that is refused as too stale: as generated and, by each tag, as stale."""
        self._count_generated(batch)
        if batch.labels is not None:
            for counts in self.tag_counts.values():
                counts.count_labels("stale", batch.labels)

    def _count_generated(self, batch: InsertBatch) -> None:
        """Counts the completions and tokens of the groups and, by each tag, the groups as generated."""
        self.counters.completions += sum(batch.completions)
        self.counters.completion_tokens += sum(batch.completion_tokens)
        if batch.labels is not None:
            for counts in self.tag_counts.values():
                counts.count_labels("generated", batch.labels)

    def _count_tags(self, event: Event, slots: IntArray, sign: int = 1) -> None:
        """Counts `event` for these rows (n,), by each tag that has a column.

        `sign` -1: undoes an earlier count of these rows.
        """
        for name, counts in self.tag_counts.items():
            counts.count_rows(event, self.columns.tags[name], slots, sign)

    def evict(self, n: int = 1) -> None:
        """Removes n items that the remover chooses."""
        slots, _ = self.remover.select(n, self.rng)
        if slots.size < n:
            # The remover `prioritized` never chooses an item of priority 0. If it has chosen too few items, the oldest
            # of the items that it did not choose are evicted, too.
            oldest_first = self.columns.used()
            not_chosen = oldest_first[~np.isin(oldest_first, slots)]
            slots = np.concatenate([slots, not_chosen])[:n]
        assert slots.size == n, f"{n} of {self.size} items are to make room, and {slots.size} can"
        self.evict_slots(slots)

    def evict_slots(self, slots: IntArray) -> None:
        """Removes these items (n,) to make room."""
        sampled = int(np.count_nonzero(self.columns.times_sampled[slots]))
        self.counters.evicted_unsampled += slots.size - sampled
        self._drop(slots, "evicted")

    def _evict_excess(self) -> None:
        """Evicts items until the table is within its bounds on items and bytes."""
        max_size = self.config.max_size
        max_bytes = self.config.max_bytes or math.inf
        excess = self.size - max_size
        while excess > 0 or self.bytes > max_bytes:
            self.evict(max(1, excess))  # if there are too many bytes but not too many items, evicts one item at a time
            excess = self.size - max_size

    def add_rows(
        self,
        keys: Sequence[int],
        priorities: FloatArray,
        policy_versions: IntArray,
        sizes: IntArray,
        orders: IntArray,
        inserted_at: FloatArray | float,
        times_sampled: IntArray | int,
        labels: Sequence[Labels] | None = None,
    ) -> None:
        """Adds items (n,), at least one, in the order of their insertion. The caller counts them in the limiter.

        `orders` are the numbers of their insertions. `labels` None: no item has labels.
        """
        columns = self.columns
        slots = columns.add(keys)
        assert priorities.shape == slots.shape, (priorities.shape, slots.shape)
        columns.priority[slots] = priorities
        columns.policy_version[slots] = policy_versions
        columns.order[slots] = orders
        columns.inserted_at[slots] = inserted_at
        columns.size[slots] = sizes
        columns.cost[slots] = costs(sizes, labels)
        columns.times_sampled[slots] = times_sampled
        if labels is not None:
            for tag in columns.tags.values():
                tag.set(slots, labels)
        self._show(slots, labels)

    def _show(self, slots: IntArray, labels: Sequence[Labels] | None) -> None:
        """Adds rows (n,), at least one, to the selectors, and adds their costs to `bytes`. `labels`: as in `_offer`."""
        self.bytes += total(self.columns.cost[slots])
        self._offer(slots, labels)

    def _offer(self, slots: IntArray, labels: Sequence[Labels] | None) -> None:
        """Adds rows to the selectors. The sampler gets only rows that do not wait.

        `labels` are the labels of the rows' items. They are used only if the table requires columns.
        """
        ready = slots
        if self.config.requires:
            if not self.waiting.count:  # if any of these rows has to wait, the wait begins now
                self.waits_since = self.clock()
            ready = self.waiting.add(slots, labels)
        if ready.size:
            self.sampler.insert(ready)
        if self.remover is not self.sampler:
            self.remover.insert(slots)

    def _hide(self, slots: IntArray) -> None:
        """Removes rows (n,) from the selectors, and their costs from `bytes`. It is the opposite of `_show`."""
        ready = slots
        if self.waiting.count:
            ready = self.waiting.remove(slots)
        if ready.size:
            self.sampler.delete(ready)
        if self.remover is not self.sampler:
            self.remover.delete(slots)
        self.bytes -= total(self.columns.cost[slots])
        assert self.bytes >= 0, self.bytes

    def _remove(self, slots: IntArray) -> None:
        """Removes rows (n,) from the table. The caller counts them in the limiter."""
        if slots.size:
            self._hide(slots)
            self.on_leave(self.columns, slots)

    # ------------------------------------------------------------------------------------------------ extend

    def extend(self, key: int, nbytes: int, cost: int, labels: Labels) -> bool:
        """Notes that a segment of `nbytes` was appended to an item, whose labels are now `labels`.

        `cost` is the sum of `nbytes` and the bytes by which the labels have grown. The item keeps its place in the
        order. Returns True if the item's row was waiting and does not have to wait any more.
        """
        columns = self.columns
        columns.grow(key, nbytes, cost)
        slot = columns.slot(key)
        if slot is None:  # the item is not in this table, or its row is reserved, so `bytes` does not count it
            return False
        self.bytes += cost
        self.counters.extensions += 1
        if columns.state[slot] != WAITING:
            return False
        self.waits_since = self.clock()
        if not self.waiting.complete(slot, labels):
            return False
        self.sampler.insert(np.array([slot]))
        return True

    # ------------------------------------------------------------------------------------------------ sample

    def available(self, request: SampleRequest) -> int:
        """The number of rows that a batch for `request` could have if the limiter allowed any number.

        If rows may repeat, and at least one row can be drawn, this number is num_samples.
        """
        if request.values and self.balanced is not None:
            excluded = self._excluded_slots(request)
            codes, _ = self.balanced.rows_of(request.values, excluded, distinct=request.distinct)
            return codes.size  # `rows_of` returns one code for each row that can be drawn
        selectable = self.sampler.selectable()
        if request.distinct:
            return selectable - len(self.excluded(request))
        if selectable:
            return request.num_samples
        return 0

    def why_no_sample(self, request: SampleRequest, n: int) -> str | None:
        """Why a batch of n rows has to wait; None: it may be drawn."""
        waiting = self.waiting.count
        if not waiting and not self.limiter.can_sample(n):
            return self.limiter.why_no_sample(n)
        available = self.available(request)
        if available < n:
            return f"{available} of {n} samples available (size {self.size}{self._left_out(request)})"
        # While rows wait, the limiter is asked last, because the reason above says which columns the rows wait for.
        if waiting and not self.limiter.can_sample(n, waiting):
            return self.limiter.why_no_sample(n, waiting, self.waiting.words())
        return None

    def _left_out(self, request: SampleRequest) -> str:
        """The numbers of items that `request` cannot get, in words: ", 14 wait for teacher_logprobs, 3 excluded"."""
        words = ""
        if self.waiting.count:
            words += f", {self.waiting.words()}"
        excluded = len(self.excluded(request))
        if excluded:
            words += f", {excluded} excluded"
        unselectable = self.size - self.waiting.count - self.sampler.selectable()
        if unselectable:
            words += f", {unselectable} of priority 0"
            if self.balanced is not None:
                words += " or of a value of weight 0"
        return words

    def most_available(self, request: SampleRequest) -> int:
        """The number of rows of the largest batch that could be drawn for `request` now, at most num_samples."""
        allowed = self.limiter.most_samples(self.waiting.count)
        most = min(request.num_samples, allowed, self.available(request))
        return int(max(0, most))

    def weigh(self, request: SampleRequest) -> dict[str, Any]:
        """What the table could give to `request` now, as the fields of the message Weight of replay.proto.

        A client of several servers divides a batch among them by these numbers. `total` is the sum of the weights of
        all items that the sampler could choose for `request`, and `squares` is the sum of the squares of these weights.
        This takes at most one pass over the items.
        """
        excluded = self._excluded_slots(request)
        if self.balanced is None:
            values = []
            total, squares = self.sampler.weigh(excluded)
        else:
            values = self.balanced.weigh_values(excluded)
            total = sum(value["total"] for value in values)
            squares = sum(value["squares"] for value in values)
        # `most_samples` may be infinite, but the field must have a finite number.
        samples = min(self.limiter.most_samples(self.waiting.count), 1 << 62)
        return {
            "total": total,
            "squares": squares,
            "items": self.sampler.selectable() - excluded.size,
            "samples": int(samples),
            "ordered": self.config.sampler.type not in ("uniform", "prioritized"),
            "consuming": bool(self.config.max_times_sampled),
            "size": self.size,
            "reason": self.why_no_sample(request, 1) or "",
            "values": values,
        }

    def draw(self, request: SampleRequest, n: int) -> SampleBatch:
        """Draws n rows. The caller has checked that `why_no_sample` is None, or that n is `most_available`."""
        if request.values:
            assert self.balanced is not None
            excluded = self._excluded_slots(request)
            slots, probabilities = self.balanced.select_values(
                request.values, self.rng, excluded, distinct=request.distinct
            )
            # The rate limiter may allow fewer rows than were selected.
            slots = slots[:n]
            probabilities = probabilities[:n]
        elif request.distinct:
            slots, probabilities = self.sampler.select(n, self.rng, self._excluded_slots(request))
        else:
            slots, probabilities = self.sampler.select_repeated(n, self.rng)
        assert slots.size == n, (slots.size, n)
        return self.draw_slots(slots, probabilities, request.scope)

    def draw_slots(self, slots: IntArray, probabilities: FloatArray, scope: str = "") -> SampleBatch:
        """Draws exactly these rows (n,).

        Reserves the rows whose last draw this is, so that no other draw gets them and they stay until the batch ends. A
        table with `max_times_sampled` draws only distinct rows.
        """
        columns = self.columns
        n = slots.size
        np.add.at(columns.times_sampled, slots, 1)  # counts a row twice if it was drawn twice
        times_sampled = columns.times_sampled[slots]
        limit = self.config.max_times_sampled
        if limit:
            is_last_draw = times_sampled >= limit
        else:
            is_last_draw = np.zeros(n, dtype=np.bool_)
        batch = SampleBatch(
            keys=columns.key[slots],
            orders=columns.order[slots],
            priorities=columns.priority[slots],
            probabilities=probabilities,
            policy_versions=columns.policy_version[slots],
            inserted_at=columns.inserted_at[slots],
            times_sampled=times_sampled,
            sizes=columns.size[slots],
            consumed=is_last_draw,
            table_size=self.size,
            scope=scope,
            epoch=self.epoch,
        )
        if scope:
            self.scopes.give(scope, batch.keys.tolist())
        consumed = int(np.count_nonzero(is_last_draw))
        if consumed:
            used_up = slots[is_last_draw]
            self._hide(used_up)
            columns.reserve(used_up)
        self._count_drawn(n, consumed)
        self.sampled.add(n, self.clock())
        if limit == 1:  # each item is drawn only once, so the number of draws is the number of drawn items
            self.flow.draw(columns.current_version - batch.policy_versions)
        self.outstanding += n
        assert self.limiter.size == self.size, (self.limiter, self.size)
        return batch

    def _count_drawn(self, n: int, consumed: int) -> None:
        """Counts n drawn rows, of which `consumed` were drawn for the last time. Negative numbers undo a draw."""
        self.limiter.samples += n
        self.limiter.deletes += consumed
        self.counters.samples += n
        self.counters.consumed += consumed

    def count_sampled(self, batch: SampleBatch) -> None:
        """Counts the rows of a batch as sampled, by their tags.

        Call it before the hooks `on_acknowledge`, because it does not find a row that a hook has retained.
        """
        if batch.epoch != self.epoch:  # a reset has removed the rows, and set all counts to 0
            return
        # Every column has the value "". If it has another value, an item has the tag.
        has_tags = any(len(tag) > 1 for tag in self.columns.tags.values())
        if has_tags:
            slots = self.columns.find_with_reserved(batch.keys)
            self._count_tags("sampled", slots[slots >= 0])

    def acknowledge(self, batch: SampleBatch) -> list[int]:
        """Ends a batch that its reader has for good. Removes the rows that it reserved, unless extensions retain them.

        Returns the keys of all rows that the batch has used up, retained rows included.
        """
        if batch.epoch != self.epoch:  # a reset has removed the rows
            return []
        assert self.outstanding >= len(batch), (self.outstanding, len(batch))
        self.outstanding -= len(batch)
        consumed: list[int] = batch.keys[batch.consumed].tolist()
        self.columns.remove_reserved(consumed)
        return consumed

    def retain(self, keys: KeyArray) -> None:
        """Retains rows that were just loaded. They were consumed and retained before a restart."""
        slots = self.columns.find(keys)
        assert (slots >= 0).all(), "a row to retain is not here"
        self._hide(slots)
        self.columns.reserve(slots)
        self.columns.retain(keys.tolist())

    def discard(self, keys: Sequence[int]) -> None:
        """Removes these retained rows for good."""
        if not keys:
            return
        # Only rows that are here can leave, so the rows return first. Selectors, limiter and `bytes` do not count
        # retained rows, so they stay as they are.
        slots = self.columns.return_rows(keys)
        self.on_leave(self.columns, slots)

    def restore(self, keys: Sequence[int]) -> None:
        """Brings retained rows back, so that everything is as if they had not been drawn. They keep their `order`."""
        slots = self.columns.return_rows(keys)
        self.columns.times_sampled[slots] -= 1
        self.scopes.forget(keys)
        self._count_drawn(-len(keys), -len(keys))
        self._count_tags("sampled", slots, sign=-1)
        self.counters.restored += len(keys)
        self._show(slots, self._labels_where_required(keys))
        assert self.limiter.size == self.size, (self.limiter, self.size)

    def _labels_where_required(self, keys: Sequence[int]) -> Sequence[Labels] | None:
        """The labels of each of `keys`, for `_offer`; None: the table requires no columns, so labels are not used."""
        if not self.config.requires:
            return None
        return self.labels_of(keys)

    def requeue(self, batch: SampleBatch) -> list[int]:
        """Undoes the draw of a batch. Returns the keys of the rows that the batch had reserved. They are here again."""
        if batch.epoch != self.epoch:  # a reset has removed the rows
            return []
        columns = self.columns
        returned: list[int] = batch.keys[batch.consumed].tolist()
        assert self.outstanding >= len(batch), (self.outstanding, len(batch))
        self.outstanding -= len(batch)
        self._count_drawn(-len(batch), -len(returned))
        if batch.scope:
            self.scopes.requeue(batch.scope, batch.keys.tolist())
        if returned:
            returned_slots = columns.return_rows(returned)
            self._show(returned_slots, self._labels_where_required(returned))
        # By now, another batch may have reserved a row of this batch. Such a row must be found, too.
        slots = columns.find_with_reserved(batch.keys)
        is_found = slots >= 0  # the slot of a row that is gone is -1
        slots = slots[is_found]
        # A deleted item may have joined this table again, from another table. Its new row, which has another order, was
        # not drawn.
        was_drawn = columns.order[slots] == batch.orders[is_found]
        # A row may be in the batch several times. `subtract.at` subtracts 1 for each occurrence.
        np.subtract.at(columns.times_sampled, slots[was_drawn], 1)
        assert self.limiter.size == self.size, (self.limiter, self.size)
        return returned

    def excluded(self, request: SampleRequest) -> set[int]:
        """The slots that the sampler could choose, but that `request` must not get."""
        keys: Iterable[int] = request.exclude
        if request.scope:
            scope_keys = self.scopes.keys_under(request.scope)
            if scope_keys:
                keys = scope_keys | request.exclude
        slots: set[int] = set()
        for key in keys:
            slot = self.columns.slot(key)
            if slot is not None and self.sampler.holds(slot):
                slots.add(slot)
        return slots

    def _excluded_slots(self, request: SampleRequest) -> IntArray:
        """The slots of `excluded` as an array (n,), ascending."""
        return np.array(sorted(self.excluded(request)), dtype=np.int64)

    # ------------------------------------------------------------------------------------- update, delete, stale, reset

    def update_priorities(self, keys: KeyArray, priorities: FloatArray) -> tuple[int, list[int]]:
        """Sets the priorities, which the caller has validated. If a key is named twice, its last priority counts.

        Returns how many items were updated, and the keys that are missing.
        """
        is_here, slots, missing = self._find(keys)
        priorities = priorities[is_here]
        is_last = self.columns.last_rows(slots)
        slots = slots[is_last]
        self.columns.priority[slots] = priorities[is_last]
        selectable = slots
        if self.waiting.count:  # the sampler does not hold waiting rows
            selectable = slots[self.columns.state[slots] == SELECTABLE]
        self.sampler.update(selectable)
        if self.remover is not self.sampler:
            self.remover.update(slots)
        return slots.size, missing

    def roll_back(self, keys: Sequence[int]) -> None:
        """Undoes the insert of items that were never drawn.

        The completions and tokens of the items stay counted, because their numbers are not stored. This hardly changes
        the mean length of a completion.
        """
        self.limiter.inserts -= len(keys)
        self.counters.inserts -= len(keys)
        slots = self.columns.find(np.array(keys, dtype=np.uint64))
        self._count_tags("generated", slots, sign=-1)
        self._remove(slots)
        assert self.limiter.size == self.size, (self.limiter, self.size)

    def delete(self, keys: Sequence[int]) -> list[int]:
        """Removes the items of these keys. Returns the keys that are not here."""
        _, slots, missing = self._find(np.array(keys, dtype=np.uint64))
        is_last = self.columns.last_rows(slots)  # even if a key is named twice, its item must be dropped only once
        self._drop(slots[is_last], "deleted")
        return missing

    def _find(self, keys: KeyArray) -> tuple[npt.NDArray[np.bool_], IntArray, list[int]]:
        """Splits `keys` (n,) into keys that are here and keys that are missing.

        Returns a mask (n,) of the keys that are here, their slots (m,) in the same order, and the missing keys, each
        once.
        """
        slots = self.columns.find(keys)
        is_here = slots >= 0
        missing = list(dict.fromkeys(keys[~is_here].tolist()))
        return is_here, slots[is_here], missing

    def set_policy_version(self, current: int) -> None:
        """Sets the current policy version. With a half-life, selectors let priorities age relative to this version."""
        before = self.columns.current_version
        self.columns.current_version = current
        self.sampler.version_moved(before)
        if self.remover is not self.sampler:
            self.remover.version_moved(before)

    def drop_stale(self) -> None:
        """Drops every item that lags by more than `max_staleness`."""
        most = self.config.max_staleness
        if most is None or not self.size:
            return
        slots = self.columns.occupied()
        staleness = self.columns.current_version - self.columns.policy_version[slots]
        self._drop(slots[staleness > most], "stale")

    def drop_undone(self) -> None:
        """Drops every item whose version was undone."""
        current = self.columns.current_version
        if self.undone <= current:
            return
        slots = self.columns.occupied()
        versions = self.columns.policy_version[slots]
        undone = (versions > current) & (versions <= self.undone)
        self._drop(slots[undone], "undone")

    def _drop(self, slots: IntArray, reason: str) -> None:
        """Removes items (n,) for another reason than an acknowledgement.

        `reason` is the name of the counter that counts such items.
        """
        if not slots.size:
            return
        count_before = getattr(self.counters, reason)
        setattr(self.counters, reason, count_before + slots.size)
        if reason == "stale":
            never_sampled = slots[self.columns.times_sampled[slots] == 0]
            self._count_tags("stale", never_sampled)
        self.limiter.deletes += slots.size
        # An item that has left can give no more samples. If the limiter did not count the samples that the item still
        # owed, these would stay in the difference between inserts and samples for ever, and a queue would lose a place.
        # In tables that are no queue or stack, evictions and deletions do not change the difference (`limiter.py`).
        if self.config.rate_limiter.type in ("queue", "stack") or reason in ("stale", "undone"):
            owed = np.maximum(0.0, self.limiter.samples_per_insert - self.columns.times_sampled[slots])
            self.limiter.samples += float(owed.sum())
        self._remove(slots)
        assert self.limiter.size == self.size, (self.limiter, self.size, reason)

    def reset(self) -> int:
        """Removes all items and sets all counters to 0. Returns how many items there were."""
        columns = self.columns
        slots = columns.used()
        self.counters = Counters()
        self._clear(columns.current_version)  # replaces `self.columns`, so the rows leave the old `columns` below
        self.on_leave(columns, slots)
        return int(slots.size)

    # ------------------------------------------------------------------------------------- configuration and state

    def tags_for(self, config: TableConfig) -> dict[str, TagColumn]:
        """Returns the tag columns, by name, that the table needs for the configuration `config`.

        A tag that has no column yet gets one, which is filled from the labels of all items.
        """
        columns = self.columns
        tags: dict[str, TagColumn] = {}
        new_tags: list[TagColumn] = []
        for name in config.indexed:
            if name in columns.tags:
                tags[name] = columns.tags[name]
            else:
                tags[name] = TagColumn(name, columns.key.size)
                new_tags.append(tags[name])
        if new_tags:
            self._fill_tags(new_tags)
        return tags

    def _fill_tags(self, tags: Iterable[TagColumn]) -> None:
        """Fills new tag columns from the labels of all items, including the items of reserved and retained rows."""
        columns = self.columns
        slots_that_may_return = [*columns.reserved.values(), *columns.retained.values()]
        slots = np.concatenate([columns.occupied(), np.array(slots_that_may_return, dtype=np.int64)])
        labels = self.labels_of(columns.key[slots].tolist())
        if labels is not None:
            for tag in tags:
                tag.set(slots, labels)

    def configure(self, config: TableConfig, tags: dict[str, TagColumn]) -> None:
        """Changes the configuration, but not the name. Counters stay, and so do the items that `config` allows.

        `tags` must be the result of `tags_for(config)`.
        """
        assert config.name == self.name
        old = self.config
        self.config = config
        self.limiter = replace(
            config.rate_limiter.build(),
            inserts=self.limiter.inserts,
            samples=self.limiter.samples,
            deletes=self.limiter.deletes,
        )
        self.columns.tags = tags
        self.tag_counts = {name: self.tag_counts.get(name) or TagCounts(name) for name in tags}
        selector_settings = ("sampler", "remover", "requires", "balance")
        selectors_change = any(getattr(config, name) != getattr(old, name) for name in selector_settings)
        if selectors_change:
            self._replace_selectors()
        self._fit()

    def _replace_selectors(self) -> None:
        """Builds the selectors anew, and adds all items to them, oldest first."""
        self.waiting.clear()
        self._build_selectors()
        slots = self.columns.used()
        if slots.size:
            labels = self._labels_where_required(self.columns.key[slots].tolist())
            self._offer(slots, labels)  # not `_show`, because `bytes` counts these rows already

    def _fit(self) -> None:
        """Removes the items that the configuration does not allow."""
        limit = self.config.max_times_sampled
        if limit and self.size:
            slots = self.columns.used()
            used_up = slots[self.columns.times_sampled[slots] >= limit]
            self._drop(used_up, "consumed")
        self._evict_excess()

    def check_totals(self) -> None:
        """Asserts that all counts of the items agree. Call it between two changes."""
        columns = self.columns
        columns.check_counts()
        self.limiter.check(self.size)
        nbytes = int(columns.cost[columns.occupied()].sum())
        assert self.bytes == nbytes, (self.bytes, nbytes)
        assert self.outstanding >= len(columns.reserved), (self.outstanding, len(columns.reserved))
        assert min(self.counts().values()) >= 0, self.counts()
        assert self.sampler.selectable() <= self.size - self.waiting.count, (self.size, self.waiting.count)

    def check(self) -> None:
        """Asserts what the docstring of the module states. Call it between two changes.

        It takes some passes over arrays, and no loop over the items.
        """
        self.check_totals()
        columns = self.columns
        columns.check()
        here = columns.occupied()
        assert (columns.cost >= columns.size)[here].all(), "an item counts for fewer bytes than its payload has"
        assert (columns.times_sampled[here] >= 0).all(), "a row was requeued more often than drawn"
        orders = columns.order[here]
        assert np.unique(orders).size == here.size, "two items have one place in the order"
        assert not here.size or 0 < orders.min() <= orders.max() <= self._order, (orders, self._order)
        self.waiting.check()
        self.sampler.check(here[columns.state[here] == SELECTABLE])
        if self.remover is not self.sampler:
            self.remover.check(here)
        self.scopes.check()

    def counts(self) -> dict[str, int]:
        return dict(vars(self.counters))

    def state_dict(self) -> dict[str, Any]:
        """The state of the table without its items and scopes, as if outstanding batches had been requeued."""
        limiter = self.limiter
        consumed = len(self.columns.reserved)  # the rows that outstanding batches have used up
        counters = self.counts()
        counters["samples"] -= self.outstanding
        counters["consumed"] -= consumed
        return {
            "name": self.name,
            "order": self._order,
            "limiter": [limiter.inserts, limiter.samples - self.outstanding, limiter.deletes - consumed],
            "counters": counters,
            "rng": self._rng_json(),
            "tags": {name: counts.state() for name, counts in self.tag_counts.items()},
        }

    def _rng_json(self) -> str:
        """The state of the random generator as JSON, because msgpack has no numbers of 128 bits.

        Usually the state has not changed since the last commit, so the JSON text of the last state is kept.
        """
        state = self.rng.bit_generator.state
        last_state, text = self._rng_seen
        if state != last_state:
            text = json.dumps(state)
            self._rng_seen = (state, text)
        return text

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a result of `state_dict`. Items are loaded separately."""
        self._order = state["order"]
        self.limiter.inserts, self.limiter.samples, self.limiter.deletes = state["limiter"]
        self.counters = Counters(**state["counters"])
        for name, values in state.get("tags", {}).items():
            if name in self.tag_counts:  # otherwise the tag has no column in this configuration
                self.tag_counts[name].load_state(values)
        self.rng.bit_generator.state = json.loads(state["rng"])

    def reconcile(self) -> int:
        """Makes the counters fit the loaded items, and the items fit the configuration.

        Returns the number of lost items: the loaded counters count them, but the items themselves were not loaded.
        """
        lost = self.limiter.size - self.size  # the first size is from the loaded counters
        self.limiter.deletes += lost
        if self.config.rate_limiter.type in ("queue", "stack"):
            self.limiter.samples += lost  # otherwise the queue would lose places: see `_drop`
        # A table that blocks or rejects never evicts. It may exceed its bounds for a while, because items that were
        # outstanding have returned.
        if self.config.when_full == "evict":
            self._fit()
        return lost
