"""Priorities that groups are inserted with: the built-in scores, and functions of the user's own."""

from __future__ import annotations

import pytest

from replay_client.rollout import RolloutGroup
from replay_client.scoring import group_learnability, group_priority
from replay_client.testing import make_group
from replay_generator import GeneratorConfig
from replay_generator.errors import PromptError
from replay_generator.priorities import load_priority
from replay_generator.testing import ScriptedEngine
from tests.kit.clients import RecordingClient
from tests.kit.generators import make_generator


def test_the_built_in_scores_are_those_of_the_scoring_module():
    group = make_group(rewards=[1.0, 0.0, 0.0, 0.0])
    assert load_priority("advantage")(group) == group_priority(group.rewards, group.advantages)
    assert load_priority("learnability")(group) == pytest.approx(3 / 16)
    assert group_learnability(group.rewards) == pytest.approx(3 / 16)


@pytest.mark.parametrize("name", ["advantage", "learnability"])
def test_a_group_with_nothing_to_teach_has_priority_zero(name):
    assert load_priority(name)(make_group(rewards=[1.0, 1.0])) == 0.0
    assert load_priority(name)(make_group(rewards=[1.0, 0.0], completions=[[7], [7]], loss_mask=[False, False])) == 0.0


def test_a_function_is_given_itself_or_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "my_priorities.py").write_text("def best(group): return group.rewards.max()\nLIMIT = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    group = make_group(rewards=[0.25, 0.75])
    assert load_priority("my_priorities:best")(group) == 0.75
    assert load_priority(lambda group: float(group.group_size))(group) == 2.0
    for name in ("best", "my_priorities:", "no_such_module:f", "my_priorities:missing", "my_priorities:LIMIT"):
        with pytest.raises(ValueError, match=name):
            GeneratorConfig(priority=name)


@pytest.mark.parametrize("result", [-1.0, float("nan"), float("inf"), None, "much"])
def test_what_is_no_priority_is_refused_by_value(result):
    with pytest.raises(ValueError, match=f"returned {result!r}"):
        load_priority(lambda group: result)(make_group(rewards=[1.0, 0.0]))


async def test_a_generator_inserts_with_the_priority_of_its_configuration():
    client = RecordingClient()
    await make_generator(client, ScriptedEngine(), max_groups=1, priority=lambda group: 42.0).run()
    assert client.inserts[0][1] == {"rollouts": 42.0}


async def test_a_priority_function_that_fails_ends_the_run_with_its_error():
    def broken(group: RolloutGroup) -> float:
        raise KeyError("difficulty")

    with pytest.raises(PromptError, match="no priority: KeyError: 'difficulty'"):
        await make_generator(RecordingClient(), ScriptedEngine(), max_groups=1, priority=broken).run()
