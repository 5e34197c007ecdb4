"""`make demo-real`: its settings, its table, and a short run of all its processes on a tiny model."""

import json
import subprocess
import sys

import pytest

from experiments.learning.arms import ARMS
from experiments.learning.real import demo
from experiments.tests.test_learning_real import tiny_llama, tiny_tokenizer
from replay_trainer.config import GRPOConfig


def published_run(arm, seed, end, *, learning_rate=5e-5):
    run = {"arm": arm, "task": "two_terms", "regime": "pretrained", "seed": seed, "learning_rate": learning_rate}
    curve = [[tokens, tokens, i, 0.0, 0.0, rate] for i, (tokens, rate) in enumerate([(0, 0.1), (2000, end)])]
    return run | {"budget": 8000, "engine": "in-process", "curve": curve}


def test_the_demo_trains_as_the_recipe_of_the_experiment_does(tmp_path):
    arm = ARMS["small50-right"]
    config = GRPOConfig(output_dir=tmp_path, **demo.REAL.sections["train"])
    assert (config.correction, config.replay_rollouts) == (arm.correction, arm.stored)
    assert (config.fresh_groups_per_step, config.replayed_groups_per_step) == (arm.fresh, arm.replay)
    assert [table["max_size"] for table in demo.REAL.sections["serve"]["tables"] if table["name"] == "replay"] == [256]
    assert demo.REAL.sections["generate"]["priority"] == arm.priority


def test_the_demo_shows_the_published_curves_of_its_own_learning_rate(tmp_path):
    runs = [published_run("quarter", 0, 0.5), published_run("quarter", 1, 0.3)]
    runs += [published_run("plain", 0, 0.9), published_run("plain", 1, 0.8, learning_rate=1e-4)]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    curves = demo.published(tmp_path / "runs.jsonl")
    assert list(curves) == ["quarter of the batch (docs, 2 seeds)", "plain (docs, 1 seed)"]
    header, *rows = demo.table({"this run": ([500.0, 2500.0], [0.2, 0.6])} | curves)
    assert header.split("  ") == ["generated tokens", "this run", *curves]
    assert [row.split() for row in rows] == [["1,000", "0.30", "0.25", "0.50"], ["2,000", "0.50", "0.40", "0.90"]]


def test_the_reward_of_the_demo_is_1_for_a_right_last_number():
    pytest.importorskip("reasoning_gym", reason="make setup-real")
    entry = demo.gym_problems(demo.TASK, 3).train[0]
    assert demo.right({"entry": entry}, f"The answer to 1 + 1 is {entry['answer']}.") == 1.0
    assert demo.right({"entry": entry}, f"{entry['answer']}, or {int(entry['answer']) + 1}") == 0.0


@pytest.mark.long
def test_the_demo_of_a_pretrained_model_runs_all_processes_and_draws_its_curve(tmp_path):
    pytest.importorskip("reasoning_gym", reason="make setup-real")
    for each in (tiny_llama(), tiny_tokenizer()):
        each.save_pretrained(tmp_path / "models" / "SmolLM2-135M-Instruct")
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "experiments.learning.real.demo", "--steps", "2", "--engine", "transformers"]
    command += ["--out", str(out), "--models", str(tmp_path / "models")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["fresh/groups"] for line in lines] == [4, 4]
    assert "generated tokens  this run" in done.stdout
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
