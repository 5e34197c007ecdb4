"""Generators that are killed in the middle of groups: no finished rollout is lost, none comes twice.

The books also say how many of the tokens that the engine drew are in no group. `in_memory` measures the same for
generators that build their groups in their own memory.
"""

from __future__ import annotations

import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from replay_client import AsyncReplayClient
from replay_client.errors import DeadlineExceededError
from replay_client.testing import until
from replay_generator import GeneratorConfig, run_generator
from replay_generator.engines import SamplingConfig
from tests.kit.faults import BLOCKED
from tests.kit.processes import start
from tests.system.scenarios.engine import RemoteEngine
from tests.system.scenarios.generators import (
    CONCURRENT,
    GROUP_SIZE,
    LEASE,
    GeneratorWorkload,
    Groups,
    NotingClient,
    lines_of,
    prompts,
)


def generate(address: str, port: int, notes: Path, name: str, in_memory: bool, new_groups: bool) -> None:
    """A generator, until it is killed or, without new groups, nothing is left to finish."""

    def connect() -> AsyncReplayClient:
        client = NotingClient(address, timeout=60.0)
        client.notes = notes
        client.prompts = {}
        return client

    config = GeneratorConfig(
        group_size=GROUP_SIZE,
        sampling=SamplingConfig(max_tokens=400),
        max_concurrent_groups=CONCURRENT,
        partial_groups_table=None if in_memory else "partial_groups",
        partial_groups_lease=LEASE,
    )
    run_generator(connect, RemoteEngine(port), prompts(name, new_groups), lambda row, text: float(len(text)), config)


class PartialGroups(GeneratorWorkload):
    """Generators with partial groups, of which no other process is killed."""

    refusals = DeadlineExceededError

    def __init__(
        self, folder: Path, rng: random.Random, kills: int, generators: int = 2, in_memory: bool = False
    ) -> None:
        super().__init__(folder, rng, kills, Groups(), generators)
        self.in_memory = in_memory

    def start_generator(self, new_groups: bool = True) -> BaseProcess:
        return start(
            generate,
            self.servers.address,
            self.engine.port,
            self.notes,
            next(self.names),
            self.in_memory,
            new_groups,
        )

    def work(self) -> None:
        """Returns when some groups more are there, and a rollout more is stored."""
        groups = len(self.books.groups) + self.rng.randrange(1, 4)
        rollouts = len(lines_of(self.notes))
        if not self.in_memory:
            rollouts += 1

        def has_gone_on() -> bool:
            if self.books.violations:
                return True
            return len(self.books.groups) >= groups and len(lines_of(self.notes)) >= rollouts

        until(has_gone_on, "nobody inserts", BLOCKED)
        time.sleep(self.rng.random() * 0.3)

    def finish(self) -> None:
        self.work()
        super().finish()
        drawn = self.engine.drawn
        lost = drawn - self.books.tokens
        self.books.totals["tokens drawn"] = drawn
        self.books.totals["tokens in no group"] = lost
        self.books.totals["tokens lost a kill"] = lost // self.books.totals["kills"]
