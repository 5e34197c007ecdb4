"""Weights of another model than the engine's are refused before they are loaded, whoever published them and how."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from tokenizers import models
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, GPT2Config, LlamaConfig, Qwen2Config

from replay_client import AsyncReplayClient
from replay_client.records import read_described
from replay_client.testing import async_until
from replay_generator import WeightsMismatchError
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.engines.vllm_server import VLLMServerEngine
from replay_generator.engines.weights import model_facts
from replay_generator.testing import EOS, ScriptedEngine
from replay_server import ReplayServer
from replay_server.config import DEFAULT_TABLES
from replay_trainer.weights import Adapter, publish_weights
from tests.generator.engines.vllm_servers import answering, answers_for
from tests.generator.weights.test_remote import serving
from tests.kit.clients import RecordingClient
from tests.kit.generators import make_generator, running
from tests.kit.models import save_model, scores
from tests.kit.processes import free_port

PROBE_TOKENS = [3, 9, 4, 13]
SIZES: dict[str, Any] = {
    "vocab_size": 27,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
"""Those of the model that `make_model` makes."""


def qwen2(**sizes: Any) -> Any:
    return AutoModelForCausalLM.from_config(Qwen2Config(**(SIZES | sizes)))


def llama() -> Any:
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))


def gpt2() -> Any:
    return AutoModelForCausalLM.from_config(GPT2Config(vocab_size=40, n_embd=48, n_layer=3, n_head=3, n_positions=64))


def same(tokenizer: Any) -> None:
    """Leaves a tokenizer as it is."""


def exchanged(tokenizer: Any) -> None:
    """Two tokens have each other's ids."""
    ids = tokenizer.get_vocab()
    tokenizer.backend_tokenizer.model = models.WordLevel(ids | {"+": ids["="], "=": ids["+"]}, "<unk>")


def shorter(tokenizer: Any) -> None:
    ids = tokenizer.get_vocab()
    del ids["j"]
    tokenizer.backend_tokenizer.model = models.WordLevel(ids, "<unk>")


def with_padding(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"pad_token": "<another pad>"})


def with_more(tokenizer: Any) -> None:
    tokenizer.add_tokens(["<tool>", "☃"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})


OTHERS: dict[str, tuple[Callable[[], Any], Callable[[Any], None], str]] = {
    "another type": (llama, same, r"model_type llama \(here qwen2\)"),
    "another architecture": (gpt2, same, r"model_type gpt2 \(here qwen2\), vocabulary 40 \(here 27\), hidden_size 48 "),
    "a wider one": (lambda: qwen2(hidden_size=128), same, r"hidden_size 128 \(here 64\)"),
    "a deeper one": (lambda: qwen2(num_hidden_layers=3), same, r"num_hidden_layers 3 \(here 2\)"),
    "other heads": (lambda: qwen2(num_attention_heads=4), same, r"num_attention_heads 4 \(here 2\)"),
    "other keys": (lambda: qwen2(num_key_value_heads=2), same, r"num_key_value_heads 2 \(here 1\)"),
    "another MLP": (lambda: qwen2(intermediate_size=32), same, r"intermediate_size 32 \(here 64\)"),
    "another vocabulary": (lambda: qwen2(vocab_size=32), same, r"vocabulary 32 \(here 27\)"),
    "exchanged tokens": (qwen2, exchanged, r"tokenizer [0-9a-f]{16} \(here [0-9a-f]{16}\)"),
    "fewer tokens": (qwen2, shorter, r"tokenizer [0-9a-f]{16} \(here [0-9a-f]{16}\)"),
}


def tokenizer_of(base: Path, change: Callable[[Any], None]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(base)
    change(tokenizer)
    return tokenizer


def publish(model: Any, tokenizer: Any, folder: Path, version: int = 1) -> Path:
    """As a trainer of ours does, with the probe that its own model passes."""
    model.save_pretrained(folder / "whole")
    probe = {"token_ids": PROBE_TOKENS, "logprobs": scores(folder / "whole", PROBE_TOKENS)}
    published = publish_weights(model, tokenizer, folder, version=version, keep=9, probe=probe)
    shutil.rmtree(folder / "whole")
    return published


def publish_foreign(model: Any, tokenizer: Any, folder: Path, version: int = 1) -> Path:
    """As another trainer does: without a manifest."""
    published = publish(model, tokenizer, folder, version)
    (published / "manifest.json").unlink()
    return published


def publish_adapter(model: Any, tokenizer: Any, folder: Path, version: int = 1) -> Path:
    """A LoRA adapter of a model."""
    model.save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    adapter = Adapter(get_peft_model(base, config), merged=False)
    return publish_weights(
        adapter, tokenizer, folder, version=version, keep=9, probe=None, weights=dict(adapter.weights())
    )


WAYS = {"our trainer": publish, "another trainer": publish_foreign, "an adapter": publish_adapter}


def scripted(base: Path, **fields: Any) -> ScriptedEngine:
    """An engine that takes all weights, and agrees with every probe of theirs."""
    return ScriptedEngine(model=str(base), tokenizer=AutoTokenizer.from_pretrained(base), **fields)


async def check_refused(model: Path, folder: Path, says: str) -> None:
    client, engine = RecordingClient(), scripted(model)
    await client.publish(1, folder)
    with pytest.raises(WeightsMismatchError, match=rf"policy 1: {folder} is of another model than .*{model}: {says}"):
        await make_generator(client, engine, max_groups=1).run()
    assert engine.loaded == []
    assert engine.seeds == []


@pytest.mark.parametrize("other", OTHERS)
async def test_weights_of_another_model_are_refused_by_each_fact_with_both_values(model, tmp_path, other):
    make, change, says = OTHERS[other]
    await check_refused(model, publish(make(), tokenizer_of(model, change), tmp_path), says)


@pytest.mark.parametrize("way", ["another trainer", "an adapter"])
@pytest.mark.parametrize("other", ["another type", "a wider one", "exchanged tokens"])
async def test_weights_of_another_model_are_refused_whoever_published_them(model, tmp_path, other, way):
    make, change, says = OTHERS[other]
    await check_refused(model, WAYS[way](make(), tokenizer_of(model, change), tmp_path), says)


async def test_the_transformers_engine_does_not_become_another_model(model, tmp_path):
    """It could load these weights, and their probe would pass: only the tokenizer would be the wrong one."""
    folder = publish(gpt2(), AutoTokenizer.from_pretrained(model), tmp_path)
    client = RecordingClient()
    await client.publish(1, folder)
    with pytest.raises(
        WeightsMismatchError, match=r"model_type gpt2 \(here qwen2\).* with the same model and tokenizer"
    ):
        await make_generator(client, TransformersEngine(model, seed=0), max_groups=1).run()
    assert client.inserts == []


@pytest.mark.parametrize("way", ["our trainer", "another trainer"])
async def test_a_later_version_of_another_model_is_refused_too(model, tmp_path, way):
    own = AutoModelForCausalLM.from_pretrained(model)
    client, engine = RecordingClient(), scripted(model)
    await client.publish(1, publish(own, AutoTokenizer.from_pretrained(model), tmp_path))
    engine.probe_scores = scores(model, PROBE_TOKENS)
    task = await running(make_generator(client, engine))
    await client.inserted(1)
    await client.publish(2, WAYS[way](llama(), AutoTokenizer.from_pretrained(model), tmp_path, 2))
    with pytest.raises(WeightsMismatchError, match=r"policy 2: .*model_type llama \(here qwen2\)"):
        await asyncio.wait_for(task, 60)
    assert len(engine.loaded) == 1


async def test_weights_of_another_model_that_were_fetched_are_refused(model, tmp_path):
    port = free_port()
    publish(llama(), AutoTokenizer.from_pretrained(model), tmp_path / "served")
    client, engine = RecordingClient(), scripted(model)
    with serving(tmp_path / "served", port):
        await client.publish(1, f"http://127.0.0.1:{port}/step-1")
        config = {"weights_cache": tmp_path / "cache", "weights_root": f"http://127.0.0.1:{port}"}
        with pytest.raises(WeightsMismatchError, match=r"policy 1: .*model_type llama \(here qwen2\)"):
            await make_generator(client, engine, max_groups=1, **config).run()
    assert engine.loaded == []


@pytest.mark.parametrize("publish_other", [publish, publish_foreign])
async def test_a_vllm_server_is_not_asked_to_load_weights_of_another_model(model, tmp_path, publish_other):
    folder = publish_other(llama(), AutoTokenizer.from_pretrained(model), tmp_path)
    client = RecordingClient()
    await client.publish(1, folder)
    with answering(answers_for(model)) as (url, asked):
        engine = VLLMServerEngine(model, base_url=url, self_test=False)
        with pytest.raises(WeightsMismatchError, match=r"policy 1: .*model_type llama \(here qwen2\)"):
            await make_generator(client, engine, max_groups=1).run()
    assert "/collective_rpc" not in asked
    assert "/v1/completions" not in asked


def as_it_is(folder: Path) -> None:
    """Leaves a folder as it is."""


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def only_a_tokenizers_settings(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def written(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text)

    return write


KNOWN = {
    "as it is": as_it_is,
    "no config": no_config,
    "no tokenizer": no_tokenizer,
    "only a tokenizer's settings": only_a_tokenizers_settings,
    "a damaged config": written("config.json", "[1"),
    "a config of something else": written("config.json", "[1]"),
    "a type that nobody knows": written("config.json", json.dumps({"hidden_size": 64, "vocab_size": 27})),
    "a damaged tokenizer": written("tokenizer.json", '{"model": 5}'),
    "a damaged manifest": written("manifest.json", "{"),
    "a manifest of something else": written("manifest.json", '{"model": "some/name", "files": []}'),
    "a manifest that is a list": written("manifest.json", "[]"),
    "a nested manifest": written("manifest.json", "[" * 100_000),
    "a manifest without facts": written("manifest.json", '{"version": 1, "files": {}}'),
    "a manifest with facts of later versions": written(
        "manifest.json", '{"model": {"rotary_length": 77, "model_type": "qwen2"}}'
    ),
}


@pytest.mark.parametrize("how", KNOWN)
async def test_weights_of_the_same_model_are_accepted_by_what_is_known_of_them(model, tmp_path, how):
    own = AutoModelForCausalLM.from_pretrained(model)
    folder = publish_foreign(own, tokenizer_of(model, with_more), tmp_path)
    KNOWN[how](folder)
    client, engine = RecordingClient(), scripted(model, probe_scores=scores(model, PROBE_TOKENS))
    await client.publish(1, folder)
    await make_generator(client, engine, max_groups=1).run()
    assert engine.loaded == [str(folder)]


@pytest.mark.parametrize("change", [with_padding, with_more])
@pytest.mark.parametrize("way", WAYS)
async def test_a_tokenizer_that_the_trainer_extended_is_the_same(model, tmp_path, way, change):
    own = AutoModelForCausalLM.from_pretrained(model)
    client, engine = RecordingClient(), scripted(model, probe_scores=scores(model, PROBE_TOKENS))
    await client.publish(1, WAYS[way](own, tokenizer_of(model, change), tmp_path))
    await make_generator(client, engine, max_groups=1).run()
    assert len(engine.loaded) == 1


@pytest.mark.parametrize("manifest", [None, '{"model": {"id": "some/name"}}'])
async def test_another_tokenizer_is_found_in_a_folder_without_a_manifest_of_ours(model, tmp_path, manifest):
    folder = publish_foreign(AutoModelForCausalLM.from_pretrained(model), tokenizer_of(model, exchanged), tmp_path)
    no_config(folder)
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest)
    client, engine = RecordingClient(), scripted(model)
    await client.publish(1, folder)
    with pytest.raises(WeightsMismatchError, match=r"than .*: tokenizer [0-9a-f]{16} \(here [0-9a-f]{16}\); start"):
        await make_generator(client, engine, max_groups=1).run()


async def test_an_engine_that_tells_nothing_of_its_model_takes_all_weights(model, tmp_path):
    folder = publish(llama(), AutoTokenizer.from_pretrained(model), tmp_path)
    client, engine = RecordingClient(), ScriptedEngine(probe_scores=scores(folder, PROBE_TOKENS))
    await client.publish(1, folder)
    generator = make_generator(client, engine)
    task = await running(generator)
    await async_until(lambda: generator.stats["policy_version"] == 1)
    generator.stop()
    await task


def test_the_manifest_names_type_sizes_and_tokenizer(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    folder = publish(AutoModelForCausalLM.from_pretrained(model), tokenizer, tmp_path)
    told = json.loads((folder / "manifest.json").read_text())["model"]
    assert told == model_facts(str(model), tokenizer)
    sizes = {name: told[name] for name in SIZES if name in told}
    assert sizes == {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    assert told["model_type"] == "qwen2"
    assert told["vocabulary"] == 27


def test_facts_are_those_of_the_text_part_and_have_the_same_names_for_every_family(tmp_path):
    facts = model_facts(GPT2Config(vocab_size=40, n_embd=48, n_layer=3, n_head=3), None)
    assert facts == {
        "model_type": "gpt2",
        "vocabulary": 40,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
    }
    nested = {
        "model_type": "somebodys",
        "text_config": {"model_type": "somebodys_text", "vocab_size": 9, "hidden_size": 8},
    }
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert model_facts(str(tmp_path), None) == {"model_type": "somebodys_text", "vocabulary": 9, "hidden_size": 8}


@pytest.mark.parametrize("own", [{}, {"num_key_value_heads": [8] * 100}], ids=["many sizes", "a size for each layer"])
async def test_what_a_generator_tells_the_server_of_a_model_of_many_sizes_fits_and_names_the_model(tmp_path, own):
    config = DeepseekV3Config(vocab_size=129280).to_dict() | own  # transformers takes no list, but somebody's code may
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = model_facts(str(tmp_path), None)
    with ReplayServer(DEFAULT_TABLES, port=0) as server:
        async with AsyncReplayClient(server.address, name="gen") as client:
            engine = ScriptedEngine(model=str(tmp_path))
            await make_generator(client, engine, max_groups=1).run()
            (told,) = [read_described(each.settings) for each in (await client.server_info()).clients]
    assert told["part"] == "generator"
    assert told["model"]["model_type"] == "deepseek_v3"
    assert told["model"]["vocabulary"] == 129280
    assert told["model"]["hidden_size"] == 7168
    assert told["model"].items() < facts.items()


def test_a_model_that_was_made_anew_by_the_same_sizes_has_the_same_facts(tmp_path):
    first, second = save_model(tmp_path / "first"), save_model(tmp_path / "second", seed=5)
    facts = [model_facts(str(folder), AutoTokenizer.from_pretrained(folder)) for folder in (first, second)]
    assert facts[0] == facts[1]
