"""GivenUpWatch: counts the groups that the generator gave up as too old, by their environment.

The server never sees such a group. So the generator sends the counts to the server (`describe`). Otherwise the groups
of an environment whose rollouts take too long would be missing, and nobody would know.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

from replay_generator.notices import Watch

MOST_ENVIRONMENTS = 64
"""The most environments that are counted. Further ones are left out."""
MOST_TEXT = 1000
"""The most characters of this description. The server accepts 4096 for all descriptions of a generator together."""


class GivenUpWatch(Watch):
    """Counts groups by their tag `environment`, since the start of the generator."""

    def __init__(self) -> None:
        self._groups: Counter[str] = Counter()

    def record(self, tags: Mapping[str, str | int]) -> None:
        """Counts a group with these tags. The report names environments, so a group without one is not counted."""
        environment = str(tags.get("environment", ""))
        if not environment:
            return
        if environment in self._groups or len(self._groups) < MOST_ENVIRONMENTS:
            self._groups[environment] += 1

    @property
    def description(self) -> dict[str, str]:
        """The number of groups by environment, as JSON. If there is too little room, the smallest are left out."""
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
