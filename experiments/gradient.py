"""From a finished completion to its gradient: the demo's server, generator and trainer, with a clock in each.

    python -m experiments.gradient [--steps 60] [--results FOLDER]     writes gradient.json

The model is the demo's, without its warm-up, and the transformers engine completes the prompts. All times are those of
the monotonic clock, which the processes of one machine share. A group goes through these stages:

    finished ──reward──▶ scored ──insert──▶ acknowledged ──its turn──▶ taken by the trainer ──update──▶ gradient

What a step waits for groups is divided at the moment when the last group of its batch was acknowledged: the wait until
then is for the generator, the wait after it for the buffer. The generator draws nothing while its engine loads a
version: what falls into that time is the wait for the reload. The wait for the publication is `time/publish`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.environments import FILES, ROOT
from benchmarks.interpreter import build_of
from benchmarks.processes import Process
from experiments.serving import serve
from replay_client import AsyncReplayClient, ReplayClient, RolloutGroup, Sample
from replay_generator import GeneratorConfig, run_generator
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.rewards.functions import load_reward
from replay_trainer import Callback, GRPOConfig, GRPOTrainer, Run, StepReport

STAGES = ("finished", "scored", "acknowledged", "taken", "gradient")
WARM_UP_STEPS = 10
"""Left out: the first groups waited while the trainer loaded its model."""
_SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def tell(**record: Any) -> None:
    print(json.dumps(record), flush=True)


# ------------------------------------------------------------------------------------------------------- the generator


class TimedEngine:
    """An engine that notes when the completions of a prompt are finished."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._loading = 0.0
        self.finished: dict[tuple[int, ...], float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, *_: Any) -> list[Completion]:
        completions: list[Completion] = await self._engine.generate(prompt_ids, sampling, n)
        self.finished[tuple(prompt_ids)] = time.monotonic()
        return completions

    async def load_weights(self, path: str, version: int) -> None:
        self._loading = time.monotonic()
        await self._engine.load_weights(path, version)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """The last part of a reload: its check."""
        scores: list[float] = await self._engine.score(token_ids)
        tell(reload=(self._loading, time.monotonic()))
        return scores

    def mark(self, group: RolloutGroup) -> bool:
        """Writes the times into the group's meta. The generator calls it for each group that was scored."""
        group.meta["finished"] = self.finished[tuple(group.prompt_ids.tolist())]
        group.meta["scored"] = time.monotonic()
        return True


class TimedInserts(AsyncReplayClient):
    """Tells when each insert was acknowledged."""

    async def insert(self, *given: Any, **options: Any) -> int:
        key = await super().insert(*given, **options)
        tell(key=key, acknowledged=time.monotonic())
        return key


def generate(address: str, folder: Path) -> None:
    from replay_generator.engines.transformers import TransformersEngine

    engine = TimedEngine(TransformersEngine(str(folder / "warm"), seed=0))
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    config = GeneratorConfig(sampling=SamplingConfig(max_tokens=6, seed=0), wait_for_policy=True)
    run_generator(
        lambda: TimedInserts(address), engine, rows, load_reward("exact_match"), config, group_filter=engine.mark
    )


# --------------------------------------------------------------------------------------------------------- the trainer


class TimedSampler:
    """The trainer's sampler, which notes when each batch was asked for and when it came."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.asked = self.came = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __enter__(self) -> Self:
        self._sampler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._sampler.__exit__(*error)

    def __iter__(self) -> Iterator[list[Sample]]:
        return self

    def __next__(self) -> list[Sample]:
        self.asked = time.monotonic()
        batch: list[Sample] = next(self._sampler)
        self.came = time.monotonic()
        return batch


class TimedClient(ReplayClient):
    timed: TimedSampler

    def sampler(self, *given: Any, **options: Any) -> Any:
        self.timed = TimedSampler(super().sampler(*given, **options))
        return self.timed


class Stages(Callback):
    """Tells the times of each step, and of its fresh groups."""

    def __init__(self, client: TimedClient) -> None:
        self._client = client
        self._gradient = self._end = 0.0

    def updated(self, *_: Any) -> None:
        """After each call of the optimizer; the last one of a step counts."""
        self._gradient = time.monotonic()

    def on_step(self, trainer: Run, report: StepReport) -> None:
        timed, now = self._client.timed, time.monotonic()
        groups = [
            {"key": sample.info.key, "finished": sample.group.meta["finished"], "scored": sample.group.meta["scored"]}
            for row, sample in enumerate(report.samples)
            if row not in report.replaced
        ]
        tell(
            step=report.metrics["step"],
            seconds=now - self._end if self._end else math.nan,
            replace=report.metrics["time/replace"],
            # A step reports its metrics before it publishes, so they hold the publication of the step before.
            publish=report.metrics.get("time/publish", math.nan),
            asked=timed.asked,
            taken=timed.came,
            gradient=self._gradient,
            groups=groups,
        )
        self._end = now


def train(address: str, folder: Path, steps: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "warm")
    tokenizer = AutoTokenizer.from_pretrained(folder / "warm")
    config = GRPOConfig(output_dir=str(folder / "train"), max_steps=steps, groups_per_step=16, learning_rate=1e-5)
    with TimedClient(address, timeout=60.0) as client:
        stages = Stages(client)
        trainer = GRPOTrainer(model, client, config, tokenizer, [stages])
        trainer.optimizer.register_step_post_hook(stages.updated)
        trainer.train()


# --------------------------------------------------------------------------------------------------------- the figures


def measure(steps: int) -> dict[str, Any]:
    """Runs the processes, and returns the figures of all steps after the first ones."""
    import tomli_w

    from examples.demo.variants import DEMO, GROUPS_PER_STEP, changed

    folder = FILES / "gradient"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ.update(_SETTINGS)
    python = [sys.executable, "-m"]
    with Process([*python, "examples.demo.task", "make", str(folder), "0", "0.4", DEMO.task]) as made:
        made.wait(timeout=120.0)
    acknowledged: dict[int, float] = {}
    reloads: list[tuple[float, float]] = []
    told = []
    admission = {"admission": {"fresh_groups_per_step": GROUPS_PER_STEP}}
    with serve(folder, tomli_w.dumps(changed(DEMO.sections["serve"], admission))) as server:
        role = [*python, "experiments.gradient", "--address", server.address, "--steps", str(steps), "--role"]
        with Process([*role, "generator"]) as generator, Process([*role, "trainer"]) as trainer:
            while len(told) < steps:
                told.append(json.loads(trainer.read(timeout=120.0)))
                for line in generator.lines():
                    record = json.loads(line)
                    if "reload" in record:
                        reloads.append(record["reload"])
                    else:
                        acknowledged[record["key"]] = record["acknowledged"]
    shutil.rmtree(folder)
    return figures(told[WARM_UP_STEPS:], acknowledged, reloads)


def figures(
    steps: Sequence[dict[str, Any]], acknowledged: dict[int, float], reloads: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """Milliseconds of each stage (p50, p99) over groups, and the shares of the steps that were waits, in percent."""
    moments, waits = [], {"generator": 0.0, "reload": 0.0, "buffer": 0.0, "publication": 0.0}
    for step in steps:
        last = min(max(acknowledged[group["key"]] for group in step["groups"]), step["taken"])
        reload = sum(max(0.0, min(last, end) - max(step["asked"], start)) for start, end in reloads)
        waits["generator"] += max(0.0, last - step["asked"]) - reload
        waits["reload"] += reload
        waits["buffer"] += step["taken"] - max(step["asked"], last) + step["replace"]
        waits["publication"] += step["publish"]
        moments += [
            (group["finished"], group["scored"], acknowledged[group["key"]], step["taken"], step["gradient"])
            for group in step["groups"]
        ]
    times = 1e3 * np.diff(np.array(moments), axis=1)
    stages = {f"{a} to {b}": times[:, row] for row, (a, b) in enumerate(pairwise(STAGES))}
    stages["finished to gradient"] = times.sum(axis=1)
    seconds = sum(step["seconds"] for step in steps)
    loads = [1e3 * (end - start) for start, end in reloads if start > steps[0]["asked"]]
    return {
        "groups": len(moments),
        "steps": len(steps),
        "seconds_a_step": seconds / len(steps),
        "milliseconds": {
            name: {f"p{p}": float(np.percentile(values, p)) for p in (50, 99)}
            for name, values in (stages | {"reload of a version": loads}).items()
        },
        "percent_of_a_step_waiting_for": {name: 100 * value / seconds for name, value in waits.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.gradient", description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results", help="folder for gradient.json")
    parser.add_argument("--role", choices=("generator", "trainer"), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = FILES / "gradient"
    if options.role == "generator":
        generate(options.address, folder)
    elif options.role == "trainer":
        train(options.address, folder, options.steps)
    else:
        found = measure(options.steps)
        found["interpreter"], found["date"] = build_of(sys.executable), time.strftime("%Y-%m-%d %H:%M:%S")
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "gradient.json").write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
