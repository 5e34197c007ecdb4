"""The commands of the gate of mutants; `tests.mutants` says what they are for."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tests.mutants import judging, mutations, reach

SAMPLE = Path(__file__).with_name("sample.jsonl")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _sample() -> list[mutations.Mutant]:
    return [mutations.Mutant(**json.loads(line)) for line in SAMPLE.read_text().splitlines()]


@app.command()
def sample(seed: int = 0, count: int = 400) -> None:
    """Draw mutants from all packages, and store them in sample.jsonl."""
    lines = [json.dumps(asdict(mutant)) for mutant in mutations.drawn(count, seed)]
    SAMPLE.write_text("\n".join(lines) + "\n")


@app.command(name="reach")
def learn_reach(
    tests: Annotated[list[str] | None, typer.Argument()] = None, jobs: int = 2, most_seconds: float = 900.0
) -> None:
    """Run each test file alone, and store which of its tests run which lines of the packages."""
    reach.learn(tests or reach.test_files(), jobs, most_seconds)


@app.command()
def judge(
    out: Path,
    likely: bool = False,
    jobs: int = 2,
    first: int = 0,
    count: int = 400,
    step: int = 1,
    most_seconds: float = 600.0,
) -> None:
    """Plant each mutant of the sample in turn, or of so many from FIRST each STEPth, and append its verdict to OUT.

    With --likely, the test files run that import its module or name its function: reach need not be known. Without it,
    the tests run that reach its line. Mutants that OUT has a verdict on are left out, unless it is "open".
    """
    chosen = _sample()[first : first + count : step]
    if likely:
        judging.judge_by_likely(chosen, out, jobs, most_seconds)
    else:
        judging.judge_by_reach(chosen, reach.known(), out, jobs, most_seconds)
    outcomes = Counter(verdict.outcome for verdict in judging.read_verdicts(out).values())
    print(", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common()))


@app.command()
def compare(old: Path, new: Path) -> None:
    """Name the mutants that OLD killed and NEW does not; the status is 1 if there are any."""
    judged = judging.read_verdicts(new)
    lost = 0
    for mutant, before in judging.read_verdicts(old).items():
        after = judged.get(mutant)
        if before.is_killed and after is not None and not after.is_killed and after.outcome != "gone":
            lost += 1
            print(f"{after.outcome}: {mutant.path} {mutant.function}: {mutant.kind} {mutant.piece}; once {before.by}")
    raise typer.Exit(lost > 0)


app()
