"""Kills the parts of `replay run`, or all of it, at random moments, and compares what is left with a ledger.

    python -m tests.system.run.kills [--kills N] [--seed S]

In a run of 60 steps:

* The server, the trainer or the generator is killed by SIGKILL: the run ends by itself.
* `replay run` itself is killed, also with a child that ignores SIGTERM: nothing that it started lives five seconds
  later, and the same command goes on.
* `replay run` gets SIGTERM: the next start repeats no step.

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
from collections.abc import Callable
from pathlib import Path

from examples.demo.task import make_model, make_tokenizer, problems
from replay_client import ReplayClient
from replay_client.errors import ReplayError
from replay_client.testing import make_group
from tests.kit.faults import Books, program
from tests.kit.processes import start_server
from tests.system.run.process import (
    GENERATOR,
    PATIENCE,
    SERVER,
    TRAINER,
    RunProcess,
    trained_keys,
    used_keys,
    write_run,
)

STEPS = 60
PARTS = (SERVER, TRAINER, GENERATOR)
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


class Ledger(threading.Thread):
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


def kill_parts(folder: Path, model: Path, seed: int, kills: int, parts: tuple[str, ...] = PARTS) -> Books:
    """One run, in which `kills` parts are killed, each when the trainer has made a step since the one before."""
    rng = random.Random(seed)

    def disturb(run: RunProcess, books: Books) -> None:
        for _ in range(kills):
            before = run.steps()[-1] if run.steps() else 0
            if before >= STEPS - 5:
                return
            run.until_step(before + 1)
            time.sleep(rng.uniform(0.0, 3.0))
            name = rng.choice(parts)
            process = run.part(name)
            if process is not None and run.process.poll() is None:
                process.kill()
                books.killed()
                books.totals[f"kills of {name}"] += 1

    return play(folder, model, [disturb])


def kill_run(folder: Path, model: Path, seed: int, kills: int, *, stubborn: bool) -> Books:
    """`replay run` itself is killed `kills` times, and started again each time."""
    rng = random.Random(seed)

    def disturb(run: RunProcess, books: Books) -> None:
        run.until_step((run.steps()[-1] if run.steps() else 0) + 1)
        time.sleep(rng.uniform(0.0, 3.0))
        if run.process.poll() is not None:
            return
        left = run.end_and_wait_for_all(signal.SIGKILL)
        books.killed()
        if left:
            books.violated(f"five seconds after SIGKILL of replay run these live: {[each.cmdline() for each in left]}")

    return play(folder, model, [disturb] * kills, stubborn=stubborn)


def stop_run(folder: Path, model: Path, seed: int, stops: int) -> Books:
    """`replay run` gets SIGTERM `stops` times, and is started again each time: no step is repeated."""
    rng = random.Random(seed)

    def disturb(run: RunProcess, books: Books) -> None:
        run.address()
        time.sleep(rng.uniform(0.0, 12.0))
        if run.process.poll() is not None:
            return
        run.process.send_signal(signal.SIGTERM)
        status = run.wait()
        books.totals["stops"] += 1
        if status == -signal.SIGTERM and not run.words():
            books.totals["stops before the first word"] += 1  # Python was starting: there was nothing to stop
            return
        has_all = bool(run.steps()) and run.steps()[-1] == STEPS
        if status != 128 + signal.SIGTERM and not (status == 0 and has_all):
            books.violated(f"status {status} after SIGTERM: {run.words()[-1000:]}")

    books = play(folder, model, [disturb] * stops)
    made = steps_made(folder / "out")
    repeated = sorted({step for step in made if made.count(step) > 1})
    if repeated:
        books.violated(f"steps {repeated} were made again after SIGTERM")
    return books


def play(
    folder: Path,
    model: Path,
    disturbances: list[Callable[[RunProcess, Books], None]],
    *,
    stubborn: bool = False,
) -> Books:
    """Starts a run for each disturbance, and at last one that nobody disturbs; then compares."""
    books = Books()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stubborn.py").write_text(IGNORES_SIGTERM)
    file = write_run(folder, model, steps=STEPS, reward="stubborn:reward" if stubborn else "exact_match")
    ledger = Ledger()
    ledger.start()
    try:
        for disturb in [*disturbances, lambda run, books: None]:
            with RunProcess(file) as run:
                ledger.address = run.address()
                disturb(run, books)
                if run.process.poll() is None:
                    status = run.wait()
                    if status != 0:
                        books.violated(f"the run ended with status {status}: {run.words()[-1500:]}")
                ledger.address = ""
            if steps_of(folder)[-1:] == [STEPS]:
                break
    finally:
        ledger.end()
    compare(folder / "out", ledger, books)
    return books


def steps_made(out: Path) -> list[int]:
    """The steps that all starts of the trainer have made, in order, repeated ones too."""
    lines = (out / "logs" / "trainer.log").read_text().splitlines()
    return [int(found[1]) for found in map(re.compile(r"step (\d+): ").match, lines) if found]


def steps_of(folder: Path) -> list[int]:
    """The steps in the run's metrics.jsonl."""
    path = folder / "out" / "train" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def compare(out: Path, ledger: Ledger, books: Books) -> None:
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


def stored_keys(out: Path, keys: set[int]) -> set[int]:
    """Those of `keys` whose items the run's server has stored."""
    server = start_server(out / "config" / "serve.toml", address="127.0.0.1:0")
    try:
        with ReplayClient(server.address, timeout=PATIENCE) as client:
            return {item.key for item in client.get(keys, payloads=False)}
    finally:
        server.kill()


def kill_all_sorts(folder: Path, seed: int, kills: int) -> Books:
    """`kills` of parts, a sixth as many of `replay run` itself, and a third as many stops, in runs of their own."""
    model = make_model_folder(folder)
    total = Books()
    number = 0

    def add(books: Books) -> None:
        total.totals.update(books.totals)
        total.violations += books.violations

    while total.totals["kills"] < kills:
        add(kill_parts(folder / f"parts-{number}", model, seed + number, kills=8))
        number += 1
    for stubborn in (False, True):
        add(kill_run(folder / f"run-{stubborn}", model, seed + number, max(1, kills // 12), stubborn=stubborn))
    while total.totals["stops"] < kills // 3:
        add(stop_run(folder / f"stops-{number}", model, seed + number, stops=5))
        number += 1
    return total


if __name__ == "__main__":
    program(kill_all_sorts, kills=60)
