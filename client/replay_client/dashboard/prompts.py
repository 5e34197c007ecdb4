"""PromptLog: how often each prompt was solved, by policy version, over all groups that the page has read."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from replay_client.dashboard.facts import NOTES, Facts

MOST_PROMPTS = 20_000
MOST_VERSIONS = 2_000


@dataclass
class Tally:
    """Sums over groups."""

    groups: int = 0
    completions: float = 0.0
    solved: float = 0.0
    reward: float = 0.0
    logprob: float = 0.0
    with_logprob: int = 0
    length: float = 0.0
    no_variance: int = 0

    def add(self, facts: Facts) -> None:
        numbers = facts.numbers
        self.groups += 1
        self.completions += numbers["completions"]
        self.solved += numbers["solved_share"] * numbers["completions"]
        self.reward += numbers["reward_mean"]
        self.length += numbers["length_mean"]
        self.no_variance += bool(facts.notes & 1 << NOTES.index("no variance"))
        if (logprob := numbers["logprob_mean"]) == logprob:
            self.logprob += logprob
            self.with_logprob += 1


@dataclass
class Prompt:
    """One prompt over all policy versions."""

    text: str
    versions: dict[int, Tally] = field(default_factory=dict)

    @property
    def solve_rate(self) -> float:
        completions = sum(tally.completions for tally in self.versions.values())
        return sum(tally.solved for tally in self.versions.values()) / completions


class PromptLog:
    """Remembers groups after they have left the server; the prompt seen longest ago makes room."""

    def __init__(self, solved_above: float = 0.5) -> None:
        self.solved_above = solved_above
        """A completion with a reward above this solves its prompt."""
        self._prompts: OrderedDict[str, Prompt] = OrderedDict()
        self._versions: dict[int, Tally] = {}

    def add(self, version: int, facts: Facts, again: bool = False) -> None:
        """Counts a group. `again`: it was counted before, and now its text is known."""
        name = facts.prompt_id or facts.prompt
        if again and name in self._prompts:
            self._prompts[name].text = facts.prompt
        if again or not facts.numbers:
            return
        self._versions.setdefault(version, Tally()).add(facts)
        if len(self._versions) > MOST_VERSIONS:
            del self._versions[min(self._versions)]
        if not name:
            return
        prompt = self._prompts.setdefault(name, Prompt(facts.prompt))
        prompt.versions.setdefault(version, Tally()).add(facts)
        self._prompts.move_to_end(name)
        if len(self._prompts) > MOST_PROMPTS:
            self._prompts.popitem(last=False)

    def by_version(self) -> list[dict[str, Any]]:
        """What the groups of each policy version were like, the oldest version first."""
        return [
            {
                "version": version,
                "groups": tally.groups,
                "reward": tally.reward / tally.groups,
                "solved": tally.solved / max(1.0, tally.completions),
                "logprob": tally.logprob / tally.with_logprob if tally.with_logprob else None,
                "length": tally.length / tally.groups,
                "no_variance": tally.no_variance / tally.groups,
            }
            for version, tally in sorted(self._versions.items())
        ]

    def rows(self, search: str, sort: str, descending: bool, offset: int, limit: int) -> dict[str, Any]:
        """Prompts whose name or text holds `search`, with the solve rate of each version that saw them."""
        needle = search.lower()
        found = [
            (name, prompt)
            for name, prompt in self._prompts.items()
            if needle in name.lower() or needle in prompt.text.lower()
        ]
        orders: dict[str, Any] = {
            "solved": lambda row: row[1].solve_rate,
            "groups": lambda row: sum(tally.groups for tally in row[1].versions.values()),
            "change": lambda row: _change(row[1]),
            "prompt": lambda row: row[0],
            "seen": None,
        }
        if sort not in orders:
            raise ValueError(f"sort {sort[:40]!r}: one of {', '.join(orders)}")
        if (order := orders[sort]) is not None:
            found.sort(key=order)
        if descending:
            found.reverse()
        return {
            "matching": len(found),
            "total": len(self._prompts),
            "solved_above": self.solved_above,
            "versions": [min(self._versions, default=0), max(self._versions, default=0)],
            "rows": [
                {
                    "prompt": name,
                    "text": prompt.text,
                    "solved": prompt.solve_rate,
                    "change": _change(prompt),
                    "groups": sum(tally.groups for tally in prompt.versions.values()),
                    "versions": [
                        [version, tally.solved / max(1.0, tally.completions), tally.groups]
                        for version, tally in sorted(prompt.versions.items())[-200:]
                    ],
                }
                for name, prompt in found[offset : offset + limit]
            ],
        }


def _change(prompt: Prompt) -> float:
    """The solve rate of the newer half of the versions less that of the older half."""
    tallies = [tally for _, tally in sorted(prompt.versions.items())]
    halves = tallies[: len(tallies) // 2], tallies[len(tallies) // 2 :]
    if not halves[0]:
        return 0.0
    old, new = (sum(t.solved for t in half) / max(1.0, sum(t.completions for t in half)) for half in halves)
    return new - old
