"""Advantages: loads, checks and calls the user's advantage functions.

The setting `advantages = "package.module:function"` names such a function. The function takes the rewards of one group,
and returns the advantage of each rollout. `advantages_by` calls the function and checks the returned advantages.

    def leave_one_out(rewards_G):
        mean_of_others_G = (rewards_G.sum() - rewards_G) / (len(rewards_G) - 1)
        return rewards_G - mean_of_others_G

If the function has parameters with names in `FACTS`, it is called with these facts too. Axis: G rollouts of the group.
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
"""A function that takes float64 rewards (G,), and as keyword arguments the facts for which it has parameters (see
FACTS). It returns (G,) advantages."""
FloatArray = npt.NDArray[np.float32]
FACTS = ("row", "lengths_G", "rewards_by_function")
"""The names of the facts that a function may ask for.

row: the row of the prompt, a mapping. lengths_G: int64 (G,), the number of tokens that the policy wrote in each
rollout. rewards_by_function: float64 (G,) rewards of each reward function, by the function's name, not yet multiplied
by the function's weight; NaN where the function abstained."""
ADVANTAGES_BY = "advantages_by"
"""A key in `RolloutGroup.meta`. Its value is the name of the user's function that computed the group's advantages."""
_TRIAL_SIZE = 4
"""The number of rollouts in a made-up group, if the size of the real groups is not known."""


def name_of(advantages: str | AdvantageFunction) -> str:
    """The name of a function for messages: the name in the settings, or the function's own name."""
    if isinstance(advantages, str):
        return advantages
    return getattr(advantages, "__qualname__", type(advantages).__name__)


def load_advantages(advantages: str | AdvantageFunction) -> AdvantageFunction:
    """Loads the function that "package.module:function" names. A function is returned as it is.

    Raises ValueError for a name that leads to no function, for an async function, and for a function that cannot be
    called as AdvantageFunction says.
    """
    if isinstance(advantages, str):
        function = load_function("advantages", advantages, built_in={})
    else:
        function = advantages
    name = name_of(advantages)
    # An object of a class with an async `__call__` is async too.
    call_method = getattr(function, "__call__", None)  # noqa: B004
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method):
        raise ValueError(f"advantages {name!r} is async: write it without async, it runs in a thread")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature, so nothing can be checked
        return function
    try:
        # `bind` only checks that the function has parameters for these arguments. It calls nothing, so the values of
        # the arguments do not matter.
        facts_without_values = facts_for(function, dict.fromkeys(FACTS))
        signature.bind(np.zeros(1), **facts_without_values)
    except TypeError as error:
        raise ValueError(
            f"advantages {name!r} has the parameters {signature}, and is called with the rewards alone ({error}): "
            f"besides them it may have parameters named {', '.join(FACTS)}"
        ) from None
    return function


def check_advantages(advantages: str | AdvantageFunction, group_size: int = _TRIAL_SIZE) -> None:
    """Calls the function with made-up rewards, so that a mistake ends a run before its first group.

    The rewards of the first made-up group differ. The rewards of the second are equal. There, a function that divides
    by the standard deviation of the rewards returns NaN, which is refused. The function is not called if it has a
    parameter `row`, `rewards_by_function` or `**facts`, because these facts cannot be made up. Raises ValueError as
    `load_advantages` and `advantages_by` do.
    """
    function = load_advantages(advantages)
    made_up_facts = {"lengths_G": np.arange(1, group_size + 1)}
    wanted_facts = facts_for(function, dict.fromkeys(FACTS)).keys()
    if not wanted_facts <= made_up_facts.keys():
        return
    alternating_rewards_G = np.array([float(rollout % 2) for rollout in range(group_size)])
    equal_rewards_G = np.ones(group_size)
    for rewards_G in (alternating_rewards_G, equal_rewards_G):
        with np.errstate(all="ignore"):  # numpy's warning of a division by 0 adds nothing to the error for NaN
            advantages_by(advantages, rewards_G, made_up_facts)


def advantages_by(
    advantages: str | AdvantageFunction, rewards_G: npt.NDArray[np.float64], facts: Mapping[str, Any]
) -> FloatArray:
    """Calls the function with these rewards, checks the advantages that it returns, and returns them as float32 (G,).

    `facts` has the value of each known fact by its name in FACTS. Raises ValueError that names the function if the
    function raises an exception, and in the cases that `load_advantages` and `as_advantages` list.
    """
    function = load_advantages(advantages)
    try:
        # Pass a copy of the rewards, because the function may change them.
        result = function(rewards_G.copy(), **facts_for(function, facts))
    except (Exception, SystemExit) as error:  # SystemExit: a `sys.exit` in the user's code must not end the generator
        place = raised_in(error, skip=1)  # skip the outermost frame, which is this function
        raised = f"{type(error).__name__}: {error}{place}"
        raise ValueError(f"the advantage function {name_of(advantages)!r} raised {raised}") from error
    return as_advantages(result, rewards_G, name_of(advantages))


def why_scaled_again(scale_rewards: object, advantages: str | AdvantageFunction | None) -> str:
    """Says why a trainer with this `scale_rewards` cannot train on what the function `advantages` computed.

    Empty if the trainer can train on it, or if `advantages` names no function. If `scale_rewards` is a text, the
    trainer computes advantages itself. If it is None, the trainer trains on the advantages of the group.
    """
    trainer_computes_advantages = isinstance(scale_rewards, str)
    if not trainer_computes_advantages or not advantages:
        return ""
    return (
        f"scale_rewards = {scale_rewards!r} of the trainer would put other advantages in the place of those that "
        f"{name_of(advantages)!r} computes (advantages of the generator or scorer): leave one of the two settings out"
    )


def as_advantages(result: Any, rewards_G: npt.NDArray[np.float64], name: str) -> FloatArray:
    """Checks the `result` that the function `name` returned for these rewards, and returns it as float32 (G,).

    Raises ValueError unless the result has one number for each rollout, within ±MAX_VALUE.
    """
    size = rewards_G.size
    wanted = f"one number for each of the {counted(size, 'rollout')}, an array of shape ({size},)"
    begin = f"the advantage function {name!r} returned"  # each error begins with this
    try:
        advantages = np.asarray(result)
    except Exception as error:  # for example a tensor of torch that has a gradient
        raise ValueError(f"{begin} a {type(result).__name__}, which is no array ({error}): return {wanted}") from error
    is_number = advantages.dtype.kind in "iuf"  # signed, unsigned, float
    if not is_number:
        raise ValueError(f"{begin} {_shown(result)}: return {wanted}")
    if advantages.shape != (size,):
        raise ValueError(f"{begin} an array of shape {advantages.shape}: return {wanted}")
    # A comparison with NaN is False, so NaN counts as wrong too.
    wrong_G = ~(np.abs(advantages) <= MAX_VALUE)
    if wrong_G.any():
        rollout = int(wrong_G.argmax())  # the first wrong rollout
        raise ValueError(
            f"{begin} {advantages[rollout]:g} for rollout {rollout} of a group with the rewards {_shown(rewards_G)}: "
            f"return numbers within ±{MAX_VALUE:g}, such as 0 where all rewards are equal"
        )
    return advantages.astype(np.float32)


def facts_for(function: AdvantageFunction, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the facts for which the function has a parameter, by name.

    These are all facts if the function has a parameter like `**facts`, and none if Python does not know its parameters.
    """
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
