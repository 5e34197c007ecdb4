"""StageConfig and ScorerConfig: the settings of a Stage, and of a GroupScorer."""

from __future__ import annotations

from typing import Literal

from replay_client.settings import Count, Names, Seconds, described, settings
from replay_generator.rewards import Priority, load_priority


@settings()
class StageConfig:
    """The settings of a Stage, checked at construction. All times are in seconds. Raises ValueError."""

    source: str
    """Table that it takes items from."""
    concurrency: Count | None = None
    """Items that are worked at, at the same time; otherwise 8."""
    lease: Seconds = 60.0
    """Seconds after which the items of a stage that died go to others. It renews them while it lives."""
    max_items: Count | None = None
    """The run ends after so many."""
    tables: Names = ("rollouts",)
    """Tables of each group that is handed on."""
    priority: str | Priority = "advantage"
    """Priority: advantage, learnability, or package.module:function."""
    insert_timeout: Seconds = 30.0
    """A group that waits this long for a full queue is counted in `insert_waits`, and tries again."""
    when_full: Literal["wait", "drop"] = "wait"
    """When a full table refuses a group, for its own `when_full` is "reject": wait, or drop the group."""

    def __post_init__(self) -> None:
        if self.source in self.tables:
            raise ValueError(
                f"tables are those of groups that are handed on, and {self.source!r} is where they come from"
            )
        load_priority(self.priority)

    def described(self) -> dict[str, str]:
        """What the stage says of itself to the server (`describe`)."""
        part = "scorer" if isinstance(self, ScorerConfig) else "stage"
        return described(part, {"source": self.source, "tables": self.tables, "priority": self.priority})


@settings()
class ScorerConfig(StageConfig):
    """The settings of a GroupScorer. Its `source`: whole groups without rewards, of generators with `unscored`."""

    concurrency: Count | None = None
    """Rollouts that are scored at the same time; otherwise 8, and 1 by functions that are not thread-safe.

    With a number, functions without async must be thread-safe. One that scores whole groups counts as one rollout."""
    attempts: Count = 3
    """How often a reward is asked for before it has failed. The pause doubles from 1 s."""
    reward_timeout: Seconds | None = 300.0
    """Most seconds for one reward function and one rollout, each attempt. Then it has failed."""
    min_rollouts: Count | None = None
    """Rollouts that a group needs if others cannot be scored; otherwise all that it came with.

    A group with fewer is dropped."""
    advantage_scale: Literal["group", "none"] = "group"
    """The `scale` of `scoring.group_advantages`."""
    truncated: Literal["keep", "mask"] = "keep"
    """Completions that ended only because of their length: keep them, or mask them in the loss."""
    drop_zero_variance: bool = False
    """Hand on no group whose rewards teach nothing; its permit goes back."""
