import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from replay_generator.engines import Completion, EngineError, SamplingConfig
from replay_generator.engines.continuous_batch import processed_logprobs
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.testing import EOS
from tests.kit.engines import check_completion, check_scores
from tests.kit.models import loaded, make_version, save_model


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(model, seed=0)
    yield engine
    await engine.close()


async def test_prompt_and_completion_fit_a_maximum_length_below_the_models_own(model):
    engine = TransformersEngine(model, max_length=10)
    completions = await engine.generate([3] * 8, SamplingConfig(max_tokens=50), 16)
    assert max(len(completion.token_ids) for completion in completions) == 2
    await engine.close()


async def test_tied_embeddings_reload_whole(tmp_path):
    tied = save_model(tmp_path / "tied", tied=True)
    version = make_version(tied, tmp_path / "step-1")
    engine = TransformersEngine(tied)
    await engine.load_weights(str(version), 1)
    await check_scores(engine, version)
    await engine.close()


async def finished_while_loading(
    engine: TransformersEngine, weights: Path, requests: list[tuple[list[int], SamplingConfig, int]]
) -> list[list[Completion]]:
    """The completions of requests that come one after the other, with `weights` loaded among them."""
    tasks = []
    for request in requests:
        tasks.append(asyncio.create_task(engine.generate(*request)))
        await asyncio.sleep(0.02)
        if len(tasks) == len(requests) // 2:
            await tasks[0]  # at the latest now the engine has begun
            await engine.load_weights(str(weights), 1)
    return await asyncio.gather(*tasks)


async def test_weights_loaded_among_requests_that_come_and_go_are_exact_for_every_token(model, engine, tmp_path):
    version = make_version(model, tmp_path / "step-1")
    requests = [
        ([3 + size] * size, SamplingConfig(temperature=0.6 + size / 10, max_tokens=4 + 8 * (size % 4)), 3)
        for size in range(1, 11)
    ]
    answers = await finished_while_loading(engine, version, requests)
    for (prompt_ids, sampling, _), completions in zip(requests, answers, strict=True):
        for completion in completions:
            check_completion(completion, prompt_ids, sampling, {0: model, 1: version})
    assert {version for completions in answers for each in completions for version in each.policy_versions} == {0, 1}


async def test_a_model_whose_cache_cannot_be_merged_completes_as_exactly(tmp_path):
    config = MistralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=5, max_position_embeddings=64, pad_token_id=0, eos_token_id=EOS,
        bos_token_id=None,
    )  # fmt: skip
    sliding = save_model(tmp_path / "sliding")
    torch.manual_seed(0)
    MistralForCausalLM(config).save_pretrained(sliding)
    version = make_version(sliding, tmp_path / "step-1", drift=0.2)
    engine = TransformersEngine(sliding, seed=0)
    requests = [([3 + size] * size, SamplingConfig(max_tokens=20), 2) for size in range(1, 9)]
    answers = await finished_while_loading(engine, version, requests)
    for (prompt_ids, sampling, _), completions in zip(requests, answers, strict=True):
        for completion in completions:
            check_completion(completion, prompt_ids, sampling, {0: sliding, 1: version})
    await engine.close()


async def test_no_more_completions_run_at_a_time_than_allowed_and_a_larger_request_runs_in_parts(model):
    engine = TransformersEngine(model, max_concurrent_completions=8)
    answers = await asyncio.gather(*(engine.generate([3], SamplingConfig(max_tokens=8), n) for n in (5, 5, 20, 1)))
    assert [len(completions) for completions in answers] == [5, 5, 20, 1]
    await engine.close()


async def test_a_request_that_breaks_the_model_fails_and_the_next_is_served(engine):
    with pytest.raises(
        EngineError, match=r"the transformers engine failed: IndexError: index out of range.*start the generator again"
    ):
        await engine.generate([10**6], SamplingConfig(max_tokens=4), 2)
    assert len(await engine.generate([3], SamplingConfig(max_tokens=4), 2)) == 2


def test_top_p_keeps_at_least_one_token_and_top_k_all_where_it_exceeds_the_vocabulary():
    logits = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    ones = torch.ones(2)
    only = processed_logprobs(logits, ones, ones * 1e-6, torch.zeros(2), torch.zeros(2))
    assert only.exp().tolist() == [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    everything = processed_logprobs(logits, ones, ones, torch.tensor([50, 3]), torch.zeros(2))
    torch.testing.assert_close(everything, logits.log_softmax(-1))


def test_min_p_comes_after_the_temperature_and_before_top_k_and_top_p():
    # At temperature 2 the tokens are 1, 0.61, 0.37, 0.22 times as likely as the first, and 1, 0.37, 0.14, 0.05 at 1.
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).expand(4, 4)
    temperatures, ones = torch.tensor([2.0, 1.0, 2.0, 2.0]), torch.ones(4)
    top_p, top_k = torch.tensor([1.0, 1.0, 0.8, 1.0]), torch.tensor([0, 0, 0, 1])
    kept = processed_logprobs(logits, temperatures, top_p, top_k, 0.3 * ones).isfinite()
    # The first two tokens have 0.73 of the probability of all tokens, which top_p 0.8 does not accept, and 0.81 of
    # that of the three tokens that min_p keeps, which it accepts.
    assert kept.sum(-1).tolist() == [3, 2, 2, 1]
    most_likely = processed_logprobs(torch.tensor([[1.0, 1.0, 0.9]]), *torch.ones(2, 1), torch.zeros(1), torch.ones(1))
    assert most_likely.isfinite().tolist() == [[True, True, False]]


async def test_the_experts_of_each_token_that_was_read_come_with_a_completion(tmp_path):
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=6, num_experts_per_tok=2,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=EOS, bos_token_id=None,
    )  # fmt: skip
    folder = save_model(tmp_path / "mixture")
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    engine = TransformersEngine(folder, seed=0, routing=True)
    requests = [([3, 9, 4], SamplingConfig(max_tokens=9, top_k=5), 2), ([5] * 7, SamplingConfig(max_tokens=4), 2)]
    answers = await asyncio.gather(*(engine.generate(*request) for request in requests))
    await engine.close()
    model = loaded(folder)
    for (prompt_ids, _, _), completions in zip(requests, answers, strict=True):
        for completion in completions:
            read = torch.tensor([[*prompt_ids, *completion.token_ids[:-1]]])
            router_logits = model(read, output_router_logits=True).router_logits
            expected = np.stack([logits.topk(2, dim=-1).indices.numpy() for logits in router_logits], axis=1)
            routed = completion.extras["routed_experts"]
            assert routed.dtype == np.uint8
            np.testing.assert_array_equal(np.sort(routed), np.sort(expected))
            assert completion.axes["routed_experts"] == "whole"


def test_a_model_without_experts_has_no_routing(model):
    with pytest.raises(ValueError, match=r"for 1 to 256 experts.* has 0"):
        TransformersEngine(model, routing=True)
