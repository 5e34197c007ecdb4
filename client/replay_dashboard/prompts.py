"""PromptLog: how often each prompt was solved, by policy version, over all groups that the page has read.

If generators draw their prompts from a table, the log also has those prompts of the table for which no group was read.
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
"""The most prompts that are remembered."""
MOST_VERSIONS = 2_000
"""The most policy versions that are remembered for each prompt, and for all groups together."""
SUMS = ("groups", "completions", "solved", "reward", "logprob", "with_logprob", "length", "no_variance")
"""The names of the sums in a tally. `with_logprob` counts the groups whose mean log-probability is known."""
Tally = npt.NDArray[np.float64]
"""Sums over groups, in the order of SUMS. In the tally of all groups of a policy version, RATES more numbers follow,
which are the numbers of groups of each kind."""
RATES = 8
"""The number of kinds of groups. The kind of a group tells which share of its completions solves the prompt. In the
first kind none does, and in the last kind all do."""


@dataclass
class Prompt:
    """One prompt, with the tally of its groups for each policy version."""

    text: str
    versions: dict[int, Tally] = field(default_factory=dict)
    """Policy version -> tally of the groups of this version."""

    def row(self, name: str) -> dict[str, Any]:
        """The row of the page about this prompt, which has this `name`."""
        versions = sorted(self.versions.items())
        tallies = [tally for _, tally in versions]
        middle = len(versions) // 2
        # The solve rate of the newer half of the versions, minus that of the older half.
        change = 0.0
        if middle:  # there are at least two versions
            change = _solve_rate(tallies[middle:]) - _solve_rate(tallies[:middle])
        newest_versions = versions[-200:]
        return {
            "prompt": name,
            "text": self.text,
            "solved": _solve_rate(tallies),
            "change": change,
            "groups": sum(_groups_of(tally) for tally in tallies),
            "versions": [[version, _solve_rate([tally]), _groups_of(tally)] for version, tally in newest_versions],
        }


class PromptLog:
    """Counts groups by prompt, and keeps the counts after the groups have left the server.

    If there are more than MOST_PROMPTS prompts, the one that was seen longest ago is forgotten.
    """

    def __init__(self, solved_reward: float = 1.0) -> None:
        self.solved_reward = solved_reward
        """A completion with at least this reward solves its prompt."""
        self._prompts: OrderedDict[str, Prompt] = OrderedDict()
        """The prompts by their names, in the order in which they were seen. A new prompt is put at the end. A prompt
        moves to the end when one of its groups is counted."""
        self._versions: dict[int, Tally] = {}
        """The tally of all groups of each policy version."""

    def add(self, version: int, facts: Facts, again: bool = False) -> None:
        """Counts a group of policy version `version`. If the facts are of a stored prompt, adds this prompt.

        `again`: the item was added before, without a tokenizer. The text of its prompt is known only now, so this call
        stores the text and counts nothing.
        """
        name = facts.prompt_id or facts.prompt
        if again and name in self._prompts:
            self._prompts[name].text = facts.prompt
        if A_PROMPT in facts.flags:
            stored_prompt = self._prompts.setdefault(name, Prompt(facts.prompt))
            stored_prompt.text = facts.prompt
            self._forget_oldest()
        is_group = bool(facts.numbers)  # only the facts of groups have numbers
        if again or not is_group:
            return
        tally = _tally_of(facts)
        one_hot_kind = _one_hot_kind(facts.numbers["solved_share"])
        prompt = self._prompts.setdefault(name, Prompt(facts.prompt))
        _add_to(prompt.versions, version, tally)
        _add_to(self._versions, version, np.append(tally, one_hot_kind))
        self._prompts.move_to_end(name)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Forgets the prompt that was seen longest ago, if there are too many prompts."""
        if len(self._prompts) > MOST_PROMPTS:
            self._prompts.popitem(last=False)

    def by_version(self) -> list[dict[str, Any]]:
        """Means over the groups of each policy version, the oldest version first."""
        rows = []
        for version, tally in sorted(self._versions.items()):
            sums = dict(zip(SUMS, tally.tolist(), strict=False))  # not strict: RATES numbers follow the sums
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
        """The rows of the prompts whose name or text contains `search`, sorted by the column `sort`.

        An empty `sort` puts the prompt that was seen last at the end. `descending` reverses the order. `rows` has at
        most `limit` rows, and `matching` is the number of all prompts that were found. `held` has the facts of the
        prompts that are in a table now, by name, as `Snapshot.prompts` returns them. Raises ValueError for a column by
        which rows cannot be sorted.
        """
        needle = search.lower()
        rows = []
        for name, prompt in self._prompts.items():
            if needle in name.lower() or needle in prompt.text.lower():
                rows.append(prompt.row(name) | {"held": held.get(name)})
        if sort in ("solved", "change", "groups", "prompt"):
            rows.sort(key=lambda row: row[sort])
        elif sort == "priority":  # prompts that are in no table count as -1, so they come first
            rows.sort(key=lambda row: -1.0 if row["held"] is None else row["held"]["priority"])
        elif sort:
            raise ValueError(
                f"sort {sort[:40]!r}: solved, change, groups, priority, prompt, or nothing for the one seen last"
            )
        if descending:
            rows.reverse()
        return {
            "rows": rows[:limit],
            "matching": len(rows),
            "total": len(self._prompts),
            "solved_reward": self.solved_reward,
            "versions": [min(self._versions, default=0), max(self._versions, default=0)],
        }


def _tally_of(facts: Facts) -> Tally:
    """The tally of one group, from its facts."""
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


def _one_hot_kind(solved_share: float) -> Tally:
    """An array (RATES,) with 1 at the kind of a group with this `solved_share`, and 0 elsewhere.

    The first kind is for a share of 0, and the last for a share of 1. The shares between 0 and 1 are divided into
    RATES - 2 kinds of equal width.
    """
    kind = int(solved_share * (RATES - 2))
    if solved_share > 0:  # the first kind is only for 0
        kind += 1
    one_hot = np.zeros(RATES)
    one_hot[kind] = 1.0
    return one_hot


def _groups_of(tally: Tally) -> float:
    """The number of groups in a tally."""
    return float(tally[SUMS.index("groups")])


def _add_to(versions: dict[int, Tally], version: int, tally: Tally) -> None:
    """Adds `tally` to the tally of its version in `versions`. Forgets the oldest version if there are too many."""
    if version in versions:
        versions[version] = versions[version] + tally
    else:
        versions[version] = tally
    if len(versions) > MOST_VERSIONS:
        del versions[min(versions)]


def _solve_rate(tallies: list[Tally]) -> float:
    """The share of the completions in these tallies that solved their prompt; 0 without completions."""
    completions = sum(tally[SUMS.index("completions")] for tally in tallies)
    solved = sum(tally[SUMS.index("solved")] for tally in tallies)
    return float(solved / max(1.0, completions))
