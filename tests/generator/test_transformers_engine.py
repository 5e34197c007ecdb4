import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from generator_factories import EOS, make_model, make_version, recomputed, scores

from replay_client.engines import SamplingConfig
from replay_client.engines.transformers import TransformersEngine, processed_logprobs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(model, seed=0)
    yield engine
    await engine.close()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(max_tokens=20),
        SamplingConfig(temperature=0.7, max_tokens=20),
        SamplingConfig(temperature=1.3, top_k=5, max_tokens=20),
        SamplingConfig(top_p=0.8, max_tokens=20),
        SamplingConfig(temperature=0.9, top_k=9, top_p=0.7, max_tokens=20),
    ],
)
async def test_logprobs_are_those_of_the_distribution_that_was_drawn_from(
    model: Path, engine: TransformersEngine, sampling: SamplingConfig
) -> None:
    prompt_ids = [3, 9, 4]
    for completion in await engine.generate(prompt_ids, sampling, 6):
        expected = recomputed(model, prompt_ids, completion.token_ids, sampling)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


async def test_requests_of_every_kind_share_a_batch_and_keep_their_own_numbers(
    model: Path, engine: TransformersEngine
) -> None:
    requests = [
        ([3], SamplingConfig(max_tokens=1), 2),
        ([3, 4, 5, 6, 7, 8, 9, 10, 11], SamplingConfig(temperature=0.6, max_tokens=30), 5),
        ([12, 13], SamplingConfig(top_k=4, max_tokens=9), 3),
        ([14, 3, 3], SamplingConfig(top_p=0.5, temperature=1.4, max_tokens=17), 4),
    ]
    answers = await asyncio.gather(*(engine.generate(*request) for request in requests))
    for (prompt_ids, sampling, n), completions in zip(requests, answers, strict=True):
        assert len(completions) == n
        for completion in completions:
            assert 1 <= len(completion.token_ids) <= sampling.max_tokens
            expected = recomputed(model, prompt_ids, completion.token_ids, sampling)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


async def test_completions_end_with_the_end_token_or_at_the_limit(tmp_path: Path) -> None:
    engine = TransformersEngine(make_model(tmp_path, sharpness=1.0), seed=0)
    completions = await engine.generate([3, 9], SamplingConfig(temperature=2.0, max_tokens=12), 256)
    for completion in completions:
        ended = completion.token_ids[-1] == EOS
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(completion.token_ids) == 12
        assert EOS not in completion.token_ids[:-1]
    assert len({len(completion.token_ids) for completion in completions}) > 3
    assert any(completion.token_ids == [EOS] and completion.text == "" for completion in completions)
    await engine.close()


async def test_prompt_and_completion_fit_the_maximum_length(model: Path) -> None:
    engine = TransformersEngine(model, max_length=10)
    completions = await engine.generate([3] * 8, SamplingConfig(max_tokens=50), 16)
    assert max(len(completion.token_ids) for completion in completions) == 2
    await engine.close()


async def test_a_seed_repeats_completions_whatever_shares_the_batch(engine: TransformersEngine) -> None:
    seeded, other = SamplingConfig(seed=7, max_tokens=10), SamplingConfig(max_tokens=10)
    alone = await engine.generate([3, 4], seeded, 3)
    together, _ = await asyncio.gather(engine.generate([3, 4], seeded, 3), engine.generate([5] * 9, other, 3))
    assert [completion.token_ids for completion in alone] == [completion.token_ids for completion in together]
    assert alone[0].token_ids != alone[1].token_ids


async def test_tokens_come_as_often_as_their_probabilities_say(engine: TransformersEngine, model: Path) -> None:
    drawn = 4000
    completions = await engine.generate([3, 4], SamplingConfig(max_tokens=1), drawn)
    counts = Counter(completion.token_ids[0] for completion in completions)
    for completion in completions[:50]:
        probability = float(np.exp(completion.logprobs[0]))
        deviation = (probability * (1 - probability) / drawn) ** 0.5
        assert abs(counts[completion.token_ids[0]] / drawn - probability) < 5 * deviation


async def test_new_weights_take_over_and_score_as_the_trainer_does(
    model: Path, engine: TransformersEngine, tmp_path: Path
) -> None:
    ids = [3, 9, 4, 13, 7]
    np.testing.assert_allclose(await engine.score(ids), scores(model, ids), atol=1e-5)
    version = make_version(model, tmp_path / "step-1")
    await engine.load_weights(str(version))
    np.testing.assert_allclose(await engine.score(ids), scores(version, ids), atol=1e-5)
    with pytest.raises(FileNotFoundError, match="gone"):
        await engine.load_weights(str(tmp_path / "gone"))


async def test_tied_embeddings_reload_whole(tmp_path: Path) -> None:
    tied = make_model(tmp_path / "tied", tied=True)
    version = make_version(tied, tmp_path / "step-1")
    engine = TransformersEngine(tied)
    await engine.load_weights(str(version))
    np.testing.assert_allclose(await engine.score([3, 9, 4]), scores(version, [3, 9, 4]), atol=1e-5)
    await engine.close()


def test_top_p_keeps_at_least_one_token_and_top_k_all_where_it_exceeds_the_vocabulary() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    ones = torch.ones(2)
    only = processed_logprobs(logits, ones, ones * 1e-6, torch.zeros(2))
    assert only.exp().tolist() == [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    everything = processed_logprobs(logits, ones, ones, torch.tensor([50, 3]))
    torch.testing.assert_close(everything, logits.log_softmax(-1))


@pytest.mark.parametrize(
    "bad",
    [{"temperature": 0.0}, {"temperature": 2.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"max_tokens": 0}],
)
def test_sampling_that_makes_no_sense_is_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingConfig(**bad)  # type: ignore[arg-type]
