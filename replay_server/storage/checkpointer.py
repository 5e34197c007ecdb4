"""Checkpointer: writes checkpoints while the server goes on. `restore_into_memory` reads a checkpoint.

* A server with data_dir copies the file of that directory, as of one commit.
* A server without data_dir keeps its items in memory, and writes a new file of the same kind. In the first round, a
  ChangeCollector collects all items, some at a time, and other requests run in between. Each further round writes what
  has changed during the round before, until few items have changed. The last round collects all changes at one moment,
  and the checkpoint describes the server as of this moment.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TypeVar

import lmdb
import numpy as np

from replay_protos.words import counted
from replay_server.errors import Refused, storage_failed
from replay_server.storage.checkpoints import PARTIAL, Checkpoint, CheckpointDirectory, own_name, seal
from replay_server.storage.data_dir import UnusableDirectory
from replay_server.storage.lmdb import LmdbFile, LmdbStorage
from replay_server.storage.memory import read_slices
from replay_server.storage.records import Delta
from replay_server.storage.state import ChangeCollector, restore
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.table import Payload

T = TypeVar("T")
log = logging.getLogger("replay_server")

_KEYS_PER_YIELD = 1 << 14
"""The number of known keys of inserts that are written before other requests run."""
_ITEMS_IN_LAST_ROUND = 512
"""If at most this many changed items are left, they are collected at one moment, and the round is the last."""
_MOST_ROUNDS = 20
"""After this many rounds, the next round is the last, however many items have changed. Otherwise a checkpoint might
never end, because clients may go on changing items."""
_BYTES_PER_SYNC = 32 << 20
"""Payload bytes that are written between two syncs. Without syncs, the operating system would keep a GB and more in
memory, and write all of it at the end."""
_SECONDS_APART = 0.002
"""The least number of seconds between the times of two checkpoints. So their names, which contain the time in
milliseconds, differ."""


class Checkpointer:
    """Writes checkpoints of a buffer, one at a time."""

    def __init__(
        self,
        buffer: ReplayBuffer,
        directory: CheckpointDirectory,
        keep: int,
        copy: Callable[[Path], Awaitable[None]] | None = None,
    ) -> None:
        """`keep`: how many checkpoints to keep. Those whose names clients chose do not count, and are never removed.

        `copy` writes a copy of the data file of a server with data_dir to a path; None: the server has no data_dir.
        """
        self._buffer = buffer
        self.directory = directory
        self._keep = keep
        self._copy = copy
        self._unsynced = 0
        """The payload bytes of all items in the deltas that were written since the last sync."""
        self._turn = asyncio.Lock()
        """Held while a checkpoint is being written."""
        self._task: asyncio.Task[Checkpoint] | None = None
        """The task that writes a checkpoint. Without this reference, the garbage collector could delete the task."""
        self._thread = ThreadPoolExecutor(1, "replay-checkpoint")
        self._verifying = asyncio.Lock()
        """Held while checkpoints are verified."""

    async def run(self, every: float) -> None:
        """Writes a checkpoint every `every` seconds, until the task is cancelled."""
        while True:
            await asyncio.sleep(every)
            try:
                await self.write()
            except Refused as refusal:
                log.error("%s", refusal.message)

    async def close(self) -> None:
        """Waits until the checkpoint that is being written is finished, and then ends the thread."""
        async with self._turn:
            self._thread.shutdown()

    async def listed(self, verify: bool = False) -> list[Checkpoint]:
        """Lists all checkpoints, the newest first. With `verify`, reads every byte of them to find damage.

        Only one checkpoint is verified at a time, even if several clients ask for it.
        """
        listed = await asyncio.to_thread(self.directory.list)
        if not verify:
            return listed
        async with self._verifying:
            verified = [await asyncio.to_thread(self.directory.verify, entry.name) for entry in listed]
        return [entry for entry in verified if entry is not None]

    async def write(self, name: str = "") -> Checkpoint:
        """Writes a checkpoint, in place of any older checkpoint with this name. Without `name`, the time is the name.

        A checkpoint that has begun is finished even if its client goes away. If the client goes away while another
        checkpoint is being written, its own checkpoint never begins. Raises Refused if the name is bad, or if the disk
        cannot hold the checkpoint. Then nothing has changed on the disk.
        """
        if name:
            self.directory.file(name)  # raises Refused for a bad name
        await self._turn.acquire()
        # The checkpoint is written by a task of its own. If this call is cancelled, `shield` keeps the task running.
        self._task = asyncio.create_task(self._make(name))
        self._task.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(self._task)

    async def _make(self, name: str) -> Checkpoint:
        """Writes a checkpoint into a folder beside its path, and seals the file, which moves it to the path.

        Raises Refused if the checkpoint cannot be written.
        """
        began = time.monotonic()
        try:
            created = await asyncio.to_thread(self._new_time)
            name = name or own_name(created)
            path = self.directory.file(name)
            folder = path.with_name(path.name + PARTIAL)
            # The folder exists already if a server was killed while it wrote this checkpoint.
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir(parents=True)
            try:
                partial = folder / "data.mdb"
                if self._copy is None:
                    await self._copy_memory(folder)  # writes the file `partial`
                else:
                    await self._copy(partial)
                checkpoint = await self._in_thread(seal, partial, path, created)
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            await asyncio.to_thread(self.directory.prune, self._keep)
        except (OSError, lmdb.Error, UnusableDirectory) as error:
            what = f"checkpoint {name}" if name else f"a checkpoint in {self.directory.path}"
            why = f"{what} could not be written: {error}; make room if its disk is full"
            raise storage_failed(why) from error
        seconds = time.monotonic() - began
        items = counted(checkpoint.items, "item")
        log.info("checkpoint %s: %s with %d bytes in %.2f s", path, items, checkpoint.bytes, seconds)
        return checkpoint

    def _new_time(self) -> float:
        """The time for a new checkpoint: the present time, but at least _SECONDS_APART after the newest checkpoint.

        If the wall clock was set back, the present time may be before the times of older checkpoints. With this time,
        the new checkpoint would be the first to be removed, and would not be `latest`.
        """
        times = [entry.created for entry in self.directory.list() if not entry.problem]
        return max(time.time(), max(times, default=0.0) + _SECONDS_APART)

    async def _copy_memory(self, folder: Path) -> None:
        """Writes a data directory in `folder`, with the state of the buffer at the moment of the last `collect`.

        This includes all known keys of inserts. Of the other remembered ids (acknowledged batches, requeued batches and
        answers to requests), it includes only those that the buffer adds during this call.
        """
        buffer = self._buffer
        copy = await self._in_thread(LmdbStorage, folder)
        collector = ChangeCollector(buffer)
        buffer.watchers.append(collector)
        try:
            # The collector notes only changes from now on. So the known keys are written here, and all items are
            # declared as changed.
            known_keys = list(buffer.known_keys)
            for start in range(0, len(known_keys), _KEYS_PER_YIELD):
                some_keys = known_keys[start : start + _KEYS_PER_YIELD]
                # `remembered_ids` leaves out keys that the buffer forgot while the keys before them were written.
                entry = collector.remembered_ids(buffer.known_keys.kind, some_keys)
                if entry.ids:  # a server cannot start from a record without ids
                    await self._commit(copy, Delta(remembered=[entry]))
            keys = np.fromiter(buffer.items, np.uint64, len(buffer.items))
            await self._in_thread(keys.sort)  # LMDB fills its pages only if the keys come in ascending order
            collector.changed(keys)
            for round_number in count(1):
                # Clients change items while the slices are written one by one. `collect` returns these changes.
                for delta in collector.slices():
                    await self._commit(copy, delta)
                # `collect` handles all pending items at one moment, so few of them should be left in the last round.
                is_last = collector.pending() <= _ITEMS_IN_LAST_ROUND or round_number > _MOST_ROUNDS
                delta = collector.collect()
                await self._commit(copy, delta)
                collector.written(delta)
                if is_last:
                    break
        finally:
            buffer.watchers.remove(collector)
            await self._in_thread(copy.close)

    async def _commit(self, copy: LmdbStorage, delta: Delta) -> None:
        """Writes a delta that was collected just now, with those payloads that the copy lacks or that have grown."""
        keys: list[int] = delta.items.items["key"].tolist()
        sizes: list[int] = delta.items.items["nbytes"].tolist()
        payloads = self._buffer.storage.get(keys, sizes)
        await self._in_thread(_write, copy, delta, keys, sizes, payloads)
        self._unsynced += sum(sizes)
        if self._unsynced >= _BYTES_PER_SYNC:
            self._unsynced = 0
            await self._in_thread(copy.sync)

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Runs `work` on the thread of this checkpointer, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def _write(
    copy: LmdbStorage, delta: Delta, keys: Sequence[int], sizes: Sequence[int], payloads: Sequence[Payload]
) -> None:
    """Writes a delta, and those payloads that the copy does not have in this size yet. Runs on a thread."""
    copy.delete(delta.removed)  # has no effect on keys that the copy never had
    written_sizes = copy.sizes(keys)
    missing: Sequence[int] = range(len(keys))
    if written_sizes:
        missing = [index for index, key in enumerate(keys) if written_sizes.get(key) != sizes[index]]
    copy.put([keys[index] for index in missing], [payloads[index] for index in missing])
    new_payloads = copy.begin_commit()
    copy.commit(delta, new_payloads)  # if this raises lmdb.Error, the whole checkpoint is given up
    copy.end_commit(None)  # the commit has ended without an error


def restore_into_memory(buffer: ReplayBuffer, checkpoint: Checkpoint) -> None:
    """Fills a new buffer from a checkpoint. The storage of the buffer holds payloads in memory."""
    file = LmdbFile(checkpoint.path, subdir=False, readonly=True, lock=False)
    state = file.load()
    keys = state.items.items["key"].tolist()
    sizes = state.items.items["nbytes"].tolist()
    damaged_keys: list[int] = []
    for rows in read_slices(sizes):
        payloads = file.read(keys[rows], sizes[rows])  # None for each damaged payload
        damaged_keys += [key for key, payload in zip(keys[rows], payloads, strict=True) if payload is None]
        # `restore` needs a payload for each item, so damaged payloads become empty. Their items are discarded below.
        buffer.storage.put(keys[rows], [payload or () for payload in payloads])
    file.close()
    restore(buffer, state)
    buffer.discard([key for key in damaged_keys if key in buffer.items])  # `restore` may have dropped some of the items
    log.info("restored %s from checkpoint %s", counted(len(buffer.items), "item"), checkpoint.path)
