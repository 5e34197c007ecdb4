"""Priorities: compute the priority with which a group goes into its tables.

They are functions of the user's own, or built-in ones by name. The priority of a group without a gradient is 0.
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
"""A function that returns a priority, finite and not negative. Tables do not forward an item of priority 0 to the
pool."""


def advantage(group: RolloutGroup) -> float:
    """`scoring.trained_priority`. Tokens that are not trained on do not count: they have no gradient."""
    return trained_priority(group)


def learnability(group: RolloutGroup) -> float:
    """`scoring.group_learnability`; 0 for a group that carries no gradient."""
    if not carries_gradient(group):
        return 0.0
    return group_learnability(group.rewards)


BUILT_IN = {"advantage": advantage, "learnability": learnability}


def load_priority(name: str | Priority) -> Priority:
    """The function of a priority. `name`: one of BUILT_IN, "package.module:function", or the function itself.

    Raises ValueError for a name that leads to no function. If the user's own function returns anything but a finite
    number from 0, its call raises ValueError.
    """
    function = name if callable(name) else load_function("priority", name, BUILT_IN)
    if function in BUILT_IN.values():
        return function
    if isinstance(name, str):
        shown = name
    else:
        shown = getattr(name, "__name__", repr(name))

    def checked(group: RolloutGroup) -> float:
        result = user_code.call_plain(function, group)
        number = number_or_nan(result)
        if not (math.isfinite(number) and number >= 0):
            returned = user_code.shown(result)
            raise ValueError(f"priority function {shown!r} returned {returned}: it must be a finite number from 0")
        return number

    return checked
