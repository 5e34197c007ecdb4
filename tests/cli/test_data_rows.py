"""Rows of data sets: which make a group, and what is said of those that cannot."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from replay_cli.data_rows import items_of
from replay_client import RolloutGroup
from replay_server import ReplayServer, TableConfig
from tests.kit.processes import run_replay

LEAST = {"prompt_ids": [3], "completion_ids": [5, 6], "reward": 1.0}


def groups_of(*rows: dict[str, Any]) -> list[RolloutGroup]:
    return [RolloutGroup.decode(row["payload"]) for _, row in items_of(enumerate(rows, start=1), "replay")]


def test_rows_of_one_prompt_that_follow_one_another_are_a_group():
    named = [LEAST | {"prompt_id": name} for name in ("a", "a", "b", "a")]
    assert [(group.prompt_id, group.group_size) for group in groups_of(*named)] == [("a", 2), ("b", 1), ("a", 1)]
    unnamed = [LEAST, LEAST, LEAST | {"prompt_ids": [4]}]
    assert [group.group_size for group in groups_of(*unnamed)] == [2, 1]


def test_rows_of_one_rollout_are_its_sequences():
    (group,) = groups_of(*(LEAST | {"rollout": rollout} for rollout in (0, 0, 1)))
    assert group.sequence_counts is not None
    assert group.sequence_counts.tolist() == [2, 1]


def test_a_row_without_a_rollout_is_none_of_the_rollout_before_whatever_its_number():
    (group,) = groups_of(LEAST | {"rollout": 1}, LEAST, LEAST | {"rollout": 2})
    assert group.group_size == 3


def test_equal_groups_of_one_file_are_items_of_their_own_and_have_the_same_keys_the_next_time():
    rows = [LEAST | {"prompt_id": name} for name in ("a", "b", "a")]
    keys = [[row["key"] for _, row in items_of(enumerate(rows, start=1), "replay")] for _ in range(2)]
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 3


def test_rows_that_replay_export_wrote_stay_as_they_are():
    rows = [{"key": "1", "completion_ids": [5]}, {"key": None, "payload": b"x"}, {}]
    assert [row for _, row in items_of(enumerate(rows), None)] == rows


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([LEAST | {"reward": None}], "rows 1 to 1: there is no reward"),
        ([LEAST, LEAST | {"prompt_ids": None, "prompt_id": "a"}], "rows 2 to 2: there is no prompt_ids"),
        ([LEAST | {"logprobs": [-1.0]}], "rows 1 to 1: completion 0 has 2 tokens and 1 log-probability"),
        ([LEAST | {"logprobs": [0.5, -1]}], "rows 1 to 1: rollout_logprobs holds 0.5"),
        ([LEAST, LEAST | {"completion_ids": [-1]}], "rows 1 to 2: completion_ids holds -1"),
        ([LEAST | {"completion_ids": "ab"}], "rows 1 to 1: "),
        ([LEAST | {"rollout": 0, "reward": r} for r in (0.0, 1.0)], "rows 1 to 2: reward differs in the rows of one"),
    ],
    ids=["no reward", "no prompt", "too few", "above 0", "negative", "a text", "two rewards"],
)
def test_rows_that_make_no_group_are_named_with_the_reason(rows, words):
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        groups_of(*rows)


OWN = {name: value for name, value in LEAST.items() if name != "completion_ids"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "completion": "b", "reward": 1.0}, "there is no prompt_ids, completion_ids, only prompt, com"),
        (OWN, "there is no completion_ids, only prompt_ids, reward"),
        ({}, "there is no prompt_ids, completion_ids, reward, only nothing"),
    ],
    ids=["texts", "no completion", "nothing"],
)
def test_an_import_of_rows_of_ones_own_says_what_they_need(tmp_path, row, words):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with ReplayServer(tables=[TableConfig(name="replay")], port=0) as server:
        said = run_replay("table", "import", str(path), "--table", "replay", address=server.address)
    assert said.returncode == 1
    assert "and a sequence of your own needs prompt_ids, completion_ids, reward, of which " + words in said.stderr


def test_rows_that_name_no_table_need_one():
    with pytest.raises(ValueError, match="say with --table where the groups go"):
        list(items_of([(1, LEAST)], None))
