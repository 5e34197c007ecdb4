"""A pool as a data set: the package `datasets` reads it, TRL trains on it, and what others wrote becomes groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer

from replay_client import ReplayClient, RolloutGroup, group_from_rows
from replay_client.testing import make_group
from replay_server import ReplayServer, TableConfig
from tests.docs.blocks import ROOT, blocks
from tests.kit.models import save_model
from tests.kit.processes import run_replay


def agents() -> RolloutGroup:
    """Two rollouts, a right one of two sequences, of which the second has a context and the first a tool's token."""
    return group_from_rows(
        prompts=[[3, 4], [3, 4, 9], [3, 4]],
        completions=[[5, 6, 7], [8], [10, 11]],
        logprobs=[[-0.1, np.nan, -0.3], [-0.4], [-0.5, -0.6]],
        loss_masks=[[True, False, True], [True], [True, True]],
        sequence_counts=[2, 1],
        rewards=[1.0, 0.0],
        advantages=[0.7, -0.7],
        prompt_id="sum",
        finish_reasons=("stop", "length"),
        sampling={"temperature": 0.8},
        policy_version=3,
    )


def by_prompt(client: ReplayClient) -> dict[tuple[int, ...], RolloutGroup]:
    """The groups of the pool by their prompts."""
    groups = [item.group for item in client.get([item.key for item in client.list_items("replay")])]
    return {tuple(group.prompt_ids.tolist()): group for group in groups}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "MODEL")
    return tmp_path


@pytest.mark.long
def test_an_exported_pool_is_a_data_set_that_trl_trains_on_and_an_imported_one_gives_the_groups(folder):
    with ReplayServer(tables=[TableConfig(name="replay")], port=0) as server, ReplayClient(server.address) as client:
        client.insert(agents(), {"replay": 1.0})
        client.insert(make_group(prompt=[12], completions=[[5, 6], [7]], rewards=[1.0, 0.0]), {"replay": 1.0})
        command = ("table", "export", "replay", "replay.parquet", "--rows", "sequences", "--tokenizer", "MODEL")
        assert (done := run_replay(*command, address=server.address)).returncode == 0, done.stderr

        (page,) = [each for each in blocks(ROOT / "docs/how-to/export.md") if "SFTTrainer(" in each.text]
        names: dict[str, Any] = {}
        exec(page.text.replace('report_to="none"', 'report_to="none", use_cpu=True, save_strategy="no"'), names)
        assert [(row["input_ids"], row["labels"]) for row in names["right"]] == [
            ([3, 4, 5, 6, 7], [-100, -100, 5, -100, 7]),
            ([3, 4, 9, 8], [-100, -100, -100, 8]),
            ([12, 5, 6], [-100, 5, 6]),
        ]
        texts = names["SFTTrainer"](
            model=names["AutoModelForCausalLM"].from_pretrained("MODEL"),
            args=names["SFTConfig"](output_dir="texts", report_to="none", use_cpu=True),
            train_dataset=names["rows"],
            processing_class=AutoTokenizer.from_pretrained("MODEL"),
        )
        assert texts.train_dataset[4]["input_ids"] == [12, 7, 1]  # with the token that ends a text
        assert texts.train_dataset[4]["labels"] == [-100, 7, 1]

        others = names["rows"].remove_columns(["key", "table", "priority"])
        others.to_parquet("others.parquet")
        client.reset("replay")
        for said in (
            "2 items of others.parquet inserted\n",
            "0 items of others.parquet inserted; 2 were there before\n",
        ):
            imported = run_replay("table", "import", "others.parquet", "--table", "replay", address=server.address)
            assert imported.stdout == said, imported.stderr
        found = by_prompt(client)
    assert found[3, 4] == agents()
    assert found[12,].completion_ids.tolist() == [5, 6, 7]


def test_the_least_that_a_data_set_needs_comes_in_from_the_package_datasets(folder):
    rows = [
        {"prompt_ids": [3, 4], "completion_ids": [5, 6], "reward": 1.0},
        {"prompt_ids": [3, 4], "completion_ids": [7], "reward": 0.0},
        {"prompt_ids": [8], "completion_ids": [5], "reward": 1.0},
    ]
    Dataset.from_list(rows).to_parquet("answers.parquet")
    Path("answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_dataset("parquet", data_files="answers.parquet", split="train")[1] == rows[1]
    with ReplayServer(tables=[TableConfig(name="replay")], port=0) as server, ReplayClient(server.address) as client:
        done = run_replay(
            "table", "import", "answers.parquet", "answers.jsonl", "--table", "replay", address=server.address
        )
        assert done.stdout == "2 items of answers.parquet, answers.jsonl inserted\n", done.stderr
        found = by_prompt(client)
        assert sorted(item.priority > 0 for item in client.list_items("replay")) == [False, True]
    first, second = found[3, 4], found[8,]
    assert first.completion_lengths.tolist() == [2, 1]
    assert first.rewards.tolist() == [1.0, 0.0]
    assert np.isnan(first.rollout_logprobs).all()
    assert first.advantages[0] == -first.advantages[1] > 0.5
    assert second.group_size == 1
