"""Trainers of a tiny model, the batches that they draw, and what they write."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from replay_client import Sample
from replay_client.testing import make_group
from replay_trainer import Callback, GRPOConfig, GRPOTrainer, StepReport
from tests.kit.groups import make_sample
from tests.kit.models import POISON, make_model


def make_batches(count: int, *, seed: int = 0, groups: int = 3, zero_variance: int = 0) -> list[list[Sample]]:
    """Batches of groups of unequal G and lengths, the same for the same seed; the first ones without variance."""
    random = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> list[int]:
        return torch.randint(3, 15, (length,), generator=random).tolist()

    batches = []
    for version in range(count):
        batch = []
        for index in range(groups):
            group_size, prompt = ((2, 4), (4, 1), (3, 2))[index % 3]
            group = make_group(
                rewards=[0.0] * group_size if index < zero_variance else [1.0, 0.0, 0.0, 1.0][:group_size],
                prompt=tokens(prompt),
                completions=[tokens(1 + (j * 2) % 5) for j in range(group_size)],
                logprobs=-2.5,
            )
            batch.append(make_sample(group, key=10 * version + index))
        batches.append(batch)
    return batches


class OnStep(Callback):
    """Calls a function with the metrics of each step."""

    def __init__(self, function: Callable[[dict[str, float]], None]) -> None:
        self.function = function

    def on_step(self, trainer: Any, report: StepReport) -> None:
        self.function(report.metrics)


class Killed(BaseException):
    """What ends a run at once, without a word to anybody."""


def killed_in(step: int) -> Callable[[dict[str, float]], None]:
    """An `on_step` that ends the run in a step, before its version is published."""

    def on_step(metrics: dict[str, float]) -> None:
        if metrics["step"] == step:
            raise Killed

    return on_step


def make_trainer(
    client: Any,
    output_dir: Path,
    *,
    model: Any = None,
    on_step: Callable[[dict[str, float]], None] | None = None,
    callbacks: Sequence[Callback] = (),
    evaluate: Any = None,
    tokenizer: Any = None,
    **options: Any,
) -> GRPOTrainer:
    """A trainer of a tiny model that reports nothing. It makes three steps unless the test sets another number."""
    few = {"max_steps": 3, "learning_rate": 1e-3, "progress": False, "report_to": ()}
    config = GRPOConfig(output_dir=output_dir, **(few | options))
    callbacks = [*callbacks, *([] if on_step is None else [OnStep(on_step)])]
    return GRPOTrainer(model or make_model(), client, config, tokenizer, callbacks, evaluate)


def lines_of(output_dir: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """What a run wrote of each step: its metrics, or another file of its folder."""
    return [json.loads(line) for line in (output_dir / file).read_text().splitlines()]


def poisoned_sample(*, key: int = 77) -> Sample:
    group = make_group(rewards=[1.0, 0.0], prompt=[5, 6], completions=[[7, POISON, 8], [9]], logprobs=-2.5)
    return make_sample(group, key=key)
