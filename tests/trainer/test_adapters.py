"""GRPOTrainer over a peft model: the adapter is trained, published and resumed, and the base never changes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from replay_client import ReplayClient
from replay_client.testing import make_group
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.engines.weights import Probe
from replay_server import ReplayServer
from replay_server.config import DEFAULT_TABLES
from replay_trainer import GRPOTrainer
from replay_trainer.weights import Adapter, published
from tests.kit.clients import FakeClient, OnlineClient
from tests.kit.models import assert_same_weights, make_model, probe_difference
from tests.kit.models import save_model as make_model_with_tokenizer
from tests.kit.processes import fails, run_replay
from tests.kit.trainers import Killed, killed_in, lines_of, make_batches, make_trainer


def lora(**options: Any) -> LoraConfig:
    few = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.3, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**(few | options))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    make_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def with_adapter(base: Path, config: Any = None, *, seed: int = 0) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(seed)
    return get_peft_model(model, config or lora())


def trainer_of(model: Any, client: FakeClient, output_dir: Path, **options: Any) -> GRPOTrainer:
    return make_trainer(client, output_dir, model=model, **({"learning_rate": 1e-2} | options))


def copies(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_only_the_adapter_is_trained_and_a_folder_holds_it_with_the_name_of_the_base(base, tmp_path):
    model = with_adapter(base)
    before = copies(model)
    trainer = trainer_of(model, FakeClient(make_batches(3)), tmp_path / "run")
    assert trainer.policy.route == "packed"
    assert not any(module.training for module in model.modules())
    trainer.train()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    folder = tmp_path / "run/step-3"
    assert not (folder / "model.safetensors").exists()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base.resolve())
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"]), folder)
    assert_same_weights(loaded, model)
    assert probe_difference(loaded, folder) < 1e-4
    assert probe_difference(AutoModelForCausalLM.from_pretrained(base), folder) > 1e-3


@pytest.mark.parametrize("merged", [False, True])
def test_the_engine_computes_with_a_published_version_what_the_trainer_does(tmp_path, merged):
    base = make_model_with_tokenizer(tmp_path / "base")
    model = with_adapter(base)
    trainer_of(model, FakeClient(make_batches(3)), tmp_path / "run", merge_adapter=merged).train()

    async def differences() -> list[float]:
        engine = TransformersEngine(base)
        found = []
        for version in (1, 2, 3):
            folder = str(tmp_path / f"run/step-{version}")
            await engine.load_weights(folder, version)
            probe = Probe.read(folder)
            assert probe is not None
            found.append(probe.max_difference(await engine.score(probe.token_ids)))
        await engine.close()
        return found

    assert max(asyncio.run(differences())) < 1e-4
    assert probe_difference(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run/step-3") > 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_with_merge_adapter_a_folder_holds_whole_weights_that_any_engine_loads(tmp_path, tied):
    client, folder = FakeClient(make_batches(3)), tmp_path / "run/step-3"
    make_model(tied=tied).save_pretrained(tmp_path / "base")
    model = with_adapter(tmp_path / "base")
    before = copies(model)
    trainer_of(model, client, tmp_path / "run", merge_adapter=True).train()
    assert not (folder / "adapter_config.json").exists()
    whole = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(whole, "peft_config")
    assert probe_difference(whole, folder) < 1e-4
    for name, tensor in model.state_dict().items():
        assert "lora_" in name or torch.equal(tensor, before[name]), name


MERGED_WRONG: dict[str, dict[str, Any]] = {
    "the head": {"target_modules": ["q_proj", "lm_head"]},
    "the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "both, with one adapter": {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "the head by a pattern": {"target_modules": r".*(lm_head|q_proj)"},
    "the head by DoRA": {"target_modules": ["lm_head"], "use_dora": True, "lora_dropout": 0.0},
    "the head by a parameter": {"target_modules": [], "target_parameters": ["lm_head.weight"], "lora_dropout": 0.0},
    "a copy of the head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "a copy of the embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "a copy of each": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens of the head": {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3, 4]}},
}
MERGED_RIGHT: dict[str, dict[str, Any]] = {
    "all linear layers, without the head": {"target_modules": "all-linear"},
    "one copy of both": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "tokens of both": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
    "a parameter of a layer": {"target_modules": [], "target_parameters": ["q_proj.weight"], "lora_dropout": 0.0},
    "a copy of a norm": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
}
"""What an adapter changes in a model whose embedding and head are one weight."""


def with_random_adapter(base: Path, options: dict[str, Any]) -> Any:
    """As some steps of training leave it."""
    model = with_adapter(base, lora(**options))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.copy_(torch.randn(weight.shape, generator=random) * 0.2)
    return model


def check_versions(base: Path, directory: Path) -> None:
    """The engine computes with the published versions what the trainer does."""

    async def differences() -> list[float]:
        engine = TransformersEngine(base)
        found = []
        for folder in published(directory):
            await engine.load_weights(str(folder), 1)
            probe = Probe.read(str(folder))
            assert probe is not None
            found.append(probe.max_difference(await engine.score(probe.token_ids)))
        await engine.close()
        return found

    assert max(asyncio.run(differences())) < 1e-4


@pytest.mark.parametrize("options", MERGED_WRONG.values(), ids=MERGED_WRONG)
def test_an_adapter_that_no_merged_weight_can_hold_is_refused_at_the_start(tmp_path, options):
    base = make_model_with_tokenizer(tmp_path / "base", tied=True, sharpness=1.0)
    model = with_random_adapter(base, options)
    words = (
        r"^model\.embed_tokens and lm_head share one weight, and the adapter changes .*: leave .* merge_adapter=False$"
    )
    with pytest.raises(ValueError, match=words):
        trainer_of(model, FakeClient(), tmp_path / "run", merge_adapter=True)
    assert not (tmp_path / "run").exists()
    # Engines add the adapter itself to the head and the embedding, each for itself.
    trainer_of(model, FakeClient(make_batches(1)), tmp_path / "run", max_steps=1).train()
    check_versions(base, tmp_path / "run")


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("options", MERGED_RIGHT.values(), ids=MERGED_RIGHT)
def test_other_adapters_of_a_tied_model_are_published_either_way(tmp_path, options, merged):
    base = make_model_with_tokenizer(tmp_path / "base", tied=True, sharpness=1.0)
    model = with_random_adapter(base, options)
    trainer_of(model, FakeClient(make_batches(1)), tmp_path / "run", max_steps=1, merge_adapter=merged).train()
    check_versions(base, tmp_path / "run")


def test_an_adapter_of_a_head_with_its_own_weight_is_merged(tmp_path):
    base = make_model_with_tokenizer(tmp_path / "base", sharpness=1.0)
    model = with_random_adapter(base, MERGED_WRONG["both"])
    trainer_of(model, FakeClient(make_batches(1)), tmp_path / "run", max_steps=1, merge_adapter=True).train()
    check_versions(base, tmp_path / "run")


def test_weights_that_other_modules_share_are_refused_too(base, tmp_path):
    def shared() -> Any:
        model = AutoModelForCausalLM.from_pretrained(base)
        first, second = (layer.mlp for layer in model.model.layers)
        second.up_proj.weight = first.up_proj.weight
        return model

    def trainer(target: str) -> GRPOTrainer:
        model = get_peft_model(shared(), lora(target_modules=target))
        return trainer_of(model, FakeClient(), tmp_path / "run", merge_adapter=True)

    first, second = r"model\.layers\.0\.mlp\.up_proj", r"model\.layers\.1\.mlp\.up_proj"
    words = f"{first} and {second} share one weight, and the adapter changes {second} alone"
    with pytest.raises(ValueError, match=words):
        trainer(r".*1\.mlp\.up_proj")
    trainer(r".*down_proj")


def test_replay_train_refuses_such_an_adapter_in_one_line(tmp_path):
    make_model_with_tokenizer(tmp_path / "base", tied=True)
    (tmp_path / "train.toml").write_text('merge_adapter = true\n[lora]\ntarget_modules = ["q_proj", "lm_head"]\n')
    options = ["--config", str(tmp_path / "train.toml"), "--output-dir", str(tmp_path / "out")]
    said = fails("train", "--model", str(tmp_path / "base"), *options)
    assert "model.embed_tokens and lm_head share one weight, and the adapter changes lm_head alone" in said
    assert "leave lm_head out" in said


@pytest.mark.parametrize("merged", [False, True])
def test_a_run_that_stops_and_is_resumed_ends_with_the_same_adapter(base, tmp_path, merged):
    options: dict[str, Any] = {"max_steps": 4, "merge_adapter": merged}
    whole = with_adapter(base)
    trainer_of(whole, FakeClient(make_batches(4)), tmp_path / "whole", **options).train()

    client = FakeClient(make_batches(4))
    with pytest.raises(Killed):
        trainer_of(with_adapter(base), client, tmp_path / "run", on_step=killed_in(3), **options).train()
    assert client.version == 2
    resumed = with_adapter(base, seed=7)  # another start; the state replaces it
    trainer_of(resumed, client, tmp_path / "run", resume=True, **options).train()
    assert_same_weights(resumed, whole)


def test_an_adapter_of_layers_and_head_learns_a_task(base, tmp_path):
    model = with_adapter(base, lora(r=8, target_modules=["q_proj", "down_proj", "lm_head"]))
    client = OnlineClient(model, prompts=[[5], [9]], group_size=8)
    options: dict[str, Any] = {"max_steps": 60, "learning_rate": 3e-2, "groups_per_step": 4, "publish_every": 60}
    trainer_of(model, client, tmp_path / "run", **options).train()
    rewards = [line["fresh/reward_mean"] for line in lines_of(tmp_path / "run")]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.3


def test_the_reference_of_the_kl_is_the_base_model_without_the_adapter(base, tmp_path):
    """The same losses as with a second model, which the trainer keeps for whole weights."""
    losses = {}
    for own_reference in (False, True):
        model = with_adapter(base)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
        folder = tmp_path / f"run-{own_reference}"
        trainer = trainer_of(model, FakeClient(make_batches(3)), folder, beta=0.3)
        assert trainer.reference is trainer.policy
        if own_reference:
            # What a trainer of whole weights would keep.
            plain = trainer_of(AutoModelForCausalLM.from_pretrained(base), FakeClient(), tmp_path / "plain", beta=0.3)
            trainer.reference = plain.reference
        trainer.train()
        losses[own_reference] = [(line["train/loss"], line["train/kl"]) for line in lines_of(folder)]
    assert losses[False][0][1] > 0.01
    for alone, with_model in zip(losses[False], losses[True], strict=True):
        assert alone == pytest.approx(with_model, abs=1e-4)


def test_what_cannot_be_trained_or_published_is_refused_in_one_line(base, tmp_path):
    def refuse(model: Any, words: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=words):
            trainer_of(model, FakeClient(make_batches(1)), tmp_path / "run", **options)

    refuse(get_peft_model(make_model(), lora()), "no name, .* merge_adapter=True")
    refuse(make_model(), "merge_adapter=True is for a peft model", merge_adapter=True)
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    refuse(with_adapter(base, prompts), "'default' is PROMPT_TUNING")
    frozen = with_adapter(base)
    frozen.save_pretrained(tmp_path / "saved")
    refuse(
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "saved"), "is_trainable=True"
    )
    injected = AutoModelForCausalLM.from_pretrained(base)
    injected.add_adapter(lora())
    refuse(injected, "PeftModel")
    refuse(torch.nn.DataParallel(make_model()), "the model itself, not a DataParallel around it")


def test_a_base_without_a_name_is_not_taken_for_the_present_folder():
    adapter = Adapter(get_peft_model(make_model(), lora()), merged=True)
    assert adapter._config.base_model_name_or_path == ""


def test_a_resume_with_another_kind_of_weights_is_refused(base, tmp_path):
    client = FakeClient(make_batches(4))
    trainer_of(with_adapter(base), client, tmp_path / "run", max_steps=1).train()
    assert [folder.name for folder in published(tmp_path / "run")] == ["step-0", "step-1"]
    plain = AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(ValueError, match="is of a run that trains an adapter, and this one trains whole weights"):
        trainer_of(plain, client, tmp_path / "run", resume=True).train()
    smaller = with_adapter(base, lora(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"another adapter: they differ in 24 tensors, such as .* adapter of that run"):
        trainer_of(smaller, client, tmp_path / "run", resume=True).train()


@pytest.mark.long
def test_replay_train_makes_an_adapter_by_its_file_and_goes_on_with_it(tmp_path):
    base = make_model_with_tokenizer(tmp_path / "base")
    (tmp_path / "new.toml").write_text("groups_per_step = 2\nmax_steps = 2\nreport_to = []\n[lora]\nr = 3\n")
    (tmp_path / "more.toml").write_text(
        f'groups_per_step = 2\nmax_steps = 1\nreport_to = []\n[lora]\nadapter = "{tmp_path}/new/step-2"\n'
    )
    with ReplayServer(DEFAULT_TABLES, port=0) as server:

        def train(name: str) -> Any:
            with ReplayClient(server.address) as client:
                client.set_policy_version(0, rollback=True)
                for _ in range(8):
                    client.insert(make_group(rewards=[1.0, 0.0]), {"rollouts": 1.0})
            options = ["--config", str(tmp_path / f"{name}.toml"), "--output-dir", str(tmp_path / name), "--quiet"]
            done = run_replay("train", "--model", str(base), *options, address=server.address)
            assert done.returncode == 0, done.stderr
            return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), published(tmp_path / name)[-1])

        first, second = train("new"), train("more")
    for model in (first, second):
        assert model.peft_config["default"].r == 3
    changed = [name for name, tensor in second.state_dict().items() if not tensor.equal(first.state_dict()[name])]
    assert changed
    assert all("lora_" in name for name in changed)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        pytest.param(
            "lora = 16",
            "lora is a section of the file: [lora], with r = 16 below it, not lora = 16",
            marks=pytest.mark.long,
        ),
        ("[lora]\nlora_alfa = 4", "[lora]: there is no 'lora_alfa'; did you mean 'lora_alpha'?"),
        pytest.param('[lora]\nadapter = "a"\nr = 4', "leave out the others", marks=pytest.mark.long),
        pytest.param(
            '[lora]\nadapter = "nowhere"', "the folder nowhere holds no adapter_config.json", marks=pytest.mark.long
        ),
        pytest.param('[lora]\ntarget_modules = ["no_such"]', "no_such", marks=pytest.mark.long),
    ],
    ids=[
        "no section",
        "a misspelt field",
        "fields beside an adapter",
        "no adapter there",
        "modules that are not there",
    ],
)
def test_an_adapter_that_cannot_be_made_is_refused_in_one_line(tmp_path, section, words):
    make_model_with_tokenizer(tmp_path / "base")
    (tmp_path / "train.toml").write_text(section)
    options = ["--config", str(tmp_path / "train.toml"), "--output-dir", str(tmp_path / "out")]
    status = 1 if words == "no_such" else 2  # the model has no such modules
    assert words in fails("train", "--model", str(tmp_path / "base"), *options, status=status)
