"""Engines that answer what no policy can have drawn, too late or never: one rollout fails, and each run has an end."""

import asyncio
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

import pytest

from replay_client.testing import async_until
from replay_generator import PromptError
from replay_generator.engines import Completion, CompletionError, SamplingConfig
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.engines.vllm_http import VLLMServerError, VLLMServerGoneError
from replay_generator.engines.vllm_server import VLLMServerEngine
from replay_generator.rollouts.rollout import Rollout, RolloutPolicy, RolloutSequence, Task, single_turn
from replay_generator.testing import ScriptedEngine
from tests.generator.engines.vllm_servers import answering, answers_for, choice, post
from tests.kit.clients import RecordingClient
from tests.kit.clocks import stopped_clock, turns
from tests.kit.engines import SAID
from tests.kit.generators import generate
from tests.kit.models import loaded

NAN, INFINITE = float("nan"), float("inf")
MOST = SamplingConfig(max_tokens=3)


class TenLetters:
    """A tokenizer with ten tokens, one for each character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 10 for character in text]


@dataclass
class Answers(ScriptedEngine):
    """An engine of a model with 10 tokens. `faulty`: which of its requests it answers with `completions`; all others
    well. `few`: it returns one less, and tells nobody when others have ended."""

    tokenizer: Any = field(default_factory=TenLetters)
    vocabulary: int = 10
    few: bool = False
    faulty: Sequence[int] = range(10_000)
    requests: int = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, finished: Any = None
    ) -> list[Completion]:
        drawn = await super().generate(prompt_ids, sampling, n)
        self.requests += 1
        if self.requests - 1 not in self.faulty:
            return [replace(SAID, policy_versions=[0, 0])] * n
        return drawn[:-1] if self.few else drawn


async def hook(task: Task, policy: RolloutPolicy) -> Rollout:
    sequence = RolloutSequence(task.prompt_ids)
    sequence.append_completion(await policy.generate(sequence.token_ids))
    return Rollout([sequence])


FAULTS = {
    "fewer than asked": (None, "is missing: an engine returns as many as it is asked for"),
    "beyond the vocabulary": ({"token_ids": [7, 10]}, "has the token 10, and the model those from 0 to 9: give the"),
    "below 0": ({"token_ids": [-1, 7]}, "has the token -1, and the model those from 0 to 9"),
    "too long": ({"token_ids": [7] * 4, "logprobs": [-0.1] * 4}, "has 4 tokens, and max_tokens is 3"),
    "an error": ({"finish_reason": "error"}, "has the finish_reason 'error': the log of the engine says why"),
    "impossible": ({"logprobs": [-0.1, -INFINITE]}, "has the log-probability -inf: that of a drawn token is finite"),
    "impossible, in JSON": ({"logprobs": [-9999.0, NAN]}, "has the log-probability -9999"),
    "no logarithm": ({"logprobs": [-0.1, 0.9]}, "has the log-probability 0.9"),
    "another length": ({"logprobs": [-0.1]}, "has 2 tokens, 1 logprobs, 2 policy_versions: it needs as many"),
}


@pytest.mark.parametrize("play", [single_turn, hook])
@pytest.mark.parametrize(("changes", "says"), FAULTS.values(), ids=FAULTS)
async def test_what_no_policy_has_drawn_costs_its_rollout_and_the_run_if_it_comes_always(
    changes, says, play, caplog, monkeypatch
):
    monkeypatch.setattr("replay_generator.generator._MOST_SKIPPED", 5)
    unknown = replace(SAID, logprobs=[NAN, -0.2])
    engine = Answers(completions=[SAID, unknown, SAID, replace(SAID, **changes or {})], few=changes is None)
    stats = await generate(RecordingClient(), engine, play, min_rollouts=3, sampling=MOST)
    assert stats["groups"] == 1
    assert stats["rollouts_failed"] == 1
    assert stats["groups_skipped"] == 0
    assert f"completion 3 of Answers {says}" in caplog.text
    with pytest.raises(PromptError, match=f"5 groups in a row .* 1 of 4 rollouts failed, .*completion 3 .* {says}"):
        await generate(RecordingClient(), engine, play, max_groups=9, sampling=MOST)


async def test_a_run_does_not_end_for_one_group_of_an_engine_that_then_answers_well():
    client = RecordingClient(admission=True)
    engine = Answers(few=True, faulty=[1])
    stats = await generate(client, engine, single_turn, max_groups=4)
    assert [group.prompt_id for group, _ in client.inserts] == ["p0", "p2", "p3"]
    assert stats["groups_skipped"] == 1
    assert stats["rollouts_failed"] == 1
    assert client.leases == []


async def test_an_engine_that_never_answers_is_named_every_half_minute_and_ends_the_run(caplog):
    engine = ScriptedEngine(hold=asyncio.Event())
    run = asyncio.create_task(generate(RecordingClient(), engine, hook, max_concurrent_groups=3, max_groups=3))
    await async_until(lambda: engine.generating == 3)
    with stopped_clock() as go_on:
        for _ in range(2):
            go_on(31)
            await turns()
        go_on(3600)
        with pytest.raises(
            PromptError, match=r"4 of 4 rollouts failed, .* 3600 s \(rollout_timeout\): does its engine"
        ):
            await run
    lines = re.findall(
        r"the generator waits for 4 completions of ScriptedEngine \(for (.*) s now\), the first of 3 requests",
        caplog.text,
        re.M,
    )
    assert [int(line) // 31 for line in lines[:2]] == [1, 2]


def test_the_vocabulary_is_as_large_as_the_embedding(model, tmp_path):
    larger = loaded(model)
    larger.resize_token_embeddings(64)
    folder = shutil.copytree(model, tmp_path / "model")
    larger.save_pretrained(folder)
    engine = TransformersEngine(folder)
    assert engine.vocabulary == 64 > len(engine.tokenizer)
    with answering(answers_for(folder)) as (url, _):
        assert VLLMServerEngine(folder, base_url=url, self_test=False).vocabulary == 64


# --------------------------------------------------------------------------------------------------- over HTTP


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay_generator.engines.vllm_server.LONGEST_PAUSE", 0.01)


def good(*changes: dict[str, Any]) -> dict[str, Any]:
    """Answers with as many completions as there are `changes` of them, or with one."""
    return {"choices": [choice(**{"index": index} | each) for index, each in enumerate(changes or [{}])]}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"error": {"message": "no more", "code": 503}}, r"completion 0 of http.*'choices'.*proxy.*'no more'"),
        ({"choices": None}, "completion 0 of http.*is not as vLLM answers .TypeError"),
        (good({}), r"completion 1 of http.*KeyError\(1\)"),
        (good({}, {"index": 0}), r"completion 1 of http.*KeyError\(1\)"),
        (good({}, {"logprobs": None}), r"completion 1 of http.*TypeError.*'logprobs': None"),
        (good({}, {"logprobs": {"token_logprobs": ["?"]}}), "completion 1 .*ValueError.*logprobs"),
        (good({}, {"token_ids": None}), "completion 1 of http.*TypeError"),
        (good({}, {"token_ids": ["5"]}), "completion 1 of http.*TypeError"),
        ([], "completion 0 of http.*TypeError"),
    ],
    ids=[
        "an error",
        "no choices",
        "too few",
        "one twice",
        "no logprobs",
        "other logprobs",
        "no ids",
        "other ids",
        "a list",
    ],
)
async def test_an_answer_that_is_none_of_vllm_is_named_with_its_completion(model, answer, says, make_engine):
    completions = answers_for(model, **{"v1/completions": answer})
    with answering(completions) as (url, _), pytest.raises(CompletionError, match=says):
        await make_engine(url).generate([3, 4], MOST, 2)


async def test_completions_go_on_beside_one_that_is_none_of_vllm(model, make_engine):
    answers, told = chain([good(), {"error": "no more"}], repeat(good())), set[int]()
    completions = answers_for(model, **{"v1/completions": answers})
    with answering(completions) as (url, _), pytest.raises(CompletionError, match="no more"):
        await make_engine(url).generate([3, 4], MOST, 4, lambda number, _: told.add(number))
    assert len(told) == 3


@pytest.mark.parametrize("path", ["weight_info", "is_paused", "v1/models", "tokenize"])
@pytest.mark.parametrize("answer", [{"error": "no more"}, {"data": [{"id": "model", "root": "model"}]}])
def test_an_answer_of_control_that_is_none_of_vllm_is_refused(model, path, answer, make_engine):
    with (
        answering(answers_for(model, **{path: (200, answer)})) as (url, _),
        pytest.raises(VLLMServerError, match="vLLM"),
    ):
        make_engine(url, self_test=True)


async def test_scores_that_are_none_of_vllm_are_refused(model, make_engine):
    for answer in ({"error": "no more"}, good({"prompt_logprobs": None}), good()):
        with (
            answering(answers_for(model, **{"v1/completions": answer})) as (url, _),
            pytest.raises(VLLMServerError, match="/v1/completions answered something else than vLLM does"),
        ):
            await make_engine(url).score([3, 4])


async def test_a_server_that_cannot_now_is_asked_again(model, make_engine, quick):
    answers = chain([(500, {}), (502, {}), (503, {}), (504, {}), (429, {}), (529, {})] * 3, repeat(good()))
    with answering(answers_for(model, health={}, **{"v1/completions": answers})) as (url, asked):
        engine = make_engine(url)
        assert len(await engine.generate([3, 4], MOST, 1)) == 1
    assert asked.count("/v1/completions") == 3 * 6 + 1


@pytest.mark.parametrize("work", ["generate", "score"])
async def test_a_server_that_cannot_for_longer_than_patience_ends_the_wait(model, make_engine, quick, work):
    with answering(answers_for(model, health={}, **{"v1/completions": (503, {"error": "overloaded"})})) as (url, _):
        engine = make_engine(url, patience=0.1)
        with pytest.raises(VLLMServerGoneError, match=r"answered 503: .*overloaded"):
            await (engine.score([3, 4]) if work == "score" else engine.generate([3, 4], MOST, 1))


async def test_a_server_is_left_alone_for_as_long_as_it_says(model, make_engine):
    answers = iter([(429, {}, {"Retry-After": "90"}), good()])
    with answering(answers_for(model, health={}, **{"v1/completions": answers})) as (url, asked):
        engine = make_engine(url)
        request = asyncio.create_task(engine.generate([3, 4], MOST, 1))
        await async_until(lambda: engine.engines_away)
        with stopped_clock() as go_on:
            go_on(85)
            await asyncio.to_thread(post, f"{url}/health")
            assert asked.count("/v1/completions") == 1
            assert asked.count("/health") == 1
            while not request.done():  # what it says, and the pause
                go_on(1)
                await asyncio.to_thread(time.sleep, 0.05)
            assert len(await request) == 1
