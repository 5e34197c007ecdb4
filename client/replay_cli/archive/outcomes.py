"""Outcomes: what a trainer did with each group, from its `steps.jsonl`.

The trainer knows what it trained on, left out and rejected. All else is `unknown`: the group is still in the server,
or it left unused, which the counters of its table say (`replay tables`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay_generator.prompts.files import json_lines

OUTCOMES = ("trained", "left-out", "unusable", "unknown")
"""The outcomes of a group."""


@dataclass(frozen=True)
class Outcome:
    """One step of the trainer used a group, or left it out. The trainer wrote so in its steps.jsonl."""

    step: int
    what: str
    """fresh or replayed, of a group that the step trained on; left-out or unusable."""
    key: str
    facts: dict[str, Any]
    """As the step's line has it."""

    @property
    def outcome(self) -> str:
        """One of OUTCOMES."""
        return self.what if self.what in OUTCOMES else "trained"

    def words(self) -> str:
        """Such as `step 412 (fresh)`."""
        return f"step {self.step} ({self.what})"


def read_steps(path: Path) -> Iterator[tuple[int, list[Outcome]]]:
    """The steps of a file, in order, each with what it did with its groups.

    Raises ValueError that names file and line, OSError if it cannot be read.
    """
    for number, line in json_lines(path):
        try:
            yield int(line["step"]), _outcomes_of(line)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"not a line of steps.jsonl: {type(error).__name__} {error}"
            raise ValueError(f"{path}, line {number}: {reason}") from None


def _outcomes_of(line: dict[str, Any]) -> list[Outcome]:
    outcomes = [("left-out", group) for group in line["left_out"]] + [("unusable", group) for group in line["unusable"]]
    whats = [(str(group["source"]), group) for group in line["trained"]] + outcomes
    return [Outcome(int(line["step"]), what, str(int(group["key"])), group) for what, group in whats]


class Outcomes:
    """Tells what became of each group by its key."""

    def __init__(self, steps: Path | None) -> None:
        """`steps`: the trainer's steps.jsonl; None: nothing is known. Raises as `read_steps`."""
        self._outcomes: dict[str, list[Outcome]] = defaultdict(list)
        for _, outcomes in () if steps is None else read_steps(steps):
            for each in outcomes:
                self._outcomes[each.key].append(each)

    def of(self, key: str) -> str:
        """One of OUTCOMES."""
        outcomes = [each.outcome for each in self._outcomes.get(key, ())]
        return "trained" if "trained" in outcomes else (outcomes or ["unknown"])[-1]

    def words(self, key: str) -> str:
        """All that is known, such as `step 412 (fresh); step 430 (replayed)`."""
        return "; ".join(each.words() for each in self._outcomes.get(key, ()))
