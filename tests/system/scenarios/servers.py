"""Servers that are killed under load, and compared with what they have acknowledged after each restart.

Writers (one by one, pipelined, with permits), samplers (plain, prefetching, leased), an updater, a deleter and a
trainer that publishes versions work at once. After SIGKILL at a random moment either all clients go, or the server is
back at once and they go on by themselves. With several servers, one of them is killed each time.
"""

from __future__ import annotations

import itertools
import random
import time
from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import Any

from replay_client import ReplayClient
from replay_client.testing import until
from tests.kit.faults import Crew
from tests.kit.ledger import AHEAD_BATCH, PERMITS, PLAIN_BATCH, Ledger, payload_of
from tests.kit.processes import Servers
from tests.system.scenarios.workload import Workload

CONFIG = """
server = { data_dir = "{folder}", fsync = "FSYNC" }
# A run of hours must not outlive a permit.
admission = { table = "work", fresh_groups_per_step = 1000, max_staleness = 1000, permit_ttl = 1e6 }
tables = [
    { name = "work", sampler = "fifo", max_times_sampled = 1 },
    { name = "queue", rate_limiter = { type = "queue", max_size = 200 }, forward_to = "pool" },
    { name = "pool", sampler = "prioritized", remover = "min_heap", max_size = 150 },
    { name = "keep" },
]
"""


class KilledServers(Workload):
    """One durable server, or several, each time under the load of other clients. Its books have a method `check`."""

    config: str
    counted: str
    """The total that clients must have raised by ten before a kill."""

    def __init__(self, folder: Path, rng: random.Random, kills: int, books: Any, shards: int, fsync: str) -> None:
        super().__init__(folder, rng, kills, books)
        self.shards = shards
        self.fsync = fsync
        self.crew: Crew | None = None

    @abstractmethod
    def start_clients(self, rng: random.Random) -> Crew: ...

    def start(self) -> None:
        config = self.config.replace("FSYNC", self.fsync)
        self.servers = self.exits.enter_context(Servers(self.folder, [config] * self.shards))
        self.exits.callback(self.stop_clients, at_once=True)

    def work(self) -> None:
        enough = self.books.totals[self.counted] + 10
        self.crew = self.start_clients(random.Random(self.rng.random()))
        time.sleep(0.1 + self.rng.random())
        # On a loaded machine the clients may not have begun by then.
        until(partial(self.crew.are_at_work, self.counted, enough), f"{self.counted}: none")

    def kill(self, victim: str) -> None:
        """Kills a server, starts it again, and compares. All clients go before that, or they go on by themselves."""
        number = self.rng.randrange(self.shards)
        self.servers.kill(number)
        self.books.killed(victim)
        if self.shards > 1:
            time.sleep(self.rng.random())  # the others go on without it
        clients_go = self.rng.random() < 0.5
        if clients_go:
            self.stop_clients(at_once=True)
        began = time.monotonic()
        self.servers.restart(number)
        self.books.totals["milliseconds of restarts"] += int(1000 * (time.monotonic() - began))
        if not clients_go:
            time.sleep(0.3 + self.rng.random())
            self.stop_clients()
        self.compare()

    def stop_clients(self, at_once: bool = False) -> None:
        if self.crew is not None:
            self.crew.stop(at_once)
            self.crew = None

    def compare(self) -> None:
        with ReplayClient(self.servers.address) as client:
            if self.shards > 1:
                until(lambda: not client.server_info().gone, "a server does not come back")
            settle(client)
            self.books.check(client)

    def finish(self) -> None:
        """Does nothing: each kill has compared."""


def settle(client: ReplayClient) -> None:
    """Waits until the server has ended what clients had open that are gone: their batches are back in the tables."""

    def is_settled() -> bool:
        info = client.server_info()
        waiting = sum(table.inserting.count + table.sampling.count for table in info.tables.values())
        return not (info.insert_streams or info.sample_streams or waiting)

    until(is_settled, "the server holds something for clients that are gone")


class ServersUnderLoad(KilledServers):
    """Servers under clients of every kind, and a ledger of all that they did."""

    config = CONFIG
    counted = "inserts"

    def __init__(self, folder: Path, rng: random.Random, kills: int, shards: int = 1, fsync: str = "always") -> None:
        super().__init__(folder, rng, kills, Ledger(shards), shards, fsync)
        self.keys = itertools.count(1)

    def start(self) -> None:
        super().start()
        with ReplayClient(self.servers.address) as client:
            client.set_policy_version(0, weights="step-0")

    def start_clients(self, rng: random.Random) -> Crew:
        return Clients(self.books, self.keys, self.servers.address, rng)


class Clients(Crew):
    """Clients of every kind, who write into the ledger what they did."""

    def __init__(self, ledger: Ledger, keys: itertools.count[int], address: str, rng: random.Random) -> None:
        self.ledger = ledger
        self.keys = keys
        self.rng = rng
        works = [
            self.write_kept,
            self.write_kept,
            self.write_work,
            self.write_with_permits,
            self.write_queue,
            self.sample_plain,
            self.sample_ahead,
            self.sample_leased,
            self.sample_pool,
            self.update,
            self.delete,
            self.publish,
        ]
        super().__init__(address, ledger, works)

    def _insert(self, client: ReplayClient, table: str, priority: float = 1.0, **options: object) -> None:
        key, sure = next(self.keys), False
        if table == "queue":
            self.ledger.priorities[key] = priority
        try:
            client.insert(payload_of(key), {table: priority}, key=key, **options)  # type: ignore[arg-type]
            sure = True
        finally:
            self.ledger.inserted(table, key, sure, permit="permits" in options)

    def write_kept(self, client: ReplayClient) -> None:
        self._insert(client, "keep")

    def write_work(self, client: ReplayClient) -> None:
        keys, sure = [], False
        with client.writer(max_in_flight=32) as writer:
            try:
                for _ in range(self.rng.randrange(1, 60)):
                    keys.append(writer.insert(b"", {"work": 1.0}))
                writer.flush()
                sure = True
            finally:
                for key in keys:
                    self.ledger.inserted("work", key, sure)

    def write_with_permits(self, client: ReplayClient) -> None:
        sure = False
        try:
            lease = client.acquire_permits(PERMITS)
            sure = True
        finally:
            self.ledger.permits(PERMITS, sure)
        for _ in range(PERMITS - 1):
            self._insert(client, "work", permits=lease)
        sure = False
        try:
            client.release_permits(lease)
            sure = True
        finally:
            self.ledger.permits(-1, sure)

    def write_queue(self, client: ReplayClient) -> None:
        self._insert(client, "queue", self.rng.choice([0.0, 1.0, self.rng.random()]))

    def sample_plain(self, client: ReplayClient) -> None:
        self._got("work", client.sample("work", PLAIN_BATCH, timeout=0.5))

    def sample_ahead(self, client: ReplayClient) -> None:
        with client.sampler("queue", batch_size=AHEAD_BATCH, prefetch=3, timeout=0.5) as sampler:
            while not self.stopping.is_set():
                self._got("queue", next(sampler))

    def sample_leased(self, client: ReplayClient) -> None:
        samples = client.sample("work", 2, timeout=0.5, lease=30.0)
        keys = [sample.info.key for sample in samples]
        time.sleep(self.rng.random() * 0.02)
        if requeue := self.rng.random() < 0.3:
            client.acknowledge(samples, requeue=requeue)
            return
        # The server may get to hear of it, and the answer be lost.
        with self.ledger.lock:
            self.ledger.tables["work"].maybe_gone.update(keys)
        missing = set(client.acknowledge(samples).missing)
        self.ledger.consumed("work", [sample.info.key for sample in samples if sample.info.lease_id not in missing])

    def sample_pool(self, client: ReplayClient) -> None:
        client.sample("pool", 4, min_samples=1, timeout=0.5, scope=f"step-{self.rng.randrange(5)}")
        time.sleep(0.05)

    def update(self, client: ReplayClient) -> None:
        if (key := self._some_kept()) is not None:
            priority, sure = self.rng.random(), False
            try:
                # Missing: its shard is away, and may have got to hear of it.
                sure = not client.update_priorities("keep", {key: priority}).missing
            finally:
                self.ledger.updated(key, priority, sure)

    def delete(self, client: ReplayClient) -> None:
        time.sleep(0.01)
        if (key := self._some_kept()) is not None:
            sure = False
            with self.ledger.lock:
                self.ledger.maybe_deleted.add(key)
            try:
                sure = not client.delete("keep", [key]).missing
            finally:
                self.ledger.removed(key, sure)

    def publish(self, client: ReplayClient) -> None:
        self.ledger.publish(client)
        time.sleep(0.01)

    def _got(self, table: str, samples: list) -> None:  # type: ignore[type-arg]
        for sample in samples:
            if table == "queue" and bytes(sample.payload) != payload_of(sample.info.key):
                self.ledger.violated(f"{sample.info.key} came with the payload of another")
        self.ledger.consumed(table, [sample.info.key for sample in samples])

    def _some_kept(self) -> int | None:
        with self.ledger.lock:
            there = list(itertools.islice(self.ledger.kept.keys() - self.ledger.maybe_deleted, 50))
        return self.rng.choice(there) if there else None
