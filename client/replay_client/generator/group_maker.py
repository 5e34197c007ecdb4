"""GroupMaker: makes a scored group of a prompt.

prompt ──▶ tokens ──▶ engine ──▶ rewards ──▶ advantages, priority
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from replay_client.completions import group_from_completions
from replay_client.generator.config import GeneratorConfig
from replay_client.generator.engines import Completion, Engine, SamplingConfig
from replay_client.generator.metrics import GroupTimes
from replay_client.generator.policy_follower import PolicyFollower
from replay_client.generator.prompts import Message, Prompt, PromptError
from replay_client.generator.rewards import RewardError, Rewards, Scorer
from replay_client.rollout import RolloutGroup
from replay_client.scoring import group_advantages

PromptSource = Prompt | Mapping[str, Any] | str | list[Message]


class LeftOut(Exception):
    """The group is not inserted. The generator gives its permit back."""

    def __init__(self, counts_as: Literal["skipped", "filtered", "stale_refused"] | None) -> None:
        """`counts_as`: the field of GeneratorStats to count it in; None: it is counted already."""
        self.counts_as = counts_as


class GroupMaker:
    """Lets an engine complete prompts, and reward functions score the completions. It knows no server."""

    def __init__(
        self,
        engine: Engine,
        policy: PolicyFollower,
        reward: Rewards,
        config: GeneratorConfig,
        keep: Callable[[RolloutGroup], bool] | None,
    ) -> None:
        self._engine = engine
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

        Raises LeftOut if the group must not be inserted, PromptError if it cannot be scored, and any error of the
        engine.
        """
        times.generate = -time.monotonic()
        async with self._policy.generation():
            version = self._policy.version
            completions = await self._engine.generate(prompt_ids, self._sampling(number), self._config.group_size)
        times.generate += time.monotonic()
        times.reward = -time.monotonic()
        try:
            rewards, by_function = await self._scorer.score(prompt.row, [each.text for each in completions])
        except RewardError as error:
            raise PromptError(f"prompt {prompt.prompt_id!r}: {error}") from error
        times.reward += time.monotonic()
        group = self._assemble(prompt, prompt_ids, completions, version, rewards, by_function)
        if group.num_tokens == 0 or (group.loss_mask is not None and not group.loss_mask.any()):
            raise LeftOut("skipped")  # no token to train on
        if self._keep is not None and not self._keep(group):
            raise LeftOut("filtered")
        return group, by_function

    def _sampling(self, number: int) -> SamplingConfig:
        """How to draw the group with this number. Each has its own seed, or equal prompts would complete equally."""
        sampling = self._config.sampling
        if sampling.seed is None:
            return sampling
        return replace(sampling, seed=random.Random(f"{sampling.seed}/{number}").getrandbits(31))

    def _assemble(
        self,
        prompt: Prompt,
        prompt_ids: list[int],
        completions: list[Completion],
        version: int,
        rewards: npt.NDArray[np.float32],
        by_function: dict[str, npt.NDArray[np.float32]],
    ) -> RolloutGroup:
        """`version`: of the engine before the generation; it counts if there are no tokens with versions."""
        versions_T = np.array([v for each in completions for v in each.policy_versions], dtype=np.int64)
        first, last = (int(versions_T.min()), int(versions_T.max())) if versions_T.size else (version, version)
        extras: dict[str, npt.NDArray[Any]] = {}
        axes: dict[str, str] = {}
        if first != last:
            extras["policy_versions"], axes["policy_versions"] = versions_T, "token"
        if len(by_function) > 1:
            extras |= {f"rewards/{name}": values for name, values in by_function.items()}
            axes |= {f"rewards/{name}": "rollout" for name in by_function}
        mask = None
        if self._config.truncated == "mask" and any(each.finish_reason == "length" for each in completions):
            mask = np.repeat(
                [each.finish_reason != "length" for each in completions],
                [len(each.token_ids) for each in completions],
            )
        return group_from_completions(
            prompt_ids=prompt_ids,
            completions=[each.token_ids for each in completions],
            logprobs=[each.logprobs for each in completions],
            rewards=rewards,
            advantages=group_advantages(rewards, scale=self._config.advantage_scale),
            policy_version=first,
            policy_version_end=last if last != first else None,
            prompt_id=prompt.prompt_id,
            loss_mask=mask,
            finish_reasons=tuple(each.finish_reason for each in completions),
            sampling=self._config.sampling.describe(),
            extras=extras,
            axes=axes,
        )
