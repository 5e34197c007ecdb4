"""A pool of right answers instead of groups, each text once (Re:Max).

The reward of a right answer is 1. A stored answer keeps the advantage that it had in its group: rare answers stay loud.
To train on the right answers alone of whole stored groups is the trainer's own option: `GRPOConfig.replay_rollouts`.
"""

from __future__ import annotations

import numpy as np

from replay_client import RolloutGroup, group_from_completions

RIGHT = 0.5
"""An answer is right if its reward is above this."""


class DistinctAnswers:
    """The right answers of a run, each text of each prompt once (Re:Max)."""

    def __init__(self) -> None:
        self._known: set[tuple[str, tuple[int, ...]]] = set()

    def new(self, group: RolloutGroup) -> list[RolloutGroup]:
        """A group of one for each right answer that was never seen before.

        Answers without an advantage are left out, and may come again: their whole group was right.
        """
        found, completions, logprobs = [], group.completions(), group.completion_logprobs()
        for i in np.flatnonzero((group.rewards > RIGHT) & (group.advantages > 0)).tolist():
            text = (group.prompt_id, tuple(completions[i].tolist()))
            if text not in self._known:
                self._known.add(text)
                answer = group_from_completions(
                    prompt_ids=group.prompt_ids,
                    completions=[completions[i]],
                    logprobs=[logprobs[i]],
                    rewards=group.rewards[[i]],
                    advantages=group.advantages[[i]],
                    policy_version=group.policy_version,
                    prompt_id=group.prompt_id,
                    sampling=group.sampling,
                )
                found.append(answer)
        return found
