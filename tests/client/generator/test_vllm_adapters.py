"""LoRA adapters in the real vLLM engine, which takes them with enable_lora."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from replay_client.generator.engines import SamplingConfig
from replay_client.generator.engines.vllm import VLLMEngine
from tests.client.generator.factories import make_adapter, recomputed, scores

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
TOKENS = [3, 9, 4, 13, 5]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[VLLMEngine]:
    engine = VLLMEngine(model, dtype="float32", seed=0, enable_lora=True, max_lora_rank=16)
    yield engine
    await engine.close()


async def check(engine: VLLMEngine, weights: Path) -> None:
    np.testing.assert_allclose(await engine.score(TOKENS), scores(weights, TOKENS), atol=1e-4)


async def test_the_first_adapter_waits_for_requests_that_began_without_one(
    engine: VLLMEngine, model: Path, adapters: list[Path]
) -> None:
    await check(engine, model)
    sampling = SamplingConfig(temperature=0.7, max_tokens=40, seed=3)
    early = asyncio.create_task(engine.generate([3, 9, 4], sampling, 8))
    while not engine._running:
        await asyncio.sleep(0.01)
    await engine.load_weights(str(adapters[0]), 1)
    assert {version for completion in await early for version in completion.policy_versions} == {0}
    await check(engine, adapters[0])


async def test_completions_under_way_go_on_with_the_new_adapter_exact_for_every_token(
    engine: VLLMEngine, adapters: list[Path]
) -> None:
    await engine.load_weights(str(adapters[0]), 1)
    sampling = SamplingConfig(temperature=0.7, max_tokens=56)
    prompts = [[3, 9, 4 + number] for number in range(8)]
    tasks = [asyncio.create_task(engine.generate(prompt_ids, sampling, 8)) for prompt_ids in prompts]
    await asyncio.wait([tasks[0]], timeout=0.15)
    await engine.load_weights(str(adapters[1]), 2)
    groups = await asyncio.gather(*tasks)
    pairs = [(prompt_ids, each) for prompt_ids, group in zip(prompts, groups, strict=True) for each in group]
    for prompt_ids, completion in [*pairs[:2], *[each for each in pairs if len(set(each[1].policy_versions)) == 2][:4]]:
        old, new = (recomputed(folder, prompt_ids, completion.token_ids, sampling) for folder in adapters)
        expected = [new[step] if v == 2 else old[step] for step, v in enumerate(completion.policy_versions)]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    # A prompt whose old cache must not be used again.
    (fresh,) = await engine.generate([3, 9, 4], sampling, 1)
    assert set(fresh.policy_versions) == {2}
    expected = recomputed(adapters[1], [3, 9, 4], fresh.token_ids, sampling)
    np.testing.assert_allclose(fresh.logprobs, expected, atol=1e-4)
    await check(engine, adapters[1])


async def test_an_adapter_that_is_gone_or_too_large_is_an_error_and_whole_weights_take_it_away(
    engine: VLLMEngine, model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        await engine.load_weights(str(tmp_path / "gone"), 3)
    with pytest.raises(Exception, match="rank"):
        await engine.load_weights(str(make_adapter(model, tmp_path / "large", rank=32)), 3)
    await engine.load_weights(str(adapters[0]), 4)
    await check(engine, adapters[0])
    await engine.load_weights(str(model), 5)
    await check(engine, model)
