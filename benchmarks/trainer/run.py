"""`python -m benchmarks.trainer.run`: times both sides in turn, compares gradients, writes results/trainer.json.

`--preset gpu` runs on a GPU: a Qwen2 of half a billion random weights in bfloat16, groups of 8 with completions of 512
to 2,048 tokens. It also says where our step spends its time. It stays within six minutes: what does not fit into
`--budget` is left out, and the result says so. With `--same-environment` both sides run in the Python that runs this,
which needs TRL then: for a machine that can install nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.environments import OURS, ROOT, TRL, BuiltEnvironment, RunningEnvironment

RESULT = ROOT / "benchmarks/results/trainer.json"
GPU_RESULT = ROOT / "benchmarks/results/trainer-gpu.json"
SPEED_GOAL = 1.5
MEMORY_GOAL = 0.7
AGREEMENT_GOAL = 1e-4
MODULES = {"ours": "benchmarks.trainer.ours", "trl": "benchmarks.trainer.trl_side"}
ENVIRONMENTS: dict[str, RunningEnvironment | BuiltEnvironment] = {"ours": OURS, "trl": TRL}
GPU_SECONDS = 340.0
"""Seconds that `--preset gpu` may take. With its start and its end it stays within six minutes."""


class OutOfTimeError(RuntimeError):
    """The budget of the benchmark is spent."""


@dataclass(frozen=True)
class Budget:
    """The time that the whole benchmark may take."""

    ends: float
    """The time at which the budget is spent, by the monotonic clock."""

    @classmethod
    def of(cls, seconds: float | None) -> Budget:
        """The budget that ends a number of seconds from now; None: there is no limit."""
        if seconds is None:
            return cls(float("inf"))
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self.ends - time.monotonic()

    def check(self) -> None:
        """Raises OutOfTimeError if the budget is spent."""
        if self.left <= 0:
            raise OutOfTimeError("out of time (--budget)")


NO_LIMIT = Budget(float("inf"))


class Side:
    """A process that makes a training step for each request."""

    def __init__(
        self, name: str, threads: int, memory: str, errors: Any, workload: str = "ragged", budget: Budget = NO_LIMIT
    ) -> None:
        """`workload`: as Workload.named reads it."""
        self.name = name
        self._budget = budget
        self._process = start(name, ["step", workload, str(threads), memory], errors)
        try:
            self.facts = self._answer()
        except BaseException:
            self.stop()
            raise

    def step(self) -> dict[str, Any]:
        """Makes a step. Returns its seconds, peak and idle bytes, and tokens."""
        return self._ask("step")

    def profile(self) -> dict[str, Any]:
        """Makes a step. Returns the shares of its time, as `Spent.stop` does."""
        spent: dict[str, Any] = self._ask("profile")["spent"]
        return spent

    def _ask(self, request: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """The next answer. Raises OutOfTimeError if it is not within the budget, RuntimeError if the side has ended."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            left = self._budget.left
            timeout = None if left == float("inf") else max(0.0, left)
            if not selector.select(timeout):
                raise OutOfTimeError(f"out of time (--budget) while {self.name} worked")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}; its output is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def start(name: str, arguments: Sequence[str], errors: Any) -> subprocess.Popen[str]:
    """Starts the process of a side. Its standard error goes into the file `errors`."""
    paths = [str(ROOT)]
    if name != "trl":
        paths = [str(ROOT / part) for part in (".", "client", "protos", "trainer")]
    inherited = os.environ.get("PYTHONPATH")
    if inherited:
        paths.append(inherited)
    variables = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(
        [str(ENVIRONMENTS[name].python), "-m", MODULES[name], *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        cwd=ROOT,
        env=os.environ | variables,
    )


def measure(
    rounds: int, threads: int, memory: str, errors: Any, workload: str = "ragged", budget: Budget = NO_LIMIT
) -> dict[str, Any]:
    """Measures steps of both sides in turn. The first step of each side is not counted."""
    sides: dict[str, Side] = {}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in MODULES}
    try:
        for name in MODULES:
            sides[name] = Side(name, threads, memory, errors, workload, budget)
            sides[name].step()
        for turn in range(rounds):
            for name in list(sides) if turn % 2 else reversed(list(sides)):
                answers[name].append(sides[name].step())
    finally:
        for side in sides.values():
            side.stop()
    facts = {name: side.facts for name, side in sides.items()}
    return {"gradient_checkpointing": memory == "checkpointing"} | compared(facts, answers)


def measure_one_by_one(
    rounds: int, threads: int, memory: str, errors: Any, workload: str, budget: Budget
) -> dict[str, Any]:
    """Measures steps of our side, then profiles one, then measures steps of TRL. So a GPU holds one model at a time.

    A side that fails, or for which the budget leaves no time, has an `error` in the place of figures.
    """
    figures: dict[str, Any] = {"gradient_checkpointing": memory == "checkpointing"}
    facts: dict[str, dict[str, Any]] = {}
    answers: dict[str, list[dict[str, Any]]] = {}
    for name in MODULES:
        steps: list[dict[str, Any]] = []
        side: Side | None = None
        try:
            budget.check()
            side = Side(name, threads, memory, errors, workload, budget)
            side.step()
            while len(steps) < rounds:
                steps.append(side.step())
            if name == "ours":
                figures["spent"] = side.profile()
        except (RuntimeError, OSError) as error:
            figures[f"{name} error"] = str(error)
        finally:
            if side is not None:
                side.stop()
        if side is not None and steps:
            facts[name] = side.facts
            answers[name] = steps
    return figures | compared(facts, answers)


def compared(
    facts: Mapping[str, Mapping[str, Any]], answers: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """The figures of each side that answered, and their ratios if both did."""
    figures: dict[str, Any] = {}
    for name, steps in answers.items():
        seconds = [answer["seconds"] for answer in steps]
        figures[name] = {
            **facts[name],
            "seconds": seconds,
            "tokens_per_second": steps[0]["tokens"] / statistics.median(seconds),
            "peak_bytes": max(answer["peak_bytes"] for answer in steps),
            "idle_bytes": steps[0]["idle_bytes"],
        }
    if len(figures) < len(MODULES):
        return figures
    ours = figures["ours"]
    trl = figures["trl"]
    figures["speed_ratio"] = ours["tokens_per_second"] / trl["tokens_per_second"]
    figures["memory_ratio"] = ours["peak_bytes"] / trl["peak_bytes"]
    ours_above_idle = ours["peak_bytes"] - ours["idle_bytes"]
    trl_above_idle = trl["peak_bytes"] - trl["idle_bytes"]
    figures["memory_ratio_above_idle"] = ours_above_idle / trl_above_idle
    return figures


def compare_gradients(errors: Any) -> dict[str, dict[str, float]]:
    """Relative differences of loss and gradient (norm of the difference) for each loss type, on equal lengths."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.pt" for name in MODULES}
        for name, path in paths.items():
            if start(name, ["gradients", "equal", str(path)], errors).wait():
                raise RuntimeError(f"the gradients of {name} failed; its output is above")
        ours = torch.load(paths["ours"], weights_only=True)
        trl = torch.load(paths["trl"], weights_only=True)
    differences = {}
    for loss_type, theirs in trl.items():
        our_loss = ours[loss_type]["loss"]
        our_gradients = ours[loss_type]["gradients"]
        difference = 0.0
        norm = 0.0
        for name, gradient in theirs["gradients"].items():
            difference += float((our_gradients[name] - gradient).double().square().sum())
            norm += float(gradient.double().square().sum())
        differences[loss_type] = {
            "loss": abs(our_loss - theirs["loss"]) / abs(theirs["loss"]),
            "gradient": difference**0.5 / norm**0.5,
        }
    return differences


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the table of the steps, the shares of our step's time, and the differences of the gradients."""
    table = Table(box=None, header_style="bold", title="one training step, ours against TRL")
    for column in ("", "ours", "TRL", "ratio", "goal"):
        table.add_column(column, justify="left" if not column else "right")
    for figures in result["steps"]:
        kind = "with gradient checkpointing" if figures["gradient_checkpointing"] else "plain"
        if "attention" in figures:
            kind += f", {figures['attention']}"
        sides = [figures.get(name, {}) for name in MODULES]
        speeds = [f"{side['tokens_per_second']:.0f}" if side else "-" for side in sides]
        peaks = [f"{side['peak_bytes'] / 1e6:.0f}" if side else "-" for side in sides]
        ratios = [_ratio(figures, name) for name in ("speed_ratio", "memory_ratio", "memory_ratio_above_idle")]
        table.add_row(f"tokens/s, {kind}", *speeds, ratios[0], f">= {SPEED_GOAL}")
        table.add_row(f"peak MB, {kind}", *peaks, ratios[1], f"<= {MEMORY_GOAL}")
        table.add_row("  above idle", "", "", ratios[2], "")
    console.print(table)
    for figures in result["steps"]:
        for name in MODULES:
            error = figures.get(f"{name} error")
            if error:
                console.print(f"{name}: {error}", style="red", markup=False)
        spent = figures.get("spent")
        if spent:
            parts = ", ".join(f"{name} {share:.0%}" for name, share in spent["parts"].items())
            operators = ", ".join(f"{operator['name']} {operator['share']:.0%}" for operator in spent["operators"])
            console.print(f"our step spends its time in: {parts}", markup=False)
            console.print(f"operators, self time: {operators}", markup=False)
    for loss_type, differences in result["agreement"].items():
        console.print(
            f"{loss_type:8} loss differs by {differences['loss']:.1e}, gradient by {differences['gradient']:.1e} "
            f"(goal: {AGREEMENT_GOAL:.0e} of TRL's)"
        )


def _ratio(figures: Mapping[str, Any], name: str) -> str:
    return f"{figures[name]:.2f}" if name in figures else "-"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    budget = Budget.of(options.budget)
    console = Console()
    if options.same_environment:
        ENVIRONMENTS["trl"] = OURS
    for environment in ENVIRONMENTS.values():
        environment.ensure()
    from benchmarks.trainer.workload import EQUAL

    workload = _workload(options)
    steps = []
    agreement: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as errors:
        try:
            for attention in options.attention:
                text = replace(workload, attention=attention).to_json()
                for memory in ("plain", "checkpointing"):
                    if options.one_by_one:
                        measured = measure_one_by_one(options.rounds, options.threads, memory, errors, text, budget)
                    else:
                        measured = measure(options.rounds, options.threads, memory, errors, text, budget)
                    steps.append(measured | {"attention": attention})
            if not options.no_agreement:
                agreement = compare_gradients(errors)
        except RuntimeError:
            _print_end(errors, console)
            raise
        errors_of_sides = {f"{name} error" for name in MODULES}
        if any(not errors_of_sides.isdisjoint(figures) for figures in steps):
            _print_end(errors, console)
    result = {
        "facts": {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "threads": options.threads,
            "trl": TRL.requirements,
            "python": sys.version.split()[0],
            "same_environment": options.same_environment,
            "workload": asdict(workload),
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


def _print_end(errors: Any, console: Console) -> None:
    """Prints the last lines that the sides wrote to standard error."""
    errors.seek(0)
    console.print(errors.read()[-4000:], markup=False, highlight=False)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=("cpu", "gpu"), default="cpu", help="what the other options begin with")
    parser.add_argument("--rounds", type=int, help="counted steps of each side")
    parser.add_argument("--threads", type=int, default=max((os.cpu_count() or 2) // 2, 1), help="of torch, on the CPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="what both sides compute in")
    parser.add_argument("--size", choices=("smallest", "tiny", "0.5b", "1.5b"), help="of the model")
    parser.add_argument("--groups", type=int, help="groups of a step, of 8 completions each")
    parser.add_argument("--lengths", type=int, nargs=2, metavar=("LEAST", "MOST"), help="tokens of a completion")
    parser.add_argument("--micro-batches", type=int, help="of a step")
    parser.add_argument(
        "--attention", nargs="+", help="of transformers; by default sdpa, and FlashAttention if installed"
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="the whole run takes no longer")
    parser.add_argument("--one-by-one", action=argparse.BooleanOptionalAction, help="first our side, then TRL")
    parser.add_argument("--same-environment", action="store_true", help="both sides run in the Python that runs this")
    parser.add_argument("--no-agreement", action="store_true", default=None, help="leave the gradients out")
    parser.add_argument("--result", type=Path)
    options = parser.parse_args(arguments)
    on_gpu = options.preset == "gpu"
    defaults = {
        "rounds": 5 if on_gpu else 7,
        "device": "cuda" if on_gpu else "auto",
        "budget": GPU_SECONDS if on_gpu else None,
        "one_by_one": on_gpu,
        "no_agreement": on_gpu,
        "result": GPU_RESULT if on_gpu else RESULT,
        "attention": _attentions() if on_gpu else ["sdpa"],
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def _attentions() -> list[str]:
    """The attention implementations that are installed here."""
    return ["sdpa", "flash_attention_2"] if importlib.util.find_spec("flash_attn") else ["sdpa"]


def _workload(options: argparse.Namespace) -> Any:
    """The workload of the preset, changed by the options."""
    from benchmarks.trainer.workload import GPU, RAGGED

    workload = GPU if options.preset == "gpu" else RAGGED
    changes = {
        "device": options.device,
        "dtype": options.dtype,
        "size": options.size,
        "groups": options.groups,
        "completion_tokens": None if options.lengths is None else tuple(options.lengths),
        "micro_batches": options.micro_batches,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(workload, **given)


if __name__ == "__main__":
    main()
