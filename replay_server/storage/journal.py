"""Journal: group commit. One transaction writes the changes of all clients since the transaction before it.

    record changes ──▶ collect, as of now ──▶ commit (on a thread) ──▶ wake all requests that wait
          ▲                                           │
          └───────── the server goes on ──────────────┘

A request that has changed something asks the journal for a ticket: the future of the next commit. The commit before
that may still run on the journal's thread. When it has ended, the journal collects all changes that it did not write,
as of one moment of the event loop, and writes them in one transaction. Clients go on meanwhile, and their changes
belong to the transaction after that. One sync of the disk therefore serves a thousand clients at the cost of one, and a
busy server commits more at once instead of more often. A transaction always leads from one state of the server to a
later state, and never to half of a request. Counters, items and scopes therefore agree when a killed server starts
again.

If very many items have changed, for example all priorities, their records are collected in slices, and other requests
run in between. The changes that these requests make are collected again at the end, so the transaction as a whole
still has the state of one moment: the moment of the last collection.

* No client is told of a change before the change is written.
* When a commit fails, the journal rolls back the inserts in it that were never drawn and closed no batch, and refuses
  them. It writes everything else again with the next commit. Requests that wait for the failed commit fail with the
  reason. A request that is repeated waits for the next commit.
* A response may wait for a later commit than the commit that failed with its insert. The journal therefore remembers
  the keys of inserts that it has rolled back, and each insert asks for them before it responds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import lmdb

from replay_protos.words import counted
from replay_server.errors import Refused, broken, try_again
from replay_server.storage.data_dir import DamagedDirectory
from replay_server.storage.lmdb import FileGone, LmdbStorage
from replay_server.storage.state import ChangeCollector, restore
from replay_server.tables.buffer import MAX_KNOWN_KEYS, ReplayBuffer
from replay_server.tables.remembered import Remembered

log = logging.getLogger("replay_server")

_TICK = 0.1
"""Seconds after which the journal writes changes for which no request waits."""
_RETRY = 0.2
"""Seconds between two attempts of a commit."""

Fsync = Literal["always", "never"]
"""With "always" a commit ends when it is on the disk, with "never" when the operating system has it."""


class Journal:
    """Writes the changes of a buffer to its storage, in group commits, and tells requests when that is done."""

    def __init__(self, buffer: ReplayBuffer, storage: LmdbStorage, collector: ChangeCollector) -> None:
        """Begins to commit. `start` calls this when `collector` watches the buffer."""
        self._buffer = buffer
        self._storage = storage
        self._collector = collector
        self._thread = ThreadPoolExecutor(1, "replay-journal")
        self._wanted = asyncio.Event()
        """Set when a commit is to begin."""
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The ticket of the next commit. It has failed already if the journal cannot write any more."""
        self._rolled_back: Remembered[None] = Remembered("rolled back", MAX_KNOWN_KEYS)
        """The keys of the last inserts that could not be written."""
        self._stopping = False
        self._task = asyncio.create_task(self._run())

    @classmethod
    def start(cls, buffer: ReplayBuffer, storage: LmdbStorage) -> Journal:
        """Fills the buffer from its storage, and from then on writes each change of the buffer to the storage.

        Raises UnusableDirectory, or DamagedDirectory.
        """
        began = time.monotonic()
        state = storage.load()
        # Without this check, the server would start empty if it was killed during the restore of a checkpoint.
        if storage.was_written and not state.state_records:
            raise DamagedDirectory(storage.directory, "a checkpoint was not restored into it to the end")
        try:
            collector = ChangeCollector(buffer, state)
            # Before the restore, which may drop items: the collector must note that their records are to be deleted.
            buffer.watchers.append(collector)
            restore(buffer, state)
        except ValueError as error:
            raise DamagedDirectory(storage.directory, str(error)) from error
        seconds = time.monotonic() - began
        directory = storage.directory
        items = counted(len(buffer.items), "item")
        log.info("%s: %s with %d bytes, loaded in %.2f s", directory, items, buffer.items.bytes, seconds)
        if state.skipped or state.damaged:
            lost_items = counted(len(state.skipped), "item")
            lost_records = counted(len(state.damaged), "other record")
            log.error(
                "%s: left out as damaged: %s and %s; the first items are %s",
                directory,
                lost_items,
                lost_records,
                state.skipped[:10],
            )
        return cls(buffer, storage, collector)

    @property
    def backlog(self) -> int:
        """Payload bytes that wait to be written."""
        return self._storage.unwritten

    def ticket(self) -> asyncio.Future[None]:
        """A future that is done when all changes until now are written.

        The future fails with Refused if the commit fails. The changes that are not rolled back are then written with a
        later commit, if there is one.
        """
        self._wanted.set()
        assert not self._next.done() or self._storage.error, "a change would wait for a commit that has ended"
        return self._next

    async def durable(self) -> None:
        """Returns when all changes until now are written. Raises Refused if the commit fails."""
        await asyncio.shield(self.ticket())  # other requests wait for the same ticket, so it must not be cancelled

    async def copy_to(self, path: Path) -> None:
        """Writes the whole state to a new file, as of now or later. Raises Refused if the commit before that fails."""
        await self.durable()
        await asyncio.to_thread(self._storage.copy_to, path)

    def rolled_back(self, keys: Collection[int]) -> set[int]:
        """The keys among `keys` whose insert was rolled back, and was not repeated with success since."""
        if not len(self._rolled_back):  # the usual case, without a loop over the keys
            return set()
        return {key for key in keys if key in self._rolled_back and key not in self._buffer.known_keys}

    async def close(self) -> None:
        """Writes the last changes and ends."""
        self._stopping = True
        self._wanted.set()
        await self._task
        await asyncio.to_thread(self._storage.sync)
        self._thread.shutdown()

    async def _run(self) -> None:
        """Commits when a request waits, and at least each _TICK, until the stop or until nothing can be written."""
        loop = asyncio.get_running_loop()
        while not self._stopping and not self._next.done():  # done before its commit: nothing can be written any more
            tick = loop.call_later(_TICK, self._wanted.set)
            await self._wanted.wait()
            tick.cancel()
            self._wanted.clear()
            await self._commit_and_wake()
        if not self._next.done():  # the last changes before the stop
            await self._commit_and_wake()

    async def _commit_and_wake(self) -> None:
        """Commits once, and wakes the requests that wait for this commit."""
        ticket = self._next
        # A change that is made from now on may miss this commit, so its request waits for the next one.
        self._next = asyncio.get_running_loop().create_future()
        try:
            await self._commit()
            ticket.set_result(None)
        except Refused as refusal:  # the next commit writes all of it again
            _fail(ticket, refusal)
            await asyncio.sleep(_RETRY)
        except Exception as error:  # a bug: what was collected may be lost, so the journal never writes again
            log.exception("what has changed cannot be written any more: restart the server")
            self._storage.error = f"writing failed ({error!r}); restart the server"
            _fail(ticket, broken(self._storage.error))
            _fail(self._next, broken(self._storage.error))

    async def _commit(self) -> None:
        """Writes all changes. If the disk fails, rolls back the inserts that can be undone, and raises Refused."""
        loop = asyncio.get_running_loop()
        storage = self._storage
        slices = []
        for changes in self._collector.slices():
            slices.append(changes)
            await asyncio.sleep(0)  # lets other requests run; what they change is in a later slice or in `delta`
        # From here to the start of the thread nothing waits, so `delta` and `payloads` have the same moment.
        delta = self._collector.collect()
        if not delta and not slices and not storage.changed:
            return
        payloads = storage.begin_commit()
        try:
            await loop.run_in_executor(self._thread, storage.commit, delta, payloads, slices)
        except lmdb.Error as error:
            if not storage.error:  # one line for a row of failed commits
                log.error("cannot write to %s, inserts are refused until it can be: %s", storage.directory, error)
            for changes in (*slices, delta):
                self._collector.not_written(changes)
            # The keys of new items whose payloads are unwritten. The buffer removes those that were never drawn and
            # have closed no batch, and returns their keys.
            new_keys = storage.end_commit(error)
            self._remember_as_rolled_back(self._buffer.roll_back(new_keys))
            remedy = "" if isinstance(error, FileGone) else "; make room, and ask again"
            why = f"data_dir {storage.directory} cannot be written: {error}{remedy}"
            raise try_again(why) from error
        if storage.error:  # of the commit before this one
            log.warning("%s can be written again", storage.directory)
        storage.end_commit(None)
        self._collector.written(delta)  # slices have only records of items, which it does not note
        while slices:  # to free the records of a million items at once takes 50 ms
            slices.pop()
            await asyncio.sleep(0)

    def _remember_as_rolled_back(self, keys: Collection[int]) -> None:
        """Notes that the inserts of these keys were rolled back, as the last ones."""
        assert self._buffer.items.keys().isdisjoint(keys), "an insert is rolled back, and its item is there"
        for key in keys:
            self._rolled_back.forget(key)  # so that `remember` puts the key at the end, as the newest
        self._rolled_back.remember(keys)


def _fail(ticket: asyncio.Future[None], error: Exception) -> None:
    """Ends a ticket with an error."""
    ticket.set_exception(error)
    ticket.exception()  # marks the error as seen: asyncio would log the error of a ticket for which nobody waits
