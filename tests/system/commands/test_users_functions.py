"""`replay generate` and `replay score` with functions of users that do what no function should."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from replay_client import ReplayClient
from tests.generator.user_functions import swallowing_grader
from tests.kit.processes import Running, server_process

CONFIG = """
tables = [{ name = "rollouts", sampler = "fifo", max_times_sampled = 1, max_size = 1000 }]
[admission]
table = "rollouts"
fresh_groups_per_step = 1000
max_staleness = 4
permit_tables = ["unscored"]
"""
MODULE = """
import os, subprocess, sys
from tests.generator.user_functions import exits, swallowing_grader

def noisy(row, text):
    print("a line of the function")
    os.chdir(os.path.dirname(__file__))
    subprocess.run(["echo", "a line of its child"])
    return swallowing_grader(row, text)

def picky(row, text):
    if row["prompt"] != picky.first:
        raise ValueError("not this one")
    return 1.0

def blocks(row, text):
    return float(len(text))

async def stands_still(row, text):
    with open(os.environ["GATE"]) as gate:
        return float(len(gate.read()))
"""


def start(folder: Path, address: str, model: Path, *options: str, **variables: str) -> Running:
    """`replay generate` in `folder`, whose modules `elsewhere` has."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / "strange_rewards.py").write_text(MODULE)
    path = os.pathsep.join([str(elsewhere), os.environ["PYTHONPATH"]]) if "PYTHONPATH" in os.environ else str(elsewhere)
    return Running(
        *("--address", address, "--timeout", "5", "generate", "--engine", "transformers", "--model", str(model)),
        *("--prompts", str(model.parent / "prompts.jsonl"), "--max-tokens", "6", *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path} | variables,
        cwd=folder,
    )


def in_a_script(client: ReplayClient, groups: int, model: Path) -> tuple[list[Any], list[Any]]:
    """The rewards of all answers, and what a script makes of the same texts."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    stored: list[Any] = []
    expected: list[Any] = []
    for sample in client.sample("rollouts", groups, timeout=120.0):
        stored += sample.group.rewards.tolist()
        for span in sample.group.rollout_spans():
            text = tokenizer.decode(sample.group.completion_ids[span], skip_special_tokens=True)
            expected.append(swallowing_grader({}, text))
    return stored, expected


def test_two_hundred_answers_are_graded_as_in_a_script_while_the_function_prints_and_changes_the_folder(
    tmp_path, model_folder
):
    with server_process(tmp_path, CONFIG) as server, ReplayClient(server.address, timeout=90.0) as client:
        options = ("--reward", "strange_rewards:noisy", "--json", "--metrics-path", "metrics.jsonl")
        command = start(tmp_path, server.address, model_folder, *options, "--group-size", "20", "--max-groups", "10")
        said, complained = command.communicate(timeout=300)
        assert command.returncode == 0, complained
        stored, expected = in_a_script(client, 10, model_folder)
    assert len(stored) == 200
    assert stored == expected
    assert len(set(stored)) > 1
    assert complained.count("asks for a signal (signal.signal(SIGALRM)") == 1
    assert "a line of the function" in complained
    assert "a line of its child" in complained
    lines = [json.loads(line) for line in said.splitlines()]
    assert lines[-1]["groups"] == 10
    assert (tmp_path / "metrics.jsonl").exists()
    assert not (tmp_path / "elsewhere/metrics.jsonl").exists()


def test_a_scorer_grades_as_a_script_too(tmp_path, model_folder):
    with server_process(tmp_path, CONFIG) as server, ReplayClient(server.address, timeout=90.0) as client:
        scorer = Running(
            *("--address", server.address, "score", "--source-table", "unscored", "--table", "rollouts"),
            *("--reward", "tests.generator.user_functions:swallowing_grader"),
            stderr=subprocess.PIPE,
        )
        options = ("--unscored-table", "unscored", "--group-size", "4", "--max-groups", "3")
        command = start(tmp_path, server.address, model_folder, *options)
        command.communicate(timeout=200)
        stored, expected = in_a_script(client, 3, model_folder)
        scorer.terminate()
        _, complained = scorer.communicate(timeout=200)
    assert stored == expected
    assert complained.count("asks for a signal (signal.signal(SIGALRM)") == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--reward", "strange_rewards:exits"),
            "reward function 'exits' raised SystemExit: 3 (",
        ),
        (
            ("--reward", "exact_match", "--rollout", "strange_rewards:exits"),
            "function 'exits' raised SystemExit: 3 (",
        ),
        (
            ("--reward", "strange_rewards:blocks", "--set", "priority=strange_rewards:exits"),
            "function 'exits' raised SystemExit: 3 (",
        ),
        (
            ("--reward", "strange_rewards:picky", "--set", "on_prompt_error=skip", "--max-groups", "3"),
            "the run made 0 of the 3 groups that --max-groups asks for",
        ),
    ],
)
def test_a_run_that_a_function_ends_or_leaves_without_groups_has_status_1_and_says_why(
    tmp_path, model_folder, options, says
):
    with server_process(tmp_path, CONFIG) as server:
        command = start(tmp_path, server.address, model_folder, *options)
        _, complained = command.communicate(timeout=200)
    assert command.returncode == 1
    assert says in complained.splitlines()[-1]
    assert "Traceback" not in complained


def test_an_async_function_that_blocks_is_named_after_five_seconds(tmp_path, model_folder):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with server_process(tmp_path, CONFIG) as server:
        options = ("--reward", "strange_rewards:stands_still", "--max-groups", "1", "--group-size", "1")
        command = start(tmp_path, server.address, model_folder, *options, GATE=str(gate))
        line = ""
        while "stands still" not in line:
            line = command.stderr.readline()
            assert line
        with gate.open("w") as file:
            file.write("open")
        command.communicate(timeout=200)
    assert "the event loop stands still for 5 s now, in function 'stands_still' (" in line
    assert "strange_rewards.py, line" in line
    assert command.returncode == 0
