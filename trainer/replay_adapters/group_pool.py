"""GroupPool: a replay table for the trainer of another project.

A GroupPool draws groups, inserts groups, and counts policy versions. With `on_unavailable="continue"`, the run goes on
while the server is away: draws return no groups, inserts are lost, and each further call tries once to reach the
server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from replay_client import ReplayClient, RolloutGroup, Sample
from replay_client.errors import (
    GONE,
    DeadlineExceededError,
    InvalidRequestError,
    ReplayError,
    ServerBusyError,
    StaleItemError,
    StorageError,
    TableFullError,
)
from replay_client.scoring import carries_gradient, trained_priority
from replay_client.settings import check_choice
from replay_client.waits import Deadline, try_patiently
from replay_trainer.config import OnEmpty

logger = logging.getLogger(__name__)
K = TypeVar("K")
T = TypeVar("T")

OnUnavailable = Literal["continue", "raise"]
"""The reaction to a server that does not come back in time.
continue: train on fresh groups alone, and try again with the next call. raise: end the run."""
AWAY = (*GONE, ServerBusyError, StorageError)
"""Errors which mean that the server cannot answer now."""
_PAUSE = 0.1
"""The longest pause between two attempts of a call, in seconds."""
_RETRY = 1.0
"""Limit, in seconds, on a call of `ask` while the server is known to be away. It makes only one attempt then."""


def why_no_rows(group: RolloutGroup, *, sequences: bool = False, vocabulary: int | None = None) -> str:
    """The reason why a trainer of rows cannot train on a group; empty: it can.

    Such a trainer has a row for each sequence, and one advantage for all tokens of a row. `sequences`: True if the
    trainer takes rollouts of several sequences. If False, it counts each row as a rollout, so a rollout of several
    sequences would have too much weight. `vocabulary`: the number of tokens of the trainer's model; None: unknown.
    """
    highest_id = max(group.prompt_ids.max(initial=0), group.completion_ids.max(initial=0))
    if vocabulary is not None and highest_id >= vocabulary:
        return f"the token {highest_id} of another tokenizer (this model has {vocabulary})"
    if group.token_advantages is not None:
        return "token_advantages"
    if not sequences and group.num_sequences > group.group_size:
        return "sequence_counts with several sequences for a rollout"
    return ""


@dataclass
class GroupPool:
    """A table of informative groups: groups that carry a gradient. Calls wait for a server that restarts.

    Raises TableNotFoundError if the server has no such table, ServerUnavailableError if no server answers, and
    ValueError for an unknown `on_unavailable`.
    """

    client: ReplayClient
    table: str = "replay"
    on_empty: OnEmpty = "keep"
    """wait: a draw waits up to `timeout` for groups. With any other value a draw does not wait, and may return fewer
    groups."""
    timeout: float | None = 60.0
    """Seconds that a call waits for a server that went away and, with `on_empty="wait"`, for groups."""
    max_staleness: int | None = None
    """The most policy versions by which a drawn group may lag behind; None: no limit."""
    sequences: bool = False
    """True if the trainer takes rollouts of several sequences: see `why_no_rows`."""
    vocabulary: int | None = None
    """The number of tokens of the trainer's model; None: unknown."""
    on_unavailable: OnUnavailable = "continue"
    """The reaction to a server that is away for `timeout`: see OnUnavailable."""
    problem: ReplayError | None = field(default=None, init=False)
    """The error of the last call, if this call did not reach the server; None: the last call reached it."""

    def __post_init__(self) -> None:
        """Raises the errors that the class names."""
        check_choice("on_unavailable", self.on_unavailable, get_args(OnUnavailable))
        self._away_since = 0.0
        """The time at which the server went away, by the monotonic clock."""
        self._offset: int | None = None
        """Policy version minus step, for this trainer; None: not known yet."""
        self._warned = False
        """True after the warning that the table refused a group. This warning is logged only once."""
        self._unusable: set[int] = set()
        """The keys of the groups that a warning has named as unusable."""
        self._newly_unusable = 0
        """The number of draws of unusable groups since the last call of `take_unusable`."""
        self.client.server_info(tables=[self.table])  # raises if the server or the table is missing

    def advance(self, step: int) -> int:
        """Tells the server that `step` updates are done. Returns the policy version of groups that are generated now.

        Several trainers may share a server, so the version must never go back. A new trainer starts to count at the
        version that the server has. The groups of a slower trainer get the version of the fastest trainer.
        """
        version = self.version_of(step)
        policy = self.ask(self.client.policy)
        if policy is None:  # the server is away
            return version
        current = policy.version
        if version > current:
            # The server raises InvalidRequestError if another trainer has set a higher version since the request above.
            with suppress(InvalidRequestError):
                self.ask(self.client.set_policy_version, version)
        return max(version, current)

    def version_of(self, step: int, at_least: int = 0) -> int:
        """The policy version after `step` updates: `step` plus an offset of this trainer, which is at least 0.

        The first call that reaches the server fixes the offset. The offset is such that this call returns the highest
        of `step`, `at_least` and the server's version. While no call has reached the server, the offset is 0.
        """
        if self._offset is None:
            policy = self.ask(self.client.policy)
            if policy is not None:
                start = max(policy.version, at_least)
                self._offset = max(0, start - step)
        if self._offset is None:
            return step
        return step + self._offset

    def replace(
        self, groups: Mapping[K, RolloutGroup], scope: str, accept: Callable[[RolloutGroup], bool]
    ) -> tuple[dict[K, Sample], dict[str, float]]:
        """Draws replacements for the zero-variance groups of a step, and inserts the other groups into the table.

        Returns the replacements by place, and metrics `replay/*`. `groups`: the groups of the step, by place. A place
        is any key that the caller chooses. A group that is smaller than the largest group, because a rollout failed, is
        not replaced. `scope` and `accept` are as in `draw`.
        """
        zero_variance = [place for place, group in groups.items() if not carries_gradient(group)]
        size = max((group.group_size for group in groups.values()), default=0)
        places = [place for place in zero_variance if groups[place].group_size == size]

        def accept_of_size(group: RolloutGroup) -> bool:
            return group.group_size == size and accept(group)

        drawn = self.draw(len(places), scope, accept_of_size)
        # The groups of this step are inserted after the draw, so that the draw returns none of them.
        self.insert(group for place, group in groups.items() if place not in zero_variance)
        replaced = dict(zip(places, drawn, strict=False))  # not strict: the pool may have too few groups
        rewards = [float(group.rewards.mean()) for group in groups.values()]
        staleness = [sample.info.staleness for sample in drawn]
        metrics = {
            "replay/fresh_reward": sum(rewards) / max(1, len(rewards)),
            "replay/fresh_zero_variance": len(zero_variance) / max(1, len(groups)),
            "replay/groups_replaced": len(drawn),
            "replay/groups_missing": len(zero_variance) - len(drawn),
            "replay/groups_unusable": self.take_unusable(),
            "replay/staleness": sum(staleness) / max(1, len(staleness)),
            "replay/unavailable": float(self.problem is not None),
        }
        return replaced, metrics

    def draw(
        self, count: int, scope: str, accept: Callable[[RolloutGroup], bool], exclude: Iterable[int] = ()
    ) -> list[Sample]:
        """Draws `count` informative samples for which `accept` returns True. Returns fewer only if the table has no
        more, or if the server is away.

        The server returns no group twice under one `scope`, so ranks that name the same scope in a step get different
        groups. The server returns no group with a key in `exclude`. Groups that are too stale, or that the trainer
        cannot train on, are left out. With on_empty="wait", raises DeadlineExceededError if groups are missing at the
        end of the timeout. All requests of a draw share this timeout. It begins anew when the server was away.
        """
        chosen: list[Sample] = []
        waits = self.on_empty == "wait"
        if waits and self.problem is not None and self.ask(self.client.policy) is None:
            return chosen  # the server is still away, which `ask` has found out in less time than the request below
        excluded = tuple(exclude)
        deadline = Deadline(self.timeout)

        def sample(missing: int) -> list[Sample]:
            """Draws at most `missing` groups."""
            nonlocal deadline
            try:
                return self.client.sample(
                    self.table,
                    missing,
                    min_samples=missing if waits else 1,
                    exclude=excluded,
                    timeout=deadline.seconds if waits else 0.0,
                    scope=scope,
                )
            except AWAY:
                deadline = Deadline(self.timeout)
                raise

        # Because of the scope, each further draw returns other groups. So the loop ends when there are no further ones.
        while (missing := count - len(chosen)) > 0:
            try:
                drawn = self._call(partial(sample, missing), *AWAY)
            except DeadlineExceededError:
                if waits:
                    raise
                break  # the table has no further group
            if drawn is None:  # the server is away
                break
            chosen += [sample for sample in drawn if self._usable(sample) and accept(sample.group)]
        return chosen

    def insert(self, groups: Iterable[RolloutGroup]) -> int:
        """Inserts groups with their `trained_priority`. Returns the number of groups that the table accepted.

        If the server is away or goes away, inserts no further group.
        """
        inserted = 0
        for group in groups:
            try:
                answer = self.ask(self.client.insert, group, {self.table: trained_priority(group)})
                if answer is None:  # the server is away
                    break
                inserted += 1
            except (StaleItemError, TableFullError) as error:
                # The trainer has trained on the group already, so only its replay is lost.
                if not self._warned:
                    logger.warning("%s refused a group; this is the only warning: %s", self.table, error)
                self._warned = True
        return inserted

    def take_unusable(self) -> int:
        """Returns the number of draws of unusable groups since the last call of this method.

        An unusable group stays in the table, so it may be drawn and counted several times.
        """
        count = self._newly_unusable
        self._newly_unusable = 0
        return count

    def puts_aside(self, sample: Sample, table: str, why: str = "") -> bool:
        """Returns True if the trainer cannot train on a group from `table`, and counts this draw as one of an unusable
        group.

        `why`: the reason why the trainer cannot train on the group; empty: `why_no_rows` decides. A warning names each
        unusable group once.
        """
        why = why or why_no_rows(sample.group, sequences=self.sequences, vocabulary=self.vocabulary)
        if not why:
            return False
        self._newly_unusable += 1
        if sample.info.key not in self._unusable:
            self._unusable.add(sample.info.key)
            logger.warning(
                "the group with the key %d in table %r has %s, which this trainer cannot train on: it is rejected. "
                "Give the trainer a table without such groups",
                sample.info.key,
                table,
                why,
            )
        return True

    def _usable(self, sample: Sample) -> bool:
        """True if the trainer can train on a group, and the group is fresh enough and carries a gradient."""
        if self.puts_aside(sample, self.table):
            return False
        if self.max_staleness is not None and sample.info.staleness > self.max_staleness:
            return False
        return carries_gradient(sample.group)

    def ask(self, method: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """Calls a method of the client that does not wait for groups. Returns its result; None while the server is
        away."""
        deadline = Deadline(self.timeout if self.problem is None else _RETRY)

        def attempt() -> T:
            return method(*args, timeout=deadline.seconds, **kwargs)

        # A method that does not wait for groups misses its deadline only if the server does not answer. So this error
        # also means that the server is away.
        return self._call(attempt, *AWAY, DeadlineExceededError, deadline=deadline)

    def _call(self, attempt: Callable[[], T], *away: type[ReplayError], deadline: Deadline | None = None) -> T | None:
        """Returns the result of `attempt`, which is repeated for up to `timeout` seconds while the server is away.

        If the server is still away then, returns None or, with `on_unavailable="raise"`, raises the error of the last
        attempt. `away`: the errors which mean that the server is away. Any other error is raised at once. `deadline`:
        the time at which the attempts end in any case; None: there is no such time.
        """

        def judge(error: Exception, late: bool) -> None:
            """Raises the error unless another attempt should follow. `try_patiently` calls this after each attempt that
            failed, with `late` True if no time is left for another attempt."""
            is_over = late or (deadline is not None and deadline.passed)
            if is_over or not isinstance(error, away):
                raise error

        # If the server is known to be away, a call makes only one attempt, so that the trainer does not wait again.
        # Otherwise the attempts end `timeout` seconds after the first failure, and pauses grow up to `_PAUSE` seconds.
        patience = 0.0 if self.problem else self.timeout
        try:
            result = try_patiently(attempt, judge, patience, longest=_PAUSE)
        except away as error:
            if self.on_unavailable == "raise":
                raise
            self._note_away(error)
            return None
        if self.problem is not None:
            logger.warning("the replay server is back after %.0f s", time.monotonic() - self._away_since)
            self.problem = None
        return result

    def _note_away(self, error: ReplayError) -> None:
        """Notes that the server is away, and logs a warning if it was not away before."""
        if self.problem is None:
            self._away_since = time.monotonic()
            logger.warning(
                "the replay server is away: training goes on with fresh groups alone (see on_unavailable): %s",
                error,
            )
        self.problem = error
