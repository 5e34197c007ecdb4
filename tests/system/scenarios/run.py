"""`replay run` of 60 steps, whose parts or which itself is killed or stopped, compared with a ledger at the end.

Whatever was killed: steps 1 to 60 are there once each, no group is trained on twice, and each group that the server has
acknowledged to this program is in a step, or still in a table.
"""

from __future__ import annotations

import json
import random
import re
import signal
import threading
import time
from pathlib import Path

from examples.demo.task import make_model, make_tokenizer, problems
from replay_client import ReplayClient
from replay_client.errors import ReplayError
from replay_client.testing import make_group, until
from tests.kit.faults import Books
from tests.system.run.process import (
    GENERATOR,
    PATIENCE,
    SERVER,
    TRAINER,
    RunProcess,
    stored_keys,
    trained_keys,
    used_keys,
    write_run,
    written_steps,
)
from tests.system.scenarios.workload import Workload

STEPS = 60
COMMANDS = {"servers": SERVER, "trainers": TRAINER, "generators": GENERATOR}
"""The commands of the parts, by the names that the books have for them."""
IGNORES_SIGTERM = """
import signal, subprocess, sys
def reward(row, text):
    if text and not reward.started:
        reward.started = True
        program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
        subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    return float(len(text) % 3)
reward.started = False
"""
"""A reward function that leaves a child behind which ignores SIGTERM, in a session of its own."""


class InsertedGroups(threading.Thread):
    """Inserts a group now and then, and writes down those that the server has acknowledged."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.keys: list[int] = []
        self.address = ""
        """Of the server; empty: nothing is inserted."""
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.3):
            address = self.address
            if not address:
                continue
            try:
                with ReplayClient(address, timeout=5.0) as client:
                    version = client.policy(timeout=1.0).version
                    group = make_group(rewards=[1.0, 0.0], lengths=(2, 3), version=version)
                    self.keys.append(client.insert(group, {"rollouts": 1.0}, timeout=5.0))
            except (ReplayError, ValueError):
                continue

    def end(self) -> None:
        self._ended.set()
        self.join()


def make_model_folder(folder: Path) -> Path:
    """A tiny model with its tokenizer, and prompts.jsonl beside it."""
    make_model(0).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems(0, 64)))
    return folder / "model"


class Run(Workload):
    """A run that is started again whenever it was ended, and a client that inserts groups of its own.

    `stubborn`: the reward function leaves a child behind that ignores SIGTERM.
    """

    def __init__(self, folder: Path, rng: random.Random, kills: int, stubborn: bool = False) -> None:
        super().__init__(folder, rng, kills, Books())
        self.inserted = InsertedGroups()
        self.process: RunProcess | None = None
        (folder / "stubborn.py").write_text(IGNORES_SIGTERM)
        self.file = write_run(
            folder,
            make_model_folder(folder),
            steps=STEPS,
            reward="stubborn:reward" if stubborn else "exact_match",
        )

    def start(self) -> None:
        self.inserted.start()
        self.exits.callback(self.inserted.end)
        self.exits.callback(self.end_process)
        self.start_process()

    def start_process(self) -> None:
        self.process = RunProcess(self.file)
        self.inserted.address = self.process.address()

    def end_process(self) -> None:
        """Kills what is left of the last start."""
        self.inserted.address = ""
        if self.process is not None:
            self.process.close()
            self.process = None

    def running(self) -> RunProcess:
        """The run at work; a new start of it, if the last one was ended."""
        if self.process is None:
            self.start_process()
        assert self.process is not None
        return self.process

    def last_step(self) -> int:
        steps = written_steps(self.folder / "out")
        return steps[-1] if steps else 0

    def work(self) -> None:
        self.is_over = self.process is None and self.last_step() == STEPS
        if not self.is_over:
            run = self.running()
            self.wait_for_moment(run)
            self.is_over = run.has_ended()

    def wait_for_moment(self, run: RunProcess) -> None:
        """Returns some time after the trainer has made a step since the last kill, or when the run has ended."""
        run.until_step(self.last_step() + 1)
        time.sleep(self.rng.uniform(0.0, 3.0))

    def kill(self, victim: str) -> None:
        """Kills `replay run` itself: nothing that it started lives five seconds later."""
        left = self.running().end_and_wait_for_all(signal.SIGKILL)
        self.books.killed(victim)
        if left:
            commands = [process.cmdline() for process in left]
            self.books.violated(f"five seconds after SIGKILL of replay run these live: {commands}")
        self.end_process()

    def finish(self) -> None:
        if self.process is not None:
            self.let_run_end()
        if self.last_step() != STEPS:
            self.let_run_end()
        compare(self.folder / "out", self.inserted, self.books)

    def let_run_end(self) -> None:
        run = self.running()
        while not run.has_ended():
            run.until_step(self.last_step() + 1)  # on a busy machine, all steps take longer than PATIENCE
        status = run.wait()
        if status != 0:
            self.books.violated(f"the run ended with status {status}: {run.words()[-1500:]}")
        self.end_process()


class RunWithKilledParts(Run):
    """A run whose server, trainer and generator are killed: it ends by itself."""

    def work(self) -> None:
        self.is_over = self.last_step() >= STEPS - 5
        if not self.is_over:
            super().work()

    def kill(self, victim: str) -> None:
        run = self.running()
        part = until(lambda: run.part(COMMANDS[victim]) or run.has_ended(), f"no {victim}", PATIENCE)
        if not run.has_ended():
            part.kill()
            self.books.killed(victim)


class StoppedRun(Run):
    """A run that gets SIGTERM: the next start repeats no step."""

    def wait_for_moment(self, run: RunProcess) -> None:
        time.sleep(self.rng.uniform(0.0, 12.0))

    def kill(self, victim: str) -> None:
        run = self.running()
        run.process.send_signal(signal.SIGTERM)
        status = run.wait()
        self.books.totals["stops"] += 1
        if status == -signal.SIGTERM and not run.words():
            # Python was starting: there was nothing to stop.
            self.books.totals["stops before the first word"] += 1
        elif status != 128 + signal.SIGTERM and not (status == 0 and self.last_step() == STEPS):
            self.books.violated(f"status {status} after SIGTERM: {run.words()[-1000:]}")
        self.end_process()

    def finish(self) -> None:
        super().finish()
        made = steps_made(self.folder / "out")
        repeated = sorted({step for step in made if made.count(step) > 1})
        if repeated:
            self.books.violated(f"steps {repeated} were made again after SIGTERM")


def steps_made(out: Path) -> list[int]:
    """The steps that all starts of the trainer have made, in order, repeated ones too."""
    lines = (out / "logs" / "trainer.log").read_text().splitlines()
    return [int(found[1]) for found in map(re.compile(r"step (\d+): ").match, lines) if found]


def steps_of(folder: Path) -> list[int]:
    """The steps in the run's metrics.jsonl."""
    path = folder / "out" / "train" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def compare(out: Path, ledger: InsertedGroups, books: Books) -> None:
    """Compares steps, groups and ledger."""
    steps = steps_of(out.parent)
    if steps != list(range(1, STEPS + 1)):
        books.violated(f"the steps are {steps}")
    keys = trained_keys(out)
    twice = {key for key in keys if keys.count(key) > 1}
    if twice:
        books.violated(f"groups {sorted(twice)} were trained on twice")
    untouched = set(ledger.keys) - used_keys(out)
    lost = untouched - stored_keys(out, untouched)
    if lost:
        books.violated(f"{len(lost)} of {len(ledger.keys)} groups of the ledger are lost: {sorted(lost)[:5]}")
    books.totals["steps"] += len(steps)
    books.totals["groups trained on"] += len(keys)
    books.totals["groups in the ledger"] += len(ledger.keys)
