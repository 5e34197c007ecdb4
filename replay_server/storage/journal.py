"""Journal: group commit. One transaction writes the changes of all clients since the last one.

    record changes ──▶ collect, as of now ──▶ commit (in a thread) ──▶ wake all requests that wait
          ▲                                           │
          └───────── the server goes on ──────────────┘

A request that has changed something asks the journal for a ticket: the future of the next commit. The commit before
it may still be under way on the journal's thread. When that one has ended, the journal collects all changes since
then, as of one moment of the event loop, and writes them in one transaction. Clients go on meanwhile, and their
changes belong to the transaction after it. So a sync of the disk costs a thousand clients as much as one, and a busy
server commits more at once instead of more often. A transaction always leads from one state of the server to a later
one, never to half of a request: that is why a killed server finds counters, items and scopes that fit each other.

Where very many items have changed, for example all priorities, their records are collected in slices, and other
requests run in between. What these requests change is collected again, at the end. So the transaction as a whole still
is the state of one moment, that of the last slice.

* No client is told of a change before the change is written.
* When a commit fails, the journal rolls back its inserts that were never drawn, and refuses them. It writes everything
  else again with the next commit. Requests that wait for it fail with the reason; repeated, they wait for that commit.
* A response can be waiting on a later commit than the one that failed with its insert. The journal therefore remembers
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
"""Seconds after which changes are written that no request waits for."""
_RETRY = 0.2
"""Seconds between two attempts of a commit."""

Fsync = Literal["always", "never"]
"""Whether a commit ends when it is on the disk, or when the operating system has it."""


class Journal:
    def __init__(self, buffer: ReplayBuffer, storage: LmdbStorage, collector: ChangeCollector) -> None:
        self._buffer = buffer
        self._storage = storage
        self._collector = collector
        self._thread = ThreadPoolExecutor(1, "replay-journal")
        self._wanted = asyncio.Event()
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rolled_back: Remembered[None] = Remembered("rolled back", MAX_KNOWN_KEYS)
        """Keys of the last inserts that could not be written."""
        self._stopping = False
        self._task = asyncio.create_task(self._run())

    @classmethod
    def start(cls, buffer: ReplayBuffer, storage: LmdbStorage) -> Journal:
        """Fills the buffer from its storage, and keeps that up to date from then on. Raises UnusableDirectory."""
        began = time.monotonic()
        state = storage.load()
        # Without this a killed restore would be followed by an empty server.
        if storage.was_written and not state.state_records:
            raise DamagedDirectory(storage.directory, "a checkpoint was not restored into it to the end")
        try:
            collector = ChangeCollector(buffer, state)
            buffer.watchers.append(collector)
            restore(buffer, state)
        except ValueError as error:
            raise DamagedDirectory(storage.directory, str(error)) from error
        seconds, of = time.monotonic() - began, storage.directory
        items = counted(len(buffer.items), "item")
        log.info("%s: %s with %d bytes, loaded in %.2f s", of, items, buffer.items.bytes, seconds)
        if state.skipped or state.damaged:
            lost = f"{counted(len(state.skipped), 'item')} and {counted(len(state.damaged), 'other record')}"
            log.error("%s: left out as damaged: %s; the first items are %s", of, lost, state.skipped[:10])
        return cls(buffer, storage, collector)

    @property
    def backlog(self) -> int:
        """Payload bytes that wait to be written."""
        return self._storage.unwritten

    def ticket(self) -> asyncio.Future[None]:
        """Done when all changes until now are written or rolled back.

        Fails with Refused if the commit fails. What is not rolled back is then written with a later one, if any.
        """
        self._wanted.set()
        assert not self._next.done() or self._storage.error, "a change would wait for a commit that has ended"
        return self._next

    async def durable(self) -> None:
        """Returns when all changes until now are written. Raises Refused as a ticket fails."""
        await asyncio.shield(self.ticket())

    async def copy_to(self, path: Path) -> None:
        """Makes a file with all changes until now, and perhaps later ones. Raises Refused as a ticket fails."""
        await self.durable()
        await asyncio.to_thread(self._storage.copy_to, path)

    def rolled_back(self, keys: Collection[int]) -> set[int]:
        """The keys among `keys` whose insert was rolled back, and not repeated with success since."""
        if not len(self._rolled_back):
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
        loop = asyncio.get_running_loop()
        while not self._stopping and not self._next.done():
            tick = loop.call_later(_TICK, self._wanted.set)
            await self._wanted.wait()
            tick.cancel()
            self._wanted.clear()
            await self._commit_and_wake()
        if not self._next.done():
            await self._commit_and_wake()

    async def _commit_and_wake(self) -> None:
        """Commits once, and wakes the requests that wait for it."""
        done, self._next = self._next, asyncio.get_running_loop().create_future()
        try:
            await self._commit()
            done.set_result(None)
        except Refused as refusal:  # the next commit writes it all again
            _fail(done, refusal)
            await asyncio.sleep(_RETRY)
        except Exception as error:
            log.exception("what has changed cannot be written any more: restart the server")
            self._storage.error = f"writing failed ({error!r}); restart the server"
            for ticket in (done, self._next):
                _fail(ticket, broken(self._storage.error))

    async def _commit(self) -> None:
        """Writes all changes. Raises Refused if the disk fails; inserts that can be rolled back are then."""
        loop, storage = asyncio.get_running_loop(), self._storage
        slices = []
        for some in self._collector.slices():
            slices.append(some)
            await asyncio.sleep(0)
        delta = self._collector.collect()
        if not delta and not slices and not storage.changed:
            return
        payloads = storage.begin_commit()
        try:
            await loop.run_in_executor(self._thread, storage.commit, delta, payloads, slices)
        except lmdb.Error as error:
            if not storage.error:
                log.error("cannot write to %s, inserts are refused until it can be: %s", storage.directory, error)
            for some in (*slices, delta):
                self._collector.not_written(some)
            gone = self._buffer.roll_back(storage.end_commit(error))
            assert gone.isdisjoint(self._buffer.items.keys()), "an insert is rolled back, and its item is there"
            for key in gone:
                self._rolled_back.forget(key)  # to the end
            self._rolled_back.remember(gone)
            remedy = "" if isinstance(error, FileGone) else "; make room, and ask again"
            why = f"data_dir {storage.directory} cannot be written: {error}{remedy}"
            raise try_again(why) from error
        if storage.error:
            log.warning("%s can be written again", storage.directory)
        storage.end_commit(None)
        self._collector.written(delta)
        while slices:  # to free the records of a million items at once takes 50 ms
            slices.pop()
            await asyncio.sleep(0)


def _fail(ticket: asyncio.Future[None], error: Exception) -> None:
    ticket.set_exception(error)
    ticket.exception()  # or asyncio would complain where nobody waits
