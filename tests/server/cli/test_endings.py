"""How commands end: status and last line after a signal, for bad addresses, and without an extra."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from replay_client import ReplayClient
from replay_trainer.demo.task import make_model, make_tokenizer
from tests.factories import server_process, until
from tests.server.cli.conftest import run_replay


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        yield listener


both_signals = pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])


@both_signals
@pytest.mark.parametrize(
    "command",
    [
        "tables --timeout 600",
        "show 1 --timeout 600",
        "doctor --timeout 600",
        "checkpoint --timeout 600",
        "reset --all --yes --timeout 600",
        "policy --timeout 600",
        "watch --timeout 600",
    ],
)
def test_a_signal_ends_a_command_with_its_status_and_without_a_traceback(silent, command, number, status):
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    with subprocess.Popen(
        [sys.executable, "-m", "replay_server.cli", *command.split(), "--address", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        connection, _ = silent.accept()  # now the command waits for an answer
        with connection:
            process.send_signal(number)
            said, complained = process.communicate(timeout=60)
    assert (process.returncode, said) == (status, "")
    assert "Traceback" not in complained


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("typer", "replay: interrupted\n"),
        ("replay_server.cli.generate", "replay: interrupted\n"),
        ("grpc", ""),  # within the command
    ],
)
def test_ctrl_c_in_the_middle_of_the_imports_ends_a_command_without_a_traceback(module, line):
    # As the script of the package does it, with a Ctrl-C at the import of that module.
    program = (
        "import os, signal, sys\n"
        "class CtrlC:\n"
        "    def find_spec(name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, CtrlC)\n"
        "from replay_server.cli import main\n"
        "main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "tables", "--address", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", line)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_drains_and_ends_with_status_zero_after_either_signal(tmp_path, number):
    with server_process(tmp_path) as server:
        server.process.send_signal(number)
        assert server.process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:7400", "127.0.0.1:99999", "127.0.0.1:0", "127.0.0.1", "127.0.0.1:7400/x"]
)
def test_an_address_that_cannot_be_one_is_refused_in_one_line_that_says_how_it_looks(address):
    result = run_replay("tables", "--timeout", "600", "--address", address)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("replay: --address must be host:port with a port from 1 to 65535")
    assert repr(address) in result.stderr


def test_a_bad_address_in_the_environment_is_named_by_its_variable():
    assert run_replay("tables", address="nonsense").stderr.startswith("replay: REPLAY_ADDRESS must be host:port")


def run_without(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a Python that does not find `module`."""
    code = f"import sys; sys.modules[{module!r}] = None; from replay_server.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("module", "command", "extra"),
    [
        ("torch", "train --model m --output-dir o", "trainer"),
        ("torch", "demo", "demo"),
        ("matplotlib", "demo", "demo"),
        ("vllm", "demo", "vllm"),
        ("torch", "generate --model m --prompts PROMPTS --reward exact_match --engine transformers", "trainer"),
        ("vllm", "generate --model m --prompts PROMPTS --reward exact_match", "vllm"),
    ],
)
def test_a_command_without_its_extra_names_it(module, command, extra, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    result = run_without(module, *command.replace("PROMPTS", str(prompts)).split())
    assert (result.returncode, result.stdout) == (1, "")
    assert f"needs {module}, which is not installed: pip install '.[{extra}]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_version_is_that_of_the_package():
    assert run_replay("--version").stdout == f"{version('replay-server')}\n"


def test_options_of_generate_may_be_in_a_file_and_the_command_line_wins(tmp_path):
    file = tmp_path / "generate.toml"
    file.write_text('model = "m"\nprompts = "no such file.jsonl"\nreward = "exact_match"\nsystem = "hello"\n')
    result = run_replay("generate", "--config", str(file))
    assert "no such file.jsonl" in result.stderr
    other = tmp_path / "prompts.jsonl"
    other.write_text('{"prompt": "1+1="}\n')
    assert "--system needs --chat" in run_replay("generate", "--config", str(file), "--prompts", str(other)).stderr
    file.write_text("max_tokenz = 3\n")
    misspelt = run_replay("generate", "--config", str(file))
    assert misspelt.returncode == 2
    assert "there is no 'max_tokenz'; did you mean 'max_tokens'?" in misspelt.stderr


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--group-size=0", "--group-size must be at least 1, not 0"),
        ("--reload=now", "--reload must be one of between_groups, at_once, not 'now'"),
        ("--reward-timeout=-1", "--reward-timeout must be above 0"),
    ],
)
def test_a_bad_option_of_generate_is_named_as_it_was_typed(option, words):
    result = run_replay("generate", "--model", "m", "--prompts", "p", "--reward", "exact_match", option)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"replay: {words}")


@pytest.mark.parametrize(
    "command", ["train --output-dir out", "generate --engine transformers --prompts p --reward exact_match"]
)
def test_a_model_that_is_not_there_is_named_in_one_line(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "p").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    result = run_replay(*command.split(), "--model", "no-such-model")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    words = "replay: --model no-such-model cannot be loaded; there is no folder of this name here: "
    assert result.stderr.startswith(words)


def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    model = make_model(0)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    result = run_replay("train", "--model", str(tmp_path / "model"), "--output-dir", str(tmp_path / "file/out"))
    assert (result.returncode, result.stderr) == (1, f"replay: {tmp_path}/file/out: Not a directory\n")


def test_a_misspelt_field_of_the_trainer_gets_a_suggestion(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text("learning_rte = 1e-4\n")
    result = run_replay("train", "--model", "m", "--output-dir", str(tmp_path / "o"), "--config", str(file))
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "there is no 'learning_rte'; did you mean 'learning_rate'?" in result.stderr
    assert result.stderr.startswith(f"replay: {file}: ")
    negative = run_replay("train", "--model", "m", "--output-dir", str(tmp_path / "o"), "--steps", "-1")
    assert negative.stderr.startswith("replay: --steps must be at least 1, not -1")


def started(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "replay_server.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


def check_end(process: subprocess.Popen[str], number: int, status: int) -> str:
    """Sends the signal, and returns what the command said on stderr."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, complained = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == status, complained
    assert "Traceback" not in complained
    assert "Warning" not in complained
    psutil.wait_procs(children, timeout=60)
    assert not any(child.is_running() for child in children)
    return complained


@both_signals
def test_a_signal_ends_the_page_as_soon_as_it_has_said_its_address(tmp_path, number, status):
    page = started("dashboard", "--port", "0", "--no-browser", "--address", "127.0.0.1:1", folder=tmp_path)
    assert page.stdout.readline().startswith("dashboard at ")
    check_end(page, number, status)


@both_signals
def test_a_signal_ends_a_benchmark_with_its_server(tmp_path, number, status):
    bench = started("bench", "--seconds", "600", folder=tmp_path)
    until(lambda: psutil.Process(bench.pid).children(), seconds=120)
    assert check_end(bench, number, status) == ""


def test_a_signal_ends_the_demo_while_it_prepares(tmp_path):
    demo = started("demo", "--engine", "transformers", "--out", "run", folder=tmp_path)
    until(lambda: (tmp_path / "run").exists(), seconds=120)
    assert "stopped; all processes of the demo have ended" in check_end(demo, signal.SIGTERM, 143)


def test_a_signal_ends_a_trainer_that_waits_for_groups(tmp_path):
    make_model(0).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    with server_process(tmp_path) as server, ReplayClient(server.address) as client:
        options = ("--model", "model", "--output-dir", "run", "--address", server.address)
        trainer = started("train", *options, folder=tmp_path)
        until(lambda: client.server_info().tables["rollouts"].sampling.count, seconds=120)
        assert "stopped; --resume continues from the last full state" in check_end(trainer, signal.SIGTERM, 143)


def test_a_trainer_without_a_server_says_that_it_waits_and_can_be_stopped(tmp_path):
    make_model(0).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    options = ("--model", "model", "--output-dir", "run", "--address", "127.0.0.1:1")
    trainer = started("train", *options, folder=tmp_path)
    said = trainer.stderr.readline()
    assert "waiting for the server for" in said
    assert "no replay server answers at 127.0.0.1:1" in said
    assert "stopped; --resume continues from the last full state" in check_end(trainer, signal.SIGTERM, 143)
