"""RewardWatch: notices that all rollouts of many groups got the same reward, as from a function that fits no answer.

The generator, or the scorer, reports this to the server (`describe`), with one example: the answer that the row
expects, and the text of the policy. `replay doctor` shows them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_generator.notices import Watch
from replay_generator.prompts.values import field_of
from replay_generator.rewards.functions import ANSWER, Reward

LEAST_GROUPS = 20
"""The groups in a row with one reward that are reported first. Their number is reported anew when it has doubled."""
_FIELDS = (ANSWER, "reward_model.ground_truth", "solution")
"""The fields in which rows have the expected answer, if no reward names another field."""
_MOST_SHOWN = 80
"""The most characters of the end of the expected answer, and of the end of the text of the policy."""


class RewardWatch(Watch):
    """Counts the groups in a row whose rollouts all have one reward, the same for all groups."""

    def __init__(self, rewards: Sequence[Reward] = ()) -> None:
        self._fields: list[str] = []
        """The fields in which a row may have the expected answer, the likeliest first."""
        for reward in rewards:
            if isinstance(reward.function, partial):
                answer_field = reward.function.keywords.get("answer_field")
                if answer_field:
                    self._fields.append(answer_field)
        self._fields += _FIELDS
        self._value: float | None = None
        """The reward of all rollouts of the latest groups; None: those of the last group differ."""
        self._groups = 0
        self._reports_at = LEAST_GROUPS
        self._description: dict[str, str] = {}

    @property
    def description(self) -> dict[str, str]:
        """The facts for the server, as JSON by name; empty: rewards differ, or there are few groups."""
        return self._description

    def record(self, rewards: npt.NDArray[np.float32], row: Mapping[str, Any], text: str) -> None:
        """Counts a group. `text`: the last text of the policy in one of its rollouts."""
        value = float(rewards[0])
        are_equal = bool((rewards == rewards[0]).all())
        if not are_equal:
            self._forget(None)
        elif value != self._value:
            self._forget(value)
        self._groups += 1
        if self._value is None or self._groups < self._reports_at:
            return
        self._reports_at = 2 * self._groups
        facts = {"value": value, "groups": self._groups, "got": text.strip()[-_MOST_SHOWN:]}
        expected = self._expected(row)
        if expected is not None:
            facts["expected"] = str(expected).strip()[-_MOST_SHOWN:]
        self._description = {"one_reward": json.dumps(facts)}

    def _forget(self, value: float | None) -> None:
        self._value = value
        self._groups = 0
        self._reports_at = LEAST_GROUPS
        self._description = {}

    def _expected(self, row: Mapping[str, Any]) -> Any:
        """The answer that a row expects; None: it has none of the fields."""
        for name in self._fields:
            try:
                return field_of(row, name)
            except KeyError:
                continue
        return None
