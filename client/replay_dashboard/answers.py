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
        """The group with the highest reward; None: no reward is finite."""
        self.worst: StoredItem | None = None
        """The group with the lowest reward; None: no reward is finite."""
        self._high = -np.inf
        """The highest reward so far, which a rollout of `best` has."""
        self._low = np.inf
        """The lowest reward so far, which a rollout of `worst` has."""

    def add(self, item: StoredItem) -> None:
        """Compares the rewards of a group that was read with those of the groups before it.

        After a rollback of the server, begins anew with the version of this group.
        """
        # The server's policy version when it sent the group. A staleness of 0 does not tell it: after a rollback, a
        # group may be of a later version than the server's, and its staleness is 0 then, too. So such a group is taken
        # for a group without a rollback before it.
        current_version = item.policy_version + item.staleness if item.staleness else self.version
        is_newer = item.policy_version > self.version
        is_rolled_back = current_version < self.version
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
        # Rewards that are not finite lose both comparisons.
        best_rewards_G = np.where(np.isfinite(self.best.group.rewards), self.best.group.rewards, -np.inf)
        worst_rewards_G = np.where(np.isfinite(self.worst.group.rewards), self.worst.group.rewards, np.inf)
        return {
            "version": self.version,
            "best": answer_of(self.best, int(best_rewards_G.argmax()), text),
            "worst": answer_of(self.worst, int(worst_rewards_G.argmin()), text),
        }
