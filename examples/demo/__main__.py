"""`python -m examples.demo`, which `make demo` runs: trains a tiny model to add, or to use a tool, in a few minutes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib  # noqa: F401, so that a missing matplotlib is an error now, and not at the end of the run

from examples.demo.compare import COMPARED_STEPS, compare
from examples.demo.run import DemoError, run
from examples.demo.variants import TASKS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--max-steps", type=int, help="training steps (150, tools 50, compared 48)")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the data and the training")
    parser.add_argument("--engine", default="vllm", choices=["vllm", "transformers"])
    parser.add_argument("--output-dir", type=Path, default=Path("runs/demo"), help="folder for the files of the run")
    parser.add_argument(
        "--task",
        default="sums",
        choices=TASKS,
        help="tools: to multiply with a calculator, in two turns; agent: the same, by the package openai",
    )
    parser.add_argument(
        "--compare", action="store_true", help="plain, a quarter of the batch, and the recipe; three seeds each"
    )
    arguments = parser.parse_args()
    variant = TASKS[arguments.task]
    if arguments.compare and arguments.task != parser.get_default("task"):
        parser.error(f"--compare has a task of its own: leave out --task {arguments.task}")
    try:
        if arguments.compare:
            compare(arguments.output_dir, arguments.max_steps or COMPARED_STEPS, arguments.seed, arguments.engine)
        else:
            run(
                arguments.output_dir,
                arguments.max_steps or variant.steps,
                arguments.seed,
                arguments.engine,
                variant=variant,
            )
    except DemoError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit("demo: stopped; all processes of the demo have ended")


if __name__ == "__main__":
    main()
