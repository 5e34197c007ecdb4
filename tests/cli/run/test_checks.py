"""`--check` of serve, generate and train: it looks at all that they need, and starts nothing."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from replay_cli.run.plan import check_deeply, read_run
from tests.cli.run.runs import write_run
from tests.kit.processes import fails, run_replay

GENERATE = ("generate", "--model", "./model", "--prompts", "prompts.jsonl", "--engine", "transformers", "--check")
TRAIN = ("train", "--model", "./model", "--output-dir", "runs/mine", "--check")
RUN = {
    "model": "./model",
    "output_dir": "runs/mine",
    "generate": {"prompts": "prompts.jsonl", "reward": "my_rewards:right", "engine": "transformers", "max_tokens": 8},
    "train": {"groups_per_step": 4, "max_steps": 3},
}


def left(folder: Path) -> list[str]:
    """The names in a working folder, but those that Python leaves."""
    return sorted(file.name for file in folder.iterdir() if file.name != "__pycache__")


def passes(*arguments: str) -> str:
    """What a command prints that ends with status 0, and complains of nothing."""
    done = run_replay(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--reward", "my_rewards:right"), "right 0"),
        (("--reward", "my_rewards:turns=2"), "turns 2"),
        (("--reward", "my_rewards:abstains", "--reward", "exact_match"), "abstains nan, exact_match 0"),
        (("--rollout", "my_rewards:play"), "tokens\n"),
        (("--rollout", "my_rewards:play", "--reward", "my_rewards:turns"), "tokens\n"),
    ],
)
def test_generate_reads_its_first_prompt_and_calls_the_rewards_on_an_empty_answer(place, more, words):
    said = passes(*GENERATE, *more)
    assert said.startswith("./model: the first prompt, ")
    assert words in said
    assert left(place) == ["model", "my_rewards.py", "prompts.jsonl"]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("--reward", "my_rewards:first_letter"), "reward function 'first_letter' raised IndexError: string index"),
        (("--reward", "my_rewards:none"), "reward 'my_rewards:none': module 'my_rewards' has no attribute 'none'"),
        (("--reward", "no_module:right"), "reward 'no_module:right': No module named 'no_module'"),
        (("--rollout", "my_rewards:none"), "rollout 'my_rewards:none': module"),
        (("--agent", "no-such-command"), "agent 'no-such-command': there is no such command"),
        (("--reward", "my_rewards:right", "--max-length", "3"), "tokens; the engine takes 1 to 2"),
        (("--reward", "my_rewards:right", "--prompts", "long.jsonl"), "has 600 tokens; the engine takes 1 to"),
        (("--reward", "my_rewards:right", "--chat"), "the tokenizer has no chat template"),
        (("--reward", "my_rewards:right", "--prompt-field", "question"), "needs the field 'question'"),
        (("--reward", "my_rewards:right", "--prompts", "none.jsonl"), "none.jsonl"),
        (("--reward", "my_rewards:right", "--model", "./none"), "--model: there is no folder ./none"),
    ],
)
def test_what_a_generator_cannot_use_is_one_line(place, more, line):
    (place / "long.jsonl").write_text(json.dumps({"prompt": "1" * 600}) + "\n")
    # Of a name that says nothing, the command line is at fault; of a file or a function, they are.
    names_nothing = re.search(r"^(reward|rollout|agent) '", line)
    assert line in fails(*GENERATE, *more, status=2 if names_nothing else 1)
    assert left(place) == ["long.jsonl", "model", "my_rewards.py", "prompts.jsonl"]


def test_a_damaged_tokenizer_is_one_line(place):
    (place / "model" / "tokenizer.json").write_text("{")
    assert "--model ./model cannot be loaded" in fails(*GENERATE, "--reward", "my_rewards:right")


def test_a_prompt_that_a_run_would_skip_is_skipped(place):
    rows = (place / "prompts.jsonl").read_text()
    (place / "prompts.jsonl").write_text(json.dumps({"prompt": 3}) + "\n" + rows)
    skips = ("--set", "on_prompt_error=skip", "--reward", "my_rewards:first_letter")
    assert "the first prompt" in passes(*GENERATE, *skips)


def test_train_looks_at_its_model_its_folder_and_the_prompts_of_its_evaluation(place):
    said = passes(*TRAIN, "--eval-prompts", "prompts.jsonl", "--max-steps", "7")
    assert said == "./model: 7 steps, evaluated with 8 prompts\n"
    assert left(place) == ["model", "my_rewards.py", "prompts.jsonl"]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("--eval-prompts", "none.jsonl"), "none.jsonl"),
        (("--eval-prompts", "prompts.jsonl", "--eval-reward", "my_rewards:none"), "reward 'my_rewards:none'"),
        (("--output-dir", "prompts.jsonl/x"), "prompts.jsonl is a file"),
        (("--set", 'lora={"rr": 8}'), "there is no 'rr'"),
        (("--model", "empty"), "--model empty holds no weights"),
    ],
)
def test_what_a_trainer_cannot_use_is_one_line(place, more, line):
    (place / "empty").mkdir()
    is_misuse = re.search(r"^(reward '|there is no 'rr')", line)
    assert line in fails(*TRAIN, *more, status=2 if is_misuse else 1)


def test_serve_looks_at_its_port_and_its_folder(place):
    assert passes("serve", "--listen", "127.0.0.1:0", "--check") == "127.0.0.1:0: tables rollouts, replay\n"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = fails("serve", "--listen", f"127.0.0.1:{port}", "--check")
    assert f"[server] listen 127.0.0.1:{port}: Address already in use" in line
    (place / "replay.toml").write_text('[server]\ndata_dir = "prompts.jsonl/data"\n[[tables]]\nname = "a"\n')
    line = fails("serve", "--config", "replay.toml", "--check")
    assert "[server] data_dir prompts.jsonl/data cannot be a folder: prompts.jsonl is a file" in line


def test_a_check_imports_no_torch(place):
    code = (
        "import sys; from replay_cli import main; sys.argv = ['replay', *sys.argv[1:]]\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    print(end.code or 0, 'torch' in sys.modules, 'vllm' in sys.modules)"
    )
    for command in ((*GENERATE, "--reward", "my_rewards:right"), TRAIN):
        done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=300)
        assert done.stdout.splitlines()[-1] == "0 False False"
        assert done.stderr == ""


@pytest.mark.parametrize("imports", ["import transformers\n\n\n", ""], ids=["at its head", "when it is called"])
def test_a_reward_function_may_use_a_model_of_transformers(place, imports):
    (place / "my_judge.py").write_text(
        f"{imports}def judge(row, completion):\n"
        "    from transformers import AutoModelForCausalLM\n"
        "    return AutoModelForCausalLM.from_pretrained('./model').num_parameters() * 0.0 + 7\n"
    )
    # A process of its own: that of `run_replay` has imported torch, which is then not hidden.
    command = [sys.executable, "-m", "replay_cli", *GENERATE, "--reward", "my_judge:judge"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "judge 7" in done.stdout


def test_a_check_leaves_the_environment_as_it_was(place, monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "0")
    code = (
        "import os; from replay_cli.checks import model_files; model_files('./model');"
        "print(os.environ['TRANSFORMERS_NO_ADVISORY_WARNINGS'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == ["0"]


# ------------------------------------------------------------------------------------------------ of a whole run


def test_a_run_whose_parts_can_start_passes_and_writes_nothing(place):
    check_deeply(read_run(write_run(place, base=RUN), (), None, os.environ))
    assert left(place) == ["model", "my_rewards.py", "prompts.jsonl", "run.toml"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"generate.reward": "my_rewards:none"}, "[generate] reward 'my_rewards:none': module"),
        ({"generate.max_length": 2}, "[generate] prompt "),
        ({"train.eval_prompts": "none.jsonl"}, "[train] there is no file or folder none.jsonl"),
        ({"output_dir": "prompts.jsonl"}, "[serve.server] data_dir "),
        ({"model": "empty"}, "model empty "),
    ],
)
def test_what_a_part_cannot_use_is_one_line_of_the_run_file(place, changes, line):
    (place / "empty").mkdir()
    write_run(place, changes, base=RUN)
    plan = read_run(Path("run.toml"), (), None, os.environ | {"HF_HUB_OFFLINE": "1"})
    with pytest.raises(ValueError) as raised:  # noqa: PT011  the words are compared
        check_deeply(plan)
    assert str(raised.value).startswith(f"run.toml: {line}")
    assert "\n" not in str(raised.value)
