"""ScorerConfig: the settings of a GroupScorer."""

from __future__ import annotations

from typing import Literal

from replay_client.settings import Count, Names, Seconds, described, settings
from replay_generator.rewards import Priority, load_priority


@settings()
class ScorerConfig:
    """The settings of a GroupScorer, checked at construction. All times are in seconds. Raises ValueError."""

    source: str
    """Table of whole groups without rewards, which generators with `unscored` insert."""
    tables: Names = ("rollouts",)
    """Tables of each scored group."""
    concurrency: Count | None = None
    """Rollouts that are scored at the same time; otherwise 8, and 1 by functions that are not thread-safe.

    With a number, functions without async must be thread-safe. One that scores whole groups counts as one rollout."""
    lease: Seconds = 60.0
    """Seconds after which the groups of a scorer that died go to others. It renews them while it lives."""
    attempts: Count = 3
    """How often a reward is asked for before it has failed. The pause doubles from 1 s."""
    reward_timeout: Seconds | None = 300.0
    """Most seconds for one reward function and one rollout, each attempt. Then it has failed."""
    min_rollouts: Count | None = None
    """Rollouts that a group needs if others cannot be scored; otherwise all that it came with.

    A group with fewer is dropped."""
    priority: str | Priority = "advantage"
    """Priority: advantage, learnability, or package.module:function."""
    advantage_scale: Literal["group", "none"] = "group"
    """The `scale` of `scoring.group_advantages`."""
    truncated: Literal["keep", "mask"] = "keep"
    """Completions that ended only because of their length: keep them, or mask them in the loss."""
    drop_zero_variance: bool = False
    """Hand on no group whose rewards teach nothing; its permit goes back."""
    when_full: Literal["wait", "drop"] = "wait"
    """When a full table refuses a group, for its own `when_full` is "reject": wait, or drop the group."""
    insert_timeout: Seconds = 30.0
    """A group that waits this long for a full queue is counted in `insert_waits`, and tries again."""

    def __post_init__(self) -> None:
        if not self.tables or self.source in self.tables:
            raise ValueError(f"tables must name tables of scored groups, and {self.source!r} is that without rewards")
        load_priority(self.priority)

    def described(self) -> dict[str, str]:
        """What the scorer says of itself to the server (`describe`)."""
        return described("scorer", {"source": self.source, "tables": self.tables, "priority": self.priority})
