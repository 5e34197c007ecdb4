"""Agents, generators and the server that are killed amid sessions; `kills` kills more often."""

import pytest

from tests.system.sessions.kills import kill_all_sorts


@pytest.mark.timeout(600)
def test_whoever_is_killed_amid_sessions_each_rollout_comes_once_with_the_reward_of_its_agent(tmp_path):
    books = kill_all_sorts(1, 1, 1, tmp_path, 1, fleet=(1, 3))
    assert books.violations == []
    assert books.totals["groups"] > 2


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ninety_kills_of_agents_generators_and_servers_lose_no_rollout_and_no_permit(tmp_path):
    books = kill_all_sorts(50, 20, 20, tmp_path, 2)
    assert books.violations == []
    assert books.totals["kills"] >= 90
