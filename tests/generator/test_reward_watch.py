"""One reward for all rollouts of many groups: noticed, told the server, and forgotten when rewards differ again."""

import asyncio
import json

import numpy as np
import pytest

from replay_client.testing import PATIENCE
from replay_dashboard.diagnosis import diagnose
from replay_generator import GeneratorConfig, RolloutGenerator
from replay_generator.groups import inserting
from replay_generator.prompts.prompt import Prompt
from replay_generator.rewards import reward_watch as watch
from replay_generator.rewards.functions import load_reward
from replay_generator.rewards.reward_watch import RewardWatch
from replay_generator.testing import ScriptedEngine
from tests.kit.prompts import EPOCH
from tests.kit.servers import async_serving

ROW = {"question": "a", "answer": "so\\n#### 72"}


def watched(*rewards, row=ROW, built_in=()):
    seen = RewardWatch([load_reward(name) for name in built_in])
    for each in rewards:
        seen.record(np.array(each, np.float32), row, "It is \\\\boxed{72}")
    return json.loads(seen.description.get("one_reward", "null"))


NONE = [[0.0, 0.0]] * watch.LEAST_GROUPS


@pytest.mark.parametrize(
    ("rewards", "value"),
    [
        (NONE, 0.0),
        ([[1.0, 1.0]] * watch.LEAST_GROUPS, 1.0),
        ([[0.0, 1.0], *NONE], 0.0),
        (NONE[1:], None),
        ([*NONE, [0.0, 1.0]], None),
        ([*NONE, [1.0, 1.0]], None),
        ([[0.0, 1.0]] * 99, None),
        ([[0.0, 0.0], [1.0, 1.0]] * 99, None),
    ],
    ids=["none", "all", "at last", "too few", "not now", "another", "differ", "by group"],
)
def test_one_reward_is_told_while_it_is_the_only_one(rewards, value):
    told = watched(*rewards)
    assert (None if told is None else told["value"]) == value


def test_the_pair_is_of_the_field_that_the_reward_reads():
    assert watched(*NONE)["expected"] == "so\\n#### 72"
    assert watched(*NONE)["got"] == "It is \\\\boxed{72}"
    row = {"answer": "1", "reward_model": {"ground_truth": "2"}, "s": "3"}
    assert watched(*NONE, row=row, built_in=["exact_match:s"])["expected"] == "3"
    assert watched(*NONE, row={"reward_model": {"ground_truth": "2"}})["expected"] == "2"
    assert "expected" not in watched(*NONE, row={})


async def test_a_generator_tells_the_server_of_one_reward_and_then_the_doctor_says_so(monkeypatch):
    monkeypatch.setattr(inserting, "SECONDS_PER_LOOK", 0.2)
    monkeypatch.setattr(watch, "LEAST_GROUPS", 3)
    found = []

    def prompts():
        while not found:
            yield Prompt.of({"prompt": "1+1=", "answer": "#### 2"})

    async with async_serving(EPOCH) as client, asyncio.timeout(PATIENCE):
        config = GeneratorConfig(group_size=2, max_concurrent_groups=1)
        generator = RolloutGenerator(client, ScriptedEngine(), prompts(), [load_reward("exact_match")], config)
        run = asyncio.create_task(generator.run())
        while not found:
            await asyncio.sleep(0.01)
            info = await client.server_info()
            found = [each for each in diagnose(info, info.version, info.time) if each.rule == "one-reward"]
        await run
    assert "the reward 0; expected '#### 2', and the newest answer ends with '78'" in found[0].message
