"""RewardWatch: notices if all rollouts of many groups in a row have the same reward, which points to a wrong reward
function.

The generator or the scorer reports this to the server (`describe`), with one example: the answer that a row expects,
and the text of the policy. `replay doctor` shows both.
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
"""The first report is made after this many groups in a row with the same reward. Another report is made each time that
the number of these groups has doubled."""
_FIELDS = (ANSWER, "reward_model.ground_truth", "solution")
"""The fields in which a row may have the expected answer. They are tried after the fields that the rewards name."""
_MOST_SHOWN = 80
"""The most characters of a text in the example. Of a longer text, the example has the end."""


class RewardWatch(Watch):
    """Counts the groups in a row whose rollouts all have the same reward."""

    def __init__(self, rewards: Sequence[Reward] = ()) -> None:
        """`rewards`: the reward functions of the run. Some of them may name the field with the expected answer."""
        self._fields: list[str] = []
        """The fields in which a row may have the expected answer. If a row has several, the first one counts."""
        for reward in rewards:
            # If the user has named the field for a built-in function, `load_reward` has made a partial with that field.
            if isinstance(reward.function, partial):
                answer_field = reward.function.keywords.get("answer_field")
                if answer_field:
                    self._fields.append(answer_field)
        self._fields += _FIELDS
        self._value: float | None = None
        """The reward that all rollouts of the last groups have; None: the rewards of the last group differ."""
        self._groups = 0
        """The number of the last groups in a row whose rollouts all have this reward."""
        self._reports_at = LEAST_GROUPS
        """The number of groups at which the next report is due."""
        self._description: dict[str, str] = {}
        """The last report."""

    @property
    def description(self) -> dict[str, str]:
        """The report for the server: facts as JSON, by name. Empty: rewards differ, or too few groups were counted."""
        return self._description

    def record(self, rewards: npt.NDArray[np.float32], row: Mapping[str, Any], text: str) -> None:
        """Counts a group, and makes the report if it is due.

        `rewards`: the rewards (G,) of the group. `row`: the row of its prompt. `text`: the last text of the policy in
        one of its rollouts.
        """
        value = float(rewards[0])
        are_equal = bool((rewards == rewards[0]).all())
        if not are_equal:
            self._start_again(value=None)
            return
        if value != self._value:
            self._start_again(value)
        self._groups += 1
        if self._groups < self._reports_at:
            return
        self._reports_at = 2 * self._groups
        facts = {"value": value, "groups": self._groups, "got": text.strip()[-_MOST_SHOWN:]}
        expected = self._expected(row)
        if expected is not None:
            facts["expected"] = str(expected).strip()[-_MOST_SHOWN:]
        self._description = {"one_reward": json.dumps(facts)}

    def _start_again(self, value: float | None) -> None:
        """Sets the count to 0, and drops the report. `value`: the reward that all rollouts of the new group have; None:
        their rewards differ."""
        self._value = value
        self._groups = 0
        self._reports_at = LEAST_GROUPS
        self._description = {}

    def _expected(self, row: Mapping[str, Any]) -> Any:
        """The answer that a row expects; None: the row has none of the fields that may hold it."""
        for name in self._fields:
            try:
                return field_of(row, name)
            except KeyError:
                continue
        return None
