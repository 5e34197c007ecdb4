"""Evaluation on prompts that the policy completes itself, and the summary of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.demo.task import make_model, make_tokenizer
from replay_generator.prompts import Prompt
from replay_generator.rewards import exact_match
from replay_trainer import GRPOConfig
from replay_trainer.evaluation import PromptEvaluation
from replay_trainer.metrics import summary
from replay_trainer.ranks import Ranks
from tests.generator.user_functions import swallowing_grader


def run_with(model: Any, tokenizer: Any = None, **config: Any) -> Any:
    settings = GRPOConfig(output_dir="unused", device="cpu", **config)
    return SimpleNamespace(model=model, tokenizer=tokenizer, config=settings, ranks=Ranks("cpu"))


def test_each_prompt_gets_the_completion_that_it_would_get_alone():
    """Prompts of unequal lengths, in batches: padding must change nothing."""
    model, tokenizer = make_model(0), make_tokenizer()
    texts = ["1+1=", "12+34=", "5+6=", "99+1=", "7+7="]
    alone = []
    for text in texts:
        ids = torch.tensor([tokenizer(text).input_ids])
        completion = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
        length = completion.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in completion else 4
        alone.append(tokenizer.decode(completion[:length], skip_special_tokens=True))
    prompts = [Prompt.of({"prompt": text, "answer": answer}) for text, answer in zip(texts, alone, strict=True)]
    prompts[0] = Prompt.of({"prompt": texts[0], "answer": "wrong"})
    model.train()
    model.model.layers[0].eval()
    metrics = PromptEvaluation(prompts, exact_match, max_tokens=4, batch_size=2)(run_with(model, tokenizer))
    # As before: gradient checkpointing puts single layers into training mode.
    assert [model.training, *(layer.training for layer in model.model.layers[:2])] == [True, False, True]
    assert metrics["reward_mean"] == pytest.approx(4 / 5)
    assert metrics["prompts"] == 5
    assert 1 <= metrics["completion_length_mean"] <= 4
    assert model.training  # as before


def test_an_evaluation_grades_with_signals_as_a_script_does_and_leaves_out_what_nobody_scores():
    model, tokenizer = make_model(0), make_tokenizer()
    prompts = [Prompt.of({"prompt": text}) for text in ("1+1=", "12+34=", "5+6=", "99+1=")]
    seen: list[str] = []

    def sees(row: Any, text: str) -> float | None:
        seen.append(text)
        return None

    def half(row: Any, text: str) -> float | None:
        return 1.0 if row["prompt"] in ("1+1=", "5+6=") else None

    trainer = run_with(model, tokenizer)
    metrics = PromptEvaluation(prompts, [sees, swallowing_grader], max_tokens=4)(trainer)
    expected = [swallowing_grader({}, text) for text in seen]
    assert metrics["reward_mean"] == pytest.approx(sum(expected) / 4)
    assert sum(expected) > 0
    metrics = PromptEvaluation(prompts, half, max_tokens=4)(trainer)
    assert metrics["reward_mean"] == 1.0
    assert metrics["prompts"] == 4


def test_an_evaluation_of_prompts_needs_a_tokenizer():
    with pytest.raises(ValueError, match="needs a tokenizer"):
        PromptEvaluation([Prompt.of("1+1=")], exact_match)(run_with(make_model(0)))


def line(step: int, reward: float, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "fresh/reward_mean": reward,
        "fresh/zero_variance_fraction": 0.5,
        "train/zero_variance_fraction": 0.0,
        "replay/groups_replaced": 8,
        "fresh/groups": 16,
        "fresh/staleness_mean": 1.0,
        "replay/staleness_mean": None,
        "correction/ratio_mean": 1.0,
        "correction/clipped_fraction": 0.0,
        "train/tokens": 100,
        "time/step": 2.0,
    } | more


def test_a_run_of_a_few_steps_is_summed_up():
    said = "\n".join(summary([line(1, 0.25), line(2, 0.75, **{"eval/reward_mean": 0.5})]))
    assert said.count(" at step ") == 1
    for words in (
        "fresh reward        0.250 in the first step, 0.750 in the last step",
        "evaluation reward   0.500 at step 2",
        "50% of the fresh groups, 0% of the groups trained on",
        "replaced groups     16 of 32",
        "50 tokens/s trained, 2.00 s a step",
    ):
        assert words in said


class Chats:
    """A model's tokenizer with a chat template, which remembers what it renders."""

    def __init__(self) -> None:
        self.tokenizer, self.rendered = make_tokenizer(), list[str]()
        self.chat_template = "any"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self.tokenizer(*given, **options)

    def apply_chat_template(self, messages: Any, *, tone: str = "", **_: Any) -> str:
        self.rendered.append(f"{tone}{messages[0]['content']}")
        return self.rendered[-1]


def test_an_evaluation_tells_the_template_what_generators_and_rows_do():
    tokenizer = Chats()
    asked = [{"role": "user", "content": "1+1="}]
    prompts = [
        Prompt.of({"prompt": asked, "answer": "2"}),
        Prompt.of({"prompt": asked, "answer": "2", "chat_template_kwargs": {"tone": "2"}}),
    ]
    evaluation = PromptEvaluation(prompts, exact_match, max_tokens=2, chat_template={"tone": "1"})
    evaluation(run_with(make_model(0), tokenizer))
    assert tokenizer.rendered == ["11+1=", "21+1="]
