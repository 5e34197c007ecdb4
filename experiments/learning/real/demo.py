"""`make demo-real`: SmolLM2 learns sums of reasoning-gym through the whole system, beside the published curves.

    python -m experiments.learning.real.demo --steps 40 --out runs/demo-real

The processes, the display and the files are those of the demo. Three things are of the experiment: the model, the
task (`two_terms` of gym.py), and the settings, which are those of the arm `small50-right`. So its curve lies beside the
published curves of the arms, which took turns between engine and trainer where this one runs both at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from examples.demo.compare import FRESH, RECIPE, Curve, curve, draw_comparison
from examples.demo.run import DemoError, check_folder, run
from examples.demo.variants import Variant, changed
from experiments.learning import statistics as s
from experiments.learning.real.gym import GYM_TASKS, GymProblems, gym_problems
from experiments.learning.real.smollm2 import smollm2
from experiments.learning.records import read_records
from experiments.learning.report import NAMES, by_setting
from experiments.learning.tuned import PRETRAINED, usual_rate
from replay_trainer.metrics import read_metrics

ROOT = Path(__file__).parents[3]
PUBLISHED = ROOT / "experiments" / "results" / "learning_real.json"
TASK = GYM_TASKS["two_terms"]
ARMS = ("small50-right", "quarter", "plain")
"""The published arms beside this run."""
SMOOTHED = 16
"""Fresh groups in each mean of this run; as many as a point of the published curves has."""
EACH = 1000
"""Generated tokens between two lines of the table."""
_REAL = {
    "generate": {
        "reward": "experiments.learning.real.demo:right",
        "max_tokens": TASK.max_tokens,
        "chat": True,
        # The model's own limit, 8,192 tokens, would not fit the memory for keys and values.
        "max_length": 256,
    },
    "train": {
        "learning_rate": usual_rate(TASK.name, PRETRAINED),
        # A full state is 1.6 GB, and nobody resumes a demo; bfloat16 halves a step, where the CPU knows it.
        "save_every": 1_000_000,
        "max_tokens_per_micro_batch": 1024,
        "bf16": True,
    },
}
REAL = Variant(changed(RECIPE.sections, _REAL), task=TASK.name, steps=40)


@cache
def _problems() -> GymProblems:
    """Any of the task's: they score the answers to all of its questions."""
    return gym_problems(TASK, 0)


def right(row: Mapping[str, Any], text: str) -> float:
    """The reward of an answer: 1 if its last number is right."""
    return _problems().score(dict(row["entry"]), text)


def make_start(folder: Path, models: Path, seed: int) -> Path:
    """A folder that `run` starts from: the model, and the prompts of this seed. `models` keeps the model."""
    path = smollm2(models).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "warm").exists():
        (folder / "warm").symlink_to(path)
    rows = [{"prompt": entry["question"], "entry": entry} for entry in gym_problems(TASK, seed).train]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def published(path: Path = PUBLISHED) -> dict[str, Curve]:
    """The mean over the seeds of each published arm that is in ARMS, by its name."""
    arms = by_setting(read_records(path)).get(f"{TASK.name}, {PRETRAINED}", {})
    curves: dict[str, Curve] = {}
    for arm in ARMS:
        if arm not in arms:
            continue
        # As measured: with so few points, the mean of neighbours would move the first steps forward.
        runs = [np.array(record["curve"], dtype=np.float64) for record in arms[arm].values()]
        tokens = np.linspace(0, min(each[-1, s.GENERATED] for each in runs), 40)
        rates = np.mean([np.interp(tokens, each[:, s.GENERATED], each[:, s.SOLVE_RATE]) for each in runs], axis=0)
        seeds = f"{len(runs)} seed{'s' if len(runs) > 1 else ''}"
        curves[f"{NAMES[arm]} (docs, {seeds})"] = tokens.tolist(), rates.tolist()
    return curves


def table(curves: Mapping[str, Curve]) -> Iterator[str]:
    """Lines for a terminal: the reward of each curve at every EACH generated tokens, as far as the first one goes."""
    own = next(iter(curves.values()))[0]
    yield "  ".join(["generated tokens", *curves])
    for tokens in range(EACH, int(own[-1]) + 1, EACH):
        cells = [f"{tokens:>16,}"]
        for name, (at, rewards) in curves.items():
            known = at[0] <= tokens <= at[-1]
            cells.append(f"{np.interp(tokens, at, rewards):.2f}".rjust(len(name)) if known else " " * len(name))
        yield "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=REAL.steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="vllm", choices=["vllm", "transformers"])
    parser.add_argument("--out", type=Path, default=Path("runs/demo-real"))
    parser.add_argument("--models", type=Path, default=Path("runs/real"), help="where the converted model is kept")
    arguments = parser.parse_args()
    out: Path = arguments.out
    try:
        check_folder(out)
        start = make_start(out / "start", arguments.models, arguments.seed)
        run(out, arguments.steps, arguments.seed, arguments.engine, variant=REAL, warm=start)
        curves = {"this run": curve(read_metrics(out / "metrics.jsonl"), FRESH["recipe"], SMOOTHED)} | published()
        draw_comparison({name: [each] for name, each in curves.items()}, out / "compare.png")
    except (DemoError, RuntimeError) as error:
        sys.exit(f"demo-real: {error}")
    except KeyboardInterrupt:
        sys.exit("demo-real: stopped; all of its processes have ended")
    print("\n" + "\n".join(table(curves)))
    print(f"picture: {out / 'compare.png'}")


if __name__ == "__main__":
    main()
