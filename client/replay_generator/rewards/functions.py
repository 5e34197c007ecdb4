"""Reward functions: score the rollouts of a prompt.

A reward function is written by the user, or built in. The reward of a rollout is the weighted sum of the results of all
reward functions of the run.
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
"""A function that takes the row of a prompt and the last text that the policy wrote in a rollout, and returns the
reward of the rollout. If it returns None, it abstains, and only the other functions decide about the rollout. If it has
a parameter `rollout`, it also gets the whole Rollout: the turns with their texts, the output of tools, and `info`.

If the function is async, all calls for a group run at the same time. Otherwise the function runs in a thread, for one
group at a time. A function that asks for a signal (by `signal.alarm`, for example) runs in a process of its own from
then on, because only the main thread of a process can handle signals."""
GroupRewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
"""A function with the decorator `group_reward`. It takes the row of a prompt and the last texts of all G rollouts, and
returns G rewards, each of which may be None. If it has a parameter `rollouts`, it also gets the G rollouts."""
Function = TypeVar("Function", bound=Callable[..., Any])

OWN_REWARD = "rollout"
"""The name under which the rewards that environments give to their rollouts are listed, beside the names of reward
functions."""
_SCORES_GROUPS = "scores_groups"
"""The name of the attribute that the decorator `group_reward` sets on a function."""
_THREAD_SAFE = "thread_safe"
"""The name of the attribute that the decorator `thread_safe` sets on a function."""
_SAFE_THREADS = 8
"""The number of groups that `thread_safe` functions score at the same time, unless `threads` is given."""


class RewardError(ReplayError):
    """A reward function failed. The message names the function and the failure."""


class AbstainedError(RewardError):
    """Every reward function abstained for a rollout. Other rollouts of this run have had rewards, so the functions
    probably abstained on purpose, and not because a `return` is missing."""


def group_reward(function: Function) -> Function:
    """Decorator for a function that scores all rollouts of a group in one call, for example as one batch for a reward
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
    """The name of the reward in metrics and errors; "": it gets the name of the function."""

    def __post_init__(self) -> None:
        """Checks the fields, and sets `name` if it is empty. Raises ValueError for a reward that cannot be used."""
        if not callable(self.function):
            raise ValueError(f"a reward must be a function, not {self.function!r}")
        if not math.isfinite(self.weight):
            raise ValueError(f"the weight of a reward must be finite, not {self.weight}")
        if not self.name:
            own_name = getattr(self.function, "__name__", type(self.function).__name__)
            object.__setattr__(self, "name", own_name)  # the class is frozen, so a plain assignment raises an error
        check_name(self.name, "the name of a reward function")
        if self.name.startswith(f"{OWN_REWARD}/"):
            raise ValueError(
                f"reward function {self.name!r} is named as a metric of rollouts: give Reward another name"
            )


Rewards = RewardFunction | GroupRewardFunction | Reward | Sequence[RewardFunction | GroupRewardFunction | Reward]
"""One reward, or several whose weighted sum counts. A function that is not in a Reward has the weight 1."""


class Scorer:
    """Calls reward functions without blocking the event loop."""

    def __init__(self, rewards: Rewards | None, *, threads: int | None = None, timeout: float | None = None) -> None:
        """`rewards` None: the rollouts have rewards of their own, for example from environments.

        `threads`: how many groups the functions without async may score at the same time; None: 1 group, and 8 groups
        for functions that are `thread_safe`. `timeout`: the most seconds for one function and one group; None: no
        limit.

        Raises ValueError for an empty list, and for two functions with one name.
        """
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
        """True once any rollout has had a reward. Before that, results of None may mean that a function lacks a
        `return`."""

    @property
    def scores_groups(self) -> bool:
        """True if any reward function is a `group_reward`, which needs all rollouts of a group at once."""
        return any(getattr(reward.function, _SCORES_GROUPS, False) for reward in self.rewards)

    async def score(
        self, row: Mapping[str, Any], texts: Sequence[str], rollouts: Sequence[Rollout] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, npt.NDArray[np.float32]]]:
        """Scores a group. Returns the weighted sums (G,), and the rewards (G,) that each function gave, by its name.

        `row`: the row of the prompt. `texts`: the last text of the policy in each rollout. `rollouts` None: there are
        no rollouts, only texts.

        If a function abstained for a rollout, its reward is NaN, and the sum is that of the other functions. If all
        functions abstained, the sum is NaN: the rollout has no reward, and `unscored` makes the error for it.

        If environments gave the rollouts rewards, these count like those of a function with the name "rollout" and the
        weight 1. Raises RewardError if a function fails, if a sum is too large, or if only some of the rollouts have
        rewards from environments.
        """
        weights: dict[str, float] = {}
        by_name: dict[str, npt.NDArray[np.float64]] = {}
        for reward in self.rewards:
            weights[reward.name] = reward.weight
            by_name[reward.name] = await self._rewards_of(reward, row, texts, rollouts)
        own: list[float | None] = [None] * len(texts)  # the rewards that environments gave
        if rollouts:
            own = [rollout.reward for rollout in rollouts]
        # If there is no reward function, `_own_rewards` is called even if no rollout has a reward, to raise the error.
        if any(value is not None for value in own) or not self.rewards:
            weights[OWN_REWARD] = 1.0
            by_name[OWN_REWARD] = _own_rewards(own)
        total = np.zeros(len(texts))  # (G,)
        all_abstained = np.ones(len(texts), np.bool_)  # (G,) True: no function so far has scored the rollout
        for name, rewards in by_name.items():
            total += weights[name] * np.nan_to_num(rewards)  # NaN, where the function abstained, adds 0
            all_abstained &= np.isnan(rewards)
        total[all_abstained] = math.nan
        scored = total[~all_abstained]
        largest = float(np.abs(scored).max(initial=0.0))
        if not largest <= MAX_VALUE:  # also true if `largest` is NaN
            names = ", ".join(repr(name) for name in by_name)
            raise RewardError(
                f"the weighted sum of {names} is {largest:g}, and no trainer can use a reward beyond ±{MAX_VALUE:g}: "
                "scale the rewards"
            )
        if scored.size:
            self._has_scored = True
        return total.astype(np.float32), {name: rewards.astype(np.float32) for name, rewards in by_name.items()}

    def unscored(self) -> RewardError:
        """The error for a rollout for which every function abstained. It is an AbstainedError if another rollout of
        this run has had a reward."""
        functions = " and ".join(f"{reward.name!r}{user_code.where(reward.function)}" for reward in self.rewards)
        message = f"it has no reward: {functions} returned None, and one function must give a number"
        if self._has_scored:
            return AbstainedError(message)
        return RewardError(message)

    async def _rewards_of(
        self, reward: Reward, row: Mapping[str, Any], texts: Sequence[str], rollouts: Sequence[Rollout] | None
    ) -> npt.NDArray[np.float64]:
        """The rewards (G,) that one function gives a group; NaN: the function abstained for the rollout.

        Raises RewardError if the function fails, or if its results are no rewards.
        """
        parameter = _rollout_parameter(reward.function)
        if parameter and rollouts is None:
            raise _failed(reward, f"has a parameter {parameter!r}, and here are texts without rollouts")
        results = await self._call(reward, row, texts, rollouts)
        # Texts, dicts and arrays of NumPy without axes are instances of Iterable, too, but no lists of rewards.
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
        if not (np.abs(numbers) <= LARGEST).all():  # also true if any of them is NaN
            raise _failed(reward, f"returned {numbers.tolist()}: rewards must be finite, in float32 too")
        is_number = [value is not None for value in values]
        rewards = np.full(len(values), math.nan)
        rewards[is_number] = numbers
        return rewards

    async def _call(
        self, reward: Reward, row: Mapping[str, Any], texts: Sequence[str], rollouts: Sequence[Rollout] | None
    ) -> Any:
        """The results of one function, as it returns them. Raises RewardError if it fails or takes too long."""
        # The clock starts with the call, so the time in which a group waits for a thread does not count.
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
        """The context in which to call `function`. If the function needs a thread, entering the context waits until
        one more call may run in a thread."""
        if user_code.is_async(function):
            return nullcontext()
        if getattr(function, _THREAD_SAFE, False):
            return self._safe_threads
        return self._threads


def _own_rewards(rewards: Sequence[float | None]) -> npt.NDArray[np.float64]:
    """The `rewards` (G,) that environments gave the rollouts, as an array. Raises RewardError if one is missing or not
    finite."""
    missing = sum(reward is None for reward in rewards)
    if missing > 0:
        raise RewardError(
            f"{missing} of {len(rewards)} rollouts have no reward: the hook returns Rollout(..., reward=...) for each, "
            f"or the generator gets a reward function"
        )
    own = np.array(rewards, np.float64)
    if not (np.abs(own) <= LARGEST).all():  # also true if any of them is NaN
        raise RewardError(f"the hook gave the rewards {own.tolist()}: they must be finite, in float32 too")
    return own


def _rollout_parameter(function: Callable[..., Any]) -> str | None:
    """The name of the parameter by which a function gets rollouts: "rollout" or "rollouts"; None: it has neither."""
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
    """Calls a function for a group, and returns its results. A `group_reward` is called once for the whole group, and
    any other function once for each rollout."""
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
"""The field of a row in which built-in rewards find the expected answer, unless the user names another field."""


def exact_match(row: Mapping[str, Any], completion_text: str, *, answer_field: str = ANSWER) -> float:
    """1.0 if the completion is the row's answer, else 0.0. White space at the beginning and the end does not count.

    `answer_field`: the field of the row with the answer. It may be a path, such as `reward_model.ground_truth`.
    """
    expected = str(_expected("exact_match", row, answer_field))
    return float(completion_text.strip() == expected.strip())


def math_answer(row: Mapping[str, Any], completion_text: str, *, answer_field: str = ANSWER) -> float:
    """1.0 if the final answer of the completion is the same number or formula as the row's answer, else 0.0.

    The package math-verify compares the two. Each of them may stand in a whole solution: in `\\boxed{}`, or behind
    `####` as in GSM8K. In the completion, text before `</think>` does not count.

    `answer_field`: the field with the row's answer, which may be a path. If the field holds a list, each element of the
    list is a right answer. Raises ImportError if math-verify is needed and not installed (the extra `math`).
    """
    expected = _expected("math_answer", row, answer_field)
    answers = expected if isinstance(expected, list | tuple) else [expected]
    return float(same_answer([str(answer) for answer in answers], completion_text))


def _expected(name: str, row: Mapping[str, Any], answer_field: str) -> Any:
    """The answer that a row expects, from its field `answer_field`. Raises ValueError if the row has no answer.

    `name`: the name of the reward function, for errors.
    """
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
    """Loads the reward of this name. "=0.5" at the end of the name sets its weight.

    The name is "package.module:function", or a built-in reward: "exact_match" or "math_answer". A field behind the name
    of a built-in reward is its `answer_field`, as in "exact_match:reward_model.ground_truth".

    Raises ValueError for a name that leads to no function, and ImportError if a package that the function needs is
    missing.
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
        with_field = partial(function, answer_field=answer_field)
        return Reward(with_field, weight, name=built_in)  # with a name, because a `partial` has no `__name__`
    return Reward(function, weight)


def _failed(reward: Reward, how: str, error: Exception | None = None) -> RewardError:
    """The error for a reward function that failed. `how`: what it did, in words. `error`: the exception that it raised;
    None: it raised none."""
    return RewardError(f"reward function {reward.name!r} {how}{user_code.where(reward.function, error)}")
