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
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from replay_client import AsyncReplayClient, ReplayClient
from replay_client.errors import ReplayError
from replay_generator import GeneratorConfig, ScorerConfig, run_generator, run_scorer
from replay_generator.engines import SamplingConfig
from replay_generator.openings import Opening
from tests.factories import start, until
from tests.system.building.engine import EngineServer, RemoteEngine
from tests.system.building.kills import CONCURRENT, GROUP_SIZE, GROUPS_PER_STEP, LEASE, ToldClient, check_rollouts
from tests.system.building.kills import CONFIG as BUILDING
from tests.system.harness import BLOCKED, Books, Fleet, Servers, Trainer, program
from tests.system.sessions.kills import Played
from tests.system.sessions.kills import reward as reward_of

CONFIG = BUILDING.format(data_dir="{folder}").replace('building = "building"', 'building = ["building", "unscored"]')
SLOWEST = 0.4
"""Seconds of a reward."""


class HandingClient(ToldClient):
    """Writes down the prompt of each group that the server has acknowledged in the table `unscored`."""

    handed: Path

    async def insert(self, group: Any, priorities: Any, **options: Any) -> int:
        key = await super().insert(group, priorities, **options)
        if "unscored" in priorities:
            with self.handed.open("a") as file:  # one write of a short line: a kill leaves all of it, or nothing
                file.write(f"{Opening.decode(group)[0].prompt.prompt_id}\n")
        return key


def generate(address: str, engine: int, folder: Path, name: str, new_groups: bool) -> None:
    """A generator, until it is killed or, without new groups, nothing is left to finish."""

    def connect() -> AsyncReplayClient:
        client = HandingClient(address, timeout=BLOCKED)
        client.notes, client.handed, client.prompts = folder / "acknowledged", folder / "handed", {}
        return client

    def prompts() -> Iterator[dict[str, str]]:
        for number in itertools.count() if new_groups else ():
            yield {"prompt": "+", "prompt_id": f"{name}-{number}"}

    config = GeneratorConfig(
        group_size=GROUP_SIZE,
        sampling=SamplingConfig(max_tokens=400),
        max_concurrent_groups=CONCURRENT,
        building="building",
        building_lease=LEASE,
        unscored="unscored",
    )
    run_generator(connect, RemoteEngine(engine), prompts(), None, config)


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

        def kill_server() -> None:
            running.kill()
            books.killed()
            time.sleep(rng.random())
            running.restart()

        def left(*names: str) -> int:
            tables = client.server_info().tables
            return sum(tables[name].size + tables[name].reserved for name in names)

        trainer = Trainer(running.address, books, books.look, GROUPS_PER_STEP)
        trainer.refusals = ReplayError
        generating = Fleet(start_generator, fleet[0], books, rng)
        scoring = Fleet(start_scorer, fleet[1], books, rng)
        victims = [scoring.kill_one] * scorers + [generating.kill_one] * generators + [kill_server] * servers
        rng.shuffle(victims)
        try:
            for kill in victims:
                enough = len(books.groups) + rng.randrange(1, 3)
                until(lambda enough=enough: len(books.groups) >= enough or books.violations, "nobody inserts", BLOCKED)
                time.sleep(rng.random() * 0.3)
                kill()
                if books.violations:
                    break
        finally:
            generating.kill_all()
        deadline = time.monotonic() + BLOCKED
        while left("building") and not books.violations and time.monotonic() < deadline:
            finisher = start_generator(new_groups=False)
            finisher.join(BLOCKED)
            if finisher.exitcode != 0:
                books.violated(f"who was to finish what is left ended with {finisher.exitcode}")
            time.sleep(0.1)  # until the leases of the dead end
        until(lambda: not left("unscored", "rollouts") or books.violations, "groups stay", BLOCKED)
        scoring.kill_all()
        until(lambda: not client.server_info().admission.running, "permits of the dead stay away", BLOCKED)  # type: ignore[union-attr]
        trainer.stop()
        engine.stop()
        admission = client.server_info().admission
        assert admission is not None
        if (admission.running, admission.building, left("building", "unscored")) != (0, 0, 0):
            books.violated(f"{admission.running} permits running, {admission.building} building, or items are left")
        if admission.accepted != len(books.groups):
            books.violated(f"{admission.accepted} groups accepted, and the trainer got {len(books.groups)}")
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
