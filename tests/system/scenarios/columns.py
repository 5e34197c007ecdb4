"""A server that is killed while items are extended: each column is checked after each restart.

Generators insert groups into a queue that requires a column, into a queue for teachers, and into a table that keeps
them. Teachers draw with leases, extend and acknowledge; others extend any item with any column, also with one that is
there, and items that are deleted meanwhile. A trainer takes groups from the queue. After each SIGKILL no column may be
lost, none twice, and none on another item.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from replay_client import ExtendResult, ReplayClient, RolloutGroup, StoredItem
from replay_client.columns import encode_columns
from replay_client.testing import make_group
from tests.kit.faults import Books, Crew
from tests.system.scenarios.servers import KilledServers

CONFIG = """
server = { data_dir = "{folder}", fsync = "FSYNC" }
tables = [
    { name = "rollouts", rate_limiter = { type = "queue", max_size = 60 }, requires = ["teacher"] },
    { name = "teachers", rate_limiter = { type = "queue", max_size = 200 } },
    { name = "keep", sampler = "fifo" },
]
"""
COLUMNS = ("teacher", "value", "late")
MOST_KEPT = 150
"""Items that stay after a check."""
_SIZES = (1, 10, 400, 40_000)
"""Numbers in a column: some take less than a chunk of the storage, and some several."""


def group_of(key: int) -> RolloutGroup:
    return make_group(prompt_id=str(key), extras={"own": np.full(_SIZES[key % 3], key)})


def column_of(key: int, name: str, attempt: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Tells for which item it was made, under which name, and by whom."""
    size = max(3, random.Random(attempt).choice(_SIZES))
    return np.resize(np.array([key, COLUMNS.index(name), attempt]), size)


class ColumnLedger(Books):
    """Which columns items may have, and which they must have."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: set[int] = set()
        """Keys of items whose insert was acknowledged, and that nobody tried to delete."""
        self.deleted: set[int] = set()
        self.tried: dict[tuple[int, str], set[int]] = defaultdict(set)
        """By key and name: the attempts that may have brought the column."""
        self.won: dict[tuple[int, str], int] = {}
        """The attempt that has brought it for sure."""
        self.there: set[tuple[int, str]] = set()
        """What somebody was told is there already."""

    def extended(self, key: int, name: str, attempt: int, result: ExtendResult) -> None:
        with self.lock:
            if result.added:
                self.totals["added"] += 1
                if self.won.setdefault((key, name), attempt) != attempt:
                    self.violated(f"{name} of {key} was added twice")
            elif result.present:
                self.totals["present"] += 1
                self.there.add((key, name))
            else:
                self.totals["missing"] += 1
                if key in self.kept:
                    self.violated(f"{key} is there, and was called missing")

    def check_item(self, item: StoredItem) -> None:
        key, group = item.key, item.group
        columns = {name: values for name, values in group.extras.items() if name != "own"}
        if group.prompt_id != str(key) or item.labels.columns != group.extras.keys():
            self.violated(f"{key}: the group of {group.prompt_id}, {set(group.extras)} and not {item.labels.columns}")
        for name, values in columns.items():
            attempt = int(values[2])
            if attempt not in self.tried[key, name] or not np.array_equal(values, column_of(key, name, attempt)):
                self.violated(f"{key}: {name} is {values[:3]}, which nobody sent")
            if self.won.setdefault((key, name), attempt) != attempt:
                self.violated(f"{key}: {name} is of attempt {attempt}, and {self.won[key, name]} was acknowledged")
        for name in COLUMNS:
            if name not in columns and ((key, name) in self.won or (key, name) in self.there):
                self.violated(f"{key}: {name} is lost")
        expected = len(group_of(key).encode()) + sum(
            len(b"".join(encode_columns({name: values}))) for name, values in columns.items()
        )
        if len(item.payload) != expected:
            self.violated(f"{key}: {len(item.payload)} bytes, not the {expected} of its columns")
        self.totals["columns seen"] += len(columns)

    def check(self, client: ReplayClient) -> None:
        """Compares, with nobody else at work."""
        info = client.server_info()
        kept = {item.key for item in client.list_items("keep", limit=5000)}
        if missing := self.kept - kept:
            self.violated(f"{len(missing)} items are lost, for example {min(missing)}")
        if back := self.deleted & kept:
            self.violated(f"{len(back)} deleted items came back, for example {min(back)}")
        waiting = list(client.list_items("rollouts", limit=5000))
        every = sorted(kept | {item.key for item in waiting})
        found = [item for start in range(0, len(every), 50) for item in client.get(every[start : start + 50])]
        for item in found:
            self.check_item(item)
        lacking = {item.key for item in waiting if "teacher" not in item.labels.columns}
        if {item.key for item in waiting if item.missing_columns} != lacking:
            self.violated("rollouts: the wrong rows wait")
        if info.tables["rollouts"].incomplete_items != len(lacking):
            self.violated(
                f"rollouts: {info.tables['rollouts'].incomplete_items} rows wait, and {len(lacking)} lack a column"
            )
        sizes = {item.key: len(item.payload) + item.labels.nbytes for item in found}
        if info.tables["keep"].bytes != sum(sizes[key] for key in kept):
            self.violated(f"keep: {info.tables['keep'].bytes} bytes, not {sum(sizes[key] for key in kept)}")
        if info.damaged or info.commit_error:
            self.violated(f"{info.damaged} items damaged; {info.commit_error}")
        old = sorted(kept)[:-MOST_KEPT]
        client.delete("keep", old)
        self.kept, self.deleted = kept - set(old), set(old)
        there = sizes.keys() - set(old)
        self.won = {of: attempt for of, attempt in self.won.items() if of[0] in there}
        self.there = {of for of in self.there if of[0] in there}


class Extenders(Crew):
    """Generators, teachers, a trainer and a deleter."""

    def __init__(self, ledger: ColumnLedger, numbers: itertools.count[int], address: str, rng: random.Random) -> None:
        """`numbers` gives keys to items, and names attempts."""
        self.ledger = ledger
        self.numbers = numbers
        self.rng = rng
        works = [self.generate] * 2 + [self.teach] * 2 + [self.extend_any] * 3 + [self.train, self.delete]
        super().__init__(address, ledger, works)

    def generate(self, client: ReplayClient) -> None:
        key = next(self.numbers)
        client.insert(group_of(key), {"keep": 1.0, "rollouts": 1.0, "teachers": 1.0}, key=key, timeout=1.0)
        with self.ledger.lock:
            self.ledger.kept.add(key)
            self.ledger.totals["inserts"] += 1

    def teach(self, client: ReplayClient) -> None:
        samples = client.sample("teachers", 2, min_samples=1, timeout=0.5, lease=2.0)
        for sample in samples:
            self._extend(client, sample.info.key, "teacher")
        if self.rng.random() < 0.9:  # else the teacher dies here, and another one gets the items
            client.acknowledge(samples)

    def extend_any(self, client: ReplayClient) -> None:
        with self.ledger.lock:
            known = sorted(self.ledger.kept)[-40:]
        if not known:
            time.sleep(0.01)
            return
        self._extend(client, self.rng.choice(known), self.rng.choice(COLUMNS))

    def _extend(self, client: ReplayClient, key: int, name: str) -> None:
        attempt = next(self.numbers)
        with self.ledger.lock:
            self.ledger.tried[key, name].add(attempt)
        self.ledger.extended(key, name, attempt, client.extend(key, {name: column_of(key, name, attempt)}))

    def train(self, client: ReplayClient) -> None:
        for sample in client.sample("rollouts", 2, timeout=0.5):
            values = sample.group.extras.get("teacher")
            if values is None or values[0] != sample.info.key or sample.group.prompt_id != str(sample.info.key):
                self.ledger.violated(f"{sample.info.key} was drawn with the column {values}")
            self.ledger.totals["trained"] += 1

    def delete(self, client: ReplayClient) -> None:
        time.sleep(0.02)
        with self.ledger.lock:
            if not self.ledger.kept:
                return
            key = self.rng.choice(sorted(self.ledger.kept))
            self.ledger.kept.discard(key)
        client.delete("keep", [key])
        with self.ledger.lock:
            self.ledger.deleted.add(key)


class ServerOfTeachers(KilledServers):
    """A server under clients that extend items, and a ledger of the columns."""

    config = CONFIG
    counted = "added"

    def __init__(self, folder: Path, rng: random.Random, kills: int, fsync: str = "always") -> None:
        super().__init__(folder, rng, kills, ColumnLedger(), shards=1, fsync=fsync)
        self.numbers = itertools.count(1)

    def start_clients(self, rng: random.Random) -> Crew:
        return Extenders(self.books, self.numbers, self.servers.address, rng)
