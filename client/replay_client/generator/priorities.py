"""Priorities: the number that a group goes into its tables with. All are 0 for a group that has nothing to teach."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from replay_client.generator.functions import load_function
from replay_client.rollout import RolloutGroup
from replay_client.scoring import FloatArray, group_learnability, group_priority

Priority = Callable[[RolloutGroup], float]
"""Finite and not negative. Tables do not forward an item of priority 0 to the pool."""


def advantage(group: RolloutGroup) -> float:
    """`scoring.group_priority` of the completions that are trained on; the others have no gradient."""
    return group_priority(group.rewards, _trained_advantages(group))


def learnability(group: RolloutGroup) -> float:
    """`scoring.group_learnability`; 0 if no completion that is trained on has an advantage."""
    return group_learnability(group.rewards) if _trained_advantages(group).any() else 0.0


BUILT_IN = {"advantage": advantage, "learnability": learnability}


def load_priority(name: str | Priority) -> Priority:
    """One of BUILT_IN, or any function of a group: itself, or as "package.module:function".

    The function that is returned raises ValueError if the user's own returns no finite number from 0.
    Raises ValueError for a name that leads to no function.
    """
    function = name if callable(name) else load_function("priority", name, BUILT_IN)
    if function in BUILT_IN.values():
        return function
    shown = name if isinstance(name, str) else getattr(name, "__name__", repr(name))

    def checked(group: RolloutGroup) -> float:
        result = function(group)
        try:
            number = float(result)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"priority function {shown!r} returned {result!r}: it must be a finite number from 0")
        return number

    return checked


def _trained_advantages(group: RolloutGroup) -> FloatArray:
    """Advantages (G,), 0 for completions that the loss mask excludes."""
    if group.loss_mask is None:
        return group.advantages
    ends_G = np.cumsum(group.completion_lengths)
    trained_G = [
        bool(group.loss_mask[end - length : end].any())
        for end, length in zip(ends_G, group.completion_lengths, strict=True)
    ]
    return np.where(trained_G, group.advantages, 0.0).astype(np.float32)
