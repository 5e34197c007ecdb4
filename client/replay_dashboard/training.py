"""Runs: reads the metrics.jsonl files below a folder while they grow, and knows the meaning of each metric."""

from __future__ import annotations

import heapq
import json
import math
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replay_client.run_metrics import Metric, declared
from replay_dashboard.configuration import configuration_of

MOST_POINTS = 500
"""Most points of a curve that are sent to the page. A longer curve is thinned out."""
MOST_RUNS = 200
MOST_STEPS = 200_000
BYTES_PER_READ = 2 << 20
"""Bytes of a file that are read at a time. A line that is longer is skipped, and counts as damaged."""


@dataclass
class Run:
    """One metrics.jsonl: a column for each metric, with an entry a line."""

    name: str
    path: Path
    offset: int = 0
    lines: int = 0
    damaged: int = 0
    skipping: bool = False
    """True while `offset` is inside a line that is too long."""
    written: float = 0.0
    """The time of the last change of the file, in seconds since the epoch."""
    columns: dict[str, list[float | None]] = field(default_factory=dict)

    def read(self) -> bool:
        """Reads the lines appended since the last call, or all if the file became shorter. True if it read any."""
        try:
            status = self.path.stat()
            self.written = status.st_mtime
            if status.st_size < self.offset:  # a run that resumes cuts off the steps that it will do again
                self._begin_anew()
            if status.st_size == self.offset or self.lines >= MOST_STEPS:
                return False
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(BYTES_PER_READ)
        except OSError:
            return False
        end = data.rfind(b"\n") + 1  # the last line may still be written
        if not end and len(data) == BYTES_PER_READ:
            self._skip(len(data))
            return True
        lines = data[:end].split(b"\n")[:-1]
        if self.skipping and lines:
            del lines[0]  # the end of the line that is too long
            self.skipping = False
        for line in lines:
            self._add(line)
        self.offset += end
        return end > 0

    def _begin_anew(self) -> None:
        self.offset = 0
        self.lines = 0
        self.damaged = 0
        self.skipping = False
        self.columns = {}

    def _skip(self, count: int) -> None:
        """Passes over bytes that are all of one line, which counts as damaged once."""
        if not self.skipping:
            self.damaged += 1
        self.skipping = True
        self.offset += count

    def _add(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            numbers = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
        except (ValueError, AttributeError, RecursionError, OverflowError):
            self.damaged += 1
            return
        for name in numbers.keys() - self.columns.keys():
            self.columns[name] = [None] * self.lines
        for name, column in self.columns.items():
            column.append(numbers.get(name))
        self.lines += 1


class Runs:
    """All runs below a folder, the newest first."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._runs: dict[Path, Run] = {}
        self._lock = threading.Lock()  # between the thread that reads and those that answer
        self.version = 0
        """Increases whenever a file has grown."""
        self.meanings = {name: _meaning_of(metric) for name, metric in declared().items()}

    def read(self) -> None:
        """Finds new files, and reads new lines."""
        if self._folder is None:
            return
        patterns = ("metrics.jsonl", "*/metrics.jsonl", "*/*/metrics.jsonl", "*/*/*/metrics.jsonl")
        found = (path for pattern in patterns for path in self._folder.glob(pattern))
        paths = heapq.nlargest(MOST_RUNS, found, key=_written)
        with self._lock:
            for path in self._runs.keys() - set(paths):
                del self._runs[path]
                self.version += 1
        for path in paths:
            name = str(path.parent.relative_to(self._folder))
            if name == ".":
                name = self._folder.name
            with self._lock:
                run = self._runs.setdefault(path, Run(name, path))
                if run.read():
                    self.version += 1

    def newest(self) -> dict[str, list[float | None]]:
        """The columns of the run whose file changed last."""
        with self._lock:
            return next((run.columns for run in self._ordered()), {})

    def newest_name(self) -> str:
        """The name of the same run; empty: there is none."""
        with self._lock:
            return next((run.name for run in self._ordered()), "")

    def document(self, names: list[str]) -> dict[str, Any]:
        """The curves of the runs with these names, or of the newest run if no name matches, and a list of all runs."""
        with self._lock:
            runs = self._ordered()
            chosen = [run for run in runs if run.name in names] or runs[:1]
            document = {
                "version": self.version,
                "folder": str(self._folder or ""),
                "runs": [{"name": run.name, "steps": run.lines, "damaged": run.damaged} for run in runs],
                "curves": [{"run": run.name} | _thinned(run) for run in chosen],
                "meanings": self.meanings,
            }
            folders = [run.path.parent for run in chosen]
        return document | {"configurations": [self._configuration(folder) for folder in folders]}

    def _configuration(self, folder: Path) -> dict[str, str]:
        return {} if self._folder is None else configuration_of(folder, self._folder)

    def _ordered(self) -> list[Run]:
        return sorted(self._runs.values(), key=lambda run: run.written, reverse=True)


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it was removed meanwhile
        return 0.0


def _thinned(run: Run) -> dict[str, Any]:
    """The steps and columns of at most MOST_POINTS lines, always with the last line."""
    every = math.ceil(max(1, run.lines) / MOST_POINTS)
    rows = list(range(run.lines - 1, -1, -every))
    rows.reverse()
    steps = run.columns.get("step") or list(range(1, run.lines + 1))
    columns = {}
    for name, column in run.columns.items():
        if name != "step":
            columns[name] = [column[row] for row in rows]
    return {"steps": [steps[row] for row in rows], "columns": columns}


def _meaning_of(metric: Metric) -> str:
    """The text of the page about a metric: its declaration without Markdown."""
    parts = [re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", metric.meaning).replace("`", "")]
    if metric.unit:
        parts.append(f"Unit: {metric.unit}")
    if metric.healthy is not None:
        parts.append(f"Healthy: {metric.healthy}")
    return "".join(f"{part}. " for part in parts).rstrip()
