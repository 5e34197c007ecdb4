"""GeneratorConfig: what a RolloutGenerator may be told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from replay_client.generator.engines import SamplingConfig
from replay_client.generator.policy_follower import ReloadMode


@dataclass(frozen=True)
class GeneratorConfig:
    """What a RolloutGenerator does; every wait is in seconds."""

    group_size: int = 8
    """G, completions of each prompt."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How they are drawn. With a seed, each group has one of its own that follows from it."""
    chat_template: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the tokenizer's chat template with prompts that are messages, like {"enable_thinking": False}."""
    tables: tuple[str, ...] = ("rollouts",)
    """Where a group is inserted, with `scoring.group_priority`, which is 0 where all its rewards are equal."""
    advantage_scale: Literal["group", "none"] = "group"
    """As `scoring.group_advantages` has it."""
    max_concurrent_groups: int | None = 16
    """Groups between their prompt and their place in the table. A full queue holds them, and with them all others.
    None: as many as there are permits, so only with a server that has [admission]."""
    max_groups: int | None = None
    """Start this many groups and then finish; None: as many as there are prompts."""
    follow_policy: bool = True
    """Reload the engine's weights whenever the trainer publishes new ones."""
    reload: ReloadMode = "between_groups"
    """between_groups: reload when the groups under way are complete, and start none until then, so that every group is
    of one version. at_once: reload now; completions under way go on with the new weights and then span versions, each
    token with the version that drew it in `extras["policy_versions"]`. Their keys and values are computed anew, so that
    each token's log-probability is exactly that of its version. For long completions, where waiting is idle time."""
    wait_for_policy: bool = False
    """Start only when the trainer has published something. Otherwise start with the engine's own weights, version 0,
    where nothing is published."""
    weights_root: str | os.PathLike[str] | None = None
    """Load weights from this folder and those in it only; None: from wherever the policy says. Whoever may write to the
    server may set the policy, and with it what a generator opens; weights are never executed, only read."""
    probe_tolerance: float = 0.02
    """Largest difference, in nats, between the trainer's and the engine's log-probability of any token of the probe.
    The default is for float32 on both sides; with bfloat16 on either, single tokens differ by some tenths: use 0.5."""
    truncated: Literal["keep", "mask"] = "keep"
    """What becomes of completions that ended for their length alone. mask: they count in the advantages of their group,
    but their tokens are not trained on (`loss_mask`), nor do they add to its priority (DAPO's overlong filtering)."""
    on_prompt_error: Literal["raise", "skip"] = "raise"
    """What happens where a prompt does not fit the engine, a reward function fails or a group is larger than the server
    takes. raise: the run ends. skip: the group is left out, counted and warned about; so many in a row that it cannot
    be the prompts end the run after all."""
    when_full: Literal["wait", "drop"] = "wait"
    """What happens when a full table refuses a group (its own `when_full` is "reject"). wait: try again. drop: leave
    the group out. A busy server and failing storage are always waited for."""
    reward_threads: int = 1
    """Groups whose reward functions, where they are not async, may run at a time. More only if they are thread-safe."""
    reward_timeout: float | None = 300.0
    """Longest time for one reward function and one group; beyond it, the function has failed."""
    solved_reward: float = 1.0
    """Reward from which on a completion counts in the metrics as solved."""
    metrics_path: Path | None = None
    """File that a JSON line goes to every `metrics_interval`; see docs/how-to/generate.md for its fields."""
    metrics_interval: float = 10.0
    insert_timeout: float = 30.0
    """A group that finds its queue full for so long is counted in `insert_waits` and tries again."""
    permit_timeout: float = 30.0
    """As `insert_timeout`, for a permit, where the server's admission is configured."""
    stop_grace: float = 2.0
    """How long groups that are being generated may go on after `stop`."""

    def __post_init__(self) -> None:
        for name in ("group_size", "max_concurrent_groups", "reward_threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.tables:
            raise ValueError("tables must name at least one table")
        for name in ("probe_tolerance", "metrics_interval", "insert_timeout", "permit_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.reward_timeout is not None and not self.reward_timeout > 0:
            raise ValueError(f"reward_timeout must be above 0, or None for no limit, not {self.reward_timeout}")
        for name, valid in _CHOICES.items():
            if getattr(self, name) not in valid:
                raise ValueError(f"{name} must be one of {', '.join(valid)}, not {getattr(self, name)!r}")


_CHOICES = {
    "advantage_scale": ("group", "none"),
    "reload": ("between_groups", "at_once"),
    "truncated": ("keep", "mask"),
    "on_prompt_error": ("raise", "skip"),
    "when_full": ("wait", "drop"),
}
