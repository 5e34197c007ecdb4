"""Agents that are killed while they play sessions, with the generators that hold the sessions, and the server.

Generators (each a process) offer sessions, and build groups in a table of the server. Agents (each a process) take
sessions from whichever generator has one, ask for a completion, and end them with a reward. A session that an agent
leaves expires, and its rollout is played anew; what a generator leaves others finish. Beside what `generators.py` says,

* each end that an agent was answered is in exactly one group;
* each rollout has the reward that its agent gave for what the policy wrote.
"""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections import Counter
from http.client import HTTPException
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from replay_client import AsyncReplayClient
from replay_generator import GeneratorConfig, run_generator
from replay_generator.engines import SamplingConfig
from replay_generator.rollouts.sessions import load_sessions
from tests.kit.faults import BLOCKED
from tests.kit.processes import free_port, start
from tests.system.scenarios.engine import OneToken, RemoteEngine
from tests.system.scenarios.generators import (
    CONCURRENT,
    GROUP_SIZE,
    LEASE,
    GeneratorWorkload,
    NotingClient,
    RewardedGroups,
    prompts,
    reward,
)

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
        client = NotingClient(address, timeout=BLOCKED)
        client.notes = notes
        client.prompts = {}
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
    port = free_port()
    hook = load_sessions(None, f"127.0.0.1:{port}", config, needs_reward=True)
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
        except (OSError, HTTPException, IndexError):  # nobody has a session, or its generator is gone
            time.sleep(0.1)


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=BLOCKED) as answer:
        return json.load(answer)


class Sessions(GeneratorWorkload):
    """Generators that offer sessions, and agents that play them."""

    helpers_kind = "agents"

    def __init__(self, folder: Path, rng: random.Random, kills: int, generators: int = 2, agents: int = 6) -> None:
        super().__init__(folder, rng, kills, RewardedGroups(), generators, agents)
        self.ports = folder / "ports"
        self.ends = folder / "ends"

    def start(self) -> None:
        self.ports.touch()
        self.ends.touch()
        super().start()

    def start_generator(self, new_groups: bool = True) -> BaseProcess:
        return start(
            generate, self.servers.address, self.engine.port, self.notes, self.ports, next(self.names), new_groups
        )

    def start_helper(self) -> BaseProcess:
        return start(play, self.ports, self.ends, self.rng.getrandbits(30))

    def finish(self) -> None:
        super().finish()
        self.check_ends()

    def check_ends(self) -> None:
        """Each end that was answered is in exactly one group."""
        found = Counter(number for numbers in self.books.groups.values() for number in numbers)
        answered = [int(line) for line in self.ends.read_text().splitlines()]
        for number in answered:
            if found[number] != 1:
                self.books.violated(f"the end of {number} was answered, and is in {found[number]} groups")
        self.books.totals["ends answered"] = len(answered)
