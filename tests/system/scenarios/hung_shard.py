"""Stops one of three shards (SIGSTOP) under load, and tells the longest call of each kind.

    python -m tests.system.shards.stopped --seconds 60

A thread for each kind of call, and four for inserts, work before the shard stops, while it stands still, and after it
goes on. At the end every acknowledged item of the queue was delivered or is there, and none twice. An insert whose
answer was open when the shard stopped stays with it, so it has a line of its own.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import signal
import sys
import tempfile
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

    def __init__(self, address: str) -> None:
        self.phase, self.stopped_at = PHASES[0], math.inf
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
        super().__init__(address, Books(), works, TIMEOUT)

    def _call(self, kind: str, function: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
        """The result of one call, which is timed; None: the server refused it."""
        begin, result = time.monotonic(), None
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
        if key := self._call("insert", client.insert, b"x" * 4000, {"queue": 1.0}):
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
        if batch := self._call("sample with a lease", client.sample, "pool", 4, lease=60.0):
            self._call("acknowledge", client.acknowledge, batch)

    def read_queue(self, client: ReplayClient) -> None:
        batch = self._call("sample, queue, timeout=1", client.sample, "queue", 8, min_samples=1, timeout=1.0)
        self.delivered += [sample.info.key for sample in batch or ()]

    def update(self, client: ReplayClient) -> None:
        if found := self._call("list_items", client.list_items, "pool", limit=20):
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
        if lease := self._call("acquire_permits", client.acquire_permits, 4):
            self._call("release_permits", client.release_permits, lease)


def run(seconds: float, folder: Path, around: float = 5.0) -> Load:
    """Stops a shard for `seconds`, and works for `around` seconds before and after."""
    servers = Servers(folder, [CONFIG] * 3)
    hung = servers.running[0].process.pid
    try:
        load = Load(servers.address)
        until(lambda: len(load.calls) >= KINDS and all(calls["before"] for calls in load.calls.values()))
        time.sleep(around)
        os.kill(hung, signal.SIGSTOP)
        load.phase, load.stopped_at = "stopped", time.monotonic()
        time.sleep(seconds)
        with suppress(AssertionError):  # on a loaded machine a call may need longer than that
            until(lambda: all(calls["stopped"] for kind, calls in load.calls.items() if kind not in (OPEN, "insert")))
        load.phase = "after"
        os.kill(hung, signal.SIGCONT)
        time.sleep(around)
        load.stop()
        with ReplayClient(servers.address, timeout=60.0) as client:
            until(lambda: client.server_info().gone == ())
            rest: list[int] = []
            while client.server_info().tables["queue"].size:
                rest += [sample.info.key for sample in client.sample("queue", 1000, min_samples=1, timeout=1.0)]
        every = load.delivered + rest
        if len(every) > len(set(every)):
            load.books.violated(f"{len(every) - len(set(every))} items came twice")
        if lost := load.acknowledged - set(every):
            load.books.violated(f"{len(lost)} acknowledged items never came")
        return load
    finally:
        os.kill(hung, signal.SIGCONT)
        servers.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        load = run(arguments.seconds, Path(folder))
    print(
        "| the longest call, s | before | while it stood still | after | calls meanwhile | errors |\n"
        "|---|---|---|---|---|---|"
    )
    for kind, longest in sorted(load.longest.items()):
        errors = ", ".join(sorted(load.refused[kind])) or ""
        print(
            "|", kind, *(f"| {longest[phase]:.2f}" for phase in PHASES), f"| {load.calls[kind]['stopped']} | {errors} |"
        )
    print(f"{len(load.acknowledged)} items acknowledged, {len(load.delivered)} delivered under load")
    print(*load.books.violations, sep="\n")
    sys.exit(bool(load.books.violations))


if __name__ == "__main__":
    main()
