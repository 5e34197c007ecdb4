"""One run: an arm trains one warm start for a budget of generated tokens, through a real replay server.

    sample_groups ──▶ rollouts ──▶ fresh groups ─┐
    (one process)         └─▶ replay ──▶ replayed ┴─▶ correction, loss, AdamW ──▶ the next policy version

The server, its tables, the client, the replacement of zero-variance groups, the correction and the loss are the
project's own. Only the generator and the order of the two are the harness's: they take turns in one process, so that a
run repeats exactly and costs seconds.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.learning.arms import Arm
from experiments.learning.model import TinyPolicy, warm_start
from experiments.learning.steps import Steps
from experiments.learning.tasks import load_task
from experiments.learning.variety import HeldOut
from replay_client import ReplayClient
from replay_server import ReplayServer, TableConfig

IN_PROCESS = "in-process"
EVALUATIONS = 12
"""Points of a curve after its start."""


@dataclass(frozen=True)
class Settings:
    """Settings that all arms of a comparison share."""

    task: str
    regime: str
    seed: int
    learning_rate: float
    budget: int
    """Generated tokens, after which the run ends."""


@dataclass(frozen=True)
class Point:
    """Where a run stood at one evaluation; all counts since its start, evaluations not counted in the times."""

    generated_tokens: int
    trained_tokens: int
    steps: int
    seconds: float
    cpu_seconds: float
    solve_rate: float


def run(arm: Arm, settings: Settings, warm_starts: Path) -> dict[str, Any]:
    """Trains and returns the run's record: arm, settings, curve, and means over its steps."""
    task = load_task(settings.task)
    model, problems = warm_start(warm_starts, task, settings.regime, settings.seed)
    held_out = HeldOut(problems.held_out)
    torch.manual_seed(settings.seed)
    start, variety = held_out.measure(model)
    with ReplayServer(tables(arm, settings.seed), port=0) as server, ReplayClient(server.address) as client:
        policy = TinyPolicy(model, problems.train, task.max_tokens, settings.seed)
        steps = Steps(arm, settings.learning_rate, settings.seed, policy, client)
        curve, varieties = [Point(0, 0, 0, 0.0, 0.0, start)], [variety]
        wall = cpu = 0.0
        while steps.generated_tokens < settings.budget:
            wall_before, cpu_before = time.perf_counter(), time.process_time()
            steps.step()
            wall += time.perf_counter() - wall_before
            cpu += time.process_time() - cpu_before
            if steps.generated_tokens >= len(curve) * settings.budget / EVALUATIONS:
                rate, variety = held_out.measure(model)
                varieties.append(variety)
                curve.append(Point(steps.generated_tokens, steps.trained_tokens, steps.version, wall, cpu, rate))
    return {
        "arm": arm.name,
        **asdict(settings),
        "engine": IN_PROCESS,
        "curve": [list(asdict(point).values()) for point in curve],
        "variety": [list(asdict(each).values()) for each in varieties],
        "means": {name: float(np.mean(values)) for name, values in steps.facts.items()},
    }


def tables(arm: Arm, seed: int) -> list[TableConfig]:
    """A queue of fresh groups that feeds the pool of `arm`."""
    sampler: dict[str, Any] = {"type": "prioritized", "exponent": arm.exponent}
    if arm.pools and arm.half_life is not None:
        sampler["half_life"] = arm.half_life
    rollouts = TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 4096}, forward_to="replay")
    pool = TableConfig(
        name="replay",
        sampler=sampler,
        remover=arm.remover,
        max_size=arm.pool_size,
        max_times_sampled=arm.max_times_sampled,
        max_staleness=arm.max_staleness,
        seed=seed,
    )
    return [rollouts, pool]
