"""Scoring: makes a group of finished rollouts, with rewards, advantages, and the mask of trained tokens.

This needs no engine and no server. A generator scores its own groups this way, and a GroupScorer scores the groups that
generators have left unscored.
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
"""The most failed rollouts whose errors are in the `meta["failures"]` of a group."""
MOST_FAILURE = 4500
"""The most characters of the text of one error in `meta["failures"]`."""
ByFunction = dict[str, npt.NDArray[np.float32]]
"""The rewards (G,) of each reward function, by its name. `Scoring.score` adds the metrics of rollouts, by name."""


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
        """`scorer` None: groups are scored elsewhere, and their rewards are 0 here. `table`: the table from which
        stored groups are drawn, for the log; None: there is none.

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
        """Makes the group of all finished rollouts. Returns the group, and the rewards (G,) of each function.

        `version`: the engine's policy version before the generation, which the group gets if no token was drawn.
        `times`: its field `reward` gets the seconds that the scoring takes. `failures`: the errors of the rollouts that
        failed. Raises LeftOut if the group must not be inserted, and PromptError if the group cannot be scored or made.
        """
        prompt = work.spec.prompt
        played = [work.rollouts[index] for index in sorted(work.rollouts)]
        # The number of rollouts that the watches count. If another process had the group before, only the finished
        # rollouts count, because rollouts that failed there must not appear in the report of this process.
        size = len(played) if work.handed else work.spec.group_size
        rewards = np.zeros(len(played), np.float32)
        advantages = np.zeros(len(played), np.float32)
        by_function = ByFunction()
        if self._scorer is not None:
            began = time.monotonic()
            played, rewards, by_function, unscored = await self._rewards(self._scorer, prompt, played)
            advantages = await self._advantages_of(prompt, played, rewards, by_function)
            by_function |= _metrics_of([finished.rollout for finished in played])
            self._rewards_seen.record(rewards, prompt.row, played[0].rollout.text)
            failures = [*failures, *unscored]
            times.reward = time.monotonic() - began
        try:
            group = self._assemble(work, played, version, rewards, advantages, by_function)
        except (ValueError, TypeError, IndexError) as error:
            if work.handed:  # other processes have stored some of the rollouts, so any generator would fail here
                raise self.reject(work, f"its rollouts do not go together: {error}") from error
            raise PromptError(f"prompt {prompt.prompt_id!r}: no group can be made: {error}") from error
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
        """Records a finished group in the watches. `size`: the number of its rollouts, including those that failed."""
        reason = failures[-1] if failures else ""
        self._failures_seen.record(finished=group.group_size, failed=size - group.group_size, reason=reason)
        if self._single_turn and group.finish_reasons is not None:
            self._lengths_seen.record(group.rollout_lengths, group.finish_reasons, max_tokens)

    async def _rewards(
        self, scorer: Scorer, prompt: Prompt, played: list[PlayedRollout]
    ) -> tuple[list[PlayedRollout], npt.NDArray[np.float32], ByFunction, list[str]]:
        """Scores rollouts. Returns the rollouts that got a reward, their rewards (G,), the rewards (G,) of each
        function by its name, and the texts of the errors of the other rollouts.

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
        scored = [finished for finished, is_scored in zip(played, has_reward, strict=True) if is_scored]
        errors = [scorer.unscored()] * (len(played) - len(scored))
        failures = self.see_failures(prompt, errors, finished=len(scored), size=len(played))
        by_function = {name: values[has_reward] for name, values in by_function.items()}
        return scored, rewards[has_reward], by_function, failures

    async def _advantages_of(
        self,
        prompt: Prompt,
        played: list[PlayedRollout],
        rewards: npt.NDArray[np.float32],
        by_function: ByFunction,
    ) -> npt.NDArray[np.float32]:
        """The advantages (G,). Raises PromptError if a user's function computes them and fails."""
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

        `failures`: the errors, one for each failed rollout. `finished`: the number of the rollouts that did not fail.
        `size`: the number of all rollouts of the group. Raises PromptError if fewer rollouts have finished than
        `min_rollouts` in the settings, or than `size` if the settings have no `min_rollouts`.
        """
        if not failures:
            return []
        self._stats["rollouts_failed"] += len(failures)
        least = size if self._config.min_rollouts is None else self._config.min_rollouts
        texts = [_described_failure(failure) for failure in failures[:MOST_FAILURES]]
        reason = f"{len(failures)} of {size} rollouts failed, the first with {texts[0]}"
        if finished < least:
            self._failures_seen.record(finished=finished, failed=size - finished, reason=texts[0])
            raise PromptError(f"prompt {prompt.prompt_id!r}: {reason}; min_rollouts is {least}") from failures[0]
        logger.warning("prompt %r: %s; its group has the other %d", prompt.prompt_id, reason, finished)
        return texts

    def _assemble(
        self,
        work: PartialGroup,
        played: list[PlayedRollout],
        version: int,
        rewards: npt.NDArray[np.float32],
        advantages: npt.NDArray[np.float32],
        by_function: ByFunction,
    ) -> RolloutGroup:
        """Makes the group of these rollouts.

        With `mask_truncated_completions`, its `loss_mask` is False for the tokens of truncated rollouts. Raises
        ValueError, TypeError or IndexError for rollouts of which no group can be made.
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
            # True if the rollout was not truncated: for each rollout, for each sequence, and for each token.
            ended_G = np.array([reason != "length" for reason in reasons])
            ended_S = ended_G[group.sequence_rollouts]
            ended_T = np.repeat(ended_S, group.completion_lengths)
            if group.loss_mask is None:  # so far, no token of the policy is excluded from training
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
    """The values (G,) of each metric that all rollouts have, by its name."""
    shared = set.intersection(*(set(rollout.metrics) for rollout in rollouts))
    metrics: ByFunction = {}
    for name in sorted(shared):
        values = [rollout.metrics[name] for rollout in rollouts]
        metrics[f"{OWN_REWARD}/{name}"] = np.array(values, np.float32)
    return metrics
