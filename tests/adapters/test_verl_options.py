"""The options of RecoveringAgentLoop, with verl's own configuration, in the environment of test_verl.py."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from replay_server import ReplayServer, TableConfig
from tests.adapters.killed_verl import prepare
from tests.adapters.test_verl import python_with_verl
from tests.packages import ROOT

pytestmark = pytest.mark.timeout(900)  # a guard against hanging: importing verl takes long where others are busy


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What run_verl_options wrote."""
    python, folder = python_with_verl(), tmp_path_factory.mktemp("verl")
    prepare(folder)
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "client", "trainer", "protos"))
    with ReplayServer([TableConfig(name="finished")], port=0) as server:
        done = subprocess.run(
            [python, "-m", "tests.adapters.run_verl_options", server.address, str(folder)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    content: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return content


def test_the_configuration_of_the_page_is_accepted(report):
    assert report["accepted"] == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("an unknown option", "custom.replay: RecoveryOptions: there is no 'staleness'; did you mean 'max_staleness'?"),
        ("a negative limit", "custom.replay: max_staleness must be at least 0"),
        ("a timeout of zero", "custom.replay: timeout must be greater than 0"),
        ("no callback", "set it to replay_adapters.verl_recovery.RecoveringCheckpoints"),
        ("a trainer without TransferQueue", "set trainer.use_v1=True"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_the_remedy(report, name, words):
    assert words in report["refusals"][name]


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("sync", None),
        ("async, dropping", 2),
        ("async, waiting", None),
        ("the option", 1),
        ("the option beside verl's threshold", 1),
    ],
)
def test_a_stored_group_may_lag_as_far_as_verl_and_the_option_allow(report, name, bound):
    assert report["bounds"][name] == bound


def test_a_worker_in_another_folder_stores_groups_under_the_run_of_its_driver(report):
    assert report["runs"]["worker"] == report["runs"]["driver"]
    assert report["runs"]["in verl's configuration"] == "None", "verl's own configuration stays as it is"


def test_a_run_is_the_same_in_each_start_and_differs_by_its_folder_or_its_name(report):
    runs = report["runs"]
    assert runs["again"] == runs["driver"]
    assert len({runs["driver"], runs["driver elsewhere"], runs["mine"], runs["yours"]}) == 4


def test_a_prompt_ends_if_its_stored_group_cannot_be_put_into_transfer_queue(report):
    assert report["statuses"] == [{"key": "u", "partition": "train", "status": "failure"}]
