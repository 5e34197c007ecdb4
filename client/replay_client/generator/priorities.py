"""Priorities: the number that a group goes into its tables with. All are 0 for a group that has nothing to teach."""

from __future__ import annotations

import math
from collections.abc import Callable

from replay_client.generator.functions import load_function
from replay_client.rollout import RolloutGroup
from replay_client.scoring import carries_gradient, group_learnability, group_priority, trained_advantages

Priority = Callable[[RolloutGroup], float]
"""Finite and not negative. Tables do not forward an item of priority 0 to the pool."""


def advantage(group: RolloutGroup) -> float:
    """`scoring.group_priority` of the completions that are trained on; the others have no gradient."""
    return group_priority(group.rewards, trained_advantages(group)) if carries_gradient(group) else 0.0


def learnability(group: RolloutGroup) -> float:
    """`scoring.group_learnability`; 0 for a group that carries no gradient."""
    return group_learnability(group.rewards) if carries_gradient(group) else 0.0


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
