"""Miles' arguments, groups and buffers for tests, and a trainer that dies. Imported where Miles' source is there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.rollout.fully_async_data_buffer import DataBufferConstructorInput, DataBufferInput, DefaultDataBuffer
from miles.utils.types import Sample

from replay_adapters.miles import ServerDataBuffer
from tests.adapters.conformance.sample_factories import make_samples

GROUP_SIZE, BATCH = 2, 2


def reject_odd_labels(args: Any, group: Any, **_: Any) -> DynamicFilterOutput:
    """A filter, as `--dynamic-sampling-filter-path` names one."""
    first = group[0][0] if isinstance(group[0], list) else group[0]
    keep = first.label != "odd"
    return DynamicFilterOutput(keep=keep, reason=None if keep else "odd")


def make_args(**changes: Any) -> Namespace:
    """As Miles' parser makes them; `replay_*` comes from the file of `--custom-config-path`."""
    defaults: dict[str, Any] = {
        "rollout_batch_size": BATCH,
        "n_samples_per_prompt": GROUP_SIZE,
        "max_weight_staleness": None,
        "async_data_buffer_capacity_factor": 1000.0,
        "dynamic_sampling_filter_path": f"{__name__}.reject_odd_labels",
        "reward_key": None,
        "save": None,
        "load": None,
        "start_rollout_id": None,
        "train_backend": "megatron",
    }
    return Namespace(**(defaults | changes))


def make_buffers(address: str, **args: Any) -> tuple[tuple[DefaultDataBuffer, list[Any]], tuple[Any, list[Any]]]:
    """Miles' own buffer and ours, each with the list of prompt groups that it did not use."""
    made = []
    for kind in (DefaultDataBuffer, ServerDataBuffer):
        unused: list[Any] = []
        given = DataBufferConstructorInput(
            args=make_args(replay_address=address, **args), unused_handler_fn=unused.append
        )
        made.append((kind(given), unused))
    return made[0], made[1]


def make_buffer(address: str, **args: Any) -> ServerDataBuffer:
    """Ours alone."""
    given = DataBufferConstructorInput(args=make_args(replay_address=address, **args), unused_handler_fn=lambda _: None)
    return ServerDataBuffer(given)


def make_input(number: int, version: int | None = 0, rewards: Sequence[float] = (0.0, 1.0), **fields: Any) -> Any:
    """A finished group whose prompt group is another object, as after a retry."""
    versions = [] if version is None else [str(version)]
    group = make_samples(Sample, number, rewards, weight_versions=versions, **fields)
    prompts = [Sample(group_index=s.group_index, index=s.index, prompt=s.prompt, label=s.label) for s in group]
    return DataBufferInput(prompt_group=prompts, group=group)


def numbers(entries: Sequence[Any]) -> list[int]:
    """The prompts of groups, as `make_input` numbered them."""
    return [int(entry.prompt_group[0].prompt.removeprefix("prompt ")) for entry in entries]


async def drain(buffer: Any, version: int | None, count: int = BATCH) -> list[Any]:
    """What one step of Miles trains on."""
    entries = [await asyncio.wait_for(buffer.get(current_version=version), 60) for _ in range(count)]
    buffer.get_metrics()
    return entries


def save_checkpoint(folder: Path, rollout: int) -> None:
    """As Megatron leaves it."""
    folder.mkdir(exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(rollout))


def saved_steps(folder: Path) -> int:
    """How many steps the checkpoint of a run contains."""
    path = folder / "save/latest_checkpointed_iteration.txt"
    return int(path.read_text()) + 1 if path.exists() else 0


def run(
    address: str,
    folder: Path,
    phase: str = "",
    step: int = 0,
    *,
    on_step: Callable[[int], None] = lambda step: None,
    max_steps: int = 4,
    save_every: int = 1,
    **args: Any,
) -> None:
    """Miles' loop without its model: each step draws a batch. Notes the groups of each step in trained.jsonl.

    It dies in a phase of a step if one is given: "drawn", or "saved". In "stop" it stops after its step.
    """

    async def steps(buffer: ServerDataBuffer) -> None:
        for made in range(saved_steps(folder), max_steps):
            entries = await drain(buffer, made)
            groups = [[(s.tokens, s.rollout_log_probs, s.reward) for s in entry.group] for entry in entries]
            with (folder / "trained.jsonl").open("a") as file:
                file.write(json.dumps({"step": made + 1, "numbers": numbers(entries), "groups": groups}) + "\n")
            on_step(made + 1)
            if phase == "drawn" and made + 1 == step:
                os.kill(os.getpid(), signal.SIGKILL)
            if (made + 1) % save_every == 0:
                save_checkpoint(folder / "save", made)
            if phase == "saved" and made + 1 == step:
                os.kill(os.getpid(), signal.SIGKILL)
            if phase == "stop" and made + 1 == step:
                return

    async def whole() -> None:
        buffer = make_buffer(address, save=str(folder / "save"), load=str(folder / "save"), **args)
        try:
            await steps(buffer)
        finally:
            buffer.close()

    asyncio.run(whole())


def last_attempts(folder: Path) -> dict[int, dict[str, Any]]:
    """What trained.jsonl says of each step: of its last attempt."""
    lines = [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}


def hold_and_wait(address: str, folder: Path) -> None:
    """A trainer that lives: it draws a batch, and waits for more."""

    async def run() -> None:
        buffer = make_buffer(address, save=str(folder))
        await drain(buffer, 0)
        (folder / "holds").touch()
        await buffer.get(current_version=0)

    asyncio.run(run())
