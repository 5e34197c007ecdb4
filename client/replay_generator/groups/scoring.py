"""Scoring: makes a group of finished rollouts, with rewards, advantages, and the mask of trained tokens.

This needs no engine and no server. A generator scores its own groups, and a GroupScorer scores groups of generators.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from replay_client.advantages import ADVANTAGES_BY
from replay_client.rollout import RolloutGroup
from replay_generator.errors import PromptError
from replay_generator.groups.assembly import assemble
from replay_generator.groups.inserting import LeftOut
from replay_generator.groups.partial_groups import PartialGroup
from replay_generator.groups.rollout_watch import FailureWatch, LengthWatch
from replay_generator.metrics import GeneratorStats, GroupTimes
from replay_generator.notices import Watch
from replay_generator.prompts.prompt import Prompt
from replay_generator.rewards.advantages import AdvantageError, Advantages
from replay_generator.rewards.functions import OWN_REWARD, RewardError, Scorer
from replay_generator.rewards.reward_watch import RewardWatch
from replay_generator.rollouts.rollout import PlayedRollout, Rollout, where
from replay_generator.user_code import calls as user_code

if TYPE_CHECKING:
    from replay_generator.config import GeneratorConfig, ScorerConfig

logger = logging.getLogger(__name__)

MOST_FAILURES = 8
"""The most failed rollouts that are named in the `meta["failures"]` of a group."""
MOST_FAILURE = 4500
"""The most characters of the text of each failure in `meta["failures"]`."""
ByFunction = dict[str, npt.NDArray[np.float32]]
"""The rewards (G,) of each function, by its name."""


class Scoring:
    """Makes scored groups, and counts the rollouts that failed or were cut off."""

    def __init__(
        self,
        scorer: Scorer | None,
        config: GeneratorConfig | ScorerConfig,
        table: str | None,
        group_filter: Callable[[RolloutGroup], bool] | None,
        stats: GeneratorStats,
        *,
        single_turn: bool = False,
    ) -> None:
        """`scorer` None: groups are scored elsewhere, and their rewards are 0 here. `table`: their source, for the log.

        `single_turn`: True if each rollout is one completion of its prompt. Only then are the lengths of rollouts
        compared with `max_tokens`.
        """
        self._scorer = scorer
        self._config = config
        self._table = table
        self._group_filter = group_filter
        self._stats = stats
        self._single_turn = single_turn
        self._advantages = Advantages(config)
        self._rewards_seen = RewardWatch(() if scorer is None else scorer.rewards)
        """Notices that the rollouts of many groups all have the same reward."""
        self._failures_seen = FailureWatch()
        """Notices that many rollouts fail."""
        self._lengths_seen = LengthWatch()
        """Notices that many rollouts are cut off long before their `max_tokens`."""

    @property
    def watches(self) -> Sequence[Watch]:
        """The watches that notice faults of rewards and rollouts. Their reports go to the server."""
        return self._rewards_seen, self._failures_seen, self._lengths_seen

    async def score(
        self, work: PartialGroup, version: int, times: GroupTimes, failures: Sequence[str]
    ) -> tuple[RolloutGroup, ByFunction]:
        """The group of all finished rollouts, and the rewards (G,) of each function. Writes the seconds into `times`.

        `version`: the engine's policy version before the generation, which the group gets if no token was drawn.
        `failures`: the errors of the rollouts that failed. Raises LeftOut if the group must not be inserted, and
        PromptError if it cannot be scored or made.
        """
        played = [work.rollouts[index] for index in sorted(work.rollouts)]
        # The number of rollouts that the watches count. Rollouts that failed in the process that had the group before
        # do not count in the report of this process.
        size = len(played) if work.handed else work.spec.group_size
        rewards = np.zeros(len(played), np.float32)
        advantages = np.zeros(len(played), np.float32)
        by_function = ByFunction()
        if self._scorer is not None:
            began = time.monotonic()
            played, rewards, by_function, failed = await self._rewards(self._scorer, work.spec.prompt, played)
            advantages = await self._advantages_of(work.spec.prompt, played, rewards, by_function)
            by_function |= _metrics_of([finished.rollout for finished in played])
            self._rewards_seen.record(rewards, work.spec.prompt.row, played[0].rollout.text)
            failures = [*failures, *failed]
            times.reward = time.monotonic() - began
        try:
            group = self._assemble(work, played, version, rewards, advantages, by_function)
        except (ValueError, TypeError, IndexError) as error:
            if work.handed:  # other processes have stored some of the rollouts, so any generator would fail here
                raise self.reject(work, f"its rollouts do not go together: {error}") from error
            prompt_id = work.spec.prompt.prompt_id
            raise PromptError(f"prompt {prompt_id!r}: no group can be made: {error}") from error
        self._record_faults(group, size, failures, work.spec.sampling.max_tokens)
        if failures:
            group.meta["failures"] = [*failures]
        has_trained_token = group.trained_mask.any()
        if not has_trained_token:
            raise LeftOut("groups_skipped")
        if self._group_filter is not None and not user_code.decision_of(self._group_filter, group):
            raise LeftOut("groups_filtered", group.rewards)
        return group, by_function

    def _record_faults(self, group: RolloutGroup, size: int, failures: Sequence[str], max_tokens: int) -> None:
        """Records a finished group in the watches. `size`: the number of its rollouts, the failed ones included."""
        reason = failures[-1] if failures else ""
        self._failures_seen.record(finished=group.group_size, failed=size - group.group_size, reason=reason)
        if self._single_turn and group.finish_reasons is not None:
            self._lengths_seen.record(group.rollout_lengths, group.finish_reasons, max_tokens)

    async def _rewards(
        self, scorer: Scorer, prompt: Prompt, played: list[PlayedRollout]
    ) -> tuple[list[PlayedRollout], npt.NDArray[np.float32], ByFunction, list[str]]:
        """The rollouts that have rewards, their rewards (G,), the rewards (G,) of each function by its name, and the
        texts of the errors of the other rollouts.

        A rollout for which every function abstains has no reward, and counts as failed. Raises PromptError if a
        function fails, or if too few rollouts have rewards.
        """
        rollouts = [finished.rollout for finished in played]
        texts = [rollout.text for rollout in rollouts]
        try:
            rewards, by_function = await scorer.score(prompt.row, texts, rollouts)
        except RewardError as error:
            self._failures_seen.record(finished=0, failed=len(played), reason=str(error))
            raise PromptError(f"prompt {prompt.prompt_id!r}: {error}") from error
        has_reward = ~np.isnan(rewards)  # NaN: every function abstained
        scored = [rollout for rollout, has in zip(played, has_reward, strict=True) if has]
        errors = [scorer.unscored()] * (len(played) - len(scored))
        failures = self.see_failures(prompt, errors, len(scored), len(played))
        by_function = {name: values[has_reward] for name, values in by_function.items()}
        return scored, rewards[has_reward], by_function, failures

    async def _advantages_of(
        self,
        prompt: Prompt,
        played: list[PlayedRollout],
        rewards: npt.NDArray[np.float32],
        by_function: ByFunction,
    ) -> npt.NDArray[np.float32]:
        """The advantages (G,). Raises PromptError, as for a reward function, if the user's function for them fails."""
        try:
            return await self._advantages.compute(rewards, prompt.row, played, by_function)
        except AdvantageError as error:
            self._failures_seen.record(finished=0, failed=len(played), reason=str(error))
            raise PromptError(f"prompt {prompt.prompt_id!r}: {error}") from error

    def reject(self, work: PartialGroup, why: str) -> LeftOut:
        """Logs `why` no generator can make this group. Returns the exception to raise."""
        key = None if work.sample is None else work.sample.info.key
        logger.warning("item %s of table %r is rejected: %s", key, self._table, why)
        return LeftOut("items_rejected")

    def see_failures(self, prompt: Prompt, failures: Sequence[Exception], finished: int, size: int) -> list[str]:
        """Counts rollouts that failed, and logs them. Returns the texts of their errors, at most MOST_FAILURES.

        `failures`: their errors. `finished`: the number of the rollouts that did not fail. Raises PromptError if
        `finished` is too few for a group of `size` rollouts (`min_rollouts`).
        """
        if not failures:
            return []
        self._stats["rollouts_failed"] += len(failures)
        least = size if self._config.min_rollouts is None else self._config.min_rollouts
        lines = [_described_failure(failure) for failure in failures[:MOST_FAILURES]]
        reason = f"{len(failures)} of {size} rollouts failed, the first with {lines[0]}"
        if finished < least:
            self._failures_seen.record(finished=finished, failed=size - finished, reason=lines[0])
            raise PromptError(f"prompt {prompt.prompt_id!r}: {reason}; min_rollouts is {least}") from failures[0]
        logger.warning("prompt %r: %s; its group has the other %d", prompt.prompt_id, reason, finished)
        return lines

    def _assemble(
        self,
        work: PartialGroup,
        played: list[PlayedRollout],
        version: int,
        rewards: npt.NDArray[np.float32],
        advantages: npt.NDArray[np.float32],
        by_function: ByFunction,
    ) -> RolloutGroup:
        """The group of these rollouts, with `loss_mask` False for truncated rollouts if the settings say so.

        Raises ValueError, TypeError or IndexError for rollouts of which no group can be made.
        """
        reasons = tuple(_finish_reason_of(finished.rollout) for finished in played)
        group = assemble(
            played,
            version,
            rewards=rewards,
            advantages=advantages,
            prompt_id=work.spec.prompt.prompt_id,
            finish_reasons=reasons,
            sampling=work.spec.sampling.describe(),
        )
        if self._advantages.name and self._scorer is not None:  # the user's function computed the advantages
            group.meta[ADVANTAGES_BY] = self._advantages.name
        if len(by_function) > 1:  # the rewards of a single function are the rewards of the group
            for name, values in by_function.items():
                group.extras[f"rewards/{name}"] = values
                group.axes[f"rewards/{name}"] = "rollout"
        if self._config.mask_truncated_completions and "length" in reasons:
            # True for a rollout that was not truncated; by rollout, by sequence, and by token.
            ended_G = np.array([reason != "length" for reason in reasons])
            ended_S = ended_G[group.sequence_rollouts]
            ended_T = np.repeat(ended_S, group.completion_lengths)
            if group.loss_mask is None:  # all tokens of the policy were to be trained on
                group.loss_mask = ended_T
            else:
                group.loss_mask = group.loss_mask & ended_T
        return group


def _finish_reason_of(rollout: Rollout) -> str:
    """The finish reason of a rollout or, if its hook has set none, that of its last sequence."""
    return rollout.finish_reason or rollout.sequences[-1].finish_reason


def _described_failure(failure: Exception) -> str:
    """The message of a failure, with the line of user code that raised it."""
    message = user_code.shown(failure, MOST_FAILURE)
    if isinstance(failure, user_code.UserCodeError):  # its message has the line already
        return message
    return message + where(failure)


def _metrics_of(rollouts: Sequence[Rollout]) -> ByFunction:
    """The metrics (G,) that all rollouts have, by name."""
    shared = set.intersection(*(set(rollout.metrics) for rollout in rollouts))
    metrics: ByFunction = {}
    for name in sorted(shared):
        values = [rollout.metrics[name] for rollout in rollouts]
        metrics[f"{OWN_REWARD}/{name}"] = np.array(values, np.float32)
    return metrics
