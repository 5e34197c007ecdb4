"""The length that chooses the rotary frequencies is one for a whole run: what trainer and generators do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from replay_client.testing import make_group
from replay_generator import WeightsMismatchError
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.engines.vllm_server import VLLMServerEngine
from replay_generator.testing import ScriptedEngine
from tests.generator.engines.vllm_servers import answering, answers_for
from tests.kit.clients import FakeClient, RecordingClient
from tests.kit.generators import make_generator
from tests.kit.groups import make_sample
from tests.kit.trainers import lines_of, make_batches, make_trainer
from tests.trainer.families import ORIGINAL, Family, longrope
from tests.trainer.test_families import save

LONG = Family("phi3", config=longrope())


def train(folder: Path, client: FakeClient | None = None, **config: Any) -> Path:
    """A run of one step. Returns its last version."""
    client = client or FakeClient(make_batches(1))
    tokenizer = AutoTokenizer.from_pretrained(save(LONG, folder / "model"))
    few = {"max_steps": 1, "groups_per_step": 3}
    make_trainer(client, folder / "run", model=LONG.make(), tokenizer=tokenizer, **(few | config)).train()
    return folder / "run/step-1"


def tokens(count: int) -> list[int]:
    return [3 + index % 12 for index in range(count)]


@pytest.mark.parametrize(
    ("max_length", "kept"),
    [(None, ORIGINAL), (ORIGINAL + 1, ORIGINAL + 1), (128, 128)],
)
def test_a_version_says_for_which_length_its_frequencies_were_chosen(tmp_path, max_length, kept):
    version = train(tmp_path, max_length=max_length)
    manifest = json.loads((version / "manifest.json").read_text())
    assert manifest["frequencies"] == {"max_length": kept, "original_length": ORIGINAL}


def test_a_version_of_a_model_without_a_choice_says_nothing_of_it(tmp_path):
    make_trainer(FakeClient(make_batches(1)), tmp_path, max_steps=1, groups_per_step=3).train()
    assert "frequencies" not in json.loads((tmp_path / "step-1/manifest.json").read_text())


@pytest.mark.parametrize(
    ("max_length", "longest", "left"),
    [(None, ORIGINAL, 3), (None, ORIGINAL + 1, 2), (40, 40, 3), (40, 41, 2)],
)
def test_the_trainer_puts_a_group_aside_that_is_longer_than_engines_serve(tmp_path, max_length, longest, left):
    batches = make_batches(1)
    group = make_group(rewards=[1, 0], prompt=tokens(5), completions=[tokens(longest - 5), tokens(2)], logprobs=-2.0)
    batches[0][1] = make_sample(group, key=77)
    train(tmp_path, FakeClient(batches), max_length=max_length)
    (line,) = lines_of(tmp_path / "run")
    assert line["train/groups"] == left


@pytest.mark.parametrize(("trained", "served"), [(None, 64), (128, None), (ORIGINAL, 128)])
async def test_a_generator_that_would_choose_other_frequencies_loads_nothing(tmp_path, trained, served):
    version = train(tmp_path, max_length=trained)
    client = RecordingClient()
    await client.publish(1, version)
    engine = TransformersEngine(tmp_path / "model", max_length=served)
    both = (
        rf"up to {served or ORIGINAL} tokens, and the trainer has max_length = {trained or ORIGINAL}: above 32 tokens"
    )
    with pytest.raises(WeightsMismatchError, match=rf"policy 1: .*step-1: the engine serves sequences of {both}"):
        await make_generator(client, engine, max_groups=1).run()
    assert client.inserts == []


@pytest.mark.parametrize(("trained", "served"), [(None, None), (ORIGINAL, 20), (64, 128)])
async def test_a_generator_with_the_same_choice_passes_the_probe(tmp_path, trained, served):
    version = train(tmp_path, max_length=trained)
    client = RecordingClient()
    await client.publish(1, version)
    generator = make_generator(client, TransformersEngine(tmp_path / "model", max_length=served), max_groups=1)
    await generator.run()
    assert len(client.inserts) == 1
    assert generator.stats["probe_max_difference"] < 1e-4


async def test_the_length_that_a_vllm_server_tells_decides_and_not_the_shorter_one_of_its_user(tmp_path):
    version = train(tmp_path)
    model = tmp_path / "model"
    served = {"data": [{"id": "m", "root": str(model), "max_model_len": 128}]}
    with answering(answers_for(model, **{"v1/models": served})) as (url, _):
        engine = VLLMServerEngine(model, base_url=url, max_length=ORIGINAL, self_test=False)
        client = RecordingClient()
        await client.publish(1, version)
        with pytest.raises(WeightsMismatchError, match="serves sequences of up to 128 tokens, and the trainer has"):
            await make_generator(client, engine, max_groups=1).run()


@pytest.mark.parametrize(
    "damage", ["not json", "[]", '{"frequencies": 3}', '{"frequencies": {"max_length": "x"}}', "{}"]
)
async def test_a_manifest_without_a_choice_leaves_the_judgement_to_the_probe(tmp_path, damage):
    version = train(tmp_path)
    (version / "manifest.json").write_text(damage)
    client = RecordingClient()
    await client.publish(1, version)
    probe = json.loads((version / "probe.json").read_text())
    engine = ScriptedEngine(model=str(tmp_path / "model"), max_length=128, probe_scores=probe["logprobs"])
    await make_generator(client, engine, max_groups=1).run()
    assert engine.loaded == [str(version)]


@pytest.mark.parametrize(("first", "then"), [(None, ORIGINAL + 1), (64, ORIGINAL), (64, None)])
def test_a_resume_with_a_length_that_chooses_other_frequencies_is_refused(tmp_path, first, then):
    train(tmp_path, max_length=first)
    says = (
        f"step-1 is of a run with max_length = {first or ORIGINAL}, and this one has max_length = {then or ORIGINAL}: "
    )
    with pytest.raises(ValueError, match=says + rf".*Resume with max_length = {first or ORIGINAL}, or choose another"):
        train(tmp_path, max_length=then, resume=True, max_steps=2)


@pytest.mark.parametrize(("first", "then"), [(None, 20), (64, 128), (None, None)])
def test_a_resume_with_another_length_and_the_same_choice_goes_on(tmp_path, first, then):
    client = FakeClient(make_batches(2))
    train(tmp_path, client, max_length=first)
    train(tmp_path, client, max_length=then, resume=True, max_steps=2)
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2]
