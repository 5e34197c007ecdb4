"""Reach: which lines of the packages each test file runs, in its own process and in those that it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutations import PACKAGES, ROOT

FOLDER = ROOT / ".mutants"
"""What was learned of each test file: a JSON file each. Git ignores it, for it is true of one commit only."""
MOST_SECONDS = 900.0
"""Seconds that one test file may take while its lines are counted."""
SETTINGS = """[run]
branch = false
parallel = true
data_file = {folder}/data
source = {sources}
patch = subprocess
concurrency = thread,multiprocessing
sigterm = true
"""


@dataclass(frozen=True)
class Reach:
    """What one test file runs."""

    test: str
    seconds: float
    status: int
    """Of pytest; what is neither 0 nor 5 cannot find a mutant, for it fails without one."""
    lines: dict[str, list[int]]
    """By the path of each source file."""

    def reaches(self, path: str, line: int) -> bool:
        return line in self.lines.get(path, ())

    def specific(self, path: str) -> float:
        """The share of the test file's lines that lie in this source file."""
        return len(self.lines.get(path, ())) / max(1, sum(map(len, self.lines.values())))


def test_files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def pytest_of(test: str, *options: str) -> list[str]:
    return [sys.executable, *options, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long", test]


def learn(tests: Sequence[str], jobs: int) -> None:
    """Runs each test file alone, unless that was done before, and stores what it reaches."""
    FOLDER.mkdir(exist_ok=True)
    missing = [test for test in tests if not _stored(test).exists()]
    with ThreadPoolExecutor(jobs) as pool:
        for done, reach in enumerate(pool.map(_learn, missing), start=1):
            print(f"{done}/{len(missing)} {reach.test}: status {reach.status}, {reach.seconds:.0f} s", flush=True)


def known() -> list[Reach]:
    return [Reach(**json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json"))]


def _stored(test: str) -> Path:
    return FOLDER / (test.replace("/", "-") + ".json")


def _learn(test: str) -> Reach:
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "coverage.ini")
        settings.write_text(SETTINGS.format(folder=folder, sources=",".join(str(ROOT / each) for each in PACKAGES)))
        coverage = ["-m", "coverage"]
        command = pytest_of(test, *coverage, "run", f"--rcfile={settings}")
        began = time.monotonic()
        status = ended(command, ROOT, os.environ, MOST_SECONDS)
        seconds = time.monotonic() - began
        subprocess.run([sys.executable, *coverage, "combine", "-q", f"--rcfile={settings}"], cwd=ROOT, check=False)
        report = [sys.executable, *coverage, "json", "-q", f"--rcfile={settings}", "-o", f"{folder}/report.json"]
        subprocess.run(report, cwd=ROOT, check=False, capture_output=True)
        lines = {}
        if Path(folder, "report.json").exists():
            for path, file in json.loads(Path(folder, "report.json").read_text())["files"].items():
                if file["executed_lines"]:
                    lines[path] = file["executed_lines"]
    reach = Reach(test, seconds, status, lines)
    _stored(test).write_text(json.dumps(vars(reach)))
    return reach


def ended(command: Sequence[str], folder: Path, environ: Mapping[str, str], seconds: float) -> int:
    """The status of a command that gets so many seconds; -1: it had not ended, and was killed with its children."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
