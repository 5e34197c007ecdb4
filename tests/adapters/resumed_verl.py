"""Measures how much longer verl takes to resume when it looks up its finished groups.

Two runs are killed two steps after a checkpoint: one with RecoveringAgentLoop, and one with verl's own agent loop. Then
both are started again in turn, and killed after one step, so that all starts resume from the same checkpoint.
`run_verl_recovery` is what runs.

    python -m tests.adapters.resumed_verl PYTHON FOLDER MODE [ROUNDS]     prints the seconds, and their medians
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

from replay_client.testing import until
from tests.adapters.killed_verl import LONGEST, TABLE, begin, entries, prepare
from tests.kit.processes import server_process

CHECKPOINT = 4
"""The step of the only checkpoint, which is trainer.save_freq of run_verl_recovery."""
STEPS = 100
"""The steps of a run, none of which comes to its end."""
WITHOUT = "none"
"""The address that makes run_verl_recovery use verl's own agent loop."""


@dataclass
class Run:
    """A run that resumes from CHECKPOINT again and again."""

    python: str
    folder: Path
    address: str
    mode: str
    starts: int = 0
    whole: list[float] = field(default_factory=list)
    """For each resume: the seconds from the start of the process to the end of the first step."""
    after_load: list[float] = field(default_factory=list)
    """For each resume: the seconds from the loaded checkpoint to the end of the first step. Workers start then."""

    def start_and_kill(self, step: int) -> float:
        """Starts the run, and kills it after a step. Returns the time at which it was started."""
        start = begin(self.python, self.folder, self.address, self.mode, STEPS, number=self.starts)
        try:
            until(lambda: start.reached(step), timeout=LONGEST, pause=0.05)
        finally:
            start.kill()
        self.starts += 1
        return start.launched

    def resume(self) -> str:
        """Resumes, and measures the first step. Returns what was measured."""
        number = str(self.starts)
        launched = self.start_and_kill(CHECKPOINT + 1)
        [loaded] = [entry for entry in entries(self.folder, "loaded") if entry["start"] == number]
        assert loaded["step"] == CHECKPOINT
        first = next(entry for entry in entries(self.folder, "trained") if entry["start"] == number)
        assert first["step"] == CHECKPOINT + 1
        self.whole.append(first["at"] - launched)
        self.after_load.append(first["at"] - loaded["at"])
        found = [entry for entry in entries(self.folder, "fetch") if entry["start"] == number and entry["found"]]
        return f"{self.whole[-1]:.2f} s, {self.after_load[-1]:.2f} s after loading, {len(found)} groups found"


def main(python: str, folder: Path, mode: str, rounds: int) -> None:
    for name in ("recovering", "own"):
        (folder / name).mkdir(parents=True)
        prepare(folder / name)
    with server_process(folder / "recovering", TABLE) as server:
        recovering = Run(python, folder / "recovering", server.address, mode)
        own = Run(python, folder / "own", WITHOUT, mode)
        for run in (recovering, own):
            run.start_and_kill(CHECKPOINT + 2)
        for number in range(rounds):
            # Each run is the first one every other time, because other programs use the machine as well.
            for run in (recovering, own) if number % 2 == 0 else (own, recovering):
                print(mode, run.folder.name, run.resume(), flush=True)
    for name in ("whole", "after_load"):
        medians = [statistics.median(getattr(run, name)) for run in (recovering, own)]
        print(f"{mode}, {name}: {medians[0]:.2f} s with RecoveringAgentLoop, {medians[1]:.2f} s with verl's own")


if __name__ == "__main__":
    rounds = int(sys.argv[4]) if len(sys.argv) > 4 else 5
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], rounds)
