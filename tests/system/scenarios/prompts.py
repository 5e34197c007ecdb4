"""Generators and a server that are killed in the middle of epochs of prompts: each prompt is done once an epoch.

Generators, each a process, draw prompts from a table and insert a group of each. Their completions are made up, because
the table is what this is about. The windows are small, so that prompts are loaded often: a generator is killed in the
middle of groups or while it loads prompts. With `partial_groups`, groups are partial until they are whole. At the end
the generators stop by themselves. It is a violation if a prompt was not done, or was done more than once in an epoch,
or if anybody ended with an error.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from replay_client import AsyncReplayClient, ReplayClient
from replay_client.testing import until
from replay_generator import GeneratorConfig, run_generator
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.prompts import table as prompts_table
from tests.kit.faults import BLOCKED, Books
from tests.kit.groups import keys_in
from tests.kit.processes import Servers, start
from tests.system.scenarios.workload import Fleet, Workload

CONFIG = """
server = { data_dir = "{folder}", fsync = "never" }
tables = [
    { name = "prompts", sampler = "fifo", max_times_sampled = 1 },
    { name = "rollouts" },
    { name = "partial_groups", sampler = "fifo", max_times_sampled = 1 },
]
"""
WINDOW = 64
LEASE = 2.0
HELD_AFTER = 32
"""Groups that a generator begins, and then waits, where kills are to come before all prompts are done."""


@dataclass
class Coins:
    """An engine that makes up its completions, within some milliseconds. Holds them back while a file `gate` is there.

    Without the gate a fast generator is through with a few prompts before a busy process kills it.
    """

    gate: Path
    tokenizer: Any = field(default_factory=lambda: Letters())
    max_length: int = 64
    model: str | None = None
    begun: int = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, *_: Any) -> list[Completion]:
        self.begun += 1
        while self.begun > HELD_AFTER and self.gate.exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(random.random() * 0.02)
        tokens = [[random.randrange(3, 9)] for _ in range(n)]
        return [Completion(token, [-0.5], str(token[0]), "stop", [0]) for token in tokens]

    async def load_weights(self, path: str, version: int) -> None: ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return []

    async def close(self) -> None: ...


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def parity(row: Any, text: str) -> float:
    return float(int(text) % 2)


def generate(address: str, log: Path, gate: Path, prompts: int, epochs: int, window: int, partial_groups: bool) -> None:
    """A generator, until all epochs are through."""
    file = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(file, 2)
    prompts_table.WINDOW = window
    config = GeneratorConfig(
        group_size=2,
        max_concurrent_groups=8,
        follow_policy=False,
        prompts_table="prompts",
        prompts_epochs=epochs,
        prompts_lease=LEASE,
        partial_groups_table="partial_groups" if partial_groups else None,
        partial_groups_lease=LEASE,
    )
    rows = [{"prompt": str(number), "prompt_id": f"p{number}"} for number in range(prompts)]
    run_generator(lambda: AsyncReplayClient(address, timeout=BLOCKED), Coins(gate), rows, parity, config)


class Epochs(Workload):
    """Generators that do all epochs, and a durable server. Each kill comes when so many groups are inserted."""

    def __init__(
        self,
        folder: Path,
        rng: random.Random,
        kills: int,
        prompts: int = 10_000,
        epochs: int = 1,
        generators: int = 3,
        partial_groups: bool = False,
        window: int = WINDOW,
        held: bool = False,
    ) -> None:
        """`held`: each generator begins HELD_AFTER groups, and no more before all kills are done."""
        super().__init__(folder, rng, kills, Books())
        self.prompts = prompts
        self.epochs = epochs
        self.size = generators
        self.partial_groups = partial_groups
        self.window = window
        self.log = folder / "generators.log"
        self.gate = folder / "gate"
        last_moment = self.total
        if held:
            self.gate.touch()
            # A generator that nobody kills begins no more than HELD_AFTER groups.
            last_moment = min(self.total, HELD_AFTER // 2)
        self.moments = sorted((rng.randrange(last_moment) for _ in range(kills)), reverse=True)
        """The numbers of groups after which somebody is killed, the next one last."""

    @property
    def total(self) -> int:
        """The groups of all epochs."""
        return self.prompts * self.epochs

    def start(self) -> None:
        self.servers = self.exits.enter_context(Servers(self.folder, [CONFIG]))
        self.client = self.exits.enter_context(ReplayClient(self.servers.address, timeout=BLOCKED))
        self.generators = Fleet("generators", self.start_one, self.size, self.books, self.rng, may_end=True)
        self.exits.callback(self.generators.kill_all)

    def start_one(self) -> BaseProcess:
        return start(
            generate,
            self.servers.address,
            self.log,
            self.gate,
            self.prompts,
            self.epochs,
            self.window,
            self.partial_groups,
        )

    def work(self) -> None:
        """Returns when the groups of the next moment are inserted."""
        moment = self.moments.pop()
        inserted = self.inserted()
        waited = time.monotonic()
        while inserted < moment and not self.someone_failed():
            before = inserted
            inserted = self.inserted()
            if inserted > before:
                waited = time.monotonic()
            if time.monotonic() > waited + BLOCKED:
                self.books.violated(f"nobody inserts for {BLOCKED:g} s")
            time.sleep(0.02)
        time.sleep(self.rng.random() * 0.05)

    def inserted(self) -> int:
        return int(self.client.server_info(tables=["rollouts"]).tables["rollouts"].size)

    def someone_failed(self) -> bool:
        for process in self.generators.running:
            if process.exitcode:
                self.books.violated(f"a generator ended with {process.exitcode}: {self.log.read_text()[-2000:]}")
        return bool(self.books.violations)

    def kill(self, victim: str) -> None:
        if victim == "servers":
            self.servers.kill()
            self.books.killed(victim)
            self.servers.restart()
        else:
            self.generators.kill_one()

    def finish(self) -> None:
        self.gate.unlink(missing_ok=True)

        def have_ended() -> bool:
            return self.someone_failed() or all(process.exitcode == 0 for process in self.generators.running)

        until(have_ended, "the generators do not end", BLOCKED + self.total / 20, pause=0.1)
        count(self.client, self.prompts, self.epochs, self.books)


def count(client: ReplayClient, prompts: int, epochs: int, books: Books) -> None:
    """Looks at every group: one of each prompt an epoch."""
    done: Counter[str] = Counter()
    keys = keys_in(client, "rollouts")
    for start_at in range(0, len(keys), 1000):
        done.update(item.group.prompt_id for item in client.get(keys[start_at : start_at + 1000]))
    books.totals["groups"] = done.total()
    for number in range(prompts):
        times = done.pop(f"p{number}", 0)
        if times != epochs:
            books.violated(f"prompt p{number} was done {times} times in {epochs} epochs")
    if done:
        books.violated(f"prompts that nobody gave: {done}")

    def left() -> tuple[int, int]:
        table = client.server_info().tables["prompts"]
        return table.size, table.reserved

    with suppress(AssertionError):  # what a generator has drawn ahead comes back a moment after its end
        until(lambda: left() == (1, 0))
    if left() != (1, 0):
        size, reserved = left()
        books.violated(f"{size} items are left of the prompts, and {reserved} are drawn; one cursor should be")
