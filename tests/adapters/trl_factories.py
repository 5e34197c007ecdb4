"""Trainers of TRL on a tiny model, and what the tests recompute by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from examples.demo.task import make_tokenizer, problems
from replay_adapters.trl import ReplayGRPOConfig, ReplayGRPOTrainer
from replay_adapters.trl_rows import GenerationStep
from replay_client import RolloutGroup
from tests.kit.models import make_model

GROUP_SIZE = 4
ROWS = 16  # of a step: four groups


def make_dataset(count: int = 64) -> Dataset:
    """Prompts of four to six tokens."""
    rows = problems(0, count)
    return Dataset.from_dict({name: [row[name] for row in rows] for name in rows[0]})


def short_is_good(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 for a completion with a digit: a model with random weights gets groups with and without variance."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(any(c.isdigit() for c in text)) for text in texts]


class RecordingTrainer(ReplayGRPOTrainer):
    """Keeps each generation: its step, what TRL made of it, and the model that it was computed with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[tuple[GenerationStep, dict[str, Any], Any]] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.recorded: list[GenerationStep] = []
        output = super()._generate_and_score_completions(inputs)
        # Not a deep copy: TRL replaces `forward` by a method that stays bound to the first model.
        model = make_model(vocabulary=self.model.config.vocab_size)
        model.load_state_dict(self.accelerator.unwrap_model(self.model).state_dict())
        self.steps += [(step, dict(output), model) for step in self.recorded]
        return output

    def _report(self, step: GenerationStep) -> None:
        super()._report(step)
        self.recorded.append(step)


class At(TrainerCallback):  # type: ignore[misc]
    """Calls something at the end of a step."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.action()


def make_trainer(
    folder: Any,
    *,
    trainer_class: type = RecordingTrainer,
    config_class: type = ReplayGRPOConfig,
    reward: Callable[..., Any] | list[Callable[..., Any]] = short_is_good,
    dataset: Dataset | None = None,
    callbacks: list[Any] | None = None,
    eval_dataset: Dataset | None = None,
    rollout_func: Any = None,
    environment_factory: Any = None,
    tokenizer: Any = None,
    **settings: Any,
) -> Any:
    """A trainer of four groups of four a step, without vLLM."""
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "num_generations": GROUP_SIZE,
        "max_completion_length": 5,
        "max_steps": 5,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    tokenizer = make_tokenizer() if tokenizer is None else tokenizer
    model: Any = make_model(vocabulary=len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    if settings.get("beta"):  # TRL loads the reference model by its name
        model.save_pretrained(f"{folder}/model")
        model = f"{folder}/model"
    return trainer_class(
        model=model,
        reward_funcs=reward,
        args=config_class(**(options | settings)),
        train_dataset=make_dataset() if dataset is None else dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=callbacks,
        rollout_func=rollout_func,
        environment_factory=environment_factory,
    )


def logprobs_of(model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0) -> Tensor:
    """(T,) log-probabilities of one completion, without padding and without TRL."""
    ids = torch.tensor([[*prompt, *completion]])
    scores = (model(input_ids=ids).logits[0].float() / temperature).log_softmax(-1)
    return scores[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)


def stored_row(group: RolloutGroup, k: int) -> tuple[list[int], list[int], Tensor]:
    """Prompt, completion and (T,) log-probabilities of a row of a stored group."""
    span = group.sampled_spans()[k]
    logprobs = torch.tensor(group.rollout_logprobs[span].copy())
    return group.prompts()[k].tolist(), group.completion_ids[span].tolist(), logprobs


@torch.no_grad()
def ratios_of(model: Any, group: RolloutGroup, k: int) -> Tensor:
    """(T,) what the model says of a stored completion over what its sampler said; 1 where that is unknown."""
    prompt, completion, stored = stored_row(group, k)
    return (logprobs_of(model, prompt, completion) - stored).exp().nan_to_num(nan=1.0)


def rows_of(output: dict[str, Any], row: int) -> tuple[list[int], list[int]]:
    """The tokens of a row's prompt and completion, without their padding."""
    prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
    completion = output["completion_ids"][row][output["completion_mask"][row].bool()].tolist()
    return prompt, completion


def metrics_of(trainer: Any, name: str) -> list[float]:
    """The values that TRL logged under a name, one a step."""
    return [float(entry[name]) for entry in trainer.state.log_history if entry.get(name) is not None]
