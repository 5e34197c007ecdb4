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

from examples.demo.task import make_model, make_tokenizer
from replay_client import ReplayClient
from replay_client.testing import until
from tests.kit.processes import COMMAND, Running, fails, free_port, run_replay, server_process


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(200)
        yield listener


SIGINT, SIGTERM = (signal.SIGINT, 130), (signal.SIGTERM, 143)


@pytest.mark.parametrize(
    ("command", "number", "status"),
    [(command, *SIGINT) for command in ("tables", "show 1", "checkpoint create", "policy")]
    + [(command, *SIGTERM) for command in ("tables", "doctor", "table reset --all --yes", "top --json")],
)
def test_a_signal_ends_a_command_with_its_status_and_without_a_traceback(silent, command, number, status):
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    words = [*COMMAND, "--timeout", "600", "--address", address, *command.split()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        connection, _ = silent.accept()  # now the command waits for an answer
        with connection:
            process.send_signal(number)
            said, complained = process.communicate(timeout=200)
    assert process.returncode == status
    assert said == ""
    assert "Traceback" not in complained


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("typer", "replay: interrupted\n"),
        ("replay_cli.generate", "replay: interrupted\n"),
        ("grpc", "replay: interrupted\n"),
        ("replay_dashboard.diagnosis", ""),  # within the command
    ],
)
def test_ctrl_c_in_the_middle_of_the_imports_ends_a_command_without_a_traceback(module, line):
    # As the script of the package does it, with a Ctrl-C at the import of that module.
    finder = f"def find_spec(name, *_): name == {module!r} and os.kill(os.getpid(), signal.SIGINT)"
    program = f"import os, signal, sys\n{finder}\nsys.meta_path.insert(0, sys.modules[__name__])\n"
    command = [sys.executable, "-c", program + "from replay_cli import main; main()"]
    result = subprocess.run(
        [*command, "--address", "127.0.0.1:1", "doctor"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 130
    assert result.stdout == ""
    assert result.stderr == line


def test_sigterm_in_code_that_an_import_executes_ends_a_command_with_its_status(tmp_path):
    # Dataclasses and named tuples are made by `exec`, so most imports do this.
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, sys\n"
        "def find_spec(name, *_):\n"
        "    if name == 'replay_dashboard.diagnosis':\n"
        "        exec('signal.raise_signal(signal.SIGTERM)')\n"
        "sys.meta_path.insert(0, sys.modules[__name__])\n"
    )
    result = subprocess.run(
        [*COMMAND, "--address", "127.0.0.1:1", "doctor"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 143
    assert result.stderr == ""


PLAIN = "[[tables]]\nname = 'a'\n"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[[tables]]\nmax_size = 4", "replay.toml: [[tables]] number 1: name is needed"),
        ("tables = []", "replay.toml: [tables] write [[tables]], in two brackets, once for each table"),
        ("server = 3", "replay.toml: [server] must be an object of names and values, not 3"),
        ("not toml", "replay.toml"),
        (PLAIN + "sampler = 'best'", "[[tables]] number 1: sampler"),
        (PLAIN + "max_sise = 3", "max_sise"),
        (PLAIN + "max_size = 'many'", "replay.toml: [[tables]] number 1: max_size must be a whole number, not 'many'"),
        (PLAIN + "max_size = 2\nrate_limiter = {type='min_size', min_size=3}", "never be sampled"),
        (PLAIN + "forward_to = 'b'", "forwards to 'b', which does not exist"),
        (PLAIN + "forward_to = 'b'\n[[tables]]\nname = 'b'\nforward_to = 'a'", "a -> b -> a"),
        (PLAIN + "rate_limiter = 'queue'", "needs max_size"),
        (
            PLAIN + "rate_limiter = {type='sample_to_insert_ratio', samples_per_insert=1.0, error_buffer=0.5}",
            "widen error_buffer",
        ),
        (PLAIN + "[security]\ntokens_file = '/nowhere/tokens'", "tokens_file /nowhere/tokens cannot be read"),
        (
            PLAIN + "[security]\ntls_cert = '/nowhere/cert'\ntls_key = '/nowhere/key'",
            "tls_cert /nowhere/cert cannot be read",
        ),
        (PLAIN + "[security]\ntoken = 'hush-hush'", "there is no 'token'; did you mean 'tokens_file'?"),
        (PLAIN + "[security]\ntokens_file = 7", "[security] tokens_file must be"),
        (PLAIN + "[server]\nmax_bytes = '3 apples'", "'3 apples' is not a size; write for example"),
        (PLAIN + "[server]\nfsync = 'sometimes'", "[server] fsync must be 'always' or 'never'"),
        (PLAIN + "[server]\ndata_dir = '/etc/passwd'", "data_dir /etc/passwd cannot be written: File exists"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_in_one_line_with_its_place_and_without_secrets(
    tmp_path, config, words
):
    path = tmp_path / "replay.toml"
    path.write_text(config)
    status = 1 if "cannot be" in words else 2
    said = fails("serve", "--config", str(path), "--listen", "127.0.0.1:0", status=status)
    assert words in said
    assert "hush" not in said


GENERATE = "generate --model m --prompts p --reward exact_match"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        *(
            (f"--timeout 600 --address {address} tables", "--address must be host:port with a port from 1 to 65535")
            for address in ("http://127.0.0.1:7400", "127.0.0.1:99999", "127.0.0.1:0", "127.0.0.1", "127.0.0.1:7400/x")
        ),
        (f"{GENERATE} --group-size=0", "--group-size must be at least 1, not 0"),
        (f"{GENERATE} --reload=now", "--reload must be 'between_groups' or 'in_flight', not 'now'"),
        (f"{GENERATE} --set reward_timeout=-1", "reward_timeout must be greater than 0"),
        (f"{GENERATE} --system=Add.", "--system needs --chat"),
        ("generate --model m --reward exact_match", "--prompts is needed, or --environment verifiers:NAME"),
        (f"{GENERATE} --rollout a:b --agent a:b", "--rollout and --agent exclude each other: each says who plays"),
        (f"{GENERATE} --agent no-such-command", "--agent 'no-such-command': there is no such command"),
        (f"{GENERATE} --sessions 0.0.0.0:7403", "--sessions 0.0.0.0:7403: other machines reach it, so it needs a"),
        (f"{GENERATE} --sessions 7403", "--sessions must be host:port"),
        (f"{GENERATE} --environment verifiers:sums", "--prompts and --environment exclude each other"),
        (f"{GENERATE} --environment-args {{}}", "--environment-args needs --environment verifiers:NAME"),
        (
            "train --model m --output-dir o --max-steps -1",
            "--max-steps must be at least 1, not -1",
        ),
    ],
)
def test_an_option_that_cannot_work_is_named_as_it_was_typed_in_one_line(tmp_path, monkeypatch, command, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").write_text('{"prompt": "1+1="}\n')
    said = fails(*command.split(), status=2)
    assert said.startswith(f"replay: {words}")


def test_options_of_train_are_checked_before_torch_is_imported(tmp_path):
    code = "import sys\nfrom replay_cli import main\n"
    code += "try: main()\nfinally: print({'torch', 'transformers'} & sys.modules.keys())"
    command = [sys.executable, "-c", code, "train", "--model", "m", "--output-dir", str(tmp_path), "--max-steps", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout == "set()\n"
    assert done.stderr == "replay: --max-steps must be at least 1, not -1\n"


def test_a_bad_address_in_the_environment_is_named_by_its_variable():
    assert fails("tables", address="nonsense", status=2).startswith("replay: REPLAY_ADDRESS must be host:port")


def run_without(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a Python that does not find `module`."""
    code = f"import sys; sys.modules[{module!r}] = None; from replay_cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(
    ("module", "command", "extra"),
    [
        ("torch", "train --model m --output-dir o", "trainer"),
        ("uvicorn", "dashboard", "dashboard"),
        ("torch", "generate --model m --prompts PROMPTS --reward exact_match --engine transformers", "trainer"),
        ("vllm", "generate --model m --prompts PROMPTS --reward exact_match", "vllm"),
        ("verifiers", "generate --model m --environment verifiers:sums", "verifiers"),
    ],
)
def test_a_command_without_its_extra_names_it(module, command, extra, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    result = run_without(module, *command.replace("PROMPTS", str(prompts)).split())
    assert result.returncode == 1
    assert result.stdout == ""
    assert f"needs {module}, which is not installed: pip install '.[{extra}]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_version_is_that_of_the_package():
    assert run_replay("--version").stdout == f"{version('replay-server')}\n"


def test_options_of_generate_may_be_in_a_file_and_the_command_line_wins(tmp_path):
    file = tmp_path / "generate.toml"
    file.write_text('model = "m"\nprompts = "no such file.jsonl"\nreward = "exact_match"\n')
    assert "no such file.jsonl" in fails("generate", "--config", str(file))
    assert "another file.jsonl" in fails("generate", "--config", str(file), "--prompts", "another file.jsonl")
    with file.open("a") as end:
        end.write('system = "hello"\n')
    assert "--system needs --chat" in fails("generate", "--config", str(file), status=2)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("train --output-dir out", marks=pytest.mark.long),
        "generate --engine transformers --prompts p --reward exact_match",
    ],
)
def test_a_model_that_is_not_there_is_named_in_one_line(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "p").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words = "replay: --model no-such-model cannot be loaded; there is no folder of this name here: "
    assert fails(*command.split(), "--model", "no-such-model").startswith(words)


@pytest.mark.long
def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    save_model(tmp_path / "model")
    said = fails("train", "--model", str(tmp_path / "model"), "--output-dir", str(tmp_path / "file/out"))
    assert said == f"replay: {tmp_path}/file/out: Not a directory\n"


def test_a_misspelt_field_of_the_trainer_gets_a_suggestion(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text("learning_rte = 1e-4\n")
    said = fails("train", "--model", "m", "--output-dir", str(tmp_path / "o"), "--config", str(file), status=2)
    assert f"{file}: there is no 'learning_rte'; did you mean 'learning_rate'?" in said


def save_model(folder: Path) -> None:
    make_model(0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def started(*arguments: str, folder: Path) -> Running:
    return Running(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder)


def check_end(process: Running, number: int, status: int) -> str:
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


def test_a_signal_ends_a_trainer_that_waits_for_groups(tmp_path):
    save_model(tmp_path / "model")
    with server_process(tmp_path) as server, ReplayClient(server.address) as client:
        options = ("--model", "model", "--output-dir", "run")
        trainer = started("--address", server.address, "train", *options, folder=tmp_path)
        until(lambda: client.server_info().tables["rollouts"].sampling.count)
        said = check_end(trainer, signal.SIGTERM, 143)
        assert "stops after this step, with a training checkpoint; a second signal hurries" in said
        assert "stopped before its first step; --resume begins the run" in said


@pytest.mark.long
def test_a_trainer_without_a_server_says_that_it_waits_and_can_be_stopped(tmp_path):
    save_model(tmp_path / "model")
    options = ("--model", "model", "--output-dir", "run")
    trainer = started("--address", "127.0.0.1:1", "train", *options, folder=tmp_path)
    said = trainer.stderr.readline()
    assert "waiting for the server: " in said
    assert "no replay server answers at 127.0.0.1:1" in said
    assert "continues from the last training checkpoint" in check_end(trainer, signal.SIGTERM, 143)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("tables=x", "--set tables=x: --table says that"),
        ("source_table=x", "--set source_table=x: --source-table says that"),
        ("attemps=2", "--set: there is no 'attemps'"),
    ],
)
def test_a_setting_of_score_that_has_an_option_or_is_none_is_named_in_one_line(setting, says):
    options = ("--source-table", "unscored", "--table", "rollouts", "--reward", "exact_match", "--set", setting)
    assert says in fails("score", *options, status=2)


WITHOUT_MATH_VERIFY = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "math_verify" else find(name, *more)
from replay_cli import main
sys.argv = ["replay", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    "words",
    [
        ("score", "--source-table", "unscored", "--table", "rollouts", "--reward", "math_answer"),
        ("train", "--model", ".", "--output-dir", "run", "--eval-prompts", "a.jsonl", "--eval-reward", "math_answer"),
    ],
    ids=["score", "train"],
)
def test_a_reward_whose_package_is_missing_is_one_line_with_the_command_that_installs_it(tmp_path, words):
    command = [sys.executable, "-c", WITHOUT_MATH_VERIFY, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("replay: math_answer needs math-verify, which is not installed: pip install")
    assert done.stderr.count("\n") == 1


def test_a_file_of_the_server_alone_keeps_the_usual_tables(tmp_path):
    path = tmp_path / "replay.toml"
    for text in ("", '[server]\nlisten = "127.0.0.1:0"\n'):
        path.write_text(text)
        done = run_replay("serve", "--config", str(path), "--listen", "127.0.0.1:0", "--check")
        assert done.stdout == "127.0.0.1:0: tables rollouts, replay\n"
    path.write_text("[[tables]]\nname = 'mine'\n")
    done = run_replay("serve", "--config", str(path), "--listen", "127.0.0.1:0", "--check")
    assert done.stdout == "127.0.0.1:0: tables mine\n"


def test_weights_of_a_file_are_refused_and_of_a_folder_that_is_not_there_yet_announced(tmp_path):
    (tmp_path / "file").touch()
    said = fails("weights", "serve", str(tmp_path / "file"), status=2)
    assert said == f"replay: {tmp_path}/file is no folder: name weights_dir of the trainer\n"
    address = f"127.0.0.1:{free_port()}"
    serving = started("weights", "serve", "later", "--listen", address, folder=tmp_path)
    assert serving.stderr.readline() == (
        "replay: there is no folder later yet: its weights are served when the trainer has made it\n"
    )
    assert serving.stdout.readline() == f"weights of later at {address}\n"
    check_end(serving, signal.SIGTERM, 143)
