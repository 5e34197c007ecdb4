"""Models that transformers does not load as a causal language model: each door says so in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replay_generator.engines.transformers import TransformersEngine
from replay_generator.engines.weights import load_causal_model
from tests.kit.models import save_model
from tests.kit.processes import fails

OWN_CODE = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "a vision-language model": (
        {"model_type": "llava"},
        "no causal language model of the type 'llava': save its language model, of the type 'llama', in a folder of",
    ),
    "another one": (
        {"model_type": "mistral3"},
        "no causal language model of the type 'mistral3': save its language model, of the type 'mistral', in a folder",
    ),
    "one whose text model is none": (
        {"model_type": "qwen2_5_vl"},
        "no causal language model of the type 'qwen2_5_vl': take a text model",
    ),
    "an encoder with a decoder": (
        {"model_type": "t5"},
        "no causal language model of the type 't5': take a text model",
    ),
    "a model of sound": (
        {"model_type": "wav2vec2"},
        "no causal language model of the type 'wav2vec2': take a text model",
    ),
    "a type that nobody knows": (
        {"model_type": "of_tomorrow"},
        "no causal language model of the type 'of_tomorrow': install a version that has it, or take a type that",
    ),
    "a type with code of its own": (
        {"model_type": "of_somebody", "auto_map": OWN_CODE},
        "type 'of_somebody', and code that comes with a model is not run: take a type that transformers has",
    ),
    "code of its own for a known configuration": (
        {"model_type": "clip", "auto_map": OWN_CODE},
        "type 'clip', and code that comes with a model is not run: take a type that transformers has",
    ),
    "no type": ({}, "Should have a `model_type` key in its config.json"),
}


def check_sentence(said: str, folder: Path, words: str) -> None:
    assert f"{folder} cannot be loaded: " in said
    assert words in said
    assert len(said.strip().splitlines()) == 1
    assert len(said) < 300 + len(str(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer and weights, whose configuration is still to be written."""
    return save_model(tmp_path / "model")


@pytest.mark.parametrize(("config", "words"), KINDS.values(), ids=KINDS)
def test_a_model_of_another_kind_is_refused_in_one_sentence_with_the_remedy(folder, config, words):
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        load_causal_model(str(folder))
    check_sentence(str(caught.value), folder, words)


def test_the_transformers_engine_says_so(folder):
    config, words = KINDS["a vision-language model"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        TransformersEngine(folder)
    check_sentence(str(caught.value), folder, words)


@pytest.mark.parametrize(
    "command",
    [
        ("train", "--output-dir", "out"),
        ("generate", "--engine", "transformers", "--prompts", "prompts.jsonl", "--reward", "exact_match"),
    ],
    ids=["train", "generate"],
)
def test_the_commands_say_so(folder, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config, words = KINDS["a vision-language model"]
    (folder / "config.json").write_text(json.dumps(config))
    check_sentence(fails(*command, "--model", str(folder)), folder, words)


def test_settings_of_generation_that_transformers_does_not_take_are_named_in_one_sentence(folder):
    (folder / "generation_config.json").write_text('{"num_return_sequences": 2}')
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        load_causal_model(str(folder))
    check_sentence(str(caught.value), folder, "`num_return_sequences`")
