"""The demo as its user runs it, short: transformers engine, hardly any warm-up."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from examples.demo import tools
from examples.demo.__main__ import main
from examples.demo.compare import ARMS, compare, compared, curve
from examples.demo.task import make_tokenizer, padded
from replay_client.testing import until
from replay_generator import RolloutPolicy, Task
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.rewards.functions import exact_match
from replay_trainer.metrics import read_metrics

PARTS = {"serve", "generate", "train"}
CODE = (
    "import sys; from pathlib import Path; from examples.demo.run import DemoError, run\n"
    "try: run(Path(sys.argv[1]), int(sys.argv[2]), 0, 'transformers', target_solve_rate=0.005)\n"
    "except DemoError as error: sys.exit(f'demo: {error}')"
)


def start_demo(out, steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(out), str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_steps(out, demo: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """The demo's processes after a few steps, by the `replay` command that each runs."""
    metrics = out / "train" / "metrics.jsonl"
    steps = lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2  # noqa: E731
    until(lambda: steps() or demo.poll() is not None, "no steps", 600.0, pause=0.1)
    assert demo.poll() is None, demo.communicate()[0]
    children = psutil.Process(demo.pid).children(recursive=True)
    lines = {each: {*each.cmdline()} for each in children if each.status() != psutil.STATUS_ZOMBIE}
    return {name: each for each, line in lines.items() for name in line & PARTS if "replay_cli" in line}


def test_the_demo_ends_with_a_summary_metrics_and_a_picture(tmp_path):
    out = tmp_path / "demo"
    demo = start_demo(out, 8)
    said, _ = demo.communicate(timeout=800)
    assert demo.returncode == 0, said
    assert "Traceback" not in said
    for words in ("fresh reward", "replaced groups", "weights", "staleness", "importance weights", "tokens/s"):
        assert words in said
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    keys = {"fresh/reward_mean", "replay/groups_replaced", "replay/age_mean", "correction/clipped_fraction"}
    assert keys <= set(lines[-1])
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_warm_up_of_the_tools_shows_what_the_tool_loop_plays_token_for_token():
    tokenizer = tools.teach_chat(make_tokenizer())
    row = {"prompt": "47*86", "answer": tools.calculator("47*86")}
    ((prompt, call, between, answer),) = tools.demonstrations(tokenizer, [row], with_tool=True)
    said = iter([call, answer])

    class Engine:
        async def generate(self, token_ids, sampling, n, *_):
            ids = next(said)
            text = tokenizer.decode(ids, skip_special_tokens=True)
            return [Completion(ids, [-1.0] * len(ids), text, "stop", [0] * len(ids))]

    engine = Engine()
    engine.tokenizer, engine.max_length = tokenizer, 64
    messages = ({"role": "user", "content": row["prompt"]},)
    task = Task("p", prompt, row, messages, 0, SamplingConfig(), tokenizer, 64)
    rollout = asyncio.run(tools.rollout(task, RolloutPolicy(engine, task.sampling, [])))
    (sequence,) = rollout.sequences
    assert sequence.token_ids == prompt + call + between + answer
    _, labels = padded([(prompt, call, between, answer)])
    assert sequence.sampled_mask == (labels[0] >= 0).tolist()
    assert exact_match(row, rollout.text) == 1.0
    assert tools.called(row, rollout.text, rollout) == 1.0
    alone = tools.demonstrations(tokenizer, [row], with_tool=False)
    assert alone == [(prompt, answer)]


def test_a_calculator_that_is_asked_for_something_else_says_how_to_ask():
    with pytest.raises(ValueError, match=r"write it as 47\*86"):
        tools.calculator("47+86")


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "metric"), [("WITH_TOOL", "reward/called"), ("WITH_AGENT", "reward/rollout/called")]
)
def test_the_demo_with_a_tool_trains_on_two_turns_and_counts_the_calls(tmp_path, variant, metric):
    out = tmp_path / "demo"
    code = f"from examples.demo.variants import {variant}\n" + CODE.replace(
        "target_solve_rate=0.005", f"variant={variant}"
    )
    done = subprocess.run([sys.executable, "-c", code, str(out), "4"], capture_output=True, text=True, timeout=800)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "calculator          called in" in said
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 4
    lines = [json.loads(line) for line in (out / "generator-1.jsonl").read_text().splitlines()]
    assert any(line.get(metric) for line in lines)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--task", "chess"), "argument --task: invalid choice: 'chess' (choose from"),
        (("--task", "tools", "--compare"), "--compare has a task of its own: leave out --task tools"),
    ],
    ids=["unknown", "compared"],
)
def test_a_task_that_the_demo_does_not_have_is_refused(options, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo", *options])
    with pytest.raises(SystemExit):  # in this process, which has torch already
        main()
    assert says in capsys.readouterr().err


def test_a_signal_ends_the_demo_while_it_prepares(tmp_path):
    command = [sys.executable, "-m", "examples.demo", "--engine", "transformers", "--output-dir", str(tmp_path / "run")]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: (tmp_path / "run").exists())
    running = psutil.Process(demo.pid).children(recursive=True)
    demo.send_signal(signal.SIGTERM)
    assert "stopped; all processes of the demo have ended" in demo.communicate(timeout=120)[1]
    assert demo.returncode == 1
    assert not any(process.is_running() for process in running)


def test_a_comparison_says_what_share_of_plains_tokens_each_arm_needed_to_plains_best():
    plain, quick, never = (([1e3, 2e3, 3e3], rewards) for rewards in ([0.1, 0.2, 0.3], [0.1, 0.3, 0.4], [0.1] * 3))
    runs = {"plain": [plain] * 3, "quarter": [never, quick, never], "recipe": [quick, quick, never]}
    _, quarter, recipe = compared(runs, {"plain": 9_000, "quarter": 9_000, "recipe": 7_200}).splitlines()
    assert "0.10, 0.40, 0.10 at the end; plain's best with never of its generated tokens (0.67, never" in quarter
    assert "plain's best with 0.67 of its generated tokens (0.67, 0.67, never); 0.8 trained tokens" in recipe


def test_a_curve_begins_where_its_mean_is_of_enough_groups():
    steps = [{"fresh/groups": 4, "fresh/completion_length_mean": 5.0, "fresh/reward_mean": i / 8} for i in range(8)]
    tokens, rewards = curve(steps, fresh=4, smoothed=16)
    assert tokens[0] == 320.0
    assert rewards[0] == 0.0625


@pytest.mark.long
def test_a_comparison_trains_each_arm_from_one_start_on_as_many_groups_and_draws_them(tmp_path, capsys):
    compare(tmp_path / "demo", 3, 0, "transformers", 0.005, seeds=1)
    said = capsys.readouterr().out
    folders = [tmp_path / "demo" / f"{name}-0" for name in ARMS]
    groups = [[line["fresh/groups"] for line in read_metrics(each / "metrics.jsonl")] for each in folders]
    assert groups == [[16] * 3, [4] * 12, [4] * 12]
    assert len({(each / "warm" / "model.safetensors").read_bytes() for each in folders}) == 1
    assert all(f"{name}: reward " in said for name in ARMS)
    assert (tmp_path / "demo" / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_a_part_of_the_demo_that_dies_is_started_again(tmp_path):
    out = tmp_path / "demo"
    demo = start_demo(out, 12)
    running = wait_for_steps(out, demo)
    assert {*running} == PARTS
    running["generate"].kill()
    said, _ = demo.communicate(timeout=800)
    assert demo.returncode == 0, said
    assert "the generator was ended by SIGKILL" in said
    assert [line["step"] for line in read_metrics(out / "metrics.jsonl")] == list(range(1, 13))


@pytest.mark.long
def test_an_interrupt_stops_every_process_of_the_demo(tmp_path):
    out = tmp_path / "demo"
    demo = start_demo(out, 1000)
    running = wait_for_steps(out, demo)
    os.kill(demo.pid, signal.SIGINT)
    demo.communicate(timeout=800)
    assert demo.returncode != 0
    assert not any(process.is_running() for process in running.values())
