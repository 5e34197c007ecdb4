"""A folder with a tiny model, its prompts and rewards, in which a run could start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from examples.demo.task import make_model, make_tokenizer, problems

REWARDS = """
def right(row, completion):
    return float(completion == row["answer"])


def first_letter(row, completion):
    return float(completion[0] == "1")


def turns(row, completion, rollout):
    return float(len(rollout.turns))


def abstains(row, completion):
    return None


async def play(task, policy):
    raise NotImplementedError
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A model that was not trained, with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "model"
    make_model(0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def place(model, tmp_path, monkeypatch) -> Path:
    """The working folder: `model`, prompts.jsonl and my_rewards.py."""
    shutil.copytree(model, tmp_path / "model")
    rows = problems(0, 8)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path
