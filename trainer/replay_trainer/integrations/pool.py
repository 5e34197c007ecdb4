"""GroupPool: one replay table as another project's trainer uses it. Draws groups, inserts groups, counts versions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from replay_client import ReplayClient, RolloutGroup, Sample
from replay_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ServerClosedError,
    ServerUnavailableError,
    StaleItemError,
    TableFullError,
)
from replay_client.scoring import group_priority, is_zero_variance
from replay_trainer.replacement import OnEmpty

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PATIENCE = 60.0
"""Seconds that a call waits for a server that restarts."""
_PAUSE = 0.1
"""Seconds between two attempts."""


class GroupPool:
    """A table of informative groups. Every call waits for a server that restarts."""

    def __init__(
        self,
        client: ReplayClient,
        table: str = "replay",
        on_empty: OnEmpty = "keep",
        timeout: float | None = 60.0,
        max_staleness: int | None = None,
    ) -> None:
        """`on_empty="wait"` waits up to `timeout` seconds for groups; the other two do not wait.

        Raises TableNotFoundError if the server has no such table.
        """
        self.client = client
        self.table = table
        self.on_empty = on_empty
        self.timeout = timeout
        self.max_staleness = max_staleness
        self._offset: int | None = None
        self._warned = False
        client.server_info(tables=[table])

    def advance(self, step: int) -> int:
        """Tell the server that `step` updates are done. Returns the policy version of groups generated now.

        Several trainers may share a server. So the version never goes back: a trainer that joins starts to count at
        the version that it finds, and a trainer behind the others generates at the version of the fastest.
        """
        version = self.version_of(step)
        current = self._call(self.client.policy).version
        if version > current:
            # InvalidRequestError: another trainer has set a higher version since.
            with suppress(InvalidRequestError):
                self._call(partial(self.client.set_policy_version, version))
        return max(version, current)

    def version_of(self, step: int, at_least: int = 0) -> int:
        """The policy version after `step` updates. The first call fixes where it counts on.

        It counts on from the server's version, or from `at_least` if that is higher.
        """
        if self._offset is None:
            self._offset = max(0, max(self._call(self.client.policy).version, at_least) - step)
        return step + self._offset

    def draw(self, count: int, scope: str, accept: Callable[[RolloutGroup], bool]) -> list[Sample]:
        """At most `count` informative samples that `accept` takes; fewer only if the table has no more.

        The server gives no group twice under one `scope`: ranks that name the same scope in a step get different
        groups. Raises DeadlineExceededError with on_empty="wait" if groups are missing at the end of the timeout.
        """
        chosen: list[Sample] = []
        waits = self.on_empty == "wait"
        while (missing := count - len(chosen)) > 0:
            least, timeout = (missing, self.timeout) if waits else (1, 0.0)
            try:
                sample = partial(self.client.sample, self.table, missing, min_samples=least)
                drawn = self._call(partial(sample, timeout=timeout, scope=scope))
            except DeadlineExceededError:
                if waits:
                    raise
                break
            chosen += [sample for sample in drawn if self._usable(sample) and accept(sample.group)]
        return chosen

    def insert(self, groups: Iterable[RolloutGroup]) -> int:
        """Insert groups with their `group_priority`. Returns how many the table took."""
        taken = 0
        for group in groups:
            priorities = {self.table: group_priority(group.rewards, group.advantages)}
            try:
                self._call(partial(self.client.insert, group, priorities))
                taken += 1
            except (StaleItemError, TableFullError) as error:
                # The trainer has used the group already: only its second use is lost.
                if not self._warned:
                    logger.warning("%s refused a group; this is the only warning: %s", self.table, error)
                self._warned = True
        return taken

    def _usable(self, sample: Sample) -> bool:
        fresh_enough = self.max_staleness is None or sample.info.staleness <= self.max_staleness
        return fresh_enough and not is_zero_variance(sample.group.rewards)

    def _call(self, attempt: Callable[[], T]) -> T:
        """The result of `attempt`. A server that went away has _PATIENCE seconds to come back."""
        deadline: float | None = None
        while True:
            try:
                return attempt()
            except (ServerUnavailableError, ServerClosedError):
                deadline = deadline or time.monotonic() + _PATIENCE
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)
