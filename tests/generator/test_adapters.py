"""LoRA adapters in the transformers engine: each token is drawn from the base with the adapter of its version."""

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from replay_generator import GeneratorConfig, RolloutGenerator
from replay_generator.engines import EngineError, SamplingConfig
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.engines.vllm_http import Weights
from tests.kit.clients import RecordingClient
from tests.kit.engines import check_completion, check_scores
from tests.kit.generators import make_prompts
from tests.kit.models import make_adapter, make_version, save_model, scores

TOKENS = [3, 9, 4, 13, 5]


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(model, seed=0)
    yield engine
    await engine.close()


async def test_adapters_replace_each_other_on_the_same_base(engine, model, adapters, tmp_path):
    assert max(abs(a - b) for a, b in zip(scores(adapters[0], TOKENS), scores(model, TOKENS), strict=True)) > 0.1
    for version, adapter in enumerate([*adapters, adapters[0]], start=1):
        await engine.load_weights(str(adapter), version)
        await check_scores(engine, adapter)
        (completion,) = await engine.generate([3, 9], SamplingConfig(max_tokens=8), 1)
        check_completion(completion, [3, 9], SamplingConfig(), adapter)
        assert set(completion.policy_versions) == {version}
    # Whole weights take the adapter away, and the next adapter is again one of the base.
    whole = make_version(model, tmp_path / "whole")
    for weights in (whole, adapters[1]):
        await engine.load_weights(str(weights), 9)
        await check_scores(engine, weights)


async def test_a_completion_under_way_goes_on_with_the_new_adapter(engine, model, adapters):
    await engine.load_weights(str(adapters[0]), 1)
    sampling = SamplingConfig(temperature=0.7, max_tokens=50, seed=3)
    tasks = [asyncio.create_task(engine.generate([3 + number], sampling, 4)) for number in range(8)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await engine.load_weights(str(adapters[1]), 2)
    groups = await asyncio.gather(*tasks)
    for number, completions in enumerate(groups):
        for completion in completions:
            check_completion(completion, [3 + number], sampling, {1: adapters[0], 2: adapters[1]})


async def test_the_generator_checks_an_adapter_with_its_probe(model, adapters, tmp_path):
    async def run(weights: Path) -> RecordingClient:
        client = RecordingClient()
        await client.publish(1, weights)
        generator = RolloutGenerator(
            client,  # type: ignore[arg-type]
            TransformersEngine(model, seed=0),
            make_prompts(),
            lambda row, text: len(text),
            GeneratorConfig(group_size=2, sampling=SamplingConfig(max_tokens=4)),
        )
        task = asyncio.create_task(generator.run())
        arrived = asyncio.create_task(client.inserted(1))
        await asyncio.wait([task, arrived], return_when=asyncio.FIRST_COMPLETED)
        generator.stop()
        arrived.cancel()
        await task
        return client

    assert (await run(adapters[0])).inserts[0][0].policy_version == 1
    # An adapter of another base: the tensors fit, and the probe says that the result is something else.
    other = make_adapter(save_model(tmp_path / "base", seed=5), tmp_path / "step-1")
    with pytest.raises(Exception, match="differ by up to"):
        await run(other)


async def test_a_folder_that_is_gone_or_no_lora_adapter_leaves_the_engine_as_it_was(
    engine, adapters, tmp_path, monkeypatch
):
    await engine.load_weights(str(adapters[0]), 1)
    with pytest.raises(FileNotFoundError, match="gone"):
        await engine.load_weights(str(tmp_path / "gone"), 2)
    half = shutil.copytree(adapters[1], tmp_path / "half")
    (half / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no adapter_config\.json"):
        await engine.load_weights(str(half), 2)
    kind = shutil.copytree(adapters[1], tmp_path / "kind")
    config = json.loads((kind / "adapter_config.json").read_text())
    (kind / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3", "task_type": config["task_type"]}))
    with pytest.raises(ValueError, match=r"kind .*IA3"):
        await engine.load_weights(str(kind), 2)
    await check_scores(engine, adapters[0])
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "peft", None)
        with pytest.raises(ModuleNotFoundError, match=r"peft is not installed: pip install '\.\[lora\]'"):
            await engine.load_weights(str(adapters[1]), 2)
    await check_scores(engine, adapters[0])


async def test_an_adapter_of_a_larger_model_is_refused_by_the_name_of_a_tensor(engine, adapters, tmp_path):
    other = shutil.copytree(adapters[0], tmp_path / "other")
    tensors = load_file(other / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.7.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 64)
    save_file(tensors, other / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"no place for '.*layers\.7\.mlp\.up_proj"):
        await engine.load_weights(str(other), 1)


@pytest.mark.parametrize("before", ["base", "adapter", "whole weights"])
async def test_an_adapter_that_does_not_fit_leaves_the_engine_as_it_was(engine, model, adapters, tmp_path, before):
    weights = model
    if before == "adapter":
        weights = adapters[1]
    elif before == "whole weights":
        weights = make_version(model, tmp_path / "whole")
    if before != "base":
        await engine.load_weights(str(weights), 1)
    for change in ("surplus", "shape"):
        other = shutil.copytree(adapters[0], tmp_path / change)
        tensors = load_file(other / "adapter_model.safetensors")
        if change == "surplus":
            tensors["base_model.model.model.layers.7.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 64)
        else:
            last = list(tensors)[-1]
            tensors[last] = torch.zeros(3, 3)
        save_file(tensors, other / "adapter_model.safetensors")
        with pytest.raises((ValueError, EngineError)):
            await engine.load_weights(str(other), 2)
        await check_scores(engine, weights)
        (completion,) = await engine.generate([3, 9], SamplingConfig(max_tokens=8), 1)
        check_completion(completion, [3, 9], SamplingConfig(), weights)
    await engine.load_weights(str(adapters[0]), 2)
    await check_scores(engine, adapters[0])


def test_an_adapter_is_no_base_model_and_nothing_for_a_vllm_server(adapters):
    with pytest.raises(ValueError, match="holds an adapter: start the engine with its base model"):
        TransformersEngine(adapters[0])
    with pytest.raises(ValueError, match="merge_adapter=True"):
        Weights.of(str(adapters[0]), 1)
