"""Checkpointer: writes a checkpoint while the server goes on.

* It copies all items, some at a time, and yields to the event loop in between.
* A ChangeCollector records meanwhile what changes. These changes are written next, in rounds, until few are left. An
  item whose payload became longer is written again as a whole.
* The last round is collected at one moment. The checkpoint describes the server at that moment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from replay_server.errors import Refused, storage_failed
from replay_server.storage.checkpoints import (
    PARTIAL,
    CheckpointDirectory,
    CheckpointWriter,
    Listed,
    Summary,
    own_name,
)
from replay_server.storage.data_dir import sync_directory
from replay_server.storage.records import Delta, ItemRecords
from replay_server.storage.state import ChangeCollector
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.items import Item, Reader, read_slices

T = TypeVar("T")
log = logging.getLogger("replay_server")

ITEMS_PER_YIELD = 2048
"""Items copied before yielding to the event loop; read_slices bounds their bytes."""
_KEYS_PER_YIELD = 1 << 14
_LAST_ITEMS = 512
"""Changes that are few enough for the last round."""
_MOST_ROUNDS = 20
_APART = 0.002
"""Seconds between two checkpoints at least: their names have milliseconds."""


class Checkpointer:
    """Writes checkpoints of a buffer, one at a time."""

    def __init__(self, buffer: ReplayBuffer, directory: CheckpointDirectory, keep: int) -> None:
        """`keep`: how many of the checkpoints that the server named are kept."""
        self._buffer = buffer
        self.directory = directory
        self._keep = keep
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[Summary] | None = None
        self._thread = ThreadPoolExecutor(1, "replay-checkpoint")
        self._syncs = ThreadPoolExecutor(1, "replay-checkpoint-sync")
        self._verifying = ThreadPoolExecutor(1, "replay-verify")

    async def run(self, every: float) -> None:
        """Writes one every so many seconds, until it is cancelled."""
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
            self._syncs.shutdown()
            self._verifying.shutdown(cancel_futures=True)

    async def listed(self, verify: bool = False) -> list[Listed]:
        """All checkpoints, the newest first. `verify` reads every byte of them, one file at a time for all clients."""
        listed = await asyncio.to_thread(self.directory.list)
        if not verify:
            return listed
        loop = asyncio.get_running_loop()
        found = [await loop.run_in_executor(self._verifying, self.directory.verify, entry.name) for entry in listed]
        return [entry for entry in found if entry is not None]

    async def write(self, name: str = "") -> Summary:
        """Writes a checkpoint, named by the time if it has no `name`; one of the same name is replaced.

        A checkpoint that has begun is finished even if its client goes away. A client that leaves earlier gets none.
        Raises Refused for a bad name, and where the disk does not take it; then nothing has changed on it.
        """
        if name:
            self.directory.file(name)
        await self._turn.acquire()
        self._task = asyncio.create_task(self._make(name))
        self._task.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(self._task)

    async def _make(self, name: str) -> Summary:
        began = time.monotonic()
        try:
            created = await asyncio.to_thread(self._time)
            name = name or own_name(created)
            path = self.directory.file(name)
            partial = path.with_name(path.name + PARTIAL)
            self.directory.path.mkdir(parents=True, exist_ok=True)
            partial.unlink(missing_ok=True)
            writer = CheckpointWriter(partial, name, created, self._syncs)
            try:
                summary = await self._write(writer, name, created)
                await asyncio.to_thread(_put_in_place, partial, path)
            except BaseException:
                await asyncio.to_thread(writer.abandon)
                partial.unlink(missing_ok=True)
                raise
            await asyncio.to_thread(self.directory.prune, self._keep)
        except OSError as error:
            raise storage_failed(f"checkpoint {name} could not be written: {error}") from error
        log.info(
            "checkpoint %s: %d items with %d bytes in %.2f s",
            path,
            summary.items,
            summary.bytes,
            time.monotonic() - began,
        )
        return summary

    def _time(self) -> float:
        """Now, but after all checkpoints that there are: where the clock was set back the newest would be the first to
        be removed, and `latest` another one."""
        latest = max((entry.created for entry in self.directory.list() if entry.summary is not None), default=0.0)
        return max(time.time(), latest + _APART)

    async def _write(self, writer: CheckpointWriter, name: str, created: float) -> Summary:
        buffer = self._buffer
        collector = ChangeCollector(buffer)
        buffer.watchers.append(collector)
        copy = _Copy(self._thread, writer, buffer)
        try:
            known, keys, items = list(buffer.known_keys), list(buffer.items), list(buffer.items.values())
            for start in range(0, len(known), _KEYS_PER_YIELD):
                entry = collector.remembered_ids(buffer.known_keys.kind, known[start : start + _KEYS_PER_YIELD])
                await copy.in_thread(writer.piece, entry.record())
            for portion in _batches_of(keys, items):
                await copy.write_items(collector.item_records(*portion))
            rounds = 0
            while True:
                rounds += 1
                if collector.pending():
                    await copy.index()
                for delta in collector.slices():
                    await copy.write(delta)
                last = collector.pending() <= _LAST_ITEMS or rounds > _MOST_ROUNDS
                delta, version = collector.collect(), buffer.policy.version
                whole = await copy.write(delta)
                collector.written(delta)
                if last and whole:
                    break
        finally:
            buffer.watchers.remove(collector)
        summary = Summary(name, created, copy.items, copy.bytes, version)
        await copy.in_thread(writer.close, summary)
        return summary


def _batches_of(keys: Sequence[int], items: Sequence[Item]) -> Iterator[tuple[npt.NDArray[np.uint64], Sequence[Item]]]:
    """Short lists of `keys` and their `items`, without those that have gone meanwhile: nothing holds these."""
    for start in range(0, len(items), ITEMS_PER_YIELD):
        some = items[start : start + ITEMS_PER_YIELD]
        for part in read_slices([item.nbytes for item in some]):
            there, names = some[part], np.array(keys[start : start + ITEMS_PER_YIELD][part], dtype=np.uint64)
            if not all(held := [item.holders > 0 for item in there]):
                there, names = [item for item in there if item.holders], names[held]
            yield names, there


class _Copy:
    """The checkpoint that is being written."""

    def __init__(self, thread: ThreadPoolExecutor, writer: CheckpointWriter, buffer: ReplayBuffer) -> None:
        self._thread = thread
        self._writer = writer
        self._buffer = buffer
        self._sizes: dict[int, int] = {}
        """Bytes of the payload of each item."""
        self._first: list[tuple[list[int], list[int]]] = []
        """Keys and sizes that are not in `_sizes` yet. While nothing changes, nobody asks for them."""
        self.items = self.bytes = 0

    async def in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def write_items(self, records: ItemRecords) -> None:
        """Writes items that were not written before, as of the moment of the call. Damaged ones are removed."""
        keys: list[int] = records.items["key"].tolist()
        sizes: list[int] = records.items["nbytes"].tolist()
        self._first.append((keys, sizes))
        await self._write(keys, sizes, lambda: self._writer.item_columns(records))

    async def index(self) -> None:
        """To be called before `write`, where items have changed."""
        while self._first:
            keys, sizes = self._first.pop()
            self._sizes.update(zip(keys, sizes, strict=True))
            await asyncio.sleep(0)

    async def write(self, delta: Delta) -> bool:
        """Writes what changed, as of the moment of the call. False: a payload was damaged, and its item is removed."""
        for key in delta.removed:
            self.bytes -= self._sizes.pop(key, 0)
        # New, or longer than before: of a key that comes again the last payload counts.
        changed = zip(delta.items.items["key"].tolist(), delta.items.items["nbytes"].tolist(), strict=True)
        written = [(key, nbytes) for key, nbytes in changed if self._sizes.get(key) != nbytes]
        keys, sizes = [key for key, _ in written], [nbytes for _, nbytes in written]
        self.bytes -= sum(self._sizes.get(key, 0) for key in keys)
        self._sizes.update(written)
        return await self._write(keys, sizes, lambda: self._write_records(delta))

    async def _write(self, keys: list[int], sizes: list[int], write_records: Callable[[], None]) -> bool:
        """Writes payloads as of the moment of the call, and then their records. False: as `write`."""
        self.items = sum(len(first) for first, _ in self._first) + len(self._sizes)
        self.bytes += sum(sizes)
        reader = self._buffer.storage.reader(keys, sizes)
        try:
            damaged = [
                key
                for part in read_slices(sizes)
                for key in await self.in_thread(self._copy, keys[part], sizes[part], reader, part)
            ]
        finally:
            reader.close()
        await self.in_thread(write_records)
        if damaged:
            self._buffer.discard(damaged)
        return not damaged

    def _copy(self, keys: list[int], sizes: list[int], reader: Reader, part: slice) -> list[int]:
        """Writes some payloads. Returns the keys of those that are damaged."""
        found = list(zip(keys, sizes, reader.read(part), strict=True))
        self._writer.payloads([(key, size, payload) for key, size, payload in found if payload is not None])
        return [key for key, _, payload in found if payload is None]

    def _write_records(self, delta: Delta) -> None:
        self._writer.item_columns(delta.items)
        self._writer.removed(delta.removed)
        for piece in delta.state_records:
            self._writer.piece(piece)


def _put_in_place(partial: Path, path: Path) -> None:
    """Renames a file and syncs the name to the disk."""
    partial.rename(path)
    sync_directory(path.parent)
