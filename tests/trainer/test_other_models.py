"""A resume with another model, tokenizer or adapter than its run had ends in one sentence, before it loads anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from replay_client import ReplayClient
from replay_client.testing import make_group
from replay_server import ReplayServer
from replay_server.config import DEFAULT_TABLES
from replay_trainer.partitions import load_weights_of_rank
from tests.kit.clients import FakeClient
from tests.kit.models import VOCABULARY, make_model
from tests.kit.models import save_model as make_model_with_tokenizer
from tests.kit.processes import fails, run_replay
from tests.kit.trainers import lines_of, make_batches, make_trainer

REMEDY = r"resume with the model, the tokenizer and the adapter of that run, or choose another output_dir"
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
"""Those of the model that `make_model` makes."""


def qwen2(**sizes: Any) -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**(SIZES | sizes))).eval()


def llama(**sizes: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**(SIZES | sizes))).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    return make_model_with_tokenizer(tmp_path_factory.mktemp("model") / "model")


def train(output_dir: Path, client: Any = None, **options: Any) -> Any:
    trainer = make_trainer(client or FakeClient(make_batches(4)), output_dir, **({"max_steps": 1} | options))
    trainer.train()
    return trainer


def check_refused(output_dir: Path, says: str, *, error: type[Exception] = ValueError, **options: Any) -> None:
    """A resume raises an error of one line, and neither the model nor the server has changed."""
    client = FakeClient(make_batches(4))
    trainer = make_trainer(client, output_dir, resume=True, max_steps=2, **options)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with pytest.raises(error, match=rf"^{output_dir / 'step-1'}.*{says}$") as raised:
        trainer.train()
    assert "\n" not in str(raised.value)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert client.weights == ""


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "another type": (llama, r"model_type qwen2 \(here llama\)"),
    "a wider one": (lambda: qwen2(hidden_size=64), r"hidden_size 32 \(here 64\)"),
    "a deeper one": (lambda: qwen2(num_hidden_layers=3), r"num_hidden_layers 2 \(here 3\)"),
    "another vocabulary": (lambda: make_model(vocabulary=20), r"vocabulary 16 \(here 20\)"),
    "other heads": (lambda: qwen2(num_attention_heads=2), r"num_attention_heads 4 \(here 2\)"),
    "several": (lambda: llama(hidden_size=64), r"model_type qwen2 \(here llama\), hidden_size 32 \(here 64\)"),
}


@pytest.mark.parametrize("told", ["by its manifest", "by its config"])
@pytest.mark.parametrize(("make", "says"), OTHERS.values(), ids=OTHERS)
def test_a_resume_with_another_model_is_refused_by_each_fact_with_both_values(tmp_path, make, says, told):
    train(tmp_path / "run")
    if told == "by its config":
        path = tmp_path / "run/step-1/manifest.json"
        manifest = json.loads(path.read_text())
        del manifest["model"]
        path.write_text(json.dumps(manifest))
    check_refused(tmp_path / "run", rf"is of a run with another model: {says}; {REMEDY}", model=make())


def test_a_resume_with_a_model_of_the_same_sizes_and_other_tensors_is_refused_by_one_of_them(tmp_path):
    train(tmp_path / "run", model=llama(attention_bias=True))
    says = r"they differ in 8 tensors, such as 'model\.layers\.0\.self_attn\.k_proj\.bias'"
    check_refused(tmp_path / "run", rf"is of a run with another model: {says}; {REMEDY}", model=llama())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: llama(attention_bias=True), r"it lacks the weights 'model\.layers\.0\.self_attn\.q_proj\.bias'"),
        (lambda: llama(hidden_size=16), r"'model\.embed_tokens\.weight' has the shape \[16, 32\] \(here \[16, 16\]\)"),
    ],
    ids=["a missing tensor", "another shape"],
)
def test_a_rank_that_reads_its_part_of_another_model_names_the_first_tensor_that_differs(tmp_path, make, says):
    llama().save_pretrained(tmp_path / "step-1")
    with pytest.raises(ValueError, match=rf"^{tmp_path / 'step-1'} is of a run with another model: {says}$"):
        load_weights_of_rank(tmp_path / "step-1", make())


def exchanged(folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.get_vocab()
    tokenizer.backend_tokenizer.model = models.WordLevel(ids | {"+": ids["="], "=": ids["+"]}, "<unk>")
    return tokenizer


def test_a_resume_with_another_tokenizer_is_refused_and_with_an_extended_one_it_is_not(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    own = {"model": AutoModelForCausalLM.from_pretrained(folder)}
    train(tmp_path / "run", tokenizer=tokenizer, **own)
    says = rf"another model: tokenizer [0-9a-f]{{16}} \(here [0-9a-f]{{16}}\); {REMEDY}"
    check_refused(tmp_path / "run", says, tokenizer=exchanged(folder), **own)
    tokenizer.add_special_tokens({"pad_token": "<another pad>"})
    train(tmp_path / "run", resume=True, max_steps=2, tokenizer=tokenizer, **own)
    train(tmp_path / "run", resume=True, max_steps=3, tokenizer=None, **own)
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2, 3]


def with_adapter(base: Path, **options: Any) -> Any:
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | options
    torch.manual_seed(0)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**config))


ADAPTERS: dict[str, tuple[dict[str, Any], str]] = {
    "another rank": ({"r": 2}, r"lora_rank 4 \(here 2\)"),
    "another scale": ({"lora_alpha": 16}, r"lora_alpha 8 \(here 16\)"),
    "other layers": ({"target_modules": ["q_proj"]}, r"they differ in 4 tensors, such as .*v_proj"),
    "another rank of some": ({"rank_pattern": {"v_proj": 2}}, r".*v_proj.* has the shape \[4, 32\] \(here \[2, 32\]\)"),
}


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(("options", "says"), ADAPTERS.values(), ids=ADAPTERS)
def test_a_resume_with_another_adapter_is_refused_by_what_differs(tmp_path, options, says, merged):
    make_model().save_pretrained(tmp_path / "base")
    train(tmp_path / "run", model=with_adapter(tmp_path / "base"), merge_adapter=merged)
    model = with_adapter(tmp_path / "base", **options)
    check_refused(tmp_path / "run", rf"another .*: {says}.*; {REMEDY}", model=model, merge_adapter=merged)


def test_a_resume_of_an_adapter_on_another_base_is_refused(tmp_path):
    make_model().save_pretrained(tmp_path / "base")
    qwen2(hidden_size=64).save_pretrained(tmp_path / "other")
    train(tmp_path / "run", model=with_adapter(tmp_path / "base"))
    says = rf"another model: hidden_size 32 \(here 64\); {REMEDY}"
    check_refused(tmp_path / "run", says, model=with_adapter(tmp_path / "other"))


def test_a_resume_of_whole_weights_as_an_adapter_is_refused_with_the_remedy(tmp_path):
    make_model().save_pretrained(tmp_path / "base")
    train(tmp_path / "run")
    says = rf"is of a run that trains whole weights, and this one trains an adapter; {REMEDY}"
    check_refused(tmp_path / "run", says, model=with_adapter(tmp_path / "base"))


@pytest.mark.long
def test_replay_train_resume_with_another_model_prints_one_line(folder, tmp_path):
    other = make_model_with_tokenizer(tmp_path / "other")
    qwen2(vocab_size=27, hidden_size=48).save_pretrained(other)
    options = ["--output-dir", str(tmp_path / "run"), "--groups-per-step", "2", "--quiet"]
    with ReplayServer(DEFAULT_TABLES, port=0) as server:
        with ReplayClient(server.address) as client:
            for _ in range(4):
                client.insert(make_group(rewards=[1.0, 0.0]), {"rollouts": 1.0})
        done = run_replay("train", "--model", str(folder), "--max-steps", "1", *options, address=server.address)
        assert done.returncode == 0, done.stderr
        said = fails("train", "--model", str(other), "--max-steps", "2", "--resume", *options, address=server.address)
    assert said.strip().count("\n") == 0
    assert f"{tmp_path}/run/step-1 is of a run with another model: hidden_size 64 (here 48), " in said
    assert said.strip().endswith("the adapter of that run, or choose another --output-dir")
