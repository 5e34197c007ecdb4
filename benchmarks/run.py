"""`python -m benchmarks.run`: measures everything, prints the ratios and writes benchmarks/results/."""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cells import ASKED, Comparison, all_comparisons, select
from benchmarks.environments import FILES, OURS, REDIS, REVERB, ROOT, TRANSFERQUEUE
from benchmarks.interpreter import build_of
from benchmarks.measure import CellResult, Effort, measure
from benchmarks.report import Report
from benchmarks.sides import SYSTEMS

EFFORTS = {"quick": Effort(seconds=0.2, rounds=3), "default": Effort(seconds=0.8, rounds=3), "full": Effort(3.0, 7)}
RESULTS = ROOT / "benchmarks/results"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    pattern = re.compile(options.only)
    comparisons = select(all_comparisons(options.restart_gigabytes), lambda cell: pattern.search(cell) is not None)
    if options.list:
        names = []
        for comparison in comparisons:
            for measurement in comparison.measurements:
                names += [figure.cell for figure in measurement.figures]
        print("\n".join(names))
        return
    if not comparisons:
        raise SystemExit(f"no cell matches {options.only!r}; --list shows all")
    console = Console()
    if not build_of(str(OURS.python))["optimised"]:
        console.print("[yellow]This Python was built without optimisations: figures are 1.1 to 1.3 times worse.[/]")
    # Saved after each comparison, so that a run that is interrupted leaves what it has measured.
    report = run(comparisons, EFFORTS[options.effort], console, lambda report: report.save(options.results))
    report.print(console)
    console.print(f"Written to {options.results}.")


def run(
    comparisons: Sequence[Comparison], effort: Effort, console: Console, on_progress: Callable[[Report], None]
) -> Report:
    """Measures all comparisons. A cell that cannot be measured has an error.

    After each comparison, `on_progress` gets a report of all cells until then.
    """
    begin = time.monotonic()
    cells: list[CellResult] = []

    def keep(cell: CellResult) -> None:
        cells.append(cell)
        ratio = cell.median("ratio")
        tcp_ratio = cell.median("tcp_ratio")
        result = f"failed: {cell.error}" if ratio is None else f"{ratio:.2f}"
        if tcp_ratio is not None:
            result += f"   over TCP {tcp_ratio:.2f}"
        console.print(f"[dim]{time.monotonic() - begin:5.0f} s[/]  {cell.cell:32} {result}", highlight=False)

    for comparison in comparisons:
        reason = _cannot_run(comparison)
        if reason is None:
            measure(comparison, effort, keep)
        else:
            for measurement in comparison.measurements:
                for figure in measurement.figures:
                    keep(
                        CellResult(
                            cell=figure.cell,
                            against=comparison.against,
                            unit=figure.unit,
                            higher_is_better=figure.higher_is_better,
                            error=reason,
                        )
                    )
        on_progress(Report(_facts(effort, time.monotonic() - begin), cells))
    return Report(_facts(effort, time.monotonic() - begin), cells)


def _cannot_run(comparison: Comparison) -> str | None:
    """Builds the environments of the comparison. Returns the reason why that was not possible; None: it was."""
    for side in (comparison.ours, comparison.theirs):
        try:
            SYSTEMS[side.system].environment.ensure()
        except RuntimeError as error:
            return str(error)
    return None


def _facts(effort: Effort, seconds: float) -> dict[str, Any]:
    revision = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "revision": revision.stdout.strip(),
        "interpreters": _interpreters(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("replay-server", "grpcio", "protobuf", "numpy", "uvloop")},
        "rivals": {built.folder.name: list(built.requirements) for built in (REVERB, TRANSFERQUEUE, REDIS)},
        "files": _file_system(),
        "seconds_per_measurement": effort.seconds,
        "rounds": effort.rounds,
        "seconds_in_all": round(seconds),
        "load_average": os.getloadavg(),
    }


def _file_system() -> str:
    """The kind of the file system on which servers keep their tables."""
    FILES.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["stat", "--file-system", "--format=%T", str(FILES)], capture_output=True, text=True)
    return done.stdout.strip()


def _interpreters() -> dict[str, dict[str, Any]]:
    """The build of the interpreter of each environment that is installed, by the environment's folder."""
    pythons = dict.fromkeys(Path(system.environment.python) for system in SYSTEMS.values())
    return {python.parent.parent.name: build_of(str(python)) for python in pythons if python.exists()}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.set_defaults(effort="default")
    effort = parser.add_mutually_exclusive_group()
    for name in ("quick", "full"):
        text = f"{EFFORTS[name].rounds} rounds of {EFFORTS[name].seconds:g} s (default: 3 of 0.8 s)"
        effort.add_argument(f"--{name}", dest="effort", action="store_const", const=name, help=text)
    parser.add_argument("--only", default=ASKED, metavar="PATTERN", help="only cells whose name matches")
    parser.add_argument("--all", dest="only", action="store_const", const="", help="the cells that few ask about too")
    parser.add_argument("--list", action="store_true", help="only print the names of the cells")
    parser.add_argument(
        "--restart-gigabytes", type=float, default=1.0, metavar="GB", help="what restarts load (default: 1)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for benchmark.json and benchmark.png")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
