"""What the parts of the demo need, made once in one folder: for parts that run as services of their own.

    python -m examples.demo.prepare FOLDER [SEED [TARGET [TASK]]]

It makes prompts.jsonl, train.toml, model/, warm/, and last of all ready. A folder that is ready stays as it is.
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
"""Written last: what lies beside it is complete."""


def prepare(folder: Path, seed: int = 0, target_solve_rate: float | None = None, kind: str = "sums") -> bool:
    """Whether there was anything to do. Raises SystemExit if the model does not get to `target_solve_rate` (None: that
    of the demo). `kind`: "sums", or "tools"."""
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
    folder, seed, target, kind = [*sys.argv[1:], *("0", "", "sums")[len(sys.argv) - 2 :]]
    done = prepare(Path(folder), int(seed), float(target) if target else None, kind)
    print(f"{folder}: {'made' if done else 'it was ready'}", flush=True)
