"""Evaluation on held-out prompts, from the groups that a generator makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_client.errors import DeadlineExceededError
from replay_trainer.callbacks import Metrics
from replay_trainer.description import GroupFacts, describe_groups

if TYPE_CHECKING:
    from replay_client import ReplayClient
    from replay_trainer.grpo import GRPOTrainer


class TableEvaluation:
    """Describes the groups of a table that nobody trains on; hand it to GRPOTrainer as `evaluate`.

    A second `replay generate` with held-out prompts and `--table eval` fills it. Give the table the fifo sampler and
    remover and a max_times_sampled of 1: each evaluation then sees the groups made since the last.
    """

    def __init__(self, client: ReplayClient, table: str = "eval", max_groups: int = 256) -> None:
        self.client = client
        self.table = table
        self.max_groups = max_groups

    def __call__(self, trainer: GRPOTrainer) -> Metrics:
        """As describe_groups; staleness_mean says of which policy. Without groups all but `groups` are NaN."""
        if not trainer.ranks.is_first:
            return {}
        try:
            samples = self.client.sample(self.table, self.max_groups, min_samples=1, timeout=0.0)
        except DeadlineExceededError:
            samples = []
        return describe_groups([GroupFacts.of(sample) for sample in samples])
