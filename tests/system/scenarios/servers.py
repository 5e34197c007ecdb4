"""Pull the plug: kills a real server under a real workload again and again, and checks after each restart.

    python -m tests.system.crash --kills 100 [--shards 3] [--seed N]

Writers (one by one, pipelined, with permits), samplers (plain, prefetching, leased), an updater, a deleter and a
trainer that publishes versions work at once. After SIGKILL at a random moment either all clients go, or the server is
back at once and they go on by themselves. With `--shards` the clients have several servers, one of which is killed each
time. Exit status 1 if any promise was broken.
"""

from __future__ import annotations

import itertools
import random
import time
from functools import partial
from pathlib import Path

from replay_client import ReplayClient
from tests.kit.faults import Crew, program, pull_the_plug
from tests.kit.ledger import AHEAD_BATCH, PERMITS, PLAIN_BATCH, Ledger, payload_of
from tests.kit.processes import Servers

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


class Workload(Crew):
    def __init__(self, ledger: Ledger, keys: itertools.count[int], address: str, rng: random.Random) -> None:
        self.ledger, self.keys, self.rng = ledger, keys, rng
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


def run(kills: int, seed: int, folder: Path, fsync: str, shards: int = 1) -> Ledger:
    ledger = Ledger(shards)
    with Servers(folder, [CONFIG.replace("FSYNC", fsync)] * shards) as servers:
        with ReplayClient(servers.address) as client:
            client.set_policy_version(0, weights="step-0")
        pull_the_plug(servers, kills, seed, ledger, partial(Workload, ledger, itertools.count(1)), "inserts")
    return ledger


if __name__ == "__main__":
    program(run, kills=100, shards=1, fsync="always")
