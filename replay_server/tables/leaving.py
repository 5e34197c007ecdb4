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

from replay_server.tables.columns import Columns, IntArray

ROWS_PER_SLICE = 4096
"""Some 15 ms of CPU."""


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
