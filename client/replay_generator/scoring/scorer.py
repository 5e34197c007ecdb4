"""GroupScorer: gives rewards to groups that generators have played, and hands them on.

    [ unscored ] ──draw, under a lease──▶ rewards, rollout by rollout ──▶ one insert: the scored group takes its place

Any number of them share a table: each draws a group when it has few left, so that a slow one takes fewer. Who dies
leaves its groups to the others when its leases end. Then reward functions run again; their results count once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_client import AsyncReplayClient, RolloutGroup, Sample, tracing
from replay_client.errors import DeadlineExceededError, LeaseEndedError, ReplayError
from replay_client.scoring import carries_gradient
from replay_client.waits import LAST_WORD, beat
from replay_generator.building import UnderConstruction, decoded, lose
from replay_generator.metrics import GeneratorMetrics, GeneratorStats, GroupTimes
from replay_generator.prompts import Prompt, PromptError
from replay_generator.rewards import RewardError, Rewards, Scorer
from replay_generator.rollouts import Rollout
from replay_generator.scoring.config import ScorerConfig
from replay_generator.scoring.groups import ByFunction, LeftOut, Scoring
from replay_generator.server import InsertingServer, run_worker
from replay_generator.supply import LeasedItems

logger = logging.getLogger(__name__)

_CONCURRENCY = 8
_PAUSE = 1.0
"""Seconds before the second attempt."""
_DRAW_SECONDS = 30.0
_MOST_DROPPED = 20
"""When so many groups in a row were dropped, the run ends: the cause is not a single group."""


class GroupScorer:
    """Draws groups without rewards, scores them and inserts them, until `stop` or an error.

    Whatever passes by itself is waited for: a full table, a server that is away or busy. `run` raises
    ServerUnavailableError for one that stays away longer than the client's timeout, and PromptError when all groups
    fail.
    """

    def __init__(
        self,
        client: AsyncReplayClient,
        reward: Rewards | None,
        config: ScorerConfig,
        *,
        keep: Callable[[RolloutGroup], bool] | None = None,
        on_group: Callable[[GeneratorStats], None] | None = None,
    ) -> None:
        """`reward` None: rollouts bring their own. `keep` decides whether a scored group is handed on. `on_group` is
        called on the event loop after each group, with the current statistics. The client stays the caller's."""
        self.config = config
        self._client, self._on_group = client, on_group
        self._metrics = GeneratorMetrics(solved_reward=1.0)
        self.stats = stats = self._metrics.stats
        """`skipped` counts groups that were dropped because scoring failed."""
        keep = carries_gradient if config.drop_zero_variance else keep
        scorer = Scorer(reward, threads=config.concurrency, timeout=config.reward_timeout)
        self._scoring = RolloutScoring(scorer, config, config.source, keep, stats)
        self._server = InsertingServer(client, config, stats)
        what = "groups without rewards"
        self._items = LeasedItems(client, self._server.answer, config.source, config.lease, what, decoded, lose, stats)
        self._left = 0  # rollouts of the groups that it has
        self._handed_on = asyncio.Event()
        self._ended = asyncio.Event()
        self._dropped_in_a_row = 0

    async def run(self) -> None:
        """Score until `stop` is called or something fails. What is not handed on by then goes back."""
        await self._server.look(self.config.source)
        with contextlib.suppress(ReplayError):
            await self._client.describe(self.config.described())
        work = asyncio.create_task(self._work())
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()  # it has failed
        finally:
            work.cancel()
            ended.cancel()
            await asyncio.gather(work, ended, return_exceptions=True)
            await self._items.close()
        await self._client.leave(timeout=LAST_WORD)

    def stop(self) -> None:
        """Draw and score no more."""
        self._ended.set()

    async def _work(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    # Twice: slots that a slow rollout's group leaves free are for the next group.
                    while self._left >= 2 * (self.config.concurrency or _CONCURRENCY):
                        self._handed_on.clear()
                        await self._handed_on.wait()
                    with contextlib.suppress(DeadlineExceededError):
                        sample, work = await self._items.draw(_DRAW_SECONDS)
                        self._left += len(work.rollouts)
                        score = partial(self._score, sample, work)
                        tasks.create_task(tracing.in_span("replay.score", score))
        except ExceptionGroup as failed:
            raise failed.exceptions[0]  # noqa: B904  its cause tells more than the group

    async def _score(self, sample: Sample, work: UnderConstruction) -> None:
        """Score one group, and hand it on or drop it."""
        info, times = sample.info, GroupTimes()
        try:
            group, by_function = await self._scoring.score(work, info.policy_version, times, work.opening.failures)
            group.meta |= tracing.carrier()
            await self._server.insert_scored(group, work.opening, info.tags, closes=(sample,))
        except LeaseEndedError:
            self.stats["leases_lost"] += 1  # another one scores it
            self._items.let_go([sample])
        except (LeftOut, PromptError) as error:
            await self._items.end([sample])
            self._drop(error)
        else:
            self._items.let_go([sample])
            self._dropped_in_a_row = 0
            self._metrics.count_inserted(group, by_function, info.staleness, times)
        finally:
            self._left -= len(work.rollouts)
            self._handed_on.set()
        beat()
        if self._on_group is not None:
            self._on_group(self.stats)

    def _drop(self, error: LeftOut | PromptError) -> None:
        """Counts a group that is not handed on. Its permit is back."""
        if isinstance(error, LeftOut):
            if error.counts_as is not None:
                self.stats[error.counts_as] += 1
            return
        self.stats["skipped"] += 1
        logger.warning("dropped: %s", error)
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= _MOST_DROPPED:
            raise PromptError(f"{_MOST_DROPPED} groups in a row were dropped, the last because of: {error}")


class RolloutScoring(Scoring):
    """Scores each rollout on its own, a bounded number at a time, and again if that fails."""

    def __init__(self, scorer: Scorer, config: ScorerConfig, *others: Any) -> None:
        super().__init__(scorer, config, *others)
        self._slots = asyncio.Semaphore(config.concurrency or _CONCURRENCY)
        self._attempts = config.attempts

    async def _rewards(
        self, scorer: Scorer, prompt: Prompt, rollouts: list[Rollout]
    ) -> tuple[list[Rollout], npt.NDArray[np.float32], ByFunction, list[str]]:
        parts = [rollouts] if scorer.scores_groups else [[rollout] for rollout in rollouts]
        finished, rewards, functions, errors = list[Rollout](), list[Any](), list[ByFunction](), list[RewardError]()
        results = await asyncio.gather(*(self._tried(scorer, prompt, part) for part in parts))
        for part, result in zip(parts, results, strict=True):
            if isinstance(result, RewardError):
                errors += [result] * len(part)
            else:
                finished += part
                rewards.append(result[0])
                functions.append(result[1])
        failures = self.see_failures(prompt, errors, len(finished), len(rollouts))
        if len({*map(frozenset, functions)}) > 1:
            raise PromptError(f"prompt {prompt.prompt_id!r}: some rollouts have a reward of their own, and some none")
        by_function = {name: np.concatenate([each[name] for each in functions]) for name in functions[0]}
        return finished, np.concatenate(rewards), by_function, failures

    async def _tried(
        self, scorer: Scorer, prompt: Prompt, rollouts: list[Rollout]
    ) -> tuple[npt.NDArray[np.float32], ByFunction] | RewardError:
        """The rewards, or why there are none after all attempts."""
        texts = [rollout.text for rollout in rollouts]
        async with self._slots:
            for attempt in range(self._attempts):
                if attempt:
                    await asyncio.sleep(_PAUSE * 2 ** (attempt - 1))
                try:
                    return await scorer.score(prompt.row, texts, rollouts)
                except RewardError as error:
                    failure = error
        return failure


def run_scorer(
    connect: Callable[[], AsyncReplayClient],
    reward: Rewards | None,
    config: ScorerConfig,
    *,
    keep: Callable[[RolloutGroup], bool] | None = None,
    on_group: Callable[[GeneratorStats], None] | None = None,
) -> GeneratorStats:
    """Run a GroupScorer to its end, for callers without an event loop. Returns the last statistics.

    As `run_generator` does: `connect` makes the client on the event loop; Ctrl-C and SIGTERM stop the run gracefully.
    """

    return run_worker(connect, lambda client: GroupScorer(client, reward, config, keep=keep, on_group=on_group))
