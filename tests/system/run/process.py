"""`replay run` as a process of its own, with a tiny model: what its tests start, kill and look at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

import psutil

from replay_client import ReplayClient
from replay_client.testing import until
from tests.kit.processes import start_server

RUN_FILE = """\
model = "{model}"
output_dir = "{folder}/out"
{top}

[generate]
engine = "transformers"
prompts = "{model}/../prompts.jsonl"
reward = "{reward}"
group_size = 4
max_tokens = 6
metrics_interval = 0.5
{generate}

[train]
groups_per_step = 4
max_steps = {steps}
learning_rate = 1e-4
{train}
"""
PATIENCE = 300.0
"""Seconds after which a run that does not do what is waited for counts as hanging, on a busy machine."""
SERVER = "serve"
TRAINER = "train"
GENERATOR = "generate"


def write_run(
    folder: Path,
    model: Path,
    *,
    steps: int,
    reward: str = "exact_match",
    generate: str = "",
    train: str = "",
    top: str = "",
) -> Path:
    """A run file in `folder`, with these lines in its sections."""
    path = folder / "run.toml"
    text = RUN_FILE.format(
        model=model, folder=folder, steps=steps, reward=reward, generate=generate, train=train, top=top
    )
    path.write_text(text)
    return path


class RunProcess:
    """One start of `replay run`. What is left of it is killed at the end of the `with` block."""

    def __init__(
        self, file: Path, *arguments: str, stdout: IO[Any] | int | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """`stdout`: in the place of the file `output`."""
        self.folder = file.parent
        self.out = self.folder / "out"
        self.output = self.folder / "output"
        with self.output.open("ab") as output:
            self._begin = output.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "replay_cli", "run", str(file), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output if stdout is None else stdout,
                stderr=output,
                start_new_session=True,
                cwd=self.folder,
                env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(env or {}),
            )
        self._seen: set[psutil.Process] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills whatever is left of this start."""
        self.descendants()
        if not self.has_ended():
            self.process.kill()
            self.process.wait()
        for process in self._seen:
            if process.is_running():
                process.kill()

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def words(self) -> str:
        """What this start has written."""
        return self.output.read_bytes()[self._begin :].decode()

    def wait(self) -> int:
        """The status, when it has ended."""
        until(lambda: self.process.poll() is not None, f"replay run does not end: {self.words()[-2000:]}", PATIENCE)
        status = self.process.wait()
        return status

    def descendants(self) -> list[psutil.Process]:
        """All processes that it has started and that live."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self._seen.update(found)
        return [each for each in self._seen if is_alive(each)]

    def part(self, command: str) -> psutil.Process | None:
        """The process of `replay COMMAND`, if it runs: the command itself, and not its supervisor."""
        for process in self.descendants():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if "replay_cli" in words and command in words and not any("supervisor.py" in word for word in words):
                return process
        return None

    def ranks(self) -> list[psutil.Process]:
        """The processes of the trainer's ranks, as torchrun started them."""
        found = []
        for process in self.descendants():
            try:
                words = process.cmdline()
                if TRAINER in words and "RANK" in process.environ() and "torch.distributed.run" not in words:
                    found.append(process)
            except psutil.Error:
                continue
        return sorted(found, key=lambda process: process.pid)

    def steps(self) -> list[int]:
        """The steps in the trainer's metrics.jsonl, in their order."""
        return written_steps(self.out)

    def until_step(self, step: int) -> None:
        """Return when the trainer has made this step, or the run has ended."""

        def is_there() -> bool:
            return self.process.poll() is not None or (bool(self.steps()) and self.steps()[-1] >= step)

        until(is_there, f"no step {step}: {self.words()[-2000:]}", PATIENCE)

    def address(self) -> str:
        """Where its server listens."""

        def found() -> str:
            log = self.out / "logs" / "server.log"
            lines = log.read_text().splitlines() if log.exists() else []
            announced = [line.removeprefix("listening on ") for line in lines if line.startswith("listening on ")]
            return announced[-1] if announced else ""

        address: str = until(found, "the server does not listen", PATIENCE)
        return address

    def client(self, timeout: float = 60.0) -> ReplayClient:
        """A client of its server."""
        return ReplayClient(self.address(), timeout=timeout)

    def end_and_wait_for_all(self, number: int = signal.SIGKILL) -> list[psutil.Process]:
        """Send a signal to `replay run` itself; the processes that live when it and five seconds are gone."""
        before = self.descendants()
        self.process.send_signal(number)
        self.process.wait()
        deadline = time.monotonic() + 5.0
        while any(map(is_alive, before)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [each for each in before if is_alive(each)]


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs: one that has ended and that nobody has waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def written_steps(out: Path) -> list[int]:
    """The steps in the metrics.jsonl of a run's trainer, which may be writing the next line."""
    path = out / "train" / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def trained_keys(out: Path) -> list[int]:
    """The keys of all fresh groups that the steps of a run trained on, in the order of its steps."""
    keys = []
    for line in (out / "train" / "steps.jsonl").read_text().splitlines():
        for group in json.loads(line)["trained"]:
            if group["source"] == "fresh":
                keys.append(group["key"])
    return keys


def used_keys(out: Path) -> set[int]:
    """The keys of all groups that the steps of a run took: trained on, left out, or unusable."""
    keys = set()
    for line in (out / "train" / "steps.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name in ("trained", "left_out", "unusable"):
            keys |= {group["key"] for group in record[name]}
    return keys


def stored_keys(out: Path, keys: set[int]) -> set[int]:
    """Those of `keys` whose items the run's server has stored."""
    server = start_server(out / "config" / "serve.toml", address="127.0.0.1:0")
    try:
        with ReplayClient(server.address, timeout=PATIENCE) as client:
            return {item.key for item in client.get(keys, payloads=False)}
    finally:
        server.kill()
