"""Advantages: loads, checks and calls the user's advantage functions.

The setting `advantages = "package.module:function"` names such a function. It gets the rewards of one group, and
returns the advantage of each rollout. `advantages_by` calls it and checks what it returns.

    def leave_one_out(rewards_G):
        others_G = (rewards_G.sum() - rewards_G) / (len(rewards_G) - 1)
        return rewards_G - others_G

A function gets more than the rewards if it has parameters with names in `FACTS`. Axis: G rollouts of the group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_client.rollout import MAX_VALUE
from replay_client.settings import load_function, raised_in
from replay_client.words import counted

AdvantageFunction = Callable[..., npt.ArrayLike]
"""A function that takes float64 rewards (G,), and as keyword arguments those facts for which it has a parameter (see
FACTS). It returns (G,) advantages."""
FloatArray = npt.NDArray[np.float32]
FACTS = ("row", "lengths_G", "rewards_by_function")
"""The names of the facts that a function may ask for.

row: the row of the prompt, a mapping. lengths_G: int64 (G,) tokens that the policy wrote in each rollout.
rewards_by_function: float64 (G,) rewards of each reward function, before its weight, by the function's name; NaN where
the function abstained."""
ADVANTAGES_BY = "advantages_by"
"""A key in `RolloutGroup.meta`. Its value is the name of the user's function that computed the group's advantages."""
_TRIED = 4
"""The number of rollouts in a made-up group, if the size of the real groups is not known."""


def name_of(advantages: str | AdvantageFunction) -> str:
    """The name of a function for messages: the name in the settings, or the function's own name."""
    if isinstance(advantages, str):
        return advantages
    return getattr(advantages, "__qualname__", type(advantages).__name__)


def load_advantages(advantages: str | AdvantageFunction) -> AdvantageFunction:
    """The function that "package.module:function" names, or the function itself.

    Raises ValueError for a name that leads to no function, and for a function that cannot be called as
    AdvantageFunction says.
    """
    function = load_function("advantages", advantages, {}) if isinstance(advantages, str) else advantages
    name = name_of(advantages)
    called = getattr(function, "__call__", None)  # noqa: B004
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called):
        raise ValueError(f"advantages {name!r} is async: write it without async, it runs in a thread")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return function
    try:
        signature.bind(np.zeros(1), **facts_for(function, dict.fromkeys(FACTS)))
    except TypeError as error:
        raise ValueError(
            f"advantages {name!r} has the parameters {signature}, and is called with the rewards alone ({error}): "
            f"besides them it may have parameters named {', '.join(FACTS)}"
        ) from None
    return function


def check_advantages(advantages: str | AdvantageFunction, group_size: int = _TRIED) -> None:
    """Calls the function with made-up rewards, so that a mistake ends a run before its first group.

    The rewards of the first made-up group differ. Those of the second are equal, so that a division by their standard
    deviation gives NaN. A function that asks for rows, or for the rewards of each function, is not called, because such
    facts cannot be made up. Raises ValueError as `load_advantages` and `advantages_by` do.
    """
    function = load_advantages(advantages)
    facts = {"lengths_G": np.arange(1, group_size + 1)}
    wanted = facts_for(function, dict.fromkeys(FACTS)).keys()
    if wanted - facts:
        return
    different_G = np.array([float(rollout % 2) for rollout in range(group_size)])
    for rewards_G in (different_G, np.ones(group_size)):
        with np.errstate(all="ignore"):
            advantages_by(advantages, rewards_G, facts)


def advantages_by(
    advantages: str | AdvantageFunction, rewards_G: npt.NDArray[np.float64], facts: Mapping[str, Any]
) -> FloatArray:
    """Float32 (G,) advantages that the function computes from these rewards. `facts` has the FACTS that are known.

    Raises ValueError, which names the function, if the function raises an exception, and as `as_advantages` does.
    """
    function = load_advantages(advantages)
    try:
        # A copy of the rewards, because the function may change them.
        result = function(rewards_G.copy(), **facts_for(function, facts))
    except (Exception, SystemExit) as error:
        raised = f"{type(error).__name__}: {error}{raised_in(error, skip=1)}"
        raise ValueError(f"the advantage function {name_of(advantages)!r} raised {raised}") from error
    return as_advantages(result, rewards_G, name_of(advantages))


def why_scaled_again(scale_rewards: object, advantages: str | AdvantageFunction | None) -> str:
    """Why a trainer with this `scale_rewards` cannot train on the `advantages` of a generator; empty: it can."""
    if not isinstance(scale_rewards, str) or not advantages:
        return ""
    return (
        f"scale_rewards = {scale_rewards!r} of the trainer would put other advantages in the place of those that "
        f"{name_of(advantages)!r} computes (advantages of the generator or scorer): leave one of the two settings out"
    )


def as_advantages(result: Any, rewards_G: npt.NDArray[np.float64], name: str) -> FloatArray:
    """The advantages that the function `name` returned for these rewards, as float32 (G,).

    Raises ValueError unless the result has one number for each rollout, within ±MAX_VALUE.
    """
    size = rewards_G.size
    wanted = f"one number for each of the {counted(size, 'rollout')}, an array of shape ({size},)"
    failed = f"the advantage function {name!r} returned"
    try:
        returned = np.asarray(result)
    except Exception as error:  # a tensor with a gradient, or an object of the user
        raise ValueError(f"{failed} a {type(result).__name__}, which is no array ({error}): return {wanted}") from error
    if returned.dtype.kind not in "iuf":
        raise ValueError(f"{failed} {_shown(result)}: return {wanted}")
    if returned.shape != (size,):
        raise ValueError(f"{failed} an array of shape {returned.shape}: return {wanted}")
    # A comparison with NaN is False, so that NaN counts as wrong too.
    wrong_G = ~(np.abs(returned) <= MAX_VALUE)
    if wrong_G.any():
        rollout = int(wrong_G.argmax())
        raise ValueError(
            f"{failed} {returned[rollout]:g} for rollout {rollout} of a group with the rewards {_shown(rewards_G)}: "
            f"return numbers within ±{MAX_VALUE:g}, such as 0 where all rewards are equal"
        )
    return returned.astype(np.float32)


def facts_for(function: AdvantageFunction, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts for which the function has a parameter; all facts if it has a parameter like `**facts`."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return {}
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in facts.items() if takes_all or name in parameters}


def _shown(value: Any) -> str:
    """The value as an error shows it, with at most 200 characters."""
    if isinstance(value, np.ndarray):
        return str(value.tolist())[:200]
    return f"{value!r:.200}"
