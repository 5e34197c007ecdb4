"""GroupScorer: the stage that gives rewards to groups that generators have played.

    [ unscored ] ──▶ rewards, rollout by rollout; advantages; priority ──▶ [ rollouts ]

If a scorer dies, other scorers get its groups, and run the reward functions for these groups once more. But each group
is handed on only once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_client import AsyncReplayClient, RolloutGroup, Sample, tracing
from replay_client.scoring import carries_gradient
from replay_generator.config import ScorerConfig
from replay_generator.errors import PromptError
from replay_generator.groups.inserting import Handoff, run_worker
from replay_generator.groups.partial_groups import decoded
from replay_generator.groups.scoring import ByFunction, Scoring
from replay_generator.metrics import GeneratorStats, GroupTimes
from replay_generator.prompts.prompt import Prompt
from replay_generator.rewards.functions import RewardError, Rewards, Scorer
from replay_generator.rollouts.rollout import PlayedRollout
from replay_generator.stages.stage import CONCURRENCY, Stage
from replay_generator.user_code import calls as user_code

_PAUSE = 1.0
"""Seconds between the first and the second attempt at a score. Each later pause is twice as long."""


class GroupScorer(Stage):
    """A stage that gives groups their rewards. `run` also raises PromptError if too many groups in a row fail."""

    config: ScorerConfig
    part = "scorer"

    def __init__(
        self,
        client: AsyncReplayClient,
        reward: Rewards | None,
        config: ScorerConfig,
        *,
        group_filter: Callable[[RolloutGroup], bool] | None = None,
        on_group: Callable[[GeneratorStats], None] | None = None,
    ) -> None:
        """`client`: the caller owns and closes it. `reward`: the reward functions; None: the rollouts have rewards of
        their own. `group_filter`: a function that decides whether a scored group is handed on. `on_group`: a function
        that is called on the event loop after each group, with the current statistics."""
        super().__init__(client, self._score, config, on_group)
        if config.drop_zero_variance:
            group_filter = _carries_gradient_and(group_filter)
        scorer = Scorer(reward, threads=config.concurrency, timeout=config.reward_timeout)
        self._scoring = RolloutScoring(scorer, config, config.source_table, group_filter, self.stats)
        self._server.watches = self._scoring.watches
        self._rollouts = 0
        """The number of rollouts in all groups that are being scored."""

    @property
    def _has_room(self) -> bool:
        """True if another group may be drawn: the groups that are being scored have fewer than twice as many rollouts
        as can be scored at the same time. So while a group waits for its last slow rollout, other groups use the free
        slots."""
        return self._rollouts < 2 * (self.config.concurrency or CONCURRENCY)

    async def _score(self, sample: Sample) -> Handoff:
        """Scores one group. Returns the Handoff of the group, which Stage inserts in the place of the item."""
        work = decoded(sample)
        size = len(work.rollouts)
        self._rollouts += size
        try:
            group, _ = await self._scoring.score(
                work,
                sample.info.policy_version,
                GroupTimes(),  # the seconds of each part of the work, which nobody reads in a stage
                work.spec.failures,  # the errors of the rollouts that failed in the generator
            )
            group.meta |= tracing.carrier()  # the trace context, for the trainer's spans
            return self._server.hand_on(group, sample.info.tags, work.spec.key)
        finally:
            self._rollouts -= size


def _carries_gradient_and(group_filter: Callable[[RolloutGroup], bool] | None) -> Callable[[RolloutGroup], bool]:
    """Makes a filter for groups. A group passes the filter if it carries a gradient and also passes `group_filter`.
    `group_filter` None: the group need only carry a gradient."""

    def passes(group: RolloutGroup) -> bool:
        """The filter. Scoring calls it with each scored group, and leaves out a group for which it returns False."""
        if not carries_gradient(group):
            return False
        if group_filter is None:
            return True
        return user_code.decision_of(group_filter, group)

    return passes


class RolloutScoring(Scoring):
    """Scores each rollout by itself, and a bounded number of rollouts at the same time. If a reward function fails, the
    rollout is scored again, up to `attempts` times in all."""

    def __init__(self, scorer: Scorer, config: ScorerConfig, *others: Any) -> None:
        """`others`: the further arguments of Scoring, by position."""
        super().__init__(scorer, config, *others)
        self._slots = asyncio.Semaphore(config.concurrency or CONCURRENCY)
        """Limits how many batches (see `_rewards`) are scored at the same time."""
        self._attempts = config.attempts

    async def _rewards(
        self, scorer: Scorer, prompt: Prompt, played: list[PlayedRollout]
    ) -> tuple[list[PlayedRollout], npt.NDArray[np.float32], ByFunction, list[str]]:
        """Scores rollouts. Returns the rollouts that got a reward, their rewards (G,), the rewards (G,) of each
        function by its name, and the texts of the errors of the other rollouts.

        Scoring calls this method. Raises PromptError if too few rollouts got a reward.
        """
        # The rollouts of a batch are scored in one call. If a function compares rollouts, the whole group is one batch.
        # Otherwise each rollout is a batch.
        batches = [played] if scorer.scores_groups else [[rollout] for rollout in played]
        # These three have only the rollouts that got a reward.
        scored: list[PlayedRollout] = []
        rewards_of_batches: list[npt.NDArray[np.float32]] = []
        functions_of_batches: list[ByFunction] = []
        errors: list[RewardError] = []  # one for each rollout without a reward
        results = await asyncio.gather(*(self._tried(scorer, prompt, batch) for batch in batches))
        for batch, result in zip(batches, results, strict=True):
            if isinstance(result, RewardError):
                errors += [result] * len(batch)
                continue
            rewards, by_name = result
            has_reward = ~np.isnan(rewards)  # NaN: every function abstained
            num_unscored = int((~has_reward).sum())
            errors += [scorer.unscored()] * num_unscored
            if has_reward.any():
                scored += [rollout for rollout, is_scored in zip(batch, has_reward, strict=True) if is_scored]
                rewards_of_batches.append(rewards[has_reward])
                functions_of_batches.append({name: values[has_reward] for name, values in by_name.items()})
        failures = self.see_failures(prompt, errors, finished=len(scored), size=len(played))
        # `functions_of_batches` is not empty: otherwise no rollout got a reward, and `see_failures` raised PromptError.
        names = functions_of_batches[0].keys()
        # All batches have the same reward functions. But if the rollouts of a batch have rewards of their own, Scorer
        # lists these as the rewards of one more function.
        if any(by_name.keys() != names for by_name in functions_of_batches):
            raise PromptError(f"prompt {prompt.prompt_id!r}: some rollouts have a reward of their own, and some none")
        by_function = {name: np.concatenate([by_name[name] for by_name in functions_of_batches]) for name in names}
        return scored, np.concatenate(rewards_of_batches), by_function, failures

    async def _tried(
        self, scorer: Scorer, prompt: Prompt, played: list[PlayedRollout]
    ) -> tuple[npt.NDArray[np.float32], ByFunction] | RewardError:
        """Scores rollouts in up to `attempts` attempts. Returns (the rewards (G,) of the rollouts, the rewards (G,) of
        each function by its name). If all attempts fail, returns the error of the last attempt.

        A reward is NaN if all functions abstained.
        """
        rollouts = [finished.rollout for finished in played]
        texts = [rollout.text for rollout in rollouts]
        async with self._slots:
            for attempt in range(self._attempts):
                if attempt:
                    await asyncio.sleep(_PAUSE * 2 ** (attempt - 1))  # the pause doubles after each attempt
                try:
                    return await scorer.score(prompt.row, texts, rollouts)
                except RewardError as error:
                    failure = error
        return failure


def run_scorer(
    connect: Callable[[], AsyncReplayClient], reward: Rewards | None, config: ScorerConfig, **options: Any
) -> GeneratorStats:
    """Runs a GroupScorer to its end, for callers without an event loop. Returns the last statistics.

    `connect`: a function that makes the client; it is called on the event loop that uses the client. `options`: further
    arguments of GroupScorer, by name.
    """
    return run_worker(connect, lambda client: GroupScorer(client, reward, config, **options))
