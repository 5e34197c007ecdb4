"""Starts a server's storage on damaged copies of a data directory, each in a child process of its own.

    python -m tests.server.storage.damage DIRECTORY SECONDS

prints a line of JSON: how many starts succeeded, succeeded without one item, and were refused; and what went wrong.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from lmdb.verify import VerifyError, verify

from replay_server.storage import lmdb
from replay_server.storage.data_dir import DamagedDirectory, UnusableDirectory
from replay_server.storage.lmdb import LmdbStorage
from replay_server.storage.memory import read_payloads
from replay_server.storage.state import ChangeCollector, restore
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.config import TableConfig
from replay_server.tables.items import DamagedPayloads
from tests.kit.tables import replay_buffer, rows_of

TABLES = [TableConfig(name="a", sampler="prioritized"), TableConfig(name="b", max_times_sampled=2)]


KINDS = frozenset({"flip: whole", "flip: without one", "flip: refused", "cut: refused"})
"""What comes of it, each of which it sees at least once, however slow the machine is."""


def payload_of(key: int) -> bytes:
    return random.Random(key).randbytes([0, 10, 500, 5000, 20_000][key % 5])


def open_buffer(directory: Path, fsync: bool = True) -> tuple[ReplayBuffer, LmdbStorage, ChangeCollector]:
    storage = LmdbStorage(directory, fsync=fsync)
    buffer = replay_buffer(TABLES, time.monotonic, storage=storage)
    state = storage.load()
    try:
        collector = ChangeCollector(buffer, state)
        buffer.watchers.append(collector)
        restore(buffer, state)
        buffer.check()
    except ValueError as error:
        raise DamagedDirectory(directory, str(error)) from error
    return buffer, storage, collector


def commit(storage: LmdbStorage, collector: ChangeCollector) -> None:
    delta = collector.collect()
    storage.commit(delta, storage.begin_commit())
    storage.end_commit(None)
    collector.written(delta)


def insert(buffer: ReplayBuffer, keys: list[int]) -> None:
    for key in keys:
        data = payload_of(key)
        tables = {"a": 1.0 + key} | ({"b": 2.0} if key % 2 else {})
        buffer.insert(rows_of([key], tables, version=3, payload=data))


def fill(directory: Path) -> dict[int, object]:
    """Many commits, with deletions, so that the file has free pages and pages of all kinds. Returns the contents."""
    buffer, storage, collector = open_buffer(directory)
    for start in range(0, 240, 8):
        insert(buffer, list(range(start, start + 8)))
        if start >= 80:
            for table in "ab":
                buffer.delete(table, range(start - 80, start - 76))
        commit(storage, collector)
    buffer.update_priorities("a", np.arange(80, 240, dtype=np.uint64), np.arange(160) / 7)
    buffer.set_policy_version(3, "somewhere")
    commit(storage, collector)
    storage.sync()  # as a server does when it stops
    storage.close()
    return contents(buffer)


def contents(buffer: ReplayBuffer) -> dict[int, object]:
    found: dict[int, object] = {}
    for key, item in buffer.items.items():
        rows = [
            (name, *(getattr(table.columns, c)[slot].item() for c in ("priority", "order", "times_sampled", "size")))
            for name, table in buffer.tables.items()
            if (slot := table.columns.slot(key)) is not None
        ]
        found[key] = (item.nbytes, item.policy_version, rows)
    return found


def examine(directory: Path, expected: dict[int, object]) -> str:
    """Serves from a damaged directory for a while. "whole", "without one" or "refused".

    Raises where promises break.
    """
    try:
        seen = verify(str(directory))
    except VerifyError as error:
        seen = [str(error)]
    try:
        buffer, storage, collector = open_buffer(directory)
    except UnusableDirectory:
        return "refused"
    assert not seen, f"py-lmdb's own verifier would not open it: {seen[0]}"
    found = contents(buffer)
    assert buffer.policy.version == 3, "the commit before, and nothing said"
    lost = len(expected) - len(found)
    assert found.items() <= expected.items(), "an item is not as it was"
    assert lost == buffer.damaged <= 1, "items are missing"
    for key in list(found):
        try:
            assert b"".join(next(read_payloads(buffer.storage, [key], [buffer.items[key].nbytes]))) == payload_of(
                key
            ), "a wrong payload"
        except DamagedPayloads:
            buffer.discard([key])
            lost += 1
    assert lost <= 1
    for table in buffer.tables.values():
        assert table.limiter.size == table.size
    go_on(directory, buffer, storage, collector)
    return "without one" if lost else "whole"


def go_on(directory: Path, buffer: ReplayBuffer, storage: LmdbStorage, collector: ChangeCollector) -> None:
    """Works, stops and starts: what it held last is there."""
    for keys in (range(1000, 1100), range(1100, 1200)):
        for table in "ab":
            buffer.delete(table, list(buffer.items))
        commit(storage, collector)
        insert(buffer, list(keys))
        commit(storage, collector)
    storage.close()
    buffer, storage, _ = open_buffer(directory)
    assert buffer.items.keys() == set(range(1100, 1200))
    storage.close()


def in_child(outcome: Callable[[], str]) -> str:
    """The outcome in a process that may die of it."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            signal.alarm(60)
            os.write(write, outcome().encode())
        except BaseException:
            os.write(write, b"broken: " + traceback.format_exc().encode()[-1500:])
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return said if status == 0 else f"broken: died of signal {os.WTERMSIG(status)}"


def main(directory: Path, seconds: float) -> None:
    logging.disable()
    lmdb.CHUNK_BYTES = 8000  # so that large payloads do not make a large file, in which little else would be hit
    whole, copy = directory / "whole", directory / "copy"
    expected = fill(whole)
    data = (whole / "data.mdb").read_bytes()
    rng = random.Random(0)
    outcomes: Counter[str] = Counter()
    broken: list[str] = []
    # Every byte of the pages that hold the roots, then anywhere.
    flips = [("flip", at) for page in (0, 4096) for at in range(page, page + 160)]
    rng.shuffle(flips)
    end = time.monotonic() + seconds
    while time.monotonic() < end or not (broken or outcomes.keys() >= KINDS):
        what, at = flips.pop() if flips and rng.random() < 0.3 else (rng.choice(["flip"] * 9 + ["cut"]), -1)
        if at < 0:  # anywhere, or in the head of a page
            at = rng.choice([rng.randrange(len(data)), 4096 * rng.randrange(len(data) // 4096) + rng.randrange(48)])
        damaged = bytearray(data)
        if what == "cut":
            del damaged[at:]
        else:
            damaged[at] ^= rng.choice([1 << rng.randrange(8), rng.randrange(1, 256)])
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        (copy / "data.mdb").write_bytes(damaged)
        shutil.copy(whole / "server.lock", copy)
        outcome = in_child(partial(examine, copy, expected))
        if outcome in ("whole", "without one", "refused"):
            outcomes[f"{what}: {outcome}"] += 1
        else:
            broken.append(f"{what} at {at} (page {at // 4096} + {at % 4096}): {outcome}")
    print(json.dumps({"outcomes": outcomes, "broken": broken, "file": len(data)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
