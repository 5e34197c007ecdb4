"""`replay train` as a process that signals stop: after its step, at once where it waits, and at random moments."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replay_client import ReplayClient
from replay_client.testing import PATIENCE, until
from replay_trainer.weights import saved
from tests.kit.clocks import in_a_thread
from tests.kit.models import make_model
from tests.kit.processes import Running, ServerProcess, free_port, server_process
from tests.trainer.test_stop import insert, is_waited_for, steps, trained

pytestmark = pytest.mark.timeout(1500)  # what it guards against is waiting without an end
GROUPS = 2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    make_model().save_pretrained(tmp_path / "model")
    with (tmp_path / "model/tokenizer.json").open("w") as file:
        file.write(json.dumps(TOKENIZER))
    (tmp_path / "model/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with server_process(tmp_path) as process:
        yield process


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {f"t{index}": index for index in range(16)}, "unk_token": "t0"},
    "truncation": None,
    "padding": None,
}


def words(address: str, max_steps: int, *more: str) -> list[str]:
    options = ["--model", "model", "--output-dir", "run", "--max-steps", str(max_steps), "--groups-per-step", "2"]
    return ["--address", address, "train", *options, "--zero-variance", "none", "--save-every", "10", *more]


def started(server: ServerProcess, folder: Path, max_steps: int, *more: str) -> Running:
    command = words(server.address, max_steps, *more)
    return Running(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.long),
        pytest.param(signal.SIGUSR1, 138, marks=pytest.mark.long),
    ],
)
def test_a_signal_stops_the_trainer_with_a_checkpoint_and_two_at_once_are_one(server, tmp_path, number, status):
    with ReplayClient(server.address) as client:
        keys = insert(client, 2 * GROUPS)
        trainer = started(server, tmp_path, 4)
        until(lambda: steps(tmp_path) == [1, 2] and is_waited_for(client))
        trainer.send_signal(number)
        trainer.send_signal(signal.SIGTERM)
        _, complained = trainer.communicate(timeout=PATIENCE)
        assert trainer.returncode == status, complained
        assert complained.count("stops after this step") == 1
        assert complained.endswith(
            "replay: stopped after step 2, with a training checkpoint: --resume continues there\n"
        )
        assert saved(tmp_path / "run")[-1].name == "step-2"
        keys += insert(client, 2 * GROUPS)
        trainer = started(server, tmp_path, 4, "--resume")
        said, complained = trainer.communicate(timeout=PATIENCE)
        assert trainer.returncode == 0, complained
        assert "4 steps" in said
        assert steps(tmp_path) == [1, 2, 3, 4]
        assert trained(tmp_path) == sorted(keys)


SLOW = """
import sys, time
from replay_trainer.grpo import GRPOTrainer

def train_on(*_):
    print("trains", flush=True)
    time.sleep(3600)

GRPOTrainer._train_on = train_on
sys.argv = ["replay", *sys.argv[1:]]
from replay_cli import main
main()
"""


@pytest.mark.long
def test_a_second_signal_ends_a_step_at_once(server, tmp_path):
    with ReplayClient(server.address) as client:
        insert(client, GROUPS)
        command = [sys.executable, "-c", SLOW, *words(server.address, 4)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        ) as trainer:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "trains\n"
            trainer.send_signal(signal.SIGTERM)

            def has_ended() -> bool:
                trainer.send_signal(signal.SIGTERM)
                return trainer.poll() is not None

            until(has_ended, pause=0.5)
            _, complained = trainer.communicate(timeout=PATIENCE)
    assert trainer.returncode == 143, complained
    assert "stops after this step" in complained
    assert "stopped; --resume continues from the last training checkpoint" in complained
    assert "Traceback" not in complained


# ---------------------------------------------------------------------------------------------------------- torchrun


def torchrun(server: ServerProcess, folder: Path, *more: str) -> subprocess.Popen[str]:
    """Two ranks, and the process that starts them. It gives them more time to stop than its 30 seconds."""
    module = ["--nproc-per-node", "2", "--master-port", str(free_port()), "-m", "replay_cli"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *module, *words(server.address, 4, *more)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "to_group"),
    [(signal.SIGTERM, False), (signal.SIGINT, True)],
    ids=["SIGTERM to torchrun", "Ctrl-C on its terminal"],
)
def test_a_signal_to_torchrun_stops_both_ranks_with_a_checkpoint(server, tmp_path, number, to_group):
    with ReplayClient(server.address) as client:
        keys = insert(client, 2 * GROUPS + 1)  # one of the ranks has its group of step 3
        process = torchrun(server, tmp_path)
        try:
            until(lambda: steps(tmp_path) == [1, 2] and is_waited_for(client))
            if to_group:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            _, complained = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
        assert "stopped after step 2, with a training checkpoint" in complained
        assert "forcefully" not in complained  # torchrun says so when it kills
        assert saved(tmp_path / "run")[-1].name == "step-2"
        keys += insert(client, 2 * GROUPS - 1)
        resumed = torchrun(server, tmp_path, "--resume")
        _, complained = resumed.communicate(timeout=PATIENCE)
        assert resumed.returncode == 0, complained
        assert steps(tmp_path) == [1, 2, 3, 4]
        assert trained(tmp_path) == sorted(keys)


# ---------------------------------------------------------------------------------------------------- random moments


@pytest.mark.long
def test_sigterm_at_random_moments_loses_no_group_and_repeats_no_step(server, tmp_path):
    starts = 0
    moments = random.Random(61)
    keys: list[int] = []
    last = 60
    with ReplayClient(server.address) as client:

        def feed() -> None:
            while len(keys) < last * GROUPS:
                if client.server_info().tables["rollouts"].size < 8:
                    keys.extend(insert(client, 1))
                time.sleep(moments.uniform(0.0, 0.05))

        feeder = in_a_thread(feed)
        while True:
            starts += 1
            more = () if starts == 1 else ("--resume",)
            trainer = started(server, tmp_path, last, "--set", f"publish_every={1 + starts % 3}", *more)
            if starts <= 20:
                before = steps(tmp_path)
                # Often in the middle of steps, and sometimes while the model is loaded.
                if starts % 5:
                    until(
                        lambda before=before, trainer=trainer: steps(tmp_path) != before or trainer.poll() is not None
                    )
                time.sleep(moments.uniform(0.0, 0.3))
                trainer.send_signal(signal.SIGTERM)
            _, complained = trainer.communicate(timeout=PATIENCE)
            # Its first tenths of a second, before it hears signals, a signal ends without a word.
            assert trainer.returncode in (0, 143, -signal.SIGTERM), complained
            assert "Traceback" not in complained
            found = steps(tmp_path)
            assert found == list(range(1, len(found) + 1))
            if trainer.returncode == 0:
                break
        feeder.result(PATIENCE)
        assert starts > 5
        assert found == list(range(1, last + 1))
        assert trained(tmp_path) == sorted(keys)
        queue: Any = client.server_info().tables["rollouts"]
        assert queue.size == 0
        assert queue.reserved == 0
        assert queue.consumed == last * GROUPS
