"""Cuts the power of a machine at any moment, over and over, and starts the storage on what the disk then has.

    python -m tests.server.storage.power_cut DIRECTORY SECONDS [SEED]

It records the pages that each commit of a run writes, and the syncs between them. Then it makes disks as a crash leaves
them: all writes before the last sync, and of the later ones a prefix, or each page in any version that it had since,
or with sectors of several versions. A root fits into one sector, which a disk writes whole or not at all. Where only
the process dies, the system still has all writes. It prints a line of JSON: how many starts came back to which commit,
and what went wrong.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lmdb import Environment

from replay_server.storage import lmdb, records
from replay_server.storage.data_dir import DamagedDirectory
from replay_server.storage.lmdb import LmdbStorage
from replay_server.storage.memory import read_payloads
from tests.server.storage.damage import commit, go_on, in_child, insert, open_buffer, payload_of

PAGE, SECTOR = 4096, 512
MODES = {"always": True, "never": False}
"""What the configuration calls `fsync`."""
Pages = dict[int, bytes]


@dataclass
class Recording:
    """What a run wrote. A moment is the index of a write."""

    fsync: bool
    start: bytes
    writes: list[Pages] = field(default_factory=list)
    """The pages that each commit, or part of a commit, changed."""
    synced: list[int] = field(default_factory=list)
    """How many writes were on the disk for sure at each moment."""
    commits: list[int] = field(default_factory=list)
    """The number of the last commit at each moment."""
    promised: list[int] = field(default_factory=list)
    """The commit that each moment must not lose."""
    states: dict[int, object] = field(default_factory=dict)
    """All records after each commit, by its number."""


def column_of(key: int, number: int) -> bytes:
    return random.Random(key + number).randbytes([1, 300, 9000][number % 3])


def environment(storage: LmdbStorage) -> Environment:
    """The open file of a storage: LMDB forbids to open a file twice in a process."""
    return storage._env


def dump(storage: LmdbStorage) -> list[list[Any]]:
    """All records of the file, and the names of the chunks."""
    env = environment(storage)
    items, pieces, payloads = (env.open_db(name, create=False) for name in (b"items", b"pieces", b"payloads"))
    with env.begin() as txn:
        chunks = [bytes(name) for name, _ in txn.cursor(payloads)]
        return [list(txn.cursor(items)), list(txn.cursor(pieces)), chunks]


def last_commit(storage: LmdbStorage) -> int:
    """The number of the last commit."""
    return int(environment(storage).info()["last_txnid"])


def record(directory: Path, fsync: bool, commits: int, rng: random.Random) -> Recording:
    buffer, storage, collector = open_buffer(directory, fsync)
    path = directory / "data.mdb"
    before = path.read_bytes()
    recording = Recording(fsync, before)
    on_disk = 0
    promise = number = last_commit(storage)
    recording.states[number] = dump(storage)

    def write(pages: Pages, last: int) -> None:
        recording.writes.append(pages)
        recording.synced.append(on_disk)
        recording.commits.append(last)
        recording.promised.append(promise)

    def one_commit() -> None:
        nonlocal before, number, on_disk, promise
        commit(storage, collector)
        after = path.read_bytes()
        places = range(0, len(after), PAGE)
        changed = {at: after[at : at + PAGE] for at in places if after[at : at + PAGE] != before[at : at + PAGE]}
        before = after
        if fsync:  # LMDB syncs the pages before it writes the root, and the root before it returns
            write({at: page for at, page in changed.items() if at >= 2 * PAGE}, number)
            on_disk = len(recording.writes)
            number = last_commit(storage)
            write({at: page for at, page in changed.items() if at < 2 * PAGE}, number)
            on_disk, promise = len(recording.writes), number
        else:
            number = last_commit(storage)
            write(changed, number)
        recording.states[number] = dump(storage)

    keys: list[int] = []
    for step in range(commits):
        # In half of the run only values change: then old pages fit into the tree.
        changes_values_only = step // 15 % 2 and len(keys) > 20
        n_fresh = 0 if changes_values_only else rng.randrange(6)
        fresh = [rng.randrange(1 << 40) * 5 + rng.randrange(5) for _ in range(n_fresh)]
        insert(buffer, fresh)
        keys += fresh
        if not changes_values_only and len(keys) > 60 and rng.random() < 0.6:
            gone = rng.sample(keys, 8)
            keys = [key for key in keys if key not in gone]
            for table in "ab":
                buffer.delete(table, gone)
        for key in rng.sample(keys, min(len(keys), 2)) if rng.random() < 0.5 else ():
            there = len(buffer.items[key].labels.columns)
            buffer.extend(key, [f"column{there}"], (column_of(key, there),))
        if keys and (changes_values_only or rng.random() < 0.5):
            some = np.array(sorted(rng.sample(keys, min(len(keys), 5))), dtype=np.uint64)
            buffer.update_priorities("a", some, np.array([rng.random() for _ in some]))
        if rng.random() < 0.2:
            buffer.set_policy_version(buffer.policy.version + 1, "somewhere")
        one_commit()
    storage.close()
    return recording


def disk_after_a_cut(recording: Recording, rng: random.Random, killed: bool) -> tuple[bytes, int, str]:
    """A file as a crash of the machine leaves it, the moment of the crash, and how the writes were chosen.

    `killed`: only the process died.
    """
    moment = rng.randrange(len(recording.writes))
    disk = bytearray(recording.start)

    def put(at: int, page: bytes) -> None:
        if len(disk) < at:
            disk.extend(bytes(at - len(disk)))
        disk[at : at + PAGE] = page

    for pages in recording.writes[: recording.synced[moment]]:
        for at, page in pages.items():
            put(at, page)
    versions: dict[int, list[bytes]] = {}
    later = recording.writes[recording.synced[moment] : moment + 1]
    how = "killed" if killed else rng.choice(["in order", "in any order", "mostly", *["all but one"] * 3, "torn"])
    for place, pages in enumerate(later):
        partly = sorted(pages.items(), key=lambda entry: entry[0] < 2 * PAGE)  # the root comes last
        if place == len(later) - 1 and how == "in order":
            partly = partly[: rng.randrange(len(partly) + 1)]
        for at, page in partly:
            versions.setdefault(at, []).append(page)
    last_pages = [at for at in recording.writes[moment] if at >= 2 * PAGE]
    left_out = rng.choice(last_pages) if last_pages else -1
    for at, seen in versions.items():
        old = bytes(disk[at : at + PAGE]).ljust(PAGE, b"\0")
        match how:
            case "in order" | "killed":
                page = seen[-1]
            case "in any order":
                page = rng.choice([old, *seen])
            case "all but one":
                page = rng.choice([old, *seen[:-1]]) if at == left_out else seen[-1]
            case "mostly":
                page = old if rng.random() < 0.03 else seen[-1]
            case _:
                parts = [rng.choice([old, *seen, seen[-1], seen[-1]]) for _ in range(PAGE // SECTOR)]
                page = b"".join(part[n * SECTOR : (n + 1) * SECTOR] for n, part in enumerate(parts))
        put(at, page)
    return bytes(disk), moment, how


def examine(directory: Path, recording: Recording, moment: int, killed: bool) -> str:
    """Starts on the disk. Raises where promises break; else says to which commit it came back."""
    if not killed:
        records.boot_id = lmdb.boot_id = lambda: "after the crash"
    try:
        buffer, storage, collector = open_buffer(directory)
    except DamagedDirectory:
        assert {recording.fsync, killed} == {False}, "refused"
        return "refused"
    assert recording.fsync or killed, "a file whose pages nobody synced was opened"
    number = last_commit(storage)
    newest, promised = recording.commits[moment], recording.promised[moment]
    assert number <= newest, f"commit {number} was not acknowledged before the crash at {newest}"
    assert number >= (newest if killed else promised), f"{number} is older than {promised}, which was synced"
    assert dump(storage) == recording.states[number], f"this is not the state of commit {number}"
    assert not buffer.damaged
    for key, item in buffer.items.items():
        columns = [column_of(key, place) for place in range(len(item.labels.columns))]
        expected = payload_of(key) + b"".join(columns)
        assert b"".join(next(read_payloads(buffer.storage, [key], [item.nbytes]))) == expected, "a wrong payload"
    go_on(directory, buffer, storage, collector)
    return "the last commit" if number == newest else "the synced commit" if number == promised else "one between"


def main(directory: Path, seconds: float, seed: int) -> None:
    logging.disable()
    lmdb.CHUNK_BYTES = 8000  # large payloads would make a large file, in which little else changes
    rng = random.Random(seed)
    recordings: list[tuple[Recording, Path]] = []
    for mode, fsync in MODES.items():
        folder = directory / f"run-{mode}"
        recordings.append((record(folder, fsync, 90, rng), folder))
    outcomes: Counter[str] = Counter()
    broken: list[str] = []
    end, copy = time.monotonic() + seconds, directory / "copy"
    seen: set[str] = set()
    while (time.monotonic() < end or seen < set(MODES)) and len(broken) < 20:
        place = rng.choice([0, 0, 0, 1])
        (recording, folder), mode = recordings[place], list(MODES)[place]
        seen.add(mode)
        killed = rng.random() < 0.3
        disk, moment, how = disk_after_a_cut(recording, rng, killed)
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        (copy / "data.mdb").write_bytes(disk)
        for name in ("server.lock", "unsynced"):
            if (folder / name).exists():
                shutil.copy(folder / name, copy)
        outcome = in_child(partial(examine, copy, recording, moment, killed))
        if outcome.startswith("broken"):
            broken.append(f"{mode}, {how}, at write {moment}: {outcome}")
        else:
            outcomes[f"{mode}: {outcome}"] += 1
    writes = {mode: len(recording.writes) for mode, (recording, _) in zip(MODES, recordings, strict=True)}
    print(
        json.dumps({"seed": seed, "starts": outcomes.total(), "outcomes": outcomes, "broken": broken, "writes": writes})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
