"""GroupMaker: makes a scored group of a prompt.

prompt ──▶ tokens ──▶ rollouts (rollouts.py), which ask the engine ──▶ rewards ──▶ advantages
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from replay_client.generator.config import GeneratorConfig
from replay_client.generator.engines import Engine, SamplingConfig
from replay_client.generator.metrics import GroupTimes
from replay_client.generator.policy_follower import PolicyFollower
from replay_client.generator.prompts import Message, Prompt, PromptError
from replay_client.generator.rewards import OWN_REWARD, RewardError, Rewards, Scorer
from replay_client.generator.rollouts import Rollout, RolloutHook, Task, group_of_rollouts, play, where
from replay_client.rollout import RolloutGroup
from replay_client.scoring import group_advantages

logger = logging.getLogger(__name__)

PromptSource = Prompt | Mapping[str, Any] | str | list[Message]


class LeftOut(Exception):
    """The group is not inserted. The generator gives its permit back."""

    def __init__(self, counts_as: Literal["skipped", "filtered", "stale_refused"] | None) -> None:
        """`counts_as`: the field of GeneratorStats to count it in; None: it is counted already."""
        self.counts_as = counts_as


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
    ) -> None:
        self._engine = engine
        self._rollout = rollout
        self.rollouts_failed = 0
        """Since the start, those in groups that were left out included."""
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
        if not 0 < len(prompt_ids) < self._engine.max_length:
            raise PromptError(
                f"prompt {prompt.prompt_id!r} has {len(prompt_ids)} tokens; the engine takes 1 to "
                f"{self._engine.max_length - 1}, so that with one more they fit its maximum length"
            )
        return prompt, prompt_ids

    async def make(
        self, prompt: Prompt, prompt_ids: list[int], number: int, times: GroupTimes
    ) -> tuple[RolloutGroup, dict[str, npt.NDArray[np.float32]]]:
        """The group with this number, and the rewards (G,) of each function by name. Writes seconds into `times`.

        Raises LeftOut if the group must not be inserted, TooOldToFinish if it would be too old, PromptError if it
        cannot be scored, and any error of the engine.
        """
        times.generate = -time.monotonic()
        try:
            async with self._policy.generation():
                version = self._policy.version
                rollouts = await self._play(prompt, prompt_ids, number)
        finally:
            times.generate += time.monotonic()
        times.reward = -time.monotonic()
        try:
            rewards, by_function = await self._scorer.score(prompt.row, [each.text for each in rollouts], rollouts)
        except RewardError as error:
            raise PromptError(f"prompt {prompt.prompt_id!r}: {error}") from error
        by_function |= _metrics_of(rollouts)
        times.reward += time.monotonic()
        group = self._assemble(prompt, rollouts, version, rewards, by_function)
        if not group.trained_mask.any():
            raise LeftOut("skipped")  # no token to train on
        if self._keep is not None and not self._keep(group):
            raise LeftOut("filtered")
        return group, by_function

    async def _play(self, prompt: Prompt, prompt_ids: list[int], number: int) -> list[Rollout]:
        """The rollouts that were finished. Raises PromptError if they are too few."""
        config, sampling = self._config, self._sampling(number)
        messages = None if isinstance(prompt.content, str) else prompt.content
        tokenizer, longest = self._engine.tokenizer, self._engine.max_length
        tasks = [
            Task(
                prompt.prompt_id,
                prompt_ids,
                prompt.row,
                messages,
                index,
                sampling,
                tokenizer,
                longest,
                config.chat_template,
            )
            for index in range(config.group_size)
        ]
        played = await play(self._rollout, tasks, self._engine, config.rollout_timeout)
        if not (failures := played.failures):
            return played.rollouts
        self.rollouts_failed += len(failures)
        least = config.group_size if config.min_rollouts is None else config.min_rollouts
        first = f"{failures[0]!r:.300}{where(failures[0])}"
        said = f"{len(failures)} of {config.group_size} rollouts failed, the first with {first}"
        if len(played.rollouts) < least:
            raise PromptError(f"prompt {prompt.prompt_id!r}: {said}; min_rollouts is {least}") from failures[0]
        logger.warning("prompt %r: %s; its group has the other %d", prompt.prompt_id, said, len(played.rollouts))
        return played.rollouts

    def _sampling(self, number: int) -> SamplingConfig:
        """How to draw the group with this number. Each has its own seed, or equal prompts would complete equally."""
        sampling = self._config.sampling
        if sampling.seed is None:
            return sampling
        return replace(sampling, seed=random.Random(f"{sampling.seed}/{number}").getrandbits(31))

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
