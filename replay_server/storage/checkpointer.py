"""Checkpointer: writes checkpoints while the server goes on. `restore_into_memory` reads a checkpoint.

* A durable server copies the file of its data directory, as of one commit.
* A server in memory writes a new file of the same kind. In the first round a ChangeCollector collects all items, some
  at a time, and other requests run in between. Each further round writes the changes made during the round before,
  until few changes are left. The last round is collected at one moment. The checkpoint describes the server at that
  moment.
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
"""Known keys of inserts that are written before other requests run."""
_LAST_ITEMS = 512
"""If at most so many items have changed, they are collected at one moment, and the round is the last."""
_MOST_ROUNDS = 20
"""The round after these is the last, however many items have changed: clients may change items without end."""
_SYNC = 32 << 20
"""Payload bytes that are written between two syncs. Without syncs the system would keep a GB and more in memory, and
write all of it at the end."""
_APART = 0.002
"""Seconds between the times of two checkpoints, at least. Their names, which have milliseconds, then differ."""


class Checkpointer:
    """Writes checkpoints of a buffer, one at a time."""

    def __init__(
        self,
        buffer: ReplayBuffer,
        directory: CheckpointDirectory,
        keep: int,
        copy: Callable[[Path], Awaitable[None]] | None = None,
    ) -> None:
        """`keep` is the number of checkpoints to keep, among those whose names the server chose.

        `copy` makes a file with everything that a durable server holds; None: the server is in memory.
        """
        self._buffer = buffer
        self.directory = directory
        self._keep = keep
        self._copy = copy
        self._unsynced = 0
        """Payload bytes of all items in the deltas that were written since the last sync."""
        self._turn = asyncio.Lock()
        """Held while a checkpoint is being written."""
        self._task: asyncio.Task[Checkpoint] | None = None
        """The task that writes a checkpoint. This reference keeps asyncio from dropping the task."""
        self._thread = ThreadPoolExecutor(1, "replay-checkpoint")
        self._verifying = asyncio.Lock()
        """Held while files are verified."""

    async def run(self, every: float) -> None:
        """Writes a checkpoint each `every` seconds, until it is cancelled."""
        while True:
            await asyncio.sleep(every)
            try:
                await self.write()
            except Refused as refusal:
                log.error("%s", refusal.message)

    async def close(self) -> None:
        """Waits for the checkpoint that is being written."""
        async with self._turn:
            self._thread.shutdown()

    async def listed(self, verify: bool = False) -> list[Checkpoint]:
        """All checkpoints, the newest first. With `verify` every byte is read.

        If several clients ask for that, still only one file is read at a time.
        """
        listed = await asyncio.to_thread(self.directory.list)
        if not verify:
            return listed
        async with self._verifying:
            verified = [await asyncio.to_thread(self.directory.verify, entry.name) for entry in listed]
        return [entry for entry in verified if entry is not None]

    async def write(self, name: str = "") -> Checkpoint:
        """Writes a checkpoint, in the place of any checkpoint of this name. Without a `name` the time is the name.

        A checkpoint that has begun is finished even if its client goes away. If the client goes away while another
        checkpoint is being written, this one never begins. Raises Refused for a bad name, or if the disk cannot hold
        the checkpoint. Then nothing has changed on the disk.
        """
        if name:
            self.directory.file(name)  # raises Refused for a bad name
        await self._turn.acquire()
        # A task of its own, shielded below, so that a cancelled call does not end the checkpoint.
        self._task = asyncio.create_task(self._make(name))
        self._task.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(self._task)

    async def _make(self, name: str) -> Checkpoint:
        """Writes a checkpoint in a folder beside its path, seals the file, and moves it to its path. Raises Refused."""
        began = time.monotonic()
        try:
            created = await asyncio.to_thread(self._time)
            name = name or own_name(created)
            path = self.directory.file(name)
            folder = path.with_name(path.name + PARTIAL)
            # A server that was killed may have left a part of a checkpoint there.
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir(parents=True)
            try:
                partial = folder / "data.mdb"
                if self._copy is None:
                    await self._copy_memory(folder)  # makes `partial` in the folder
                else:
                    await self._copy(partial)
                checkpoint = await self._in_thread(seal, partial, path, created)
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            await asyncio.to_thread(self.directory.prune, self._keep)
        except (OSError, lmdb.Error, UnusableDirectory) as error:
            why = f"checkpoint {name} could not be written: {error}; make room if its disk is full"
            raise storage_failed(why) from error
        seconds = time.monotonic() - began
        items = counted(checkpoint.items, "item")
        log.info("checkpoint %s: %s with %d bytes in %.2f s", path, items, checkpoint.bytes, seconds)
        return checkpoint

    def _time(self) -> float:
        """The time of a new checkpoint: now, or a moment after the newest checkpoint if that is later.

        If the wall clock was set back, a checkpoint with the time of now would count as old. It would be removed first,
        and would not be `latest`.
        """
        latest = max((entry.created for entry in self.directory.list() if not entry.problem), default=0.0)
        return max(time.time(), latest + _APART)

    async def _copy_memory(self, folder: Path) -> None:
        """Writes a data directory in `folder`, with the state of the buffer at the moment of the last `collect`.

        Of the remembered ids, all known keys are written. Acknowledged and requeued batches and answers to requests are
        written only if they are remembered during this call.
        """
        buffer = self._buffer
        copy = await self._in_thread(LmdbStorage, folder)
        collector = ChangeCollector(buffer)
        buffer.watchers.append(collector)
        try:
            # The collector notes only changes from now on. So the known keys are written here, and all items are
            # declared as changed.
            known = list(buffer.known_keys)
            for start in range(0, len(known), _KEYS_PER_YIELD):
                some_keys = known[start : start + _KEYS_PER_YIELD]
                # Leaves out keys that were forgotten while the keys before them were written.
                entry = collector.remembered_ids(buffer.known_keys.kind, some_keys)
                if entry.ids:  # a server cannot start from a record without ids
                    await self._commit(copy, Delta(remembered=[entry]))
            keys = np.fromiter(buffer.items, np.uint64, len(buffer.items))
            await self._in_thread(keys.sort)  # LMDB fills its pages if keys come in ascending order
            collector.changed(keys)
            for rounds in count(1):
                # Slices are written one by one while clients change items. `collect` has what has changed meanwhile.
                for delta in collector.slices():
                    await self._commit(copy, delta)
                # `collect` takes all pending items at one moment, so the last round should have few of them.
                is_last = collector.pending() <= _LAST_ITEMS or rounds > _MOST_ROUNDS
                delta = collector.collect()
                await self._commit(copy, delta)
                collector.written(delta)
                if is_last:
                    break
        finally:
            buffer.watchers.remove(collector)
            await self._in_thread(copy.close)

    async def _commit(self, copy: LmdbStorage, delta: Delta) -> None:
        """Writes a delta that was collected just now, with the payloads that the copy lacks or that have grown."""
        keys: list[int] = delta.items.items["key"].tolist()
        sizes: list[int] = delta.items.items["nbytes"].tolist()
        payloads = self._buffer.storage.get(keys, sizes)
        await self._in_thread(_write, copy, delta, keys, sizes, payloads)
        self._unsynced += sum(sizes)
        if self._unsynced >= _SYNC:
            self._unsynced = 0
            await self._in_thread(copy.sync)

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def _write(
    copy: LmdbStorage, delta: Delta, keys: Sequence[int], sizes: Sequence[int], payloads: Sequence[Payload]
) -> None:
    """Writes a delta, and those payloads that the copy does not have in this size yet. Runs on a thread."""
    copy.delete(delta.removed)  # also keys that the copy never had, which has no effect
    written_sizes = copy.sizes(keys)
    missing: Sequence[int] = range(len(keys))
    if written_sizes:
        missing = [index for index, key in enumerate(keys) if written_sizes.get(key) != sizes[index]]
    copy.put([keys[index] for index in missing], [payloads[index] for index in missing])
    copy.commit(delta, copy.begin_commit())  # if this raises lmdb.Error, the whole checkpoint is given up
    copy.end_commit(None)


def restore_into_memory(buffer: ReplayBuffer, checkpoint: Checkpoint) -> None:
    """Fills a new buffer, whose storage holds payloads in memory, from a checkpoint."""
    file = LmdbFile(checkpoint.path, subdir=False, readonly=True, lock=False)
    state = file.load()
    keys = state.items.items["key"].tolist()
    sizes = state.items.items["nbytes"].tolist()
    damaged: list[int] = []
    for rows in read_slices(sizes):
        payloads = file.read(keys[rows], sizes[rows])
        damaged += [key for key, payload in zip(keys[rows], payloads, strict=True) if payload is None]
        # `restore` needs a payload for each item. Damaged items are discarded after that.
        buffer.storage.put(keys[rows], [payload or () for payload in payloads])
    file.close()
    restore(buffer, state)
    buffer.discard([key for key in damaged if key in buffer.items])  # `restore` may have dropped some of them
    log.info("restored %s from checkpoint %s", counted(len(buffer.items), "item"), checkpoint.path)
