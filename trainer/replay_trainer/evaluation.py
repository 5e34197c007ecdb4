"""Evaluates the policy on the groups of a second generator."""

from __future__ import annotations

import numpy as np

from replay_client import ReplayClient, Sample
from replay_client.errors import DeadlineExceededError, ServerUnavailableError
from replay_trainer.callbacks import Metrics, Run
from replay_trainer.description import GroupFacts, describe_groups


class TableEvaluation:
    """Describes the groups of a table that no trainer uses. Pass it to GRPOTrainer as `evaluate`.

    A second `replay generate` with held-out prompts and `--table eval` fills the table. Give the table the fifo sampler
    and remover and a max_times_sampled of 1: each evaluation then sees the groups made since the one before.
    """

    def __init__(self, client: ReplayClient, table: str = "eval", max_groups: int = 256) -> None:
        self.client = client
        self.table = table
        self.max_groups = max_groups

    def __call__(self, trainer: Run) -> Metrics:
        """The metrics of describe_groups; staleness_mean tells how old the policy was. Without groups: groups = 0, else
        NaN. Groups that cannot be decoded, or whose rewards are not finite, are left out."""
        if not trainer.ranks.is_first:
            return {}
        samples: list[Sample] = []
        try:
            samples = self.client.sample(self.table, self.max_groups, min_samples=1, timeout=0.0)
        except DeadlineExceededError:
            pass
        except ServerUnavailableError:
            self.client.policy()  # it waits for the server, as long as the client is told to
            return self(trainer)
        return describe_groups([GroupFacts.of(sample) for sample in samples if _has_rewards(sample)])


def _has_rewards(sample: Sample) -> bool:
    try:
        return bool(np.isfinite(sample.group.rewards).all())
    except ValueError:
        return False
