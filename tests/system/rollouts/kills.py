"""Kills generators in the middle of rollouts: every group in the table is whole, and permits of the dead come back.

    python -m tests.system.rollouts.kills --kills 50 [--seed N]

Generators (`replay generate --rollout`, each a process) fill the queue of a server (a process) under admission. A
trainer's client takes the groups, looks at each, and publishes versions. A generator is killed with SIGKILL at a random
moment, at times while it starts, and another one takes its place. Permits are so few that the generators would stand
still if those of the dead stayed away. At the end all generators are killed: then no permit is out, and what the table
has accepted is what the trainer got and what is left. Exit status 1 if any of this was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from replay_client import ReplayClient, RolloutGroup
from replay_client.errors import DeadlineExceededError
from replay_client.records import AdmissionInfo
from replay_client.scoring import group_advantages
from tests.factories import server_process, start, until
from tests.generator.factories import make_model
from tests.system.ledger import Books
from tests.system.rollouts.command import run_command
from tests.system.rollouts.hooks import TOOL

GROUP_SIZE, LEAST = 4, 2
GROUPS_PER_STEP = 4
CONFIG = f"""
[admission]
groups_per_step = {GROUPS_PER_STEP}
max_staleness = 1
permit_ttl = 2.0

[[tables]]
name = "rollouts"
rate_limiter = {{ type = "queue", max_size = 64 }}
"""
PATIENCE = 300.0
"""Seconds after which somebody counts as blocked, on a machine that is busy."""


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


class Trainer(threading.Thread):
    """Takes groups, looks at each and publishes versions, until `stop`."""

    def __init__(self, address: str, model: Path, books: Books) -> None:
        super().__init__()
        self.groups = 0
        self._address, self._model, self._books = address, model, books
        self._stopping = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with ReplayClient(self._address, timeout=30.0) as client:
                client.set_policy_version(0, weights=str(self._model))
                since = time.monotonic()
                while not self._stopping.is_set():
                    with suppress(DeadlineExceededError):
                        (sample,) = client.sample("rollouts", timeout=0.5)
                        self.look(sample.group)
                        since = time.monotonic()
                        if self.groups % GROUPS_PER_STEP == 0:
                            client.set_policy_version(self.groups // GROUPS_PER_STEP, weights=str(self._model))
                    if time.monotonic() - since > PATIENCE:
                        self._books.violated(f"no group for {PATIENCE:g} s")
                        return
        except Exception as error:
            self._books.violated(f"the trainer: {error!r}")

    def look(self, group: RolloutGroup) -> None:
        self.groups += 1
        self._books.totals["rollouts"] += group.group_size
        self._books.totals["groups of survivors"] += group.group_size < GROUP_SIZE
        self._books.totals["groups of several versions"] += group.policy_version_end is not None
        for fault in faults(group):
            self._books.violated(f"group {group.prompt_id}: {fault}")

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def kill_generators(kills: int, folder: Path, rng: random.Random, generators: int = 2) -> Books:
    """Kills so many, and all that are left. Returns what was counted, and what is wrong."""
    books, model = Books(), make_model(folder / "model")
    rows = [json.dumps({"prompt": f"{number}+{number}="}) + "\n" for number in range(50)]
    (folder / "prompts.jsonl").write_text("".join(rows))
    with server_process(folder, CONFIG) as server, ReplayClient(server.address, timeout=30.0) as client:

        def start_one() -> BaseProcess:
            command = ["--address", server.address, "generate", "--engine", "transformers", "--model", str(model)]
            command += ["--prompts", str(folder / "prompts.jsonl"), "--seed", str(rng.randrange(1 << 20))]
            command += ["--rollout", "tests.system.rollouts.hooks:several_turns", "--max-tokens", "6"]
            command += ["--group-size", str(GROUP_SIZE), "--min-rollouts", str(LEAST), "--set", "on_prompt_error=skip"]
            command += ["--max-concurrent-groups", "4", "--reload", "at_once"]
            return start(run_command, folder / "generators.log", *command)

        def inserts() -> int:
            return client.server_info().tables["rollouts"].inserts

        def go_on() -> None:
            """Returns when some groups more are there."""
            enough = inserts() + rng.randrange(1, 9)
            until(lambda: inserts() >= enough or books.violations, "nobody inserts", PATIENCE)

        def is_at_work(process: BaseProcess) -> bool:
            """Whether groups are under way at the moment, in which it then stands still."""
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
            if _admission(client).running:
                return True
            os.kill(process.pid, signal.SIGCONT)
            return False

        trainer = Trainer(server.address, model, books)
        running = [start_one() for _ in range(generators)]
        try:
            for _ in range(kills):
                go_on()
                time.sleep(rng.random() * 0.2)
                victim = rng.randrange(generators)
                if (code := running[victim].exitcode) is not None:
                    books.violated(f"a generator ended by itself, with {code}")
                if books.violations:
                    break
                until(lambda: is_at_work(running[victim]), "no group is under way", PATIENCE)  # noqa: B023
                running[victim].kill()
                books.totals["kills"] += 1
                running[victim] = start_one()
            go_on()
        finally:
            for process in running:
                process.kill()
                process.join()
                books.totals["kills"] += 1
        try:
            until(lambda: not _admission(client).running, "permits of the dead stay away", PATIENCE)
        finally:
            trainer.stop()
        for item in client.get([item.key for item in client.list_items("rollouts", limit=1000).items]):
            trainer.look(item.group)
        admission = _admission(client)
        if not admission.accepted == inserts() == trainer.groups:
            books.violated(f"{admission.accepted} accepted, {inserts()} inserted, {trainer.groups} seen")
        books.totals["groups"] = trainer.groups
        books.totals["permits of the dead"] = admission.expired
    return books


def _admission(client: ReplayClient) -> AdmissionInfo:
    admission = client.server_info().admission
    assert admission is not None
    return admission


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--generators", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        books = kill_generators(arguments.kills, Path(folder), random.Random(arguments.seed), arguments.generators)
    print(f"seed {arguments.seed}: " + ", ".join(f"{count} {what}" for what, count in sorted(books.totals.items())))
    print(f"{len(books.violations)} violations", *books.violations, sep="\n  ")
    sys.exit(bool(books.violations))


if __name__ == "__main__":
    main()
