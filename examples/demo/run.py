"""The demo: `replay run` with a tiny model that warms up while the engine loads, a summary, and a picture.

task.py make ──▶ warm/, random ──▶ the server and `replay generate`, which loads its engine
                      └──▶ task.py warm-up ──▶ warm/ ──▶ `replay train` ──▶ version 0, 1, 2, ... ──▶ generator
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from examples.demo.picture import CALLED, draw
from examples.demo.variants import DEMO, Variant, changed
from replay_cli.output import say
from replay_cli.run.display import Display
from replay_cli.run.parts import Part
from replay_cli.run.plan import RunPlan, read_run
from replay_cli.run.runner import RunError, Runner, RunStopped
from replay_client.waits import StopSignals
from replay_client.words import counted
from replay_trainer.metrics import read_metrics, summary

MARKER = "demo.json"
"""The file that marks a folder as that of a demo."""
RUN_FILE = "run.toml"
CALLED_AS = ("reward/called", "reward/rollout/called")
"""The generator's names of the share of rollouts that called the tool: for a reward function, and for an agent."""
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Environment of all processes. Each has one thread, because busy processes on two cores would wait for each other's
threads. Nothing is looked up on the hub."""


class DemoError(Exception):
    """The demo cannot go on. The message names the part that failed, and the reason."""


def run(
    out: Path,
    steps: int,
    seed: int,
    engine: str,
    target_solve_rate: float | None = None,
    variant: Variant = DEMO,
    warm: Path | None = None,
) -> None:
    """Run the demo until the trainer has done its steps. Raises DemoError, and KeyboardInterrupt after a signal.

    `target_solve_rate`: the solve rate at which the warm-up ends; None: that of the variant.
    `warm`: a folder with `warm` and `prompts.jsonl`, such as the folder of an earlier demo. The new demo begins
    with this model, and has no warm-up.
    """
    with StopSignals() as signals:
        plan = _run(out, steps, seed, engine, target_solve_rate, variant, warm, signals)
    show_results(out, plan, variant)


def _run(
    out: Path,
    steps: int,
    seed: int,
    engine: str,
    target_solve_rate: float | None,
    variant: Variant,
    warm: Path | None,
    signals: StopSignals,
) -> RunPlan:
    environ = os.environ | SETTINGS
    target = variant.solve_rate if target_solve_rate is None else target_solve_rate
    prepare(out, seed)
    if warm is not None:
        shutil.copytree(warm / "warm", out / "warm", copy_function=_link)
        shutil.copyfile(warm / "prompts.jsonl", out / "prompts.jsonl")
        preparing = None
    else:
        task = [sys.executable, "-m", "examples.demo.task"]
        arguments = [str(out), str(seed), str(target), variant.task]
        finish(Part("model", [*task, "make", *arguments], environ, out / "logs" / "model.log"), signals)
        preparing = Part("warm-up", [*task, "warm-up", *arguments], environ, out / "logs" / "warm-up.log")
    plan = plan_of(out, steps, seed, engine, variant)
    display = Display(as_json=False)
    runner = Runner(plan, environ, display.show, signals=signals, preparing=preparing)
    try:
        with display:
            reason = runner.run()
    except RunError as error:
        raise DemoError(str(error)) from None
    except RunStopped:
        raise KeyboardInterrupt from None
    if reason:
        raise DemoError(reason)
    return plan


def finish(part: Part, signals: StopSignals) -> None:
    """Run a part to its end. Raises DemoError if it fails, and KeyboardInterrupt after a signal."""
    part.start()
    while not part.poll():
        if signals.count:
            part.kill()
            raise KeyboardInterrupt
        time.sleep(0.1)
    if part.status != 0:
        raise DemoError(f"the {part.name} {part.ending()}: {part.last_words()} (all of its output: {part.log})")


def plan_of(out: Path, steps: int, seed: int, engine: str, variant: Variant) -> RunPlan:
    """Write the run file of the demo, and read it as `replay run` does."""
    own = {
        "model": str(out / "warm"),
        "output_dir": str(out),
        "generate": {"engine": engine, "prompts": str(out / "prompts.jsonl"), "seed": seed},
        "train": {"max_steps": steps, "seed": seed},
    }
    file = out / RUN_FILE
    file.write_text(tomli_w.dumps(changed(variant.sections, own)))
    try:
        return read_run(file, [], None, os.environ)
    except ValueError as error:
        raise DemoError(str(error)) from None


def show_results(out: Path, plan: RunPlan, variant: Variant) -> None:
    """Print the summary, and draw the picture."""
    metrics = read_metrics(plan.train_dir / "metrics.jsonl")
    generated = read_metrics(plan.generator_metrics[0])
    shutil.copyfile(plan.train_dir / "metrics.jsonl", out / "metrics.jsonl")
    add_calls(metrics, generated)
    draw(metrics, out / "curves.png", variant.panels)
    last = generated[-1] if generated else {}
    for line in summarise(metrics, last):
        say(line)
    say(f"metrics: {out / 'metrics.jsonl'}   picture: {out / 'curves.png'}")


def _link(source: str, target: str) -> None:
    """Copies a file, as a hard link if the file system supports hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def check_folder(out: Path) -> None:
    """Make the folder and mark it as a demo's. Raises DemoError if it has files, and no demo has marked it."""
    if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
        raise DemoError(f"{out} holds something that is not a demo's: name another folder with --output-dir")
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()


def prepare(out: Path, seed: int) -> None:
    """Makes the folder, and removes the files of an earlier demo from it. Other files stay."""
    check_folder(out)
    for name in ("config", "logs", "model", "server", "warm", "train"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in (RUN_FILE, "prompts.jsonl", "metrics.jsonl", "curves.png"):
        (out / name).unlink(missing_ok=True)
    for path in out.glob("generator*.jsonl"):
        path.unlink()
    (out / "logs").mkdir()
    (out / MARKER).write_text(json.dumps({"seed": seed}))


def add_calls(metrics: list[dict[str, Any]], generated: Sequence[Mapping[str, Any]]) -> None:
    """Add CALLED to each step for which the generator has counted calls with the step's policy version."""
    shares = {}
    for line in generated:
        for name in CALLED_AS:
            if line.get(name) is not None:
                shares[line["policy_version"]] = line[name]
    for line in metrics:
        version = line["step"] - 1  # the version that the step began with
        if version in shares:
            line[CALLED] = shares[version]


def summarise(metrics: list[dict[str, Any]], generated: Mapping[str, Any]) -> Iterator[str]:
    """The results of the run as lines: first the trainer's, then the generator's.

    `generated`: the last line of the generator's metrics.
    """
    seconds = sum(line["time/step"] for line in metrics)
    yield ""
    yield from summary(metrics)
    calls = [line[CALLED] for line in metrics if CALLED in line]
    if calls:
        yield f"calculator          called in {calls[0]:.0%} of the rollouts at first, {calls[-1]:.0%} at last"
    tokens = generated.get("tokens", 0)
    yield f"generated           {counted(generated.get('groups', 0), 'group')}, {tokens / seconds:.0f} tokens/s"
    difference = generated.get("probe_max_difference")
    if difference is None:
        difference = math.nan
    yield (
        f"engine, trainer     differ by {difference:.1e} nats on the probe, after "
        f"{generated.get('reloads', 0)} reloads of the weights"
    )
