"""Generators that fill the queue of a durable server, an engine server that lives, and a trainer that takes the groups.

Generators (each a process) build groups of 8 rollouts under admission. Each writes down every rollout that the server
has acknowledged. After the last kill all generators are killed, and others finish the groups that are left. Then

* each rollout that was acknowledged is in the one group of its prompt, at its place, and no group has another one;
* no permit is out, and what was accepted is what the trainer got.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from replay_client import AsyncReplayClient, ReplayClient, RolloutGroup
from replay_client.errors import ReplayError
from replay_client.records import ExtendResult
from replay_client.testing import until
from replay_generator.groups.codec import PartialGroupSpec, decode_rollout
from tests.kit.faults import BLOCKED, Books
from tests.kit.processes import Servers
from tests.system.scenarios.engine import EngineServer, number_of
from tests.system.scenarios.workload import Fleet, Trainer, Workload

GROUP_SIZE = 8
GROUPS_PER_STEP = 4
CONCURRENT = 3
LEASE = 2.0
CONFIG = """
server.data_dir = "{folder}"
tables = [{ name = "rollouts", rate_limiter = { type = "queue", max_size = 64 } }]
[admission]
fresh_groups_per_step = GROUPS_PER_STEP
max_staleness = 2
permit_ttl = 5.0
permit_tables = PERMIT_TABLES
"""


class NotingClient(AsyncReplayClient):
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
    """Prompts that nobody else has, without an end; none without new groups."""
    for number in itertools.count() if new_groups else ():
        yield {"prompt": "+", "prompt_id": f"{name}-{number}"}


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

    def check_rollouts(self, notes: Path) -> None:
        """Each rollout that was acknowledged is in the group of its prompt, at its place."""
        acknowledged: dict[tuple[str, int], list[int]] = defaultdict(list)
        for line in lines_of(notes):
            prompt, index, number = json.loads(line)
            acknowledged[prompt, index].append(number)
        for (prompt, index), numbers in acknowledged.items():
            if len(numbers) > 1:
                self.violated(f"rollout {index} of {prompt} was stored {len(numbers)} times")
            if prompt not in self.groups:
                self.violated(f"rollout {index} of {prompt} is in no group")
            elif self.groups[prompt][index] != numbers[0]:
                self.violated(
                    f"rollout {index} of {prompt} is {self.groups[prompt][index]}, and {numbers[0]} was stored"
                )
        seen = [number for numbers in self.groups.values() for number in numbers]
        if len(set(seen)) < len(seen):
            self.violated("a completion is in two groups")
        self.totals["rollouts acknowledged"] = len(acknowledged)


class RewardedGroups(Groups):
    """The groups that the trainer got, each with the rewards of its completions."""

    def look(self, group: RolloutGroup) -> None:
        numbers = [number_of(ids) for ids in group.completions()]
        if self.groups.get(group.prompt_id) == numbers:
            self.totals["groups that the trainer got again after a kill of the server"] += 1
            return
        super().look(group)
        if group.rewards.tolist() != [reward(str(number)) for number in numbers]:
            self.violated(f"group {group.prompt_id} of {numbers} has the rewards {group.rewards.tolist()}")


def reward(text: str) -> float:
    """The sum of the digits of a completion's number."""
    return float(sum(map(int, text)))


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


class GeneratorWorkload(Workload):
    """Generators, perhaps with helpers of another kind, which are killed as the server is."""

    permit_tables: str | list[str] = "partial_groups"
    stages: tuple[str, ...] = ()
    """The tables between the partial groups and the trainer."""
    helpers_kind = ""
    refusals: type[Exception] = ReplayError
    """What the trainer's client takes for normal life."""

    def __init__(
        self, folder: Path, rng: random.Random, kills: int, books: Groups, generators: int, helpers: int = 0
    ) -> None:
        super().__init__(folder, rng, kills, books)
        self.sizes = {"generators": generators, "helpers": helpers}
        self.names = (f"generator{number}" for number in itertools.count())
        self.notes = folder / "acknowledged"

    @abstractmethod
    def start_generator(self, new_groups: bool = True) -> BaseProcess:
        """Without new groups, the generator ends when nothing is left to finish."""

    def start_helper(self) -> BaseProcess:
        raise NotImplementedError

    def start(self) -> None:
        config = CONFIG.replace("GROUPS_PER_STEP", str(GROUPS_PER_STEP))
        config = config.replace("PERMIT_TABLES", repr(self.permit_tables))
        self.engine = EngineServer(self.rng.getrandbits(30))
        self.exits.callback(self.engine.stop)
        self.servers = self.exits.enter_context(Servers(self.folder, [config]))
        self.client = self.exits.enter_context(ReplayClient(self.servers.address, timeout=60.0))
        self.trainer = Trainer(
            self.servers.address, self.books, self.books.look, GROUPS_PER_STEP, refusals=self.refusals
        )
        self.exits.callback(self.trainer.stop)
        self.generators = Fleet("generators", self.start_generator, self.sizes["generators"], self.books, self.rng)
        self.exits.callback(self.generators.kill_all)
        self.helpers = Fleet(self.helpers_kind, self.start_helper, self.sizes["helpers"], self.books, self.rng)
        self.exits.callback(self.helpers.kill_all)

    def work(self) -> None:
        """Returns when the trainer has one or two groups more."""
        enough = len(self.books.groups) + self.rng.randrange(1, 3)
        until(lambda: len(self.books.groups) >= enough or self.books.violations, "nobody inserts", BLOCKED)
        time.sleep(self.rng.random() * 0.3)

    def kill(self, victim: str) -> None:
        if victim == "generators":
            self.generators.kill_one()
        elif victim == "servers":
            self.servers.kill()
            self.books.killed(victim)
            time.sleep(self.rng.random())
            self.servers.restart()
        else:
            self.helpers.kill_one()

    def finish(self) -> None:
        self.generators.kill_all()
        self.finish_groups()
        self.helpers.kill_all()
        self.books.check_rollouts(self.notes)
        self.books.totals["groups"] = len(self.books.groups)

    def finish_groups(self) -> None:
        """Lets other generators finish the partial groups, and whoever lives what is in later tables.

        Then no permit is out, nothing is left, and what was accepted is what the trainer got.
        """
        books = self.books
        deadline = time.monotonic() + BLOCKED
        while self.left("partial_groups") and not books.violations and time.monotonic() < deadline:
            process = self.start_generator(new_groups=False)
            process.join(BLOCKED)
            if process.exitcode != 0:
                books.violated(f"who was to finish what is left ended with {process.exitcode}")
            time.sleep(0.1)  # until the leases of the dead end
        until(lambda: not self.left(*self.stages, "rollouts") or books.violations, "groups stay", BLOCKED)
        # A generator that is killed between its permit and the spec of its group leaves the permit for its lease.
        until(
            lambda: not self.client.server_info().admission.running or books.violations,
            "permits of the dead stay away",
            BLOCKED,
        )
        self.trainer.stop()
        admission = self.client.server_info().admission
        held = self.left("partial_groups", *self.stages)
        if (admission.running, admission.partial_groups, held) != (0, 0, 0):
            books.violated(
                f"{admission.running} permits running, {admission.partial_groups} partial_groups, {held} items left"
            )
        if admission.accepted != len(books.groups):
            books.violated(f"{admission.accepted} groups accepted, and the trainer got {len(books.groups)}")

    def left(self, *tables: str) -> int:
        """The items of these tables, those that somebody has drawn too."""
        info = self.client.server_info()
        return sum(info.tables[name].size + info.tables[name].reserved for name in tables)
