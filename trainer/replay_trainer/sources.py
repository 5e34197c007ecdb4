"""Group sources: how the groups of a step come from fresh batches and the pool.

A group without variance is one that carries no gradient (`carries_gradient`). KeepingSource, ReplacingSource and
DynamicSource are the three ways to treat such groups; SharingSource adds groups of the pool to any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from replay_client import Sample
from replay_client.scoring import Scale, carries_gradient
from replay_trainer.ranks import Ranks
from replay_trainer.replacement import Replacement, ZeroVarianceReplacer, new_counts


class GroupSource(Protocol):
    """Yields what each step trains on."""

    @property
    def left(self) -> Sequence[Sample]:
        """Fresh groups that are drawn, and that no step has trained on yet."""

    def next(self, step: int) -> Replacement:
        """The groups of this step on this rank. Raises what the fresh batches raise, such as DeadlineExceededError."""


class KeepingSource:
    """Trains on the fresh batch as it is."""

    left: Sequence[Sample] = ()

    def __init__(self, batches: Iterator[list[Sample]], scale: Scale | None = None) -> None:
        """`scale`: how the trainer computes advantages anew, as in `carries_gradient`."""
        self._batches = batches
        self._scale = scale

    def next(self, step: int) -> Replacement:
        """The next fresh batch."""
        return _unchanged(next(self._batches), self._scale)


class ReplacingSource:
    """Replaces groups without variance by groups of the pool."""

    left: Sequence[Sample] = ()

    def __init__(
        self, batches: Iterator[list[Sample]], replacer: ZeroVarianceReplacer, ranks: Ranks, run: str, start: int = 0
    ) -> None:
        """`run`: a name of this run, the same on every rank, that no earlier run had. Steps up to `start` replace
        nothing."""
        self._batches = batches
        self._replacer = replacer
        self._ranks = ranks
        self._run = run
        self._start = start

    def next(self, step: int) -> Replacement:
        """The next fresh batch, with its groups without variance replaced."""
        fresh = next(self._batches)
        if step <= self._start:
            return _unchanged(fresh, self._replacer.scale)
        return self._replacer.replace(fresh, scope=_scope(self._run, step), exclude=_keys(fresh, self._ranks))


class DynamicSource:
    """Draws fresh batches until the step has enough groups with variance (DAPO, arXiv 2503.14476).

    It takes more fresh groups a step than it trains on: see GRPOConfig.check_admission for what the server must admit.
    """

    def __init__(
        self, batches: Iterator[list[Sample]], size: int, max_batches: int, scale: Scale | None = None
    ) -> None:
        """`size` groups a step, from at most `max_batches` fresh batches; after that the step has fewer groups.

        `scale`: how the trainer computes advantages anew, as in `carries_gradient`.
        """
        self._batches = batches
        self._scale = scale
        self._size = size
        self._max_batches = max_batches
        self.left: list[Sample] = []

    def next(self, step: int) -> Replacement:
        """As many groups with variance as fit, from as few fresh batches as possible."""
        chosen, fresh = self.left, list[Sample]()
        for _ in range(self._max_batches):
            if len(chosen) >= self._size:
                break
            fresh += (batch := next(self._batches))
            chosen = chosen + [sample for sample in batch if carries_gradient(sample.group, self._scale)]
        # The next step begins with the groups that are too many for this one.
        chosen, self.left = chosen[: self._size], chosen[self._size :]
        count = sum(not carries_gradient(sample.group, self._scale) for sample in fresh)
        missing = self._size - len(chosen)
        return Replacement(chosen, [], fresh, new_counts(zero_variance=count, dropped=count, missing=missing))


class SharingSource:
    """Adds groups of the pool to the groups of another source: GRPOConfig.replay_share."""

    def __init__(
        self, source: GroupSource, replacer: ZeroVarianceReplacer, ranks: Ranks, count: int, run: str, start: int = 0
    ) -> None:
        """`count` groups a step on this rank, if the pool has them. `run`, `start`: as for ReplacingSource."""
        self._source = source
        self._replacer = replacer
        self._ranks = ranks
        self._count = count
        self._run = run
        self._start = start

    @property
    def left(self) -> Sequence[Sample]:
        """Those of the other source."""
        return self._source.left

    def next(self, step: int) -> Replacement:
        """The groups of the other source, and then those of the pool."""
        taken = self._source.next(step)
        if step <= self._start:
            return taken
        keys = _keys([*taken.samples, *taken.fresh], self._ranks)
        return self._replacer.add(taken, self._count, scope=_scope(self._run, step), exclude=keys)


def _unchanged(samples: list[Sample], scale: Scale | None) -> Replacement:
    count = sum(not carries_gradient(sample.group, scale) for sample in samples)
    return Replacement(list(samples), [], list(samples), new_counts(zero_variance=count, missing=count))


def _scope(run: str, step: int) -> str:
    """One scope for all draws of a step: no two ranks get the same group."""
    return f"{run}/step-{step}"


def _keys(samples: list[Sample], ranks: Ranks) -> list[int]:
    """The keys of the samples of every rank. The pool may hold their groups already."""
    return [key for keys in ranks.all([sample.info.key for sample in samples]) for key in keys]
