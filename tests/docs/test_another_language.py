"""The program in JavaScript of docs/how-to/another-language.md, run as it stands there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import numpy as np
import pytest

from replay_client import ReplayClient, RolloutGroup, group_from_completions
from replay_client.scoring import group_advantages, group_priority
from replay_client.testing import server
from replay_server import SecurityConfig
from tests.docs.blocks import ROOT, blocks
from tests.docs.tables import table_of
from tests.kit.processes import tokens_file
from tests.kit.trainers import lines_of, make_trainer

PAGE = ROOT / "docs/how-to/another-language.md"
PROGRAM = "insert.mjs"
PACKAGES = ROOT / ".venv-node-client"
NODE = shutil.which("node")
REWARDS = [1.0, 0.0]

needs_node = pytest.mark.skipif(
    NODE is None or not (PACKAGES / ".ready").exists(),
    reason=f"make test makes {PACKAGES.name} where node, npm and a registry are",
)


@pytest.fixture
def client() -> Iterator[ReplayClient]:
    with server() as replay:
        yield replay.client()


def program() -> str:
    (text,) = [block.text for block in blocks(PAGE) if block.title == PROGRAM]
    return text


def run(folder: Path, address: str, text: str, **environment: str) -> str:
    """What the program prints."""
    (folder / PROGRAM).write_text(text)
    (folder / "node_modules").symlink_to(PACKAGES / "node_modules")
    assert NODE is not None
    done = subprocess.run(
        [NODE, PROGRAM, address],
        cwd=folder,
        env=os.environ | {"PROTOS": str(ROOT / "protos")} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def arrays() -> dict[str, str]:
    """The dtype of each array of a group besides extras, by name."""
    dtypes = {"Int32": "int32", "Float32": "float32", "Bool": "bool"}
    kinds = {field.name: str(field.type).partition(" ")[0] for field in fields(RolloutGroup)}
    return {name: dtypes[kind] for name, kind in kinds.items() if kind in dtypes}


def group_of_the_page() -> RolloutGroup:
    return group_from_completions(
        prompt_ids=[5, 6, 7],
        completions=[[8, 2], [9, 10, 2]],
        logprobs=[[-2.4, -3.1], [-2.2, -2.7, -2.9]],
        loss_mask=[True] * 5,
        rewards=REWARDS,
        advantages=group_advantages(REWARDS),
        prompt_id="prompt-1",
        finish_reasons=["stop", "stop"],
        sampling={"temperature": 1},
    )


@needs_node
def test_a_program_in_javascript_prints_what_the_page_says(client, tmp_path):
    (shown,) = [block.text for block in blocks(PAGE) if block.language == "console"]
    assert run(tmp_path, client.address, program()) == shown.splitlines(keepends=True)[-1]


@needs_node
def test_a_group_of_a_program_in_javascript_is_bit_for_bit_that_of_the_python_client(client, tmp_path):
    run(tmp_path, client.address, program())
    (sample,) = client.sample("rollouts", timeout=60.0)
    assert sample.group == group_of_the_page()


@needs_node
def test_its_priority_is_that_of_the_python_client(client, tmp_path):
    run(tmp_path, client.address, program())
    (sample,) = client.sample("rollouts", timeout=60.0)
    assert sample.info.priority == pytest.approx(group_priority(REWARDS, group_advantages(REWARDS)))


@needs_node
def test_a_group_in_many_chunks_arrives_whole(client, tmp_path):
    in_one_chunk = program()
    in_many = in_one_chunk.replace("const CHUNK = 1 << 20;", "const CHUNK = 64;")
    assert in_many != in_one_chunk
    run(tmp_path, client.address, in_many)
    (sample,) = client.sample("rollouts", timeout=60.0)
    assert sample.group == group_of_the_page()


@needs_node
def test_a_trainer_trains_on_a_group_of_a_program_in_javascript(client, tmp_path):
    run(tmp_path, client.address, program())
    make_trainer(client, tmp_path / "run", max_steps=1, groups_per_step=1).train()
    (metrics,) = lines_of(tmp_path / "run")
    assert metrics["fresh/reward_mean"] == pytest.approx(np.mean(REWARDS))


@needs_node
def test_a_program_in_javascript_sends_its_token(tmp_path):
    token = "0123456789abcdef"
    security = SecurityConfig(tokens_file=tokens_file(tmp_path, f"read-write:{token}"))
    with server(security=security) as replay:
        assert run(tmp_path, replay.address, program(), REPLAY_TOKEN=token) == "inserted 1 of 1\n"


def rows_below(heading: str) -> list[list[str]]:
    """The cells of the table of the page whose heading begins with this cell."""
    page = PAGE.read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {heading} |")]
    _rule, *rows = table_of(page, line)
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def test_the_page_has_each_array_of_a_group_with_its_dtype():
    assert {name: dtype for name, dtype, *_ in rows_below("array")} == arrays()


def test_the_page_says_which_arrays_a_group_must_have():
    required = {field.name for field in fields(RolloutGroup) if field.default is MISSING} & arrays().keys()
    assert {name for name, _, _, needed, _ in rows_below("array") if needed == "yes"} == required


def test_the_page_has_each_small_field_of_a_group():
    named = {field.name for field in fields(RolloutGroup)}
    assert {name for name, *_ in rows_below("small field")} == named - arrays().keys() - {"extras", "axes"}


def test_the_page_names_the_locked_versions_of_the_packages():
    lock = json.loads((ROOT / "tests/docs/node/package-lock.json").read_text())["packages"]
    names = json.loads((ROOT / "tests/docs/node/package.json").read_text())["dependencies"]
    text = " ".join(PAGE.read_text().split())
    for name in names:
        assert f"`{name}` {lock[f'node_modules/{name}']['version']}" in text


def test_the_lock_file_of_the_packages_names_no_registry():
    assert "resolved" not in (ROOT / "tests/docs/node/package-lock.json").read_text()
