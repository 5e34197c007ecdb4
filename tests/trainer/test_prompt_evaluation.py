"""Evaluation on prompts that the policy completes itself, and the summary of a run."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, GenerationConfig, WatermarkingConfig

from examples.demo.task import make_model, make_tokenizer
from replay_client import AsyncReplayClient
from replay_client.testing import make_group
from replay_generator import GeneratorConfig
from replay_generator.prompts.prompt import Prompt
from replay_generator.rewards.functions import exact_match
from replay_generator.testing import EOS
from replay_server import ReplayServer, TableConfig
from replay_trainer import GRPOConfig
from replay_trainer.correction import CorrectionConfig, correct
from replay_trainer.evaluation import PromptEvaluation
from replay_trainer.metrics import summary
from replay_trainer.ranks import Ranks
from tests.generator.user_functions import grader_of_evaluations
from tests.kit.models import loaded
from tests.kit.models import save_model as make_folder
from tests.kit.processes import run_replay
from tests.trainer.families import FAMILIES

torch.set_num_threads(1)  # matrices this small only wait for a second one


def run_with(model: Any, tokenizer: Any = None, **config: Any) -> Any:
    settings = GRPOConfig(output_dir="unused", device="cpu", **config)
    return SimpleNamespace(model=model, tokenizer=tokenizer, config=settings, ranks=Ranks("cpu"))


def test_an_evaluation_without_prompts_says_so():
    with pytest.raises(ValueError, match="has no prompts: give it at least one"):
        PromptEvaluation([], exact_match)(run_with(make_model(0), make_tokenizer()))


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


def test_a_model_that_counts_places_in_the_row_completes_each_prompt_as_alone(tokenizer: Any):
    family = FAMILIES["bart, positions of the row"]
    prompts = [Prompt.of({"prompt": text}) for text in ("1+1=", "12+34=12+34=12+34=", "5+6=5+6=")]

    def completed(some: list[Prompt]) -> list[str]:
        texts: list[str] = []

        def noted(row: Any, text: str) -> float:
            texts.append(text)
            return 0.0

        PromptEvaluation(some, noted, max_tokens=12)(run_with(family.make(), tokenizer))
        return texts

    alone = [text for prompt in prompts for text in completed([prompt])]
    assert completed(prompts) == alone


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
    metrics = PromptEvaluation(prompts, [sees, grader_of_evaluations], max_tokens=4)(trainer)
    expected = [grader_of_evaluations({}, text) for text in seen]
    assert metrics["reward_mean"] == pytest.approx(sum(expected) / 4)
    assert sum(expected) > 0
    metrics = PromptEvaluation(prompts, half, max_tokens=4)(trainer)
    assert metrics["reward_mean"] == 1.0
    assert metrics["prompts"] == 4


TEXTS = ("1+1=", "12+34=", "5", "a b c")
"""The model of seed 3 completes them with 10, more than 12, 1 and 5 tokens, and repeats itself."""
MOST = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Any:
    """A model whose weights no test changes."""
    return loaded(folder)


def likeliest(model: Any, tokenizer: Any, ends: set[int]) -> list[list[int]]:
    """A completion of each of TEXTS, by one plain forward pass for each token."""
    completions = []
    for text in TEXTS:
        prompt_ids, completion = tokenizer.encode(text, add_special_tokens=False), list[int]()
        while len(completion) < MOST and not ends.intersection(completion[-1:]):
            with torch.no_grad():
                logits_V = model(torch.tensor([[*prompt_ids, *completion]])).logits[0, -1]
            completion.append(int(logits_V.argmax()))
        completions.append(completion)
    return completions


@pytest.fixture(scope="module")
def expected(shared: Any, tokenizer: Any) -> list[list[int]]:
    return likeliest(shared, tokenizer, {EOS})


def check_completes(model: Any, tokenizer: Any, expected: list[list[int]], ends: set[int]) -> None:
    """An evaluation completes TEXTS with these tokens, and leaves the model as it was."""
    answers = [tokenizer.decode(completion, skip_special_tokens=True) for completion in expected]
    prompts = [Prompt.of({"prompt": text, "answer": answer}) for text, answer in zip(TEXTS, answers, strict=True)]

    def is_the_answer(row: Mapping[str, Any], completion: str) -> float:
        return float(completion == row["answer"])

    before = model.generation_config
    metrics = PromptEvaluation(prompts, is_the_answer, max_tokens=MOST, batch_size=4)(run_with(model, tokenizer))
    assert metrics["reward_mean"] == 1
    assert metrics["completion_length_mean"] == pytest.approx(sum(map(len, expected)) / len(TEXTS))
    assert metrics["truncated_fraction"] == pytest.approx(sum(row[-1] not in ends for row in expected) / len(TEXTS))
    assert model.generation_config is before


OTHERWISE: dict[str, Any] = {
    "max_length": 2,
    "max_new_tokens": 1,
    "max_time": 1e-9,
    "min_length": 30,
    "stop_strings": ["2"],
    "do_sample": True,
    "use_mtp": True,
    "use_cache": False,
    "cache_implementation": "quantized",
    "cache_config": {"backend": "no such"},
    "early_stopping": "never",
    "temperature": 30.0,
    "repetition_penalty": 1.05,
    "encoder_repetition_penalty": 1.5,
    "bad_words_ids": [[22], [9]],
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 7,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": [1, 9.0],
    "suppress_tokens": [22, 9],
    "begin_suppress_tokens": [20, 25],
    "sequence_bias": [[[22], -90.0]],
    "token_healing": True,
    "guidance_scale": 3.0,
    "watermarking_config": WatermarkingConfig(bias=90.0),
    "return_dict_in_generate": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "pad_token_id": 5,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "no such",
    "disable_compile": True,
    "dola_layers": "high",
    "constraints": ["no such"],
    "force_words_ids": [[9]],
    "prefill_chunk_size": 1,
    "logits_processor": "an argument of generate",
    "some_field": "of somebody's own generate",
}
"""A value of each field that changes completions or ends an evaluation; 2 for the fields that are not here."""
FIELDS = [name for name in vars(GenerationConfig()) if name != "eos_token_id" and not name.startswith("_")]


@pytest.mark.parametrize("field", [*FIELDS, *sorted(OTHERWISE.keys() - set(FIELDS))])
def test_an_evaluation_is_greedy_whatever_generation_config_says(shared, tokenizer, expected, field, monkeypatch):
    changed = copy.deepcopy(shared.generation_config)
    setattr(changed, field, OTHERWISE.get(field, 2))
    monkeypatch.setattr(shared, "generation_config", changed)
    check_completes(shared, tokenizer, expected, {EOS})


def with_contrastive_search(model: Any) -> Any:
    model.generation_config.update(top_k=4, penalty_alpha=0.6)
    return model


def with_sampled_beams(model: Any) -> Any:
    model.generation_config.update(do_sample=True, num_beams=4, num_beam_groups=2, num_return_sequences=4)
    return model


def with_settings_in_its_config(model: Any) -> Any:
    """As checkpoints have them that are older than generation_config.json."""
    model.config.temperature = 0.5
    model.config.num_beams = 3
    return model


def with_a_generate_of_its_own(model: Any) -> Any:
    """As `custom_generate` of a checkpoint, with code that was trusted."""
    model.generate = lambda *arguments, **options: torch.zeros(4, 99, dtype=torch.int64)
    return model


def with_an_adapter(model: Any) -> Any:
    model.generation_config.repetition_penalty = 1.5
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
    return adapted.eval()


@pytest.mark.parametrize(
    "changed",
    [
        with_contrastive_search,
        with_sampled_beams,
        with_settings_in_its_config,
        with_a_generate_of_its_own,
        with_an_adapter,
    ],
)
def test_an_evaluation_is_greedy_whatever_comes_with_the_model(folder, tokenizer, changed: Callable[[Any], Any]):
    model = changed(loaded(folder))
    check_completes(model, tokenizer, likeliest(model, tokenizer, {EOS}), {EOS})


@pytest.mark.parametrize(("configured", "ends"), [([EOS, 22], {EOS, 22}), (9, {EOS, 9}), (None, {EOS})])
def test_an_evaluation_ends_completions_where_the_engines_do(shared, tokenizer, configured, ends, monkeypatch):
    monkeypatch.setattr(shared, "generation_config", GenerationConfig(eos_token_id=configured))
    check_completes(shared, tokenizer, likeliest(shared, tokenizer, ends), ends)


def test_an_evaluation_that_fails_leaves_the_model_as_it_was(folder, tokenizer):
    model = loaded(folder)
    before = model.generation_config
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        PromptEvaluation([Prompt.of("1+1=")], exact_match)(run_with(model, tokenizer))
    assert model.generation_config is before


def test_an_evaluation_that_fails_before_its_first_prompt_leaves_the_model_in_training_mode(tokenizer, monkeypatch):
    model = make_model(0).train()
    monkeypatch.setattr("replay_trainer.evaluation.end_ids", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        PromptEvaluation([Prompt.of("1+1=")], exact_match)(run_with(model, tokenizer))
    assert model.training


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
        "importance weights  mean ratio 1.0000, 0.00% of the ratios clamped or masked",
        "50 tokens/s trained, 2.00 s a step",
    ):
        assert words in said


def test_weights_that_are_off_are_at_no_bound():
    recipe = CorrectionConfig(objective="bypass_reinforce", clip_min=1.0, clip_max=1.0)
    logprobs, mask = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2)
    metrics = correct(logprobs, logprobs - 0.1, mask, recipe).metrics
    assert metrics["ratio_mean"] == pytest.approx(math.exp(0.1))
    assert math.isnan(metrics["clipped_fraction"])
    written = line(1, 0.5, **{"correction/clipped_fraction": None})
    assert "importance weights  mean ratio 1.0000, weights off" in summary([written])


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
    evaluation = PromptEvaluation(prompts, exact_match, max_tokens=2, chat_template_kwargs={"tone": "1"})
    evaluation(run_with(make_model(0), tokenizer))
    assert tokenizer.rendered == ["11+1=", "21+1="]


def test_a_token_that_the_model_has_no_embedding_of_is_named_with_its_prompt():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<new>"])
    prompts = [Prompt.of({"prompt": "1+1=", "answer": "2"}), Prompt.of({"prompt": "<new>", "prompt_id": "second"})]
    with pytest.raises(ValueError, match="prompt 'second' of the evaluation has token 45, and the model has embedd"):
        PromptEvaluation(prompts, exact_match, max_tokens=2)(run_with(make_model(0), tokenizer))


SAYS_ITS_TONE = "{{ raise_exception('asked in tone ' ~ tone) }}"


@pytest.mark.parametrize(
    ("generators", "section", "asked"),
    [
        ([{"tone": "x"}], {}, "x"),
        ([{"tone": "x"}, {"tone": "y"}], {"chat_template_kwargs": {"tone": "z"}}, "z"),
        ([], {"chat_template_kwargs": {"tone": "z"}}, "z"),
    ],
    ids=["of a generator", "of the section", "without generators"],
)
async def test_replay_train_asks_held_out_prompts_by_the_chat_template_settings_of_generators(
    tmp_path, generators, section, asked
):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = SAYS_ITS_TONE
    make_model(0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text('{"prompt": "1+1", "answer": "2"}')
    options = ["--model", str(tmp_path / "model"), "--output-dir", str(tmp_path / "run"), "--max-steps", "1"]
    options += ["--groups-per-step", "1", "--quiet", "--set", "eval_every=1", "--eval-prompts", str(held_out)]
    options += ["--set", f"evaluation={json.dumps({'chat': True, **section})}"]
    with ReplayServer([TableConfig(name="rollouts")], port=0) as server:
        async with AsyncExitStack() as clients:
            for template in generators:
                client = await clients.enter_async_context(AsyncReplayClient(server.address))
                await client.describe(GeneratorConfig(chat_template_kwargs=template).described())
            client = await clients.enter_async_context(AsyncReplayClient(server.address))
            await client.insert(make_group(rewards=[1.0, 0.0]), {"rollouts": 1.0})
            done = await asyncio.to_thread(run_replay, "train", *options, address=server.address)
    assert done.returncode == 1
    assert f"asked in tone {asked}" in done.stderr


def test_generators_that_differ_are_named_and_the_first_counts(caplog):
    client = SimpleNamespace()
    tokenizer = Chats()
    said = [("a", {"part": "generator", "chat_template_kwargs": {"tone": "1"}}), ("b", {"part": "generator"})]
    client.server_info = lambda: SimpleNamespace(settings_of=lambda part: iter(said))
    trainer = run_with(make_model(0), tokenizer)
    trainer.client = client
    prompts = [Prompt.of({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"})]
    PromptEvaluation(prompts, exact_match, max_tokens=2, chat_template_kwargs=None)(trainer)
    assert tokenizer.rendered == ["11+1="]
    assert "generators have different chat_template_kwargs settings" in caplog.text
