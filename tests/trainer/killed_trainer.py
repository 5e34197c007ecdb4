"""A trainer that kills its own process in a phase of a step, for tests that resume it. It notes what each step drew.

It is one process, or one of several ranks over gloo.

Phases, in their order: sampled, backward, updated, writing, written, announced, acknowledged. With fsdp also "rows",
while a rank writes its rows of the optimizer's state. In "full" it cannot write them, and lives. In "stop" it is asked
to stop after its step.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from replay_client import ReplayClient
from replay_trainer import Callback, GRPOConfig, GRPOTrainer, leases, partitions, publication, weights
from tests.kit.models import make_model
from tests.kit.processes import start

PHASES = ("sampled", "backward", "updated", "writing", "written", "announced", "acknowledged")


def kill_in_a_process(address: str, folder: Path, phase: str, step: int, **options: Any) -> None:
    """Trains in a process of its own until it kills itself."""
    process = start(run, address, folder, phase, step, **options)
    process.join(300)
    assert process.exitcode == -signal.SIGKILL, (phase, process.exitcode)


def run_rank(rank: int, size: int, meeting: Path, *arguments: Any, **options: Any) -> None:
    """`run` as one of `size` ranks, which find each other through the file `meeting`."""
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        run(*arguments, **options)
    except RuntimeError as error:
        meeting.with_name(f"error-{rank}").write_text(str(error))
        raise
    distributed.destroy_process_group()


def run(
    address: str, folder: Path, phase: str = "", step: int = 0, callbacks: Sequence[Callback] = (), **options: Any
) -> Any:
    """Trains, dies in a phase of a step if one is given, and else returns the trained model."""
    torch.set_num_threads(1)
    few = {"max_steps": 4, "groups_per_step": 2, "learning_rate": 1e-2, "zero_variance": "none"}
    quiet = {"progress": False, "report_to": (), "sample_timeout": 120.0}
    config = GRPOConfig(output_dir=folder / "run", **(few | quiet | options))
    with ReplayClient(address) as client:
        trainer = GRPOTrainer(make_model(), client, config, callbacks=callbacks)
        _note_draws(trainer, folder / "drawn.jsonl", 0 if phase in ("full", "stop") else step)
        if phase == "stop":
            _stop_after(trainer, step)
            phase = ""
        if phase:
            _die(trainer, phase, step)
        trainer.train()
        return trainer.model


def trained(folder: Path) -> list[int]:
    """The keys that the resulting weights are trained on: of each step, those of its last attempt."""
    lines = [json.loads(line) for line in (folder / "drawn.jsonl").read_text().splitlines()]
    last = {(line["step"], line["rank"]): line["keys"] for line in lines}
    return sorted(key for keys in last.values() for key in keys)


def _note_draws(trainer: GRPOTrainer, path: Path, last: int) -> None:
    """Notes the keys of each step, and draws for no step after `last` (0: all)."""
    make_step, replace = trainer.step, trainer._replace

    def bounded(step: int) -> None:
        if 0 < last < step:
            threading.Event().wait()  # the process dies beside the loop
        make_step(step)

    def noting(step: int, taken: Any) -> Any:
        taken = replace(step, taken)
        keys = [sample.info.key for sample in taken.samples]
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "rank": trainer.ranks.index, "keys": keys}) + "\n")
        return taken

    trainer.step = bounded  # type: ignore[method-assign]
    trainer._replace = noting  # type: ignore[method-assign]


def _stop_after(trainer: GRPOTrainer, last: int) -> None:
    make_step = trainer.step

    def stopping(step: int) -> None:
        make_step(step)
        if step == last:
            trainer.stop()

    trainer.step = stopping  # type: ignore[method-assign]


def _die(trainer: Any, phase: str, step: int) -> None:
    """Replaces the function of this phase by one that kills the process in that step."""
    current = {"step": 0}
    train_on = trainer._train_on

    def begin(step: int, batch: Any) -> Any:
        current["step"] = step
        if phase == "sampled":
            dying(lambda: None)()
        return train_on(step, batch)

    def dying(function: Callable[..., Any], due: Callable[..., bool] | None = None) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            if current["step"] == step if due is None else due(*arguments, **options):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    def half_written(state: Any, path: Path) -> None:
        Path(path).write_bytes(b"half of a state")

    def refuse(rows: Any, path: Path) -> None:
        half_written(rows, path)
        raise OSError(28, "No space left on device")

    trainer._train_on = begin
    # What runs beside the loop knows the version that it writes; the loop may be further.
    if phase == "backward":
        trainer.passes.backward = dying(trainer.passes.backward)
    elif phase == "updated":
        trainer.optimizer.step = dying(trainer.optimizer.step)
    elif phase == "writing":
        save = torch.save
        weights.torch.save = lambda state, path: (  # type: ignore[assignment]
            dying(half_written, lambda *_: True)(state, path) if f"step-{step}." in str(path) else save(state, path)
        )
    elif phase in ("rows", "full"):
        save_file, fail = partitions.save_file, refuse if phase == "full" else dying(half_written, lambda *_: True)
        partitions.save_file = lambda rows, path: (
            fail(rows, path) if f"step-{step}." in path.name else save_file(rows, path)
        )
    elif phase == "written":
        publication.publish_weights = dying(publication.publish_weights, lambda *_, version, **__: version == step)
    elif phase == "announced":
        announce = trainer.client.set_policy_version
        trainer.client.set_policy_version = dying(announce, lambda version, **_: version == step)
    elif phase == "acknowledged":
        acknowledge, calls = leases.GroupLeases.acknowledge, []

        def counted(*arguments: Any) -> None:
            acknowledge(*arguments)
            calls.append(1)

        # One call for each version, beginning with version 0.
        leases.GroupLeases.acknowledge = dying(counted, lambda *_: len(calls) == step + 1)  # type: ignore[method-assign]
