"""The code of docs/how-to/trl.md with TRL's real AsyncGRPOTrainer, in a process that may kill itself.

It notes which completions each step trains on: each completion has a token that no other one has.

Phases of a step, in their order: forward, updated, published, announced, saving, saved, acknowledged. In "stop" it
stops after its step.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerState
from trl.experimental.async_grpo import AsyncGRPOTrainer

from examples.demo.task import make_tokenizer
from replay_adapters import trl_async
from replay_adapters.trl_async import ServerRollouts
from replay_client import ReplayClient, RolloutGroup
from replay_client.scoring import group_priority
from replay_client.testing import make_group
from tests.adapters.async_grpo_on_cpu import OPTIONS
from tests.docs.blocks import ROOT, blocks
from tests.kit.models import make_model

PAGE = ROOT / "docs/how-to/trl.md"
VOCABULARY, FIRST_MARK, GROUP_SIZE = 512, 100, 4


def block(title: str) -> str:
    return next(each.text for each in blocks(PAGE) if each.title == title)


def train(model: Path, address: str, **options: Any) -> None:
    """The page's function, in the current directory."""
    names: dict[str, Any] = {}
    exec(block("async_grpo.py"), names)
    dataset = Dataset.from_list([{"prompt": "1+1="}])
    names["train"](str(model), make_tokenizer(), dataset, address, **OPTIONS | options)


def save_model(folder: Path) -> Path:
    """A model with a token for each completion of `insert`."""
    model = make_model(vocabulary=VOCABULARY)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def marked_group(index: int, version: int = 0) -> RolloutGroup:
    marks = [FIRST_MARK + GROUP_SIZE * index + k for k in range(GROUP_SIZE)]
    return make_group(completions=[[mark, 6, 7, 8] for mark in marks], logprobs=-6.0, version=version)


def insert(address: str, count: int, first: int = 0) -> None:
    with ReplayClient(address) as client:
        for index in range(first, first + count):
            group = marked_group(index)
            client.insert(group, {"rollouts": group_priority(group.rewards, group.advantages)})


def run(
    address: str,
    folder: Path,
    phase: str = "",
    step: int = 0,
    *,
    notes: Path | None = None,
    on_step: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> None:
    """Trains in `folder`, and dies in a phase of a step if one is given. `notes`: where trained.jsonl is written.

    `on_step` is called in the middle of each step, with its number.
    """
    notes = notes or folder
    notes.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    os.chdir(folder)

    def before(made: int) -> None:
        on_step(made + 1)
        if phase == "forward" and made == step - 1:
            die()

    note_steps(notes / "trained.jsonl", before)
    if phase:
        _arm(phase, step)
    # A row of 26 tokens holds five completions, so steps and groups do not end together.
    train(folder / "model", address, **{"max_steps": 8, "save_steps": 2, "token_budget": 26} | options)


def run_rank(rank: int, size: int, port: int, address: str, folder: Path, **options: Any) -> None:
    """`run` as one of `size` ranks over gloo, which notes its steps in a folder of its own."""
    group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in group.items()} | {"ACCELERATE_USE_CPU": "1"}
    run(address, folder, notes=folder / str(rank), **options)


def note_steps(path: Path, before: Callable[[int], None]) -> Callable[[], None]:
    """Notes the completions of each forward pass. `before` gets the number of steps before this one. Returns an end."""
    compute = AsyncGRPOTrainer.compute_loss

    def noting(self: Any, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        made = self.state.global_step
        before(made)
        marks = [token - FIRST_MARK for token in inputs["input_ids"].flatten().tolist() if token >= FIRST_MARK]
        with path.open("a") as file:
            file.write(json.dumps({"step": made + 1, "marks": marks}) + "\n")
        return compute(self, model, inputs, *arguments, **options)

    AsyncGRPOTrainer.compute_loss = noting  # type: ignore[method-assign]
    return lambda: setattr(AsyncGRPOTrainer, "compute_loss", compute)


def trained(folder: Path) -> list[int]:
    """The numbers of the completions that the weights are trained on: of each step, those of its last attempt."""
    last: dict[int, list[int]] = {}
    for line in (folder / "trained.jsonl").read_text().splitlines():
        noted = json.loads(line)
        last[noted["step"]] = noted["marks"]
    return [mark for step in sorted(last) for mark in last[step]]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(phase: str, step: int) -> None:
    """Replaces the function of this phase by one that kills the process in that step."""

    def dying(owner: Any, name: str, due: Callable[..., bool], before: Callable[..., None] | None = None) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if before is not None and due(*arguments):
                before(*arguments)
                die()
            result = function(*arguments, **options)
            if due(*arguments):
                die()
            return result

        setattr(owner, name, call)

    def of_callback(*arguments: Any) -> bool:
        return bool(arguments[2].global_step == step)

    match phase:
        case "updated":
            dying(ServerRollouts, "on_step_end", of_callback)
        case "published":  # and not announced
            dying(trl_async, "publish_weights", lambda *arguments: arguments[3] >= step + 1)
        case "announced":
            dying(ServerRollouts, "update_model_version", lambda *arguments: arguments[1] >= step + 1)
        case "stop":
            end_step = ServerRollouts.on_step_end

            def stopping(*arguments: Any, **options: Any) -> None:
                end_step(*arguments, **options)
                if of_callback(*arguments):
                    arguments[3].should_training_stop = True

            ServerRollouts.on_step_end = stopping  # type: ignore[method-assign]
        case "saving":
            dying(
                TrainerState,
                "save_to_json",
                lambda state, _: state.global_step == step,
                before=lambda _, path: Path(path).write_text('{"best'),
            )
        case "saved":
            dying(ServerRollouts, "on_save", of_callback, before=lambda *_: None)
        case "acknowledged":
            dying(ServerRollouts, "on_save", of_callback)
