"""PromptLog: how often each prompt was solved, by policy version, over all groups that the page has read.

Where generators draw their prompts from a table, it has those of which no group was read as well, and what the table
says of each (`Snapshot.prompts`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_dashboard.facts import A_PROMPT, Facts

MOST_PROMPTS = 20_000
MOST_VERSIONS = 2_000
SUMS = ("groups", "completions", "solved", "reward", "logprob", "with_logprob", "length", "no_variance")
Tally = npt.NDArray[np.float64]
"""Sums over groups, by SUMS; of a policy version then the numbers of groups by RATES."""
RATES = 8
"""Kinds of groups by how many of their answers solve the prompt: the first none, the last all."""


@dataclass
class Prompt:
    """One prompt, with a tally for each policy version."""

    text: str
    versions: dict[int, Tally] = field(default_factory=dict)

    def row(self, name: str) -> dict[str, Any]:
        versions = sorted(self.versions.items())
        tallies, middle = [tally for _, tally in versions], len(versions) // 2
        return {
            "prompt": name,
            "text": self.text,
            "solved": _solve_rate(tallies),
            # The newer half of the versions less the older half.
            "change": _solve_rate(tallies[middle:]) - _solve_rate(tallies[:middle]) if middle else 0.0,
            "groups": sum(tally[0] for tally in tallies),
            "versions": [[version, _solve_rate([tally]), tally[0]] for version, tally in versions[-200:]],
        }


class PromptLog:
    """Counts groups by prompt, and keeps the counts after the groups have left the server.

    Beyond MOST_PROMPTS the prompt that was seen longest ago is forgotten.
    """

    def __init__(self, solved_reward: float = 1.0) -> None:
        self.solved_reward = solved_reward
        """A completion with at least this reward solves its prompt."""
        self._prompts: OrderedDict[str, Prompt] = OrderedDict()
        self._versions: dict[int, Tally] = {}

    def add(self, version: int, facts: Facts, again: bool = False) -> None:
        """Counts a group. With `again` it was counted before; only the text of its prompt, now known, is kept."""
        name, numbers = facts.prompt_id or facts.prompt, facts.numbers
        if again and name in self._prompts:
            self._prompts[name].text = facts.prompt
        if A_PROMPT in facts.flags:
            self._prompts.setdefault(name, Prompt(facts.prompt)).text = facts.prompt
        if again or not numbers:
            return
        completions, logprob = numbers["completions"], numbers["logprob_mean"]
        known, flat = float(np.isfinite(logprob)), float("no variance" in facts.flags)
        share = numbers["solved_share"]
        sums = [1.0, completions, completions * share, numbers["reward_mean"], logprob if known else 0.0, known]
        tally = np.array([*sums, numbers["length_mean"], flat])
        rate = (share > 0) + int(share * (RATES - 2))
        prompt = self._prompts.setdefault(name, Prompt(facts.prompt))
        for versions, counted in ((self._versions, np.append(tally, np.eye(RATES)[rate])), (prompt.versions, tally)):
            versions[version] = versions.get(version, 0.0) + counted
            if len(versions) > MOST_VERSIONS:
                del versions[min(versions)]
        self._prompts.move_to_end(name)
        if len(self._prompts) > MOST_PROMPTS:
            self._prompts.popitem(last=False)

    def by_version(self) -> list[dict[str, Any]]:
        """Means over the groups of each policy version, the oldest version first."""
        rows = []
        for version, tally in sorted(self._versions.items()):
            sums = dict(zip(SUMS, tally.tolist(), strict=False))
            row = {name: sums[name] / sums["groups"] for name in ("reward", "length", "no_variance")}
            row |= {"version": version, "groups": sums["groups"], "solved": _solve_rate([tally])}
            row["rates"] = tally[len(SUMS) :].tolist()
            rows.append(row | {"logprob": sums["logprob"] / sums["with_logprob"] if sums["with_logprob"] else None})
        return rows

    def document(
        self, search: str, sort: str, descending: bool, limit: int, held: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Any]:
        """Prompts whose name or text contains `search`, with the solve rate at each version that has groups of them.

        `held`: what tables say of the prompts that are in them, by name: how often each was drawn, and its priority.
        """
        needle = search.lower()
        found = [
            prompt.row(name) | {"held": held.get(name)}
            for name, prompt in self._prompts.items()
            if needle in name.lower() or needle in prompt.text.lower()
        ]
        if sort in ("solved", "change", "groups", "prompt"):
            found.sort(key=lambda row: row[sort])
        elif sort == "priority":
            found.sort(key=lambda row: -1.0 if row["held"] is None else row["held"]["priority"])
        elif sort:
            raise ValueError(
                f"sort {sort[:40]!r}: solved, change, groups, priority, prompt, or nothing for the one seen last"
            )
        return {
            "rows": found[::-1][:limit] if descending else found[:limit],
            "matching": len(found),
            "total": len(self._prompts),
            "solved_reward": self.solved_reward,
            "versions": [min(self._versions, default=0), max(self._versions, default=0)],
        }


def _solve_rate(tallies: list[Tally]) -> float:
    """The share of completions that solved their prompt."""
    return float(sum(tally[2] for tally in tallies) / max(1.0, sum(tally[1] for tally in tallies)))
