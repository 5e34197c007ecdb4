"""Fates: what a trainer did with each group, from its `steps.jsonl`.

The trainer knows what it trained on, left out and put aside. All else is `unknown`: the group is still in the server,
or it left unused, which the counters of its table say (`replay tables`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from replay_generator.prompts import json_lines

FATES = ("trained", "left-out", "put-aside", "unknown")
"""The fates of a group."""


@dataclass(frozen=True)
class Use:
    """One step of the trainer used a group, or left it out. The trainer wrote so in its steps.jsonl."""

    step: int
    what: str
    """fresh or replayed, of a group that the step trained on; left-out or put-aside."""
    facts: dict[str, Any]
    """As the step's line has it."""

    @property
    def trained(self) -> bool:
        return self.what in ("fresh", "replayed")

    def words(self) -> str:
        """Such as `step 412 (fresh)`."""
        return f"step {self.step} ({self.what})"


@dataclass(frozen=True)
class Step:
    """One line of `steps.jsonl`: the groups that a step took, by what it did with them."""

    number: int
    uses: dict[str, list[Use]]
    """By `trained`, `left_out` and `put_aside`."""

    @classmethod
    def of(cls, line: dict[str, Any]) -> Step:
        """Raises ValueError for a line that is not a step's."""
        try:
            number = int(line["step"])
            trained = [Use(number, str(group["source"]), group) for group in line["trained"]]
            left_out = [Use(number, "left-out", group) for group in line["left_out"]]
            put_aside = [Use(number, "put-aside", group) for group in line["put_aside"]]
            for use in (*trained, *left_out, *put_aside):
                int(use.facts["key"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a line of steps.jsonl: {type(error).__name__} {error}") from None
        return cls(number, {"trained": trained, "left_out": left_out, "put_aside": put_aside})


def read_steps(path: Path) -> Iterable[Step]:
    """The steps of a file, in order. Raises ValueError that names file and line, OSError if it cannot be read."""
    for number, line in json_lines(path):
        try:
            yield Step.of(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None


class Fates:
    """Tells what became of each group by its key."""

    def __init__(self, steps: Path | None) -> None:
        """`steps`: the trainer's steps.jsonl; None: nothing is known. Raises as `read_steps`."""
        self._uses: dict[str, list[Use]] = defaultdict(list)
        for step in () if steps is None else read_steps(steps):
            for use in chain.from_iterable(step.uses.values()):
                self._uses[str(use.facts["key"])].append(use)

    def of(self, key: str) -> str:
        """One of FATES."""
        uses = self._uses.get(key, ())
        if any(use.trained for use in uses):
            return "trained"
        return uses[-1].what if uses else "unknown"

    def words(self, key: str) -> str:
        """All that is known, such as `step 412 (fresh); step 430 (replayed)`."""
        return "; ".join(use.words() for use in self._uses.get(key, ()))
