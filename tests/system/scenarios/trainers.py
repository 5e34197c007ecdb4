"""Kills shards, trainers, both at once, and Ray's head: the trainer trains on every group, and on none twice.

    python -m tests.system.shards.kills --shards 10 --trainers 35 --both 35 --heads 20 [--seed N]

A real trainer with checkpoints runs on three durable shards, which a writer fills without a pause. Each victim is
killed at a random moment, and comes back. A shard that was killed with the trainer is back before the resume, or
during it, or after the leases of the killed trainer have ended. After some kills the run ends in good order. Then every
acknowledged group is one that the weights are trained on, or is in its queue, and none is both or there twice.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from replay_client import ReplayClient
from replay_client.scoring import group_priority
from replay_client.testing import make_group, until
from tests.kit.faults import Books, Crew, program
from tests.kit.processes import Servers, free_port, start
from tests.system.shards.cluster import RECONNECT, RayCluster
from tests.trainer.killed_trainer import run as train
from tests.trainer.killed_trainer import trained

KINDS = ("shards", "trainers", "both", "heads")
SHARDS = 3
LEASE = 10.0
"""Seconds. Longer than a process on a busy machine stands still."""
KILLS_OF_A_RUN = 7
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
        self._config, self._folder, self._port = folder / "replay.toml", folder / "shards", free_port()
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


class Run:
    """A trainer that is killed again and again, and resumed."""

    def __init__(self, service: Service, folder: Path, rng: random.Random) -> None:
        self._service, self._folder, self._rng = service, folder, rng
        self.books = Books()
        self._writer = Writer(service.address, self.books)
        self.trainer = self._start()

    def _start(self, **options: Any) -> BaseProcess:
        few = {"groups_per_step": 4, "max_steps": 1 << 30}
        return self._service.start_trainer(self._folder, resume=True, lease=LEASE, **few | options)

    def draws(self) -> int:
        path = self._folder / "drawn.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def go_on(self, steps: int = 1) -> None:
        """Returns when the trainer has drawn for so many steps more, at a random moment of the next one."""
        before = self.draws()
        until(lambda: self.draws() >= before + steps or not self.trainer.is_alive(), "the trainer stands still", 300.0)
        assert self.trainer.is_alive(), f"the trainer has ended: {self.trainer.exitcode}"
        time.sleep(self._rng.random() * 0.5)

    def kill_trainer(self) -> None:
        self.trainer.kill()
        self.trainer.join()

    def resume(self) -> None:
        self.trainer = self._start()

    def end(self) -> list[str]:
        """Ends the run in good order. Returns what is wrong."""
        self.kill_trainer()
        steps = [json.loads(line)["step"] for line in (self._folder / "drawn.jsonl").read_text().splitlines()]
        last = self._start(max_steps=max(steps) + 2)
        last.join(300)
        self._writer.stop()
        if last.exitcode != 0:
            return [f"the last trainer ended with {last.exitcode}"]
        used = Counter([*trained(self._folder), *self._left()])
        never = self._writer.acknowledged - used.keys()
        return [
            *self.books.violations,
            *(f"{len(never)} groups never, for example {min(never)}" for _ in range(bool(never))),
            *(f"{key} {times} times" for key, times in used.items() if times > 1),
            *(f"{key} was never inserted" for key in used.keys() - self._writer.tried),
        ]

    @property
    def groups(self) -> int:
        return len(self._writer.acknowledged)

    def _left(self) -> list[int]:
        """The keys that are in the queues."""
        keys = []
        with ReplayClient(self._service.address, timeout=60.0) as client:
            until(lambda: not client.server_info().gone, "a shard does not come back")
            until(lambda: client.server_info().tables["rollouts"].reserved == 0, "a lease does not end", 60.0)
            for item in client.list_items("rollouts", limit=10_000).items:
                keys.append(item.key)
        return keys

    def close(self) -> None:
        self.trainer.kill()
        self._writer.stop()


def kill_and_return(run: Run, shards: Processes, kind: str, rng: random.Random) -> None:
    """One kill of a kind, and the way back."""
    shard = rng.randrange(SHARDS)
    if kind == "shards":
        shards.kill(shard)
        time.sleep(rng.random() * 3)
        shards.restart(shard)
    elif kind == "trainers":
        run.kill_trainer()
        run.resume()
    else:
        first, second = rng.sample([lambda: shards.kill(shard), run.kill_trainer], 2)
        first()
        time.sleep(rng.random())
        second()
        if (back := rng.choice(["before", "during", "late"])) == "late":
            shards.end_leases(shard)
        if back == "before":
            shards.restart(shard)
        run.resume()
        if back != "before":
            run.go_on()
            shards.restart(shard)


def kill_shards_and_trainers(kinds: list[str], folder: Path, rng: random.Random) -> tuple[int, list[str]]:
    """Returns how many groups were acknowledged, and what is wrong."""
    shards = Processes(folder)
    run = Run(shards, folder, rng)
    try:
        for kind in kinds:
            run.go_on(rng.randrange(1, 4))
            kill_and_return(run, shards, kind, rng)
        run.go_on()
        return run.groups, run.end()
    finally:
        run.close()
        shards.close()


def kill_heads(kills: int, folder: Path, rng: random.Random) -> tuple[int, list[str]]:
    """As `kill_shards_and_trainers`. Ray ends the trainer with its head, or it is killed at the same time."""
    shards = OnRay(folder)
    run = Run(shards, folder, rng)
    try:
        for _ in range(kills):
            run.go_on(rng.randrange(1, 4))
            if rng.random() < 0.5:
                run.kill_trainer()
            shards.kill_head()
            until(lambda: not run.trainer.is_alive(), "the trainer outlives the head", 120.0)
            shards.restart()
            run.resume()
        run.go_on()
        return run.groups, run.end()
    finally:
        run.close()
        shards.close()


def kill_all(folder: Path, seed: int, **kills: int) -> Books:
    """Kills so many of each kind, a few in each run, and each run in a folder of its own."""
    books, rng, runs = Books(), random.Random(seed), list[Callable[[Path, random.Random], tuple[int, list[str]]]]()
    kinds = [kind for kind in KINDS[:3] for _ in range(kills[kind])]
    rng.shuffle(kinds)
    for begin in range(0, len(kinds), KILLS_OF_A_RUN):
        runs.append(partial(kill_shards_and_trainers, kinds[begin : begin + KILLS_OF_A_RUN]))
    for done in range(0, kills["heads"], KILLS_OF_A_RUN):
        runs.append(partial(kill_heads, min(KILLS_OF_A_RUN, kills["heads"] - done)))
    for number, run in enumerate(runs):
        (place := folder / f"run-{number}").mkdir()
        groups, wrong = run(place, rng)
        books.totals["groups acknowledged"] += groups
        books.violations += wrong
    books.totals.update({f"kills of {kind}": count for kind, count in kills.items()})
    return books


if __name__ == "__main__":
    program(kill_all, **dict.fromkeys(KINDS, 0))
