"""What shows a run elsewhere may fail: the run goes on. Weights & Biases sees a resumed run as one run.

`wandb` is a client of a service in the network, so a module stands in its place here. It has what the trainer relies
on: `init(id=, resume=, dir=, config=)`, and of a run `define_metric(name, step_metric=)`, `log(values)` and `finish()`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from replay_trainer import GRPOConfig, callbacks
from replay_trainer.metrics import read_metrics
from tests.kit.clients import FakeClient
from tests.kit.processes import fails
from tests.kit.trainers import lines_of, make_batches, make_trainer

WANDB = '''
"""Notes each call in a file, and fails in those that FAILS names."""
import json, os, threading
from pathlib import Path

CALLS = Path(__file__).with_name("calls.jsonl")
FAILS = os.environ.get("FAILS", "").split(",")
HANGS = os.environ.get("HANGS", "")

def note(called, **values):
    with CALLS.open("a") as file:
        file.write(json.dumps([called, values]) + chr(10))
    if called == HANGS:
        threading.Event().wait()
    if called in FAILS:
        raise ConnectionError("api.example: network is unreachable")

class Run:
    def define_metric(self, name, step_metric=None):
        note("define_metric", name=name, step_metric=step_metric)

    def log(self, values, step=None):
        note("log", values=values, step=step)

    def finish(self):
        note("finish")

def init(id, resume, dir, config):
    note("init", id=id, resume=resume, dir=dir)
    return Run()
'''


@pytest.fixture
def calls(tmp_path, monkeypatch) -> Any:
    """The calls of `wandb` so far, by name, with their values."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)

    def of(name: str) -> list[Any]:
        lines = (folder / "calls.jsonl").read_text().splitlines()
        return [values for called, values in map(json.loads, lines) if called == name]

    yield of
    sys.modules.pop("wandb", None)


def train(folder: Path, steps: int, **options: Any) -> list[int]:
    options = {"max_steps": steps, "report_to": "wandb"} | options
    make_trainer(FakeClient(make_batches(steps)), folder, **options).train()
    return [line["step"] for line in lines_of(folder)]


@pytest.mark.parametrize("failing", ["init", "define_metric", "log", "finish", "init,log,finish"])
def test_weights_and_biases_that_fails_is_one_warning_and_training_goes_on(
    tmp_path, calls, monkeypatch, caplog, failing
):
    monkeypatch.setenv("FAILS", failing)
    assert train(tmp_path / "run", 3) == [1, 2, 3]
    said = [line for line in caplog.messages if "Weights & Biases fails, and training goes on without it" in line]
    assert len(said) == 1
    assert "ConnectionError: api.example: network is unreachable" in said[0]


@pytest.mark.parametrize("hanging", ["init", "log", "finish"])
def test_weights_and_biases_that_does_not_answer_is_named_with_its_bound_and_training_goes_on(
    tmp_path, calls, monkeypatch, caplog, hanging
):
    monkeypatch.setenv("HANGS", hanging)
    monkeypatch.setattr(callbacks, "SERVICE_SECONDS", 0.5)
    assert train(tmp_path / "run", 3) == [1, 2, 3]
    said = [line for line in caplog.messages if "Weights & Biases fails, and training goes on without it" in line]
    assert len(said) == 1
    assert "TimeoutError: no answer within 0.5 s" in said[0]
    assert len(calls(hanging)) == 1


def test_the_end_of_the_process_waits_for_weights_and_biases_no_longer_than_the_trainer(tmp_path, calls, monkeypatch):
    monkeypatch.delenv("WANDB_FINISH_TIMEOUT", raising=False)
    train(tmp_path / "run", 1)
    assert float(os.environ["WANDB_FINISH_TIMEOUT"]) == callbacks.SERVICE_SECONDS


def test_a_callback_of_the_user_still_ends_the_run(tmp_path):
    def fails(metrics: dict[str, float]) -> None:
        raise ConnectionError("mine")

    with pytest.raises(ConnectionError, match="mine"):
        train(tmp_path / "run", 1, report_to=(), on_step=fails)


def test_the_runs_own_files_are_no_reporters(tmp_path):
    (tmp_path / "run/steps.jsonl").mkdir(parents=True)
    with pytest.raises(OSError, match=r"steps\.jsonl"):
        train(tmp_path / "run", 1, report_to=())


def test_a_resume_goes_on_as_the_same_run_whose_axis_is_the_step(tmp_path, calls):
    train(tmp_path / "run", 2)
    train(tmp_path / "run", 4, resume=True)
    train(tmp_path / "other", 1)
    first, again, other = calls("init")
    assert first["id"] == again["id"] == (tmp_path / "run/wandb-run-id.txt").read_text().strip()
    assert other["id"] != first["id"]
    assert {each["resume"] for each in calls("init")} == {"allow"}
    axes = [(each["name"], each["step_metric"]) for each in calls("define_metric")[:2]]
    assert axes == [("step", None), ("*", "step")]
    assert {each["step"] for each in calls("log")} == {None}  # a count of its own, under which repeated steps are lost
    assert [each["values"]["step"] for each in calls("log")[:4]] == [1, 2, 3, 4]


def test_the_id_in_the_environment_counts(tmp_path, calls, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    train(tmp_path / "run", 1)
    assert calls("init")[0]["id"] == "mine"


@pytest.mark.parametrize(
    ("given", "reporters"),
    [
        ("wandb", ("wandb",)),
        ("tensorboard, wandb", ("tensorboard", "wandb")),
        ("none", ()),
        ([], ()),
        (["tensorboard"], ("tensorboard",)),
        (None, None),
    ],
)
def test_reporters_are_a_list_or_a_text(tmp_path, given, reporters):
    assert GRPOConfig(output_dir=tmp_path, report_to=given).report_to == reporters


def test_the_command_line_takes_the_name_of_a_reporter(tmp_path):
    said = fails(
        "train", "--model", str(tmp_path), "--output-dir", str(tmp_path / "run"), "--set", "report_to=wand", status=2
    )
    assert "report_to.0 must be 'tensorboard' or 'wandb', not 'wand'" in said


def test_a_file_without_metrics_has_no_lines_and_an_unfinished_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 1}\n{"st')
    assert read_metrics(path) == [{"step": 1}]
