"""GivenUpWatch: counts the groups that the generator gave up as too old, by their environment.

The server never sees such a group. So the generator tells it the counts (`describe`): otherwise an environment whose
groups take too long would be missing, and nobody would know.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

from replay_generator.notices import Watch

MOST_ENVIRONMENTS = 64
"""Environments that are counted. More of them are left out."""
MOST_TEXT = 1000
"""Characters of the description. The server takes 4096 of all that a generator says."""


class GivenUpWatch(Watch):
    """Counts groups by their tag `environment`, since the start of the generator."""

    def __init__(self) -> None:
        self._groups: Counter[str] = Counter()

    def record(self, tags: Mapping[str, str | int]) -> None:
        """Counts a group with these tags. Without an environment, nobody could be named."""
        environment = str(tags.get("environment", ""))
        if not environment:
            return
        if environment in self._groups or len(self._groups) < MOST_ENVIRONMENTS:
            self._groups[environment] += 1

    @property
    def description(self) -> dict[str, str]:
        """The groups by environment, those that lost most first; as many environments as have room."""
        told: dict[str, int] = {}
        for environment, groups in self._groups.most_common():
            if len(json.dumps(json.dumps(told | {environment: groups}))) > MOST_TEXT:
                break
            told[environment] = groups
        return {"given_up": json.dumps(told)} if told else {}
