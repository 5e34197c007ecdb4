"""generation_config.json of published folders: one for a run, that of the model with which it began."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig

from replay_client import ReplayClient
from replay_client.testing import make_group
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.engines.weights import Probe
from replay_server import ReplayServer
from replay_server.config import DEFAULT_TABLES
from replay_trainer.weights import WholeModel
from tests.kit.clients import FakeClient
from tests.kit.models import make_model
from tests.kit.models import save_model as make_folder
from tests.kit.processes import run_replay
from tests.kit.trainers import make_batches, make_trainer

NAME = "generation_config.json"
A_TEMPERATURE = b'{"eos_token_id": [2, 1],\n "temperature": 0.6}\n'
"""transformers loads it, and refuses to save it: there is no do_sample."""

CONTENTS = {
    "a temperature without do_sample": A_TEMPERATURE,
    "all of sampling, without do_sample": b'{"top_p":0.9,"top_k":20,"min_p":0.1,"typical_p":0.5,"top_h":0.2}',
    "do_sample false beside a temperature": b'{"do_sample": false, "temperature": 0.1}',
    "settings of beams without beams": b'{"early_stopping": true, "length_penalty": 2.0}',
    "outputs without a dictionary": b'{"output_scores": true, "output_attentions": true}',
    "a token for padding below 0": b'{"pad_token_id": -1}',
    "a cache and no cache": b'{"use_cache": false, "cache_implementation": "static"}',
    "what transformers does not know": b'{"attn_temperature_tuning": true, "of": {"somebody": ["else"]}}',
    "what another version wrote": b'{"_from_model_config": true, "transformers_version": "4.31.0", "top_p": 0.8}\r\n',
    "what transformers would leave out": b'{"temperature": 1.0, "num_beams": 1, "do_sample": null}    ',
    "nothing": b"{}",
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    make_model().save_pretrained(folder)
    (folder / NAME).write_bytes(A_TEMPERATURE)
    return folder


def train(model: Any, output_dir: Path, steps: int = 1, **options: Any) -> None:
    client = FakeClient(make_batches(steps), version=0)
    make_trainer(client, output_dir, model=model, max_steps=steps, keep_weights=9, **options).train()


def resume(model: Any, output_dir: Path, steps: int, **options: Any) -> None:
    client = FakeClient(make_batches(steps), version=steps - 1)
    client.weights = str(output_dir.resolve() / f"step-{steps - 1}")
    make_trainer(client, output_dir, model=model, max_steps=steps, keep_weights=9, resume=True, **options).train()


def files(directory: Path) -> dict[str, bytes]:
    """The file of each version."""
    return {path.parent.name: path.read_bytes() for path in directory.glob(f"step-*/{NAME}")}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_each_version_has_the_file_of_the_model_byte_for_byte(base, tmp_path, content):
    (base / NAME).write_bytes(content)
    train(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run")
    assert files(tmp_path / "run") == {"step-0": content, "step-1": content}


def with_adapter(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


def test_so_have_versions_of_an_adapter_that_is_merged(base, tmp_path):
    train(with_adapter(AutoModelForCausalLM.from_pretrained(base)), tmp_path / "run", merge_adapter=True)
    assert files(tmp_path / "run") == {"step-0": A_TEMPERATURE, "step-1": A_TEMPERATURE}


@pytest.mark.parametrize("publish", ["full", "delta"])
def test_so_have_versions_for_the_engines_in_a_folder_of_their_own(base, tmp_path, publish):
    model = AutoModelForCausalLM.from_pretrained(base)
    train(model, tmp_path / "run", weights_dir=tmp_path / "weights", publish=publish)
    assert files(tmp_path / "weights") == {"step-0": A_TEMPERATURE, "step-1": A_TEMPERATURE}
    assert set(files(tmp_path / "run").values()) == {A_TEMPERATURE}


@pytest.mark.parametrize("merged", [False, True])
def test_a_run_that_is_resumed_goes_on_with_the_file_that_it_began_with(base, tmp_path, merged):
    def load() -> Any:
        model = AutoModelForCausalLM.from_pretrained(base)
        return with_adapter(model) if merged else model

    train(load(), tmp_path / "run", merge_adapter=merged)
    (base / NAME).write_text('{"temperature": 0.1, "top_k": 3}')  # on the hub, a model may change any day
    resume(load(), tmp_path / "run", 2, merge_adapter=merged)
    (base / NAME).unlink()
    resume(load(), tmp_path / "run", 3, merge_adapter=merged)
    assert files(tmp_path / "run") == dict.fromkeys(["step-0", "step-1", "step-2", "step-3"], A_TEMPERATURE)


def test_a_run_with_a_model_of_the_hub_has_the_file_of_its_cache(base, tmp_path, monkeypatch):
    cache = tmp_path / "hub"
    repository = cache / "models--somebody--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    base.rename(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    train(AutoModelForCausalLM.from_pretrained("somebody/model", local_files_only=True), tmp_path / "run")
    assert files(tmp_path / "run") == {"step-0": A_TEMPERATURE, "step-1": A_TEMPERATURE}


def test_a_token_for_padding_that_a_program_sets_does_not_count_as_a_change(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.generation_config.pad_token_id = 0
    train(model, tmp_path / "run")
    assert files(tmp_path / "run") == {"step-0": A_TEMPERATURE, "step-1": A_TEMPERATURE}


def test_settings_that_were_changed_in_code_are_published_with_the_others(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.generation_config.eos_token_id = 5
    train(model, tmp_path / "run")
    for content in files(tmp_path / "run").values():
        settings = json.loads(content)
        assert settings["eos_token_id"] == 5
        assert settings["temperature"] == 0.6
    assert len(files(tmp_path / "run")) == 2


SETTINGS: dict[str, dict[str, Any]] = {
    "a temperature without do_sample": {"temperature": 0.6},
    "several completions without sampling": {"num_return_sequences": 4},
    "no tokens": {"max_new_tokens": 0},
    "a cache that is none": {"cache_implementation": "no such"},
    "beams that end at some time": {"early_stopping": "sometimes"},
    "of somebody else": {"streamer": "an argument of generate", "mine": {"a": 1}},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_model_without_a_file_is_published_and_resumed_whatever_its_settings(tmp_path, settings):
    base = make_folder(tmp_path / "base")
    (base / NAME).unlink()

    def load() -> Any:
        model = AutoModelForCausalLM.from_pretrained(base)
        model.config.name_or_path = model.name_or_path = ""  # as if it were made in code
        for name, value in settings.items():
            setattr(model.generation_config, name, value)
        return model

    train(load(), tmp_path / "run")
    resume(load(), tmp_path / "run", 2)
    assert len(files(tmp_path / "run")) == 3
    for content in files(tmp_path / "run").values():
        assert json.loads(content).items() >= settings.items()

    async def difference() -> float:
        engine = TransformersEngine(base)
        await engine.load_weights(str(tmp_path / "run/step-2"), 2)
        probe = Probe.read(str(tmp_path / "run/step-2"))
        assert probe is not None
        scores = await engine.score(probe.token_ids)
        await engine.close()
        return probe.max_difference(scores)

    assert asyncio.run(difference()) < 1e-4


def test_an_evaluation_that_changes_settings_meanwhile_changes_no_version(tmp_path):
    model = make_model()
    model.generation_config.eos_token_id = 1

    def evaluate(trainer: Any) -> dict[str, float]:
        trainer.model.generation_config = GenerationConfig(eos_token_id=9, temperature=0.2)
        return {}

    train(model, tmp_path / "run", steps=2, evaluate=evaluate, eval_every=1)
    contents = files(tmp_path / "run")
    assert len(contents) == 3
    assert len(set(contents.values())) == 1
    assert json.loads(contents["step-2"])["eos_token_id"] == 1
    assert model.generation_config.eos_token_id == 9


def test_the_model_itself_is_left_as_it_is(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    before = model.generation_config
    train(model, tmp_path / "run")
    assert model.generation_config is before
    assert model.generation_config.temperature == 0.6
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run/step-1")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])


@pytest.mark.long
def test_replay_train_publishes_the_file_and_so_does_its_resume(tmp_path):
    base = make_folder(tmp_path / "base")
    (base / NAME).write_bytes(A_TEMPERATURE)
    options = ["--model", str(base), "--output-dir", str(tmp_path / "run"), "--groups-per-step", "2", "--quiet"]
    with ReplayServer(DEFAULT_TABLES, port=0) as server, ReplayClient(server.address) as client:
        for steps in ("1", "2"):
            for _ in range(4):
                client.insert(make_group(rewards=[1.0, 0.0]), {"rollouts": 1.0})
            done = run_replay("train", *options, "--max-steps", steps, "--resume", address=server.address)
            assert done.returncode == 0, done.stderr
    contents = files(tmp_path / "run")
    assert "step-2" in contents
    assert set(contents.values()) == {A_TEMPERATURE}


def test_a_model_that_cannot_generate_is_saved_without_the_file(tmp_path):
    body = make_model().model  # has no head
    WholeModel(body).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / NAME).exists()
