"""GroupMaker: makes a scored group of a prompt.

prompt ──▶ tokens ──▶ rollouts (rollouts.py), which ask the engine ──▶ rewards ──▶ advantages
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from replay_client.rollout import RolloutGroup
from replay_client.scoring import group_advantages
from replay_client.waits import LOG_SECONDS
from replay_generator.building import UnderConstruction
from replay_generator.config import GeneratorConfig
from replay_generator.engines import Engine, SamplingConfig
from replay_generator.metrics import GeneratorStats, GroupTimes
from replay_generator.openings import Opening, lowest_version
from replay_generator.policy_follower import PolicyFollower
from replay_generator.prompts import Prompt, PromptError, PromptSource
from replay_generator.rewards import OWN_REWARD, RewardError, Rewards, Scorer
from replay_generator.rollouts import (
    Rollout,
    RolloutError,
    RolloutHook,
    Task,
    group_of_rollouts,
    play,
    single_turn,
    where,
    why_unfit,
)

logger = logging.getLogger(__name__)

MOST_FAILURES, MOST_FAILURE = 8, 4500
"""Of the rollouts of a group that failed: those that its `meta["failures"]` names, and characters of each."""


class LeftOut(Exception):
    """The group is not inserted. The generator gives its permit back."""

    def __init__(
        self,
        counts_as: Literal["skipped", "filtered", "stale_refused", "prompts_lost", "set_aside"] | None,
        rewards: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """`counts_as`: the field of GeneratorStats to count it in; None: it is counted already. `rewards`: (G,), of a
        group that is left out for what they are."""
        self.counts_as = counts_as
        self.rewards = rewards


class GroupMaker:
    """Lets a hook play rollouts of prompts, and reward functions score them. It knows no server."""

    def __init__(
        self,
        engine: Engine,
        policy: PolicyFollower,
        reward: Rewards | None,
        config: GeneratorConfig,
        keep: Callable[[RolloutGroup], bool] | None,
        rollout: RolloutHook,
        stats: GeneratorStats,
    ) -> None:
        self._engine = engine
        self._stats = stats
        self._rollout = rollout
        self._unanswered: list[tuple[float, str]] = []
        self._policy = policy
        self._scorer = Scorer(reward, threads=config.reward_threads, timeout=config.reward_timeout)
        self._config = config
        self._keep = keep

    def tokenize(self, source: PromptSource) -> tuple[Prompt, list[int]]:
        """The prompt and its token ids. Raises PromptError if it is no prompt or does not fit the engine."""
        try:
            prompt = Prompt.of(source)
        except ValueError as error:
            raise PromptError(f"{source!r:.200} is no prompt: {error}") from error
        prompt_ids = prompt.tokenize(self._engine.tokenizer, **self._config.chat_template)
        if why := why_unfit(self._engine, prompt_ids):
            raise PromptError(f"prompt {prompt.prompt_id!r} has {why}")
        return prompt, prompt_ids

    async def watch(self) -> None:
        """Says every LOG_SECONDS for what the engine is waited for, if for as long. Never returns.

        It does not beat: an engine that never answers hangs.
        """
        while True:
            await asyncio.sleep(LOG_SECONDS)
            waits, now = self._unanswered, asyncio.get_running_loop().time()
            if waits and (waited := now - waits[0][0]) >= LOG_SECONDS:
                line = "the generator waits for %s (for %.0f s now), the first of %d requests"
                logger.warning(line, waits[0][1], waited, len(waits))

    async def make(
        self, work: UnderConstruction, times: GroupTimes
    ) -> tuple[RolloutGroup, dict[str, npt.NDArray[np.float32]]]:
        """The finished group, and the rewards (G,) of each function by name. Writes seconds into `times`.

        Only the rollouts that it lacks are played. Raises LeftOut if the group must not be inserted, TooOldToFinish if
        it would be too old, PromptError if it cannot be scored, and any error of the engine.
        """
        prompt = work.opening.prompt
        times.generate = -time.monotonic()
        try:
            async with self._policy.generation(lowest_version(work.rollouts)):
                version = self._policy.version
                if why := why_unfit(self._engine, work.opening.prompt_ids):
                    raise self._set_aside(work, f"it has {why}")
                failures = await self._play_missing(work)
                work.played = True
        finally:
            times.generate += time.monotonic()
        rollouts = [work.rollouts[index] for index in sorted(work.rollouts)]
        times.reward = -time.monotonic()
        try:
            rewards, by_function = await self._scorer.score(prompt.row, [each.text for each in rollouts], rollouts)
        except RewardError as error:
            raise PromptError(f"prompt {prompt.prompt_id!r}: {error}") from error
        by_function |= _metrics_of(rollouts)
        times.reward += time.monotonic()
        try:
            group = self._assemble(prompt, rollouts, version, rewards, by_function)
        except (ValueError, TypeError, IndexError) as error:
            if not work.handed:
                raise
            raise self._set_aside(work, f"its rollouts do not go together: {error}") from error
        if failures:
            group.meta["failures"] = failures
        if not group.trained_mask.any():
            raise LeftOut("skipped")  # no token to train on
        if self._keep is not None and not self._keep(group):
            raise LeftOut("filtered", group.rewards)
        return group, by_function

    def _set_aside(self, work: UnderConstruction, why: str) -> LeftOut:
        key = None if work.sample is None else work.sample.info.key
        logger.warning("item %s of table %r is set aside: %s", key, self._config.building, why)
        return LeftOut("set_aside")

    async def _play_missing(self, work: UnderConstruction) -> list[str]:
        """Plays the rollouts that are missing. Returns why some failed. Raises PromptError if too few were finished.

        With a seed they are always the same, until a generator dies: what is missing then gets another seed.
        """
        opening, config = work.opening, self._config

        async def finished(index: int, rollout: Rollout) -> None:
            await self._policy.checked()  # others will use it before this generation ends
            work.append(index, rollout)

        place = f"{opening.number}" if not work.rollouts else f"{opening.number}/{len(work.rollouts)}"
        if (sampling := opening.sampling).seed is not None:
            # Each group has its own seed, or equal prompts would complete equally.
            sampling = replace(sampling, seed=random.Random(f"{sampling.seed}/{place}").getrandbits(31))
        if not (tasks := [self._task(opening, index, sampling) for index in work.missing]):
            return []
        failures = await play(
            *(self._rollout, tasks, self._engine, config.rollout_timeout, self._unanswered, finished),
            early=work.sample is not None or self._rollout is not single_turn,
            patience=lambda: self._patience(work),
        )
        if late := len(work.missing) - len(failures):
            too_long = RolloutError(f"it was not finished within {config.group_timeout:g} s (group_timeout)")
            failures = [*failures, *[too_long] * late]
        return self._see_failures(opening.prompt, failures, len(work.rollouts), opening.group_size)

    def _patience(self, work: UnderConstruction) -> float | None:
        """Seconds that the next rollout may take; None: the group needs it, however long it takes."""
        timeout, least = self._config.group_timeout, self._config.min_rollouts
        if timeout is None or least is None or len(work.rollouts) < least:
            return None
        return max(0.0, work.opened + timeout - time.monotonic())

    def _task(self, opening: Opening, index: int, sampling: SamplingConfig) -> Task:
        prompt = opening.prompt
        return Task(
            prompt.prompt_id,
            opening.prompt_ids,
            prompt.row,
            None if isinstance(prompt.content, str) else prompt.content,
            index,
            sampling,
            self._engine.tokenizer,
            self._engine.max_length,
            self._config.chat_template,
        )

    def _see_failures(self, prompt: Prompt, failures: Sequence[Exception], finished: int, size: int) -> list[str]:
        """Counts rollouts that failed. Returns why, a line for each of the first. Raises PromptError if too few of
        `size` were finished."""
        if not failures:
            return []
        self._stats["rollouts_failed"] += len(failures)
        least = size if self._config.min_rollouts is None else self._config.min_rollouts
        lines = [f"{failure!r:.{MOST_FAILURE}}{where(failure)}" for failure in failures[:MOST_FAILURES]]
        said = f"{len(failures)} of {size} rollouts failed, the first with {lines[0]}"
        if finished < least:
            raise PromptError(f"prompt {prompt.prompt_id!r}: {said}; min_rollouts is {least}") from failures[0]
        logger.warning("prompt %r: %s; its group has the other %d", prompt.prompt_id, said, finished)
        return lines

    def _assemble(
        self,
        prompt: Prompt,
        rollouts: list[Rollout],
        version: int,
        rewards: npt.NDArray[np.float32],
        by_function: dict[str, npt.NDArray[np.float32]],
    ) -> RolloutGroup:
        """`version`: of the engine before the generation; it counts if no token was drawn."""
        reasons = tuple(each.finish_reason or each.sequences[-1].finish_reason for each in rollouts)
        group = group_of_rollouts(
            rollouts,
            version,
            rewards=rewards,
            advantages=group_advantages(rewards, scale=self._config.advantage_scale),
            prompt_id=prompt.prompt_id,
            finish_reasons=reasons,
            sampling=self._config.sampling.describe(),
        )
        if len(by_function) > 1:
            for name, values in by_function.items():
                group.extras[f"rewards/{name}"], group.axes[f"rewards/{name}"] = values, "rollout"
        if self._config.truncated == "mask" and "length" in reasons:
            ended_S = np.array([reason != "length" for reason in reasons])[group.sequence_rollouts]
            ended_T = np.repeat(ended_S, group.completion_lengths)
            group.loss_mask = ended_T if group.loss_mask is None else group.loss_mask & ended_T
        return group


def _metrics_of(rollouts: Sequence[Rollout]) -> dict[str, npt.NDArray[np.float32]]:
    """The metrics (G,) that all rollouts have, by name."""
    shared = set.intersection(*(set(rollout.metrics) for rollout in rollouts))
    return {
        f"{OWN_REWARD}/{name}": np.array([rollout.metrics[name] for rollout in rollouts], np.float32)
        for name in sorted(shared)
    }
