"""Callbacks: methods that the trainer calls during a run. The callbacks in this module show, write or send the metrics
of the run."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from replay_client import ReplayClient, Sample
from replay_client.tracing import TRACEPARENT
from replay_trainer.background import DaemonThread
from replay_trainer.config import GRPOConfig
from replay_trainer.metrics import Metrics, read_metrics
from replay_trainer.ranks import Ranks
from replay_trainer.weights import writing

logger = logging.getLogger(__name__)

SERVICE_SECONDS = 60.0
"""The most seconds that one call of a network service, such as Weights & Biases, may take. A call starts a run, sends
the metrics of a step, or ends the run."""


class Run(Protocol):
    """The training run, as callbacks and evaluations see it. GRPOTrainer has these members."""

    config: GRPOConfig
    client: ReplayClient
    ranks: Ranks
    model: Any
    """The model in training."""
    tokenizer: Any
    """The tokenizer of the model; None: the run has no tokenizer."""

    def decode(self, token_ids: Any) -> str:
        """The text of tokens. If the run has no tokenizer, the text lists the ids of the tokens."""


@dataclass(frozen=True)
class StepReport:
    """The report of one finished step, which the first rank makes for its callbacks."""

    metrics: Metrics
    samples: Sequence[Sample]
    """The groups that the first rank trained on."""
    replaced: Sequence[int]
    """Indices in `samples` of the groups that came from the pool."""
    record: Mapping[str, Any]
    """The line of the step in `StepsFile`: the groups that all ranks took, and what became of each group."""


class Callback:
    """The first rank calls these methods during a run. A method that is not overridden does nothing."""

    def on_start(self, trainer: Run, version: int) -> None:
        """Is called before the first step. `version`: the policy version from which the run starts or continues."""

    def on_step(self, trainer: Run, report: StepReport) -> None:
        """Is called in each step, after its updates and before its policy version is published."""

    def on_end(self, trainer: Run) -> None:
        """Is called at the end of the run, also after an error."""


@dataclass
class StepMetricsFile(Callback):
    """Writes the metrics of each step as a line of JSON; numbers that are not finite become null.

    The line of a step is written before the policy version of the step is published. When a run resumes from a version,
    `on_start` removes the lines of later steps, because the run repeats these steps. So the file has each step exactly
    once.
    """

    path: Path

    def on_start(self, trainer: Run, version: int) -> None:
        truncate_lines(self.path, last_step=version)  # a step and the version that it makes have the same number

    def on_step(self, trainer: Run, report: StepReport) -> None:
        append_lines(self.path, [report.metrics])


@dataclass
class StepsFile(StepMetricsFile):
    """Writes a line of JSON for each step, with the groups that all ranks took from the server for this step.

    The fields of a line:

        step        the number of the step
        trained     key, prompt_id, policy_version, source ("fresh" or "replayed") and rank of each group that the step
                    trained on
        left_out    key, prompt_id and policy_version of each fresh group that the step left out, because the group
                    carries no gradient or was replaced
        unusable    key, table and reason of each group that cannot be trained on
    """

    def on_step(self, trainer: Run, report: StepReport) -> None:
        append_lines(self.path, [report.record])


@dataclass
class CompletionsFile(StepMetricsFile):
    """Writes some completions of each step, each as a line of JSON, and shows them in a table on the screen.

    Columns: step, prompt, completion, reward, advantage, source ("fresh" or "replayed"), age (seconds), staleness.
    """

    count: int
    """The most completions that are written for a step."""
    console: Console | None
    """The screen for the table; None: no table is shown."""

    def on_step(self, trainer: Run, report: StepReport) -> None:
        rows = completion_rows(report, self.count, trainer.decode)
        append_lines(self.path, rows)
        if self.console is not None and rows:
            self.console.print(completion_table(rows))


class ProgressDisplay(Callback):
    """Shows a progress bar on a terminal; elsewhere prints a line for each step."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )

    def on_start(self, trainer: Run, version: int) -> None:
        if self.console.is_terminal:
            self._task = self._bar.add_task("training", total=trainer.config.max_steps, completed=version, text="")
            self._bar.start()

    def on_step(self, trainer: Run, report: StepReport) -> None:
        """Moves the bar to this step, or prints a line if the console is no terminal."""
        metrics = report.metrics
        text = (
            f"fresh reward {metrics['fresh/reward_mean']:.3f}, replaced {metrics['replay/groups_replaced']:.0f}, "
            f"loss {metrics['train/loss']:.4f}, {metrics['train/tokens_per_second']:.0f} tokens/s"
        )
        if self.console.is_terminal:
            self._bar.update(self._task, completed=metrics["step"], text=text)
        else:
            self.console.print(f"step {metrics['step']}: {text}", highlight=False, soft_wrap=True)

    def on_end(self, trainer: Run) -> None:
        if self.console.is_terminal:
            self._bar.stop()


class TensorBoard(Callback):
    """Writes event files for `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def on_start(self, trainer: Run, version: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # `purge_step`: TensorBoard hides the entries from this step on that were written before the resume.
        self._writer = SummaryWriter(str(self.folder), purge_step=version + 1)

    def on_step(self, trainer: Run, report: StepReport) -> None:
        for name, value in report.metrics.items():
            if name != "step" and math.isfinite(value):
                self._writer.add_scalar(name, value, int(report.metrics["step"]))

    def on_end(self, trainer: Run) -> None:
        if self._writer is not None:  # None: `on_start` has failed or was not called
            self._writer.close()


class WeightsAndBiases(Callback):
    """Sends metrics to Weights & Biases (W&B). The environment variables of W&B choose the project and the server.

    A resumed run continues the same run of W&B, whose id is stored in output_dir. The x-axis of all metrics is the
    metric "step". It is not W&B's own count of steps, because W&B drops values for a count that it has seen before, and
    a resumed run repeats steps.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self._run: Any = None

    def on_start(self, trainer: Run, version: int) -> None:
        """Begins a run of W&B, or continues the run that `_run_id` names."""
        import wandb

        # When the process ends, wandb tries once more to end the run. This setting limits how long wandb then waits.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", f"{SERVICE_SECONDS:g}")
        config = {name: str(value) for name, value in vars(trainer.config).items()}
        run_id = self._run_id(trainer)
        # resume="allow": wandb continues the run of this id, or begins it. dir: wandb makes a folder "wandb" inside.
        self._run = wandb.init(id=run_id, resume="allow", dir=str(self.output_dir), config=config)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_step(self, trainer: Run, report: StepReport) -> None:
        self._run.log({name: value for name, value in report.metrics.items() if math.isfinite(value)})

    def on_end(self, trainer: Run) -> None:
        if self._run is not None:  # None: `on_start` has failed or was not called
            self._run.finish()

    def _run_id(self, trainer: Run) -> str:
        """Chooses the id of the run of W&B, and stores it in output_dir.

        The id is WANDB_RUN_ID if this variable is set, else the stored id if the run is resumed, else a new id.
        """
        path = self.output_dir / "wandb-run-id.txt"
        run_id = os.environ.get("WANDB_RUN_ID", "")
        if not run_id and trainer.config.resume and path.exists():
            run_id = path.read_text().strip()
        if not run_id:
            run_id = secrets.token_hex(4)
        path.write_text(f"{run_id}\n")
        return run_id


class Forgiving(Callback):
    """Calls another callback. If that callback fails or takes too long, a warning is logged once, and the run goes on.

    Use it for callbacks that only show the run somewhere. Do not use it for the files of the run, such as
    metrics.jsonl, which would then lack steps.
    """

    def __init__(self, name: str, inner: Callback, seconds: float | None = None) -> None:
        """`name`: the name of the callback in the warning. `inner`: the callback. `seconds`: the most seconds that one
        call may take; None: no limit. A callback that takes longer is not called again."""
        self.name = name
        self._inner = inner
        self._seconds = seconds
        self._thread = DaemonThread(f"replay-{name}")
        self._may_call = False
        """True from the success of `on_start` until a call takes too long. The other methods are called only then."""
        self._warned = False
        """True once an error of the callback was logged."""

    def on_start(self, trainer: Run, version: int) -> None:
        with self._forgiving():
            self._call(partial(self._inner.on_start, trainer, version))
            self._may_call = True

    def on_step(self, trainer: Run, report: StepReport) -> None:
        if self._may_call:
            with self._forgiving():
                self._call(partial(self._inner.on_step, trainer, report))

    def on_end(self, trainer: Run) -> None:
        if self._may_call:
            with self._forgiving():
                self._call(partial(self._inner.on_end, trainer))

    def _call(self, function: Callable[[], None]) -> None:
        """Calls `function`. Raises its errors, and TimeoutError if it takes longer than the limit."""
        if self._seconds is None:
            function()
            return
        call = self._thread.start(function)
        if not wait([call], self._seconds).done:
            self._may_call = False  # the thread is still busy with this call, so it cannot make further calls
            raise TimeoutError(f"no answer within {self._seconds:g} s")
        call.result()  # raises the error of the call

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Catches an error of the block. Logs a warning of the first error only."""
        try:
            yield
        except Exception as error:
            if not self._warned:
                logger.warning(
                    "%s fails, and training goes on without it: %s: %s (said once). metrics.jsonl in output_dir has "
                    "all numbers",
                    self.name,
                    type(error).__name__,
                    error,
                )
                self._warned = True


class StepSpans(Callback):
    """Records an OpenTelemetry span for each step, linked to the spans in which its groups were generated.

    Needs the package opentelemetry-api, and a tracer provider that the program has set up.
    """

    def __init__(self) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._tracer = trace.get_tracer("replay_trainer")
        self._propagator = TraceContextTextMapPropagator()

    def on_step(self, trainer: Run, report: StepReport) -> None:
        """Records the span of a step that has just ended, with a link to the span of each of its groups."""
        metrics = report.metrics
        end = time.time_ns()
        links = []
        for sample in report.samples:
            # The trace context of the span in which the group was generated, if the generator was traced.
            traceparent = sample.group.meta.get(TRACEPARENT)
            if isinstance(traceparent, str):
                context = self._propagator.extract({TRACEPARENT: traceparent})
                span_context = self._trace.get_current_span(context).get_span_context()
                links.append(self._trace.Link(span_context, {"replay.key": str(sample.info.key)}))
        # Attribute of the span -> name of the metric whose value it gets
        metric_names = {
            "replay.step": "step",
            "replay.loss": "train/loss",
            "replay.replaced": "replay/groups_replaced",
        }
        nanoseconds = int(1e9 * metrics["time/step"])  # the duration of the step
        span = self._tracer.start_span(
            "replay.train_step",
            start_time=end - nanoseconds,
            links=links,
            attributes={attribute: metrics[name] for attribute, name in metric_names.items() if name in metrics},
        )
        span.end(end)


def reporters(config: GRPOConfig) -> list[Callback]:
    """The callbacks that a configuration asks for. Raises ImportError if `report_to` names a package that is not
    installed."""
    folder = Path(config.output_dir)
    console = Console(stderr=True)
    report_to = config.report_to
    if report_to is None:  # the defaults, as far as they are installed
        wanted = ["tensorboard"]
        if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"):
            wanted.append("wandb")
        chosen = [name for name in wanted if importlib.util.find_spec(name)]
    else:
        chosen = list(report_to)
        for name in chosen:
            if importlib.util.find_spec(name) is None:
                raise ImportError(f"report_to names {name}, which is not installed: pip install {name}")
    callbacks: list[Callback] = [StepMetricsFile(folder / "metrics.jsonl"), StepsFile(folder / "steps.jsonl")]
    if config.log_completions:
        table_console = console if config.progress else None
        callbacks.append(CompletionsFile(folder / "completions.jsonl", config.num_completions_to_print, table_console))
    if config.progress:
        callbacks.append(Forgiving("the progress display", ProgressDisplay(console)))
    if "tensorboard" in chosen:
        callbacks.append(Forgiving("TensorBoard", TensorBoard(folder / "tensorboard")))
    if "wandb" in chosen:
        callbacks.append(Forgiving("Weights & Biases", WeightsAndBiases(folder), SERVICE_SECONDS))
    return callbacks


def completion_rows(report: StepReport, count: int, decode: Callable[[Any], str]) -> list[dict[str, Any]]:
    """Describes one rollout of each of at most `count` groups of a step, for `CompletionsFile`.

    Half of the groups come from the pool, and half are fresh. If there are too few of one kind, there are more of the
    other. The completion of a rollout with several sequences is the text that the policy wrote in these sequences, one
    after another. If a group has token advantages, the advantage of its rollout is the mean over the tokens that are
    trained on.
    """
    replaced = list(report.replaced)
    fresh = [index for index in range(len(report.samples)) if index not in replaced]
    step = int(report.metrics["step"])
    rows = []
    most_replaced = max(count // 2, count - len(fresh))  # more than half if there are too few fresh groups
    chosen = [*replaced[:most_replaced], *fresh][:count]
    for index in chosen:
        sample = report.samples[index]
        group = sample.group
        # The index of the rollout in its group. It depends on the step, so that not always the first rollout is shown.
        rollout = step % group.group_size
        sequences = np.flatnonzero(group.sequence_rollouts == rollout)
        sampled_spans = group.sampled_spans()
        texts = [decode(group.completion_ids[sampled_spans[sequence]]) for sequence in sequences]
        advantage = group.advantages[rollout]
        if group.token_advantages is not None:
            span = group.rollout_spans()[rollout]
            is_trained = group.trained_mask[span]
            trained_advantages = group.token_advantages[span][is_trained]
            advantage = trained_advantages.mean() if trained_advantages.size else 0.0
        rows.append(
            {
                "step": step,
                "prompt": decode(group.prompts()[sequences[0]]),
                "completion": "\n".join(texts),
                "reward": float(group.rewards[rollout]),
                "advantage": float(advantage),
                "source": "replayed" if index in replaced else "fresh",
                "age": sample.info.age,
                "staleness": sample.info.staleness,
            }
        )
    return rows


def completion_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a table for the screen."""
    table = Table(title=f"step {rows[0]['step']}", box=None, header_style="bold", title_justify="left")
    for name in ("prompt", "completion"):
        table.add_column(name, overflow="ellipsis", no_wrap=True, ratio=1)
    for name in ("reward", "advantage", "source", "age", "staleness"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["prompt"].replace("\n", "⏎"),
            row["completion"].replace("\n", "⏎"),
            f"{row['reward']:.3g}",
            f"{row['advantage']:+.2f}",
            row["source"],
            f"{row['age']:.0f} s",
            str(row["staleness"]),
        )
    return table


def append_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Appends lines of JSON; numbers that are not finite become null."""
    # `writing` adds the name of the file to an error, such as that of a full disk.
    with writing(path), path.open("a") as file:
        for line in lines:
            values = {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in line.items()
            }
            file.write(json.dumps(values) + "\n")


def truncate_lines(path: Path, last_step: int) -> None:
    """Removes the lines of steps after `last_step`, and a line that a killed process left unfinished.

    The kept lines are written to a new file, which then replaces the old file in one operation. So if this process is
    killed, the path has either the old file or the new file.
    """
    if not path.exists():
        return
    new_path = path.with_name(path.name + ".tmp")
    new_path.unlink(missing_ok=True)  # a killed process may have left such a file
    kept_lines = [line for line in read_metrics(path) if line["step"] <= last_step]
    append_lines(new_path, kept_lines)
    os.replace(new_path, path)
