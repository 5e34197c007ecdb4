"""What happens inside runs on a pretrained model, by parts of their budgets: `steps.jsonl` to a table.

    python -m experiments.learning.real.look runs/real/steps.jsonl --parts 3

Look here before you read a result: how old is what is replayed, how far has the policy moved away from it, how much of
it leaves the loss, and do stored answers still have the form of fresh ones?
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.learning.records import read_records
from experiments.learning.report import NAMES, rounded, setting_of
from experiments.learning.tuned import TUNING_SEEDS

COLUMNS = {
    "reward": "fresh reward",
    "pass_at_8": "groups with a right answer",
    "length": "tokens of a fresh answer",
    "stored_length": "of a stored one",
    "fresh_entropy": "nats of a fresh token",
    "replayed": "stored groups a step",
    "staleness": "their age, versions",
    "drift_fresh": "log(b/θ) of fresh answers",
    "drift_right": "of stored right ones",
    "drift_wrong": "of stored wrong ones",
    "masked_wrong": "stored wrong answers masked",
}
"""Names of a step's facts, and what they are; drifts are nats a token."""


def look(steps: Iterable[dict[str, Any]], parts: int) -> list[str]:
    """Lines of Markdown, a row an arm and part of the budget: means over all steps and seeds that have the fact."""
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for step in _finished(steps):
        part = min(parts - 1, int(parts * step["generated"] / step["budget"]))
        found[setting_of(step), step["arm"], part].append(step)
    lines = [
        f"| task, start | arm | part | seeds | steps | {' | '.join(COLUMNS.values())} |",
        "|---" * (5 + len(COLUMNS)) + "|",
    ]
    for (setting, arm, part), rows in sorted(found.items()):
        cells = [
            setting,
            NAMES.get(arm, arm),
            f"{part + 1} of {parts}",
            str(len({row["seed"] for row in rows})),
            str(len(rows)),
        ]
        for name in COLUMNS:
            values = [row[name] for row in rows if name in row]
            cells.append(f"{np.mean(values):.3g}" if values else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _finished(steps: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps of the comparison's runs without those that were cut off, whether they began again or not."""
    runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for step in steps:
        run = tuple(step[name] for name in ("task", "regime", "arm", "seed", "learning_rate", "budget"))
        if step["step"] == 1:
            runs[run] = []
        runs[run].append(step)
    whole = [run for run in runs.values() if run[-1]["generated"] >= run[-1]["budget"]]
    return [step for run in whole for step in run if step["seed"] not in TUNING_SEEDS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=Path, nargs="+", help="a run that two files have is taken from the later one")
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where the steps go, of whole runs alone")
    arguments = parser.parse_args()
    steps = [step for path in arguments.steps for step in read_records(path)]
    print("\n".join(look(steps, arguments.parts)))
    if arguments.json is not None:
        whole = [rounded(step) for step in _finished(steps)]
        arguments.json.write_text("[\n" + ",\n".join(map(json.dumps, whole)) + "\n]\n")


if __name__ == "__main__":
    main()
