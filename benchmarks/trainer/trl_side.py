"""TRL's side, in an environment of its own: TRL's GRPOTrainer, with our batch in the place of its generation.

The commands are those of ours.py. Collating, splitting into micro-batches, loss, clipping and optimizer are TRL's.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad

from benchmarks.trainer.protocol import Line, Meter, device_facts
from benchmarks.trainer.workload import (
    CISPO_CAP,
    EPSILON,
    EPSILON_HIGH,
    LEARNING_RATE,
    LOSSES,
    Workload,
    old_offsets,
)

STEPS = 10**6


def make_tokenizer(workload: Workload) -> PreTrainedTokenizerFast:
    """A tokenizer that is never used: TRL's trainer needs one."""
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, workload.vocabulary)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


class BatchTrainer(GRPOTrainer):
    """TRL's trainer with a given batch in the place of what it would generate."""

    workload: Workload
    with_old = False

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        device = self.accelerator.device
        groups = self.workload.make_groups()
        prompts = []
        completions = []
        advantages: list[float] = []
        for group in groups:
            for completion in group.completions:
                prompts.append(torch.tensor(group.prompt))
                completions.append(torch.tensor(completion))
            advantages += group.advantages
        prompt_masks = [torch.ones_like(ids) for ids in prompts]
        completion_masks = [torch.ones_like(ids) for ids in completions]
        output = {
            # As TRL pads them: prompts on the left, completions on the right, to the longest of all.
            "prompt_ids": pad(prompts, padding_value=0, padding_side="left").to(device),
            "prompt_mask": pad(prompt_masks, padding_value=0, padding_side="left").to(device),
            "completion_ids": pad(completions, padding_value=0, padding_side="right").to(device),
            "completion_mask": pad(completion_masks, padding_value=0, padding_side="right").to(device),
            "advantages": torch.tensor(advantages).to(device),
            "num_items_in_batch": torch.tensor(sum(len(ids) for ids in completions)).to(device),
        }
        if self.with_old:
            with torch.no_grad():
                logps, _, _ = self._get_per_token_logps_and_entropies(
                    self.model,
                    torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                    torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                    output["completion_ids"].shape[1],
                )
            output["old_per_token_logps"] = logps + old_offsets(*logps.shape).to(device)
        return output


def make_trainer(workload: Workload, folder: str, steps: int, **options: Any) -> BatchTrainer:
    settings: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": workload.rows // workload.micro_batches,
        "gradient_accumulation_steps": workload.micro_batches,
        "num_generations": workload.group_size,
        "max_completion_length": workload.completion_tokens[1],
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": workload.bf16,
        "max_grad_norm": 1.0,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "use_cpu": workload.device_type == "cpu",
        "dataloader_num_workers": 0,
    }
    dataset = Dataset.from_dict({"prompt": ["w3"] * workload.rows})
    trainer = BatchTrainer(
        model=workload.make_model(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**(settings | options)),
        train_dataset=dataset,
        processing_class=make_tokenizer(workload),
    )
    trainer.workload = workload
    return trainer


class Answers(TrainerCallback):
    """Answers each step with its time, and waits for the request of the next step."""

    def __init__(self, line: Line, meter: Meter, tokens: int) -> None:
        self.line = line
        self.meter = meter
        self.tokens = tokens
        self.requests = line.requests()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not next(self.requests, ""):
            raise SystemExit
        self.meter.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.line.answer(**self.meter.stop(), tokens=self.tokens)


def step(workload: Workload, gradient_checkpointing: bool) -> None:
    line = Line()
    meter = Meter(workload.device_type)
    tokens = 0
    for group in workload.make_groups():
        tokens += sum(len(completion) for completion in group.completions)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(workload, folder, STEPS, gradient_checkpointing=gradient_checkpointing)
        trainer.add_callback(Answers(line, meter, tokens))
        line.answer(ready=True, **device_facts(trainer.accelerator.device), attention=workload.attention)
        trainer.train()


def gradients(workload: Workload, path: str) -> None:
    class Keep(TrainerCallback):
        """Keeps the gradient of the one step."""

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            self.gradients = {name: parameter.grad.cpu().clone() for name, parameter in model.named_parameters()}

    results = {}
    for loss_type in LOSSES:
        with tempfile.TemporaryDirectory() as folder:
            keep = Keep()
            trainer = make_trainer(
                workload,
                folder,
                1,
                # TRL's GSPO is its grpo with the ratio of the sequence.
                loss_type="grpo" if loss_type == "gspo" else loss_type,
                importance_sampling_level="sequence" if loss_type == "gspo" else "token",
                epsilon=EPSILON,
                epsilon_high=CISPO_CAP if loss_type == "cispo" else EPSILON_HIGH,
                max_grad_norm=0.0,
                logging_strategy="steps",
                logging_steps=1,
                shuffle_dataset=False,
            )
            trainer.with_old = True
            trainer.add_callback(keep)
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            results[loss_type] = {"loss": losses[0], "gradients": keep.gradients}
    torch.save(results, path)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]) if sys.argv[1] == "step" else 2)
    if sys.argv[1] == "step":
        step(Workload.named(sys.argv[2]), gradient_checkpointing=sys.argv[4] == "checkpointing")
    else:
        gradients(Workload.named(sys.argv[2]), sys.argv[3])
