"""Items: the facts of items that all tables share, and the payloads that the storage has to keep.

* A table holds each of its items once. An outstanding batch holds the items of its rows, and a reader holds the items
  whose bytes are being sent to it.
* A row that has left a table holds its item until the row is cleared away (`Leaving`). A retained row holds its item.
* As long as anything holds an item, its payload is in the storage and its bytes count towards `max_bytes`. When nothing
  holds the item any more, item and payload are deleted.
* For trainers, an item is gone as soon as only tables of copies hold it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from replay_protos.labels import NO_LABELS, Labels
from replay_server.tables.columns import LEAVING, Columns, IntArray
from replay_server.tables.table import InsertBatch, Payload, Table

ROWS_PER_SLICE = 4096
"""The most rows that `Leaving` clears away at once. This takes some 15 ms of CPU."""


class DamagedPayloads(Exception):
    """The bytes that the storage has under `keys` are not the bytes that were stored there."""

    def __init__(self, keys: list[int]) -> None:
        super().__init__(f"the payloads of {keys} are damaged")
        self.keys = keys


@dataclass(frozen=True)
class StorageFacts:
    """The facts about a storage that operators see."""

    storage: str
    """The name of the storage."""
    disk_bytes: int = 0
    """Bytes of the storage's file."""
    commits: int = 0
    """Transactions since the start."""
    commit_error: str = ""
    """The reason why the last commit failed; "": it did not fail."""
    fell_back: str = ""
    """The reason why the start went back to an older state, and the name of that state; "": it did not go back."""


class Storage(Protocol):
    """Keeps the payloads of items, in memory or on disk."""

    def put(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        """Stores payloads under keys that are not in use."""

    def extend(self, key: int, size: int, segment: Payload) -> None:
        """Appends `segment` to the payload of a key in use. `size`: the bytes of the payload until now."""

    def get(self, keys: Sequence[int], sizes: Sequence[int]) -> list[Payload]:
        """The payloads of keys in use, each cut after as many bytes as `sizes` says. Raises DamagedPayloads.

        A payload has more bytes than its size if it was extended since the caller learned the size.
        """

    def delete(self, keys: Sequence[int]) -> None:
        """Deletes payloads."""

    def check(self, sizes: Mapping[int, int]) -> None:
        """Asserts that the payloads in memory have these keys and sizes."""

    def why_full(self, nbytes: int) -> str | None:
        """Why payloads of `nbytes` cannot be stored; None: they can."""

    def facts(self) -> StorageFacts:
        """The facts about the storage, as of now."""


@dataclass(slots=True)
class Item:
    """One item, whatever tables it is in."""

    nbytes: int
    """The number of bytes of the payload."""
    policy_version: int
    inserted_at: float
    """Seconds of the server's clock."""
    holders: int = 0
    """The number of holders of the item: rows of tables and batches, and readers of bytes."""
    forwarded: tuple[str, ...] = ()
    """Names of the tables that forwarded the item."""
    labels: Labels = NO_LABELS

    @property
    def cost(self) -> int:
        """The bytes of the payload and the labels. Bounds on bytes, such as `max_bytes`, count these bytes."""
        return self.nbytes + self.labels.nbytes


class Items(dict[int, Item]):
    """All items, by key."""

    def __init__(self, storage: Storage, max_bytes: int | None, rows_per_slice: int = ROWS_PER_SLICE) -> None:
        super().__init__()
        self.storage = storage
        self.max_bytes = math.inf if max_bytes is None else max_bytes
        """The most bytes of all items together."""
        self.bytes = 0
        """The bytes of all items: the sum of their costs."""
        self.freed = False
        """True if bytes became free, or could be freed, since the buffer last set this to False."""
        self.closing: set[int] = set()
        """Keys of items whose inserts have closed batches. `ReplayBuffer.roll_back` does not undo such an insert,
        because the batches would stay acknowledged."""
        self.labelled = False
        """True if some item ever had labels. If False, callers need not look for labels."""
        self.tagged = False
        """True if some item ever had tags."""
        self.copies: Mapping[str, Table] = {}
        """The tables to which other tables copy their items, by name."""
        self.on_gone: tuple[Callable[[Sequence[int]], None], ...] = ()
        """The hooks `on_item_gone` of extensions (`extension.py`)."""
        self.spares: tuple[Callable[[int], int], ...] = ()
        """The hooks `spares` of extensions."""
        self.spare_keys: tuple[Callable[[], Iterable[int]], ...] = ()
        """The hooks `spare_keys` of extensions."""
        self.frees: tuple[Callable[[float], bool], ...] = ()
        """The hooks `free` of extensions."""
        self.leaving = Leaving(self.release, rows_per_slice)

    def insert(self, batch: InsertBatch, now: float, holders: int) -> None:
        """Adds the items of a batch, and stores their payloads. `holders`: how many tables hold each of the items."""
        assert self.keys().isdisjoint(batch.keys), "an item that is there is inserted again"
        sizes = batch.sizes.tolist()
        versions = batch.policy_versions.tolist()
        for key, nbytes, version in zip(batch.keys, sizes, versions, strict=True):
            self[key] = Item(nbytes, version, now, holders)
        if batch.labels is not None:
            self.label(batch.keys, batch.labels)
        self.bytes += sum(sizes)
        self.storage.put(batch.keys, batch.payloads)

    def label(self, keys: Iterable[int], labels: Iterable[Labels]) -> None:
        """Sets the labels of each of `keys`."""
        self.labelled = True
        for key, new_labels in zip(keys, labels, strict=True):
            self.bytes += new_labels.nbytes - self[key].labels.nbytes
            self[key].labels = new_labels
            self.tagged = self.tagged or bool(new_labels.pairs)

    def labels(self, keys: Sequence[int]) -> list[Labels] | None:
        """The labels of each of `keys`; None: no item has labels."""
        if not self.labelled:
            return None
        return [self[key].labels for key in keys]

    def extend(self, key: int, labels: Labels, segment: Payload, nbytes: int) -> None:
        """Appends a segment of `nbytes` to the payload of an item, which has these labels from now on."""
        item = self[key]
        self.storage.extend(key, item.nbytes, segment)
        item.nbytes += nbytes
        self.bytes += nbytes
        self.label([key], [labels])

    def gone(self, key: int) -> bool:
        """True if nothing holds the item, except rows that wait to be cleared away."""
        item = self.get(key)
        if item is None:
            return True
        if not self.leaving:
            return False
        return item.holders == self.leaving.holds_of(key)

    def hold(self, keys: Iterable[int]) -> None:
        """Adds a holder to each of `keys`."""
        for key in keys:
            self[key].holders += 1

    def release(self, keys: Iterable[int]) -> None:
        """Removes a holder from each of `keys`. Deletes the items that have no holder left.

        Calls the hooks `on_gone` with the deleted items. Calls them also with the items that no trainer can get any
        more from now on (`lost`), although tables of copies or rows that are leaving still hold them.
        """
        gone = []
        lost = []
        nbytes = 0  # of the items that are gone
        may_be_lost = bool(self.copies or self.leaving)  # otherwise an item with a holder is never lost
        for key in keys:
            item = self[key]
            item.holders -= 1
            if item.holders == 0:
                del self[key]
                nbytes += item.nbytes + item.labels.nbytes  # twice as fast as `item.cost`
                gone.append(key)
            elif may_be_lost and self.lost(key):
                lost.append(key)
                self.freed = True  # an insert that waits for bytes can discard the item
            elif self.spares and item.holders == self.spare(key):
                self.freed = True  # extensions can discard all rows that still hold the item
        if gone:
            self.bytes -= nbytes
            assert self.bytes >= 0, self.bytes
            self.freed = True
        if self.closing:
            self.closing.difference_update(gone)
        self.storage.delete(gone)
        if gone or lost:
            for hook in self.on_gone:
                hook([*gone, *lost])

    def lost(self, key: int) -> bool:
        """True if nobody can train on the item any more, even if the trainer goes back to an older state."""
        item = self.get(key)
        if item is None:
            return True
        copies = sum(table.has_or_may_return(key) for table in self.copies.values())
        # Any other holder is a row of a trained table or of its batch, a retained row, or a reader of the bytes. So if
        # there is another holder, a trainer may still get the item.
        return item.holders == copies + self.leaving.holds_of(key)

    def clear_left(self, nbytes: int) -> None:
        """Clears away rows that have left, until the server has room for `nbytes` more, or no such row remains."""
        while self.leaving and self.bytes + nbytes > self.max_bytes:
            self.leaving.clear_slice()

    def why_full(self, nbytes: int, tables: Sequence[Table] = ()) -> str | None:
        """Why the server has no room for `nbytes` more; None: it has room, or `free` and `make_room` can make room.

        `free` discards rows that extensions can spare. `make_room` also evicts items, from those of the `tables` whose
        setting `when_full` is "evict".
        """
        needed = self.bytes + nbytes - self.max_bytes
        if needed <= 0:
            return None
        if self._can_free(needed, tables):
            return None
        return f"{self.bytes} bytes + {nbytes} > max_bytes {self.max_bytes}"

    def free(self, nbytes: int) -> None:
        """Frees bytes until the server has room for `nbytes` more, or no more bytes can be freed.

        Clears away rows that have left, and then discards rows that extensions can spare.
        """
        while (needed := self.bytes + nbytes - self.max_bytes) > 0:
            if self.leaving:
                self.leaving.clear_slice()
                continue
            # Stops at the first extension that frees any bytes.
            has_freed = any(free_rows(needed) for free_rows in self.frees)
            if not has_freed:
                break

    def make_room(self, tables: Sequence[Table]) -> int:
        """Frees bytes, and evicts items from `tables`, until the server holds at most `max_bytes`.

        Returns how many items are gone. The caller has checked with `why_full` that enough bytes can be freed.
        """
        before = len(self)
        self.free(0)
        while self.bytes > self.max_bytes:
            largest = max(_evicting(tables), key=lambda table: table.bytes)
            largest.evict()
            self.free(0)  # removes the evicted item if only copies, or rows that are leaving, still hold it
        return before - len(self)

    def spare(self, key: int) -> int:
        """The number of rows of the item that extensions can discard."""
        spare = 0
        for spares in self.spares:  # for one extension, this loop takes a tenth of the time of sum()
            spare += spares(key)
        return spare

    def check(self) -> None:
        """Asserts those invariants that can be checked without a loop over all items."""
        assert self.bytes >= 0, self.bytes
        assert self.closing <= self.keys(), "an item that is gone has closed a batch"
        assert self.labelled >= self.tagged, "tags are labels"
        self.leaving.check()

    def check_each(self, holders: Mapping[int, int]) -> None:
        """Asserts that each item has the number of holders that `holders` says, and that `bytes` is the sum of costs.

        `holders`: key -> the number of rows that hold the item, as the caller has counted them. No reader of bytes may
        hold an item now. This loops over all items.
        """
        assert self.keys() == holders.keys(), self.keys() ^ holders.keys()
        for key, item in self.items():
            assert item.holders == holders[key], (key, item, holders[key])
            assert self.labelled or item.labels is NO_LABELS, (key, item)
        nbytes = sum(item.cost for item in self.values())
        assert self.bytes == nbytes, (self.bytes, nbytes)

    def _can_free(self, needed: float, tables: Sequence[Table]) -> bool:
        """True if `free` and `make_room` can free `needed` bytes, by discarding and evicting all that they can."""
        evicting = _evicting(tables)
        visited: set[int] = set()
        for key in self._keys_to_free(evicting):
            if key in visited:
                continue
            visited.add(key)
            removable_rows = self.spare(key) + sum(key in table for table in evicting)
            if self[key].holders == removable_rows:  # with any other holder, the item and its bytes would stay
                needed -= self[key].cost
                if needed <= 0:
                    return True
        return False

    def _keys_to_free(self, evicting: Iterable[Table]) -> Iterator[int]:
        """Yields the keys of rows that extensions can spare, and of the items of `evicting`. A key may come twice."""
        for spare_keys in self.spare_keys:
            yield from spare_keys()
        for table in evicting:
            yield from table.columns.key[table.columns.occupied()].tolist()


def _evicting(tables: Iterable[Table]) -> list[Table]:
    """The tables among `tables` that evict items to make room."""
    return [table for table in tables if table.config.when_full == "evict"]


class Leaving:
    """Clears away, in slices, the rows that left their table in one large change.

    **Why.** `update_table(max_size=1)` can remove a million items, and so can a new policy version, a delete or a
    reset. Freeing their objects one by one took up to 3 seconds, in which no client of any table was served.

    **How.** The change itself is one operation, whatever its size. It marks its rows as leaving in one pass over an
    array (`columns.py`), removes the rows from the selectors, and counts them. From then on the rows are gone for
    draws, lists, `get`, counts, commits and checkpoints. Nobody sees a part of the change, and nobody has to wait for
    it. The change is complete even if its client goes away. Afterwards, this class frees the slots, objects and
    payloads of the rows, at most ROWS_PER_SLICE rows (a slice) at a time. Other requests run between two slices.

    * The queue of slices holds the items, as a table or a batch would. So the payload of an item stays, and its bytes
      count towards `max_bytes`, until the slice of its row is cleared. An insert that needs these bytes is not refused:
      it clears as many slices as it needs.
    * The next commit writes the whole change. If the server is killed between two slices, its next start deletes the
      payloads that have no item.
    * A change of at most ROWS_PER_SLICE rows clears its own rows at once. So between two operations, all rows that are
      leaving are in the slices.
    """

    def __init__(self, release: Callable[[Sequence[int]], None], rows_per_slice: int) -> None:
        """`release` is called with the keys of each slice."""
        self._release = release
        self.rows_per_slice = rows_per_slice
        self._slices: deque[tuple[Columns, IntArray]] = deque()
        """The slices that wait, the oldest first: the Columns object to which the slots belong, and the slots (n,). A
        reset gives a table a new Columns object, and the slices from before the reset refer to the old object."""
        self._slice_counts: Counter[Columns] = Counter()
        """The number of waiting slices of each Columns object."""
        self._added = asyncio.Event()
        """Set when slices are added."""

    def __len__(self) -> int:
        """The number of slices that wait."""
        return len(self._slices)

    def add(self, columns: Columns, slots: IntArray) -> None:
        """Adds slots (n,) of `columns` whose rows are leaving, divided into slices."""
        for start in range(0, slots.size, self.rows_per_slice):
            self._slices.append((columns, slots[start : start + self.rows_per_slice]))
            self._slice_counts[columns] += 1
        self._added.set()

    def clear_slice(self) -> None:
        """Clears away the slice that has waited longest, if one waits."""
        if not self._slices:
            return
        columns, slots = self._slices.popleft()
        self._slice_counts[columns] -= 1
        if not self._slice_counts[columns]:
            del self._slice_counts[columns]
        keys = columns.free(slots)
        self._release(keys)

    def holds_of(self, key: int) -> int:
        """The number of rows of this item that wait to be cleared away."""
        return sum(columns.leaving(key) is not None for columns in self._slice_counts)

    def keys(self) -> Iterator[int]:
        """The keys of all rows that wait to be cleared away."""
        for columns, slots in self._slices:
            yield from columns.key[slots].tolist()

    def check(self) -> None:
        """Asserts that all rows of the slices are leaving, and that no other row is."""
        assert self._slice_counts == Counter(columns for columns, _ in self._slices)
        waiting_rows: Counter[Columns] = Counter()
        for columns, slots in self._slices:
            assert 0 < slots.size <= self.rows_per_slice, slots.size
            assert (columns.state[slots] == LEAVING).all(), "a row that waits to be cleared away is not leaving"
            waiting_rows[columns] += slots.size
        for columns, count in waiting_rows.items():
            assert np.count_nonzero(columns.state == LEAVING) == count, "a slot is in two slices, or in none"

    async def run(self) -> None:
        """Clears away one slice after the other, until the task is cancelled. Other tasks run between two slices.

        No request has to wait for this task, because an insert that needs the bytes clears away the slices itself.
        """
        while True:
            await self._added.wait()
            self._added.clear()
            while self._slices:
                self.clear_slice()
                await asyncio.sleep(0)  # lets other tasks run
