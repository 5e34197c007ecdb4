"""Priorities, which groups go into their tables with: functions of the user's own, or built-in ones by name.

A priority is 0 for a group that has nothing to teach.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from replay_client.rollout import RolloutGroup
from replay_client.scoring import carries_gradient, group_learnability, trained_priority
from replay_client.settings import load_function
from replay_generator.user_code import calls as user_code
from replay_generator.user_code.results import number_or_nan

Priority = Callable[[RolloutGroup], float]
"""Finite and not negative. Tables do not forward an item of priority 0 to the pool."""


def advantage(group: RolloutGroup) -> float:
    """`scoring.trained_priority`: what is not trained on has no gradient."""
    return trained_priority(group)


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
        result = user_code.call_plain(function, group)
        number = number_or_nan(result)
        if not (math.isfinite(number) and number >= 0):
            returned = user_code.shown(result)
            raise ValueError(f"priority function {shown!r} returned {returned}: it must be a finite number from 0")
        return number

    return checked
