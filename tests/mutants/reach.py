"""Reach: which lines of the packages each test file runs, in its own process and in those that it starts."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData

from tests.mutants.contexts import SECONDS_FILE, SETTINGS_FILE
from tests.mutants.forking import ForkingPytest
from tests.mutants.mutations import PACKAGES, ROOT

FOLDER = ROOT / ".mutants"
"""What was learned of each test file: a JSON file each. Git ignores it, for it is true of one commit only."""
SETTINGS = """[run]
branch = false
parallel = true
data_file = {folder}/data
source = {sources}
patch = _exit, fork, subprocess
concurrency = thread,multiprocessing
sigterm = true
"""


WHOLE_FILE = -1
"""In the place of a test: a line ran in another process, or between tests, so nobody knows for which test."""


@dataclass(frozen=True)
class Reach:
    """What one test file runs."""

    test: str
    """The path of the file."""
    seconds: float
    status: int
    """The status of pytest. If it is neither 0 nor 5, the file cannot find a mutant: it fails without one."""
    tests: list[str]
    """The ids of the file's tests that ran."""
    test_seconds: list[float]
    """How long each of them took."""
    lines: dict[str, dict[str, list[int]]]
    """By the path of each source file and by each line that ran: numbers of tests, or WHOLE_FILE."""

    def reaching(self, path: str, line: int) -> list[int]:
        """The numbers of the tests that run a line, the quickest first; WHOLE_FILE is one of them, and the last."""

        def order(number: int) -> tuple[bool, float]:
            return number == WHOLE_FILE, self.test_seconds[number] if number != WHOLE_FILE else self.seconds

        return sorted(self.lines.get(path, {}).get(str(line), ()), key=order)

    def specific(self, path: str) -> float:
        """The share of the test file's lines that lie in this source file."""
        return len(self.lines.get(path, ())) / max(1, sum(map(len, self.lines.values())))


def test_files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not long")
"""The options of pytest for the gate."""


def learn(tests: Sequence[str], jobs: int, most_seconds: float) -> None:
    """Runs each test file alone, unless that was done before, and stores what it reaches.

    `most_seconds`: what one test file may take. What takes longer is of no use to the gate, and is stored as such.
    """
    FOLDER.mkdir(exist_ok=True)
    missing = [test for test in tests if not _stored(test).exists()]
    free: queue.SimpleQueue[ForkingPytest] = queue.SimpleQueue()
    for _ in range(jobs):
        free.put(ForkingPytest(ROOT, os.environ))

    def one(test: str) -> Reach:
        forking = free.get()
        try:
            return _learn(forking, test, most_seconds)
        finally:
            free.put(forking)

    with ThreadPoolExecutor(jobs) as pool:
        for done, reach in enumerate(pool.map(one, missing), start=1):
            print(f"{done}/{len(missing)} {reach.test}: status {reach.status}, {reach.seconds:.0f} s", flush=True)
    while not free.empty():
        free.get().close()


def known() -> list[Reach]:
    return [Reach(**json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json"))]


def _stored(test: str) -> Path:
    return FOLDER / (test.replace("/", "-") + ".json")


def _learn(forking: ForkingPytest, test: str, most_seconds: float) -> Reach:
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "coverage.ini")
        settings.write_text(SETTINGS.format(folder=folder, sources=",".join(str(ROOT / each) for each in PACKAGES)))
        seconds_file = Path(folder, "seconds.json")
        began = time.monotonic()
        environ = {SETTINGS_FILE: str(settings), SECONDS_FILE: str(seconds_file)}
        status, _ = forking.run(["-p", "tests.mutants.contexts", *PYTEST, test], most_seconds, environ)
        seconds = time.monotonic() - began
        combine = [sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={settings}"]
        subprocess.run(combine, cwd=ROOT, check=False)
        test_seconds = json.loads(seconds_file.read_text()) if seconds_file.exists() else {}
        lines = _lines(Path(folder, "data"), list(test_seconds))
    reach = Reach(test, seconds, status, list(test_seconds), list(test_seconds.values()), lines)
    _stored(test).write_text(json.dumps(vars(reach)))
    return reach


def _lines(data_file: Path, tests: Sequence[str]) -> dict[str, dict[str, list[int]]]:
    """Which tests run each line of each source file."""
    if not data_file.exists():
        return {}
    data = CoverageData(str(data_file))
    data.read()
    numbers = {test: number for number, test in enumerate(tests)}
    lines = {}
    for file in data.measured_files():
        by_line = {}
        for line, contexts in data.contexts_by_lineno(file).items():
            by_line[str(line)] = sorted({numbers.get(context, WHOLE_FILE) for context in contexts})
        lines[str(Path(file).relative_to(ROOT))] = by_line
    return lines
