"""`replay run`: one file and one command, with real processes and a tiny model."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import termios
import threading

import pytest

from replay_client.testing import make_group, until
from tests.system.run.process import (
    GENERATOR,
    PATIENCE,
    SERVER,
    TRAINER,
    RunProcess,
    stored_keys,
    trained_keys,
    used_keys,
    write_run,
)

pytestmark = pytest.mark.timeout(600)


@pytest.mark.long
def test_a_run_makes_all_steps_sums_them_up_and_leaves_no_process(tmp_path, model_folder):
    file = write_run(tmp_path, model_folder, steps=4)
    with RunProcess(file) as run:
        assert run.wait() == 0
        assert run.descendants() == []
        words = run.words()
    assert run.steps() == [1, 2, 3, 4]
    assert "4 steps" in words
    assert "weights             " in words
    assert sorted(path.name for path in (run.out / "logs").iterdir()) == ["generator.log", "server.log", "trainer.log"]
    keys = trained_keys(run.out)
    assert len(keys) == len(set(keys))


@pytest.mark.long
def test_the_same_command_goes_on_with_a_run_that_was_stopped(tmp_path, model_folder):
    file = write_run(tmp_path, model_folder, steps=2000)
    with RunProcess(file) as run:
        run.until_step(2)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
        assert run.descendants() == []
        last = run.steps()[-1]
        assert f"stopped after step {last}; the same command goes on with the run" in run.words()
    with RunProcess(file, "--set", f"train.max_steps={last + 2}") as again:
        assert again.wait() == 0
        assert again.descendants() == []
        assert f"{last + 2} steps" in again.words()
    assert again.steps() == list(range(1, last + 3))
    assert len(trained_keys(again.out)) == len(set(trained_keys(again.out)))


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1], ids=lambda number: number.name)
def test_other_signals_stop_a_run_too(tmp_path, model_folder, number):
    file = write_run(tmp_path, model_folder, steps=2000)
    with RunProcess(file) as run:
        run.until_step(1)
        run.process.send_signal(number)
        assert run.wait() == 128 + number
        assert run.descendants() == []


@pytest.mark.long
def test_a_run_can_be_stopped_before_its_server_listens(tmp_path, model_folder):
    file = write_run(tmp_path, model_folder, steps=2)
    with RunProcess(file) as run:
        until(lambda: (run.out / "logs" / "server.log").exists() or run.process.poll() is not None)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
        assert run.descendants() == []


@pytest.mark.long
def test_a_second_run_in_the_same_folder_is_refused_with_the_process_of_the_first(tmp_path, model_folder):
    file = write_run(tmp_path, model_folder, steps=2000)
    with RunProcess(file) as first:
        first.until_step(1)
        with RunProcess(file) as second:
            assert second.wait() == 1
            assert re.search(rf"in use by another run \(process {first.process.pid} ", second.words())
        assert first.process.poll() is None


@pytest.mark.long
@pytest.mark.parametrize("part", [SERVER, TRAINER, GENERATOR])
def test_a_part_that_is_killed_is_started_again(tmp_path, model_folder, part):
    file = write_run(tmp_path, model_folder, steps=12)
    with RunProcess(file) as run:
        run.until_step(2)
        address = run.address()
        killed = run.part(part)
        assert killed is not None
        killed.kill()
        assert run.wait() == 0
        assert run.address() == address
        words = run.words()
    assert run.steps() == list(range(1, 13))
    name = {SERVER: "server", TRAINER: "trainer", GENERATOR: "generator"}[part]
    assert f"the {name} was ended by SIGKILL" in words
    assert "it is started again" in words


@pytest.mark.long
def test_a_supervisor_that_is_killed_leaves_no_process_of_its_part_behind(tmp_path, model_folder):
    file = write_run(tmp_path, model_folder, steps=12)
    with RunProcess(file) as run:
        run.until_step(2)
        command = run.part(GENERATOR)
        assert command is not None
        command.parent().kill()
        until(lambda: not command.is_running())
        assert run.wait() == 0
    assert run.steps() == list(range(1, 13))


@pytest.mark.long
def test_a_part_that_dies_three_times_without_a_step_ends_the_run_with_its_last_words(tmp_path, model_folder):
    (tmp_path / "broken.py").write_text(
        "import os\n\ndef reward(row, text):\n    if text:\n        print('the grader is gone', flush=True)\n"
        "        os._exit(7)\n    return 0.0\n"
    )
    file = write_run(tmp_path, model_folder, steps=4, reward="broken:reward")
    with RunProcess(file) as run:
        assert run.wait() == 1
        assert run.descendants() == []
        words = run.words()
    log = run.out / "logs" / "generator.log"
    assert "the generator ended with status 7, 3 times without a new step between: the grader is gone" in words
    assert str(log) in words
    assert log.read_text().count("the grader is gone") == 3


@pytest.mark.long
def test_generators_that_have_done_their_prompts_end_the_run_with_a_sentence(tmp_path, model_folder):
    file = write_run(tmp_path, model_folder, steps=2000, generate="max_groups = 10")
    with RunProcess(file) as run:
        assert run.wait() == 0
        words = run.words()
    assert "has left" in words
    assert "ended after step 2 of 2000" in words
    assert run.steps() == [1, 2]


@pytest.mark.long
def test_programs_get_lines_of_json(tmp_path, model_folder):
    file = write_run(tmp_path, model_folder, steps=3)
    with RunProcess(file, "--json") as run:
        assert run.wait() == 0
        lines = [json.loads(line) for line in run.words().splitlines() if line.startswith("{")]
    assert lines[-1]["ended"] == "the last step is made"
    assert lines[-1]["step"] == 3
    assert lines[-1]["parts"]["trainer"] == {"state": "ended", "starts": 1}
    assert lines[0]["max_steps"] == 3


@pytest.mark.long
def test_a_terminal_of_80_columns_shows_a_line_for_each_part_and_one_on_learning(tmp_path, model_folder):
    file = write_run(tmp_path, model_folder, steps=6)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the last process of the terminal has ended
                return
            shown.extend(piece)

    reader = threading.Thread(target=read)
    with RunProcess(file, stdout=theirs, env={"TERM": "xterm-256color", "COLUMNS": "80"}) as run:
        os.close(theirs)
        reader.start()
        assert run.wait() == 0
    reader.join()
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    lines = [line.rstrip("\r") for line in re.split(r"[\r\n]+", text)]
    for begin in ("server ", "generator ", "trainer ", "learning "):
        assert any(line.startswith(begin) for line in lines), begin
    before_summary = text[: text.index("6 steps")]
    assert max(len(line) for line in re.split(r"[\r\n]+", before_summary)) <= 80


@pytest.mark.long
def test_what_no_step_used_is_still_in_the_tables_of_a_stopped_run(tmp_path, model_folder):
    file = write_run(tmp_path, model_folder, steps=2000)
    with RunProcess(file) as run:
        run.until_step(2)
        with run.client() as client:
            key = client.insert(make_group(rewards=[1.0, 0.0], lengths=(2, 3)), {"rollouts": 1.0})
        run.process.send_signal(signal.SIGTERM)
        run.wait()
    assert key in used_keys(run.out) | stored_keys(run.out, {key})


@pytest.fixture
def two_gpus(tmp_path) -> dict[str, str]:
    """The environment of a machine where nvidia-smi finds two GPUs. torch for CPUs does not look for them."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 0, GPU-a\necho 1, GPU-b\n")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.mark.long
def test_ranks_stop_together_and_a_killed_rank_is_started_again_with_the_others(tmp_path, model_folder, two_gpus):
    file = write_run(
        tmp_path, model_folder, steps=2000, train='gpus = "0,1"', generate='gpus = "1"', top="shared_gpus = true"
    )
    with RunProcess(file, env=two_gpus) as run:
        run.until_step(2)
        ranks = run.ranks()
        assert sorted(rank.environ()["RANK"] for rank in ranks) == ["0", "1"]
        assert {rank.environ()["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {"0,1"}
        ranks[1].kill()
        until(lambda: len(set(run.ranks()) - set(ranks)) == 2, "no new ranks", PATIENCE)
        run.until_step(run.steps()[-1] + 2)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
        assert run.descendants() == []
        last = run.steps()[-1]
    with RunProcess(file, "--set", f"train.max_steps={last + 2}", env=two_gpus) as again:
        assert again.wait() == 0
    assert again.steps() == list(range(1, last + 3))
    assert len(trained_keys(again.out)) == len(set(trained_keys(again.out)))
