"""Fates: what became of each group, from the trainer's `steps.jsonl` and the server's reasons of leaving.

The trainer knows what it trained on, left out and put aside. The server knows why an item left a table. What neither
has said is `unknown`: the group is still in the server, or it left while nobody recorded it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replay_cli.archive.rows import Row
from replay_generator.prompts import json_lines

FATES = ("trained", "left-out", "put-aside", "consumed", "stale", "undone", "evicted", "deleted", "reset", "unknown")
"""The fates of a group. `consumed`: a trainer took the group, and no step names it."""


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


@dataclass
class Fates:
    """Tells what became of each group by its key, from the trainer's steps and the server's departures."""

    uses: dict[str, list[Use]] = field(default_factory=lambda: defaultdict(list))
    left: dict[str, dict[str, Row]] = field(default_factory=lambda: defaultdict(dict))
    """The last departure from each table. A group that came back after a rollback leaves twice."""

    def add_steps(self, steps: Iterable[Step]) -> None:
        for step in steps:
            for uses in step.uses.values():
                for use in uses:
                    self.uses[str(use.facts["key"])].append(use)

    def add_departures(self, rows: Iterable[Row]) -> None:
        """Rows of FATE_COLUMNS, the oldest first."""
        for row in rows:
            self.left[row["key"]][row["table"]] = row

    def of(self, key: str, table: str) -> str:
        """One of FATES, of a group that was inserted into `table`."""
        uses = self.uses.get(key, ())
        if any(use.trained for use in uses):
            return "trained"
        if uses:
            return uses[-1].what
        departure = self.left.get(key, {}).get(table)
        return "unknown" if departure is None else str(departure["reason"])

    def words(self, key: str) -> str:
        """All that is known, such as `step 412 (fresh); left replay: evicted at version 430`."""
        said = [use.words() for use in self.uses.get(key, ())]
        for table, row in self.left.get(key, {}).items():
            said.append(f"left {table}: {row['reason']} at version {row['policy_version']}")
        return "; ".join(said)
