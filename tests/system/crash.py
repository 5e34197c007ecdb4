"""Pull the plug: kills a real server under a real workload again and again, and checks after each restart.

    python -m tests.system.crash --kills 100 [--shards 3] [--seed N]

Writers (one by one, pipelined, with permits), samplers (plain, prefetching, leased), an updater, a deleter and a
trainer that publishes versions work at once. After SIGKILL at a random moment either all clients go, or the server is
back at once and they go on by themselves. With `--shards` the clients have several servers, one of which is killed each
time. Exit status 1 if any promise was broken.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from replay_client import ReplayClient
from replay_client.errors import ReplayError
from replay_protos import shared_memory
from tests.factories import PATIENCE, free_port, start_server, until
from tests.system.ledger import Books, Ledger, payload_of

CONFIG = """
[server]
data_dir = "{data_dir}"
fsync = "{fsync}"

[admission]
table = "work"
groups_per_step = 1000
max_staleness = 1000
permit_ttl = 1e6  # a run of hours must not outlive a permit

[[tables]]
name = "work"
sampler = "fifo"
max_times_sampled = 1

[[tables]]
name = "queue"
rate_limiter = {{ type = "queue", max_size = 200 }}
forward_to = "pool"

[[tables]]
name = "pool"
sampler = "prioritized"
remover = "min_heap"
max_size = 150

[[tables]]
name = "keep"
"""


PLAIN_BATCH, AHEAD_BATCH = 3, 2
PERMITS = 4


class Crew:
    """Clients at work on a server, each on a thread, until `stop`."""

    def __init__(self, address: str, books: Books, works: Sequence[Callable[[ReplayClient], None]]) -> None:
        self.address, self.books = address, books
        self.stopping = threading.Event()
        self.clients: list[ReplayClient] = []
        self.threads = [threading.Thread(target=self._run, args=(work,), name=work.__name__) for work in works]
        for thread in self.threads:
            thread.start()

    def _run(self, work: Callable[[ReplayClient], None]) -> None:
        client = ReplayClient(self.address, timeout=15.0)
        self.clients.append(client)
        try:
            while not self.stopping.is_set():
                try:
                    work(client)
                except ReplayError:
                    time.sleep(0.01)
        except Exception as error:
            self.books.violated(f"{work.__name__}: {error!r}")
        finally:
            client.close()

    def are_at_work(self, what: str, enough: int) -> bool:
        """Whether so much was counted of `what`, and somebody has a ring where all payloads are to go through one.

        A ring that comes late lets the first payloads go without it.
        """
        # As far as the clients know by themselves.
        over_rings = sum(client._aio.transport == "shared memory" for client in list(self.clients))
        if self.books.totals[what] < enough or (shared_memory.MIN_SHARED == 1 and not over_rings):
            return False
        self.books.totals["clients over rings"] += over_rings
        return True

    def stop(self, at_once: bool) -> None:
        """`at_once`: in the middle of whatever the clients do."""
        self.stopping.set()
        if at_once:
            for client in list(self.clients):
                client.close()
        for thread in self.threads:
            thread.join(timeout=PATIENCE)
            if thread.is_alive():
                self.books.violated(f"{thread.name} hangs")


class Workload(Crew):
    def __init__(self, address: str, ledger: Ledger, keys: itertools.count[int], rng: random.Random) -> None:
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
        if give_back := self.rng.random() < 0.3:
            client.acknowledge(samples, give_back=give_back)
            return
        # The server may get to hear of it, and the answer be lost.
        with self.ledger.lock:
            self.ledger.tables["work"].maybe_gone.update(keys)
        missing = set(client.acknowledge(samples).missing)
        self.ledger.consumed("work", [sample.info.key for sample in samples if sample.info.lease not in missing])

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
        with self.ledger.lock:
            version = self.ledger.maybe_version = self.ledger.maybe_version + 1
        client.set_policy_version(version, weights=f"step-{version}")
        self.ledger.version = version
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


def settle(client: ReplayClient) -> None:
    """Waits until the server has ended what clients had open that are gone: their batches are back in the tables."""

    def is_settled() -> bool:
        info = client.server_info()
        waiting = sum(table.inserting.count + table.sampling.count for table in info.tables.values())
        return not (info.insert_streams or info.sample_streams or waiting)

    until(is_settled, "the server holds something for clients that are gone")


def run(kills: int, seed: int, folder: Path, fsync: str, shards: int = 1) -> Ledger:
    rng, ledger, keys = random.Random(seed), Ledger(shards), itertools.count(1)
    ledger.totals["kills"] = 0
    configs, addresses = [], [f"127.0.0.1:{free_port()}" for _ in range(shards)]
    for number in range(shards):
        configs.append(folder / f"replay-{number}.toml")
        configs[-1].write_text(CONFIG.format(data_dir=folder / f"data-{number}", fsync=fsync))
    servers = [start_server(config, address=address) for config, address in zip(configs, addresses, strict=True)]
    address = ",".join(addresses)
    try:
        with ReplayClient(address) as client:
            client.set_policy_version(0, weights="step-0")
        for _ in range(kills):
            workload = Workload(address, ledger, keys, random.Random(rng.random()))
            inserts = ledger.totals["inserts"]
            time.sleep(0.1 + rng.random())
            # On a loaded machine the clients may not have begun by then.
            until(
                lambda workload=workload, inserts=inserts: workload.are_at_work("inserts", inserts + 10),
                "nobody inserts",
            )
            killed = 0 if shards == 1 else rng.randrange(shards)
            servers[killed].kill()
            ledger.totals["kills"] += 1
            # Taken, and the answer that says so was under way: no more than one batch of each reader.
            ledger.tables["work"].may_be_lost, ledger.tables["queue"].may_be_lost = PLAIN_BATCH, AHEAD_BATCH
            # Granted, and the answer was under way: the lease ends with its time, and the client has another.
            ledger.running[1] += PERMITS
            if shards > 1:
                time.sleep(rng.random())  # the others go on without it
            clients_go = rng.random() < 0.5
            if clients_go:
                workload.stop(at_once=True)
            began = time.monotonic()
            servers[killed] = start_server(configs[killed], address=addresses[killed])
            ledger.totals["milliseconds of restarts"] += int(1000 * (time.monotonic() - began))
            if not clients_go:
                time.sleep(0.3 + rng.random())
                workload.stop(at_once=False)
            with ReplayClient(address) as client:
                if shards > 1:
                    until(lambda client=client: not client.server_info().gone, "a shard does not come back")
                    workload.publish(client)  # as a trainer does that goes on
                settle(client)
                ledger.check(client)
            if ledger.violations:
                break
    finally:
        for server in servers:
            server.kill()
    return ledger


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--shards", type=int, default=1, help="servers, of which one is killed each time")
    parser.add_argument("--fsync", default="always", help="as in the configuration")
    arguments = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    with tempfile.TemporaryDirectory() as folder:
        ledger = run(arguments.kills, arguments.seed, Path(folder), arguments.fsync, arguments.shards)
    print(f"seed {arguments.seed}: " + ", ".join(f"{count} {what}" for what, count in sorted(ledger.totals.items())))
    print(f"{len(ledger.violations)} violations")
    for violation in ledger.violations:
        print(" ", violation)
    sys.exit(bool(ledger.violations))


if __name__ == "__main__":
    main()
