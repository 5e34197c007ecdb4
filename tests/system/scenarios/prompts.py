"""Kills generators and the server in the middle of epochs of prompts: each prompt is done exactly once an epoch.

    python -m tests.system.prompts.kills --prompts 10000 --kills 50 [--epochs N] [--partial-groups] [--seed N]

Generators, each a process, draw prompts from a table and insert a group of each. Their completions are made up, because
the table is what this is about. Now and then one is killed with SIGKILL, in the middle of groups or while it loads
prompts, and another one takes its place; every fifth time it is the server, which starts again over the same data. The
windows are small, so that prompts are loaded often. With --partial-groups, groups are partial until they are
whole. At the end the generators stop by themselves. Exit status 1 if a prompt was not done, or was done more than once,
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
from tests.kit.faults import BLOCKED, Books, Fleet, program
from tests.kit.groups import keys_in
from tests.kit.processes import Servers, start

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


def generate(address: str, log: str, gate: Path, prompts: int, epochs: int, window: int, partial_groups: bool) -> None:
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


def kill_all_along(
    prompts: int,
    kills: int,
    folder: Path,
    seed: int,
    *,
    epochs: int = 1,
    generators: int = 3,
    window: int = WINDOW,
    server_every: int = 5,
    partial_groups: bool = False,
    held: bool = False,
) -> Books:
    """Lets generators do all epochs, and kills so often meanwhile. Returns what was counted, and what is wrong.

    Every so manieth kill is one of the server. `held`: each generator begins HELD_AFTER groups, and no more before all
    kills are done.
    """
    books, rng, log, gate = Books(), random.Random(seed), folder / "generators.log", folder / "gate"
    if held:
        gate.touch()
    with Servers(folder, [CONFIG]) as servers, ReplayClient(servers.address, timeout=BLOCKED) as client:

        def start_one() -> BaseProcess:
            return start(generate, servers.address, str(log), gate, prompts, epochs, window, partial_groups)

        def inserted() -> int:
            return int(client.server_info(tables=["rollouts"]).tables["rollouts"].size)

        def someone_failed() -> bool:
            for process in fleet.running:
                if process.exitcode:
                    books.violated(f"a generator ended with {process.exitcode}: {log.read_text()[-2000:]}")
            return bool(books.violations)

        fleet = Fleet(start_one, generators, books, rng, may_end=True)
        try:
            total = prompts * epochs
            moments = sorted(rng.randrange(total) for _ in range(kills))
            for number, moment in enumerate(moments):
                since = inserted()
                waited = time.monotonic()
                while (now := inserted()) < moment and not someone_failed():
                    if now > since:
                        since, waited = now, time.monotonic()
                    if time.monotonic() > waited + BLOCKED:
                        books.violated(f"nobody inserts for {BLOCKED:g} s")
                    time.sleep(0.02)
                if books.violations:
                    break
                time.sleep(rng.random() * 0.05)
                if number % server_every == server_every - 1:
                    servers.kill()
                    servers.restart()
                    books.totals["kills of the server"] += 1
                else:
                    fleet.kill_one()
            gate.unlink(missing_ok=True)
            ended = lambda: someone_failed() or all(each.exitcode == 0 for each in fleet.running)  # noqa: E731
            until(ended, "the generators do not end", BLOCKED + total / 20, pause=0.1)
            count(client, prompts, epochs, books)
        finally:
            fleet.kill_all()
    return books


def count(client: ReplayClient, prompts: int, epochs: int, books: Books) -> None:
    """Looks at every group: one of each prompt an epoch."""
    done: Counter[str] = Counter()
    keys = keys_in(client, "rollouts")
    for start_at in range(0, len(keys), 1000):
        done.update(item.group.prompt_id for item in client.get(keys[start_at : start_at + 1000]))
    books.totals["groups"] = done.total()
    for number in range(prompts):
        if (times := done.pop(f"p{number}", 0)) != epochs:
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


if __name__ == "__main__":
    program(kill_all_along, prompts=10_000, epochs=1, kills=50, generators=3, partial_groups=False)
