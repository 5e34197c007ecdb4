"""GroupMaker: makes a scored group of a prompt.

prompt ──▶ tokens ──▶ rollouts (rollouts/rollout.py), which ask the engine ──▶ rewards, advantages (scoring.py)
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from replay_client.rollout import RolloutGroup
from replay_client.waits import LOG_SECONDS
from replay_generator.config import GeneratorConfig
from replay_generator.engines import Engine, SamplingConfig, why_unfit
from replay_generator.groups.codec import PartialGroupSpec, lowest_version
from replay_generator.groups.partial_groups import PartialGroup
from replay_generator.groups.scoring import ByFunction, Scoring
from replay_generator.metrics import GeneratorStats, GroupTimes
from replay_generator.policy.follower import PolicyFollower
from replay_generator.prompts.prompt import Prompt, PromptSource, prompt_for
from replay_generator.rewards.functions import Rewards, Scorer
from replay_generator.rollouts.rollout import (
    PlayedRollout,
    RolloutError,
    RolloutHook,
    Task,
    play,
    single_turn,
    why_unreadable,
)
from replay_protos.words import counted

logger = logging.getLogger(__name__)


class GroupMaker:
    """Lets a hook play rollouts of prompts, and reward functions score them. It knows no server."""

    def __init__(
        self,
        engine: Engine,
        policy: PolicyFollower,
        reward: Rewards | None,
        config: GeneratorConfig,
        group_filter: Callable[[RolloutGroup], bool] | None,
        rollout: RolloutHook,
        stats: GeneratorStats,
    ) -> None:
        self._engine = engine
        self._stats = stats
        self._rollout = rollout
        self._unanswered: list[tuple[float, str]] = []
        self._policy = policy
        scorer = Scorer(reward, threads=config.reward_threads, timeout=config.reward_timeout)
        self._scoring = Scoring(
            scorer if config.unscored_table is None else None,
            config,
            config.partial_groups_table,
            group_filter,
            stats,
            single_turn=rollout is single_turn,
        )
        self.watches = self._scoring.watches
        self._config = config

    def tokenize(self, source: PromptSource, began: datetime) -> tuple[Prompt, list[int]]:
        """The prompt and its token ids, of a group that `began` then.

        Raises PromptError if it is no prompt or does not fit the engine.
        """
        return prompt_for(self._engine, source, self._config.chat_template_kwargs, began)

    async def watch(self) -> None:
        """Says every LOG_SECONDS for what the engine is waited for, if for as long. Never returns.

        It does not beat: an engine that never answers hangs.
        """
        while True:
            await asyncio.sleep(LOG_SECONDS)
            waits, now = self._unanswered, asyncio.get_running_loop().time()
            if waits and (waited := now - waits[0][0]) >= LOG_SECONDS:
                line = "the generator waits for %s (for %.0f s now), the first of %s"
                logger.warning(line, waits[0][1], waited, counted(len(waits), "request"))

    async def make(self, work: PartialGroup, times: GroupTimes) -> tuple[RolloutGroup, ByFunction]:
        """The finished group, and the rewards (G,) of each function by name; empty: it is scored elsewhere, and its
        rewards are 0. Writes seconds into `times`.

        Only the rollouts that it lacks are played. Raises LeftOut if the group must not be inserted, TooOldToFinish if
        it would be too old, PromptError if it cannot be scored, and any error of the engine.
        """
        times.generate = -time.monotonic()
        try:
            async with self._policy.generation(lowest_version(work.rollouts)):
                version = self._policy.version
                if why := self._why_not_ours(work):
                    raise self._scoring.reject(work, why)
                failures = await self._play_missing(work)
                work.played = True
        finally:
            times.generate += time.monotonic()
        return await self._scoring.score(work, version, times, failures)

    def _why_not_ours(self, work: PartialGroup) -> str:
        """Why this engine cannot go on with a group that another generator may have begun; "" if it can."""
        if why := why_unfit(self._engine, work.spec.prompt_ids):
            return f"it has {why}"
        for played in work.rollouts.values():
            if why := why_unreadable(self._engine, played.rollout):
                return f"a rollout of it has {why}"
        return ""

    async def _play_missing(self, work: PartialGroup) -> list[str]:
        """Plays the rollouts that are missing. Returns why some failed. Raises PromptError if too few were finished.

        With a seed they are always the same, until a generator dies: what is missing then gets another seed.
        """
        spec, config = work.spec, self._config

        async def finished(index: int, played: PlayedRollout) -> None:
            await self._policy.checked()  # others will use it before this generation ends
            work.append(index, played)

        place = f"{spec.number}" if not work.rollouts else f"{spec.number}/{len(work.rollouts)}"
        if (sampling := spec.sampling).seed is not None:
            # Each group has its own seed, or equal prompts would complete equally.
            sampling = replace(sampling, seed=random.Random(f"{sampling.seed}/{place}").getrandbits(31))
        if not (tasks := [self._task(spec, index, sampling) for index in work.missing]):
            return []
        failures = await play(
            *(self._rollout, tasks, self._engine, config.rollout_timeout, self._unanswered, finished),
            early=work.sample is not None or self._rollout is not single_turn,
            patience=lambda: self._patience(work),
        )
        if late := len(work.missing) - len(failures):
            too_long = RolloutError(f"it was not finished within {config.group_timeout:g} s (group_timeout)")
            failures = [*failures, *[too_long] * late]
        return self._scoring.see_failures(spec.prompt, failures, len(work.rollouts), spec.group_size)

    def _patience(self, work: PartialGroup) -> float | None:
        """Seconds that the next rollout may take; None: the group needs it, however long it takes."""
        timeout, least = self._config.group_timeout, self._config.min_rollouts
        if timeout is None or least is None or len(work.rollouts) < least:
            return None
        return max(0.0, work.opened + timeout - time.monotonic())

    def _task(self, spec: PartialGroupSpec, index: int, sampling: SamplingConfig) -> Task:
        prompt = spec.prompt
        return Task(
            prompt.prompt_id,
            spec.prompt_ids,
            prompt.row,
            None if isinstance(prompt.content, str) else prompt.content,
            index,
            sampling,
            self._engine.tokenizer,
            self._engine.max_length,
            {**self._config.chat_template_kwargs, **prompt.template()},
            datetime.fromisoformat(spec.began),
            prompt.content if isinstance(prompt.content, str) else "",
        )
