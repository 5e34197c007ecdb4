"""Records: what a run leaves, a line of JSON or an entry of a list, and the job that it came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Job = tuple[str, str, str, int, float, int]
"""arm, task, regime, seed, learning rate, budget"""


def identity(record: dict[str, Any]) -> Job:
    """The job that a record came from."""
    names = ("arm", "task", "regime", "seed", "learning_rate", "budget")
    arm, task, regime, seed, rate, budget = (record[name] for name in names)
    return arm, task, regime, seed, rate, budget


def read_records(path: Path) -> list[dict[str, Any]]:
    """The runs in a file of JSON lines, or in one that `report --json` wrote; none if there is no file."""
    if not path.exists():
        return []
    text = path.read_text()
    records: list[dict[str, Any]] = (
        json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
    )
    return records
