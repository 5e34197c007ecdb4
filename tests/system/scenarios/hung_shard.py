"""One of three shards, which is stopped under load (SIGSTOP): calls of every kind go on, and no item is lost.

A thread for each kind of call, and four for inserts, work before the shard stops, while it stands still, and after it
goes on. At the end every acknowledged item of the queue was delivered or is there, and none twice. The report has the
longest call of each kind. An insert whose answer was open when the shard stopped stays with it, so it has a line of its
own.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from replay_client import ReplayClient
from replay_client.errors import ReplayError
from replay_client.testing import until
from tests.kit.faults import Books, Crew
from tests.kit.processes import Servers
from tests.system.scenarios.workload import Workload

CONFIG = """
admission = { fresh_groups_per_step = 10000, max_staleness = 10000, table = "queue" }
tables = [
    { name = "queue", rate_limiter = { type = "queue", max_size = 100000 } },
    { name = "pool", sampler = "prioritized", max_size = 2000 },
]
"""
PHASES = ("before", "stopped", "after")
KINDS = 15
TIMEOUT = 20.0

T = TypeVar("T")

OPEN = "insert that began before it counted as away"
AWAY_SECONDS = 3.0
"""Seconds after which the stopped shard counts as away."""


class Load(Crew):
    """A thread for each kind of call, until `stop`."""

    def __init__(self, address: str, books: Books) -> None:
        self.phase = PHASES[0]
        self.stopped_at = math.inf
        self.longest: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
        """Seconds, by kind of call and by the phase in which the call ended."""
        self.calls: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(PHASES, 0))
        self.refused: dict[str, set[str]] = defaultdict(set)
        """Errors by kind of call."""
        self.acknowledged: set[int] = set()
        self.delivered: list[int] = []
        self._versions = itertools.count(1)
        works = [self.insert] * 4 + [self.write, self.sample, self.sample_ahead, self.lease, self.read_queue]
        works += [self.update, self.get, self.info, self.policy, self.publish, self.permits]
        super().__init__(address, books, works, TIMEOUT)

    def _call(self, kind: str, function: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
        """The result of one call, which is timed; None: the server refused it."""
        begin = time.monotonic()
        result = None
        try:
            result = function(*arguments, **options)
        except ReplayError as error:
            self.refused[kind].add(type(error).__name__)
        seconds = time.monotonic() - begin
        if kind == "insert" and begin < self.stopped_at + AWAY_SECONDS and self.phase != "before":
            kind = OPEN
        self.longest[kind][self.phase] = max(self.longest[kind][self.phase], seconds)
        self.calls[kind][self.phase] += 1
        self.stopping.wait(0.005)
        return result

    def insert(self, client: ReplayClient) -> None:
        key = self._call("insert", client.insert, b"x" * 4000, {"queue": 1.0})
        if key:
            self.acknowledged.add(key)

    def write(self, client: ReplayClient) -> None:
        keys = []
        with client.writer(max_in_flight=64) as writer:
            while not self.stopping.is_set():
                keys.append(self._call("writer.insert", writer.insert, b"x" * 400, {"queue": 1.0, "pool": 1.0}))
            writer.flush()
        self.acknowledged.update(key for key in keys if key)

    def sample(self, client: ReplayClient) -> None:
        self._call("sample, prioritized", client.sample, "pool", 8, timeout=5.0)

    def sample_ahead(self, client: ReplayClient) -> None:
        with client.sampler("pool", batch_size=8, prefetch=2) as sampler:
            while not self.stopping.is_set():
                self._call("sampler", next, sampler)

    def lease(self, client: ReplayClient) -> None:
        batch = self._call("sample with a lease", client.sample, "pool", 4, lease=60.0)
        if batch:
            self._call("acknowledge", client.acknowledge, batch)

    def read_queue(self, client: ReplayClient) -> None:
        batch = self._call("sample, queue, timeout=1", client.sample, "queue", 8, min_samples=1, timeout=1.0)
        self.delivered += [sample.info.key for sample in batch or ()]

    def update(self, client: ReplayClient) -> None:
        found = self._call("list_items", client.list_items, "pool", limit=20)
        if found:
            priorities = {item.key: 2.0 for item in found.items}
            self._call("update_priorities", client.update_priorities, "pool", priorities)

    def get(self, client: ReplayClient) -> None:
        self._call("get", client.get, [*self.delivered[-9:], 1])

    def info(self, client: ReplayClient) -> None:
        self._call("server_info", client.server_info)

    def policy(self, client: ReplayClient) -> None:
        self._call("policy", client.policy)

    def publish(self, client: ReplayClient) -> None:
        self._call("set_policy_version", client.set_policy_version, next(self._versions))

    def permits(self, client: ReplayClient) -> None:
        lease = self._call("acquire_permits", client.acquire_permits, 4)
        if lease:
            self._call("release_permits", client.release_permits, lease)


class HungShard(Workload):
    """Three shards under load. The first one stands still for some seconds."""

    def __init__(
        self, folder: Path, rng: random.Random, kills: int, seconds: float = 60.0, around: float = 5.0
    ) -> None:
        """`around`: seconds of work before and after."""
        super().__init__(folder, rng, kills, Books())
        self.seconds = seconds
        self.around = around

    def start(self) -> None:
        self.servers = self.exits.enter_context(Servers(self.folder, [CONFIG] * 3))
        self.hung = self.servers.running[0].process.pid
        self.load = Load(self.servers.address, self.books)
        self.exits.callback(self.load.stop)
        self.exits.callback(os.kill, self.hung, signal.SIGCONT)

    def work(self) -> None:
        """Returns some time after there was a call of every kind."""
        calls = self.load.calls
        until(lambda: len(calls) >= KINDS and all(counts["before"] for counts in calls.values()))
        time.sleep(self.around)

    def kill(self, victim: str) -> None:
        """Stops the shard, and lets it go on."""
        os.kill(self.hung, signal.SIGSTOP)
        self.books.totals["stops"] += 1
        self.load.phase = "stopped"
        self.load.stopped_at = time.monotonic()
        time.sleep(self.seconds)
        with suppress(AssertionError):  # on a loaded machine a call may need longer than that
            until(lambda: not self.kinds_that_stand_still())
        self.load.phase = "after"
        os.kill(self.hung, signal.SIGCONT)
        time.sleep(self.around)

    def kinds_that_stand_still(self) -> list[str]:
        """The kinds of which no call has ended since the shard stopped.

        With bad luck the stopped shard has an insert of each thread.
        """
        kinds = list(self.load.calls.items())
        return [kind for kind, counts in kinds if kind not in (OPEN, "insert") and not counts["stopped"]]

    def finish(self) -> None:
        self.load.stop()
        delivered = self.load.delivered + self.drain()
        if len(delivered) > len(set(delivered)):
            self.books.violated(f"{len(delivered) - len(set(delivered))} items came twice")
        lost = self.load.acknowledged - set(delivered)
        if lost:
            self.books.violated(f"{len(lost)} acknowledged items never came")
        for kind in self.kinds_that_stand_still():
            self.books.violated(f"{kind}: no call ended while the shard stood still")
        self.books.totals["kinds of calls"] = len(self.load.calls.keys() - {OPEN, "insert"})
        self.books.totals["items acknowledged"] = len(self.load.acknowledged)
        self.books.totals["items delivered under load"] = len(self.load.delivered)
        self.books.report = self.table()

    def drain(self) -> list[int]:
        """The keys of the items that are left in the queue."""
        rest: list[int] = []
        with ReplayClient(self.servers.address, timeout=60.0) as client:
            until(lambda: client.server_info().gone == ())
            while client.server_info().tables["queue"].size:
                rest += [sample.info.key for sample in client.sample("queue", 1000, min_samples=1, timeout=1.0)]
        return rest

    def table(self) -> list[str]:
        """The longest call of each kind, in the rows of a Markdown table."""
        rows = [
            "| the longest call, s | before | while it stood still | after | calls meanwhile | errors |",
            "|---|---|---|---|---|---|",
        ]
        for kind, longest in sorted(self.load.longest.items()):
            seconds = " | ".join(f"{longest[phase]:.2f}" for phase in PHASES)
            meanwhile = self.load.calls[kind]["stopped"]
            errors = ", ".join(sorted(self.load.refused[kind]))
            rows.append(f"| {kind} | {seconds} | {meanwhile} | {errors} |")
        return rows
