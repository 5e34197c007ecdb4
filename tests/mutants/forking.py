"""A process that has imported the heavy packages, and that forks for each run of pytest.

Its working directory is a copy of the repository. It reads a request a line, as JSON, and answers each with the status
of pytest and the first test that failed. A fork begins without the ten seconds of imports, and it shares no module of
ours with the runs before it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

HEAVY = (
    "coverage",
    "numpy",
    "torch",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.auto_factory",
    "transformers.models.qwen2.modeling_qwen2",
    "tokenizers",
    "datasets",
    "peft",
    "accelerate",
    "openai",
    "hypothesis",
    "msgpack",
    "typer",
    "rich",
    "pydantic",
    "aiohttp",
)
HUNG = -1
"""The status of a run that had not ended in its time, and was killed with its children."""


class ForkingPytest:
    """Runs pytest in forks of one process, one run after the other."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.forking"],
            cwd=folder,
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, arguments: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """The status of pytest, or HUNG, and the id of the first test that failed. `environ`: further variables."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"arguments": list(arguments), "seconds": seconds, "environ": dict(environ or {})}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status, failed = json.loads(self._process.stdout.readline())
        return status, failed

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class FirstFailure:
    """A plugin of pytest that writes the id of the first test that failed into a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.file.exists():
            self.file.write_text(report.nodeid)


def _forked(arguments: Sequence[str], seconds: float, environ: Mapping[str, str]) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as folder:
        failure = Path(folder, "failure")
        child = os.fork()
        if child == 0:
            _run(arguments, failure, environ)
        status = _waited(child, time.monotonic() + seconds)
        failed = failure.read_text() if failure.exists() else ""
    return status, failed


def _waited(child: int, deadline: float) -> int:
    """The status of a child, which is killed with all of its children at the deadline, or after its end."""
    try:
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return HUNG
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def _run(arguments: Sequence[str], failure: Path, environ: Mapping[str, str]) -> None:
    """Runs pytest in this process, which ends with its status."""
    status = 3
    try:
        os.setsid()
        os.environ.update(environ)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        status = int(pytest.main(list(arguments), plugins=[FirstFailure(failure)]))
    finally:
        os._exit(status)


def main() -> None:
    # Requests and answers have descriptors of their own: what a run prints is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in HEAVY:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.startswith("replay_")]
    assert not ours, f"a heavy package imports {ours}, and a mutant in it would not be seen"
    for line in sys.stdin:
        answer = _forked(**json.loads(line))
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
