"""Judging: plants each mutant in a copy of the repository, and runs the test files that may find it."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.mutants.forking import HUNG, ForkingPytest
from tests.mutants.likely import LikelyTests
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


MOST_UNSOUND = 5
"""How many tests of one run may fail without the mutant as well; with more, the run finds nothing."""


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
    """"killed", "hung" (killed as well), "survived", "not reached", "gone", "unfinished", or "open": its likely test
    files do not kill it, and no others were run."""
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


def judge_by_likely(mutants: Sequence[Mutant], out: Path, jobs: int, most_seconds: float) -> None:
    """Appends a verdict on each mutant that `out` does not have, by the test files that import or name its function."""
    tests = LikelyTests()
    judged = read_verdicts(out)
    sites = find(mutants)

    def verdict(judge: Judge, mutant: Mutant) -> Verdict:
        site = sites[mutant]
        if site is None:
            return Verdict(mutant, "gone")
        names = tests.likely(mutant.function, str(site.path.relative_to(ROOT)), site.line)
        runs = [Run((name,), name, tests.expected_seconds(name)) for name in names]
        reached = judge.verdict(mutant, site, runs, most_seconds, tests.note)
        return reached if reached.is_killed else replace(reached, outcome="open")

    _judge([mutant for mutant in mutants if mutant not in judged], verdict, out, jobs)


def judge_by_reach(
    mutants: Sequence[Mutant], reaches: Sequence[Reach], out: Path, jobs: int, most_seconds: float
) -> None:
    """Appends a verdict on each mutant that is not in `out`, or open there, by the tests that reach its line."""
    judged = read_verdicts(out)
    sites = find(mutants)
    usable = [reach for reach in reaches if reach.status in (PASSED, NOTHING_RUN)]

    def verdict(judge: Judge, mutant: Mutant) -> Verdict:
        site = sites[mutant]
        if site is None:
            return Verdict(mutant, "gone")
        runs = runs_for(str(site.path.relative_to(ROOT)), site.line, usable)
        if not runs:
            return Verdict(mutant, "not reached")
        return judge.verdict(mutant, site, runs, most_seconds)

    _judge(
        [mutant for mutant in mutants if mutant not in judged or judged[mutant].outcome == "open"], verdict, out, jobs
    )


def _judge(mutants: Sequence[Mutant], verdict_on: Callable[[Judge, Mutant], Verdict], out: Path, jobs: int) -> None:
    """Appends the verdicts on mutants to a file, each by a judge that has nothing else to do."""
    lock = threading.Lock()
    with _judges(jobs) as free:

        def one(mutant: Mutant) -> None:
            judge = free.get()
            try:
                verdict = verdict_on(judge, mutant)
            finally:
                free.put(judge)
            with lock, out.open("a") as file:
                file.write(verdict.line() + "\n")
            print(f"{verdict.outcome}: {mutant.path} {mutant.function}: {mutant.kind} {mutant.piece!r:.80}", flush=True)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, mutants))


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

    def verdict(
        self,
        mutant: Mutant,
        site: Site,
        runs: Sequence[Run],
        most_seconds: float,
        note: Callable[[str, float], None] | None = None,
    ) -> Verdict:
        """What becomes of a mutant by so many runs.

        `most_seconds`: what all of them may take; those that would take longer are left out. `note`: hears how long a
        test file took that passed.
        """
        original = site.path.read_bytes()
        planted = self.folder / site.path.relative_to(ROOT)
        mutated = site.planted(original)
        spent = 0.0
        left_out = False
        done = 0
        for run in runs:
            if done and spent + run.seconds > most_seconds:
                left_out = True
                continue
            done += 1
            began = time.monotonic()
            outcome, by = self._found(run, planted, mutated, original)
            seconds = time.monotonic() - began
            spent += seconds
            if outcome in ("killed", "hung"):
                return Verdict(mutant, outcome, by, done)
            if outcome == "unfinished":
                left_out = True
            elif note is not None:
                note(run.file, seconds)
        return Verdict(mutant, "unfinished" if left_out else "survived", runs=done)

    def _found(self, run: Run, planted: Path, mutated: bytes, original: bytes) -> tuple[str, str]:
        """What becomes of a mutant by one run, and by which test."""
        has_hung = False
        for _ in range(2 + MOST_UNSOUND):
            planted.write_bytes(mutated)
            try:
                status, failed = self._run(run)
            finally:
                planted.write_bytes(original)
            if status == HUNG:
                if has_hung:
                    return "hung", run.file
                if not self._ends(run):
                    return "unfinished", ""
                has_hung = True  # the next run tells a mutant that hangs from a machine that was busy
                continue
            if status in (PASSED, NOTHING_RUN):
                return "survived", ""
            if not failed:
                return ("killed", run.file) if self._is_collected(run) else ("unfinished", "")
            if self._is_sound(failed):
                return "killed", failed
            # The next run leaves this test out: the tests after it may find the mutant.
        return "unfinished", ""

    def _ends(self, run: Run) -> bool:
        """Whether a run that hung ends in its time without a mutant."""
        status, _ = self._run(run)
        return status != HUNG

    def _is_collected(self, run: Run) -> bool:
        """Whether a file whose run ended before a test failed can be imported without a mutant."""
        status, _ = self._pytest.run([*PYTEST, "--collect-only", run.file], FEWEST_SECONDS)
        return status == PASSED

    def _is_sound(self, test: str) -> bool:
        """Whether a test that failed passes without a mutant."""
        if test not in self._sound:
            status, _ = self._pytest.run([*PYTEST, test], MOST_TIMES * FEWEST_SECONDS)
            self._sound[test] = status == PASSED
        return self._sound[test]

    def _run(self, run: Run) -> tuple[int, str]:
        seconds = max(FEWEST_SECONDS, MOST_TIMES * run.seconds)
        unsound = [test for test, is_sound in self._sound.items() if not is_sound]
        left_out = [f"--deselect={test}" for test in unsound if test.startswith(run.file)]
        status, failed = self._pytest.run([*PYTEST, *left_out, *run.arguments], seconds)
        if status == NO_SUCH_TEST:  # a module that cannot be imported has no tests, and an id may differ
            return self._pytest.run([*PYTEST, *left_out, run.file], seconds)
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
