"""What several tests make: groups, servers that end with the test, ranks, and `until`, which waits for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from replay_client import RolloutGroup
from replay_client.scoring import group_advantages

PATIENCE = 120.0
"""Seconds after which a test takes for a hang what it waits for. Less, and the wait is a timed assertion on a machine
that has twenty processes for each core."""


def make_group(
    *,
    rewards: Sequence[float] | None = None,
    prompt: Sequence[int] = (3, 4),
    lengths: Sequence[int] | None = None,
    completions: Sequence[Sequence[int]] | None = None,
    logprobs: Sequence[float] | float = -1.0,
    loss_mask: Sequence[bool] | None = None,
    version: int = 0,
    seed: int | None = None,
    **fields: Any,
) -> RolloutGroup:
    """A group of completions of 1, 2, 3, ... tokens below 16, with rewards 1, 0, 1, ..., unless given.

    Without rewards, lengths and completions it has three completions. With a seed, tokens and log-probabilities are
    random.
    """
    if rewards is None:
        rewards = [float(row % 2 == 0) for row in range(len(completions or lengths or (1, 2, 3)))]
    if completions is None:
        lengths = range(1, len(rewards) + 1) if lengths is None else lengths
        completions = [[5 + j % 7] * length for j, length in enumerate(lengths)]
    lengths_G = np.array([len(completion) for completion in completions], np.int32)
    tokens_T = np.array([token for completion in completions for token in completion], np.int32)
    logprobs_T = np.full(tokens_T.size, logprobs) if np.isscalar(logprobs) else np.array(logprobs)
    if seed is not None:
        rng = np.random.default_rng(seed)
        tokens_T = rng.integers(3, 16, size=tokens_T.size, dtype=np.int32)
        logprobs_T = rng.uniform(-3, -0.01, size=tokens_T.size)
    return RolloutGroup(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=tokens_T,
        completion_lengths=lengths_G,
        rollout_logprobs=logprobs_T.astype(np.float32),
        rewards=np.array(rewards, np.float32),
        advantages=group_advantages(rewards),
        loss_mask=None if loss_mask is None else np.array(loss_mask, np.bool_),
        policy_version=version,
        **fields,
    )


def until(
    condition: Callable[[], Any], otherwise: str = "not in time", seconds: float = PATIENCE, pause: float = 0.01
) -> Any:
    """The first value of `condition()` that counts as true. Fails with `otherwise` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, otherwise
        time.sleep(pause)
    return value
