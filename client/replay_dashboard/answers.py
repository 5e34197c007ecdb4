"""VersionAnswers: the best and the worst answer that the newest policy version wrote, among the groups read."""

from __future__ import annotations

from typing import Any

import numpy as np

from replay_client.records import StoredItem
from replay_dashboard.group import TokenText, answer_of


class VersionAnswers:
    """Keeps the best and the worst group of one policy version. The first group of a newer version replaces both."""

    def __init__(self) -> None:
        self.version = -1
        """The newest policy version of which a group was read; below 0 if no group was read."""
        self.best: StoredItem | None = None
        """The group with the highest reward; None: no group with a finite reward was read."""
        self.worst: StoredItem | None = None
        """The group with the lowest reward; None: no group with a finite reward was read."""
        self._high = -np.inf
        """The highest reward of the version so far, which a rollout of `best` has."""
        self._low = np.inf
        """The lowest reward of the version so far, which a rollout of `worst` has."""

    def add(self, item: StoredItem) -> None:
        """Compares the rewards of a group that was read with those of the groups before it.

        If the group is of a newer version than these, or if the server was rolled back to an older version, forgets
        them and begins anew with the version of this group.
        """
        is_newer = item.policy_version > self.version
        # If the staleness is above 0, the version of the group plus its staleness is the server's version when it sent
        # the group. If the staleness is 0, the server's version is not known, because after a rollback a group may be
        # newer than the server, and its staleness is 0 then, too. So it is no sign of a rollback.
        is_rolled_back = item.staleness > 0 and item.policy_version + item.staleness < self.version
        if is_newer or is_rolled_back:
            self.version = item.policy_version
            self.best = None
            self.worst = None
            self._high = -np.inf
            self._low = np.inf
        rewards = item.group.rewards[np.isfinite(item.group.rewards)]
        if item.policy_version != self.version or not rewards.size:  # an older version, or no reward to compare
            return
        if rewards.max() >= self._high:
            self.best = item
            self._high = rewards.max()
        if rewards.min() <= self._low:
            self.worst = item
            self._low = rewards.min()

    def document(self, text: TokenText) -> dict[str, Any]:
        """The best and the worst answer as JSON. Call this only if `best` and `worst` are not None."""
        assert self.best is not None
        assert self.worst is not None
        # A reward that is not finite must not be chosen. So it counts as the lowest reward in the search for the best
        # answer, and as the highest in the search for the worst. G: the rollouts of the group.
        best_rewards_G = np.where(np.isfinite(self.best.group.rewards), self.best.group.rewards, -np.inf)
        worst_rewards_G = np.where(np.isfinite(self.worst.group.rewards), self.worst.group.rewards, np.inf)
        return {
            "version": self.version,
            "best": answer_of(self.best, int(best_rewards_G.argmax()), text),
            "worst": answer_of(self.worst, int(worst_rewards_G.argmin()), text),
        }
