"""A pool of right answers instead of groups, each text once (Re:Max).

The reward of a right answer is 1. A stored answer keeps the advantage that it had in its group: rare answers stay loud.
To train on the right answers alone of whole stored groups is the trainer's own option: `GRPOConfig.replay_rollouts`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay_client.rollout import RolloutGroup

RIGHT = 0.5
"""An answer is right if its reward is above this."""


def answers_of(group: RolloutGroup, chosen: Sequence[int]) -> RolloutGroup:
    """The same group with these of its answers alone: rewards and advantages stay as they are."""
    completions, logprobs = group.completions(), group.completion_logprobs()
    return RolloutGroup(
        prompt_ids=group.prompt_ids,
        completion_ids=np.concatenate([completions[i] for i in chosen]),
        completion_lengths=group.completion_lengths[chosen],
        rollout_logprobs=np.concatenate([logprobs[i] for i in chosen]),
        rewards=group.rewards[chosen],
        advantages=group.advantages[chosen],
        policy_version=group.policy_version,
        prompt_id=group.prompt_id,
        sampling=group.sampling,
    )


class DistinctAnswers:
    """The right answers of a run, each text of each prompt once (Re:Max)."""

    def __init__(self) -> None:
        self._known: set[tuple[str, tuple[int, ...]]] = set()

    def new(self, group: RolloutGroup) -> list[RolloutGroup]:
        """A group of one for each right answer that was never seen before.

        Answers without an advantage are left out, and may come again: their whole group was right.
        """
        found, completions = [], group.completions()
        for i in np.flatnonzero((group.rewards > RIGHT) & (group.advantages > 0)).tolist():
            text = (group.prompt_id, tuple(completions[i].tolist()))
            if text not in self._known:
                self._known.add(text)
                found.append(answers_of(group, [i]))
        return found
