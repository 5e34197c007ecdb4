"""`python -m benchmarks.trainer.run`: times both sides in turn, compares gradients, writes results/trainer.json."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.environments import OURS, ROOT, TRL, BuiltEnvironment, RunningEnvironment

RESULT = ROOT / "benchmarks/results/trainer.json"
SPEED_GOAL, MEMORY_GOAL, AGREEMENT_GOAL = 1.5, 0.7, 1e-4
MODULES = {"ours": "benchmarks.trainer.ours", "trl": "benchmarks.trainer.trl_side"}
ENVIRONMENTS: dict[str, RunningEnvironment | BuiltEnvironment] = {"ours": OURS, "trl": TRL}


class Side:
    """A process that does a training step when asked."""

    def __init__(self, name: str, threads: int, memory: str, errors: Any) -> None:
        self.name = name
        self._process = start(name, ["step", "ragged", str(threads), memory], errors)
        self.facts = self._answer()

    def step(self) -> dict[str, Any]:
        """Seconds, peak and idle bytes, tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}; its output is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def start(name: str, arguments: Sequence[str], errors: Any) -> subprocess.Popen[str]:
    paths = [str(ROOT)] if name == "trl" else [str(ROOT / part) for part in (".", "client", "protos", "trainer")]
    return subprocess.Popen(
        [str(ENVIRONMENTS[name].python), "-m", MODULES[name], *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    )


def measure(rounds: int, threads: int, memory: str, errors: Any) -> dict[str, Any]:
    """Interleaved steps of both sides; the first of each is not counted."""
    sides = {name: Side(name, threads, memory, errors) for name in MODULES}
    try:
        for side in sides.values():
            side.step()
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for turn in range(rounds):
            for name in list(sides) if turn % 2 else reversed(list(sides)):
                answers[name].append(sides[name].step())
    finally:
        for side in sides.values():
            side.stop()
    figures: dict[str, Any] = {"gradient_checkpointing": memory == "checkpointing"}
    for name, given in answers.items():
        seconds = [answer["seconds"] for answer in given]
        figures[name] = {
            **sides[name].facts,
            "seconds": seconds,
            "tokens_per_second": given[0]["tokens"] / statistics.median(seconds),
            "peak_bytes": max(answer["peak_bytes"] for answer in given),
            "idle_bytes": given[0]["idle_bytes"],
        }
    ours, trl = figures["ours"], figures["trl"]
    figures["speed_ratio"] = ours["tokens_per_second"] / trl["tokens_per_second"]
    figures["memory_ratio"] = ours["peak_bytes"] / trl["peak_bytes"]
    figures["memory_ratio_above_idle"] = (ours["peak_bytes"] - ours["idle_bytes"]) / (
        trl["peak_bytes"] - trl["idle_bytes"]
    )
    return figures


def compare_gradients(errors: Any) -> dict[str, dict[str, float]]:
    """Relative differences of loss and gradient (norm of the difference) for each loss type, on equal lengths."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.pt" for name in MODULES}
        for name, path in paths.items():
            if start(name, ["gradients", "equal", str(path)], errors).wait():
                raise RuntimeError(f"the gradients of {name} failed; its output is above")
        ours, trl = (torch.load(paths[name], weights_only=True) for name in ("ours", "trl"))
    differences = {}
    for loss_type, theirs in trl.items():
        mine = ours[loss_type]
        names = theirs["gradients"]
        difference = sum(float((mine["gradients"][n] - names[n]).double().square().sum()) for n in names) ** 0.5
        norm = sum(float(names[n].double().square().sum()) for n in names) ** 0.5
        differences[loss_type] = {
            "loss": abs(mine["loss"] - theirs["loss"]) / abs(theirs["loss"]),
            "gradient": difference / norm,
        }
    return differences


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(box=None, header_style="bold", title="one training step, ours against TRL")
    for column in ("", "ours", "TRL", "ratio", "goal"):
        table.add_column(column, justify="left" if not column else "right")
    for figures in result["steps"]:
        kind = "with gradient checkpointing" if figures["gradient_checkpointing"] else "plain"
        ours, trl = figures["ours"], figures["trl"]
        table.add_row(
            f"tokens/s, {kind}",
            f"{ours['tokens_per_second']:.0f}",
            f"{trl['tokens_per_second']:.0f}",
            f"{figures['speed_ratio']:.2f}",
            f">= {SPEED_GOAL}",
        )
        table.add_row(
            f"peak MB, {kind}",
            f"{ours['peak_bytes'] / 1e6:.0f}",
            f"{trl['peak_bytes'] / 1e6:.0f}",
            f"{figures['memory_ratio']:.2f}",
            f"<= {MEMORY_GOAL}",
        )
        table.add_row("  above idle", "", "", f"{figures['memory_ratio_above_idle']:.2f}", "")
    console.print(table)
    for loss_type, differences in result["agreement"].items():
        console.print(
            f"{loss_type:8} loss differs by {differences['loss']:.1e}, gradient by {differences['gradient']:.1e} "
            f"(goal: {AGREEMENT_GOAL:.0e} of TRL's)"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="counted steps of each side")
    parser.add_argument("--threads", type=int, default=max((os.cpu_count() or 2) // 2, 1), help="of torch, on the CPU")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    console = Console()
    for environment in ENVIRONMENTS.values():
        environment.ensure()
    from benchmarks.trainer.workload import EQUAL, RAGGED

    with tempfile.TemporaryFile("w+") as errors:
        try:
            steps = [measure(options.rounds, options.threads, memory, errors) for memory in ("plain", "checkpointing")]
            agreement = compare_gradients(errors)
        except RuntimeError:
            errors.seek(0)
            console.print(errors.read()[-4000:], markup=False, highlight=False)
            raise
    result = {
        "facts": {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "threads": options.threads,
            "trl": TRL.requirements,
            "python": sys.version.split()[0],
            "ragged": asdict(RAGGED),
            "equal": asdict(EQUAL),
        },
        "goals": {"speed_ratio": SPEED_GOAL, "memory_ratio": MEMORY_GOAL, "agreement": AGREEMENT_GOAL},
        "steps": steps,
        "agreement": agreement,
    }
    options.result.parent.mkdir(parents=True, exist_ok=True)
    options.result.write_text(json.dumps(result, indent=1) + "\n")
    show(result, console)
    console.print(f"Written to {options.result}.")


if __name__ == "__main__":
    main()
