"""Faults of a machine, and what every kill program is made of: clients at work, processes that are killed, books.

A program starts its parts, kills one of them at a random moment, again and again, and compares what is there with its
books. What it compares is its own.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from replay_client import ReplayClient, RolloutGroup
from replay_client.errors import DeadlineExceededError, ReplayError
from replay_client.testing import PATIENCE, until
from replay_protos import shared_memory
from tests.kit.processes import Servers


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

    def violated(self, what: str) -> None:
        self.violations.append(what)

    def killed(self) -> None:
        self.totals["kills"] += 1


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


class Trainer(Crew):
    """Takes groups, looks at each, and publishes a version after every so many."""

    refusals = DeadlineExceededError

    def __init__(
        self, address: str, books: Books, look: Callable[[RolloutGroup], None], groups_per_step: int, weights: str = ""
    ) -> None:
        self.groups, self._since = 0, time.monotonic()
        self._look, self._groups_per_step, self._weights = look, groups_per_step, weights
        super().__init__(address, books, [self.train], timeout=60.0)

    def train(self, client: ReplayClient) -> None:
        if time.monotonic() - self._since > BLOCKED:
            self.stopping.set()
            self.books.violated(f"no group for {BLOCKED:g} s")
        (sample,) = client.sample("rollouts", timeout=0.2)
        self._look(sample.group)
        self.groups, self._since = self.groups + 1, time.monotonic()
        if self.groups % self._groups_per_step == 0:
            client.set_policy_version(self.groups // self._groups_per_step, weights=self._weights)


class Fleet:
    """Processes of which one is killed now and then, and replaced by another."""

    def __init__(
        self, begin: Callable[[], BaseProcess], size: int, books: Books, rng: random.Random, may_end: bool = False
    ) -> None:
        """`may_end`: a process that ends by itself, with status 0, is in good order."""
        self._begin, self._books, self._rng, self._may_end = begin, books, rng, may_end
        self.running = [begin() for _ in range(size)]

    def kill_one(self, when: Callable[[BaseProcess], bool] = lambda process: True) -> None:
        """`when`: whether it is the moment to kill this one."""
        victim = self._rng.randrange(len(self.running))
        process = self.running[victim]
        if (code := process.exitcode) is not None:
            if code or not self._may_end:
                self._books.violated(f"a process ended by itself, with {code}")
            return
        until(lambda: when(process), "the moment to kill does not come", BLOCKED)
        self._kill(process)
        self.running[victim] = self._begin()

    def _kill(self, process: BaseProcess) -> None:
        if process.exitcode is None:
            self._books.killed()
        process.kill()
        process.join()

    def kill_all(self) -> None:
        for process in self.running:
            self._kill(process)


def kill_and_finish(
    running: Servers,
    client: ReplayClient,
    trainer: Any,
    rng: random.Random,
    generator: Callable[..., BaseProcess],
    helper: Callable[[], BaseProcess],
    counts: tuple[int, int, int],
    fleet: tuple[int, int],
    *stages: str,
) -> None:
    """Kills processes as `counts` says, each after the trainer got one or two more groups, and then every generator.
    New generators finish the groups that are left; `counts`: of helpers, generators, servers."""
    books = trainer.books
    generating, helping = (Fleet(*each, books, rng) for each in zip((generator, helper), fleet, strict=True))
    ways = helping.kill_one, generating.kill_one, partial(running.kill_for_a_while, books, rng)
    try:
        for kill in rng.sample(ways, sum(counts), counts=counts):
            enough = len(books.groups) + rng.randrange(1, 3)
            until(lambda enough=enough: len(books.groups) >= enough or books.violations, "nobody inserts", BLOCKED)
            time.sleep(rng.random() * 0.3)
            kill()
            if books.violations:
                break
    finally:
        generating.kill_all()
    finish(client, trainer, books, partial(generator, new_groups=False), *stages)
    helping.kill_all()


def finish(
    client: ReplayClient, trainer: Trainer, books: Any, finisher: Callable[[], BaseProcess], *stages: str
) -> None:
    """Lets others finish what is left in the table "partial_groups", and whoever lives what is in later `stages`.

    Then no permit is out, nothing is left, and what was accepted is what the trainer got.
    """

    def left(*names: str) -> int:
        tables = client.server_info().tables
        return sum(tables[name].size + tables[name].reserved for name in names)

    deadline = time.monotonic() + BLOCKED
    while left("partial_groups") and not books.violations and time.monotonic() < deadline:
        process = finisher()
        process.join(BLOCKED)
        if process.exitcode != 0:
            books.violated(f"who was to finish what is left ended with {process.exitcode}")
        time.sleep(0.1)  # until the leases of the dead end
    until(lambda: not left(*stages, "rollouts") or books.violations, "groups stay", BLOCKED)
    # A generator that is killed between its permit and the spec of its group leaves the permit for its lease.
    until(lambda: not client.server_info().admission.running, "permits of the dead stay away", BLOCKED)  # type: ignore[union-attr]
    trainer.stop()
    admission, held = client.server_info().admission, left("partial_groups", *stages)
    assert admission is not None
    if (admission.running, admission.partial_groups, held) != (0, 0, 0):
        books.violated(
            f"{admission.running} permits running, {admission.partial_groups} partial_groups, {held} items left"
        )
    if admission.accepted != len(books.groups):
        books.violated(f"{admission.accepted} groups accepted, and the trainer got {len(books.groups)}")


def settle(client: ReplayClient) -> None:
    """Waits until the server has ended what clients had open that are gone: their batches are back in the tables."""

    def is_settled() -> bool:
        info = client.server_info()
        waiting = sum(table.inserting.count + table.sampling.count for table in info.tables.values())
        return not (info.insert_streams or info.sample_streams or waiting)

    until(is_settled, "the server holds something for clients that are gone")


def pull_the_plug(
    servers: Servers, kills: int, seed: int, books: Any, crew_of: Callable[[str, random.Random], Crew], counted: str
) -> None:
    """Kills one of the servers so often, each time under the load of another crew, and compares what comes back.

    `crew_of` starts a crew at an address. `counted`: of this it does ten at least before the kill. After the kill all
    clients go, or they go on by themselves with the server that is back.
    """
    rng, several = random.Random(seed), len(servers.running) > 1
    while books.totals["kills"] < kills and not books.violations:
        crew = crew_of(servers.address, random.Random(rng.random()))
        enough = books.totals[counted] + 10
        time.sleep(0.1 + rng.random())
        # On a loaded machine the clients may not have begun by then.
        until(partial(crew.are_at_work, counted, enough), f"{counted}: none")
        victim = rng.randrange(len(servers.running))
        servers.kill(victim)
        books.killed()
        if several:
            time.sleep(rng.random())  # the others go on without it
        if clients_go := rng.random() < 0.5:
            crew.stop(at_once=True)
        began = time.monotonic()
        servers.restart(victim)
        books.totals["milliseconds of restarts"] += int(1000 * (time.monotonic() - began))
        if not clients_go:
            time.sleep(0.3 + rng.random())
            crew.stop()
        with ReplayClient(servers.address) as client:
            if several:
                until(lambda client=client: not client.server_info().gone, "a server does not come back")
            settle(client)
            books.check(client)


def program(run: Callable[..., Books], **options: Any) -> None:
    """The command line of a kill program: `--seed`, and these options with their defaults; `run` gets all and a folder.

    Exit status 1 if anything was wrong.
    """
    parser = argparse.ArgumentParser()
    for name, default in {"seed": random.randrange(10**6), **options}.items():
        kind: dict[str, Any] = {"action": "store_true"} if default is False else {"type": type(default)}
        parser.add_argument(f"--{name}", default=default, **kind)
    given, began = vars(parser.parse_args()), time.monotonic()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    with tempfile.TemporaryDirectory() as folder:
        books = run(folder=Path(folder), **given)
    totals = ", ".join(f"{count} {what}" for what, count in sorted(books.totals.items()))
    print(f"seed {given['seed']}, {time.monotonic() - began:.0f} s: {totals}")
    print(f"{len(books.violations)} violations", *books.violations[:20], sep="\n  ")
    sys.exit(bool(books.violations))
