"""Group sources: three ways to make the groups of a step from fresh batches, of which some groups have no variance.

A group without variance has one reward for all completions, so it gives no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from replay_client import Sample
from replay_client.scoring import is_zero_variance
from replay_trainer.ranks import Ranks
from replay_trainer.replacement import Replacement, ZeroVarianceReplacer, new_counts


class GroupSource(Protocol):
    """Yields what each step trains on."""

    def next(self, step: int) -> Replacement:
        """The groups of this step on this rank. Raises what the fresh batches raise, such as DeadlineExceededError."""


class KeepingSource:
    """Trains on the fresh batch as it is."""

    def __init__(self, batches: Iterator[list[Sample]]) -> None:
        self._batches = batches

    def next(self, step: int) -> Replacement:
        samples = next(self._batches)
        count = sum(is_zero_variance(sample.group.rewards) for sample in samples)
        return Replacement(list(samples), [], list(samples), new_counts(zero_variance=count, missing=count))


class ReplacingSource:
    """Replaces groups without variance by groups of the pool."""

    def __init__(
        self, batches: Iterator[list[Sample]], replacer: ZeroVarianceReplacer, ranks: Ranks, run: str = ""
    ) -> None:
        """`run`: a name of this run, the same on every rank, that no earlier run had."""
        self._batches = batches
        self._replacer = replacer
        self._ranks = ranks
        self._run = run

    def next(self, step: int) -> Replacement:
        fresh = next(self._batches)
        # The fresh groups of every rank may have joined the pool already.
        keys = [key for keys in self._ranks.all([sample.info.key for sample in fresh]) for key in keys]
        return self._replacer.replace(fresh, scope=f"{self._run}/step-{step}", exclude=keys)


class DynamicSource:
    """Draws fresh batches until the step has enough groups with variance (DAPO, arXiv 2503.14476).

    It takes more fresh groups a step than it trains on: see GRPOConfig.check_admission for what the server must admit.
    """

    def __init__(self, batches: Iterator[list[Sample]], size: int, max_batches: int) -> None:
        """`size` groups a step, from at most `max_batches` fresh batches; after that the step has fewer groups."""
        self._batches = batches
        self._size = size
        self._max_batches = max_batches
        self._left: list[Sample] = []

    def next(self, step: int) -> Replacement:
        chosen, fresh = self._left, list[Sample]()
        for _ in range(self._max_batches):
            if len(chosen) >= self._size:
                break
            fresh += (batch := next(self._batches))
            chosen = chosen + [sample for sample in batch if not is_zero_variance(sample.group.rewards)]
        # The next step begins with the groups that are too many for this one.
        chosen, self._left = chosen[: self._size], chosen[self._size :]
        count = sum(is_zero_variance(sample.group.rewards) for sample in fresh)
        missing = self._size - len(chosen)
        return Replacement(chosen, [], fresh, new_counts(zero_variance=count, dropped=count, missing=missing))
