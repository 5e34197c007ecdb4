"""What generators and scorers notice of their rollouts reaches the doctor through a real server."""

import asyncio
import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from replay_client import AsyncReplayClient
from replay_client.records import read_described
from replay_client.testing import PATIENCE, async_until
from replay_dashboard.diagnosis import diagnose
from replay_generator import GeneratorConfig, Rollout, RolloutGenerator, notices
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.groups import inserting
from replay_generator.groups.given_up_watch import MOST_ENVIRONMENTS, GivenUpWatch
from replay_generator.groups.rollout_watch import LEAST_ROLLOUTS, FailureWatch, LengthWatch
from replay_generator.metrics import _no_stats
from replay_generator.notices import Watch
from replay_generator.prompts.prompt import Prompt
from replay_generator.rewards import reward_watch
from replay_generator.rewards.functions import load_reward
from replay_generator.rollouts.rollout import RolloutPolicy, RolloutSequence, Task, single_turn
from replay_generator.rollouts.sessions import endpoint, refusals
from replay_generator.rollouts.sessions.refusals import Refusals
from replay_generator.testing import ScriptedEngine
from replay_server import TableConfig
from replay_server.config import MAX_DESCRIPTION
from tests.generator.sessions.test_remote import running
from tests.kit.prompts import EPOCH
from tests.kit.scoring import UNSCORED, play
from tests.kit.servers import async_serving
from tests.kit.stack import Stack

pytestmark = pytest.mark.filterwarnings("error:coroutine:RuntimeWarning")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(inserting, "SECONDS_PER_LOOK", 0.1)


async def said_by_doctor(client: AsyncReplayClient, rule: str) -> str:
    """The sentence of a rule, when the doctor comes to say it."""
    async with asyncio.timeout(PATIENCE):
        while True:
            info = await client.server_info()
            for finding in diagnose(info, info.version, info.time):
                if finding.rule == rule:
                    return finding.message
            await asyncio.sleep(0.01)


async def said_of_generator(rule: str, **options: Any) -> str:
    """What the doctor comes to say of a generator with these options, which runs until then."""
    heard: list[str] = []

    def prompts():
        while not heard:
            yield Prompt.of({"prompt": "1+1=", "answer": "#### 2"})

    async with async_serving(EPOCH) as client:
        config = GeneratorConfig(
            group_size=4, max_concurrent_groups=1, on_prompt_error="skip", **options.pop("config", {})
        )
        engine = options.pop("engine", None) or ScriptedEngine()
        rewards = [options.pop("reward", None) or load_reward("exact_match")]
        generator = RolloutGenerator(client, engine, prompts(), rewards, config, **options)
        run = asyncio.create_task(generator.run())
        heard.append(await said_by_doctor(client, rule))
        generator.stop()
        await run
    return heard[0]


async def test_a_generator_whose_rollouts_fail_is_named_with_the_last_reason():
    async def agent(task, policy):
        await asyncio.sleep(0.02)  # a hundred groups in a row that are skipped end the run
        raise RuntimeError("the tools are away")

    said = await said_of_generator("rollouts-fail", rollout=agent)
    assert said.startswith("generator ")
    assert "rollouts failed; the last reason: " in said
    assert "the tools are away" in said


async def test_a_generator_whose_reward_function_fails_is_named_with_the_last_reason():
    async def broken(row: Any, text: str, rollout: Rollout) -> float:
        await asyncio.sleep(0.02)  # a hundred groups in a row that are skipped end the run
        raise RuntimeError("the judge is away")

    said = await said_of_generator("rollouts-fail", reward=broken)
    assert said.startswith("generator ")
    assert "the judge is away" in said


async def test_what_is_noticed_fits_into_the_description_in_any_language():
    reason = "工具不在" * 200
    failures = FailureWatch()
    failures.record(0, LEAST_ROLLOUTS, reason)
    rewards = reward_watch.RewardWatch()
    for _ in range(reward_watch.LEAST_GROUPS):
        rewards.record(np.zeros(4, np.float32), {"answer": reason}, reason)
    refused = Refusals()
    refused.count(401, reason)
    noticed = failures.description | rewards.description | {"sessions": json.dumps(refused.facts())}
    own = {f"setting {number}": "x" * 100 for number in range(12)}
    async with async_serving(EPOCH) as client:
        await client.describe(own | noticed)
    assert json.loads(noticed["failures"])["reason"] in reason


async def test_a_generator_of_which_too_much_is_noticed_is_still_known(caplog):
    notices.forget()

    class Talkative(Watch):
        description = {"failures": json.dumps("x" * MAX_DESCRIPTION)}  # noqa: RUF012

    async with async_serving(EPOCH) as client:
        config = GeneratorConfig()
        server = inserting.InsertingServer(client, config, _no_stats(), "the generator")
        server.watches = [Talkative()]
        for _ in range(2):
            await server.observe(await client.server_info())
        ((_, settings),) = (await client.server_info()).settings_of("generator")
    assert settings["part"] == "generator"
    refused = [line for line in caplog.messages if "refuses what the generator says of itself" in line]
    assert len(refused) == 1
    assert f"at most {MAX_DESCRIPTION}" in refused[0]


async def test_a_generator_whose_completions_are_cut_far_below_max_tokens_is_named():
    engine = ScriptedEngine(completions=[Completion([7, 8], [-0.1, -0.2], "78", "length", [])])
    said = await said_of_generator("cut-early", engine=engine, config={"sampling": SamplingConfig(max_tokens=100)})
    assert said.endswith("rollouts ended with finish reason length after 2 tokens or fewer, and max_tokens is 100")


async def test_a_users_hook_may_have_a_description_of_its_own():
    class Agent:
        description = "my agent"

        async def __call__(self, task: Task, policy: RolloutPolicy) -> Rollout:
            return await single_turn(task, policy)

    async with async_serving(EPOCH) as client:
        config = GeneratorConfig(group_size=2, max_groups=1)
        prompt = Prompt.of({"prompt": "1+1=", "answer": "#### 2"})
        rewards = [load_reward("exact_match")]
        generator = RolloutGenerator(client, ScriptedEngine(), [prompt], rewards, config, rollout=Agent())
        await generator.run()
        assert generator.stats["groups"] == 1


async def test_rollouts_of_a_hook_that_asks_for_few_tokens_are_not_cut_early():
    async def brief(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        sequence.append_completion(await policy.generate(task.prompt_ids, replace(task.sampling, max_tokens=2)))
        return Rollout([sequence])

    async with async_serving(EPOCH) as client:
        config = GeneratorConfig(group_size=4, max_groups=8, sampling=SamplingConfig(max_tokens=100))
        engine = ScriptedEngine(completions=[Completion([7, 8], [-0.1, -0.2], "78", "length", [])])
        prompts = [Prompt.of({"prompt": "1+1=", "answer": "#### 2"})] * 8
        rewards = [load_reward("exact_match")]
        for hook, is_told in ((brief, False), (single_turn, True)):
            generator = RolloutGenerator(client, engine, prompts, rewards, config, rollout=hook)
            await generator.run()
            noticed = [name for watch in generator._server.watches for name in watch.description]
            assert ("cut_early" in noticed) == is_told


async def test_what_the_address_of_the_sessions_refuses_is_counted_by_kind_and_its_sessions_are_told(tmp_path):
    token = tmp_path / "token"
    token.write_text("secret-secret-secret-secret")
    async with (
        async_serving(EPOCH) as client,
        running(client=client, token=None, sessions_token_file=str(token)) as run,
    ):
        for _ in range(3):
            assert (await run.post("/sessions"))[0] == 401
        assert (await run.post("/nowhere"))[0] == 404
        said = await said_by_doctor(client, "agents-refused")
        run.token = token.read_text()
        await run.taken()
        sessions: dict[str, Any] = {}
        async with asyncio.timeout(PATIENCE):
            while sessions.get("agent") != 1:
                (generator,) = (await client.server_info()).clients_of("generator")
                sessions = read_described(generator.settings).get("sessions", {})
                await asyncio.sleep(0.01)
    assert (
        "refused 4 requests of agents in the last 10 min: 3 with status 401 (no valid token), 1 with status 404" in said
    )
    assert sessions["open"] == 2
    assert sessions["nobody"] == 1
    assert sessions["policy"] == 0
    assert sessions["refused"] == {"401": 3, "404": 1}


async def test_a_scorer_tells_of_one_reward(make_stack, monkeypatch):
    monkeypatch.setattr(reward_watch, "LEAST_GROUPS", 3)

    async def nothing(row: Any, text: str, rollout: Rollout) -> float:
        return -rollout.info["number"]  # which is the reward that the rollout brings

    stack = await make_stack(**UNSCORED | {"groups": 40})
    await play(stack, max_groups=3)
    scorer = await stack.score(nothing)
    said = await said_by_doctor(scorer.client, "one-reward")
    assert said.startswith("scorer ")
    assert "every rollout of the last 3 groups or more the reward 0; the newest answer ends with " in said


async def test_a_scorer_tells_of_rewards_that_fail(make_stack):
    async def broken(row: Any, text: str, rollout: Rollout) -> float:
        if rollout.info["number"]:
            raise RuntimeError("the judge is away")
        return 1.0

    stack = await make_stack(**UNSCORED | {"groups": 40})
    for _ in range(2):
        await play(stack, max_groups=3)  # of four rollouts each
    scorer = await stack.score(broken, min_rollouts=1, attempts=1)
    said = await said_by_doctor(scorer.client, "rollouts-fail")
    assert said.startswith("scorer ")
    assert "the judge is away" in said


async def test_a_session_that_no_agent_has_taken_is_not_silent(monkeypatch):
    now = time.monotonic()
    async with running() as run:
        await async_until(lambda: json.loads(run.hook.description["sessions"])["open"] == 2)
        monkeypatch.setattr(endpoint, "time", SimpleNamespace(monotonic=lambda: now + 1000))
        await run.taken()
        monkeypatch.setattr(endpoint, "time", SimpleNamespace(monotonic=lambda: now + 1020))
        told = json.loads(run.hook.description["sessions"])
    assert told == {"open": 2, "nobody": 1, "policy": 0, "agent": 1, "silent": 20}


# ------------------------------------------------------------------------------------------------ the counts


@pytest.mark.parametrize(
    ("rollouts", "failed"),
    [
        ([(0, LEAST_ROLLOUTS - 1)], None),
        ([(0, LEAST_ROLLOUTS)], LEAST_ROLLOUTS),
        ([(10, 10)], None),
        ([(9, 10)], 10),
        ([(0, 64), (33, 0)], None),
        ([(64, 0), (0, 33)], 33),
        ([(38, 90)], 90),
        ([(70, 58)], None),
        ([(28, 20), (28, 20)], None),
    ],
    ids=["too few", "all", "half", "more than half", "not any more", "now", "large", "large and good", "whole groups"],
)
def test_failures_are_told_while_more_than_half_of_the_last_rollouts_failed(rollouts, failed):
    watch = FailureWatch()
    for finished, failures in rollouts:
        watch.record(finished, failures, "why")
    told = json.loads(watch.description.get("failures", "null"))
    assert (told and told["failed"]) == failed
    assert told is None or told["reason"] == "why"


@pytest.mark.parametrize(
    ("length", "reason", "is_told"),
    [(10, "length", True), (10, "stop", False), (50, "length", False), (100, "length", False)],
)
def test_completions_are_cut_early_that_end_for_their_length_before_half_of_max_tokens(length, reason, is_told):
    watch = LengthWatch()
    watch.record(np.full(LEAST_ROLLOUTS, length), [reason] * LEAST_ROLLOUTS, 100)
    assert bool(watch.description) == is_told


def test_a_few_completions_that_are_cut_early_are_no_word_worth():
    watch = LengthWatch()
    watch.record(np.full(64, 10), ["length"] * 6 + ["stop"] * 58, 100)
    assert watch.description == {}


def test_refusals_are_forgotten_and_those_of_usual_work_are_not_counted():
    now = [0.0]
    seen = Refusals(lambda: now[0])
    for status in (200, *refusals.USUAL):
        seen.count(status, "usual")
    assert seen.facts() == {}
    seen.count(429, "wait")
    now[0] = 400.0
    seen.count(401, "no token")
    assert seen.facts() == {"refused": {"401": 1, "429": 1}, "reason": "no token"}
    now[0] = refusals.REFUSED_SECONDS + 1
    assert seen.facts() == {"refused": {"401": 1}, "reason": "no token"}


async def test_groups_that_are_given_up_are_told_by_their_environment(tmp_path):
    engine = ScriptedEngine(hold=asyncio.Event())
    prompts = [{"prompt": "1"}, {"prompt": "2", "tags": {"environment": "code"}}] * 10
    table = TableConfig(name="rollouts", max_staleness=2)
    async with Stack(tables=[table]) as stack:
        generator = await stack.generate(
            engine=engine, prompts=prompts, max_concurrent_groups=2, tags={"environment": "games"}
        )
        for version in (3, 6):
            await async_until(lambda: engine.generating == 2)
            await stack.at(version, tmp_path)
            await generator.counted("groups_aborted", 2 * version // 3)
        told: dict[str, int] = {}
        async with asyncio.timeout(PATIENCE):
            while sum(told.values()) < 4:
                ((_, settings),) = (await stack.client.server_info()).settings_of("generator")
                told = dict(settings.get("given_up", {}))
        engine.release()
    assert told == {"games": 2, "code": 2}


def test_of_many_environments_those_that_lost_most_are_told():
    watch = GivenUpWatch()
    for number in range(2 * MOST_ENVIRONMENTS):
        for _ in range(number % 5 + 1):
            watch.record({"environment": f"environment-{'x' * 40}-{number}"})
    told = json.loads(watch.description["given_up"])
    assert len(json.dumps(watch.description)) < MAX_DESCRIPTION / 2
    assert list(told.values()).count(5) == 12
    assert min(told.values()) == 4
    assert GivenUpWatch().description == {}


def test_a_group_without_an_environment_is_not_told():
    watch = GivenUpWatch()
    watch.record({"level": 3})
    assert watch.description == {}
