"""Fates: what a trainer did with each group, from its `steps.jsonl`.

The trainer knows what it trained on, left out and put aside. All else is `unknown`: the group is still in the server,
or it left unused, which the counters of its table say (`replay tables`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay_generator.row_files import json_lines

FATES = ("trained", "left-out", "put-aside", "unknown")
"""The fates of a group."""


@dataclass(frozen=True)
class Use:
    """One step of the trainer used a group, or left it out. The trainer wrote so in its steps.jsonl."""

    step: int
    what: str
    """fresh or replayed, of a group that the step trained on; left-out or put-aside."""
    key: str
    facts: dict[str, Any]
    """As the step's line has it."""

    @property
    def fate(self) -> str:
        """One of FATES."""
        return self.what if self.what in FATES else "trained"

    def words(self) -> str:
        """Such as `step 412 (fresh)`."""
        return f"step {self.step} ({self.what})"


def read_steps(path: Path) -> Iterator[tuple[int, list[Use]]]:
    """The steps of a file, in order, each with what it did with its groups.

    Raises ValueError that names file and line, OSError if it cannot be read.
    """
    for number, line in json_lines(path):
        try:
            yield int(line["step"]), _uses_of(line)
        except (KeyError, TypeError, ValueError) as error:
            said = f"not a line of steps.jsonl: {type(error).__name__} {error}"
            raise ValueError(f"{path}, line {number}: {said}") from None


def _uses_of(line: dict[str, Any]) -> list[Use]:
    fates = [("left-out", group) for group in line["left_out"]] + [("put-aside", group) for group in line["put_aside"]]
    whats = [(str(group["source"]), group) for group in line["trained"]] + fates
    return [Use(int(line["step"]), what, str(int(group["key"])), group) for what, group in whats]


class Fates:
    """Tells what became of each group by its key."""

    def __init__(self, steps: Path | None) -> None:
        """`steps`: the trainer's steps.jsonl; None: nothing is known. Raises as `read_steps`."""
        self._uses: dict[str, list[Use]] = defaultdict(list)
        for _, uses in () if steps is None else read_steps(steps):
            for use in uses:
                self._uses[use.key].append(use)

    def of(self, key: str) -> str:
        """One of FATES."""
        fates = [use.fate for use in self._uses.get(key, ())]
        return "trained" if "trained" in fates else (fates or ["unknown"])[-1]

    def words(self, key: str) -> str:
        """All that is known, such as `step 412 (fresh); step 430 (replayed)`."""
        return "; ".join(use.words() for use in self._uses.get(key, ()))
