"""The share of long tests of each commit: it fits its time, and no file is left out for a week."""

import pytest

from tests import long_share

COMMITS_OF_A_WEEK = 35
SECONDS = {f"tests/test_{number}.py": 50.0 + 10 * number for number in range(60)}


def shares(files, seconds, commits):
    return [long_share.share(files, seconds, f"content {number}") for number in range(commits)]


@pytest.mark.parametrize("seconds", [SECONDS, long_share.measured()], ids=["made up", "as measured"])
def test_a_week_of_commits_runs_every_long_file(seconds):
    seen = set()
    for chosen in shares(list(seconds), seconds, COMMITS_OF_A_WEEK):
        seen.update(chosen)
    assert seen == set(seconds)


def test_a_share_fits_into_its_time_and_leaves_little_of_it():
    for chosen in shares(list(SECONDS), SECONDS, 20):
        taken = sum(SECONDS[file] for file in chosen)
        assert taken <= long_share.SHARE_SECONDS
        assert taken > long_share.SHARE_SECONDS - min(SECONDS.values()) - 100


def test_the_same_content_has_the_same_share_and_another_content_another_one():
    files = list(SECONDS)
    assert long_share.share(files, SECONDS, "a") == long_share.share(files[::-1], SECONDS, "a")
    assert long_share.share(files, SECONDS, "a") != long_share.share(files, SECONDS, "b")


def test_a_file_that_was_not_measured_counts_as_a_minute():
    files = [f"tests/test_new_{number}.py" for number in range(100)]
    assert len(long_share.share(files, {}, "a")) == long_share.SHARE_SECONDS / long_share.UNKNOWN_SECONDS


def test_files_of_long_tests_are_found_wherever_they_lie():
    files = long_share.long_files()
    assert "tests/system/test_kills.py" in files
    assert "tests/server/storage/test_power_cut.py" in files
    assert "tests/test_words.py" not in files


def test_seconds_are_read_from_the_report_of_a_run(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase file="tests/test_a.py" time="1.5"/><testcase file="tests/test_b.py" '
        'time="4"/><testcase file="tests/test_a.py" time="2.25"/></testsuite></testsuites>'
    )
    assert long_share.learn(report) == {"tests/test_a.py": 3.8, "tests/test_b.py": 4.0}
