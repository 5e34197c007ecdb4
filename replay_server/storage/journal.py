"""Journal: group commit. One transaction writes the changes of all clients since the transaction before it.

    clients change ──▶ the journal collects ──▶ a thread writes them ──▶ the requests that wait
    the buffer         all changes, as of       in one transaction       for this commit respond
         ▲             one moment                     │
         └──── clients make changes for the next ─────┘
               transaction while the thread writes

A request that has changed something asks the journal for a ticket, which is the future of the next commit. The previous
commit may still run on the journal's thread. When the previous commit has ended, the journal collects all changes that
are not written yet, as of one moment of the event loop, and writes them in one transaction. Changes that clients make
while this transaction is written belong to the transaction after it. So one sync of the disk can serve a thousand
clients, and a busy server writes more with each commit instead of committing more often. A transaction always leads
from one state of the server to a later state, and never to half of a request. Counters, items and scopes therefore
agree when a killed server starts again.

If very many items have changed, for example all priorities, their records are collected in slices, and other requests
run between two slices. The last collection adds the changes that these requests have made. So the transaction as a
whole has the state of one moment, which is the moment of the last collection.

* No client is told of a change before the change is written.
* When a commit fails, the journal rolls back the inserts of this commit that were never drawn and closed no batch. It
  keeps all other changes, and writes them with the next commit. The requests that wait for the failed commit fail with
  the reason. If a client repeats such a request, the request waits for the next commit.
* The response to an insert may wait for a later commit than the one that failed to write the insert. So the journal
  remembers the keys of inserts that it has rolled back, and each insert asks `rolled_back` before it responds.
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
"""Seconds. The journal writes changes at least this often, because for some changes no request waits."""
_RETRY = 0.2
"""Seconds from a failed commit to the next attempt."""

Fsync = Literal["always", "never"]
"""With "always", a commit ends when its data is on the disk. With "never", it ends when the operating system has the
data."""


class Journal:
    """Writes the changes of a buffer to its storage, in group commits, and tells requests when that is done."""

    def __init__(self, buffer: ReplayBuffer, storage: LmdbStorage, collector: ChangeCollector) -> None:
        """Begins to commit. Only `start` calls this, after it has made `collector` a watcher of the buffer."""
        self._buffer = buffer
        self._storage = storage
        self._collector = collector
        self._thread = ThreadPoolExecutor(1, "replay-journal")
        self._wanted = asyncio.Event()
        """Set to begin a commit."""
        self._next_ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The ticket of the next commit. If the journal cannot write any more, this ticket has failed already."""
        self._rolled_back: Remembered[None] = Remembered("rolled back", MAX_KNOWN_KEYS)
        """The keys of the inserts that were rolled back, the newest last."""
        self._stopping = False
        self._task = asyncio.create_task(self._run())

    @classmethod
    def start(cls, buffer: ReplayBuffer, storage: LmdbStorage) -> Journal:
        """Fills the buffer from its storage, and from then on writes each change of the buffer to the storage.

        Raises DamagedDirectory if the state is damaged, and UnusableDirectory if no replay server wrote the file.
        """
        began = time.monotonic()
        state = storage.load()
        # If a server was killed during the restore of a checkpoint, the next one would start empty without this check.
        if storage.was_written and not state.state_records:
            raise DamagedDirectory(storage.directory, "a checkpoint was not restored into it to the end")
        try:
            collector = ChangeCollector(buffer, state)
            # The collector watches before the restore, because `restore` may drop items. The collector must note this,
            # so that the first commit deletes their records.
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
        """The payload bytes that no commit has written yet."""
        return self._storage.unwritten

    def ticket(self) -> asyncio.Future[None]:
        """Returns a future that is done when all changes until now are written. Makes the journal commit.

        The future fails with Refused if the commit fails. The changes that are not rolled back are then written with a
        later commit, if there is one.
        """
        self._wanted.set()
        assert not self._next_ticket.done() or self._storage.error, "a change would wait for a commit that has ended"
        return self._next_ticket

    async def durable(self) -> None:
        """Returns when all changes until now are written. Raises Refused if the commit fails."""
        await asyncio.shield(self.ticket())  # other requests wait for the same ticket, so it must not be cancelled

    async def copy_to(self, path: Path) -> None:
        """Commits all changes until now, and then writes the committed state to a new file at `path`.

        Raises Refused if the commit fails. The file may also have changes that were made after the call.
        """
        await self.durable()
        await asyncio.to_thread(self._storage.copy_to, path)

    def rolled_back(self, keys: Collection[int]) -> set[int]:
        """Returns the keys among `keys` whose insert was rolled back, unless a repeated insert has succeeded since."""
        if not len(self._rolled_back):  # the usual case, without a loop over the keys
            return set()
        return {key for key in keys if key in self._rolled_back and key not in self._buffer.known_keys}

    async def close(self) -> None:
        """Writes the last changes, and ends the journal's task and thread."""
        self._stopping = True
        self._wanted.set()
        await self._task
        await asyncio.to_thread(self._storage.sync)
        self._thread.shutdown()

    async def _run(self) -> None:
        """Commits when a request waits, and at least every _TICK seconds. Ends at the stop, after one more commit.

        Also ends if the journal cannot write any more. Then `_commit_and_wake` has failed the next ticket in advance.
        """
        loop = asyncio.get_running_loop()
        while not self._stopping and not self._next_ticket.done():
            tick = loop.call_later(_TICK, self._wanted.set)
            await self._wanted.wait()
            tick.cancel()
            self._wanted.clear()
            await self._commit_and_wake()
        if not self._next_ticket.done():  # the last changes before the stop
            await self._commit_and_wake()

    async def _commit_and_wake(self) -> None:
        """Commits once, and wakes the requests that wait for this commit."""
        ticket = self._next_ticket
        # A change that is made from now on may miss this commit, so its request waits for the next commit.
        self._next_ticket = asyncio.get_running_loop().create_future()
        try:
            await self._commit()
            ticket.set_result(None)
        except Refused as refusal:  # the next commit writes the changes that were not rolled back
            _fail(ticket, refusal)
            await asyncio.sleep(_RETRY)
        except Exception as error:
            # This is a bug. The changes of this commit may be lost, so the journal never writes again: it fails the
            # next ticket in advance, which ends `_run`.
            log.exception("what has changed cannot be written any more: restart the server")
            self._storage.error = f"writing failed ({error!r}); restart the server"
            _fail(ticket, broken(self._storage.error))
            _fail(self._next_ticket, broken(self._storage.error))

    async def _commit(self) -> None:
        """Writes all changes. If the disk fails, rolls back the inserts that can be undone, and raises Refused."""
        loop = asyncio.get_running_loop()
        storage = self._storage
        slices = []
        for one_slice in self._collector.slices():
            slices.append(one_slice)
            await asyncio.sleep(0)  # lets other requests run; their changes come in a later slice or in `delta`
        # From here to the start of the thread there is no await, so `delta` and `payloads` are of the same moment.
        delta = self._collector.collect()
        if not delta and not slices and not storage.changed:
            return
        payloads = storage.begin_commit()
        try:
            await loop.run_in_executor(self._thread, storage.commit, delta, payloads, slices)
        except lmdb.Error as error:
            if not storage.error:  # logged only once if several commits fail one after the other
                log.error("cannot write to %s, inserts are refused until it can be: %s", storage.directory, error)
            for changes in (*slices, delta):
                self._collector.not_written(changes)
            unwritten_keys = storage.end_commit(error)  # the keys of the new items of this commit
            # The buffer removes those of these items that were never drawn and have closed no batch.
            rolled_back_keys = self._buffer.roll_back(unwritten_keys)
            self._remember_as_rolled_back(rolled_back_keys)
            remedy = "" if isinstance(error, FileGone) else "; make room, and ask again"
            why = f"data_dir {storage.directory} cannot be written: {error}{remedy}"
            raise try_again(why) from error
        if storage.error:  # the previous commit failed
            log.warning("%s can be written again", storage.directory)
        storage.end_commit(None)
        # `written` need not be called for the slices: they have only records of items, of which it takes no note.
        self._collector.written(delta)
        # Frees the slices one by one, because it takes 50 ms to free the records of a million items at once.
        while slices:
            slices.pop()
            await asyncio.sleep(0)

    def _remember_as_rolled_back(self, keys: Collection[int]) -> None:
        """Notes that the inserts of these keys were rolled back. These keys become the newest in `_rolled_back`."""
        assert self._buffer.items.keys().isdisjoint(keys), "an insert is rolled back, and its item is there"
        for key in keys:
            self._rolled_back.forget(key)  # so that `remember` puts the key at the end, as the newest
        self._rolled_back.remember(keys)


def _fail(ticket: asyncio.Future[None], error: Exception) -> None:
    """Ends a ticket with an error."""
    ticket.set_exception(error)
    ticket.exception()  # marks the error as seen, because asyncio logs an error that nobody has seen
