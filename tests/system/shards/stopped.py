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
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from replay_client import ReplayClient
from replay_client.errors import ReplayError
from tests.factories import free_port, start_server, until

CONFIG = """
[admission]
groups_per_step = 10_000
max_staleness = 10_000
table = "queue"

[[tables]]
name = "queue"
rate_limiter = { type = "queue", max_size = 100_000 }

[[tables]]
name = "pool"
sampler = "prioritized"
max_size = 2000
"""
PHASES = ("before", "stopped", "after")
KINDS = 15
TIMEOUT = 20.0

T = TypeVar("T")
Work = Callable[[ReplayClient], None]

OPEN = "insert that began before it counted as away"
AWAY_SECONDS = 3.0
"""Seconds after which the stopped shard counts as away."""


class Load:
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
        self.wrong: list[str] = []
        self._address = address
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(work,))
            for work in (
                *(self._insert,) * 4,
                *(self._write, self._sample, self._sample_ahead, self._lease, self._read_queue),
                *(self._update, self._get, self._info, self._policy, self._publish, self._permits),
            )
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, work: Work) -> None:
        with ReplayClient(self._address, timeout=TIMEOUT) as client:
            try:
                work(client)
            except Exception as error:
                self.wrong.append(f"{work.__name__}: {error!r}")

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
        self._stopping.wait(0.005)
        return result

    @property
    def _goes_on(self) -> bool:
        return not self._stopping.is_set()

    def _insert(self, client: ReplayClient) -> None:
        while self._goes_on:
            if key := self._call("insert", client.insert, b"x" * 4000, {"queue": 1.0}):
                self.acknowledged.add(key)

    def _write(self, client: ReplayClient) -> None:
        keys = []
        with client.writer(max_in_flight=64) as writer:
            while self._goes_on:
                keys.append(self._call("writer.insert", writer.insert, b"x" * 400, {"queue": 1.0, "pool": 1.0}))
            writer.flush()
        self.acknowledged.update(key for key in keys if key)

    def _sample(self, client: ReplayClient) -> None:
        while self._goes_on:
            self._call("sample, prioritized", client.sample, "pool", 8, timeout=5.0)

    def _sample_ahead(self, client: ReplayClient) -> None:
        with client.sampler("pool", batch_size=8, prefetch=2) as sampler:
            while self._goes_on:
                self._call("sampler", next, sampler)

    def _lease(self, client: ReplayClient) -> None:
        while self._goes_on:
            if batch := self._call("sample with a lease", client.sample, "pool", 4, lease=60.0):
                self._call("acknowledge", client.acknowledge, batch)

    def _read_queue(self, client: ReplayClient) -> None:
        while self._goes_on:
            kind = "sample, queue, timeout=1"
            batch = self._call(kind, client.sample, "queue", 8, min_samples=1, timeout=1.0)
            self.delivered += [sample.info.key for sample in batch or ()]

    def _update(self, client: ReplayClient) -> None:
        while self._goes_on:
            if found := self._call("list_items", client.list_items, "pool", limit=20):
                priorities = {item.key: 2.0 for item in found.items}
                self._call("update_priorities", client.update_priorities, "pool", priorities)

    def _get(self, client: ReplayClient) -> None:
        while self._goes_on:
            self._call("get", client.get, [*self.delivered[-9:], 1])

    def _info(self, client: ReplayClient) -> None:
        while self._goes_on:
            self._call("server_info", client.server_info)

    def _policy(self, client: ReplayClient) -> None:
        while self._goes_on:
            self._call("policy", client.policy)

    def _publish(self, client: ReplayClient) -> None:
        for version in itertools.count(1):
            if not self._goes_on:
                return
            self._call("set_policy_version", client.set_policy_version, version)

    def _permits(self, client: ReplayClient) -> None:
        while self._goes_on:
            if lease := self._call("acquire_permits", client.acquire_permits, 4):
                self._call("release_permits", client.release_permits, lease)

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=120)
            if thread.is_alive():
                self.wrong.append("a client hangs")


def run(seconds: float, folder: Path, around: float = 5.0) -> Load:
    """Stops a shard for `seconds`, and works for `around` seconds before and after."""
    config = folder / "replay.toml"
    config.write_text(CONFIG)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    servers = [start_server(config, address=address) for address in addresses]
    hung = servers[0].process.pid
    try:
        load = Load(",".join(addresses))
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
        with ReplayClient(addresses, timeout=60.0) as client:
            until(lambda: client.server_info().gone == ())
            rest: list[int] = []
            while client.server_info().tables["queue"].size:
                rest += [sample.info.key for sample in client.sample("queue", 1000, min_samples=1, timeout=1.0)]
        every = load.delivered + rest
        if len(every) > len(set(every)):
            load.wrong.append(f"{len(every) - len(set(every))} items came twice")
        if lost := load.acknowledged - set(every):
            load.wrong.append(f"{len(lost)} acknowledged items never came")
        return load
    finally:
        os.kill(hung, signal.SIGCONT)
        for server in servers:
            server.kill()


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
    print(*load.wrong, sep="\n")
    sys.exit(bool(load.wrong))


if __name__ == "__main__":
    main()
