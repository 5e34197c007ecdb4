"""Kills scorers, the generators that play for them, and the server: each group is scored once, and none is lost.

    python -m tests.system.scoring.kills --scorers 50 --generators 20 --servers 20 [--seed N]

Generators (each a process) build groups in a table of a server (a process) under admission, and hand them on without
rewards. Scorers (each a process) give them rewards, each after a while of its own. A trainer's client takes the groups.
Each of them is killed with SIGKILL at a random moment, and another takes its place. At the end the generators are
killed, and others finish what is left. Then

* each group that a generator was told to be in the table `unscored` was trained on, once, with the rewards of what the
  policy wrote;
* each rollout that the server has acknowledged is in the one group of its prompt, at its place;
* no permit is out, and what was accepted is what the trainer got.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from replay_client import AsyncReplayClient, ReplayClient
from replay_client.errors import ReplayError
from replay_generator import GeneratorConfig, ScorerConfig, run_generator, run_scorer
from replay_generator.engines import SamplingConfig
from replay_generator.groups.codec import PartialGroupSpec
from tests.kit.faults import BLOCKED, Books, Trainer, kill_and_finish, program
from tests.kit.processes import Servers, start
from tests.system.partial_groups.engine import EngineServer, RemoteEngine
from tests.system.partial_groups.kills import (
    CONCURRENT,
    GROUP_SIZE,
    GROUPS_PER_STEP,
    LEASE,
    ToldClient,
    check_rollouts,
    prompts,
)
from tests.system.partial_groups.kills import CONFIG as PARTIAL_GROUPS
from tests.system.sessions.kills import Played
from tests.system.sessions.kills import reward as reward_of

CONFIG = PARTIAL_GROUPS.format(data_dir="{folder}", permit_tables=["partial_groups", "unscored"])
SLOWEST = 0.4
"""Seconds of a reward."""


class HandingClient(ToldClient):
    """Writes down the prompt of each group that the server has acknowledged in the table `unscored`."""

    handed: Path

    async def insert(self, group: Any, priorities: Any, **options: Any) -> int:
        key = await super().insert(group, priorities, **options)
        if "unscored" in priorities:
            with self.handed.open("a") as file:  # one write of a short line: a kill leaves all of it, or nothing
                file.write(f"{PartialGroupSpec.decode(group)[0].prompt.prompt_id}\n")
        return key


def generate(address: str, engine: int, folder: Path, name: str, new_groups: bool) -> None:
    """A generator, until it is killed or, without new groups, nothing is left to finish."""

    def connect() -> AsyncReplayClient:
        client = HandingClient(address, timeout=BLOCKED)
        client.notes, client.handed, client.prompts = folder / "acknowledged", folder / "handed", {}
        return client

    config = GeneratorConfig(
        group_size=GROUP_SIZE,
        sampling=SamplingConfig(max_tokens=400),
        max_concurrent_groups=CONCURRENT,
        partial_groups_table="partial_groups",
        partial_groups_lease=LEASE,
        unscored_table="unscored",
    )
    run_generator(connect, RemoteEngine(engine), prompts(name, new_groups), None, config)


def score(address: str, seed: int) -> None:
    """A scorer, until it is killed."""
    rng = random.Random(seed)
    slowest = rng.random() * SLOWEST

    async def reward(row: Any, text: str) -> float:
        await asyncio.sleep(rng.random() * slowest)
        return reward_of(text)

    config = ScorerConfig("unscored", lease=LEASE)
    run_scorer(lambda: AsyncReplayClient(address, timeout=BLOCKED), reward, config)


def kill_all_sorts(
    scorers: int, generators: int, servers: int, folder: Path, seed: int, *, fleet: tuple[int, int] = (2, 3)
) -> Books:
    """Kills so many of each, and all that are left. `fleet`: how many generators and scorers there are."""
    books, rng, engine, names = Played(), random.Random(seed), EngineServer(seed), itertools.count()
    handed = folder / "handed"
    handed.touch()
    with Servers(folder, [CONFIG]) as running, ReplayClient(running.address, timeout=60.0) as client:

        def start_generator(new_groups: bool = True) -> BaseProcess:
            return start(generate, running.address, engine.port, folder, f"generator{next(names)}", new_groups)

        def start_scorer() -> BaseProcess:
            return start(score, running.address, rng.getrandbits(30))

        trainer = Trainer(running.address, books, books.look, GROUPS_PER_STEP)
        trainer.refusals = ReplayError
        counts = scorers, generators, servers
        kill_and_finish(running, client, trainer, rng, start_generator, start_scorer, counts, fleet, "unscored")
        engine.stop()
    told = handed.read_text().split()
    if len({*told}) < len(told):
        books.violated("a group was handed on twice")
    if lost := {*told} - books.groups.keys():
        books.violated(f"handed on, and never trained on: {sorted(lost)}")
    check_rollouts(folder / "acknowledged", books)
    books.totals |= {"groups": len(books.groups), "groups told to be unscored": len(told)}
    return books


if __name__ == "__main__":
    program(kill_all_sorts, scorers=50, generators=20, servers=20)
