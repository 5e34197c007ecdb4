"""Generators that are killed in the middle of partial groups; `kills` kills more often."""

import pytest

from tests.system.partial_groups.kills import kill_generators


def test_what_a_killed_generator_has_finished_others_go_on_with(tmp_path):
    books = kill_generators(1, tmp_path, 1, generators=1)
    assert books.violations == []
    assert books.totals["kills"] == 2
    assert books.totals["rollouts acknowledged"] > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_fifty_kills_lose_no_finished_rollout_and_no_permit(tmp_path):
    books = kill_generators(50, tmp_path, 2)
    assert books.violations == []
    assert books.totals["kills"] == 52
    assert books.totals["groups"] > 50
