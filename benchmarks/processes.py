"""Processes of a benchmark: servers, and clients that obey commands. Each ends with its `with` block."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from benchmarks.environments import ROOT
from benchmarks.loops import Result, Task

_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "NONE", "RAY_USAGE_STATS_ENABLED": "0"}

_LEAVING_SECONDS = 10.0
"""Seconds that a client has to close its session: TransferQueue must end its actors."""


class Failed(Exception):
    """Something could not be measured. The message has the reason."""


class Process:
    """A child process with pipes for lines, whose errors are kept for the report."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env=os.environ | _QUIET,
        )
        self._received = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"the process has ended: {self.last_words()}") from None

    def read(self, timeout: float) -> str:
        """The next line that the process writes. Raises Failed if none comes within `timeout` seconds."""
        assert self._process.stdout is not None
        end = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise Failed(f"no answer within {timeout:.0f} s: {self.last_words()}")
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    raise Failed(f"the process has ended: {self.last_words()}")
                self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def lines(self) -> list[str]:
        """The lines that the process has written by now."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while selector.select(0):
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    break
                self._received += data
        *lines, self._received = self._received.split(b"\n")
        return [line.decode() for line in lines]

    def wait(self, timeout: float) -> None:
        """Waits until the process has ended with status 0. Raises Failed."""
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Failed(f"it did not end within {timeout:.0f} s") from None
        if status:
            raise Failed(f"the process ended with status {status}: {self.last_words()}")

    def last_words(self) -> str:
        """The last line that the process wrote to standard error."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 10_000))
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        if not lines:
            return "it said nothing"
        # A report may be published, so it must not name the folder of the repository on this machine.
        return lines[-1][:500].replace(str(ROOT), ".")

    def close_input(self) -> None:
        """Closes the standard input of the process. It ends then."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self, patience: float = 0.0) -> None:
        """Closes its input, waits for `patience` seconds, and kills it."""
        assert self._process.stdout is not None
        self.close_input()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class Server(Process):
    """A process that prints "listening on ADDRESS" once it answers."""

    def __init__(self, command: Sequence[str], patience: float = 60.0) -> None:
        super().__init__(command)
        try:
            line = self.read(timeout=patience)
            while not line.startswith("listening on "):
                line = self.read(timeout=patience)
        except BaseException:
            self.end()
            raise
        self.address = line.removeprefix("listening on ").strip()

    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM (Linux)."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class Client(Process):
    """A process of benchmarks.worker, which connects to a server."""

    def __init__(self, python: Path, system: str) -> None:
        super().__init__([str(python), "-m", "benchmarks.worker", system])

    def start(self, command: dict[str, Any]) -> None:
        self.write(json.dumps(command))

    def answer(self, timeout: float) -> Any:
        answer = json.loads(self.read(timeout))
        if "error" in answer:
            raise Failed(answer["error"])
        return answer["result"]


def connect_all(clients: Sequence[Client], address: str) -> None:
    """Connects the clients to a server. All load their libraries at the same time."""
    for client in clients:
        client.start({"do": "connect", "address": address})
    _answers(clients, timeout=120.0)


def end_all(clients: Sequence[Client]) -> None:
    """Ends the clients, after each has had time to close its session."""
    for client in clients:
        client.close_input()
    for client in clients:
        client.end(patience=_LEAVING_SECONDS)


def run_all(clients: Sequence[Client], tasks: Sequence[Task]) -> list[Result]:
    """Lets each client prepare its task, then all of them start at once; returns their results."""
    for client, task in zip(clients, tasks, strict=True):
        client.start({"do": "prepare", "task": asdict(task)})
    patience = 60.0 + 10 * max(task.seconds for task in tasks) + max(task.items for task in tasks) / 1_000
    _answers(clients, patience)
    for client in clients:
        client.start({"do": "go"})
    return _answers(clients, patience)


def _answers(clients: Sequence[Client], timeout: float) -> list[Any]:
    """The answers of all clients.

    The first failure is raised after every client has answered, so that no answer is left in a pipe.
    """
    answers = []
    failure = None
    for client in clients:
        try:
            answers.append(client.answer(timeout))
        except Failed as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return answers
