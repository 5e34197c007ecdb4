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
    """What one step of the trainer did with a group, as the trainer's steps.jsonl says."""

    step: int
    what: str
    """"fresh" or "replayed" if the step trained on the group, else "left-out" or "unusable"."""
    key: str
    facts: dict[str, Any]
    """The group's entry in the line of the step."""

    @property
    def outcome(self) -> str:
        """One of OUTCOMES."""
        return self.what if self.what in OUTCOMES else "trained"  # fresh and replayed groups are trained on

    def words(self) -> str:
        """The outcome with its step, such as `step 412 (fresh)`."""
        return f"step {self.step} ({self.what})"


def read_steps(path: Path) -> Iterator[tuple[int, list[Outcome]]]:
    """Yields the number of each step of a steps.jsonl, in the order of the file, and the outcomes of its groups.

    Raises a ValueError that names file and line if a line has another form, and OSError if the file cannot be read.
    """
    for number, line in json_lines(path):
        try:
            yield int(line["step"]), _outcomes_of(line)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"not a line of steps.jsonl: {type(error).__name__} {error}"
            raise ValueError(f"{path}, line {number}: {reason}") from None


def _outcomes_of(line: dict[str, Any]) -> list[Outcome]:
    """The outcomes in a line of steps.jsonl: trained groups first, then those left out, then unusable ones."""
    unused = [("left-out", entry) for entry in line["left_out"]]
    unused += [("unusable", entry) for entry in line["unusable"]]
    trained = [(str(entry["source"]), entry) for entry in line["trained"]]
    step = int(line["step"])
    outcomes = []
    for what, entry in trained + unused:
        key = str(int(entry["key"]))
        outcomes.append(Outcome(step, what, key, facts=entry))
    return outcomes


class Outcomes:
    """Tells what became of a group, which is named by its key."""

    def __init__(self, steps: Path | None) -> None:
        """`steps`: the trainer's steps.jsonl; None: nothing is known. Raises the errors of `read_steps`."""
        self._outcomes: dict[str, list[Outcome]] = defaultdict(list)
        """Key of a group -> its outcomes, in the order of the steps."""
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
