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
    """A table of Markdown."""
    header = list(header)
    rule = ["---" for _ in header]
    lines = [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]
    return "\n".join(lines) + "\n"


def number(value: float | None, scale: float = 1.0) -> str:
    """The value divided by `scale`, with three digits and a comma for thousands; empty for None."""
    if value is None:
        return ""
    value /= scale
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def tokens(cells: Cells) -> str:
    def rows() -> Iterator[Row]:
        for group in GROUPS:
            for generators in (1, 4):
                name = f"tokens/{group}/{generators}-generators"
                cell = cells.get(name, {})
                tls = cells.get(f"{name}/tls", {})
                yield (
                    group,
                    str(generators),
                    number(cell.get("ours"), 1e6),
                    number(cell.get("tcp"), 1e6),
                    number(tls.get("ours"), 1e6),
                    number(cell.get("theirs"), 1e6),
                )

    ways = ("ours, one host", "ours, TCP", "ours, TCP and TLS", "Reverb, one host")
    return markdown(("group", "generators", *ways), rows())


DICT_PARTS = {"both": "put, then get"}
"""The tables show each part of the measurement of a dict under this name."""


def dicts(cells: Cells) -> str:
    rivals = {"transferqueue": "TransferQueue", "ray_store": "Ray's object store", "zmq_pickle": "pickle over ZMQ"}

    def rows() -> Iterator[Row]:
        for size in DICTS:
            for part in ("put", "get", "both"):
                found = [cells.get(f"dict-{part}/{size}/{rival}", {}) for rival in rivals]
                values = [cell["ours"] for cell in found if cell.get("ours") is not None]
                ours = statistics.median(values) if values else None
                theirs = [number(cell.get("theirs")) for cell in found]
                yield (size, DICT_PARTS.get(part, part), number(ours), *theirs)

    return markdown(("dict", "operation", "ours", *rivals.values()), rows())


def durable(cells: Cells) -> str:
    def rows() -> Iterator[Row]:
        for payload in ("400B", "106kB"):
            for ours, redis in FSYNC.items():
                pairs = []
                for figure in ("insert", "ack-p50", "ack-p99"):
                    cell = cells.get(f"durable/{figure}/{payload}/fsync-{ours}", {})
                    pairs.append(f"{number(cell.get('ours'))} / {number(cell.get('theirs'))}")
                yield (payload, f"{ours} / {redis}", *pairs)

    header = (
        "payload",
        "`fsync` here / `appendfsync` in Redis",
        "inserts per second: ours / Redis",
        "acknowledgement in ms, p50: ours / Redis",
        "acknowledgement in ms, p99: ours / Redis",
    )
    return markdown(header, rows())


RESTARTS = {
    "restart/items/fsync-always": "restart after SIGKILL, items of 400 B, `fsync` always",
    "restart/bytes/fsync-always": "restart after SIGKILL, items of 106 kB, `fsync` always",
    "restart/items/checkpoint": "restart from a checkpoint, items of 400 B",
    "checkpoint/items": "writing a checkpoint, items of 400 B",
    "restart/bytes/checkpoint": "restart from a checkpoint, items of 106 kB",
    "checkpoint/bytes": "writing a checkpoint, items of 106 kB",
}
"""The tables show a cell under this name; a cell that is not here keeps its own."""


def restarts(cells: Cells) -> str:
    def rows() -> Iterator[Row]:
        for name, cell in cells.items():
            if name.startswith(("restart/", "checkpoint/")):
                operation = RESTARTS.get(name, name)
                rival, _, _ = cell["against"].capitalize().partition(",")
                yield operation, cell["unit"], number(cell["ours"]), f"{number(cell['theirs'])} ({rival})"

    return markdown(("operation", "unit", "ours", "the other system"), rows())


def messages(cells: Cells) -> str:
    def pair(name: str) -> str:
        cell = cells.get(name, {})
        ratios = [cell.get("ratio"), cell.get("tcp_ratio")]
        return " / ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None)

    columns = {
        "insert, 1 writer": "insert/{}/1-writers",
        "insert, 2 writers": "insert/{}/2-writers",
        "insert, 4 writers": "insert/{}/4-writers",
        "sample, 1 reader": "sample/{}/1-readers",
        "sample, 2 readers": "sample/{}/2-readers",
        "acknowledgement, p50": "ack-p50/{}",
        "acknowledgement, p99": "ack-p99/{}",
    }
    rows = []
    for size in PAYLOADS:
        rows.append((size, *(pair(name.format(size)) for name in columns.values())))
    return markdown(("payload", *columns), rows)


def goals(results: dict[str, Any]) -> str:
    def rows() -> Iterator[Row]:
        for goal in results["goals"]:
            if goal["value"] is not None:
                bound, _, quantity = goal["text"].partition(": ")
                met = "yes" if goal["met"] else "no"
                yield quantity, bound, number(goal["value"]), met

    return markdown(("quantity", "goal", "result", "goal met?"), rows())


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
