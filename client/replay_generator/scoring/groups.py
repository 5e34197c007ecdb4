"""Scoring: makes a group of finished rollouts: rewards, advantages, and which tokens are trained on.

It needs no engine and no server. A generator scores the groups that it has played; a GroupScorer those of others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from replay_client.columns import Buffer
from replay_client.rollout import RolloutGroup
from replay_client.scoring import group_advantages
from replay_generator import user_code
from replay_generator.building import UnderConstruction
from replay_generator.metrics import GeneratorStats, GroupTimes
from replay_generator.prompts import Prompt, PromptError
from replay_generator.rewards import OWN_REWARD, RewardError, Scorer
from replay_generator.rollouts import Rollout, group_of_rollouts, where
from replay_generator.scoring.watch import RewardWatch

if TYPE_CHECKING:
    from replay_generator.config import GeneratorConfig
    from replay_generator.scoring.config import ScorerConfig

logger = logging.getLogger(__name__)

MOST_FAILURES, MOST_FAILURE = 8, 4500
"""Of the rollouts of a group that failed: those that its `meta["failures"]` names, and characters of each."""
ByFunction = dict[str, npt.NDArray[np.float32]]
"""The rewards (G,) of each function, by its name."""


@dataclass(frozen=True)
class HandOn:
    """What goes into other tables, and takes the place of the item from which it was made."""

    group: RolloutGroup | Buffer
    tables: Mapping[str, float]
    """Its priorities, by table."""
    tags: Mapping[str, str | int] | None = None
    """None: those of that item."""
    key: int | None = None
    """None: a new one."""


class LeftOut(Exception):
    """The group is not inserted. Its permit goes back."""

    def __init__(
        self,
        counts_as: Literal["skipped", "filtered", "stale_refused", "prompts_lost", "set_aside"] | None,
        rewards: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """`counts_as`: the field of GeneratorStats to count it in; None: it is counted already. `rewards`: (G,), of a
        group that is left out for what they are."""
        self.counts_as = counts_as
        self.rewards = rewards


class Scoring:
    def __init__(
        self,
        scorer: Scorer | None,
        config: GeneratorConfig | ScorerConfig,
        table: str | None,
        keep: Callable[[RolloutGroup], bool] | None,
        stats: GeneratorStats,
    ) -> None:
        """`scorer` None: the group gets its rewards elsewhere; here they are 0. `table`: of what others began."""
        self._scorer = scorer
        self._config = config
        self._table = table
        self._keep = keep
        self._stats = stats
        self.watch = RewardWatch(() if scorer is None else scorer.rewards)

    async def score(
        self, work: UnderConstruction, version: int, times: GroupTimes, failures: Sequence[str]
    ) -> tuple[RolloutGroup, ByFunction]:
        """The group of all rollouts that are finished. Writes seconds into `times`.

        `version`: of the engine before the generation; it counts if no token was drawn. `failures`: why rollouts are
        missing. Raises LeftOut if the group must not be inserted, and PromptError if it cannot be scored or made.
        """
        rollouts = [work.rollouts[index] for index in sorted(work.rollouts)]
        rewards, by_function = np.zeros(len(rollouts), np.float32), ByFunction()
        if self._scorer is not None:
            times.reward = -time.monotonic()
            rollouts, rewards, by_function, failed = await self._rewards(self._scorer, work.opening.prompt, rollouts)
            by_function |= _metrics_of(rollouts)
            self.watch.see(rewards, work.opening.prompt.row, rollouts[0].text)
            failures = [*failures, *failed]
            times.reward += time.monotonic()
        try:
            group = self._assemble(work, rollouts, version, rewards, by_function)
        except (ValueError, TypeError, IndexError) as error:
            if not work.handed:
                prompt_id = work.opening.prompt.prompt_id
                raise PromptError(f"prompt {prompt_id!r}: no group can be made: {error}") from error
            raise self.set_aside(work, f"its rollouts do not go together: {error}") from error
        if failures:
            group.meta["failures"] = [*failures]
        if not group.trained_mask.any():
            raise LeftOut("skipped")  # no token to train on
        if self._keep is not None and not user_code.decision_of(self._keep, group):
            raise LeftOut("filtered", group.rewards)
        return group, by_function

    async def _rewards(
        self, scorer: Scorer, prompt: Prompt, rollouts: list[Rollout]
    ) -> tuple[list[Rollout], npt.NDArray[np.float32], ByFunction, list[str]]:
        """The rollouts that have rewards, these (G,), those of each function, and why others have none.

        A rollout for which every function abstains has failed.
        """
        try:
            rewards, by_function = await scorer.score(prompt.row, [each.text for each in rollouts], rollouts)
        except RewardError as error:
            raise PromptError(f"prompt {prompt.prompt_id!r}: {error}") from error
        has_reward = ~np.isnan(rewards)
        finished = [rollout for rollout, has in zip(rollouts, has_reward, strict=True) if has]
        errors = [scorer.unscored()] * (len(rollouts) - len(finished))
        failures = self.see_failures(prompt, errors, len(finished), len(rollouts))
        by_function = {name: values[has_reward] for name, values in by_function.items()}
        return finished, rewards[has_reward], by_function, failures

    def set_aside(self, work: UnderConstruction, why: str) -> LeftOut:
        """Says why nobody can make a group of this."""
        key = None if work.sample is None else work.sample.info.key
        logger.warning("item %s of table %r is set aside: %s", key, self._table, why)
        return LeftOut("set_aside")

    def see_failures(self, prompt: Prompt, failures: Sequence[Exception], finished: int, size: int) -> list[str]:
        """Counts rollouts that failed. Returns why, a line for each of the first. Raises PromptError if too few of
        `size` were finished."""
        if not failures:
            return []
        self._stats["rollouts_failed"] += len(failures)
        least = size if self._config.min_rollouts is None else self._config.min_rollouts
        lines = [
            f"{user_code.shown(failure, MOST_FAILURE)}{_place_of(failure)}" for failure in failures[:MOST_FAILURES]
        ]
        said = f"{len(failures)} of {size} rollouts failed, the first with {lines[0]}"
        if finished < least:
            raise PromptError(f"prompt {prompt.prompt_id!r}: {said}; min_rollouts is {least}") from failures[0]
        logger.warning("prompt %r: %s; its group has the other %d", prompt.prompt_id, said, finished)
        return lines

    def _assemble(
        self,
        work: UnderConstruction,
        rollouts: list[Rollout],
        version: int,
        rewards: npt.NDArray[np.float32],
        by_function: ByFunction,
    ) -> RolloutGroup:
        reasons = tuple(each.finish_reason or each.sequences[-1].finish_reason for each in rollouts)
        group = group_of_rollouts(
            rollouts,
            version,
            rewards=rewards,
            advantages=group_advantages(rewards, scale=self._config.advantage_scale),
            prompt_id=work.opening.prompt.prompt_id,
            finish_reasons=reasons,
            sampling=work.opening.sampling.describe(),
        )
        if len(by_function) > 1:
            for name, values in by_function.items():
                group.extras[f"rewards/{name}"], group.axes[f"rewards/{name}"] = values, "rollout"
        if self._config.truncated == "mask" and "length" in reasons:
            ended_S = np.array([reason != "length" for reason in reasons])[group.sequence_rollouts]
            ended_T = np.repeat(ended_S, group.completion_lengths)
            group.loss_mask = ended_T if group.loss_mask is None else group.loss_mask & ended_T
        return group


def _place_of(failure: Exception) -> str:
    """The user's line from which it came; "" if its message has that."""
    return "" if isinstance(failure, user_code.UserCodeError) else where(failure)


def _metrics_of(rollouts: Sequence[Rollout]) -> ByFunction:
    """The metrics (G,) that all rollouts have, by name."""
    shared = set.intersection(*(set(rollout.metrics) for rollout in rollouts))
    return {
        f"{OWN_REWARD}/{name}": np.array([rollout.metrics[name] for rollout in rollouts], np.float32)
        for name in sorted(shared)
    }
