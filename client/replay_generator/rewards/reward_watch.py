"""RewardWatch: notices that all rollouts of many groups got one reward, as from a function that fits no answer.

The generator, or the scorer, tells the server so (`describe`), with one pair of what the row expects and what the
policy has said; `replay doctor` shows it.
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
"""Groups in a row with one reward that are worth a word. The number of them is told anew when it has doubled."""
_FIELDS = (ANSWER, "reward_model.ground_truth", "solution")
"""Where rows have what they expect, if no reward says so."""
_MOST_SHOWN = 80
"""Characters of what is expected, and of the end of what was said."""


class RewardWatch(Watch):
    """Counts the groups in a row whose rollouts all have one reward, the same for all groups."""

    def __init__(self, rewards: Sequence[Reward] = ()) -> None:
        own = [each.function.keywords.get("answer_field") for each in rewards if isinstance(each.function, partial)]
        self._fields = [name for name in own if name] + list(_FIELDS)
        self._value: float | None = None
        self._groups = 0
        self._tells_at = LEAST_GROUPS
        self._description: dict[str, str] = {}

    @property
    def description(self) -> dict[str, str]:
        """What is to be told the server: JSON by name; empty: rewards differ, or there are few groups."""
        return self._description

    def record(self, rewards: npt.NDArray[np.float32], row: Mapping[str, Any], text: str) -> None:
        """Counts a group. `text`: what one of its rollouts said last."""
        value = float(rewards[0])
        if not (rewards == rewards[0]).all() or value != self._value:
            self._forget(value if (rewards == rewards[0]).all() else None)
        self._groups += 1
        if self._value is None or self._groups < self._tells_at:
            return
        self._tells_at = 2 * self._groups
        facts = {"value": value, "groups": self._groups, "got": text.strip()[-_MOST_SHOWN:]}
        expected = self._expected(row)
        if expected is not None:
            facts["expected"] = str(expected).strip()[-_MOST_SHOWN:]
        self._description = {"one_reward": json.dumps(facts)}

    def _forget(self, value: float | None) -> None:
        self._value = value
        self._groups = 0
        self._tells_at = LEAST_GROUPS
        self._description = {}

    def _expected(self, row: Mapping[str, Any]) -> Any:
        for name in self._fields:
            try:
                return field_of(row, name)
            except KeyError:
                continue
        return None
