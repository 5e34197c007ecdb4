"""What `replay generate` and `replay score` print of their progress."""

from __future__ import annotations

import json
from typing import Any

import pytest

from replay_cli.generate import in_a_line, reporter
from replay_generator.metrics import GeneratorMetrics


def stats_of(**changes: Any) -> Any:
    """The statistics of a generator, which is new but for the changes."""
    return GeneratorMetrics(solved_reward=1.0).stats | changes


@pytest.mark.parametrize("as_json", [False, True], ids=["for people", "as JSON"])
def test_the_last_line_is_printed_once(capsys, as_json):
    report = reporter(as_json)
    report(stats_of(groups=1))
    report(stats_of(groups=2))  # too soon after the line before
    report(stats_of(groups=2), 0.0)
    report(stats_of(groups=2), 0.0)
    lines = capsys.readouterr().out.splitlines()
    if as_json:
        assert [json.loads(line)["groups"] for line in lines] == [1, 2]
    else:
        assert lines == ["1 group, policy version 0", "2 groups, policy version 0"]


def test_a_line_has_reward_and_rate_once_they_are_known():
    stats = stats_of(groups=40, reward_mean=0.25, tokens_per_second=415.4, policy_version=7)
    assert in_a_line(stats) == "40 groups, reward 0.250, policy version 7, 415 tokens/s"
