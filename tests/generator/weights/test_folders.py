"""Folders of weights that are refused before an engine is touched, and those that are not."""

import asyncio
import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from replay_client.testing import async_until
from replay_generator import WeightsDamagedError, WeightsNotAllowedError
from replay_generator.engines import SamplingConfig
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.engines.weights import _files
from replay_generator.testing import ScriptedEngine
from tests.kit.clients import RecordingClient
from tests.kit.generators import make_generator, running
from tests.kit.models import fake_weights, make_adapter, make_version, save_model


@pytest.mark.parametrize("where", ["outside", "inside/../outside", "inside/link", "inside-not", "."])
async def test_weights_outside_the_root_are_not_touched_and_end_the_run(tmp_path, where):
    (tmp_path / "inside").mkdir()
    fake_weights(tmp_path / "outside", probe=[-0.5])
    fake_weights(tmp_path / "inside-not", probe=[-0.5])
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "outside")
    client, engine = RecordingClient(), ScriptedEngine(probe_scores=[-0.5])
    await client.publish(1, tmp_path / where)
    with pytest.raises(WeightsNotAllowedError, match=r"policy 1: .*weights_root .*inside.*--weights-root"):
        await make_generator(client, engine, max_groups=1, weights_root=tmp_path / "inside").run()
    assert engine.loaded == []
    await make_generator(client, engine, max_groups=1, weights_root=tmp_path).run()
    assert len(engine.loaded) == 1


@pytest.mark.parametrize("how", ["link", "linked probe", "index"])
async def test_a_file_of_a_version_that_is_outside_the_root_is_not_read(model, tmp_path, how):
    inside, outside = make_version(model, tmp_path / "run" / "step-1"), make_version(model, tmp_path / "elsewhere")
    name = "probe.json" if how == "linked probe" else "model.safetensors"
    (inside / name).unlink()
    if how == "index":
        index = {"metadata": {}, "weight_map": {"model.norm.weight": "../../elsewhere/model.safetensors"}}
        (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        (inside / name).symlink_to(outside / name)
    client, engine = RecordingClient(), ScriptedEngine()
    await client.publish(1, inside)
    says = rf"policy 1: .*there, {'model.safetensors' if how == 'index' else name} leads to .*elsewhere.*--weights-root"
    with pytest.raises(WeightsNotAllowedError, match=says):
        await make_generator(client, engine, max_groups=1, weights_root=tmp_path / "run").run()
    assert engine.loaded == []


def test_an_index_that_is_nested_too_deeply_names_no_files(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[" * 100_000)
    assert list(_files(tmp_path)) == [index]


def damage(folder: Path, how: str) -> Path:
    """Lets the weights of a folder lack a tensor, hold NaN where few tokens meet it, or end in the middle."""
    file = folder / "model.safetensors"
    if how == "cut off":
        file.write_bytes(file.read_bytes()[:-1000])
        return folder
    tensors = load_file(file)
    if how == "lacks":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif how != "none":
        tensors = {name: tensor.to(getattr(torch, how)) for name, tensor in tensors.items()}
        tensors["model.embed_tokens.weight"][25, 3] = math.nan
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("lacks", r"lacks 'model\.layers\.1\.mlp\.up_proj\.weight' \(1 of the tensors that .*old ones"),
        (
            "float32",
            r"step-1/model\.safetensors holds NaN or infinity in 'model\.embed_tokens\.weight': .* lower learning",
        ),
        ("bfloat16", "holds NaN or infinity in 'model.embed_tokens.weight'"),
        ("float16", "holds NaN or infinity in 'model.embed_tokens.weight'"),
        ("cut off", r"model\.safetensors is no whole safetensors file: it is cut off after \d+ bytes"),
    ],
)
async def test_damaged_weights_without_a_probe_end_the_run_and_are_not_loaded(model, tmp_path, how, says):
    client, engine = RecordingClient(), TransformersEngine(model, seed=0)
    await client.publish(1, damage(make_version(model, tmp_path / "step-1", probe=False), how))
    with pytest.raises(WeightsDamagedError, match=f"policy 1: .*{says}"):
        await make_generator(client, engine, max_groups=1).run()
    assert client.inserts == []


def other_tensors(folder: Path, *left_out: str, parts: int = 1, prefix: str = "", **added: torch.Tensor) -> Path:
    """Writes the weights of a folder anew: some left out, some added, in several files with an index."""
    tensors = load_file(folder / "model.safetensors") | {name.replace("__", "."): each for name, each in added.items()}
    tensors = {prefix + name: each for name, each in tensors.items() if name not in left_out}
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{index % parts + 1:05}-of-{parts:05}.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        part = {name: each for name, each in tensors.items() if files[name] == file}
        save_file(part, folder / ("model.safetensors" if parts == 1 else file), metadata={"format": "pt"})
    if parts > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("how", ["untied", "tied", "tied, with its head", "tied, the model with its head", "in parts"])
async def test_whole_weights_are_loaded(tmp_path, how, probe):
    base = save_model(tmp_path / "model", tied="tied" in how.split(", ")[0].split())
    folder = make_version(base, tmp_path / "step-1", probe=probe)
    if "its head" in how:
        with_head = base if "model" in how else folder
        tensors = load_file(with_head / "model.safetensors")
        other_tensors(with_head, lm_head__weight=tensors["model.embed_tokens.weight"].clone())
    if how == "in parts":
        other_tensors(folder, parts=3)
    client = RecordingClient()
    await client.publish(1, folder)
    await make_generator(client, TransformersEngine(base), max_groups=1, sampling=SamplingConfig(max_tokens=4)).run()
    assert client.inserts[0][0].policy_version == 1


EXTRA = {"model__layers__2__mlp__up_proj__weight": torch.zeros(64, 64)}


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
async def test_weights_with_a_tensor_that_the_model_has_not_end_the_run_and_are_not_loaded(
    model, tmp_path, parts, probe
):
    client, engine = RecordingClient(), ScriptedEngine(model=str(model))
    await client.publish(1, other_tensors(make_version(model, tmp_path / "step-1", probe=probe), parts=parts, **EXTRA))
    with pytest.raises(
        WeightsDamagedError, match=r"policy 1: .*step-1 has 'model\.layers\.2\.mlp.*' \(1 of its tensors\)"
    ):
        await make_generator(client, engine, max_groups=1).run()
    assert engine.loaded == []


async def test_after_weights_that_passed_their_probe_others_have_the_same_tensors(model, tmp_path):
    """Those of another naming, and without what nobody trains, pass as well: their probe says that they work."""
    client, engine = RecordingClient(), ScriptedEngine(model=str(model), probe_scores=[-0.5])

    async def publish(version: int, *left_out: str) -> None:
        folder = make_version(model, tmp_path / f"step-{version}", probe=False)
        (folder / "probe.json").write_text(json.dumps({"token_ids": [3, 9], "logprobs": [-0.5]}))
        await client.publish(version, other_tensors(folder, *left_out, prefix="policy."))

    await publish(1, "model.norm.weight")
    generator = make_generator(client, engine)
    task = await running(generator)
    await async_until(lambda: generator.stats["policy_version"] == 1)
    await publish(2, "model.norm.weight", "model.layers.0.mlp.up_proj.weight")
    with pytest.raises(
        WeightsDamagedError, match=r"policy 2: .*lacks 'policy\.model\.layers\.0\.mlp\.up_proj\.weight'"
    ):
        await asyncio.wait_for(task, 60)
    assert len(engine.loaded) == 1


@pytest.mark.parametrize(
    "name",
    [
        "probe.json",
        "config.json",
        "manifest.json",
        "tokenizer.json",
        "additional_chat_templates/tools.jinja",
        "model.safetensors",
        "model.safetensors.index.json",
    ],
)
@pytest.mark.parametrize("how", ["pipe", "link to a device", "named by the index"])
async def test_what_is_no_regular_file_is_never_opened(model, tmp_path, name, how):
    folder = make_version(model, tmp_path / "step-1")
    (folder / name).unlink(missing_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    if how == "link to a device":
        (folder / name).symlink_to("/dev/zero")
    elif how == "pipe":
        os.mkfifo(folder / name)
    else:
        os.mkfifo(tmp_path / "pipe")
        index = {"metadata": {}, "weight_map": {"model.norm.weight": "../pipe"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    client, engine = RecordingClient(), ScriptedEngine(probe_scores=[-0.5])
    await client.publish(1, folder)
    with pytest.raises(WeightsDamagedError, match=r"policy 1: .* is no regular file, and is not opened"):
        await asyncio.wait_for(make_generator(client, engine, max_groups=1).run(), 60)
    assert engine.loaded == []


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"junk", b"\xff\xfe\x00", b"5", b"[]", b"null", b"[" * 50_000),
        *(
            b'{"token_ids": [1, 2]}',
            b'{"token_ids": ["a", 2], "logprobs": [-1.0]}',
            b'{"token_ids": 5, "logprobs": [1]}',
        ),
        *(b'{"token_ids": [1e999, 2], "logprobs": [-1.0]}', b'{"token_ids": [1, 2], "logprobs": [[1]]}'),
        *(b'{"token_ids": [1], "logprobs": []}', b'{"token_ids": [1, 2, 3], "logprobs": [-1.0]}', None),
    ],
    ids=lambda content: "a folder" if content is None else repr(content[:40]),
)
async def test_a_probe_that_cannot_be_read_is_an_error_that_names_the_file(tmp_path, content):
    client, probe = RecordingClient(), fake_weights(tmp_path / "step-1") / "probe.json"
    probe.mkdir() if content is None else probe.write_bytes(content)
    await client.publish(1, probe.parent)
    with pytest.raises(WeightsDamagedError, match=r"policy 1: .*step-1/probe\.json (must hold|has) "):
        await make_generator(client, ScriptedEngine()).run()


async def test_an_adapter_and_whole_weights_may_follow_each_other(model, tmp_path):
    client, engine = RecordingClient(), ScriptedEngine(model=str(model))
    generator = make_generator(client, engine)
    task = await running(generator)
    for version, make in enumerate((make_version, make_adapter, make_version), start=1):
        await client.publish(version, make(model, tmp_path / f"step-{version}", probe=False))
        await async_until(lambda version=version: generator.stats["policy_version"] == version)
    generator.stop()
    await task
