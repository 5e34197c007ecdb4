"""What every engine promises a generator: transformers, vLLM in this process, and `vllm serve`.

Loading vLLM takes 15 to 25 s each time, so all tests of an engine share it, and one event loop.
"""

import asyncio
import importlib.util
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from replay_generator.engines import SamplingConfig
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.testing import EOS, exercise_engine
from tests.generator.engines.vllm_servers import VLLMProcess
from tests.kit.engines import check_completion, check_each_is_told, check_masks, check_scores, under_way
from tests.kit.models import make_version

PROMPT = [3, 9, 4, 13]

pytestmark = pytest.mark.asyncio(loop_scope="module")
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
ENGINES = [
    "transformers",
    pytest.param("vllm", marks=needs_vllm),
    pytest.param("vllm-server", marks=[*needs_vllm, pytest.mark.long, pytest.mark.timeout(900)]),
]


@pytest.fixture(scope="module")
def versions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("versions")
    return [make_version(model, folder / f"step-{step}", seed=step) for step in (1, 2)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def loaded_engine(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Any]:
    server = None
    if request.param == "transformers":
        engine: Any = TransformersEngine(model, seed=0)
    elif request.param == "vllm":
        from replay_generator.engines.vllm import VLLMEngine

        engine = VLLMEngine(model, dtype="float32", seed=0, enable_lora=True, max_lora_rank=16)
    else:
        from replay_generator.engines.vllm_server import VLLMServerEngine

        server = VLLMProcess(model, tmp_path_factory.mktemp("logs") / "server.log")
        await asyncio.to_thread(server.wait)
        engine = await asyncio.to_thread(VLLMServerEngine, model, base_url=[server.url], self_test=False)
    yield engine
    await engine.close()
    await engine.close()
    if server is not None:
        server.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(loaded_engine: Any, model: Path) -> Any:
    """The engine with the model's own weights, as version 0."""
    await loaded_engine.load_weights(str(model), 0)
    return loaded_engine


async def test_an_engine_has_all_that_a_generator_relies_on(engine, versions, monkeypatch):
    async def stay_open() -> None:
        """Other tests need the engine."""

    monkeypatch.setattr(engine, "close", stay_open)
    # vLLM 0.32 does not tell its clients with which token new weights began.
    knows_versions = type(engine).__name__ != "VLLMServerEngine"
    await exercise_engine(lambda: engine, weights=versions, exact_versions=knows_versions)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_p": 0.7},
        {"top_k": 4},
        {"min_p": 0.3},  # keeps fewer tokens than the 20 that `vllm serve` tells by default
        {"temperature": 0.8, "min_p": 0.1, "top_k": 6, "top_p": 0.8},
        {"top_p": 0.9, "sampling_masks": 3},
    ],
    ids=["all tokens", "at a temperature", "top_p", "top_k", "min_p", "all three", "masks of up to three tokens"],
)
async def test_logprobs_and_masks_equal_those_of_transformers_before_and_after_a_reload(
    engine, model, versions, options
):
    sampling = SamplingConfig(max_tokens=16, **options)
    for version, weights in enumerate((model, versions[0])):
        await engine.load_weights(str(weights), version)
        others = engine.generate([5], SamplingConfig(max_tokens=12), 2)
        completions, _ = await asyncio.gather(engine.generate(PROMPT, sampling, 4), others)
        for completion in completions:
            if sampling.largest_mask:
                check_masks(completion, PROMPT, sampling, weights)
            else:
                check_completion(completion, PROMPT, sampling, weights)
        await check_scores(engine, weights)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.7, "sampling_masks": 0}], ids=["all are kept", "none are wanted"])
async def test_who_needs_no_masks_gets_none(engine, options):
    for completion in await engine.generate(PROMPT, SamplingConfig(max_tokens=4, **options), 2):
        assert completion.extras == {}
        assert completion.axes == {}


async def test_requests_of_every_kind_run_together_and_keep_their_own_numbers(engine, model):
    requests = [
        ([3], SamplingConfig(max_tokens=1), 2),
        ([3, 4, 5, 6, 7, 8, 9, 10, 11], SamplingConfig(temperature=0.6, max_tokens=30), 5),
        ([12, 13], SamplingConfig(top_k=4, max_tokens=9), 3),
        ([14, 3, 3], SamplingConfig(top_p=0.5, temperature=1.4, max_tokens=17), 4),
        ([3, 9, 4], SamplingConfig(temperature=1.3, top_k=5, max_tokens=20), 6),
        ([3, 9, 4], SamplingConfig(temperature=0.9, top_k=9, top_p=0.7, max_tokens=20), 6),
        ([3, 9], SamplingConfig(temperature=1.2, min_p=0.3, max_tokens=20), 6),
    ]
    answers = await asyncio.gather(*(engine.generate(*request) for request in requests))
    for (prompt_ids, sampling, n), completions in zip(requests, answers, strict=True):
        assert len(completions) == n
        for completion in completions:
            assert 1 <= len(completion.token_ids) <= sampling.max_tokens
            check_completion(completion, prompt_ids, sampling, model)


async def test_completions_end_with_the_end_token_or_at_the_limit_and_may_be_empty(engine):
    # The model ends at once with a probability of 0.02, 0.01 and 0.01: of so many, none does once in 10^9 runs.
    requests = [
        engine.generate([3, 9, 4][:size], SamplingConfig(temperature=2.0, max_tokens=12), 512) for size in (1, 2, 3)
    ]
    completions = [completion for group in await asyncio.gather(*requests) for completion in group]
    assert len(completions) == 1536
    for completion in completions:
        ended = completion.token_ids[-1] == EOS
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(completion.token_ids) == 12
        assert EOS not in completion.token_ids[:-1]
        assert len(completion.logprobs) == len(completion.token_ids)
        assert "<eos>" not in completion.text
    assert len({len(completion.token_ids) for completion in completions}) > 3
    assert any(completion.token_ids == [EOS] and completion.text == "" for completion in completions)


async def test_prompt_and_completion_fit_the_maximum_length(engine):
    assert engine.max_length == 64
    for room in (1, 2):
        completions = await engine.generate([3] * (64 - room), SamplingConfig(max_tokens=50), 16)
        assert max(len(completion.token_ids) for completion in completions) == room


async def test_tokens_come_as_often_as_their_probabilities_say(engine):
    drawn = 4000
    completions = await engine.generate([3, 4], SamplingConfig(max_tokens=1), drawn)
    counts = Counter(completion.token_ids[0] for completion in completions)
    for completion in completions[:50]:
        probability = float(np.exp(completion.logprobs[0]))
        deviation = (probability * (1 - probability) / drawn) ** 0.5
        assert abs(counts[completion.token_ids[0]] / drawn - probability) < 5 * deviation


async def test_each_completion_is_told_as_it_ends(engine):
    await check_each_is_told(engine, SamplingConfig(temperature=2.0, max_tokens=60))


@pytest.mark.parametrize("kind", ["whole weights", "an adapter"])
async def test_completions_under_way_go_on_with_new_weights_exact_for_every_token(
    engine, model, versions, adapters, kind
):
    if type(engine).__name__ == "VLLMServerEngine":
        pytest.skip("loads no adapters, and does not know with which token new weights began: it has a test of its own")
    old, new = (model, versions[0]) if kind == "whole weights" else adapters
    sampling = SamplingConfig(temperature=0.7, max_tokens=58)
    prompts = [[3, 9, 4 + number] for number in range(8)]
    for _ in range(50):  # a process that stands still for long finds the completions at their end
        await engine.load_weights(str(old), 0)
        tasks = [asyncio.create_task(engine.generate(prompt_ids, sampling, 8)) for prompt_ids in prompts]
        await under_way(engine)
        await engine.load_weights(str(new), 1)
        groups = await asyncio.gather(*tasks)
        spanning = [
            (prompt_ids, completion)
            for prompt_ids, group in zip(prompts, groups, strict=True)
            for completion in group
            if set(completion.policy_versions) == {0, 1}
        ]
        if spanning:
            break
    assert spanning
    for prompt_ids, completion in spanning[:4]:
        check_completion(completion, prompt_ids, sampling, {0: old, 1: new})
    (fresh,) = await engine.generate([3, 9, 4], sampling, 1)  # a prompt whose old cache must not be used again
    assert set(fresh.policy_versions) == {1}
    check_completion(fresh, [3, 9, 4], sampling, new)
