"""Reward functions: score the completions of a prompt.

A reward function is a function of the user's own, or a built-in one. The reward of a rollout is the weighted sum of the
results of all its reward functions.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from replay_client.errors import ReplayError
from replay_client.rollout import MAX_VALUE
from replay_client.settings import load_function
from replay_generator.prompts.values import field_of
from replay_generator.rewards.math_answers import check_installed, same_answer
from replay_generator.rollouts.rollout import Rollout
from replay_generator.user_code import calls as user_code
from replay_generator.user_code.results import LARGEST, check_name, number_of
from replay_protos.words import counted

RewardFunction = Callable[..., float | None | Awaitable[float | None]]
"""A function that takes the prompt's row and the last text that the policy wrote, and returns a reward. A function that
returns None abstains, and only the other functions decide. A function with a parameter `rollout` also gets the whole
Rollout: its turns with their texts, the output of tools, and its `info`.

If the function is async, all calls for a group run at the same time. Otherwise the function runs in a thread, for one
group at a time. After a function has asked for a signal (`signal.alarm`, for example), it runs in a process of its
own."""
GroupRewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
"""A function with the decorator `group_reward`. It takes the prompt's row and the texts of all G rollouts, and returns
G rewards, each of which may be None. A function with a parameter `rollouts` also gets the rollouts."""
Function = TypeVar("Function", bound=Callable[..., Any])

OWN_REWARD = "rollout"
"""The rewards that environments give to their rollouts are listed under this name, beside those of reward functions."""
_SCORES_GROUPS = "scores_groups"
"""The attribute of functions with the decorator `group_reward`."""
_THREAD_SAFE = "thread_safe"
"""The attribute of functions with the decorator `thread_safe`."""
_SAFE_THREADS = 8
"""The number of groups that `thread_safe` functions score at the same time, unless `threads` is given."""


class RewardError(ReplayError):
    """A reward function failed. The message names the function and the failure."""


class AbstainedError(RewardError):
    """Every reward function abstained for a rollout. The functions are taken to have meant this, because other rollouts
    of this run have had rewards."""


def group_reward(function: Function) -> Function:
    """Decorator for a function that scores all completions of a prompt in one call, for example as one batch of a
    model."""
    setattr(function, _SCORES_GROUPS, True)
    return function


def thread_safe(function: Function) -> Function:
    """Decorator for a function that may score several groups at the same time, each in a thread of its own."""
    setattr(function, _THREAD_SAFE, True)
    return function


@dataclass(frozen=True)
class Reward:
    """One reward function in the weighted sum."""

    function: RewardFunction | GroupRewardFunction
    weight: float = 1.0
    name: str = ""
    """The name in metrics and errors; "": the function's own name."""

    def __post_init__(self) -> None:
        """Raises ValueError for a reward that cannot be used. Sets the `name` if there is none."""
        if not callable(self.function):
            raise ValueError(f"a reward must be a function, not {self.function!r}")
        if not math.isfinite(self.weight):
            raise ValueError(f"the weight of a reward must be finite, not {self.weight}")
        if not self.name:
            own_name = getattr(self.function, "__name__", type(self.function).__name__)
            object.__setattr__(self, "name", own_name)  # the class is frozen
        check_name(self.name, "the name of a reward function")
        if self.name.startswith(f"{OWN_REWARD}/"):
            raise ValueError(
                f"reward function {self.name!r} is named as a metric of rollouts: give Reward another name"
            )


Rewards = RewardFunction | GroupRewardFunction | Reward | Sequence[RewardFunction | GroupRewardFunction | Reward]
"""One or several rewards, whose weighted sum counts. A plain function has the weight 1."""


class Scorer:
    """Calls reward functions without blocking the event loop."""

    def __init__(self, rewards: Rewards | None, *, threads: int | None = None, timeout: float | None = None) -> None:
        """`rewards` None: the rollouts have rewards of their own. `threads`: the groups that functions without async
        may score at the same time; None: 1, and 8 for functions that are `thread_safe`. `timeout`: the most seconds for
        one function and one group. Raises ValueError for an empty list, and for two functions with one name."""
        listed: Sequence[RewardFunction | GroupRewardFunction | Reward]
        if rewards is None:
            listed = []
        elif isinstance(rewards, Sequence):
            listed = rewards
        else:
            listed = [rewards]
        self.rewards = [reward if isinstance(reward, Reward) else Reward(reward) for reward in listed]
        names = [reward.name for reward in self.rewards]
        if not names and rewards is not None:
            raise ValueError("rewards must name at least one function, or be None if rollouts bring their own")
        all_names = [*names, OWN_REWARD]  # `score` lists the rewards of environments under OWN_REWARD
        if len(set(all_names)) < len(all_names):
            raise ValueError(f"reward functions need names of their own, not {', '.join(names)}: give Reward a name")
        self._timeout = timeout
        self._threads = asyncio.Semaphore(threads or 1)
        """Limits how many calls of functions that are not `thread_safe` run in threads at the same time."""
        self._safe_threads = asyncio.Semaphore(threads or _SAFE_THREADS)
        """The same limit for functions that are `thread_safe`."""
        self._has_scored = False
        """True once any rollout has had a reward. Until then, None may also come from a function without `return`."""

    @property
    def scores_groups(self) -> bool:
        """True if a reward function compares the rollouts of a group, and so needs all of them at once."""
        return any(getattr(reward.function, _SCORES_GROUPS, False) for reward in self.rewards)

    async def score(
        self, row: Mapping[str, Any], texts: Sequence[str], rollouts: Sequence[Rollout] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, npt.NDArray[np.float32]]]:
        """The weighted sums (G,), and the rewards (G,) of each function by its name. Raises RewardError.

        NaN in the rewards of a function: the function abstained, and the sum is that of the other functions. NaN in a
        sum: all functions abstained, so the rollout has no reward (`unscored`).

        `texts`: the last text of the policy in each rollout. `rollouts` None: there are no rollouts, only texts. The
        rewards of environments count as a function with the name "rollout" and the weight 1. Either all rollouts have
        such a reward, or none.
        """
        weights: dict[str, float] = {}
        by_name: dict[str, npt.NDArray[np.float64]] = {}
        for reward in self.rewards:
            weights[reward.name] = reward.weight
            by_name[reward.name] = await self._rewards_of(reward, row, texts, rollouts)
        own: list[float | None] = [None] * len(texts)
        if rollouts:
            own = [rollout.reward for rollout in rollouts]
        # Without reward functions, the rollouts must have rewards: if they have none, `_own_rewards` raises the error.
        if any(value is not None for value in own) or not self.rewards:
            weights[OWN_REWARD] = 1.0
            by_name[OWN_REWARD] = _own_rewards(own)
        total = np.zeros(len(texts))  # (G,)
        abstained = np.ones(len(texts), np.bool_)  # (G,) True: no function so far has scored the rollout
        for name, rewards in by_name.items():
            total += weights[name] * np.nan_to_num(rewards)  # a function that abstained adds 0
            abstained &= np.isnan(rewards)
        total[abstained] = math.nan
        largest = float(np.abs(total[~abstained]).max(initial=0.0))
        if not largest <= MAX_VALUE:  # NaN is refused too
            names = ", ".join(repr(name) for name in by_name)
            raise RewardError(
                f"the weighted sum of {names} is {largest:g}, and no trainer can use a reward beyond ±{MAX_VALUE:g}: "
                "scale the rewards"
            )
        if not abstained.all():
            self._has_scored = True
        return total.astype(np.float32), {name: rewards.astype(np.float32) for name, rewards in by_name.items()}

    def unscored(self) -> RewardError:
        """The error for a rollout for which every function abstained. It is an AbstainedError if any rollout of this
        run has had a reward."""
        functions = " and ".join(f"{reward.name!r}{user_code.where(reward.function)}" for reward in self.rewards)
        message = f"it has no reward: {functions} returned None, and one function must give a number"
        if self._has_scored:
            return AbstainedError(message)
        return RewardError(message)

    async def _rewards_of(
        self, reward: Reward, row: Mapping[str, Any], texts: Sequence[str], rollouts: Sequence[Rollout] | None
    ) -> npt.NDArray[np.float64]:
        """The rewards (G,) of one function; NaN: the function abstained. Raises RewardError."""
        parameter = _rollout_parameter(reward.function)
        if parameter and rollouts is None:
            raise _failed(reward, f"has a parameter {parameter!r}, and here are texts without rollouts")
        results = await self._call(reward, row, texts, rollouts)
        # A text, a dict and an array of numpy without axes can be iterated, and are no list of rewards.
        is_single_value = isinstance(results, str | bytes | Mapping) or getattr(results, "ndim", 1) == 0
        if is_single_value or not isinstance(results, Iterable):
            shown = user_code.shown(results)
            raise _failed(reward, f"returned {shown}, not one reward for each completion ({len(texts)})")
        values = list(results)
        if len(values) != len(texts):
            raise _failed(reward, f"returned {counted(len(values), 'reward')} for {counted(len(texts), 'completion')}")
        try:
            numbers = np.array([number_of(value) for value in values if value is not None])
        except ValueError as error:
            raise _failed(reward, f"returned {error}") from error
        if not (np.abs(numbers) <= LARGEST).all():  # NaN is refused too
            raise _failed(reward, f"returned {numbers.tolist()}: rewards must be finite, in float32 too")
        is_number = [value is not None for value in values]
        rewards = np.full(len(values), math.nan)
        rewards[is_number] = numbers
        return rewards

    async def _call(
        self, reward: Reward, row: Mapping[str, Any], texts: Sequence[str], rollouts: Sequence[Rollout] | None
    ) -> Any:
        """The results of one function, as it returns them. Raises RewardError if it fails or takes too long."""
        # The clock starts with the call: the time in which a group waits for a thread does not count.
        async with self._thread(reward.function):
            try:
                async with asyncio.timeout(self._timeout) as limit:
                    return await _results(reward.function, row, list(texts), list(rollouts or ()))
            except TimeoutError as error:
                if not limit.expired():  # the function itself has raised TimeoutError
                    raise _failed(reward, f"raised TimeoutError: {error}", error) from error
                what = counted(len(texts), "completion")
                raise _failed(reward, f"took longer than {self._timeout:g} s for {what}") from error
            except user_code.UserCodeError as error:
                raise RewardError(f"reward function {reward.name!r} {error.how}{error.place}") from error
            except Exception as error:
                raise _failed(reward, f"raised {user_code.in_words(error)}", error) from error

    def _thread(self, function: Callable[..., Any]) -> AbstractAsyncContextManager[None]:
        """The context for a call of `function`. If the call needs a thread, entering the context waits until one is
        free."""
        if user_code.is_async(function):
            return nullcontext()
        if getattr(function, _THREAD_SAFE, False):
            return self._safe_threads
        return self._threads


def _own_rewards(rewards: Sequence[float | None]) -> npt.NDArray[np.float64]:
    """The rewards (G,) that the environments gave the rollouts. Raises RewardError if one is missing or not finite."""
    missing = sum(reward is None for reward in rewards)
    if missing > 0:
        raise RewardError(
            f"{missing} of {len(rewards)} rollouts have no reward: the hook returns Rollout(..., reward=...) for each, "
            f"or the generator gets a reward function"
        )
    own = np.array(rewards, np.float64)
    if not (np.abs(own) <= LARGEST).all():  # NaN is refused too
        raise RewardError(f"the hook gave the rewards {own.tolist()}: they must be finite, in float32 too")
    return own


def _rollout_parameter(function: Callable[..., Any]) -> str | None:
    """The parameter by which a function asks for rollouts: "rollout" or "rollouts"; None: it wants only texts."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return None
    for name in ("rollout", "rollouts"):
        if name in parameters:
            return name
    return None


async def _results(
    function: Callable[..., Any], row: Mapping[str, Any], texts: list[str], rollouts: list[Rollout]
) -> Any:
    """The results of one call for the whole group, if the function is a `group_reward`; otherwise of one call for each
    rollout."""
    parameter = _rollout_parameter(function)
    options: dict[str, Any] = {}
    if getattr(function, _SCORES_GROUPS, False):
        if parameter:
            options[parameter] = rollouts
        return await user_code.call(function, row, texts, **options)
    calls: list[user_code.Call] = []
    for number, text in enumerate(texts):
        options = {}
        if parameter:
            options[parameter] = rollouts[number]
        calls.append(((row, text), options))
    return await user_code.call_each(function, calls)


ANSWER = "answer"
"""The field of a row in which built-in rewards find the expected answer, unless another field is named."""


def exact_match(row: Mapping[str, Any], completion_text: str, *, answer_field: str = ANSWER) -> float:
    """1.0 if the completion is the row's answer, else 0.0. White space at the beginning and the end does not count.

    `answer_field`: the field with the answer. It may be a path, such as `reward_model.ground_truth`.
    """
    expected = str(_expected("exact_match", row, answer_field))
    return float(completion_text.strip() == expected.strip())


def math_answer(row: Mapping[str, Any], completion_text: str, *, answer_field: str = ANSWER) -> float:
    """1.0 if the final answer of the completion is the same number or formula as the row's answer, else 0.0.

    The package math-verify compares them. Both answers may stand in a whole solution: in `\\boxed{}`, or behind `####`
    as in GSM8K. Text before `</think>` does not count. `answer_field`: the field with the row's answer, which may be a
    path. A list in this field has several right answers. Raises ImportError without math-verify (the extra `math`).
    """
    expected = _expected("math_answer", row, answer_field)
    answers = expected if isinstance(expected, list | tuple) else [expected]
    return float(same_answer([str(answer) for answer in answers], completion_text))


def _expected(name: str, row: Mapping[str, Any], answer_field: str) -> Any:
    """The answer in a row. `name`: the reward function, for the error message. Raises ValueError if the row has no
    answer."""
    needed = f"{name} needs an {answer_field!r} in each row"
    try:
        expected = field_of(row, answer_field)
    except KeyError as error:
        raise ValueError(
            f"{needed}; {error.args[0]}: name another field with {name}:FIELD, such as {name}:reward_model.ground_truth"
        ) from None
    if expected is None or expected == "" or expected == []:
        raise ValueError(f"{needed}; here it is {expected!r}")
    return expected


BUILT_IN_REWARDS: dict[str, Callable[..., float]] = {"exact_match": exact_match, "math_answer": math_answer}


def load_reward(name: str) -> Reward:
    """The reward named "exact_match", "math_answer" or "package.module:function". "=0.5" at the end sets its weight.

    "exact_match:reward_model.ground_truth" is `exact_match` with this `answer_field`. Raises ValueError for a name that
    leads to no function, and ImportError if a package that the function needs is missing.
    """
    path, equals, weight_text = name.partition("=")
    weight = 1.0
    if equals:
        try:
            weight = float(weight_text)
        except ValueError:
            raise ValueError(f"reward {name!r}: its weight must be a number, not {weight_text!r}") from None
    built_in, _, answer_field = path.partition(":")
    if built_in not in BUILT_IN_REWARDS:
        return Reward(load_function("reward", path, BUILT_IN_REWARDS), weight)
    if built_in == "math_answer":
        check_installed()
    function = BUILT_IN_REWARDS[built_in]
    if answer_field:
        # The name is given, since a partial has none.
        return Reward(partial(function, answer_field=answer_field), weight, built_in)
    return Reward(function, weight)


def _failed(reward: Reward, how: str, error: Exception | None = None) -> RewardError:
    """The error that says how a reward function failed. `error`: the exception that it raised; None: it raised none."""
    return RewardError(f"reward function {reward.name!r} {how}{user_code.where(reward.function, error)}")
