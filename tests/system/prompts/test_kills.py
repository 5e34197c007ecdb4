"""Epochs of prompts whose generators and server are killed; `tests.system.prompts.kills` kills more often."""

import pytest

from tests.system.prompts.kills import kill_all_along


def test_a_killed_generator_and_a_killed_server_cost_no_prompt_and_repeat_none(tmp_path):
    books = kill_all_along(40, 2, tmp_path, 1, generators=1, window=16, server_every=2, held=True)
    assert books.violations == []
    assert books.totals == {"groups": 40, "kills": 1, "kills of the server": 1}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fifty_kills_leave_each_of_ten_thousand_prompts_done_once(tmp_path):
    books = kill_all_along(10_000, 50, tmp_path, 2)
    assert books.violations == []
    assert books.totals["groups"] == 10_000
    assert books.totals["kills of the server"] == 10
