"""Makes the files of the demo once, in one folder, for parts that run as services of their own.

    python -m examples.demo.prepare FOLDER [SEED [TARGET [TASK]]]

It makes prompts.jsonl, train.toml, the folder warm, and last of all the file ready. A folder that has this file stays
as it is.
`python -m examples.demo` does the same, but lets the engine load while the model warms up.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import tomli_w

from examples.demo import task
from examples.demo.variants import TASKS

READY = "ready"
"""The file that is written last. If it exists, the other files are complete."""


def prepare(folder: Path, seed: int = 0, target_solve_rate: float | None = None, kind: str = "sums") -> bool:
    """Makes the files. Returns False if they were there already.

    `target_solve_rate`: the solve rate at which the warm-up ends; None: that of the demo. `kind`: "sums" or "tools".
    Raises SystemExit if the model does not reach the solve rate.
    """
    if (folder / READY).exists():
        return False
    variant = TASKS[kind]
    target = variant.solve_rate if target_solve_rate is None else target_solve_rate
    for name in ("model", "warm"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.toml").write_text(tomli_w.dumps(variant.sections["train"]))
    task.main("make", folder, seed, target, kind)
    task.main("warm-up", folder, seed, target, kind)
    (folder / READY).touch()
    return True


if __name__ == "__main__":
    defaults = ("0", "", "sums")
    arguments = sys.argv[1:]
    folder, seed, target, kind = [*arguments, *defaults[len(arguments) - 1 :]]
    target_solve_rate = float(target) if target else None
    is_new = prepare(Path(folder), int(seed), target_solve_rate, kind)
    result = "made" if is_new else "it was ready"
    print(f"{folder}: {result}", flush=True)
