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
"""Most runs that are read: those whose files changed last."""
MOST_STEPS = 200_000
"""A file is read until at least this many lines of it have been read. The rest of it is left out."""
BYTES_PER_READ = 2 << 20
"""Bytes of a file that are read at a time. A longer line is skipped, and counts as damaged."""


@dataclass
class Run:
    """One metrics.jsonl, with a column for each metric."""

    name: str
    path: Path
    offset: int = 0
    """Bytes of the file that have been read."""
    lines: int = 0
    """Lines that have been read, without the damaged ones."""
    damaged: int = 0
    skipping: bool = False
    """True while `offset` is inside a line that is too long."""
    written: float = 0.0
    """The time of the last change of the file, in seconds since the epoch."""
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    """The value of each metric in each of the `lines`; None: the line lacks the metric."""

    def read(self) -> bool:
        """Reads the next lines of the file, BYTES_PER_READ at most. Returns True if `offset` has changed.

        If the file became shorter, this begins anew at the first line.
        """
        offset_before = self.offset
        try:
            status = self.path.stat()
            self.written = status.st_mtime
            if status.st_size < self.offset:  # a run that resumes cuts off the lines of the steps that it repeats
                self._begin_anew()
            has_grown = status.st_size != self.offset
            if not has_grown or self.lines >= MOST_STEPS:
                return self.offset != offset_before  # True if the file became empty
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(BYTES_PER_READ)
        except OSError:  # the file was removed, or cannot be read now
            return self.offset != offset_before
        end = data.rfind(b"\n") + 1  # after the last whole line: the line behind it may not be complete yet
        is_part_of_a_long_line = not end and len(data) == BYTES_PER_READ
        if is_part_of_a_long_line:
            self._skip(len(data))
            return True
        lines = data[:end].split(b"\n")[:-1]
        if self.skipping and lines:
            del lines[0]  # this is the end of the line that is too long
            self.skipping = False
        for line in lines:
            self._add_line(line)
        self.offset += end
        return end > 0 or self.offset != offset_before

    def _begin_anew(self) -> None:
        """Forgets all that was read."""
        self.offset = 0
        self.lines = 0
        self.damaged = 0
        self.skipping = False
        self.columns = {}

    def _skip(self, count: int) -> None:
        """Moves on by `count` bytes of a line that is too long. The line counts as damaged once."""
        if not self.skipping:
            self.damaged += 1
        self.skipping = True
        self.offset += count

    def _add_line(self, line: bytes) -> None:
        """Adds the numbers of one line to the columns. A line that is not a JSON object counts as damaged."""
        try:
            row = json.loads(line)
            numbers = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
        except (ValueError, AttributeError, RecursionError, OverflowError):
            self.damaged += 1
            return
        new_names = numbers.keys() - self.columns.keys()
        for name in new_names:
            self.columns[name] = [None] * self.lines  # all lines before this one lack the metric
        for name, column in self.columns.items():
            column.append(numbers.get(name))
        self.lines += 1


class Runs:
    """All runs below a folder, the newest first."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._runs: dict[Path, Run] = {}
        self._lock = threading.Lock()  # one thread reads the files while other threads answer requests
        self.version = 0
        """Increases whenever a file has grown or became shorter, or a run was removed."""
        self.meanings = {name: _meaning_of(metric) for name, metric in declared().items()}
        """The text of the page about each metric, by the name of the metric."""

    def read(self) -> None:
        """Finds the files of runs, down to three folders deep, and reads the next lines of each."""
        if self._folder is None:
            return
        patterns = ("metrics.jsonl", "*/metrics.jsonl", "*/*/metrics.jsonl", "*/*/*/metrics.jsonl")
        all_paths = (path for pattern in patterns for path in self._folder.glob(pattern))
        paths = heapq.nlargest(MOST_RUNS, all_paths, key=_time_written)
        with self._lock:
            for path in self._runs.keys() - set(paths):
                del self._runs[path]
                self.version += 1
        for path in paths:
            name = str(path.parent.relative_to(self._folder))
            if name == ".":
                name = self._folder.name
            with self._lock:  # taken anew for each run, so that other threads can answer between two runs
                run = self._runs.setdefault(path, Run(name, path))
                if run.read():
                    self.version += 1

    def newest(self) -> dict[str, list[float | None]]:
        """The columns of the run whose file changed last; empty without runs."""
        with self._lock:
            return next((run.columns for run in self._ordered()), {})

    def newest_name(self) -> str:
        """The name of the run whose file changed last; empty without runs."""
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
        # Outside of the lock, because this reads files.
        configurations = [self._configuration(folder) for folder in folders]
        return document | {"configurations": configurations}

    def _configuration(self, folder: Path) -> dict[str, str]:
        """The settings of the run in `folder`, as JSON by dotted name."""
        if self._folder is None:
            return {}
        return configuration_of(folder, self._folder)

    def _ordered(self) -> list[Run]:
        """All runs; the run whose file changed last comes first. The caller holds the lock."""
        return sorted(self._runs.values(), key=lambda run: run.written, reverse=True)


def _time_written(path: Path) -> float:
    """The time of the last change of a file, in seconds since the epoch; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:  # the file was removed after it was found
        return 0.0


def _thinned(run: Run) -> dict[str, Any]:
    """The steps and columns of every n-th line of a run: at most MOST_POINTS lines, the last line among them."""
    every = math.ceil(max(1, run.lines) / MOST_POINTS)
    rows = list(range(run.lines - 1, -1, -every))  # from the last line backwards
    rows.reverse()
    steps = run.columns.get("step") or list(range(1, run.lines + 1))
    columns = {}
    for name, column in run.columns.items():
        if name != "step":
            columns[name] = [column[row] for row in rows]
    return {"steps": [steps[row] for row in rows], "columns": columns}


def _meaning_of(metric: Metric) -> str:
    """The text of the page about a metric: its declaration, without Markdown."""
    meaning = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", metric.meaning)  # [text](address) becomes text
    parts = [meaning.replace("`", "")]
    if metric.unit:
        parts.append(f"Unit: {metric.unit}")
    if metric.healthy is not None:
        parts.append(f"Healthy: {metric.healthy}")
    return " ".join(f"{part}." for part in parts)
