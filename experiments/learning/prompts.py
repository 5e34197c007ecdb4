"""Which prompts come next: in shuffled epochs, by Thompson sampling, or in epochs that skip hopeless prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from replay_client.rollout import RolloutGroup


class PromptChoice(Protocol):
    """Chooses among N prompts and is told how each group went."""

    def next(self, count: int, version: int) -> list[int]:
        """The indices of the next `count` prompts."""

    def told(self, index: int, group: RolloutGroup) -> None:
        """The group that was generated from prompt `index`."""


class Epochs:
    """All prompts in a random order, then all again in another."""

    def __init__(self, count: int, seed: int) -> None:
        self._order = self._shuffled(count, np.random.default_rng(seed))

    @staticmethod
    def _shuffled(count: int, rng: np.random.Generator) -> Iterator[int]:
        while True:
            yield from rng.permutation(count).tolist()

    def next(self, count: int, version: int) -> list[int]:
        return [next(self._order) for _ in range(count)]

    def told(self, index: int, group: RolloutGroup) -> None:
        pass


class Skipping(Epochs):
    """Epochs that skip a prompt with a probability that grows with each zero-variance group in a row (GRESO, arXiv
    2506.02177): after k of them it is taken with probability 0.5 ** k, and never with less than 0.1."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(count, seed)
        self._rng = np.random.default_rng([seed, 1])
        self._in_a_row = np.zeros(count, dtype=np.int64)

    def next(self, count: int, version: int) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < count:
            index = next(self._order)
            if self._rng.random() < max(0.5 ** int(self._in_a_row[index]), 0.1):
                chosen.append(index)
        return chosen

    def told(self, index: int, group: RolloutGroup) -> None:
        informative = float(np.ptp(group.rewards)) > 0
        self._in_a_row[index] = 0 if informative else self._in_a_row[index] + 1


class Thompson:
    """The prompts whose sampled success rate θ ~ Beta(1 + A, 1 + B) has the largest θ(1 - θ).

    A and B are a prompt's successes and failures, decayed by exp(-1/30) with each version. Of 64 candidates the best
    are taken; 15 % of the prompts are drawn at random, and none comes twice within three versions.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._right, self._wrong = np.zeros(count), np.zeros(count)
        self._used_at = np.full(count, -4)
        self._version = 0

    def next(self, count: int, version: int) -> list[int]:
        decay = np.exp((self._version - version) / 30.0)
        self._right *= decay
        self._wrong *= decay
        self._version = version
        free = np.flatnonzero(self._used_at < version - 3)
        uniform = int(self._rng.binomial(count, 0.15))
        candidates = self._rng.choice(free, min(64, free.size), replace=False)
        theta = self._rng.beta(1 + self._right[candidates], 1 + self._wrong[candidates])
        best = candidates[np.argsort(-theta * (1 - theta), kind="stable")][: count - uniform]
        others = self._rng.choice(np.setdiff1d(free, best), uniform, replace=False)
        chosen = np.concatenate([best, others]).astype(np.int64)
        self._used_at[chosen] = version
        return [int(index) for index in chosen]

    def told(self, index: int, group: RolloutGroup) -> None:
        right = float((group.rewards > 0.5).sum())
        self._right[index] += right
        self._wrong[index] += group.rewards.size - right


def prompt_choice(kind: str, count: int, seed: int) -> PromptChoice:
    """One of "epochs", "thompson" and "skip" over `count` prompts."""
    return {"epochs": Epochs, "thompson": Thompson, "skip": Skipping}[kind](count, seed)
