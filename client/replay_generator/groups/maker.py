"""GroupMaker: makes a scored group from a prompt.

prompt ──▶ tokens ──▶ rollouts from the engine (rollouts/rollout.py) ──▶ rewards, advantages (scoring.py)
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
    """Lets a hook play the rollouts of a prompt, and lets reward functions score them. It uses no server."""

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
        """The requests that the engine has not answered yet, the oldest first. An entry is the time at which the
        request began, on the clock of the event loop, and a description of the request."""
        self._policy = policy
        scorer: Scorer | None = None
        if config.unscored_table is None:
            scorer = Scorer(reward, threads=config.reward_threads, timeout=config.reward_timeout)
        self._scoring = Scoring(
            scorer,
            config,
            table=config.partial_groups_table,
            group_filter=group_filter,
            stats=stats,
            single_turn=rollout is single_turn,
        )
        self.watches = self._scoring.watches
        self._config = config

    def tokenize(self, source: PromptSource, began: datetime) -> tuple[Prompt, list[int]]:
        """The prompt, and its token ids (P,). `began`: the time at which the prompt's group begins, for the template.

        Raises PromptError if the source is no prompt or does not fit the engine.
        """
        return prompt_for(self._engine, source, self._config.chat_template_kwargs, began)

    async def watch(self) -> None:
        """Logs every LOG_SECONDS the oldest request to the engine, if it has waited for LOG_SECONDS or more.

        Never returns. These log lines do not count as progress, so a process whose engine never answers counts as hung.
        """
        while True:
            await asyncio.sleep(LOG_SECONDS)
            if not self._unanswered:
                continue
            began, description = self._unanswered[0]
            waited = asyncio.get_running_loop().time() - began
            if waited >= LOG_SECONDS:
                line = "the generator waits for %s (for %.0f s now), the first of %s"
                logger.warning(line, description, waited, counted(len(self._unanswered), "request"))

    async def make(self, work: PartialGroup, times: GroupTimes) -> tuple[RolloutGroup, ByFunction]:
        """Plays the missing rollouts. Returns the finished group, and the rewards (G,) of each function by name.

        Writes the seconds of each step into `times`. A group that is scored elsewhere has rewards of 0, and an empty
        dict of functions. Raises LeftOut if the group must not be inserted, TooOldToFinish if the finished group would
        be too old, PromptError if the group cannot be scored, and any error of the engine.
        """
        began = time.monotonic()
        try:
            # This block ends with TooOldToFinish if the oldest token of the group becomes too old.
            async with self._policy.generation(lowest_version(work.rollouts)):
                version = self._policy.version
                why = self._why_unfit(work)
                if why:
                    raise self._scoring.reject(work, why)
                failures = await self._play_missing(work)
                work.played = True
        finally:
            times.generate = time.monotonic() - began
        return await self._scoring.score(work, version, times, failures)

    def _why_unfit(self, work: PartialGroup) -> str:
        """The reason why this engine cannot continue the group; "": it can. Another engine may have begun the group."""
        why = why_unfit(self._engine, work.spec.prompt_ids)
        if why:
            return f"it has {why}"
        for played in work.rollouts.values():
            why = why_unreadable(self._engine, played.rollout)
            if why:
                return f"a rollout of it has {why}"
        return ""

    async def _play_missing(self, work: PartialGroup) -> list[str]:
        """Plays the missing rollouts, and adds them to `work`. Returns the errors of those that failed, as texts.

        Raises PromptError if too few were finished. With a seed, a group always gets the same rollouts, with one
        exception: if a generator dies, the rollouts that are still missing get another seed.
        """
        spec = work.spec
        config = self._config
        sampling = _sampling_of(work)
        tasks = [self._task(spec, index, sampling) for index in work.missing]
        if not tasks:
            return []

        async def finished(index: int, played: PlayedRollout) -> None:
            # Other generators may use a stored rollout before this generation ends, so its weights are checked first.
            await self._policy.checked()
            work.append(index, played)

        # `play` awaits `finished` after each rollout that did not fail. Before each wait for rollouts it calls
        # `patience`, which returns the most seconds of this wait. With `early`, a rollout goes on as soon as its own
        # completion has ended, and does not wait for the completions of the other rollouts. `early` is set if rollouts
        # are stored one by one, or if they may have several turns.
        failures = await play(
            hook=self._rollout,
            tasks=tasks,
            engine=self._engine,
            timeout=config.rollout_timeout,
            unanswered=self._unanswered,
            finished=finished,
            early=work.sample is not None or self._rollout is not single_turn,
            patience=lambda: self._patience(work),
        )
        # A rollout that `play` gave up because of `patience` is missing, and `play` returns no error for it.
        late = len(work.missing) - len(failures)
        if late:
            too_long = RolloutError(f"it was not finished within {config.group_timeout:g} s (group_timeout)")
            failures = failures + [too_long] * late
        return self._scoring.see_failures(spec.prompt, failures, len(work.rollouts), spec.group_size)

    def _patience(self, work: PartialGroup) -> float | None:
        """The seconds that are left of `group_timeout`, within which the next rollout must be finished.

        None: there is no limit, because no `group_timeout` is set or too few rollouts are finished for a group.
        """
        timeout = self._config.group_timeout
        least = self._config.min_rollouts
        if timeout is None or least is None or len(work.rollouts) < least:
            return None
        return max(0.0, work.opened + timeout - time.monotonic())

    def _task(self, spec: PartialGroupSpec, index: int, sampling: SamplingConfig) -> Task:
        """The task for which the rollout hook plays rollout `index`."""
        prompt = spec.prompt
        if isinstance(prompt.content, str):
            text = prompt.content
            messages = None
        else:
            text = ""
            messages = prompt.content
        return Task(
            prompt_id=prompt.prompt_id,
            prompt_ids=spec.prompt_ids,
            row=prompt.row,
            messages=messages,
            index=index,
            sampling=sampling,
            tokenizer=self._engine.tokenizer,
            max_length=self._engine.max_length,
            chat_template_kwargs={**self._config.chat_template_kwargs, **prompt.template()},
            began=datetime.fromisoformat(spec.began),
            text=text,
        )


def _sampling_of(work: PartialGroup) -> SamplingConfig:
    """The sampling of the missing rollouts. If the spec has a seed, the result has a seed that follows from it."""
    sampling = work.spec.sampling
    if sampling.seed is None:
        return sampling
    # Each group has its own seed. Otherwise equal prompts would get equal completions.
    seed_text = f"{sampling.seed}/{work.spec.number}"
    if work.rollouts:  # otherwise the missing rollouts would repeat the finished ones
        seed_text += f"/{len(work.rollouts)}"
    return replace(sampling, seed=random.Random(seed_text).getrandbits(31))
