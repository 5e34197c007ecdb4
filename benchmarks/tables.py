"""`python -m benchmarks.tables`: prints the tables of docs/record/performance.md from the newest results.

It reads benchmark.json. A figure that was not measured is left empty.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.cells import DICTS, FSYNC, GROUPS, PAYLOADS
from benchmarks.environments import ROOT

Cells = dict[str, dict[str, Any]]
Row = Iterable[str]


def markdown(header: Row, rows: Iterable[Row]) -> str:
    lines = [list(header), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def number(value: float | None, scale: float = 1.0) -> str:
    """Three digits, and a comma for thousands."""
    if value is None:
        return ""
    value /= scale
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def tokens(cells: Cells) -> str:
    def rows() -> Iterator[Row]:
        for group in GROUPS:
            for generators in (1, 4):
                name = f"tokens/{group}/{generators}-generators"
                cell, tls = cells.get(name, {}), cells.get(f"{name}/tls", {})
                yield (
                    f"{group}, {generators}",
                    number(cell.get("ours"), 1e6),
                    number(cell.get("tcp"), 1e6),
                    number(tls.get("ours"), 1e6),
                    number(cell.get("theirs"), 1e6),
                )

    return markdown(("groups, generators", "one host", "TCP", "TCP and TLS", "Reverb"), rows())


def dicts(cells: Cells) -> str:
    rivals = {"transferqueue": "TransferQueue", "ray_store": "Ray's object store", "zmq_pickle": "pickle over ZMQ"}

    def rows() -> Iterator[Row]:
        for size in DICTS:
            for part in ("put", "get", "both"):
                found = [cells.get(f"dict-{part}/{size}/{rival}", {}) for rival in rivals]
                ours = [cell["ours"] for cell in found if cell.get("ours") is not None]
                yield (
                    f"{size}, {part}",
                    number(statistics.median(ours) if ours else None),
                    *(number(cell.get("theirs")) for cell in found),
                )

    return markdown(("dict", "ours", *rivals.values()), rows())


def durable(cells: Cells) -> str:
    def rows() -> Iterator[Row]:
        for payload in ("400B", "106kB"):
            for ours, redis in FSYNC.items():
                found = [
                    cells.get(f"durable/{what}/{payload}/fsync-{ours}", {}) for what in ("insert", "ack-p50", "ack-p99")
                ]
                yield (
                    f"{payload}, fsync {ours} ({redis})",
                    *(f"{number(cell.get('ours'))}, {number(cell.get('theirs'))}" for cell in found),
                )

    return markdown(("payload, ours (Redis)", "inserts a second", "acknowledgement p50, ms", "p99, ms"), rows())


def restarts(cells: Cells) -> str:
    def rows() -> Iterator[Row]:
        for name, cell in cells.items():
            if name.startswith(("restart/", "checkpoint/")):
                yield name, cell["against"], number(cell["ours"]), number(cell["theirs"]), cell["unit"]

    return markdown(("", "beside", "ours", "theirs", ""), rows())


def messages(cells: Cells) -> str:
    def pair(name: str) -> str:
        cell = cells.get(name, {})
        return ", ".join(f"{cell[key]:.2f}" for key in ("ratio", "tcp_ratio") if cell.get(key) is not None)

    columns = {
        "insert, 1 writer": "insert/{}/1-writers",
        "2 writers": "insert/{}/2-writers",
        "4 writers": "insert/{}/4-writers",
        "sample, 1 reader": "sample/{}/1-readers",
        "2 readers": "sample/{}/2-readers",
        "acknowledgement p50": "ack-p50/{}",
        "p99": "ack-p99/{}",
    }
    rows = ((size, *(pair(name.format(size)) for name in columns.values())) for size in PAYLOADS)
    return markdown(("payload", *columns), rows)


def goals(results: dict[str, Any]) -> str:
    rows = (
        (each["text"], number(each["value"]), "met" if each["met"] else "missed")
        for each in results["goals"]
        if each["value"] is not None
    )
    return markdown(("goal", "now", ""), rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    folder = parser.parse_args().results
    results = json.loads((folder / "benchmark.json").read_text())
    cells = {cell["cell"]: cell for cell in results["cells"]}
    for table in (tokens, dicts, durable, restarts, messages):
        print(table(cells))
    print(goals(results))


if __name__ == "__main__":
    main()
