"""`make bench-learning`: runs arms on tasks, regimes and seeds, a line of JSON a run, and then reports.

    python -m experiments.learning.run --arms plain half share50 --tasks sums --regimes rare --seeds 0 1 2 --hours 1
    python -m experiments.learning.run --tune --arms plain --tasks sums        learning rates, on seeds of their own

A run that the output has already is not run again, so an interrupted experiment goes on where it stopped. Seeds are the
outermost loop: whatever is finished can be compared in pairs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from experiments.learning.arms import ARMS
from experiments.learning.records import Job, identity, read_records
from experiments.learning.tuned import (
    BUDGETS,
    PRETRAINED,
    PRETRAINED_RATES,
    RATES_TO_TRY,
    TUNING_SEEDS,
    usual_rate,
)

HERE = Path("runs/learning")


def jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    """The runs to do, in order."""
    for seed in arguments.seeds:
        for task in arguments.tasks:
            for regime in arguments.regimes:
                budget = arguments.budget or BUDGETS.get(task, max(BUDGETS.values()))
                tried = PRETRAINED_RATES if regime == PRETRAINED else RATES_TO_TRY
                for arm in arguments.arms:
                    usual = [arguments.learning_rate or usual_rate(task, regime, arm)]
                    for rate in tried if arguments.tune else usual:
                        yield arm, task, regime, seed, rate, budget


def work(job: Job, warm_starts: Path, engine: str, pause: Path | None = None) -> dict[str, Any]:
    """One run, in a process of its own."""
    import torch

    from experiments.learning import loop, system
    from experiments.learning.real import pretrained

    torch.set_num_threads(1)
    arm, *rest = job
    settings = loop.Settings(*rest)
    if settings.regime == PRETRAINED:
        return pretrained.run(ARMS[arm], settings, warm_starts, lambda: wait_while(pause))
    if engine == loop.IN_PROCESS:
        return loop.run(ARMS[arm], settings, warm_starts)
    return system.run(ARMS[arm], settings, warm_starts, engine)


def wait_while(pause: Path | None) -> None:
    """Returns when there is no such file: whoever needs the machine for a while makes it, and removes it."""
    while pause is not None and pause.exists():
        time.sleep(5)


def run_all(
    wanted: Sequence[Job],
    engine: str,
    out: Path,
    warm_starts: Path,
    processes: int,
    seconds: float,
    pause: Path | None = None,
) -> None:
    """Runs what `out` lacks and appends each record to it; begins nothing after `seconds`, nor while `pause` exists."""
    begin = time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    done = {identity(record) for record in read_records(out) if record["engine"] == engine}
    left = [job for job in wanted if job not in done]
    print(f"{len(left)} of {len(wanted)} runs to do", flush=True)
    # One thread a process: with more, processes on the same cores slow each other down several times over.
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[dict[str, Any]], Job] = {}
        while left or running:
            while left and len(running) < processes and time.monotonic() - begin < seconds:
                wait_while(pause)
                job = left.pop(0)
                running[pool.submit(work, job, warm_starts, engine, pause)] = job
            if not running:
                print(f"time is up; {len(left)} runs are left", flush=True)
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                try:
                    record = future.result()
                except RuntimeError as error:  # a warm-up that did not get there
                    print(f"{job}: {error}", flush=True)
                    continue
                with out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                rates = [point[-1] for point in record["curve"]]
                print(
                    f"{' '.join(map(str, job))}: {rates[0]:.3f} -> {rates[-1]:.3f} in {record['curve'][-1][3]:.0f} s",
                    flush=True,
                )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=["plain", "half", "share50"], choices=list(ARMS))
    parser.add_argument("--tasks", nargs="+", default=["sums", "steps"], help="names, or package.module:attribute")
    parser.add_argument("--regimes", nargs="+", default=["rare"])
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--tune", action="store_true", help="try learning rates on the tuning seeds")
    parser.add_argument("--learning-rate", type=float, help="instead of the tuned one")
    parser.add_argument("--budget", type=int, help="generated tokens of each run, instead of the task's")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--engine", default="in-process", choices=["in-process", "transformers", "vllm"])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--pause", type=Path, help="no run begins while this file exists")
    parser.add_argument("--out", type=Path, default=HERE / "runs.jsonl")
    parser.add_argument("--warm-starts", type=Path, default=HERE / "warm")
    parsed = parser.parse_args(arguments)
    if parsed.seeds is None:
        parsed.seeds = list(TUNING_SEEDS) if parsed.tune else [0, 1, 2]
    return parsed


if __name__ == "__main__":
    given = parse()
    run_all(
        list(jobs(given)),
        given.engine,
        given.out,
        given.warm_starts,
        given.processes,
        3600 * given.hours,
        given.pause,
    )
