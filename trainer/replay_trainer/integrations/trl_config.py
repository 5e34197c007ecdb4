"""ReplayGRPOConfig: the settings of replay beside TRL's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from trl import GRPOConfig

from replay_trainer.integrations.pool import OnUnavailable
from replay_trainer.replacement import OnEmpty


@dataclass
class ReplayGRPOConfig(GRPOConfig):  # type: ignore[misc]  # TRL has no types that mypy reads
    """TRL's GRPOConfig and the settings of replay. Raises ValueError for a value out of range."""

    replay: str | None = None
    """Address of a replay server, host:port; token and TLS come from the environment (REPLAY_TOKEN, REPLAY_TLS_CA).
    None: a server inside this process, which ends with it."""
    replay_table: str = "replay"
    """Table of the server that holds the pool."""
    replay_buffer_size: int = 64
    """Groups in the pool of the server inside this process; a server at an address has its own max_size.
    0 turns replay off."""
    replay_share: float = 0.0
    """Least share of the groups of a step that come from the pool, from 0 to 0.9. 0: only groups whose rewards are all
    equal are replaced. Otherwise the fresh groups of the lowest priority are replaced too; they go into the pool."""
    replay_max_staleness: int | None = None
    """A stored group that is more optimizer steps old than this is not used. None: only the table's limit holds."""
    replay_on_empty: OnEmpty = "keep"
    """What happens to a group that the pool has no replacement for. keep: TRL trains on it. drop: the loss leaves it
    out. wait: wait up to replay_timeout for another trainer to fill the pool."""
    replay_on_unavailable: OnUnavailable = "continue"
    """What happens when the server goes away for replay_timeout. continue: all ranks train on fresh rows alone, and ask
    again at every generation. raise: ServerUnavailableError ends the run on all ranks."""
    replay_timeout: float = 60.0
    """Seconds that a generation waits for a server that restarts, and that replay_on_empty="wait" waits before
    DeadlineExceededError ends the run."""
    replay_same_rewards: bool = False
    """Leave stored groups out that other reward functions scored. False: they are used, with a warning."""
    replay_clip_max: float = 2.0
    """Upper bound of the importance ratio of a replayed token. Where TRL corrects (vLLM), its own settings apply."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.replay_share <= 0.9:
            raise ValueError(f"replay_share must be from 0 to 0.9, not {self.replay_share}")
        if self.replay_buffer_size < 0:
            raise ValueError(f"replay_buffer_size must be at least 0, not {self.replay_buffer_size}")
        if self.replay_on_empty not in get_args(OnEmpty):
            raise ValueError(
                f"replay_on_empty must be one of {', '.join(get_args(OnEmpty))}, not {self.replay_on_empty!r}"
            )
        if self.replay_on_unavailable not in get_args(OnUnavailable):
            raise ValueError(
                f"replay_on_unavailable must be one of {', '.join(get_args(OnUnavailable))}, "
                f"not {self.replay_on_unavailable!r}"
            )
        if not self.replay_clip_max > 0:
            raise ValueError(f"replay_clip_max must be above 0, not {self.replay_clip_max}")
