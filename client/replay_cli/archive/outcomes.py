"""Outcomes: tells what a trainer did with each group, from its `steps.jsonl`.

The trainer writes which groups it trained on, left out and rejected. Every other group is `unknown`: it is still in the
server, or the server removed it unused. The counters of its table show how many were removed (`replay tables`).
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
    """The outcome of a group in one step of the trainer, by the trainer's steps.jsonl."""

    step: int
    what: str
    """fresh or replayed, if the step trained on the group; else left-out or unusable."""
    key: str
    facts: dict[str, Any]
    """The group's entry in the line of the step."""

    @property
    def outcome(self) -> str:
        """One of OUTCOMES."""
        return self.what if self.what in OUTCOMES else "trained"  # fresh and replayed groups are trained on

    def words(self) -> str:
        """The outcome in words, such as `step 412 (fresh)`."""
        return f"step {self.step} ({self.what})"


def read_steps(path: Path) -> Iterator[tuple[int, list[Outcome]]]:
    """The steps of a file, in order: the number of each step, and the outcomes of its groups.

    Raises a ValueError that names file and line, and OSError if the file cannot be read.
    """
    for number, line in json_lines(path):
        try:
            yield int(line["step"]), _outcomes_of(line)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"not a line of steps.jsonl: {type(error).__name__} {error}"
            raise ValueError(f"{path}, line {number}: {reason}") from None


def _outcomes_of(line: dict[str, Any]) -> list[Outcome]:
    """The outcomes in a line of steps.jsonl: trained groups first, then those left out, then unusable ones."""
    unused = [("left-out", group) for group in line["left_out"]]
    unused += [("unusable", group) for group in line["unusable"]]
    trained = [(str(group["source"]), group) for group in line["trained"]]
    step = int(line["step"])
    return [Outcome(step, what, str(int(group["key"])), group) for what, group in trained + unused]


class Outcomes:
    """Tells what became of each group by its key."""

    def __init__(self, steps: Path | None) -> None:
        """`steps`: the trainer's steps.jsonl; None: nothing is known. Raises the errors of `read_steps`."""
        self._outcomes: dict[str, list[Outcome]] = defaultdict(list)
        if steps is None:
            return
        for _, outcomes in read_steps(steps):
            for outcome in outcomes:
                self._outcomes[outcome.key].append(outcome)

    def of(self, key: str) -> str:
        """The outcome of a group: `trained` if a step trained on it, else its last outcome. One of OUTCOMES."""
        outcomes = [outcome.outcome for outcome in self._outcomes.get(key, ())]
        if not outcomes:
            return "unknown"
        if "trained" in outcomes:
            return "trained"
        return outcomes[-1]

    def words(self, key: str) -> str:
        """All outcomes of a group in words, such as `step 412 (fresh); step 430 (replayed)`."""
        return "; ".join(outcome.words() for outcome in self._outcomes.get(key, ()))
