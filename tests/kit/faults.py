"""Faults of a machine, and clients at work with books about what they did and what was found wrong."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from replay_client import ReplayClient
from replay_client.errors import ReplayError
from replay_client.testing import PATIENCE
from replay_protos import shared_memory


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system in memory of this size, such as 24m, at `folder`; skips where none can be mounted."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    mount = subprocess.run(command, capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mount.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """A Ctrl-C raises KeyboardInterrupt, whatever another test of this process has set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


BLOCKED = 300.0
"""Seconds after which somebody counts as blocked, on a machine that is busy."""


class Books:
    """What was counted, and what was found wrong."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.totals: Counter[str] = Counter()
        self.violations: list[str] = []
        self.report: list[str] = []
        """Lines that a program prints beside the totals."""

    def violated(self, what: str) -> None:
        self.violations.append(what)

    def killed(self, victim: str) -> None:
        """`victim`: the kind of what was killed, in the plural."""
        self.totals["kills"] += 1
        self.totals[f"kills of {victim}"] += 1

    def add(self, books: Books) -> None:
        """Adds what other books have."""
        self.totals.update(books.totals)
        self.violations += books.violations
        self.report += books.report


class Crew:
    """Clients at work, each on a thread that calls its function again and again, until `stop`."""

    refusals: type[Exception] = ReplayError
    """What is normal life. Any other error is wrong."""
    pause = 0.01
    """Seconds after a refusal."""

    def __init__(
        self, address: str, books: Books, works: Sequence[Callable[[ReplayClient], None]], timeout: float = 15.0
    ) -> None:
        self.address, self.books, self._timeout = address, books, timeout
        self.stopping = threading.Event()
        self.clients: list[ReplayClient] = []
        self.threads = [threading.Thread(target=self._run, args=(work,), name=work.__name__) for work in works]
        for thread in self.threads:
            thread.start()

    def client(self) -> ReplayClient:
        return ReplayClient(self.address, timeout=self._timeout)

    def _run(self, work: Callable[[ReplayClient], None]) -> None:
        client = self.client()
        self.clients.append(client)
        try:
            while not self.stopping.is_set():
                try:
                    work(client)
                except self.refusals as error:
                    self.books.totals[f"refusals of {work.__name__}: {type(error).__name__}"] += 1
                    self.stopping.wait(self.pause)
        except Exception as error:
            self.books.violated(f"{work.__name__}: {error!r}")
        finally:
            client.close()

    def are_at_work(self, what: str, enough: int) -> bool:
        """Whether so much was counted of `what`, and somebody has a ring where all payloads are to go through one.

        A ring that comes late lets the first payloads go without it.
        """
        # As far as the clients know by themselves.
        over_rings = sum(client._aio.transport == "shared memory" for client in list(self.clients))
        if self.books.totals[what] < enough or (shared_memory.MIN_SHARED == 1 and not over_rings):
            return False
        self.books.totals["clients over rings"] += over_rings
        return True

    def stop(self, at_once: bool = False) -> None:
        """`at_once`: in the middle of whatever the clients do."""
        self.stopping.set()
        if at_once:
            for client in list(self.clients):
                client.close()
        for thread in self.threads:
            thread.join(timeout=PATIENCE)
            if thread.is_alive():
                self.books.violated(f"{thread.name} hangs")
