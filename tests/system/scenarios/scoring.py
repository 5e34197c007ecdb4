"""Scorers that are killed, with the generators that play for them, and the server: each group is scored once.

Generators (each a process) build groups in a table of the server, and hand them on without rewards. Scorers (each a
process) give them rewards, each after a while of its own. Beside what `generators.py` says, each group that a generator
was told to be in the table `unscored` was trained on, once, with the rewards of what the policy wrote.
"""

from __future__ import annotations

import asyncio
import random
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from replay_client import AsyncReplayClient
from replay_generator import GeneratorConfig, ScorerConfig, run_generator, run_scorer
from replay_generator.engines import SamplingConfig
from replay_generator.groups.codec import PartialGroupSpec
from tests.kit.faults import BLOCKED
from tests.kit.processes import start
from tests.system.scenarios.engine import RemoteEngine
from tests.system.scenarios.generators import (
    CONCURRENT,
    GROUP_SIZE,
    LEASE,
    GeneratorWorkload,
    NotingClient,
    RewardedGroups,
    prompts,
)
from tests.system.scenarios.generators import reward as reward_of

SLOWEST = 0.4
"""Seconds of a reward."""


class HandingClient(NotingClient):
    """Writes down the prompt of each group that the server has acknowledged in the table `unscored`."""

    handed: Path

    async def insert(self, group: Any, priorities: Any, **options: Any) -> int:
        key = await super().insert(group, priorities, **options)
        if "unscored" in priorities:
            with self.handed.open("a") as file:  # one write of a short line: a kill leaves all of it, or nothing
                file.write(f"{PartialGroupSpec.decode(group)[0].prompt.prompt_id}\n")
        return key


def generate(address: str, engine: int, notes: Path, handed: Path, name: str, new_groups: bool) -> None:
    """A generator, until it is killed or, without new groups, nothing is left to finish."""

    def connect() -> AsyncReplayClient:
        client = HandingClient(address, timeout=BLOCKED)
        client.notes = notes
        client.handed = handed
        client.prompts = {}
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


class Scoring(GeneratorWorkload):
    """Generators of groups without rewards, and scorers of these groups."""

    permit_tables = ["partial_groups", "unscored"]  # noqa: RUF012
    stages = ("unscored",)
    helpers_kind = "scorers"

    def __init__(self, folder: Path, rng: random.Random, kills: int, generators: int = 2, scorers: int = 3) -> None:
        super().__init__(folder, rng, kills, RewardedGroups(), generators, scorers)
        self.handed = folder / "handed"

    def start(self) -> None:
        self.handed.touch()
        super().start()

    def start_generator(self, new_groups: bool = True) -> BaseProcess:
        return start(
            generate, self.servers.address, self.engine.port, self.notes, self.handed, next(self.names), new_groups
        )

    def start_helper(self) -> BaseProcess:
        return start(score, self.servers.address, self.rng.getrandbits(30))

    def finish(self) -> None:
        super().finish()
        self.check_handed()

    def check_handed(self) -> None:
        """Each group that was handed on was trained on."""
        handed = self.handed.read_text().split()
        if len(set(handed)) < len(handed):
            self.books.violated("a group was handed on twice")
        lost = set(handed) - self.books.groups.keys()
        if lost:
            self.books.violated(f"handed on, and never trained on: {sorted(lost)}")
        self.books.totals["groups told to be unscored"] = len(handed)
