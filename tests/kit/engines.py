"""An engine that remembers what it drew, and the checks that every engine must pass."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from replay_client.columns import OFFSETS, RAGGED
from replay_client.rollout import RolloutGroup
from replay_client.sampling_masks import SAMPLING_MASK
from replay_generator.engines import Completion, Engine, EngineError, SamplingConfig
from replay_generator.engines.transformers import TransformersEngine
from tests.kit.models import EXACT, distributions, loaded, logprobs_of, recomputed, scores


def check_masks(completion: Completion, prompt_ids: Sequence[int], sampling: SamplingConfig, weights: Path) -> None:
    """As `check_completion`, and it names the tokens that were kept for each token, if they are not too many."""
    check_completion(completion, prompt_ids, sampling, weights)
    logprobs_TV = distributions(loaded(weights), prompt_ids, completion.token_ids, sampling)
    kept = [row.isfinite().nonzero()[:, 0].tolist() for row in logprobs_TV]
    ids, offsets = completion.extras[SAMPLING_MASK], completion.extras[SAMPLING_MASK + OFFSETS]
    assert completion.axes[SAMPLING_MASK] == RAGGED
    assert ids.dtype == np.int32
    assert offsets.dtype == np.int32
    found = [sorted(ids[start:end].tolist()) for start, end in pairwise(offsets)]
    assert found == [row if len(row) <= sampling.sampling_masks else [] for row in kept]


def check_completion(
    completion: Completion, prompt_ids: Sequence[int], sampling: SamplingConfig, weights: Path | Mapping[int, Path]
) -> None:
    """Each token has the log-probability that the weights of its version give it after all tokens before it.

    `weights` is one folder, or that of each version.
    """
    versions = completion.policy_versions
    assert versions == sorted(versions)
    assert len(versions) == len(completion.token_ids)
    folders = weights if isinstance(weights, Mapping) else dict.fromkeys(versions, weights)
    by_version = {each: recomputed(folders[each], prompt_ids, completion.token_ids, sampling) for each in {*versions}}
    expected = [by_version[version][step] for step, version in enumerate(versions)]
    np.testing.assert_allclose(completion.logprobs, expected, atol=EXACT)


def check_group(group: RolloutGroup, sampling: SamplingConfig, weights: Path | Mapping[int, Path]) -> None:
    """Each token of the policy has the log-probability that the weights of its version give it after all tokens before
    it, whoever wrote those; and each token that it did not write has none. Turns may come from several versions."""
    versions_T = group.extras.get("policy_versions", np.full(group.num_tokens, group.policy_version))
    folders = weights if isinstance(weights, Mapping) else dict.fromkeys(versions_T.tolist(), weights)
    models = {version: loaded(folders[version]) for version in {*versions_T.tolist()}}
    for prompt, span, sampled in zip(group.prompts(), group.sequence_spans(), group.sampled_spans(), strict=True):
        ids, trained = group.completion_ids[sampled], group.trained_mask[sampled]
        versions, logprobs = versions_T[sampled], group.rollout_logprobs[sampled]
        assert (np.diff(versions) >= 0).all()
        assert np.isnan(logprobs[~trained]).all()
        assert not group.trained_mask[span.start : sampled.start].any()
        for version in {*versions[trained].tolist()}:
            expected = np.array(logprobs_of(models[version], prompt.tolist(), ids.tolist(), sampling))
            chosen = trained & (versions == version)
            np.testing.assert_allclose(logprobs[chosen], expected[chosen], atol=EXACT)


async def check_scores(engine: Engine, weights: Path, token_ids: Sequence[int] = (3, 9, 4, 13, 5)) -> None:
    """The engine scores tokens as transformers does with these weights."""
    np.testing.assert_allclose(await engine.score(list(token_ids)), scores(weights, token_ids), atol=EXACT)


async def check_each_is_told(engine: Any, sampling: SamplingConfig) -> None:
    """Every completion is told before the request is answered, and some while others are still drawn.

    A busy machine may tell all at once, but hardly each time.
    """
    for _ in range(20):
        told: dict[int, Completion] = {}
        one = asyncio.Event()

        def finished(number: int, completion: Completion, told: Any = told, one: asyncio.Event = one) -> None:
            assert number not in told
            told[number] = completion
            one.set()

        request = asyncio.create_task(engine.generate([3, 9], sampling, 24, finished))
        await one.wait()
        early = not request.done() and len(told) < 24
        completions = await request
        assert told == dict(enumerate(completions))
        if early:
            return
    raise AssertionError("no completion was told before all had ended")


async def under_way(engine: Any) -> None:
    """Returns when the requests of tasks that were created before have some tokens."""
    # A call that is awaited begins before a task does: the tasks begin during the first one, so the second comes last.
    for _ in range(2):
        await engine.generate([3], SamplingConfig(max_tokens=2), 1)


SAID = Completion([7, 8], [-0.1, -0.2], "78", "stop", [])
"""The completion that engines return in tests where its tokens do not matter."""


class RecordedEngine(TransformersEngine):
    """Remembers what it was asked for, and what it drew."""

    fails_after: int | None = None

    def __init__(self, model: Path) -> None:
        super().__init__(model, seed=0)
        self.drawn: list[tuple[list[int], Completion]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, *_: Any) -> list[Completion]:
        if self.fails_after is not None and len(self.drawn) >= self.fails_after:
            raise EngineError("the engine is gone")
        completions = await super().generate(prompt_ids, sampling, n)
        self.drawn += [(list(prompt_ids), completion) for completion in completions]
        return completions


def parts(group: RolloutGroup) -> Iterator[tuple[list[int], Completion]]:
    """Each stretch of tokens that the policy wrote, with all tokens before it, as the group has them."""
    versions = group.extras.get("policy_versions", np.full(group.num_tokens, group.policy_version))
    for ids, span in zip(group.completions(), group.sequence_spans(), strict=True):
        for drawn, at in itertools.groupby(range(len(ids)), lambda at, span=span: bool(group.trained_mask[span][at])):
            place = list(at)
            logprobs = group.rollout_logprobs[span][place]
            if not drawn:
                assert np.isnan(logprobs).all()
                continue
            before = [*group.prompt_ids.tolist(), *ids[: place[0]].tolist()]
            yield before, Completion(ids[place].tolist(), logprobs.tolist(), "", "", versions[span][place].tolist())


def assert_drawn(groups: Sequence[RolloutGroup], engine: Any) -> None:
    """Every completion that `engine.drawn` has is in the groups once, after the tokens that it was asked with,
    unchanged."""

    def told(before: Sequence[int], part: Completion) -> tuple[Any, ...]:
        return list(before), part.token_ids, np.float32(part.logprobs).tolist(), part.policy_versions

    left = [told(*each) for each in engine.drawn]
    for group in groups:
        for before, part in parts(group):
            left.remove(told(before, part))
    assert left == []
