"""Trainers, shards, both at once, or Ray's head are killed: the trainer trains on every group, and on none twice.

A real trainer with checkpoints runs on three durable shards, which a writer fills without a pause. Each victim is
killed at a random moment, and comes back. A shard that was killed with the trainer is back before the resume, or
during it, or after the leases of the killed trainer have ended. At the end the run ends in good order. Then every
acknowledged group is one that the weights are trained on, or is in its queue, and none is both or there twice.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from replay_client import ReplayClient
from replay_client.scoring import group_priority
from replay_client.testing import make_group, until
from tests.kit.faults import BLOCKED, Books, Crew
from tests.kit.processes import Servers, free_port, start
from tests.system.scenarios.ray_cluster import RECONNECT, RayCluster
from tests.system.scenarios.workload import Workload
from tests.trainer.killed_trainer import run as train
from tests.trainer.killed_trainer import trained

SHARDS = 3
LEASE = 10.0
"""Seconds. Longer than a process on a busy machine stands still."""
CONFIG = """
server.data_dir = "{folder}/data"
tables = [
    { name = "rollouts", rate_limiter = { type = "queue", max_size = 16 }, forward_to = "replay" },
    { name = "replay", sampler = "prioritized", remover = "min_heap", max_size = 64 },
]
"""


def train_with_ray(address: str, cluster: str, *arguments: Any, **options: Any) -> None:
    """As `train`, in a process that joins this cluster."""
    os.environ |= RECONNECT | {"RAY_ADDRESS": cluster}
    train(address, *arguments, **options)


class Service(Protocol):
    """Shards that can be killed."""

    address: str
    """Of the shards, for a client without Ray."""

    def start_trainer(self, folder: Path, **options: Any) -> BaseProcess: ...

    def close(self) -> None: ...


class Processes(Servers):
    """Three `replay serve`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, [CONFIG] * SHARDS, named=True)

    def start_trainer(self, folder: Path, **options: Any) -> BaseProcess:
        return start(train, self.address, folder, **options)


class OnRay:
    """Three shards of a Ray cluster, whose head can be killed."""

    def __init__(self, folder: Path) -> None:
        self._config = folder / "replay.toml"
        self._folder = folder / "shards"
        self._port = free_port()
        self._config.write_text(CONFIG.replace("{folder}", str(folder)))
        self._folder.mkdir()
        self._cluster = RayCluster.start(self._config, self._folder, self._port, SHARDS)
        self.address = self._cluster.shards

    def start_trainer(self, folder: Path, **options: Any) -> BaseProcess:
        return start(train_with_ray, "ray://replay/replay", self._cluster.address, folder, **options)

    def kill_head(self) -> None:
        self._cluster.kill_head()

    def restart(self) -> None:
        """A new cluster over the same folder."""
        self._cluster = RayCluster.start(self._config, self._folder, self._port, SHARDS)
        assert self._cluster.shards == self.address

    def close(self) -> None:
        self._cluster.stop()


class Writer(Crew):
    """Inserts groups without a pause, until `stop`, and knows which are acknowledged."""

    def __init__(self, address: str, books: Books) -> None:
        self.tried: set[int] = set()
        self.acknowledged: set[int] = set()
        self._keys = itertools.count(1)
        super().__init__(address, books, [self.write], timeout=10.0)

    def write(self, client: ReplayClient) -> None:
        key = next(self._keys)
        group = make_group(rewards=[1.0, 0.0], completions=[[3 + key % 12, 6], [7, 3 + key % 5]], logprobs=-2.7)
        self.tried.add(key)
        client.insert(group, {"rollouts": group_priority(group.rewards, group.advantages)}, key=key)
        self.acknowledged.add(key)


class ResumedTrainer(Workload):
    """A trainer on shards, which is killed again and again, and resumed; and a writer that fills its queue."""

    service: Service

    def __init__(self, folder: Path, rng: random.Random, kills: int) -> None:
        super().__init__(folder, rng, kills, Books())

    def start_service(self) -> Service:
        raise NotImplementedError

    def start(self) -> None:
        self.service = self.start_service()
        self.exits.callback(self.service.close)
        self.writer = Writer(self.service.address, self.books)
        self.exits.callback(self.writer.stop)
        self.trainer = self.start_trainer()
        self.exits.callback(lambda: self.trainer.kill())

    def start_trainer(self, **options: Any) -> BaseProcess:
        few = {"groups_per_step": 4, "max_steps": 1 << 30}
        return self.service.start_trainer(self.folder, resume=True, lease=LEASE, **few | options)

    def draws(self) -> list[str]:
        """A line for each batch that a trainer has drawn."""
        path = self.folder / "drawn.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def work(self) -> None:
        self.go_on(self.rng.randrange(1, 4))

    def go_on(self, steps: int = 1) -> None:
        """Returns when the trainer has drawn for so many steps more, at a random moment of the next one."""
        enough = len(self.draws()) + steps
        until(lambda: len(self.draws()) >= enough or not self.trainer.is_alive(), "the trainer stands still", BLOCKED)
        assert self.trainer.is_alive(), f"the trainer has ended: {self.trainer.exitcode}"
        time.sleep(self.rng.random() * 0.5)

    def kill_trainer(self) -> None:
        self.trainer.kill()
        self.trainer.join()

    def resume(self) -> None:
        self.trainer = self.start_trainer()

    def finish(self) -> None:
        self.go_on()
        self.kill_trainer()
        steps = [json.loads(line)["step"] for line in self.draws()]
        last = self.start_trainer(max_steps=max(steps) + 2)
        last.join(300)
        self.writer.stop()
        self.books.totals["groups acknowledged"] = len(self.writer.acknowledged)
        if last.exitcode != 0:
            self.books.violated(f"the last trainer ended with {last.exitcode}")
        else:
            self.compare()

    def compare(self) -> None:
        used = Counter([*trained(self.folder), *self.left()])
        never = self.writer.acknowledged - used.keys()
        if never:
            self.books.violated(f"{len(never)} groups never, for example {min(never)}")
        for key, times in used.items():
            if times > 1:
                self.books.violated(f"{key} {times} times")
        for key in used.keys() - self.writer.tried:
            self.books.violated(f"{key} was never inserted")

    def left(self) -> list[int]:
        """The keys that are in the queues."""
        with ReplayClient(self.service.address, timeout=60.0) as client:
            until(lambda: not client.server_info().gone, "a shard does not come back")
            until(lambda: client.server_info().tables["rollouts"].reserved == 0, "a lease does not end", 60.0)
            return [item.key for item in client.list_items("rollouts", limit=10_000).items]


class TrainerOnShards(ResumedTrainer):
    """A trainer on three `replay serve`, of which one is killed, or the trainer, or both."""

    service: Processes

    def start_service(self) -> Processes:
        return Processes(self.folder)

    def kill(self, victim: str) -> None:
        shard = self.rng.randrange(SHARDS)
        if victim == "shards":
            self.service.kill(shard)
            time.sleep(self.rng.random() * 3)
            self.service.restart(shard)
        elif victim == "trainers":
            self.kill_trainer()
            self.resume()
        else:
            self.kill_both(shard)
        self.books.killed(victim)

    def kill_both(self, shard: int) -> None:
        """One soon after the other; the shard is back before the trainer resumes, or while it does, or much later."""
        first, second = self.rng.sample([lambda: self.service.kill(shard), self.kill_trainer], 2)
        first()
        time.sleep(self.rng.random())
        second()
        back = self.rng.choice(["before", "during", "late"])
        if back == "late":
            self.service.end_leases(shard)
        if back == "before":
            self.service.restart(shard)
        self.resume()
        if back != "before":
            self.go_on()
            self.service.restart(shard)


class TrainerOnRay(ResumedTrainer):
    """A trainer on three shards of a Ray cluster, whose head is killed."""

    service: OnRay

    def start_service(self) -> OnRay:
        return OnRay(self.folder)

    def kill(self, victim: str) -> None:
        """Ray ends the trainer with its head, or the trainer is killed at the same time."""
        if self.rng.random() < 0.5:
            self.kill_trainer()
        self.service.kill_head()
        until(lambda: not self.trainer.is_alive(), "the trainer outlives the head", 120.0)
        self.service.restart()
        self.resume()
        self.books.killed(victim)
