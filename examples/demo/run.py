"""The demo: server, generator and trainer as processes, one live display, and a summary at the end.

task.py make ──▶ model/ ──▶ replay generate (loads its engine while the model warms up)
                   └──▶ task.py warm-up ──▶ warm/ ──▶ replay train ──▶ version 0, 1, 2, ... ──▶ the generator reloads
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from replay_client import ReplayClient
from replay_client.errors import ReplayError
from replay_trainer.metrics import read_metrics, summary

PANELS = {
    "Fresh reward": ("fresh/reward_mean", "mean reward of the groups generated for the step"),
    "Replaced groups": ("replay/groups_replaced", "groups without variance, replaced from the pool"),
    "Staleness": ("fresh/staleness_mean", "policy versions between generation and training"),
    "Importance ratio": ("correction/ratio_mean", "trainer / sampler, mean over tokens before truncation"),
}
"""Title of each panel: the metric, and what it is."""
CALLED = "called"
"""The share of rollouts that called the tool, at each version of the policy."""
CALLED_AS = ("reward/called", "reward/rollout/called")
"""The generator's metric of it: from a reward function, or from an agent."""
TOOL_PANELS = {
    "Fresh reward": PANELS["Fresh reward"],
    "Replaced groups": PANELS["Replaced groups"],
    "Calls": (CALLED, "share of the rollouts that called the calculator"),
    "Importance ratio": PANELS["Importance ratio"],
}
SMOOTH = 10
"""Steps in the mean that is drawn over the values."""


def draw(metrics: list[dict[str, Any]], path: Path, panels: Mapping[str, tuple[str, str]] = PANELS) -> None:
    """Writes a PNG with a panel for each of `panels`."""
    with figure_of(path, 2, 2, figsize=(10, 6), sharex=True) as (figure, axes):
        for axis, (title, (name, meaning)) in zip(axes.flat, panels.items(), strict=True):
            points = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
            steps, values = [step for step, _ in points], [value for _, value in points]
            axis.plot(steps, values, color="tab:blue", alpha=0.3, label="each step")
            axis.plot(steps, running_mean(values, SMOOTH), color="tab:blue", label=f"mean of the last {SMOOTH} steps")
            axis.set_title(f"{title}\n{meaning}", fontsize=9)
            axis.grid(alpha=0.3)
        for axis in axes[1]:
            axis.set_xlabel("training step")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=2, frameon=False)
        figure.tight_layout(rect=(0, 0.05, 1, 1))


@contextmanager
def figure_of(path: Path, *shape: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, which are saved at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*shape, **options)
    yield figure, axes
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def running_mean(values: list[float], width: int) -> list[float]:
    """The mean of the last `width` values at each place."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(i + 1, width) for i in range(len(values))]


STEPS = 150
GROUPS_PER_STEP = 16
GROUP_SIZE = 8
MARKER = "demo.json"

SERVER_CONFIG = """\
[server]
max_bytes = "1GB"

[admission]
groups_per_step = {fresh}
max_staleness = 2

[[tables]]
name = "rollouts"
rate_limiter = {{ type = "queue", max_size = {queue} }}
max_staleness = 8
forward_to = "replay"

[[tables]]
name = "replay"
{pool}
remover = "min_heap"
seed = 0
"""

TRAIN_CONFIG = """\
groups_per_step = {groups}
learning_rate = {learning_rate:g}
weight_decay = 0.01
max_grad_norm = 1.0
loss_type = "dapo"
sample_timeout = {sample_timeout:g}
{replay}
[correction]
{correction}
"""

TRUNCATE = """level = "token"
action = "truncate"
clip_max = 2.0"""
REPLACING_POOL = """sampler = "prioritized"
max_size = 512
max_times_sampled = 4
max_staleness = 20"""


@dataclass(frozen=True)
class Variant:
    """How a demo fills its training steps."""

    groups: int = GROUPS_PER_STEP
    """Groups on which each step trains."""
    fresh: int = GROUPS_PER_STEP
    """Groups that the generator writes for each step; the pool gives the others."""
    replay: str = ""
    """Lines of TRAIN_CONFIG about the pool."""
    correction: str = TRUNCATE
    """Lines of its [correction]."""
    pool: str = REPLACING_POOL
    """Lines of SERVER_CONFIG about the pool."""
    learning_rate: float = 2e-4
    priority: str = "advantage"
    task: str = "sums"
    """One of task.PROBLEMS, unless the model and the prompts are made elsewhere: see `run`."""
    max_tokens: int = 6
    """The longest completion of that task."""
    reward: str | None = "exact_match"
    """As `replay generate --reward`; None: rollouts bring it."""
    sample_timeout: float = 120.0
    """Seconds that the trainer waits for groups, and so for the generator's engine to load."""
    generate: tuple[str, ...] = ()
    """More options of `replay generate`."""
    panels: Mapping[str, tuple[str, str]] = field(default_factory=lambda: PANELS)
    """What the picture shows."""
    steps: int = STEPS
    """Training steps, unless the user says otherwise."""
    solve_rate: float = 0.4
    """Solve rate at which the warm-up ends."""

    @property
    def server_config(self) -> str:
        """The server's configuration, as TOML."""
        return SERVER_CONFIG.format(fresh=self.fresh, queue=4 * self.fresh, pool=self.pool)

    @property
    def train_config(self) -> str:
        """The trainer's configuration, as TOML."""
        return TRAIN_CONFIG.format(
            groups=self.groups,
            replay=self.replay,
            correction=self.correction,
            learning_rate=self.learning_rate,
            sample_timeout=self.sample_timeout,
        )


DEMO = Variant()
WITH_TOOL = Variant(
    task="tools",
    max_tokens=12,
    generate=(
        *("--chat", "--rollout", "examples.demo.tools:rollout"),
        # It counts the calls, and does not reward them.
        *("--reward", "examples.demo.tools:called=0"),
    ),
    learning_rate=1.5e-4,
    panels=TOOL_PANELS,
    steps=50,
    solve_rate=0.1,
)
WITH_AGENT = replace(
    WITH_TOOL,
    generate=("--chat", "--agent", "examples.demo.agent:play", "--tool-parser", "hermes"),
    reward=None,
)
TASKS: dict[str, Variant] = {"sums": DEMO, "tools": WITH_TOOL, "agent": WITH_AGENT}
"""By the name that users type."""


STOPPED = threading.Event()


def stop(*_: object) -> None:
    """Notes that a signal asks the demo to stop; `run_parts` then raises. A handler that raised itself would lose its
    exception amid an import, or leave a part running that was just being started."""
    STOPPED.set()


class DemoError(Exception):
    """The demo cannot go on; the message says which part failed and why."""


class Part:
    """One process of the demo, with its output in a file."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.name = name
        self.log = folder / "logs" / f"{name}.log"
        self._file: IO[bytes] = self.log.open("wb")
        # Settings for another server are not for the demo's.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("REPLAY_")}
        # A session of its own: Ctrl-C reaches the demo, which then stops its parts in order.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=inherited | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
        )

    def check(self) -> bool:
        """Whether it has ended well. Raises DemoError if it has ended otherwise."""
        status = self.process.poll()
        if status is None:
            return False
        if status != 0:
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            raise DemoError(f"the {self.name} {how}: {self.last_words()} (all of its output: {self.log})")
        return True

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it said nothing"

    def lines(self) -> list[dict[str, Any]]:
        """What it printed as JSON lines."""
        text = self.log.read_text(errors="replace")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with suppress(ProcessLookupError):  # what it left behind
            os.killpg(self.process.pid, signal.SIGKILL)
        self._file.close()


class Display:
    """A bar a part; plain lines where the output is not a terminal."""

    def __init__(self, steps: int, fresh: int) -> None:
        self.console = Console()
        self._live = self.console.is_terminal
        self.progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self._live,
        )
        totals = {"warm-up": 1.0, "server": None, "generator": float(steps * fresh), "trainer": float(steps)}
        self._tasks: dict[str, TaskID] = {
            name: self.progress.add_task(name, total=total, text="waiting") for name, total in totals.items()
        }
        self._texts: dict[str, str] = {}
        self._printed = 0.0

    def show(self, name: str, text: str, completed: float | None = None) -> None:
        self._texts[name] = text
        self.progress.update(self._tasks[name], text=text, completed=completed)

    def tick(self) -> None:
        if not self._live and time.monotonic() - self._printed > 10:
            self._printed = time.monotonic()
            self.console.print(" | ".join(f"{name}: {text}" for name, text in self._texts.items()), soft_wrap=True)


def run(
    out: Path,
    steps: int,
    seed: int,
    engine: str,
    target_solve_rate: float | None = None,
    variant: Variant = DEMO,
    warm: Path | None = None,
) -> None:
    """Runs the demo; returns when the trainer has done its steps. Raises DemoError.

    `target_solve_rate`: at which the warm-up ends; None: that of the variant.
    `warm`: a folder with the model that this demo begins with, and no warm-up is made: an earlier demo's, or one that
    has `model`, `warm` and `prompts.jsonl` from elsewhere.
    """
    prepare(out, seed, variant)
    if warm is not None:
        for name in ("model", "warm"):
            shutil.copytree(warm / name, out / name, copy_function=_link)
        shutil.copyfile(warm / "prompts.jsonl", out / "prompts.jsonl")
    display = Display(steps, variant.fresh)
    parts: list[Part] = []
    try:
        with display.progress:
            target = variant.solve_rate if target_solve_rate is None else target_solve_rate
            run_parts(out, steps, seed, engine, target, variant, display, parts)
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half of them running
        for part in reversed(parts):
            part.stop()
        signal.signal(signal.SIGINT, before)
    metrics = read_metrics(out / "train" / "metrics.jsonl")
    shutil.copyfile(out / "train" / "metrics.jsonl", out / "metrics.jsonl")
    add_calls(metrics, read_metrics(out / "generator.jsonl"))
    draw(metrics, out / "curves.png", variant.panels)
    for line in summarise(metrics, generator_stats(parts)):
        display.console.print(line, highlight=False, soft_wrap=True)
    display.console.print(
        f"metrics: {out / 'metrics.jsonl'}   picture: {out / 'curves.png'}", highlight=False, soft_wrap=True
    )


def _link(source: str, target: str) -> None:
    """The file again, without a second copy of it where the file system can do that."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def check_folder(out: Path) -> None:
    """Makes the folder and marks it as a demo's. Raises DemoError if it holds anything else."""
    if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
        raise DemoError(f"{out} holds something that is not a demo's: name another folder with --output-dir")
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()


def prepare(out: Path, seed: int, variant: Variant) -> None:
    """An empty folder; what an earlier demo left in it is removed, anything else is not touched."""
    check_folder(out)
    for name in ("logs", "model", "warm", "train"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("prompts.jsonl", "replay.toml", "train.toml", "metrics.jsonl", "generator.jsonl", "curves.png"):
        (out / name).unlink(missing_ok=True)
    (out / "logs").mkdir()
    (out / MARKER).write_text(json.dumps({"seed": seed}))
    (out / "replay.toml").write_text(variant.server_config)
    (out / "train.toml").write_text(variant.train_config)


def run_parts(
    out: Path,
    steps: int,
    seed: int,
    engine: str,
    target: float,
    variant: Variant,
    display: Display,
    parts: list[Part],
) -> None:
    replay = [sys.executable, "-m", "replay_cli"]
    task = [sys.executable, "-m", "examples.demo.task"]

    def start(name: str, command: list[str]) -> Part:
        parts.append(Part(name, command, out))
        return parts[-1]

    def until(done: Callable[[], bool], show: Callable[[], None] = lambda: None) -> None:
        while True:
            if STOPPED.is_set():
                raise KeyboardInterrupt
            ended = done()
            for part in parts:
                if part.check() and part.name in ("server", "generator"):
                    raise DemoError(f"the {part.name} ended before the trainer: {part.last_words()}")
            show()
            display.tick()
            if ended:
                return
            time.sleep(0.25)

    warm = (out / "warm").exists()
    if not warm:
        until(start("model", [*task, "make", str(out), str(seed), str(target), variant.task]).check)

    server = start("server", [*replay, "serve", "--config", str(out / "replay.toml"), "--address", "127.0.0.1:0"])

    def addresses() -> list[str]:
        lines = server.log.read_text().splitlines(keepends=True)
        start = "listening on "
        return [line.removeprefix(start).strip() for line in lines if line.startswith(start) and line.endswith("\n")]

    until(lambda: bool(addresses()))
    address = addresses()[0]
    display.show("server", address)
    look = f"replay --address {address} dashboard --runs {out}"
    display.console.print(f"look inside: {look}", highlight=False, soft_wrap=True)

    generate = ["--address", address, "generate", "--engine", engine, "--model", str(out / "model")]
    generate += ["--prompts", str(out / "prompts.jsonl"), "--wait-for-policy"]
    generate += ["--reward", variant.reward] if variant.reward else []
    generate += ["--group-size", str(GROUP_SIZE), "--max-tokens", str(variant.max_tokens), "--seed", str(seed)]
    generate += ["--priority", variant.priority, *variant.generate, "--json"]
    generate += ["--metrics-path", str(out / "generator.jsonl"), "--set", "metrics_interval=0.5"]
    display.show("generator", f"loading {engine}")
    start("generator", [*replay, *generate])

    if not warm:
        warm_up = start("warm-up", [*task, "warm-up", str(out), str(seed), str(target), variant.task])
        until(warm_up.check, lambda: show_warm_up(display, warm_up, target))

    train = ["--address", address, "train", "--model", str(out / "warm"), "--config", str(out / "train.toml")]
    train += ["--output-dir", str(out / "train"), "--max-steps", str(steps), "--seed", str(seed), "--quiet"]
    trainer = start("trainer", [*replay, *train])
    with ReplayClient(address, timeout=5.0) as client:
        until(trainer.check, lambda: show_training(display, client, out, steps, parts))


def show_warm_up(display: Display, warm_up: Part, target: float) -> None:
    for stats in warm_up.lines()[-1:]:
        rate = stats["solve_rate"]
        display.show("warm-up", f"step {stats['steps']:.0f}, solves {rate:.2f} of {target}", min(1.0, rate / target))


def show_training(display: Display, client: ReplayClient, out: Path, steps: int, parts: list[Part]) -> None:
    try:
        info = client.server_info()
    except ReplayError:
        return  # if the server is gone for good, its process says so
    tables = " ".join(f"{name} {table.size}" for name, table in info.tables.items())
    display.show("server", f"{tables}, policy version {info.policy.version}")
    stats = generator_stats(parts)
    if stats:
        display.show(
            "generator",
            f"{stats['groups']} groups, {stats['tokens_per_second']:.0f} tokens/s, reward {stats['reward_mean']:.2f}",
            stats["groups"],
        )
    metrics = read_metrics(out / "train" / "metrics.jsonl")
    if metrics:
        last, recent = metrics[-1], metrics[-10:]
        reward = sum(line["fresh/reward_mean"] for line in recent) / len(recent)
        display.show(
            "trainer",
            f"step {last['step']}/{steps}, fresh reward {reward:.2f}, "
            f"{last['replay/groups_replaced']:.0f} groups of the pool, staleness {last['fresh/staleness_mean']:.1f}",
            last["step"],
        )


def generator_stats(parts: list[Part]) -> dict[str, Any]:
    """The newest statistics that the generator printed."""
    lines = next((part.lines() for part in parts if part.name == "generator"), [])
    return {name: math.nan if value is None else value for name, value in lines[-1].items()} if lines else {}


def add_calls(metrics: list[dict[str, Any]], generated: Sequence[Mapping[str, Any]]) -> None:
    """Writes CALLED into each step from whose version of the policy the generator has told it."""
    told = {
        line["policy_version"]: line[name] for line in generated for name in CALLED_AS if line.get(name) is not None
    }
    for line in metrics:
        if (version := line["step"] - 1) in told:
            line[CALLED] = told[version]


def summarise(metrics: list[dict[str, Any]], generated: dict[str, Any]) -> Iterator[str]:
    """What the run came to, a line each: the trainer's part, then the generator's."""
    seconds = sum(line["time/step"] for line in metrics)
    yield ""
    yield from summary(metrics)
    if called := [line[CALLED] for line in metrics if CALLED in line]:
        yield (f"calculator          called in {called[0]:.0%} of the rollouts at first, {called[-1]:.0%} at last")
    yield (
        f"generated           {generated.get('groups', 0)} groups, {generated.get('tokens', 0) / seconds:.0f} tokens/s"
    )
    yield (
        f"engine, trainer     differ by {generated.get('probe_max_difference', math.nan):.1e} nats on the probe, after "
        f"{generated.get('reloads', 0)} reloads of the weights"
    )
