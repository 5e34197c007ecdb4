"""RowTable: a table of the server that holds rows of TransferQueue, also those that a checkpoint still needs.

TransferQueue keeps the list of rows, and a checkpoint is a copy of that list. So the bytes of a row must outlive its
clear if a checkpoint lists it, because a run that goes back to the checkpoint reads the row again. The priority of an
item says what became of it:

    0        the row is in use
    1        it was cleared, and a checkpoint may list it
    2, 3     the same, and one or two checkpoints were completed since it was cleared
    MARK     no row: the item marks the moment of the last save

    save:   mark that a save begins ──▶ TransferQueue copies its list ──▶ mark that the save has ended
    clear:  newer than the last ended save?  no checkpoint lists it: deleted.   Otherwise, or while a save runs: 0 ──▶ 1

A row is cleared only after TransferQueue has taken it from readers. So a clear that saw no save in progress began
before the list was copied, and the copy lists that row as not ready: nobody reads it again.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from replay_adapters.patient_requests import PatientRequests
from replay_client import KeySequence, ReplayClient
from replay_client.columns import Buffer

IN_USE, CLEARED = 0.0, 1.0
"""Priorities of rows. Each completed checkpoint adds 1 to the priority of a cleared row."""
BEGUN, ENDED = 1e6, 2e6
"""Priorities of marks: a save has begun, or has ended."""
_KEYS = 1 << 15
"""Keys in one request."""
_BYTES = 64 << 20
"""Payload bytes, about, that one request asks for."""
_LONG = 120.0
"""Seconds that such a request may take."""
_IN_FLIGHT = 4096
"""Rows of a put that the server has not stored yet."""
_WRITERS_FROM = 2
"""Rows from which on an insert is pipelined."""


class Mark(NamedTuple):
    """An item that marks the moment of a save."""

    key: int
    ended: bool
    """False: the save has begun, and has not ended."""


class RowTable:
    """The rows of one job in a table of the server. Several threads may use it at once.

    While the server is away, or the table is full, all methods wait, and log why.
    """

    def __init__(self, client: ReplayClient, table: str, checkpoints: int) -> None:
        """`checkpoints`: the number of completed checkpoints that stay loadable.

        Raises ValueError for several servers, and for a table whose configuration could lose rows.
        """
        if "," in client.address or "://" in client.address:
            raise ValueError(f"{client.address} are several servers: rows of TransferQueue need one server")
        self.client = client
        self.table = table
        self.checkpoints = checkpoints
        """The number of completed checkpoints that stay loadable."""
        self._keys = KeySequence()
        self._keys_lock = threading.Lock()
        self._writers: deque[Any] = deque()
        """Writers that no thread uses. A new one costs a stream and a ring of shared memory."""
        self._mark: Mark | None = None
        """The newest mark that this process has seen. It is the newest of all for as long as it is there."""
        self._requests = PatientRequests("TransferQueue")
        self._reach = self._requests.reach
        config = json.loads(client.server_info(tables=[table]).tables[table].config)
        why = _why_unsafe(config)
        if why:
            raise ValueError(f"the table {table!r} cannot hold rows of TransferQueue: {why}")

    def close(self) -> None:
        """Ends all waits, and closes the connection."""
        self._requests.close()
        self.client.close()

    # ------------------------------------------------------------------------------------------------ rows

    def put(self, payloads: Sequence[bytes]) -> list[int]:
        """Stores the payloads, and returns their keys when the server has stored all of them."""
        keys = [self._new_key() for _ in payloads]

        def insert() -> None:
            """Inserts the payloads. A repetition inserts only those that the server does not have yet."""
            if len(keys) < _WRITERS_FROM:
                for key, payload in zip(keys, payloads, strict=True):
                    self.client.insert(payload, {self.table: IN_USE}, key=key)
                return
            writer = self._free_writer()
            try:
                for key, payload in zip(keys, payloads, strict=True):
                    writer.insert(payload, {self.table: IN_USE}, key=key)
                writer.flush(timeout=None)  # many bytes take long; if the server goes away, this raises
            except BaseException:
                writer.close()
                raise
            self._writers.append(writer)

        self._reach(insert)
        return keys

    def _free_writer(self) -> Any:
        """A writer that no other thread uses."""
        try:
            return self._writers.pop()
        except IndexError:
            return self.client.writer(max_in_flight=_IN_FLIGHT)

    def get(self, sizes: Mapping[int, int]) -> Iterator[tuple[int, Buffer]]:
        """Yields the keys and payloads of items, in any order, without those that the server does not have.

        `sizes`: by key, about how many bytes the payload has, so that no request asks for too many.
        """
        for chunk in _chunks_of_bytes(sizes):
            for item in self._reach(partial(self.client.get, chunk, timeout=_LONG)):
                yield item.key, item.payload

    def clear(self, keys: Iterable[int]) -> None:
        """Deletes rows that no checkpoint lists, and retains the others."""
        for chunk in _chunks(list(dict.fromkeys(keys))):
            self._reach(partial(self._clear, chunk))

    def clear_all(self) -> int:
        """Clears all rows in use: a new controller lists none of them. Returns their number."""
        keys = self._list(IN_USE, IN_USE)
        self.clear(keys)
        return len(keys)

    def _clear(self, keys: list[int]) -> None:
        """Clears up to _KEYS rows."""
        while True:
            mark = self._mark or self._newest_mark()
            if mark is None:
                self._delete(keys)
                return
            # One request, so that all ages are of the same moment.
            items = self.client.get([mark.key, *keys], payloads=False)
            ages = {item.key: item.age for item in items}
            age_of_mark = ages.pop(mark.key, None)
            if age_of_mark is not None:
                break
            self._mark = None  # another process has saved since
        if mark.ended:
            unlisted = [key for key, age in ages.items() if age < age_of_mark]
        else:
            unlisted = []
        self._delete(unlisted)
        self._set(ages.keys() - set(unlisted), CLEARED)

    # ------------------------------------------------------------------------------------------------ checkpoints

    def begin_save(self, *, completed: bool) -> None:
        """Retains all rows that are cleared from now on. `completed`: the last checkpoint was completed.

        Then cleared rows get older, and those that no checkpoint of the last ones lists are deleted.
        """
        if completed:
            self._age()
        self._replace_marks(BEGUN)

    def end_save(self) -> None:
        """Retains, from now on, only cleared rows that were in the table until now."""
        self._replace_marks(ENDED)

    def restore(self, listed: Collection[int]) -> list[int]:
        """Brings back the rows that a loaded checkpoint lists, and clears all others. Returns those that are missing.

        `listed`: their keys.
        """
        mark = self._reach(self._newest_mark)
        if mark is not None and not mark.ended:  # the job died while it saved
            self.end_save()
        wanted = set(listed)
        present: set[int] = set()
        cleared: set[int] = set()
        for chunk in _chunks(list(wanted)):
            for item in self._reach(partial(self.client.get, chunk, payloads=False)):
                present.add(item.key)
                if item.tables[self.table].priority != IN_USE:
                    cleared.add(item.key)
        self._set(cleared, IN_USE)
        self.clear(set(self._list(IN_USE, IN_USE)) - wanted)
        return sorted(wanted - present)

    def _age(self) -> None:
        """Adds a completed checkpoint to all cleared rows. Deletes those that are older than the last checkpoints."""
        for chunk in _chunks(self._list(CLEARED + self.checkpoints, BEGUN - 1)):
            self._reach(partial(self._delete, chunk))
        for completed in range(self.checkpoints - 1, -1, -1):  # the oldest first, so that no row is counted twice
            self._set(self._list(CLEARED + completed, CLEARED + completed), CLEARED + completed + 1)

    def _replace_marks(self, priority: float) -> None:
        """Inserts a mark, and then deletes all older marks."""
        older = self._list(BEGUN, ENDED)
        key = self._new_key()
        self._reach(partial(self.client.insert, b"", {self.table: priority}, key=key))
        self._reach(partial(self._delete, older))
        self._mark = Mark(key, priority == ENDED)

    def _newest_mark(self) -> Mark | None:
        """The newest mark; None: no save has begun yet."""
        page = self.client.list_items(self.table, limit=1, min_priority=BEGUN)
        for item in page:
            self._mark = Mark(item.key, item.priority == ENDED)
            return self._mark
        return None

    # ------------------------------------------------------------------------------------------------ requests

    def _new_key(self) -> int:
        """A key that no process has used. Several threads may call this at once."""
        with self._keys_lock:
            return next(self._keys)

    def _list(self, lowest: float, highest: float) -> list[int]:
        """The keys of all items with a priority from `lowest` to `highest`."""
        keys: list[int] = []
        page = ""
        while True:
            # The oldest first: new items then come last, and shift no page.
            request = partial(
                self.client.list_items,
                self.table,
                limit=2 * _KEYS,
                page=page,
                min_priority=lowest,
                max_priority=highest,
                descending=True,
            )
            listed = self._reach(request)
            keys.extend(item.key for item in listed)
            page = listed.next_page
            if not page:
                return list(dict.fromkeys(keys))

    def _set(self, keys: Iterable[int], priority: float) -> None:
        """Sets the priority of these items, as far as they are there."""
        for chunk in _chunks(list(keys)):
            array = np.array(chunk, dtype=np.uint64)
            priorities = np.full(len(chunk), priority)
            self._reach(partial(self.client.update_priority_arrays, self.table, array, priorities))

    def _delete(self, keys: Sequence[int]) -> None:
        """Deletes these items, as far as they are there."""
        if keys:
            self.client.delete(self.table, keys)


def _chunks(keys: list[int]) -> Iterator[list[int]]:
    """The keys, in lists that fit into one request."""
    for start in range(0, len(keys), _KEYS):
        yield keys[start : start + _KEYS]


def _chunks_of_bytes(sizes: Mapping[int, int]) -> Iterator[list[int]]:
    """The keys, in lists that ask for at most _BYTES together, or for one larger payload."""
    chunk: list[int] = []
    nbytes = 0
    for key, size in sizes.items():
        if chunk and (nbytes + size > _BYTES or len(chunk) == _KEYS):
            yield chunk
            chunk = []
            nbytes = 0
        chunk.append(key)
        nbytes += size
    if chunk:
        yield chunk


def _why_unsafe(config: dict[str, Any]) -> str:
    """The reason why a table of this configuration could lose rows, with the remedy; empty: it cannot."""
    if config["when_full"] == "evict":
        return "its when_full is 'evict', which drops rows once it is full; write when_full = 'block'"
    if config["rate_limiter"]["type"] != "min_size":
        return f"its rate_limiter is {config['rate_limiter']['type']!r}, under which puts wait for draws; leave it out"
    if config["max_times_sampled"]:
        return f"its max_times_sampled is {config['max_times_sampled']}, after which a row is gone; leave it out"
    if config["max_staleness"] is not None:
        return f"its max_staleness is {config['max_staleness']}, after which a row is gone; leave it out"
    return ""
