"""Dynamic sampling: fresh groups are drawn until a batch is full of informative ones (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from replay_client.scoring import is_zero_variance
from replay_trainer.replacement import Replacement, refilled

if TYPE_CHECKING:
    from replay_client import Sample


class DynamicSampler:
    """Fills batches from a stream of fresh ones. What a batch has too many of goes into the next.

    It takes more fresh groups a step than it trains on, which the server's [admission] must let in: see
    GRPOConfig.check_admission.
    """

    def __init__(self, batches: Iterator[list[Sample]], size: int, max_batches: int) -> None:
        """`size` groups a batch, from at most `max_batches` fresh ones; then it stays short."""
        self._batches = batches
        self._size = size
        self._max_batches = max_batches
        self._left: list[Sample] = []

    def next(self) -> Replacement:
        """The next batch. Raises what the stream raises, DeadlineExceededError above all."""
        chosen, self._left = self._left, []
        fresh: list[Sample] = []
        for _ in range(self._max_batches):
            if len(chosen) >= self._size:
                break
            fresh += (batch := next(self._batches))
            chosen += [sample for sample in batch if not is_zero_variance(sample.group.rewards)]
        chosen, self._left = chosen[: self._size], chosen[self._size :]
        return refilled(chosen, fresh, self._size)
