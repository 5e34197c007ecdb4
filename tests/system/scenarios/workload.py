"""What every scenario of kills is made of: a workload with its books, fleets of processes, and a trainer's client."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path

from replay_client import ReplayClient, RolloutGroup
from replay_client.errors import DeadlineExceededError
from replay_client.testing import until
from tests.kit.faults import BLOCKED, Books, Crew


class Workload(ABC):
    """The processes and clients of a scenario at work, and the books about them.

    `tests.system.kills` calls `start`, then `work` and `kill` in turns, then `finish`, and `close` whatever happened.
    """

    is_over = False
    """Whether nothing can be killed any more. The kills that are left then get another workload."""

    def __init__(self, folder: Path, rng: random.Random, kills: int, books: Books) -> None:
        """`kills`: how many are to come."""
        self.folder = folder
        self.rng = rng
        self.kills = kills
        self.books = books
        self.exits = ExitStack()
        """What `close` ends, the last one first."""

    @abstractmethod
    def start(self) -> None:
        """Starts all processes and clients."""

    @abstractmethod
    def work(self) -> None:
        """Returns at a random moment, after some work has been done."""

    @abstractmethod
    def kill(self, victim: str) -> None:
        """Kills a victim of this kind; it comes back, or another one takes its place."""

    @abstractmethod
    def finish(self) -> None:
        """Ends the work in good order, and compares what is there with the books."""

    def close(self) -> None:
        """Ends whatever still runs."""
        self.exits.close()


class Fleet:
    """Processes of one kind. One of them is killed now and then, and another one takes its place."""

    def __init__(
        self,
        kind: str,
        begin: Callable[[], BaseProcess],
        size: int,
        books: Books,
        rng: random.Random,
        may_end: bool = False,
    ) -> None:
        """`kind`: their name in the books. `may_end`: a process may end by itself, with status 0."""
        self._kind = kind
        self._begin = begin
        self._books = books
        self._rng = rng
        self._may_end = may_end
        self.running = [begin() for _ in range(size)]

    def kill_one(self, when: Callable[[BaseProcess], bool] = lambda process: True) -> None:
        """`when`: whether it is the moment to kill this one."""
        number = self._rng.randrange(len(self.running))
        process = self.running[number]
        code = process.exitcode
        if code is not None:
            if code or not self._may_end:
                self._books.violated(f"a process ended by itself, with {code}")
            return
        until(lambda: when(process), "the moment to kill does not come", BLOCKED)
        self._kill(process)
        self.running[number] = self._begin()

    def _kill(self, process: BaseProcess) -> None:
        if process.exitcode is None:
            self._books.killed(self._kind)
        process.kill()
        process.join()

    def kill_all(self) -> None:
        for process in self.running:
            self._kill(process)


class Trainer(Crew):
    """A client that takes groups, looks at each, and publishes a version after every so many."""

    def __init__(
        self,
        address: str,
        books: Books,
        look: Callable[[RolloutGroup], None],
        groups_per_step: int,
        weights: str = "",
        refusals: type[Exception] = DeadlineExceededError,
    ) -> None:
        self.refusals = refusals
        self.groups = 0
        self._since = time.monotonic()
        """When the last group came."""
        self._look = look
        self._groups_per_step = groups_per_step
        self._weights = weights
        super().__init__(address, books, [self.train], timeout=60.0)

    def train(self, client: ReplayClient) -> None:
        if time.monotonic() - self._since > BLOCKED:
            self.stopping.set()
            self.books.violated(f"no group for {BLOCKED:g} s")
        (sample,) = client.sample("rollouts", timeout=0.2)
        self._look(sample.group)
        self.groups += 1
        self._since = time.monotonic()
        if self.groups % self._groups_per_step == 0:
            client.set_policy_version(self.groups // self._groups_per_step, weights=self._weights)
