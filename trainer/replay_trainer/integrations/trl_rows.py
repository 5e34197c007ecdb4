"""The rows of one generation as TRL's trainer holds them, and what one generation leaves for the loss."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from torch import Tensor

from replay_client import RolloutGroup, Sample


@dataclass
class Rows:
    """The B rows of one generation on this rank, as TRL holds them: a list for each row."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None
    logprobs: list[list[float | None]] | None
    """Of the sampler; None where the trainer's own model is the sampler."""

    def copy(self) -> Rows:
        """Rows may be replaced in the copy; they are never changed in place."""
        lists = (getattr(self, each.name) for each in fields(self))
        return Rows(*(None if rows is None else list(rows) for rows in lists))  # type: ignore[arg-type]

    def mask(self) -> list[list[int]]:
        """`tool_mask`, made of ones if TRL has none."""
        if self.tool_mask is None:
            self.tool_mask = [[1] * len(ids) for ids in self.completion_ids]
        return self.tool_mask

    def put(self, first: int, group: RolloutGroup) -> None:
        """Replace the rows from `first` on by the G completions of `group`."""
        if group.loss_mask is not None:
            self.mask()
        ends = np.cumsum(group.completion_lengths)
        for row, (end, length) in enumerate(zip(ends, group.completion_lengths, strict=True), start=first):
            tokens = slice(end - length, end)
            self.prompt_ids[row] = group.prompt_ids.tolist()
            self.completion_ids[row] = group.completion_ids[tokens].tolist()
            if self.logprobs is not None:
                # TRL writes None for a log-probability that is unknown.
                self.logprobs[row] = [None if x != x else x for x in group.rollout_logprobs[tokens].tolist()]
            if self.tool_mask is not None:
                mask = [1] * int(length) if group.loss_mask is None else group.loss_mask[tokens].astype(int).tolist()
                self.tool_mask[row] = mask


@dataclass
class GenerationStep:
    """One generation of a rank, from its inputs to its report."""

    inputs: list[dict[str, Any]]
    version: int
    """Policy version of what is generated now."""
    fresh: Rows | None = None
    """The rows as they were generated; None until then, and if the rows have images."""
    rewards_BF: Tensor | None = None
    """Of the fresh rows, for each of F reward functions; NaN where a function has none."""
    final_rewards: Tensor | None = None
    """Of the final rows of all ranks, until TRL asks for them."""
    fresh_logprobs: Tensor | None = None
    """(B, T) of the fresh rows under the current weights, if replaced rows may have to be stored."""
    replaced: dict[int, Sample] = field(default_factory=dict)
    """By the index of the group on this rank."""
    missing: int = 0
    """Groups whose rewards are all equal, and that the pool had no group for."""
    zero_variance: int = 0
    ratio: tuple[float, float] = (0.0, 0.0)
    """Sum of the importance ratio over replayed tokens, and their number."""
    seconds: float = 0.0
    """What replay took of the time of this generation."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started
