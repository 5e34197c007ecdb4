"""Trainer and engine compute for every kind of model what it computes for one sequence alone, or refuse it."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from replay_client import RolloutGroup
from replay_generator.engines import Completion, EngineError, SamplingConfig
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.engines.weights import Probe
from replay_trainer.batching import Batch, bare_group, to_batch
from replay_trainer.logprobs import LogprobModel
from replay_trainer.weights import probe_tokens, publish_weights
from tests.kit.models import save_model as make_tokenizer
from tests.trainer.families import FAMILIES, FEW, VOCABULARY, Family

CLOSE = 1e-4
"""Nats. Faults of this kind are 0.05 nats and more."""
SECONDS = 60.0
"""After which a wait has failed."""


def families(*, engine: bool | None = None, trained: bool | None = None) -> list[Any]:
    """The families that engine and trainer take, or do not. All but a few are long."""
    chosen = []
    for name, family in FAMILIES.items():
        if engine is not None and family.engine != engine:
            continue
        if trained is not None and (family.route != "refused") != trained:
            continue
        marks = () if name in FEW or not family.engine else (pytest.mark.long,)
        chosen.append(pytest.param(family, id=name, marks=marks))
    return chosen


def make_groups(family: Family) -> list[RolloutGroup]:
    """Two groups: a sequence as long as the family's longest, short ones, and one that goes on from another."""
    random = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in random.integers(3, VOCABULARY, count)]

    first, long = tokens(3), tokens(family.longest - 3)
    half = long[: len(long) // 2]
    return [
        bare_group(first, long, tokens(5), [*half, *tokens(4)], tokens(1)),
        bare_group(tokens(11), tokens(family.longest - 12), tokens(8)),
    ]


def sequences(groups: Iterable[RolloutGroup]) -> list[tuple[list[int], int]]:
    """Each sequence of the groups, and how many of its tokens are the prompt's."""
    found = []
    for group in groups:
        for completion in group.completions():
            found.append(([*group.prompt_ids.tolist(), *completion.tolist()], group.prompt_ids.size))
    return found


def assert_alone(family: Family, model: Any, batch: Batch, groups: list[RolloutGroup], reference: Any) -> None:
    with torch.no_grad():
        logprobs_BT, _ = model(batch)
    for row_T, (token_ids, prompt) in zip(logprobs_BT, sequences(groups), strict=True):
        expected = family.alone(reference, token_ids)[prompt - 1 :]
        torch.testing.assert_close(row_T[: len(expected)], expected, atol=CLOSE, rtol=0)


ROUTES = {"packed": "packed", "padded": "padded", "logits": "whole model", "refused": "refused"}


def table() -> str:
    """The rows of docs/reference/models.md."""
    rows = ["| family | trainer | transformers engine |", "|---|---|---|"]
    for name, family in FAMILIES.items():
        rows.append(f"| {name} | {ROUTES[family.route]} | {'correct' if family.engine else 'refused'} |")
    return "\n".join(rows)


def test_the_page_of_models_has_what_the_tests_look_at():
    page = Path(__file__).parents[2] / "docs/reference/models.md"
    assert table() in page.read_text()


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "window" in name and family.engine])
def test_a_family_with_a_window_computes_something_else_without_it(name):
    family = FAMILIES[name]
    open_family = replace(family, config={**family.config, "sliding_window": 2 * family.longest})
    token_ids = [int(token) for token in np.random.default_rng(0).integers(3, VOCABULARY, family.longest)]
    with_window = family.alone(family.reference(), token_ids)
    without = family.alone(open_family.reference(), token_ids)
    assert float((with_window - without).abs().max()) > 100 * CLOSE


@pytest.mark.parametrize("family", families(trained=True))
def test_the_trainer_computes_what_each_sequence_has_alone(family):
    groups = make_groups(family)
    batch = to_batch(groups)
    model = LogprobModel(family.make(), max_length=family.max_length)
    assert model.route == family.route
    assert_alone(family, model, batch, groups, family.reference())
    padded = LogprobModel(family.make(), packing=False, max_length=family.max_length)
    assert padded.route != "packed"
    assert_alone(family, padded, batch, groups, family.reference())
    assert_alone(family, copy.deepcopy(model), batch, groups, family.reference())  # as a reference model is made


@pytest.mark.parametrize("family", families(trained=True))
def test_gradients_are_those_of_the_sequences_one_by_one(family):
    groups = make_groups(family)[1:]
    batch = to_batch(groups)
    model = LogprobModel(family.make(), max_length=family.max_length)
    logprobs_BT, _ = model(batch)
    logprobs_BT.sum().backward()

    plain = LogprobModel(family.reference(), packing=False, max_length=family.max_length).model
    for token_ids, prompt in sequences(groups):
        logits = plain(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, prompt - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids[prompt:])[:, None])
        chosen.sum().backward()
    for (name, ours), (_, theirs) in zip(model.model.named_parameters(), plain.named_parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None or not ours.grad.any(), name
            continue
        scale = max(float(theirs.grad.norm()), 1.0)
        assert float((ours.grad - theirs.grad).norm()) <= 1e-3 * scale, name


def save(family: Family, folder: Path, *, seed: int = 0) -> Path:
    make_tokenizer(folder)
    for file in ("model.safetensors", "config.json", "generation_config.json"):
        (folder / file).unlink()
    family.make(seed).save_pretrained(folder)
    return folder


def publish(family: Family, base: Path, folder: Path, *, seed: int) -> tuple[Path, Probe]:
    """A version as a trainer publishes it, with its probe."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = LogprobModel(family.make(seed), max_length=family.max_length)
    token_ids = probe_tokens(model.model, tokenizer)
    with torch.no_grad():
        logprobs_BT, _ = model(to_batch([bare_group(token_ids[:1], token_ids[1:])]))
    probe = {"token_ids": token_ids, "logprobs": logprobs_BT[0].tolist()}
    return publish_weights(model.model, tokenizer, folder, 1, 2, probe), Probe(**probe)


async def draw_through_a_reload(
    engine: TransformersEngine, prompts: Sequence[list[int]], tokens: int, version: Path
) -> list[list[Completion]]:
    """Completions of all prompts at once. New weights come when the first tokens are drawn.

    The engine writes the text of the first completion only when it has been asked to load them. Tiny models may draw
    everything before the event loop gets its turn.
    """
    loop, begun, asked = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    decode = engine.tokenizer.decode

    def decode_once_asked(*arguments: Any, **options: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        assert asked.wait(SECONDS)
        return decode(*arguments, **options)

    engine.tokenizer.decode = decode_once_asked
    short = SamplingConfig(max_tokens=2, seed=3)
    drawing = [
        asyncio.create_task(engine.generate(prompt, SamplingConfig(max_tokens=tokens, seed=index), 2))
        for index, prompt in enumerate(prompts)
    ]
    first = asyncio.create_task(engine.generate([7, 8], short, 1))
    await begun.wait()
    loading = asyncio.create_task(engine.load_weights(str(version), 1))
    await asyncio.sleep(0)  # it asks before it waits
    asked.set()
    await loading
    await first
    return [await task for task in drawing]


@pytest.mark.parametrize("family", families(engine=True, trained=True))
async def test_the_engine_draws_from_what_each_sequence_has_alone_across_a_reload(family, tmp_path):
    folder = save(family, tmp_path / "model")
    version, probe = publish(family, folder, tmp_path / "out", seed=1)
    engine = TransformersEngine(folder, seed=0, max_length=family.max_length)
    by_version = {0: family.reference(0), 1: family.reference(1)}
    room = family.longest - 12
    prompts = [[9, 4, 11], [int(token) for token in np.random.default_rng(1).integers(3, VOCABULARY, min(40, room))]]
    answers = await draw_through_a_reload(engine, prompts, family.longest - max(map(len, prompts)), version)
    seen = set()
    for prompt, completions in zip(prompts, answers, strict=True):
        for completion in completions:
            token_ids = [*prompt, *completion.token_ids]
            expected = {each: family.alone(model, token_ids)[len(prompt) - 1 :] for each, model in by_version.items()}
            for place, drawn_by in enumerate(completion.policy_versions):
                seen.add(drawn_by)
                assert abs(completion.logprobs[place] - float(expected[drawn_by][place])) < CLOSE
    assert seen == {0, 1}
    assert probe.max_difference(await engine.score(probe.token_ids)) < CLOSE
    await engine.close()


@pytest.mark.parametrize("family", families(trained=False))
def test_the_trainer_refuses_a_model_that_is_not_causal(family):
    with pytest.raises(ValueError, match=rf"{family.kind}.* is no causal language model"):
        LogprobModel(family.make())


@pytest.mark.parametrize("family", families(engine=False))
def test_the_engine_refuses_what_it_cannot_draw_from_and_names_the_model(family, tmp_path):
    folder = save(family, tmp_path / "model")
    with pytest.raises((EngineError, ValueError), match=family.kind) as refusal:
        TransformersEngine(folder)
    message = str(refusal.value)
    assert "--engine vllm" in message or "is no causal language model" in message
    assert "\n" not in message
