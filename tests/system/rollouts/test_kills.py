"""Generators that are killed in the middle of rollouts; `tests.system.rollouts.kills` kills more often."""

import pytest

from tests.system.rollouts.kills import kill_generators


@pytest.mark.long
def test_what_a_killed_generator_leaves_is_whole_groups_and_permits_that_come_back(tmp_path):
    books = kill_generators(1, tmp_path, 1, generators=1)
    assert books.violations == []
    assert books.totals["kills"] == 2
    assert books.totals["groups"] >= 2


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_fifty_kills_leave_whole_groups_and_hold_up_nobody(tmp_path):
    books = kill_generators(50, tmp_path, 2)
    assert books.violations == []
    assert books.totals["kills"] == 52
    assert books.totals["groups of survivors"] > 0
    assert books.totals["permits of the dead"] > 0
