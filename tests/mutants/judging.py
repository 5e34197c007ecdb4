"""Judging: plants each mutant in a copy of the repository, and runs the test files that reach its line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.mutations import ROOT, Mutant, Site, find
from tests.mutants.reach import Reach, ended, pytest_of

PASSED = 0
NOTHING_RUN = 5
"""The statuses of pytest for tests that passed, and for a file without tests to run."""
FEWEST_SECONDS = 60.0
MOST_TIMES = 5.0
"""A test file hangs if it takes longer than both: so many seconds, and so many times as long as without the mutant."""


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant."""

    mutant: Mutant
    outcome: str
    """"killed", "hung" (killed as well), "survived", "not reached", "gone", or "unfinished"."""
    by: str = ""
    """The test file that failed, or that hung."""
    files: int = 0
    """How many test files were run."""

    @property
    def is_killed(self) -> bool:
        return self.outcome in ("killed", "hung")

    def line(self) -> str:
        return json.dumps({**asdict(self.mutant), "outcome": self.outcome, "by": self.by, "files": self.files})


def read_verdicts(path: Path) -> dict[Mutant, Verdict]:
    verdicts = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        outcome, by, files = row.pop("outcome"), row.pop("by"), row.pop("files")
        mutant = Mutant(**row)
        verdicts[mutant] = Verdict(mutant, outcome, by, files)
    return verdicts


def judge(mutants: Sequence[Mutant], reaches: Sequence[Reach], out: Path, jobs: int, most_seconds: float) -> None:
    """Appends a verdict on each mutant to `out`, which may hold some already.

    `most_seconds`: what one mutant may take, as its test files took without it; the rest of its files is left out then.
    """
    judged = read_verdicts(out)
    sites = find(mutants)
    waiting = [mutant for mutant in mutants if mutant not in judged]
    usable = [reach for reach in reaches if reach.status in (PASSED, NOTHING_RUN)]
    copies = threading.local()
    lock = threading.Lock()
    with _copies(jobs) as folders:

        def one(mutant: Mutant) -> None:
            if not hasattr(copies, "folder"):
                with lock:
                    copies.folder = folders.pop()
            verdict = _verdict(mutant, sites[mutant], usable, copies.folder, most_seconds)
            with lock, out.open("a") as file:
                file.write(verdict.line() + "\n")
            print(f"{verdict.outcome}: {mutant.path} {mutant.function}: {mutant.kind} {mutant.piece!r:.80}", flush=True)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, waiting))


def _verdict(mutant: Mutant, site: Site | None, reaches: Sequence[Reach], copy: Path, most_seconds: float) -> Verdict:
    if site is None:
        return Verdict(mutant, "gone")
    path = str(site.path.relative_to(ROOT))
    reaching = [reach for reach in reaches if reach.reaches(path, site.line)]
    if not reaching:
        return Verdict(mutant, "not reached")
    # The tests that are about this file come first: they find most.
    reaching.sort(key=lambda reach: reach.specific(path), reverse=True)
    original = site.path.read_bytes()
    planted = copy / path
    planted.write_bytes(site.planted(original))
    try:
        spent = 0.0
        for files, reach in enumerate(reaching, start=1):
            if spent > most_seconds:
                return Verdict(mutant, "unfinished", files=files - 1)
            spent += reach.seconds
            status = _status(reach, copy)
            if status not in (PASSED, NOTHING_RUN):
                return Verdict(mutant, "hung" if status < 0 else "killed", reach.test, files)
        return Verdict(mutant, "survived", files=len(reaching))
    finally:
        planted.write_bytes(original)


def _status(reach: Reach, copy: Path) -> int:
    """Of pytest, for one test file in the copy."""
    packages = (copy, copy / "client", copy / "trainer", copy / "protos")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages)), "PYTHONDONTWRITEBYTECODE": "1"}
    return ended(pytest_of(reach.test), copy, environ, max(FEWEST_SECONDS, MOST_TIMES * reach.seconds))


@contextmanager
def _copies(count: int) -> Iterator[list[Path]]:
    """Copies of what git knows of the repository, outside of it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name]
    folders = []
    try:
        for _ in range(count):
            folder = Path(tempfile.mkdtemp(prefix="mutants-"))
            folders.append(folder)
            for name in names:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        yield list(folders)
    finally:
        for folder in folders:
            shutil.rmtree(folder)
