"""The words of `replay run` about its parts, by the metrics that these write."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replay_cli.run.display import line_of
from replay_cli.run.status import RunStatus

NEWEST = {"groups": 1, "tokens_per_second": None, "policy_version": 0}


def line_after(folder: Path, **metrics: Any) -> str:
    """The line about a run whose generator has written these metrics last."""
    written = folder / "generator.jsonl"
    written.write_text(json.dumps(NEWEST | metrics) + "\n")
    plan: Any = SimpleNamespace(
        train_dir=folder, generator_metrics=[written], generators=[SimpleNamespace(name="generator")]
    )
    part: Any = SimpleNamespace(name="generator", state="running", starts=1)
    status = RunStatus(plan, [part])
    status.read("")
    return line_of(status)


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({}, "generator 1 group, policy version 0 | no step yet"),
        (
            {"groups": 371, "tokens_per_second": 415.4, "policy_version": 21},
            "generator 371 groups, 415 tokens/s, policy version 21 | no step yet",
        ),
    ],
    ids=["a first group", "a run at work"],
)
def test_the_line_about_a_generator_says_its_rate_once_it_is_known(tmp_path, metrics, line):
    assert line_after(tmp_path, **metrics) == line
