"""Scorers, generators and the server that are killed; `kills` kills more often."""

import pytest

from tests.system.scoring.kills import kill_all_sorts


@pytest.mark.timeout(600)
def test_whoever_is_killed_each_group_is_scored_once_and_in_one_place(tmp_path):
    books = kill_all_sorts(2, 1, 1, tmp_path, 1, fleet=(1, 2))
    assert books.violations == []
    assert books.totals["groups"] > 2


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ninety_kills_of_scorers_generators_and_servers_lose_no_group_and_no_permit(tmp_path):
    books = kill_all_sorts(50, 20, 20, tmp_path, 2)
    assert books.violations == []
    assert books.totals["kills"] >= 90
