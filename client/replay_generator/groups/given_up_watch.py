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
"""The most environments that are counted. Further ones are left out."""
MOST_TEXT = 1000
"""The most characters of the description. The server takes 4096 for the whole description of a generator."""


class GivenUpWatch(Watch):
    """Counts groups by their tag `environment`, since the start of the generator."""

    def __init__(self) -> None:
        self._groups: Counter[str] = Counter()

    def record(self, tags: Mapping[str, str | int]) -> None:
        """Counts a group with these tags. Without an environment, the report would have no name for the group."""
        environment = str(tags.get("environment", ""))
        if not environment:
            return
        if environment in self._groups or len(self._groups) < MOST_ENVIRONMENTS:
            self._groups[environment] += 1

    @property
    def description(self) -> dict[str, str]:
        """The groups by environment, with the largest counts first; as many environments as have room."""
        counts: dict[str, int] = {}
        for environment, groups in self._groups.most_common():
            longer = json.dumps(counts | {environment: groups})
            # The description is sent as JSON, in which these counts are a text: quotes are escaped again.
            if len(json.dumps(longer)) > MOST_TEXT:
                break
            counts[environment] = groups
        if not counts:
            return {}
        return {"given_up": json.dumps(counts)}
