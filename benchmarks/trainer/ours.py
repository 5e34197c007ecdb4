"""Our side: GRPOTrainer on a client that always has the same batch.

python -m benchmarks.trainer.ours step ragged 2 plain       a training step for each line that asks for one
python -m benchmarks.trainer.ours gradients equal FILE      losses and gradients of every loss type

The workload is a name or JSON (`Workload.named`); then come the threads of torch, and `plain` or `checkpointing`.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.trainer.protocol import Line, Meter, device_facts
from benchmarks.trainer.spent import Spent
from benchmarks.trainer.workload import CISPO_CAP, EPSILON, EPSILON_HIGH, LEARNING_RATE, LOSSES, Workload
from benchmarks.trainer.workload import old_offsets as offsets_of
from replay_client import Policy, Sample, SampleInfo, group_from_completions
from replay_trainer import Callback, GRPOConfig, GRPOTrainer, StepReport
from replay_trainer.batching import micro_batches, packed_input, to_batch
from replay_trainer.correction.presets import PRESETS

STEPS = 10**6


class EndlessClient:
    """The methods of ReplayClient that the trainer uses. It gives the same batch of fresh groups for ever."""

    def __init__(self, workload: Workload, before: Any = None) -> None:
        self.before = before or (lambda: None)
        self.samples = []
        for key, group in enumerate(workload.make_groups()):
            packed = group_from_completions(
                prompt_ids=group.prompt,
                completions=group.completions,
                logprobs=[[-1.0] * len(completion) for completion in group.completions],
                rewards=group.rewards,
                advantages=group.advantages,
                sampling={"temperature": 1.0},
            )
            info = SampleInfo(key, 1.0, 1.0, 0.0, 0, 0, 1, 1)
            self.samples.append(Sample(info, packed.encode()))

    def server_info(self, **_: Any) -> Any:
        return SimpleNamespace(admission=None, tables={}, clients=[])

    def policy(self, **_: Any) -> Policy:
        return Policy()

    def leave(self, **_: Any) -> None:
        """Does nothing: there is no server to leave."""

    def auto_renew(self, *_: Any) -> Any:
        """An object that renews nothing: there are no leases."""
        return SimpleNamespace(add=lambda samples: None, forget=lambda samples: None, close=lambda: None)

    def describe(self, settings: dict[str, str]) -> None:
        """Does nothing: nobody reads the settings."""

    def set_policy_version(self, version: int, weights: str = "", rollback: bool = False, **_: Any) -> None:
        pass

    @contextmanager
    def sampler(
        self, table: str, *, batch_size: int, prefetch: int, timeout: float | None, lease: float, on_lease: Any
    ) -> Iterator[Iterator[list[Sample]]]:
        def batches() -> Iterator[list[Sample]]:
            for _ in itertools.count():
                self.before()
                yield list(self.samples)

        yield batches()


class Answers(Callback):
    """Answers each step with its time, or with the shares of its time."""

    def __init__(self, line: Line, meter: Meter, tokens: int) -> None:
        self.line = line
        self.meter = meter
        self.tokens = tokens
        self.spent: Spent | None = None
        """The times of the step under way, if it is profiled."""

    def on_step(self, trainer: Any, report: StepReport) -> None:
        if self.spent is not None:
            self.line.answer(spent=self.spent.stop())
            self.spent = None
            return
        self.line.answer(**self.meter.stop(), tokens=self.tokens, loss=report.metrics["train/loss"])


def make_trainer(workload: Workload, folder: str, client: Any, **options: Any) -> GRPOTrainer:
    batch = to_batch([sample.group for sample in client.samples])
    inputs = packed_input(batch).input_ids_RS.numel()
    budget = inputs // workload.micro_batches + max(workload.completion_tokens)
    while len(list(micro_batches(batch, budget))) > workload.micro_batches:
        budget += budget // 20
    config = GRPOConfig(
        output_dir=folder,
        max_steps=STEPS,
        publish_every=STEPS,
        groups_per_step=workload.groups,
        prefetch=0,
        zero_variance="none",
        learning_rate=LEARNING_RATE,
        max_grad_norm=1.0,
        max_tokens_per_micro_batch=budget,
        progress=False,
        report_to=(),
        device=workload.device,
        bf16=workload.bf16,
        **options,
    )
    return GRPOTrainer(workload.make_model(), client, config)


def step(workload: Workload, gradient_checkpointing: bool) -> None:
    line = Line()
    meter = Meter(workload.device_type)
    requests = line.requests()

    def before() -> None:
        request = next(requests, "")
        if not request:
            raise SystemExit
        if request == "profile":
            answers.spent = Spent(trainer)
            answers.spent.start()
        else:
            meter.start()

    client = EndlessClient(workload, before)
    with tempfile.TemporaryDirectory() as folder:
        # The weights are 1, as TRL's are without vLLM.
        options = {"correction": PRESETS["off"](), "gradient_checkpointing": gradient_checkpointing}
        trainer = make_trainer(workload, folder, client, **options)
        tokens = sum(sample.group.num_tokens for sample in client.samples)
        answers = Answers(line, meter, tokens)
        trainer.callbacks.append(answers)
        attention = "packed sdpa" if trainer.policy.route == "packed" else workload.attention
        line.answer(ready=True, **device_facts(trainer.device), attention=attention)
        trainer.train()


def gradients(workload: Workload, path: str) -> None:
    results = {}
    for loss_type in LOSSES:
        with tempfile.TemporaryDirectory() as folder:
            client = EndlessClient(workload)
            trainer = make_trainer(
                workload,
                folder,
                client,
                loss_type=loss_type,
                epsilon=EPSILON,
                epsilon_high=CISPO_CAP if loss_type == "cispo" else EPSILON_HIGH,
                max_completion_length=workload.completion_tokens[1],
                correction=PRESETS["off"](),
            )
            batch = to_batch([sample.group for sample in client.samples], trainer.device)
            old_BT = trainer.passes.logprobs(batch) + offsets_of(*batch.mask_BT.shape).to(trainer.device)
            _, loss, _ = trainer.passes.backward(batch, old_BT)
            named = trainer.model.named_parameters()
            results[loss_type] = {
                "loss": loss,
                "gradients": {name: parameter.grad.cpu() for name, parameter in named if parameter.grad is not None},
            }
    torch.save(results, path)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]) if sys.argv[1] == "step" else 2)
    if sys.argv[1] == "step":
        step(Workload.named(sys.argv[2]), gradient_checkpointing=sys.argv[4] == "checkpointing")
    else:
        gradients(Workload.named(sys.argv[2]), sys.argv[3])
