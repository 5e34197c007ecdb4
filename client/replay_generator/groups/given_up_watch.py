"""GivenUpWatch: counts the groups that the generator gave up as too old, by their environment.

The server never sees such a group, so the generator sends the counts to the server (`describe`). Without the counts,
nobody would know that the groups of an environment are missing because its rollouts take too long.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

from replay_generator.notices import Watch

MOST_ENVIRONMENTS = 64
"""The most environments that are counted. Groups of further environments are not counted."""
MOST_TEXT = 1000
"""The most characters that the counts take in the JSON for the server. The server accepts 4096 characters for all
descriptions of a generator together."""


class GivenUpWatch(Watch):
    """Counts groups by their tag `environment`, since the start of the generator."""

    def __init__(self) -> None:
        self._groups: Counter[str] = Counter()
        """The number of groups that were given up, by environment."""

    def record(self, tags: Mapping[str, str | int]) -> None:
        """Counts a group with these tags. The report names environments, so a group without one is not counted."""
        environment = str(tags.get("environment", ""))
        if not environment:
            return
        if environment in self._groups or len(self._groups) < MOST_ENVIRONMENTS:
            self._groups[environment] += 1

    @property
    def description(self) -> dict[str, str]:
        """The number of groups by environment, as JSON; empty: no group was counted.

        If the JSON would be longer than MOST_TEXT, the environments with the fewest groups are left out.
        """
        counts: dict[str, int] = {}
        for environment, groups in self._groups.most_common():
            longer_json = json.dumps(counts | {environment: groups})
            # This JSON is sent as a text inside of other JSON, in which its quotes are escaped.
            if len(json.dumps(longer_json)) > MOST_TEXT:
                break
            counts[environment] = groups
        if not counts:
            return {}
        return {"given_up": json.dumps(counts)}
