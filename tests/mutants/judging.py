"""Judging: plants each mutant in a copy of the repository, and runs the test files that reach its line."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.forking import HUNG, ForkingPytest
from tests.mutants.mutations import ROOT, Mutant, Site, find
from tests.mutants.reach import PYTEST, WHOLE_FILE, Reach

PASSED = 0
NO_SUCH_TEST = 4
NOTHING_RUN = 5
"""The statuses of pytest for tests that passed, for a test that is not there, and for a file without tests to run."""
START_SECONDS = 2.0
"""What a run of pytest takes beside its tests."""
FEWEST_SECONDS = 60.0
MOST_TIMES = 5.0
"""Tests hang if they take longer than both: so many seconds, and so many times as long as without the mutant."""


@dataclass(frozen=True)
class Run:
    """One run of pytest that may find a mutant."""

    arguments: tuple[str, ...]
    """The ids of tests, or the path of a test file."""
    file: str
    seconds: float
    """How long it takes without the mutant."""


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant."""

    mutant: Mutant
    outcome: str
    """"killed", "hung" (killed as well), "survived", "not reached", "gone", or "unfinished"."""
    by: str = ""
    """The test that failed, or the test file that hung."""
    runs: int = 0
    """How many runs of pytest it took."""

    @property
    def is_killed(self) -> bool:
        return self.outcome in ("killed", "hung")

    def line(self) -> str:
        return json.dumps({**asdict(self.mutant), "outcome": self.outcome, "by": self.by, "runs": self.runs})


def read_verdicts(path: Path) -> dict[Mutant, Verdict]:
    verdicts = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        outcome = row.pop("outcome")
        by = row.pop("by")
        runs = row.pop("runs")
        mutant = Mutant(**row)
        verdicts[mutant] = Verdict(mutant, outcome, by, runs)
    return verdicts


def judge(mutants: Sequence[Mutant], reaches: Sequence[Reach], out: Path, jobs: int, most_seconds: float) -> None:
    """Appends a verdict on each mutant to `out`, which may hold some already.

    `most_seconds`: what one mutant may take, as its tests took without it; the rest of its tests is left out then.
    """
    judged = read_verdicts(out)
    sites = find(mutants)
    waiting = [mutant for mutant in mutants if mutant not in judged]
    usable = [reach for reach in reaches if reach.status in (PASSED, NOTHING_RUN)]
    lock = threading.Lock()
    with _judges(jobs) as free:

        def one(mutant: Mutant) -> None:
            judge = free.get()
            try:
                verdict = judge.verdict(mutant, sites[mutant], usable, most_seconds)
            finally:
                free.put(judge)
            with lock, out.open("a") as file:
                file.write(verdict.line() + "\n")
            print(f"{verdict.outcome}: {mutant.path} {mutant.function}: {mutant.kind} {mutant.piece!r:.80}", flush=True)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, waiting))


def runs_for(path: str, line: int, reaches: Sequence[Reach]) -> list[Run]:
    """The runs that reach a line: first the tests that are known to, then whole files in which it is another process.

    The test files that are about the source file come first: they find most.
    """
    selected = []
    whole = []
    for reach in sorted(reaches, key=lambda reach: reach.specific(path), reverse=True):
        numbers = reach.reaching(path, line)
        tests = [number for number in numbers if number != WHOLE_FILE]
        if tests:
            seconds = sum(reach.test_seconds[number] for number in tests)
            selected.append(Run(tuple(reach.tests[number] for number in tests), reach.test, START_SECONDS + seconds))
        elif numbers:
            whole.append(Run((reach.test,), reach.test, reach.seconds))
    return selected + whole


class Judge:
    """Plants mutants in a copy of the repository of its own, and runs tests there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        packages = (folder, folder / "client", folder / "trainer", folder / "protos")
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages)), "PYTHONDONTWRITEBYTECODE": "1"}
        self._pytest = ForkingPytest(folder, environ)
        self._sound: dict[str, bool] = {}
        """Whether a test passes in the copy without a mutant. A test that needs git does not."""

    def close(self) -> None:
        self._pytest.close()

    def verdict(self, mutant: Mutant, site: Site | None, reaches: Sequence[Reach], most_seconds: float) -> Verdict:
        if site is None:
            return Verdict(mutant, "gone")
        path = str(site.path.relative_to(ROOT))
        runs = runs_for(path, site.line, reaches)
        if not runs:
            return Verdict(mutant, "not reached")
        original = site.path.read_bytes()
        planted = self.folder / path
        mutated = site.planted(original)
        spent = 0.0
        left_out = False
        done = 0
        for run in runs:
            if done and spent + run.seconds > most_seconds:
                left_out = True
                continue
            spent += run.seconds
            done += 1
            planted.write_bytes(mutated)
            try:
                status, failed = self._run(run)
            finally:
                planted.write_bytes(original)
            if status == HUNG:
                return Verdict(mutant, "hung", run.file, done)
            if status not in (PASSED, NOTHING_RUN) and self._is_sound(failed):
                return Verdict(mutant, "killed", failed or run.file, done)
        return Verdict(mutant, "unfinished" if left_out else "survived", runs=done)

    def _is_sound(self, test: str) -> bool:
        """Whether a test that failed passes without a mutant. Unknown test: pytest ended before it ran one."""
        if test and test not in self._sound:
            status, _ = self._pytest.run([*PYTEST, test], MOST_TIMES * FEWEST_SECONDS)
            self._sound[test] = status == PASSED
        return self._sound.get(test, True)

    def _run(self, run: Run) -> tuple[int, str]:
        seconds = max(FEWEST_SECONDS, MOST_TIMES * run.seconds)
        status, failed = self._pytest.run([*PYTEST, *run.arguments], seconds)
        if status == NO_SUCH_TEST:  # a module that cannot be imported has no tests, and an id may differ
            return self._pytest.run([*PYTEST, run.file], seconds)
        return status, failed


@contextmanager
def _judges(count: int) -> Iterator[queue.SimpleQueue[Judge]]:
    """Judges that nobody uses, each with a copy of what git knows of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name]
    judges: list[Judge] = []
    free: queue.SimpleQueue[Judge] = queue.SimpleQueue()
    try:
        for _ in range(count):
            folder = Path(tempfile.mkdtemp(prefix="mutants-"))
            for name in names:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
            judge = Judge(folder)
            judges.append(judge)
            free.put(judge)
        yield free
    finally:
        for judge in judges:
            judge.close()
            shutil.rmtree(judge.folder)
