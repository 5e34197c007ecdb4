"""Kills agents that play sessions, the generators that hold them, and the server: each rollout comes once.

    python -m tests.system.sessions.kills --agents 50 --generators 20 --servers 20 [--seed N]

Generators (each a process) offer sessions, and build groups in a table of a server (a process) under admission. Agents
(each a process) take sessions from whichever generator has one, ask for a completion, and end them with a reward. All
ask one engine server that lives. Each of them is killed with SIGKILL at a random moment, and another takes its place. A
session that an agent leaves expires, and its rollout is played anew; what a generator leaves others finish. At the end
all are killed, and others finish what is left. Then

* each rollout that the server has acknowledged is in the one group of its prompt, at its place, and no completion is in
  two groups;
* each end that an agent was answered is in exactly one group;
* each rollout has the reward that its agent gave for what the policy wrote;
* no permit is out, and what was accepted is what the trainer got.
"""

from __future__ import annotations

import itertools
import json
import random
import time
import urllib.error
import urllib.request
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from replay_client import AsyncReplayClient, ReplayClient, RolloutGroup
from replay_client.errors import ReplayError
from replay_generator import GeneratorConfig, run_generator
from replay_generator.engines import SamplingConfig
from replay_generator.rollouts.sessions import load_sessions
from tests.kit.faults import BLOCKED, Books, Trainer, kill_and_finish, program
from tests.kit.processes import Servers, free_port, start
from tests.system.partial_groups.engine import EngineServer, OneToken, RemoteEngine, number_of
from tests.system.partial_groups.kills import (
    CONCURRENT,
    GROUP_SIZE,
    GROUPS_PER_STEP,
    LEASE,
    Groups,
    ToldClient,
    check_rollouts,
    prompts,
)
from tests.system.partial_groups.kills import CONFIG as PARTIAL_GROUPS

CONFIG = PARTIAL_GROUPS.format(data_dir="{folder}", permit_tables="partial_groups")
DEADLINE = 3.0
"""Seconds of a session, after which a killed agent's rollout is offered anew."""


class Tokenizer(OneToken):
    def encode(self, text: str, **options: Any) -> list[int]:
        return [1]

    def decode(self, token_ids: Any, **options: Any) -> str:
        return ""


def generate(address: str, engine: int, notes: Path, ports: Path, name: str, new_groups: bool) -> None:
    """A generator that offers sessions at a port of its own, until it is killed or nothing is left to finish."""

    def connect() -> AsyncReplayClient:
        client = ToldClient(address, timeout=BLOCKED)
        client.notes, client.prompts = notes, {}
        return client

    config = GeneratorConfig(
        group_size=GROUP_SIZE,
        sampling=SamplingConfig(max_tokens=400),
        max_concurrent_groups=CONCURRENT,
        partial_groups_table="partial_groups",
        partial_groups_lease=LEASE,
        session_timeout=DEADLINE,
    )
    remote = RemoteEngine(engine)
    remote.tokenizer = Tokenizer()
    hook = load_sessions(None, f"127.0.0.1:{(port := free_port())}", config, needs_reward=True)
    with ports.open("a") as file:
        file.write(f"{port}\n")
    run_generator(connect, remote, prompts(name, new_groups), None, config, rollout=hook)


def play(ports: Path, ends: Path, seed: int) -> None:
    """An agent, until it is killed: it takes a session, asks once, and ends it."""
    rng = random.Random(seed)
    while True:
        try:
            port = rng.choice(ports.read_text().split()[-4:])
            session = post(f"http://127.0.0.1:{port}/sessions", {})
            asked = {"model": "policy", "prompt": "+"}
            said = post(f"{session['openai_base_url']}/completions", asked)["choices"][0]["text"]
            post(f"http://127.0.0.1:{port}/sessions/{session['id']}/end", {"reward": reward(said)})
            with ends.open("a") as file:
                file.write(f"{int(said)}\n")
        except (OSError, IndexError):  # nobody has a session, or its generator is gone
            time.sleep(0.1)


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=BLOCKED) as answer:
        return json.load(answer)


def reward(said: str) -> float:
    return float(sum(map(int, said)))


class Played(Groups):
    """The groups that the trainer got, whose rewards are those of the agents."""

    def look(self, group: RolloutGroup) -> None:
        numbers = [number_of(ids) for ids in group.completions()]
        if self.groups.get(group.prompt_id) == numbers:
            self.totals["groups that the trainer got again after a kill of the server"] += 1
            return
        super().look(group)
        if group.rewards.tolist() != [reward(str(number)) for number in numbers]:
            self.violated(f"group {group.prompt_id} of {numbers} has the rewards {group.rewards.tolist()}")


def check_ends(ends: Path, books: Played) -> None:
    """Each end that was answered is in exactly one group."""
    found = Counter(number for numbers in books.groups.values() for number in numbers)
    answered = [int(line) for line in ends.read_text().splitlines()]
    for number in answered:
        if found[number] != 1:
            books.violated(f"the end of {number} was answered, and is in {found[number]} groups")
    books.totals["ends answered"] = len(answered)


def kill_all_sorts(
    agents: int, generators: int, servers: int, folder: Path, seed: int, *, fleet: tuple[int, int] = (2, 6)
) -> Books:
    """Kills so many of each, and all that are left. `fleet`: how many generators and agents there are."""
    books, rng, engine = Played(), random.Random(seed), EngineServer(seed)
    notes, ports, names = folder / "acknowledged", folder / "ports", itertools.count()
    ends = folder / "ends"
    ports.touch()
    ends.touch()
    with Servers(folder, [CONFIG]) as running, ReplayClient(running.address, timeout=60.0) as client:

        def start_generator(new_groups: bool = True) -> BaseProcess:
            name = f"generator{next(names)}"
            return start(generate, running.address, engine.port, notes, ports, name, new_groups)

        def start_agent() -> BaseProcess:
            return start(play, ports, ends, rng.getrandbits(30))

        trainer = Trainer(running.address, books, books.look, GROUPS_PER_STEP)
        trainer.refusals = ReplayError
        counts = agents, generators, servers
        kill_and_finish(running, client, trainer, rng, start_generator, start_agent, counts, fleet)
        engine.stop()
    check_rollouts(notes, books)
    check_ends(ends, books)
    books.totals["groups"] = len(books.groups)
    return books


if __name__ == "__main__":
    program(kill_all_sorts, agents=50, generators=20, servers=20)
