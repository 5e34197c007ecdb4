"""VersionAnswers: the best and the worst answer that the newest policy version wrote, among the groups read."""

from __future__ import annotations

from typing import Any

import numpy as np

from replay_client.records import StoredItem
from replay_dashboard.group import TokenText, answer_of


class VersionAnswers:
    """Compares the rewards of all groups of one policy version. A group of a newer version begins anew."""

    def __init__(self) -> None:
        self.version = -1
        """The newest policy version of which a group was read; below 0 if no group was read."""
        self.best: StoredItem | None = None
        """The group with the highest reward; None: no reward is finite."""
        self.worst: StoredItem | None = None
        """The group with the lowest reward; None: no reward is finite."""
        self._high = -np.inf
        self._low = np.inf

    def add(self, item: StoredItem) -> None:
        """Compares the rewards of a group that was read with those before."""
        current = item.policy_version + item.staleness if item.staleness else self.version
        if item.policy_version > self.version or current < self.version:  # newer, or the policy was rolled back
            self.version = item.policy_version
            self.best = None
            self.worst = None
            self._high = -np.inf
            self._low = np.inf
        rewards = item.group.rewards[np.isfinite(item.group.rewards)]
        if item.policy_version != self.version or not rewards.size:
            return
        if rewards.max() >= self._high:
            self.best = item
            self._high = rewards.max()
        if rewards.min() <= self._low:
            self.worst = item
            self._low = rewards.min()

    def document(self, text: TokenText) -> dict[str, Any]:
        """The best and the worst answer. Call this only if `best` and `worst` are not None."""
        assert self.best is not None
        assert self.worst is not None
        best = np.where(np.isfinite(self.best.group.rewards), self.best.group.rewards, -np.inf)
        worst = np.where(np.isfinite(self.worst.group.rewards), self.worst.group.rewards, np.inf)
        return {
            "version": self.version,
            "best": answer_of(self.best, int(best.argmax()), text),
            "worst": answer_of(self.worst, int(worst.argmin()), text),
        }
