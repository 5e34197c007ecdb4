"""Kills generators in the middle of rollouts: every group in the table is whole, and permits of the dead come back.

    python -m tests.system.rollouts.kills --kills 50 [--seed N]

Generators (`replay generate --rollout`, each a process) fill the queue of a server (a process) under admission. A
trainer's client takes the groups, looks at each, and publishes versions. A generator is killed with SIGKILL at a random
moment, at times while it starts, and another one takes its place. Permits are so few that the generators would stand
still if those of the dead stayed away. At the end all generators are killed: then no permit is out, and what the table
has accepted is what the trainer got and what is left. Exit status 1 if any of this was broken.
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
from tests.kit.faults import BLOCKED, Books, Fleet, Trainer, program
from tests.kit.models import save_model
from tests.kit.processes import server_process, start
from tests.system.rollouts.command import run_command
from tests.system.rollouts.hooks import TOOL

GROUP_SIZE, LEAST = 4, 2
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


def kill_generators(kills: int, folder: Path, seed: int, generators: int = 2) -> Books:
    """Kills so many, and all that are left. Returns what was counted, and what is wrong."""
    books, rng, model = Books(), random.Random(seed), save_model(folder / "model")
    rows = [json.dumps({"prompt": f"{number}+{number}="}) + "\n" for number in range(50)]
    (folder / "prompts.jsonl").write_text("".join(rows))
    with server_process(folder, CONFIG) as server, ReplayClient(server.address, timeout=30.0) as client:

        def start_one() -> BaseProcess:
            command = ["--address", server.address, "generate", "--engine", "transformers", "--model", str(model)]
            command += ["--prompts", str(folder / "prompts.jsonl"), "--seed", str(rng.randrange(1 << 20))]
            command += ["--rollout", "tests.system.rollouts.hooks:several_turns", "--max-tokens", "6"]
            command += ["--group-size", str(GROUP_SIZE), "--min-rollouts", str(LEAST), "--set", "on_prompt_error=skip"]
            command += ["--max-concurrent-groups", "4", "--reload", "in_flight"]
            return start(run_command, folder / "generators.log", *command)

        def look(group: RolloutGroup) -> None:
            books.totals["groups"] += 1
            books.totals["rollouts"] += group.group_size
            books.totals["groups of survivors"] += group.group_size < GROUP_SIZE
            books.totals["groups of several versions"] += group.policy_version_end is not None
            for fault in faults(group):
                books.violated(f"group {group.prompt_id}: {fault}")

        def inserts() -> int:
            return client.server_info().tables["rollouts"].inserts

        def go_on() -> None:
            """Returns when some groups more are there."""
            enough = inserts() + rng.randrange(1, 9)
            until(lambda: inserts() >= enough or books.violations, "nobody inserts", BLOCKED)

        def is_at_work(process: BaseProcess) -> bool:
            """Whether groups are under way at the moment, in which it then stands still."""
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
            if _admission(client).running:
                return True
            os.kill(process.pid, signal.SIGCONT)
            return False

        client.set_policy_version(0, weights=str(model))
        trainer = Trainer(server.address, books, look, GROUPS_PER_STEP, weights=str(model))
        fleet = Fleet(start_one, generators, books, rng)
        try:
            while books.totals["kills"] < kills and not books.violations:
                go_on()
                time.sleep(rng.random() * 0.2)
                fleet.kill_one(when=is_at_work)
            go_on()
        finally:
            fleet.kill_all()
        try:
            until(lambda: not _admission(client).running, "permits of the dead stay away", BLOCKED)
        finally:
            trainer.stop()
        for item in client.get([item.key for item in client.list_items("rollouts", limit=1000).items]):
            look(item.group)
        admission = _admission(client)
        if not admission.accepted == inserts() == books.totals["groups"]:
            books.violated(f"{admission.accepted} accepted, {inserts()} inserted, {books.totals['groups']} seen")
        books.totals["permits of the dead"] = admission.expired
    return books


def _admission(client: ReplayClient) -> AdmissionInfo:
    admission = client.server_info().admission
    assert admission is not None
    return admission


if __name__ == "__main__":
    program(kill_generators, kills=50, generators=2)
