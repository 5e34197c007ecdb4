"""The parts of `replay run`, or all of it, are killed or stopped at random moments; `kills` does so more often."""

import pytest

from tests.system.run.kills import kill_all_sorts, kill_parts, kill_run, make_model_folder, stop_run


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_whose_parts_are_killed_ends_by_itself_with_each_step_once(tmp_path):
    books = kill_parts(tmp_path / "run", make_model_folder(tmp_path), seed=1, kills=3)
    assert books.violations == []
    assert books.totals["kills"] == 3


@pytest.mark.timeout(900)
@pytest.mark.long
def test_a_run_that_is_killed_leaves_no_process_and_the_same_command_finishes_it(tmp_path):
    books = kill_run(tmp_path / "run", make_model_folder(tmp_path), seed=2, kills=1, stubborn=True)
    assert books.violations == []
    assert books.totals["kills"] == 1


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_that_is_stopped_repeats_no_step(tmp_path):
    books = stop_run(tmp_path / "run", make_model_folder(tmp_path), seed=3, stops=2)
    assert books.violations == []


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_kills_and_stops_of_all_sorts_lose_no_group_and_repeat_no_step(tmp_path):
    books = kill_all_sorts(tmp_path, seed=4, kills=8)
    assert books.violations == []
    assert books.totals["kills"] >= 10
