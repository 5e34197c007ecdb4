"""Kills generators in the middle of groups: no finished rollout is lost, none comes twice, and permits are right.

    python -m tests.system.partial_groups.kills --kills 200 [--seed N] [--without]

Generators (each a process) ask one engine server that lives (`engine.py`), and build groups in a table of a server (a
process) under admission. Each writes down every rollout whose storing the server has acknowledged. A trainer's client
takes the groups. A generator is killed with SIGKILL at a random moment, and another one takes its place. At the end all
are killed, and others finish what is left. Then

* each rollout that was acknowledged is in the one group of its prompt, at its place, and no group has another one;
* no permit is out, and what was accepted is what the trainer got.

It also says how many of the tokens that the engine drew are in no group. `--without` measures the same for generators
that build their groups in their own memory.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from replay_client import AsyncReplayClient, ReplayClient, RolloutGroup
from replay_client.records import ExtendResult
from replay_client.testing import until
from replay_generator import GeneratorConfig, run_generator
from replay_generator.engines import SamplingConfig
from replay_generator.groups.codec import PartialGroupSpec, decode_rollout
from tests.kit.faults import BLOCKED, Books, Fleet, Trainer, finish, program
from tests.kit.processes import server_process, start
from tests.system.partial_groups.engine import EngineServer, RemoteEngine, number_of

GROUP_SIZE, GROUPS_PER_STEP, CONCURRENT = 8, 4, 3
LEASE = 2.0
CONFIG = f"""
server.data_dir = "{{data_dir}}"
tables = [{{{{ name = "rollouts", rate_limiter = {{{{ type = "queue", max_size = 64 }}}} }}}}]
[admission]
fresh_groups_per_step = {GROUPS_PER_STEP}
max_staleness = 2
permit_ttl = 5.0
permit_tables = {{permit_tables!r}}
"""


class ToldClient(AsyncReplayClient):
    """Writes down what the server has acknowledged: prompt, number in the group, and number of the completion."""

    notes: Path
    prompts: dict[int, str]
    """By the key of a partial group."""

    async def sample(self, *arguments: Any, **options: Any) -> Any:
        samples = await super().sample(*arguments, **options)
        for sample in samples:
            self.prompts[sample.info.key] = PartialGroupSpec.decode(sample.payload)[0].prompt.prompt_id
        return samples

    async def extend(self, key: Any, extras: Any, **options: Any) -> ExtendResult:
        result = await super().extend(key, extras, **options)
        lines = []
        for name in result.added:
            sequence = decode_rollout(extras[name]).rollout.sequences[0]
            line = [self.prompts[key], int(name.rpartition("/")[2]), number_of(sequence.token_ids[1:])]
            lines.append(json.dumps(line) + "\n")
        with self.notes.open("a") as file:  # one write of some short lines: a kill leaves all of it, or nothing
            file.write("".join(lines))
        return result


def prompts(name: str, new_groups: bool) -> Iterator[dict[str, str]]:
    for number in itertools.count() if new_groups else ():
        yield {"prompt": "+", "prompt_id": f"{name}-{number}"}


def generate(address: str, port: int, notes: Path, name: str, partial_groups: bool, new_groups: bool) -> None:
    """A generator, until it is killed or, without new groups, nothing is left to finish."""

    def connect() -> AsyncReplayClient:
        client = ToldClient(address, timeout=60.0)
        client.notes, client.prompts = notes, {}
        return client

    config = GeneratorConfig(
        group_size=GROUP_SIZE,
        sampling=SamplingConfig(max_tokens=400),
        max_concurrent_groups=CONCURRENT,
        partial_groups_table="partial_groups" if partial_groups else None,
        partial_groups_lease=LEASE,
    )
    run_generator(connect, RemoteEngine(port), prompts(name, new_groups), lambda row, text: float(len(text)), config)


class Groups(Books):
    """The groups that the trainer got."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[str, list[int]] = {}
        """The numbers of the completions of each group, by its prompt."""
        self.tokens = 0

    def look(self, group: RolloutGroup) -> None:
        numbers = [number_of(ids) for ids in group.completions()]
        if group.prompt_id in self.groups:
            self.violated(f"two groups of the prompt {group.prompt_id}")
        if group.group_size != GROUP_SIZE or len(set(numbers)) != GROUP_SIZE:
            self.violated(f"group {group.prompt_id} has the completions {numbers}")
        self.groups[group.prompt_id] = numbers
        self.tokens += group.num_tokens


def check_rollouts(notes: Path, books: Groups) -> None:
    """Each rollout that was acknowledged is in the group of its prompt, at its place."""
    groups = books.groups
    acknowledged: dict[tuple[str, int], list[int]] = defaultdict(list)
    for line in notes.read_text().splitlines() if notes.exists() else ():
        prompt, index, number = json.loads(line)
        acknowledged[prompt, index].append(number)
    for (prompt, index), numbers in acknowledged.items():
        if len(numbers) > 1:
            books.violated(f"rollout {index} of {prompt} was stored {len(numbers)} times")
        if prompt not in groups:
            books.violated(f"rollout {index} of {prompt} is in no group")
        elif groups[prompt][index] != numbers[0]:
            books.violated(f"rollout {index} of {prompt} is {groups[prompt][index]}, and {numbers[0]} was stored")
    seen = [number for numbers in groups.values() for number in numbers]
    if len(set(seen)) < len(seen):
        books.violated("a completion is in two groups")
    books.totals["rollouts acknowledged"] = len(acknowledged)


def kill_generators(kills: int, folder: Path, seed: int, *, without: bool = False, generators: int = 2) -> Books:
    """Kills so many, and all that are left. Returns what was counted, and what is wrong."""
    books, rng, engine, notes = Groups(), random.Random(seed), EngineServer(seed), folder / "acknowledged"
    names = itertools.count()
    config = CONFIG.format(data_dir=folder / "data", permit_tables="partial_groups")
    with server_process(folder, config) as server, ReplayClient(server.address, timeout=60.0) as client:

        def start_one(new_groups: bool = True) -> BaseProcess:
            name = f"generator{next(names)}"
            return start(generate, server.address, engine.port, notes, name, not without, new_groups)

        def stored() -> int:
            return len(notes.read_bytes().splitlines()) if notes.exists() else 0

        def go_on() -> None:
            """Returns when some rollouts and groups more are there."""
            enough, rollouts = len(books.groups) + rng.randrange(1, 4), stored() + (not without)
            until(
                lambda: (len(books.groups) >= enough and stored() >= rollouts) or books.violations,
                "nobody inserts",
                BLOCKED,
            )

        trainer = Trainer(server.address, books, books.look, GROUPS_PER_STEP)
        fleet = Fleet(start_one, generators, books, rng)
        try:
            while books.totals["kills"] < kills and not books.violations:
                go_on()
                time.sleep(rng.random() * 0.3)
                fleet.kill_one()
            go_on()
        finally:
            fleet.kill_all()
        finish(client, trainer, books, partial(start_one, new_groups=False))
        engine.stop()
    check_rollouts(notes, books)
    lost = engine.drawn - books.tokens
    books.totals |= {
        "groups": len(books.groups),
        "tokens drawn": engine.drawn,
        "tokens in no group": lost,
        "tokens lost a kill": lost // books.totals["kills"],
    }
    return books


if __name__ == "__main__":
    program(kill_generators, kills=200, without=False)
