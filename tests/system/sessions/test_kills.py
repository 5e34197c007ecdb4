"""Generators, the server, and agents or scorers that are killed; their `kills` kill more often."""

import pytest

from tests.system.scoring.kills import kill_all_sorts as kill_scorers
from tests.system.sessions.kills import kill_all_sorts as kill_agents


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kill", "first", "fleet"), [(kill_agents, 1, (1, 3)), (kill_scorers, 2, (1, 2))])
def test_whoever_is_killed_each_group_comes_once_in_one_place_and_with_its_rewards(tmp_path, kill, first, fleet):
    books = kill(first, 1, 1, tmp_path, 1, fleet=fleet)
    assert books.violations == []
    assert books.totals["groups"] > 2
    if kill is kill_agents:
        assert books.totals["ends answered"] > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kill", [kill_agents, kill_scorers])
def test_ninety_kills_of_agents_or_scorers_generators_and_servers_lose_no_group_and_no_permit(tmp_path, kill):
    books = kill(50, 20, 20, tmp_path, 2)
    assert books.violations == []
    assert books.totals["kills"] >= 90
