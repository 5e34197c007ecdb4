"""VLLMServerEngine with real vLLM servers, and its requests and refusals with a server that answers as they do."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from replay_client import AsyncReplayClient, ReplayClient, RolloutGroup
from replay_client.testing import PATIENCE, async_until
from replay_generator import (
    GeneratorConfig,
    Rollout,
    RolloutGenerator,
    RolloutPolicy,
    Task,
    WeightsMismatchError,
)
from replay_generator.engines import SamplingConfig
from replay_generator.engines.vllm_http import VLLMServer, VLLMServerError, VLLMServerGoneError, Weights
from replay_generator.engines.vllm_server import VLLMServerEngine, completion_of
from replay_server import ReplayServer
from replay_server.config import DEFAULT_TABLES
from replay_trainer import Callback, StepReport
from tests.docs.blocks import ROOT, blocks
from tests.generator.engines.vllm_rollouts import group_of, two_turns
from tests.generator.engines.vllm_servers import (
    CHUNKED,
    NEVER,
    PAGE,
    VLLMProcess,
    answering,
    answers_for,
    choice,
    impatient_with,
    label_of,
    post,
    server_info,
)
from tests.kit.clients import FakeClient, RecordingClient
from tests.kit.engines import check_completion, check_group, check_scores
from tests.kit.generators import make_prompts
from tests.kit.groups import make_sample
from tests.kit.models import assert_same_weights, make_version, recomputed
from tests.kit.trainers import lines_of, make_trainer

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
PROMPT = [3, 9, 4, 13]


@pytest.fixture(scope="module")
def versions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("versions")
    return [make_version(model, folder / f"step-{version}", seed=version) for version in range(1, 4)]


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VLLMProcess]]:
    """Two that were started together."""
    logs = tmp_path_factory.mktemp("logs")
    processes = [VLLMProcess(model, logs / f"server-{number}.log") for number in range(2)]
    try:
        for process in processes:
            process.wait()
        yield processes
    finally:
        for process in processes:
            process.kill()


@pytest.fixture
def fresh(servers: list[VLLMProcess], model: Path) -> list[VLLMProcess]:
    """The two servers, with the weights that they were started with."""
    for process in servers:
        post(f"{process.url}/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(model)}})
        post(f"{process.url}/reset_prefix_cache")
        post(f"{process.url}/update_weight_version", {"new_version": "default"})
        post(f"{process.url}/resume")
    return servers


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often engines have asked which address."""
    counts: Counter[str] = Counter()
    call = VLLMServer.call

    async def counted(self: VLLMServer, method: str, path: str, *args: Any, **query: Any) -> Any:
        counts[f"{self.url}{path}"] += 1
        return await call(self, method, path, *args, **query)

    monkeypatch.setattr(VLLMServer, "call", counted)
    return counts


class OnSamples(Callback):
    """Keeps the groups that each step trains on."""

    def __init__(self, groups: list[RolloutGroup]) -> None:
        self.groups = groups

    def on_step(self, trainer: Any, report: StepReport) -> None:
        self.groups += [sample.group for sample in report.samples]


@pytest.mark.timeout(900)
class TestRealServers:
    """Two servers serve all of these; the last one is killed."""

    pytestmark: ClassVar = [*needs_vllm, pytest.mark.long]

    async def test_a_request_that_is_given_up_ends_in_the_server(self, fresh, make_engine):
        def drawn() -> float:
            with urllib.request.urlopen(f"{fresh[0].url}/metrics", timeout=10) as lines:
                return sum(float(line.split()[-1]) for line in lines if line.startswith(b"vllm:generation_tokens_to"))

        engine, before = make_engine(fresh[0]), drawn()
        post(f"{fresh[0].url}/pause?mode=keep")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(PROMPT, SamplingConfig(max_tokens=50), 12), 1.0)
        post(f"{fresh[0].url}/resume")
        assert drawn() - before < 12 * 50  # some, until the server sees that nobody listens

    async def test_completions_go_on_with_new_weights_and_each_token_has_the_log_probability_of_its_own(
        self, fresh, versions, make_engine
    ):
        engine = make_engine(fresh[0])
        await engine.load_weights(str(versions[0]), 1)
        sampling = SamplingConfig(max_tokens=58)
        for seed in range(40):
            work = asyncio.create_task(engine.generate(PROMPT, SamplingConfig(max_tokens=58, seed=seed), 8))
            await asyncio.sleep(0.02 * 1.15**seed)  # to 5 s: how long a completion takes depends on the machine
            old, new = versions[seed % 2], versions[(seed + 1) % 2]
            await engine.load_weights(str(new), seed + 2)
            spanning = [each for each in await work if len({*each.policy_versions}) == 2]
            if spanning:
                break
        assert spanning
        for completion in spanning:
            assert completion.policy_versions[0] == seed + 1
            assert completion.policy_versions[-1] == seed + 2
            before = np.abs(np.subtract(completion.logprobs, recomputed(old, PROMPT, completion.token_ids, sampling)))
            after = np.abs(np.subtract(completion.logprobs, recomputed(new, PROMPT, completion.token_ids, sampling)))
            # 0.32 does not say where the weights changed. There is one place, and no token is of neither.
            cuts = [n for n in range(len(before) + 1) if (before[:n] < 1e-4).all() and (after[n:] < 1e-4).all()]
            assert cuts

    async def test_a_turn_after_new_weights_has_their_version_and_logprobs(self, fresh, versions, make_engine):
        engine = make_engine(fresh[0])
        await engine.load_weights(str(versions[0]), 1)
        sampling = SamplingConfig(temperature=0.7, max_tokens=12)
        hook = two_turns(sampling, lambda: engine.load_weights(str(versions[1]), 2), 8)
        group = await group_of(engine, hook, PROMPT, sampling, 8)
        assert group.policy_version == 1
        assert group.policy_version_end == 2
        check_group(group, sampling, {1: versions[0], 2: versions[1]})

    async def test_tokens_that_were_drawn_before_a_pause_for_new_weights_are_too_old_for_the_trainer(
        self, fresh, model, tmp_path, make_engine
    ):
        """The trainer makes its first step between the two turns of the second group."""
        sampling = SamplingConfig(max_tokens=8)
        with ReplayServer(DEFAULT_TABLES, port=0) as server, ReplayClient(server.address) as own:
            async with AsyncReplayClient(server.address) as client:

                async def reloaded() -> None:
                    await async_until(lambda: generator.stats["policy_version"] == 1)

                hooks = {"p0": two_turns(sampling), "p1": two_turns(sampling, reloaded, 4)}

                async def by_prompt(task: Task, policy: RolloutPolicy) -> Rollout:
                    rollout = await hooks[task.prompt_id](task, policy)
                    return replace(rollout, reward=float(task.index % 2))

                config = GeneratorConfig(
                    group_size=4,
                    sampling=sampling,
                    max_groups=2,
                    max_concurrent_groups=1,
                    reload="in_flight",
                    wait_for_policy=True,
                    weights_root=tmp_path,
                )
                engine = make_engine(fresh[0])
                generator = RolloutGenerator(client, engine, make_prompts(2), None, config, rollout=by_prompt)
                options = {"groups_per_step": 1, "max_steps": 2, "max_token_staleness": 0, "learning_rate": 1e-2}
                seen: list[RolloutGroup] = []
                trainer = make_trainer(
                    own,
                    tmp_path / "run",
                    model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
                    tokenizer=AutoTokenizer.from_pretrained(model),
                    callbacks=[OnSamples(seen)],
                    **options,
                )
                await asyncio.gather(generator.run(), asyncio.to_thread(trainer.train))
        first, spanning = seen
        assert "policy_versions" not in first.extras
        versions = spanning.extras["policy_versions"]
        trained = spanning.trained_mask
        assert {*versions[trained].tolist()} == {0, 1}
        before, after = lines_of(tmp_path / "run")
        assert before["train/tokens_stale"] == 0
        assert before["train/tokens"] == first.trained_mask.sum()
        assert after["train/tokens_stale"] == (trained & (versions == 0)).sum()
        assert after["train/tokens"] == (trained & (versions == 1)).sum()
        assert after["train/rollouts_stale"] == 0

        masked = replace(spanning, loss_mask=trained & (versions == 1), extras={}, axes={})
        by_hand = make_trainer(
            FakeClient([[make_sample(first)], [make_sample(masked)]]),
            tmp_path / "by_hand",
            model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
            **options | {"max_token_staleness": None},
        )
        by_hand.train()
        assert_same_weights(trainer.model, by_hand.model)

    async def test_several_servers_share_the_requests_and_all_get_the_new_weights(
        self, fresh, versions, asked, make_engine
    ):
        engine = make_engine(*fresh, seed=1)
        await engine.load_weights(str(versions[0]), 1)
        sampling = SamplingConfig(max_tokens=12)
        groups = await asyncio.gather(*(engine.generate(PROMPT, sampling, 2) for _ in range(8)))
        assert all(asked[f"{server.url}/v1/completions"] >= 2 for server in fresh)
        completions = [completion for group in groups for completion in group]
        for completion in completions:
            check_completion(completion, PROMPT, sampling, versions[0])
        assert len({tuple(completion.token_ids) for completion in completions}) > 8  # each has a seed of its own

    async def test_of_several_generators_one_reloads(self, fresh, versions, asked, make_engine):
        engines = [make_engine(fresh[0]) for _ in range(3)]
        await asyncio.gather(*(engine.load_weights(str(versions[2]), 3) for engine in engines))
        assert asked[f"{fresh[0].url}/collective_rpc"] == 1
        for engine in engines:
            await check_scores(engine, versions[2])

    async def test_a_generator_that_is_late_takes_the_newer_version_that_another_one_loaded(
        self, fresh, versions, make_engine
    ):
        late, early = make_engine(fresh[0]), make_engine(fresh[0])
        await late.load_weights(str(versions[0]), 1)
        await early.load_weights(str(versions[1]), 2)
        with pytest.raises(FileNotFoundError, match="another generator has loaded 2@"):
            await late.score(PROMPT)
        # The other way round: an older version that came after ours gives way to ours.
        await late.load_weights(str(versions[0]), 1)
        await check_scores(early, versions[1])

    async def test_servers_that_disagree_about_a_version_are_found(self, fresh, model, versions, make_engine):
        engine = make_engine(*fresh)
        await engine.load_weights(str(versions[0]), 1)
        label = label_of(fresh[1])
        post(f"{fresh[1].url}/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(model)}})
        post(f"{fresh[1].url}/reset_prefix_cache")
        assert label_of(fresh[1]) == label
        with pytest.raises(VLLMServerError, match="hold the same version, and their log-probabilities differ"):
            await engine.score(PROMPT)

    async def test_a_server_that_accepts_and_never_answers_holds_up_nobody_and_is_taken_back(
        self, fresh, versions, caplog, make_engine
    ):
        engine = make_engine(*fresh, health_timeout=2.0, patience=0.1)
        sampling = SamplingConfig(max_tokens=6)
        fresh[1].freeze()
        try:
            groups = await asyncio.gather(*(engine.generate(PROMPT, sampling, 2) for _ in range(6)))
            assert [len(group) for group in groups] == [2] * 6
            assert engine.engines_lost == 1
            assert engine.engines_away == 1
            assert f"{fresh[1].url}: it left 2 questions about its health unanswered" in caplog.text
            # Longer than patience: it is asked for ever while the other one works.
            await engine.load_weights(str(versions[0]), 1)
            await check_scores(engine, versions[0])
            (completion,) = await engine.generate(PROMPT, sampling, 1)
            assert {*completion.policy_versions} == {1}
            assert engine.engines_away == 1
        finally:
            fresh[1].thaw()
        await async_until(lambda: not engine.engines_away, timeout=60.0)
        assert label_of(fresh[1]) == label_of(fresh[0])
        assert f"{fresh[1].url} is used again, after" in caplog.text
        assert engine.engines_lost == 1

    async def test_the_self_test_restores_the_weights_and_a_server_that_a_killed_generator_left_paused_goes_on(
        self, fresh, model, make_engine
    ):
        post(f"{fresh[0].url}/pause?mode=keep")
        engine = await asyncio.to_thread(make_engine, fresh[0], self_test=True)
        assert len(await engine.generate(PROMPT, SamplingConfig(max_tokens=3), 2)) == 2
        await check_scores(engine, model)

    async def test_weights_that_are_gone_and_weights_that_the_server_cannot_read(
        self, fresh, model, tmp_path, make_engine
    ):
        engine = make_engine(fresh[0])
        with pytest.raises(FileNotFoundError, match=r"no \*.safetensors in"):
            await engine.load_weights(str(tmp_path), 1)
        (tmp_path / "model.safetensors").write_bytes(b"nothing")
        with pytest.raises(VLLMServerError, match=r"could not load .* it must see the folder under the same path"):
            await engine.load_weights(str(tmp_path), 1)
        assert label_of(fresh[0]) == "incomplete"
        with pytest.raises(VLLMServerError, match="loaded in part: start it anew"):
            make_engine(fresh[0], self_test=True)

    def test_the_program_of_the_page_runs(self, fresh, model, tmp_path):
        names: dict[str, Any] = {}
        (page,) = [each for each in blocks(ROOT / "docs/how-to/generate.md") if each.title == "vllm_server.py"]
        exec(page.text, names)
        rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(20)]
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with ReplayServer(DEFAULT_TABLES, port=0) as server, ReplayClient(server.address) as client:
            names["main"](
                [each.url for each in fresh], str(model), tmp_path / "prompts.jsonl", server.address, groups=3
            )
            samples = client.sample("rollouts", 3, timeout=5.0)
        for sample in samples:
            check_group(sample.group, SamplingConfig(), model)

    def test_the_command_uses_the_servers(self, fresh, model, tmp_path):
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
        with ReplayServer(DEFAULT_TABLES, port=0) as server, ReplayClient(server.address) as client:
            command = ["--engine", "vllm-server", "--model", str(model), "--prompts", str(tmp_path / "prompts.jsonl")]
            command += [word for each in fresh for word in ("--base-url", each.url)]
            command += ["--reward", "exact_match", "--max-groups", "2", "--group-size", "2", "--max-tokens", "4"]
            done = subprocess.run(
                [sys.executable, "-m", "replay_cli", "--address", server.address, "generate", *command],
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
            assert client.server_info().tables["rollouts"].size == 2

    async def test_a_generator_follows_versions_and_survives_the_server(
        self, fresh, model, versions, tmp_path, make_engine
    ):
        client = RecordingClient()
        sampling = SamplingConfig(max_tokens=8)
        config = GeneratorConfig(group_size=2, sampling=sampling, max_concurrent_groups=4)
        engine = make_engine(fresh[0])
        generator = RolloutGenerator(client, engine, make_prompts(), lambda row, text: float(len(text)), config)
        run = asyncio.create_task(generator.run())

        async def inserted(version: int, count: int) -> None:
            """Returns when `count` groups of a version are in; fails with the generator."""
            while sum(group.policy_version == version for group, _ in client.inserts) < count:
                assert not run.done(), run.exception()
                await asyncio.sleep(0.05)

        await inserted(0, 4)
        await client.publish(1, versions[0])
        await inserted(1, 4)
        count = sum(group.policy_version == 1 for group, _ in client.inserts)
        await asyncio.to_thread(fresh[0].kill)
        again = VLLMProcess(model, tmp_path / "again.log", fresh[0].port)
        try:
            await asyncio.to_thread(again.wait)
            await inserted(1, count + 8)
            await client.publish(2, versions[1])
            await inserted(2, 4)
            generator.stop()
            await run
        finally:
            again.kill()
        weights = [model, *versions]
        for group, _ in client.inserts:
            check_group(group, sampling, weights[group.policy_version])
        told = [group.policy_version for group, _ in client.inserts]
        assert told == sorted(told)
        assert {*told} == {0, 1, 2}
        assert generator.stats["probe_max_difference"] < 1e-4


# ------------------------------------------------------------------------------------------------ refusals, no vLLM


def test_a_server_that_fits_is_taken(model):
    with answering(answers_for(model)) as (url, asked):
        engine = VLLMServerEngine(model, base_url=url)
    assert engine.max_length == 64
    assert asked.index("/pause") < asked.index("/collective_rpc") < asked.index("/resume")


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_as_clients_of_openai_want_it_and_no_proxy_is_asked(model, monkeypatch, end):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with answering(answers_for(model)) as (url, asked):
        engine = VLLMServerEngine(model, base_url=f"{url}{end}")
    assert engine.max_length == 64
    assert "/v1/models" in asked


async def test_a_request_leaves_nothing_of_sampling_to_the_defaults_of_the_model(model, make_engine):
    bodies: list[dict[str, Any]] = []
    with answering(answers_for(model, **{"v1/completions": {"choices": [choice(0), choice(1)]}}), bodies) as (url, _):
        await make_engine(url).generate(PROMPT, SamplingConfig(min_p=0.05), 2)
    asked_for = asked_with_sampling(bodies)
    assert {name: asked_for[name] for name in NEUTRAL} == NEUTRAL | {"min_p": 0.05}
    assert asked_for["max_tokens"] == SamplingConfig().max_tokens


async def test_a_score_leaves_nothing_of_sampling_to_the_defaults_of_the_model(model, make_engine):
    bodies: list[dict[str, Any]] = []
    steps = [None, *({str(token): {"logprob": -1.0}} for token in PROMPT[1:])]
    answers = answers_for(model, **{"v1/completions": {"choices": [{"prompt_logprobs": steps}]}})
    with answering(answers, bodies) as (url, _):
        await make_engine(url).score(PROMPT)
    asked_for = asked_with_sampling(bodies)
    assert {name: asked_for[name] for name in NEUTRAL} == NEUTRAL
    assert asked_for["max_tokens"] == 1


NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What changes nothing, of all fields for which a server has defaults."""


def asked_with_sampling(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    (body,) = [body for body in bodies if "prompt" in body and "temperature" in body]
    return body


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"server_info": None}, {}, "has no /server_info: start it with the development calls: VLLM_SERVER_DEV_MODE=1"),
        (
            {"server_info": server_info("raw_logprobs")},
            {},
            "returns raw_logprobs: start it with --logprobs-mode processed_logprobs",
        ),
        (
            {"server_info": server_info(device_config={"device": "cpu"}, scheduler_config=CHUNKED)},
            {},
            "prefills prompts in parts, .* start it with --no-enable-chunked-prefill",
        ),
        ({}, {"max_length": 128}, "takes at most 64 tokens: start it with --max-model-len 128"),
        ({}, {"served_model": "other"}, "serves model, not other: give the same model to both"),
        (
            {"v1/models": {"data": [{"id": "qwen", "root": "/models/qwen", "max_model_len": 64}]}},
            {},
            "serves qwen, not .*/model: .* served_model=qwen",
        ),
        ({"tokenize": {"tokens": [1, 2]}}, {}, r"has the tokens \[1, 2\] for .*: give the same model to both"),
        ({"server_info": (401, {})}, {}, "wants its --api-key: set VLLM_API_KEY"),
        ({"server_info": (500, {"error": "x"})}, {}, 'answered 500: {"error": "x"}'),
        ({"weight_info": {"weight_version": "incomplete"}}, {}, "loaded in part: start it anew"),
        (
            {"weight_checker": {"checksums": {"a": "1"}, "mismatches": ["model.norm.weight"]}},
            {},
            r"a reload of its own weights misses model.norm.weight \(1 parameters\)",
        ),
        ({"v1/models": PAGE}, {}, "/v1/models answered something else than vLLM does: <html>"),
        ({"server_info": {"vllm_config": "VllmConfig(...)"}}, {}, "does not tell its configuration: is it vLLM 0.32"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_with_the_remedy(model, changes, options, message):
    with (
        answering(answers_for(model, **changes)) as (url, asked),
        pytest.raises(VLLMServerError, match=message),
    ):
        VLLMServerEngine(model, base_url=url, **options)
    assert asked.count("/pause") == asked.count("/resume")


def test_a_server_that_does_not_answer_is_refused(model):
    with pytest.raises(VLLMServerGoneError, match=r"no vLLM server answers at http://127.0.0.1:1"):
        VLLMServerEngine(model, base_url="http://127.0.0.1:1")
    with pytest.raises(
        ValueError, match="base_url must be http://host:port of one server or more, not 'localhost:8000'"
    ):
        VLLMServerEngine(model, base_url="localhost:8000")


async def test_a_server_that_does_not_come_back_ends_the_wait(model, versions, make_engine):
    with answering(answers_for(model)) as (url, _):
        engine = make_engine(url, self_test=True, patience=0.2)
    with pytest.raises(VLLMServerError, match="no vLLM server answers"):
        await engine.generate(PROMPT, SamplingConfig(), 1)


def test_a_server_that_accepts_and_never_answers_is_refused_at_the_start(model):
    with (
        answering(answers_for(model, server_info=NEVER)) as (url, _),
        pytest.raises(
            VLLMServerGoneError, match=r"no vLLM server answers at .*: no answer to /server_info within 0.2 s"
        ),
    ):
        VLLMServerEngine(model, base_url=url, control_timeout=0.2)


@pytest.mark.parametrize("silent", ["pause", "collective_rpc", "update_weight_version", "weight_info"])
async def test_a_control_call_without_an_answer_ends_and_a_new_version_goes_to_the_others(
    model, versions, silent, caplog, make_engine
):
    label = Weights.of(str(versions[0]), 1).label
    good = answers_for(model, weight_info={"weight_version": label}, health={})
    with (
        answering(good) as (url, _),
        answering(answers_for(model, **({"health": {}, "update_weight_version": {}} | {silent: NEVER}))) as (other, _),
        impatient_with(f"{other}/{silent}"),
    ):
        engine = make_engine(url, other, control_timeout=0.3, reload_timeout=0.3)
        async with asyncio.timeout(PATIENCE):
            await engine.load_weights(str(versions[0]), 1)
        assert engine.engines_lost == 1
        assert engine.engines_away == 1
        assert f"no vLLM server answers at {other}: no answer to /{silent} within 0.3 s" in caplog.text
        stats = RolloutGenerator(RecordingClient(), engine, [], lambda row, text: 0.0).stats  # type: ignore[arg-type]
        assert stats["engines_lost"] == 1
        assert stats["engines_away"] == 1


@pytest.mark.parametrize(
    "useless",
    [
        pytest.param({"server_info": server_info("raw_logprobs")}, id="it was started in another way"),
        pytest.param({"server_info": PAGE}, id="a proxy answers in its place"),
        pytest.param({"health": PAGE}, id="a proxy answers for its health"),
        pytest.param({"server_info": {}}, id="it is another program"),
        pytest.param({"v1/models": {}}, id="it is another version"),
    ],
)
async def test_a_server_that_comes_back_and_cannot_be_used_is_named_and_the_others_go_on(
    model, useless, caplog, make_engine
):
    completions = {"v1/completions": {"choices": [choice()]}, "health": {}}
    again = answers_for(model, **completions)
    with answering(answers_for(model, **completions)) as (url, _), answering(again) as (other, asked):
        engine = make_engine(url, other)
        again |= answers_for(model, **{"v1/completions": (503, {})}, **useless)
        before = asked.count("/health")
        await asyncio.gather(*(engine.generate(PROMPT, SamplingConfig(), 1) for _ in range(4)))
        await async_until(lambda: asked.count("/health") >= before + 2)  # the second question came after the refusal
        await engine.generate(PROMPT, SamplingConfig(), 1)
        assert engine.engines_away == 1
        again |= answers_for(model, **completions)
        await async_until(lambda: not engine.engines_away)
    assert f"{other}/v1/completions answered 503: {{}}; it is asked again, 1 of 2 servers are away" in caplog.text
    assert f"{other} is used again, after" in caplog.text


async def test_a_lock_file_that_cannot_be_opened_is_named_with_the_remedy(model, versions, tmp_path, make_engine):
    with answering(answers_for(model)) as (url, _):
        engine = make_engine(url, lock_folder=str(tmp_path / "gone"))
        with pytest.raises(VLLMServerError, match=r"cannot lock .*/gone/replay-vllm-.*: No such file .* a lock_folder"):
            await engine.load_weights(str(versions[0]), 1)


async def test_a_server_is_used_again_after_its_files_could_not_be_read_for_a_while(
    model, versions, monkeypatch, make_engine
):
    monkeypatch.setattr("replay_generator.engines.vllm_server.LONGEST_PAUSE", 0.05)
    label = Weights.of(str(versions[0]), 1).label
    answers = answers_for(model, health={}, weight_info={"weight_version": label})
    answers["/v1/completions"] = iter([(503, {}), {"choices": [choice()]}])
    with answering(answers) as (url, _):
        engine = make_engine(url)
        await engine.load_weights(str(versions[0]), 1)
        with monkeypatch.context() as patched:
            patched.setattr(VLLMServer, "reload", raise_stale)
            with pytest.raises(VLLMServerError, match=f"{url}: .*Stale file handle"):
                await engine.generate(PROMPT, SamplingConfig(), 1)
            assert engine.engines_away == 1
        await async_until(lambda: not engine.engines_away)
        assert len(await engine.generate(PROMPT, SamplingConfig(), 1)) == 1


async def raise_stale(*_: object, **__: object) -> None:
    """Raises the error that a shared file system gives while its server is away."""
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


async def test_a_newer_version_is_asked_for_when_all_servers_are_away_and_the_weights_are_removed(
    model, tmp_path, monkeypatch, make_engine
):
    monkeypatch.setattr("replay_generator.engines.vllm_server.LONGEST_PAUSE", 0.05)
    weights = make_version(model, tmp_path / "step-1")
    with answering(answers_for(model)) as (url, _):
        engine = make_engine(url)
    loading = asyncio.create_task(engine.load_weights(str(weights), 1))
    await async_until(lambda: engine.engines_away)
    assert not loading.done()
    shutil.rmtree(weights)
    with pytest.raises(FileNotFoundError):
        await loading


@pytest.mark.parametrize("name", ["control_timeout", "reload_timeout", "health_timeout"])
def test_a_limit_that_no_server_can_keep_is_refused_by_name(model, name):
    with pytest.raises(ValueError, match=f"{name} must be above 0, not 0"):
        VLLMServerEngine(model, base_url="http://127.0.0.1:1", **{name: 0})


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        ({"collective_rpc": (500, {"error": "no such file"})}, "could not load"),
        ({"reset_prefix_cache": {"success": False}}, "did not reset its prefix cache"),
    ],
)
async def test_a_server_is_resumed_after_a_reload_that_failed(model, versions, failing, error, make_engine):
    answers = answers_for(model, update_weight_version={"success": True}, **failing)
    with answering(answers) as (url, asked):
        engine = make_engine(url)
        with pytest.raises(VLLMServerError, match=error):
            await engine.load_weights(str(versions[0]), 1)
    assert asked[-1] == "/resume"
    # The label says so from before the first weight changes.
    assert asked.index("/pause") < asked.index("/update_weight_version") < asked.index("/collective_rpc")


def test_versions_of_tokens_are_those_of_the_servers_spans():
    choice = {
        "token_ids": [5, 6, 7],
        "logprobs": {"token_logprobs": [-1.0, None, -2.0]},
        "text": "abc",
        "finish_reason": "length",
    }
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "7@abc", "start": 1, "end": 3}]
    completion = completion_of(choice | {"weight_versions": spans}, "default", "7@abc")
    assert completion.policy_versions == [0, 7, 7]
    assert np.isnan(completion.logprobs[1])
    assert completion_of(choice, "6@abc", "7@abc").policy_versions == [6, 6, 7]
    empty = choice | {"token_ids": [], "logprobs": {"token_logprobs": []}}
    assert completion_of(empty, "6@abc", "7@abc").policy_versions == []
    with pytest.raises(VLLMServerGoneError, match="'incomplete', which are no policy version"):
        completion_of(choice, "incomplete", "7@abc")


def test_a_label_names_the_version_and_the_files(versions, tmp_path):
    label = Weights.of(str(versions[0]), 1).label
    assert label.startswith("1@")
    assert Weights.of(str(versions[1]), 1).label != label
    assert Weights.of(str(versions[0]), 1).label == label


async def test_a_probe_that_does_not_fit_stops_the_generator(model, tmp_path, make_engine):
    weights = make_version(model, tmp_path / "step-1", probe_error=0.5)
    labels = Weights.of(str(weights), 1).label
    steps = [None, *({str(t): {"logprob": -1.0}} for t in [9, 4, 13, 7, 5, 20, 11])]
    answers = answers_for(
        model, weight_info={"weight_version": labels}, **{"v1/completions": {"choices": [{"prompt_logprobs": steps}]}}
    )
    client = RecordingClient()
    await client.publish(1, weights)
    with answering(answers) as (url, _):
        engine = make_engine(url, self_test=True)
        generator = RolloutGenerator(client, engine, make_prompts(), lambda row, text: 0.0)
        with pytest.raises(WeightsMismatchError):
            await generator.run()
