"""GroupMaker: makes a scored group of a prompt.

prompt ──▶ tokens ──▶ rollouts (rollouts.py), which ask the engine ──▶ rewards ──▶ advantages (scoring/groups.py)
"""

from __future__ import annotations

import asyncio
import logging
import random
import reprlib
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from replay_client.rollout import RolloutGroup
from replay_client.waits import LOG_SECONDS
from replay_generator.building import UnderConstruction
from replay_generator.config import GeneratorConfig
from replay_generator.engines import Engine, SamplingConfig, why_unfit
from replay_generator.metrics import GeneratorStats, GroupTimes
from replay_generator.openings import Opening, lowest_version
from replay_generator.policy_follower import PolicyFollower
from replay_generator.prompts import Prompt, PromptError, PromptSource
from replay_generator.rewards import Rewards, Scorer
from replay_generator.rollouts import Rollout, RolloutError, RolloutHook, Task, play, single_turn, why_unreadable
from replay_generator.scoring.groups import ByFunction, Scoring

logger = logging.getLogger(__name__)


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
        scorer = Scorer(reward, threads=config.reward_threads, timeout=config.reward_timeout)
        self._scoring = Scoring(scorer if config.unscored is None else None, config, config.building, keep, stats)
        self.reward_watch = self._scoring.watch
        self._config = config

    def tokenize(self, source: PromptSource, began: datetime) -> tuple[Prompt, list[int]]:
        """The prompt and its token ids, of a group that `began` then.

        Raises PromptError if it is no prompt or does not fit the engine.
        """
        try:
            prompt = Prompt.of(source)
        except ValueError as error:
            raise PromptError(f"{reprlib.repr(source)} is no prompt: {error}") from error
        prompt_ids = prompt.tokenize(self._engine.tokenizer, began=began, **self._config.chat_template)
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

    async def make(self, work: UnderConstruction, times: GroupTimes) -> tuple[RolloutGroup, ByFunction]:
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
                    raise self._scoring.set_aside(work, why)
                failures = await self._play_missing(work)
                work.played = True
        finally:
            times.generate += time.monotonic()
        return await self._scoring.score(work, version, times, failures)

    def _why_not_ours(self, work: UnderConstruction) -> str:
        """Why this engine cannot go on with a group that another generator may have begun; "" if it can."""
        if why := why_unfit(self._engine, work.opening.prompt_ids):
            return f"it has {why}"
        for rollout in work.rollouts.values():
            if why := why_unreadable(self._engine, rollout):
                return f"a rollout of it has {why}"
        return ""

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
        return self._scoring.see_failures(opening.prompt, failures, len(work.rollouts), opening.group_size)

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
            {**self._config.chat_template, **prompt.template()},
            datetime.fromisoformat(opening.began),
            prompt.content if isinstance(prompt.content, str) else "",
        )
