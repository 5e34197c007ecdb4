"""Priority functions: each computes the priority with which a group is inserted into its tables.

Settings name a built-in function or a function of the user. The built-in functions return 0 for a group that carries
no gradient.
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
"""A function that returns the priority of a group: a finite number that is not negative. Tables do not forward an item
of priority 0 to the pool."""


def advantage(group: RolloutGroup) -> float:
    """The `scoring.trained_priority` of the group, in which tokens that are not trained on do not count."""
    return trained_priority(group)


def learnability(group: RolloutGroup) -> float:
    """The `scoring.group_learnability` of the group's rewards; 0 for a group that carries no gradient."""
    if not carries_gradient(group):
        return 0.0
    return group_learnability(group.rewards)


BUILT_IN = {"advantage": advantage, "learnability": learnability}


def load_priority(name: str | Priority) -> Priority:
    """Returns the priority function that `name` stands for.

    `name` is a name in BUILT_IN, a text "package.module:function", or a function, which stands for itself. Raises
    ValueError for a name that leads to no function.

    A function of the user is returned in a wrapper, which raises ValueError if the function returns anything but a
    finite number of at least 0.
    """
    function = name if callable(name) else load_function("priority", name, BUILT_IN)
    if function in BUILT_IN.values():
        return function
    if isinstance(name, str):
        shown = name
    else:
        shown = getattr(name, "__name__", repr(name))

    def checked(group: RolloutGroup) -> float:
        """The result of the user's function. Raises ValueError unless the result can be a priority."""
        result = user_code.call_plain(function, group)
        number = number_or_nan(result)  # NaN: the result is no number
        if not (math.isfinite(number) and number >= 0):
            returned = user_code.shown(result)
            raise ValueError(f"priority function {shown!r} returned {returned}: it must be a finite number from 0")
        return number

    return checked
