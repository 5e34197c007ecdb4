"""Leaving: clears away, in slices, the rows that left their table in one large change.

**Why.** `update_table(max_size=1)` can remove a million items, and so can a new policy version, a delete or a reset. To
free their objects one by one took up to 3 seconds, in which no client of any table was served.

**How.** The change itself is one moment, whatever its size. It marks its rows as leaving in one pass over an array
(`columns.py`), takes them out of the selectors, and counts them. From then on they are gone for whoever looks: for
draws, lists, `get`, counts, commits and checkpoints. Nobody sees a part of the change, nobody has to wait for it, and a
client that goes away leaves nothing half done. Only what nobody looks at is left to do: to free slots, objects and
payloads. That is done here, ROWS_PER_SLICE rows at a time, and other requests run between two slices.

* The queue holds the items, as a table or a batch would. So a payload stays, and its bytes count for the server, until
  its slice comes. An insert that lacks these bytes clears the slices that it needs, and is not refused.
* The next commit writes the whole change. After a kill between two slices, the start deletes payloads without an item.
* A change of at most ROWS_PER_SLICE rows clears its own rows at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from replay_server.tables.columns import Columns, IntArray

ROWS_PER_SLICE = 4096
"""Some 15 ms of CPU."""
MAX_DEPARTED = 1 << 20
"""Keys of items that left, and whose reader has not confirmed them."""


@dataclass(frozen=True, slots=True)
class Departed:
    """Items that left a table together, and why."""

    number: int
    """That of its first key. Later departures have higher numbers, also after a restart."""
    table: str
    reason: str
    """consumed, evicted, stale, deleted or reset."""
    time: float
    """Seconds since the epoch."""
    policy_version: int
    """The current one at that time."""
    keys: Sequence[int]


class DepartureLog:
    """The last departures, until the archiver confirms that it has written them. In memory only.

    Of more than MAX_DEPARTED keys the oldest are forgotten, and counted.
    """

    def __init__(self, wall_clock_ns: Callable[[], int]) -> None:
        self._wall_clock_ns = wall_clock_ns
        self._next = wall_clock_ns()
        self._departures: deque[Departed] = deque()
        self._keys = 0
        self.lost = 0
        """Keys that were forgotten before anybody confirmed them."""

    def add(self, table: str, reason: str, policy_version: int, keys: Sequence[int]) -> None:
        if not len(keys):
            return
        time = self._wall_clock_ns() / 1e9
        self._departures.append(Departed(self._next, table, reason, time, policy_version, keys))
        self._next += len(keys)
        self._keys += len(keys)
        while self._keys > MAX_DEPARTED:
            self.lost += self._forget()

    def read(self, confirmed: int, limit: int) -> tuple[list[Departed], int]:
        """Forgets what has a number below `confirmed`. Returns the oldest departures, and what confirms them.

        They have `limit` keys together, or the first one alone has more.
        """
        while self._departures and self._departures[0].number < confirmed:
            self._forget()
        found: list[Departed] = []
        for departure in self._departures:
            limit -= len(departure.keys)
            if found and limit < 0:
                return found, departure.number
            found.append(departure)
        return found, self._next

    def _forget(self) -> int:
        n = len(self._departures.popleft().keys)
        self._keys -= n
        return n


class Leaving:
    def __init__(self, release: Callable[[Sequence[int]], None], rows_per_slice: int) -> None:
        """`release` gets the keys of each slice."""
        self._release = release
        self.rows_per_slice = rows_per_slice
        self._slices: deque[tuple[Columns, IntArray]] = deque()
        self._columns: Counter[Columns] = Counter()
        """Of how many slices these are the columns."""
        self._more = asyncio.Event()

    def __len__(self) -> int:
        """How many slices wait."""
        return len(self._slices)

    def add(self, columns: Columns, slots: IntArray) -> None:
        """These slots (n,) of `columns` are leaving."""
        for start in range(0, slots.size, self.rows_per_slice):
            self._slices.append((columns, slots[start : start + self.rows_per_slice]))
            self._columns[columns] += 1
        self._more.set()

    def take_out(self, columns: Columns, slots: IntArray) -> None:
        """These slots of `columns`, which wait, are cleared away by the caller."""
        self._slices = deque(
            (of, waiting[~np.isin(waiting, slots)] if of is columns else waiting) for of, waiting in self._slices
        )

    def clear_slice(self) -> None:
        """Clears away the slice that has waited longest, if one waits."""
        if not self._slices:
            return
        columns, slots = self._slices.popleft()
        self._columns[columns] -= 1
        if not self._columns[columns]:
            del self._columns[columns]
        self._release(columns.free(slots))

    def holds_of(self, key: int) -> int:
        """How many rows of this item wait to be cleared away."""
        return sum(columns.leaving(key) is not None for columns in self._columns)

    async def run(self, clear_slice: Callable[[], None]) -> None:
        """Calls `clear_slice` for each slice, and lets the event loop go on in between, until it is cancelled."""
        while True:
            await self._more.wait()
            self._more.clear()
            while self._slices:
                clear_slice()
                await asyncio.sleep(0)
