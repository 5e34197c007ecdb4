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

from replay_dashboard.facts import A_PROMPT, NO_VARIANCE, Facts

MOST_PROMPTS = 20_000
MOST_VERSIONS = 2_000
SUMS = ("groups", "completions", "solved", "reward", "logprob", "with_logprob", "length", "no_variance")
Tally = npt.NDArray[np.float64]
"""Sums over groups, by SUMS. The tally of a policy version has RATES numbers of groups behind them."""
RATES = 8
"""The number of kinds of groups, by the share of answers that solve the prompt: none in the first, all in the last."""


@dataclass
class Prompt:
    """One prompt, with a tally for each policy version."""

    text: str
    versions: dict[int, Tally] = field(default_factory=dict)

    def row(self, name: str) -> dict[str, Any]:
        versions = sorted(self.versions.items())
        tallies = [tally for _, tally in versions]
        middle = len(versions) // 2
        change = 0.0
        if middle:
            change = _solve_rate(tallies[middle:]) - _solve_rate(tallies[:middle])
        return {
            "prompt": name,
            "text": self.text,
            "solved": _solve_rate(tallies),
            # The newer half of the versions less the older half.
            "change": change,
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
        name = facts.prompt_id or facts.prompt
        if again and name in self._prompts:
            self._prompts[name].text = facts.prompt
        if A_PROMPT in facts.flags:
            self._prompts.setdefault(name, Prompt(facts.prompt)).text = facts.prompt
        if again or not facts.numbers:
            return
        tally = _tally_of(facts)
        rate = _one_hot_rate(facts.numbers["solved_share"])
        prompt = self._prompts.setdefault(name, Prompt(facts.prompt))
        _add_to(prompt.versions, version, tally)
        _add_to(self._versions, version, np.append(tally, rate))
        self._prompts.move_to_end(name)
        if len(self._prompts) > MOST_PROMPTS:
            self._prompts.popitem(last=False)

    def by_version(self) -> list[dict[str, Any]]:
        """Means over the groups of each policy version, the oldest version first."""
        rows = []
        for version, tally in sorted(self._versions.items()):
            sums = dict(zip(SUMS, tally.tolist(), strict=False))
            groups = sums["groups"]
            with_logprob = sums["with_logprob"]
            rows.append(
                {
                    "version": version,
                    "groups": groups,
                    "solved": _solve_rate([tally]),
                    "reward": sums["reward"] / groups,
                    "length": sums["length"] / groups,
                    "no_variance": sums["no_variance"] / groups,
                    "logprob": sums["logprob"] / with_logprob if with_logprob else None,
                    "rates": tally[len(SUMS) :].tolist(),
                }
            )
        return rows

    def document(
        self, search: str, sort: str, descending: bool, limit: int, held: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Any]:
        """Prompts whose name or text contains `search`, with the solve rate at each version that has groups of them.

        `held`: what tables say of the prompts that are in them, by name: how often each was drawn, and its priority.
        """
        needle = search.lower()
        found = []
        for name, prompt in self._prompts.items():
            if needle in name.lower() or needle in prompt.text.lower():
                found.append(prompt.row(name) | {"held": held.get(name)})
        if sort in ("solved", "change", "groups", "prompt"):
            found.sort(key=lambda row: row[sort])
        elif sort == "priority":
            found.sort(key=lambda row: -1.0 if row["held"] is None else row["held"]["priority"])
        elif sort:
            raise ValueError(
                f"sort {sort[:40]!r}: solved, change, groups, priority, prompt, or nothing for the one seen last"
            )
        if descending:
            found.reverse()
        return {
            "rows": found[:limit],
            "matching": len(found),
            "total": len(self._prompts),
            "solved_reward": self.solved_reward,
            "versions": [min(self._versions, default=0), max(self._versions, default=0)],
        }


def _tally_of(facts: Facts) -> Tally:
    """The tally of one group, by SUMS."""
    numbers = facts.numbers
    logprob = numbers["logprob_mean"]
    has_logprob = bool(np.isfinite(logprob))
    sums = {
        "groups": 1.0,
        "completions": numbers["completions"],
        "solved": numbers["completions"] * numbers["solved_share"],
        "reward": numbers["reward_mean"],
        "logprob": logprob if has_logprob else 0.0,
        "with_logprob": float(has_logprob),
        "length": numbers["length_mean"],
        "no_variance": float(NO_VARIANCE in facts.flags),
    }
    return np.array([sums[name] for name in SUMS])


def _one_hot_rate(solved_share: float) -> Tally:
    """One group among the RATES kinds of groups, by the share of its answers that solve the prompt."""
    rate = int(solved_share * (RATES - 2))
    if solved_share > 0:
        rate += 1
    one_hot = np.zeros(RATES)
    one_hot[rate] = 1.0
    return one_hot


def _add_to(versions: dict[int, Tally], version: int, tally: Tally) -> None:
    """Adds a tally to that of its version. The oldest version is forgotten beyond MOST_VERSIONS."""
    if version in versions:
        versions[version] = versions[version] + tally
    else:
        versions[version] = tally
    if len(versions) > MOST_VERSIONS:
        del versions[min(versions)]


def _solve_rate(tallies: list[Tally]) -> float:
    """The share of completions that solved their prompt."""
    completions = sum(tally[SUMS.index("completions")] for tally in tallies)
    solved = sum(tally[SUMS.index("solved")] for tally in tallies)
    return float(solved / max(1.0, completions))
