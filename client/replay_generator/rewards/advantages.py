"""Advantages: computes the advantages of a group from its rewards, either as `scale_rewards` says or by a function of
the user's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from replay_client.advantages import AdvantageFunction, as_advantages, facts_for, load_advantages, name_of
from replay_client.errors import ReplayError
from replay_client.scoring import group_advantages
from replay_generator.rollouts.rollout import PlayedRollout
from replay_generator.user_code import calls as user_code

if TYPE_CHECKING:
    from replay_generator.config import GeneratorConfig, ScorerConfig

FloatArray = npt.NDArray[np.float32]


class AdvantageError(ReplayError):
    """The user's function failed. The message names the function and the failure."""


class Advantages:
    """Computes the advantages of groups, without blocking the event loop."""

    def __init__(self, config: GeneratorConfig | ScorerConfig) -> None:
        """Raises ValueError if the user's function cannot be loaded."""
        self._scale = config.scale_rewards
        self._timeout = config.reward_timeout
        self.name = ""
        """The name of the user's function; "": the user has no function, and `scale_rewards` decides."""
        self._function: AdvantageFunction | None = None
        if config.advantages is not None:
            self.name = name_of(config.advantages)
            self._function = load_advantages(config.advantages)
        # The function is called for one group at a time, so that it may keep state, such as a mean over all groups,
        # without being thread-safe.
        self._turn = asyncio.Semaphore(1)

    async def compute(
        self,
        rewards: FloatArray,
        row: Mapping[str, Any],
        played: Sequence[PlayedRollout],
        by_function: Mapping[str, FloatArray],
    ) -> FloatArray:
        """The advantages (G,) of a group, in float32. Raises AdvantageError if the user's function fails.

        `rewards` (G,): the rewards of the rollouts. `row`: the row of the prompt. `played`: the G rollouts.
        `by_function`: the rewards (G,) that each reward function gave, by the name of the function.
        """
        if self._function is None:
            return group_advantages(rewards, scale=self._scale)
        rewards_G = rewards.astype(np.float64)
        lengths = []  # the number of sampled tokens of each rollout
        for rollout in played:
            lengths.append(sum(int(sequence.sampled_mask.sum()) for sequence in rollout.sequences))
        facts = {
            "row": row,
            "lengths_G": np.array(lengths, np.int64),
            "rewards_by_function": {name: values.astype(np.float64) for name, values in by_function.items()},
        }
        result = await self._call(self._function, rewards_G, facts)
        try:
            return as_advantages(result, rewards_G, self.name)
        except ValueError as error:  # the result is no array of G finite numbers
            raise AdvantageError(f"{error}{user_code.where(self._function)}") from error

    async def _call(
        self, function: AdvantageFunction, rewards_G: npt.NDArray[np.float64], facts: Mapping[str, Any]
    ) -> Any:
        """Calls the user's function, and returns its result. Raises AdvantageError if the function raises an error or
        takes too long.

        `facts`: by name, all arguments that the function may ask for beside the rewards.
        """
        subject = f"the advantage function {self.name!r}"  # the first words of each error
        # The clock starts with the call, so the time in which a group waits for its turn does not count.
        async with self._turn:
            try:
                async with asyncio.timeout(self._timeout) as limit:
                    wanted_facts = facts_for(function, facts)
                    return await user_code.call(function, rewards_G.copy(), **wanted_facts)
            except TimeoutError as error:
                if limit.expired():
                    how = f"took longer than {self._timeout:g} s (reward_timeout)"
                else:  # the function itself has raised TimeoutError
                    how = f"raised TimeoutError: {error}"
                raise AdvantageError(f"{subject} {how}{user_code.where(function, error)}") from error
            except user_code.UserCodeError as error:
                raise AdvantageError(f"{subject} {error.how}{error.place}") from error
            except Exception as error:
                how = f"raised {user_code.in_words(error)}"
                raise AdvantageError(f"{subject} {how}{user_code.where(function, error)}") from error
