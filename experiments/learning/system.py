"""One run as users run it: a server, a generator process with a real engine, and GRPOTrainer, all at their own pace.

    python -m experiments.learning.run --engine vllm --arms plain half share50 --seeds 0 1

Warm starts, prompts, tables, arms, learning rate and the held-out solve rate are those of loop.py. Three things differ:
the engine computes the log-probabilities, generation runs ahead by up to MAX_STALENESS versions, and no run repeats.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.demo import task as demo
from examples.demo.task import solve_rate, supervised_batch
from experiments.learning.arms import GROUP_SIZE, Arm
from experiments.learning.loop import EVALUATIONS, Point, Settings, tables
from experiments.learning.model import warm_start
from experiments.learning.tasks import load_task
from replay_client import ReplayClient
from replay_server import AdmissionConfig, ReplayServer
from replay_trainer import GRPOConfig, GRPOTrainer
from replay_trainer.callbacks import Callback, Run, StepReport

MAX_STALENESS = 1
"""Policy versions that permits let generation run ahead."""


class BudgetSpent(Exception):
    """The run has used its generated tokens."""


def run(arm: Arm, settings: Settings, warm_starts: Path, engine: str) -> dict[str, Any]:
    """As loop.run, through the whole system; the record names the engine."""
    if arm.lag:
        raise ValueError(f"arm {arm.name!r} delays its generator, which only the harness does")
    if arm.stored == "distinct":
        raise ValueError(f"arm {arm.name!r} stores answers instead of groups, which only the harness does")
    task = load_task(settings.task)
    if task.answers is not None:
        raise ValueError(f"task {task.name!r} has several right answers, which the reward exact_match does not know")
    model, problems = warm_start(warm_starts, task, settings.regime, settings.seed)
    admitted = arm.fresh * (10 if arm.zero_variance == "dynamic" else 1)  # it may draw ten batches
    admission = AdmissionConfig(fresh_groups_per_step=admitted, max_staleness=MAX_STALENESS)
    with (
        tempfile.TemporaryDirectory() as name,
        ReplayServer(tables(arm, settings.seed), port=0, admission=admission) as server,
        ReplayClient(server.address) as client,
    ):
        folder = Path(name)
        tokenizer = demo.make_tokenizer()
        for saved in (model, tokenizer):
            saved.save_pretrained(folder / "model")
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems.train))
        watch = _Watch(settings.budget, supervised_batch(problems.held_out))
        config = GRPOConfig(
            output_dir=folder / "train",
            max_steps=10**6,
            groups_per_step=arm.fresh + arm.replay,
            replay_share=arm.replay / (arm.fresh + arm.replay),
            replay_start_step=arm.start,
            replay_rollouts="right" if arm.stored == "right" else "all",
            num_iterations=arm.num_iterations,
            zero_variance="none" if arm.zero_variance == "keep" else arm.zero_variance,
            learning_rate=settings.learning_rate,
            weight_decay=0.01,
            epsilon=arm.loss.epsilon,
            epsilon_high=arm.loss.epsilon_high,
            correction=arm.correction,
            seed=settings.seed,
            packing=False,
            progress=False,
            report_to=(),
        )
        with (folder / "generator.log").open("w") as log:
            generator = _start_generator(arm, settings, engine, server.address, folder, task.max_tokens, log)
            try:
                GRPOTrainer(model, client, config, tokenizer, callbacks=[watch]).train()
            except BudgetSpent:
                pass
            except Exception as error:
                said = (folder / "generator.log").read_text()[-2000:]
                raise RuntimeError(f"{arm.name}, seed {settings.seed}: {error}; the generator said: {said}") from error
            finally:
                os.killpg(generator.pid, signal.SIGTERM)
                generator.wait(30)
    return {
        "arm": arm.name,
        **asdict(settings),
        "engine": engine,
        "curve": [list(asdict(point).values()) for point in watch.curve],
        "means": {name: sum(values) / len(values) for name, values in watch.facts.items() if values},
    }


def _start_generator(
    arm: Arm, settings: Settings, engine: str, address: str, folder: Path, max_tokens: int, log: Any
) -> subprocess.Popen[bytes]:
    options = {
        "--engine": engine,
        "--model": folder / "model",
        "--prompts": folder / "prompts.jsonl",
        "--reward": "exact_match",
        "--priority": arm.priority,
        "--group-size": GROUP_SIZE,
        "--max-tokens": max_tokens,
        "--seed": settings.seed,
    }
    command = [sys.executable, "-m", "replay_cli", "--address", address, "generate", "--wait-for-policy"]
    command += [str(part) for option in options.items() for part in option]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # A session of its own: vLLM's engine is a process below the generator's, and both have to end.
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


class _Watch(Callback):
    """Counts tokens and time, evaluates, and ends the run at its budget."""

    def __init__(self, budget: int, held_out: tuple[Any, Any]) -> None:
        self.curve: list[Point] = []
        self.facts: dict[str, list[float]] = {
            "zero_variance": [],
            "replayed": [],
            "staleness": [],
            "fresh_staleness": [],
        }
        self._budget = budget
        self._held_out = held_out
        self._generated = self._trained = 0
        self._evaluating = self._evaluating_cpu = 0.0

    def on_start(self, trainer: Run, version: int) -> None:
        self._start, self._cpu_start = time.perf_counter(), time.process_time()
        self._add(trainer, 0)
        self._evaluating = self._evaluating_cpu = 0.0

    def on_step(self, trainer: Run, report: StepReport) -> None:
        metrics = report.metrics
        if metrics["step"] == 1:
            # The engine loads before the first step, in every arm alike.
            self._start, self._cpu_start = time.perf_counter(), time.process_time()
        self._generated += round(metrics["fresh/groups"] * GROUP_SIZE * metrics["fresh/completion_length_mean"])
        self._trained += int(metrics["train/tokens"])
        self.facts["zero_variance"].append(metrics["fresh/zero_variance_fraction"])
        self.facts["replayed"].append(float(len(report.replaced)))
        self.facts["fresh_staleness"].append(metrics["fresh/staleness_mean"])
        if report.replaced:
            self.facts["staleness"].append(metrics["replay/staleness_mean"])
        if self._generated >= len(self.curve) * self._budget / EVALUATIONS:
            self._add(trainer, int(metrics["step"]))
        if self._generated >= self._budget:
            raise BudgetSpent

    def _add(self, trainer: Run, step: int) -> None:
        before, cpu_before = time.perf_counter(), time.process_time()
        rate = solve_rate(trainer.model, *self._held_out)
        seconds = before - self._start - self._evaluating if step else 0.0
        cpu_seconds = cpu_before - self._cpu_start - self._evaluating_cpu if step else 0.0
        self._evaluating += time.perf_counter() - before
        self._evaluating_cpu += time.process_time() - cpu_before
        self.curve.append(Point(self._generated, self._trained, step, seconds, cpu_seconds, rate))
