"""Generators that are killed in the middle of rollouts: every group is whole, and permits of the dead come back.

Generators (`replay generate --rollout`, each a process) fill the queue of a server under admission. A trainer's client
takes the groups, looks at each, and publishes versions. A generator is killed at a random moment, at times while it
starts, and another one takes its place. Permits are so few that the generators would stand still if those of the dead
stayed away. At the end all generators are killed: then no permit is out, and what the table has accepted is what the
trainer got and what is left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from replay_client import ReplayClient, RolloutGroup
from replay_client.records import AdmissionInfo
from replay_client.scoring import group_advantages
from replay_client.testing import until
from tests.kit.faults import BLOCKED, Books
from tests.kit.models import save_model
from tests.kit.processes import server_process, start
from tests.system.scenarios.generate_command import run_command
from tests.system.scenarios.rollout_hooks import TOOL
from tests.system.scenarios.workload import Fleet, Trainer, Workload

GROUP_SIZE = 4
LEAST = 2
GROUPS_PER_STEP = 4
CONFIG = f"""
admission = {{ fresh_groups_per_step = {GROUPS_PER_STEP}, max_staleness = 1, permit_ttl = 2.0 }}
tables = [{{ name = "rollouts", rate_limiter = {{ type = "queue", max_size = 64 }} }}]
"""


def faults(group: RolloutGroup) -> Iterator[str]:
    """What is not as `hooks.several_turns` and the generator leave a group."""
    size = group.group_size
    if not LEAST <= size <= GROUP_SIZE:
        yield f"{size} rollouts"
    if len(group.finish_reasons or ()) != size:
        yield f"finish reasons {group.finish_reasons} of {size} rollouts"
    if group.completion_lengths.sum() != group.num_tokens:
        yield f"{group.completion_lengths.sum()} tokens, and arrays of {group.num_tokens}"
    trained = group.trained_mask
    if (np.isnan(group.rollout_logprobs) == trained).any():
        yield "a log-probability where the tool wrote, or none where the policy did"
    written = [float(trained[span].sum()) for span in group.rollout_spans()]
    if group.rewards.tolist() != written:
        yield f"rewards {group.rewards.tolist()}, and the policy wrote {written} tokens"
    if not np.allclose(group.advantages, group_advantages(group.rewards)):
        yield f"advantages {group.advantages.tolist()} of rewards {group.rewards.tolist()}"
    for span, ids in zip(group.sequence_spans(), group.completions(), strict=True):
        given = ids[~trained[span]].tolist()
        if given != TOOL * (len(given) // len(TOOL)):
            yield f"{given} is masked, and no answer of the tool"


class Rollouts(Workload):
    """Generators with a rollout hook of several turns, and a trainer's client."""

    def __init__(self, folder: Path, rng: random.Random, kills: int, generators: int = 2) -> None:
        super().__init__(folder, rng, kills, Books())
        self.size = generators
        self.model = save_model(folder / "model")
        self.prompts = folder / "prompts.jsonl"
        rows = [json.dumps({"prompt": f"{number}+{number}="}) + "\n" for number in range(50)]
        self.prompts.write_text("".join(rows))

    def start(self) -> None:
        self.server = self.exits.enter_context(server_process(self.folder, CONFIG))
        self.client = self.exits.enter_context(ReplayClient(self.server.address, timeout=30.0))
        self.client.set_policy_version(0, weights=str(self.model))
        self.trainer = Trainer(self.server.address, self.books, self.look, GROUPS_PER_STEP, weights=str(self.model))
        self.exits.callback(self.trainer.stop)
        self.generators = Fleet("generators", self.start_one, self.size, self.books, self.rng)
        self.exits.callback(self.generators.kill_all)

    def start_one(self) -> BaseProcess:
        command = ["--address", self.server.address, "generate", "--engine", "transformers", "--model", str(self.model)]
        command += ["--prompts", str(self.prompts), "--seed", str(self.rng.randrange(1 << 20))]
        command += ["--rollout", "tests.system.scenarios.rollout_hooks:several_turns", "--max-tokens", "6"]
        command += ["--group-size", str(GROUP_SIZE), "--min-rollouts", str(LEAST), "--set", "on_prompt_error=skip"]
        command += ["--max-concurrent-groups", "4", "--reload", "in_flight"]
        return start(run_command, self.folder / "generators.log", *command)

    def look(self, group: RolloutGroup) -> None:
        totals = self.books.totals
        totals["groups"] += 1
        totals["rollouts"] += group.group_size
        totals["groups of survivors"] += group.group_size < GROUP_SIZE
        totals["groups of several versions"] += group.policy_version_end is not None
        for fault in faults(group):
            self.books.violated(f"group {group.prompt_id}: {fault}")

    def inserts(self) -> int:
        return int(self.client.server_info().tables["rollouts"].inserts)

    def admission(self) -> AdmissionInfo:
        admission = self.client.server_info().admission
        assert admission is not None
        return admission

    def work(self) -> None:
        """Returns when some groups more are there."""
        enough = self.inserts() + self.rng.randrange(1, 9)
        until(lambda: self.inserts() >= enough or self.books.violations, "nobody inserts", BLOCKED)
        time.sleep(self.rng.random() * 0.2)

    def kill(self, victim: str) -> None:
        self.generators.kill_one(when=self.is_at_work)

    def is_at_work(self, process: BaseProcess) -> bool:
        """Whether groups are under way at the moment, in which it then stands still."""
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        if self.admission().running:
            return True
        os.kill(process.pid, signal.SIGCONT)
        return False

    def finish(self) -> None:
        self.work()
        self.generators.kill_all()
        until(lambda: not self.admission().running, "permits of the dead stay away", BLOCKED)
        self.trainer.stop()
        for item in self.client.get([item.key for item in self.client.list_items("rollouts", limit=1000).items]):
            self.look(item.group)
        admission = self.admission()
        inserts = self.inserts()
        seen = self.books.totals["groups"]
        if not admission.accepted == inserts == seen:
            self.books.violated(f"{admission.accepted} accepted, {inserts} inserted, {seen} seen")
        self.books.totals["permits of the dead"] = admission.expired
