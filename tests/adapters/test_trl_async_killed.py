"""TRL's real AsyncGRPOTrainer, killed in any phase of a step and started again, loses no group and repeats none."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="pip install '.[trl]'")

from replay_client import ReplayClient
from replay_client.testing import until
from replay_trainer.weights import published
from tests.adapters.killed_async_grpo import (
    GROUP_SIZE,
    block,
    insert,
    run,
    run_rank,
    save_model,
    trained,
)
from tests.kit.processes import ServerProcess, free_port, server_process, start

# The limit is a guard against hanging; processes start where others may be busy.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
GROUPS, STEPS, PER_STEP = 12, 8, 5


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    save_model(tmp_path / "model")
    with server_process(tmp_path, block("replay.toml")) as server:
        yield server


def end_of(address: str, folder: Path, *arguments: object, **options: object) -> int | None:
    process = start(run, address, folder, *arguments, **options)
    process.join(600)
    return process.exitcode


def until_gone(client: ReplayClient) -> None:
    until(lambda: client.server_info().sample_streams == 0, timeout=60.0)


@pytest.mark.parametrize("phase", ["forward", "updated", "published", "saving", "saved", "acknowledged"])
def test_a_killed_trainer_loses_nothing_and_trains_on_nothing_twice(server, tmp_path, phase):
    insert(server.address, GROUPS)
    with ReplayClient(server.address) as client:
        assert end_of(server.address, tmp_path, phase, 4) == -signal.SIGKILL
        until_gone(client)
        before = client.policy().version
        assert end_of(server.address, tmp_path) == 0
        # Every completion once, in the order in which they were inserted: whole groups and parts of them.
        assert trained(tmp_path) == list(range(STEPS * PER_STEP))
        queue = client.server_info().tables["rollouts"]
        used = STEPS * PER_STEP // GROUP_SIZE
        assert queue.size == GROUPS - used
        assert queue.reserved == 0
        assert queue.consumed == used
        # The second trainer counted from 1 in TRL, and on from where it was here.
        policy = client.policy()
        assert policy.version > before
        assert str(published(tmp_path / "runs/async/weights")[-1]) == policy.weights


@pytest.mark.parametrize("phase", ["saved", "acknowledged"])
@pytest.mark.parametrize("older", [False, True])
def test_a_trainer_killed_before_it_names_a_checkpoint_goes_on_from_it_or_from_an_older_one(tmp_path, phase, older):
    save_model(tmp_path / "model")
    config = block("replay.toml").replace("forward_to", "retain_consumed = 2\nforward_to")
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        insert(server.address, GROUPS)
        assert end_of(server.address, tmp_path, phase, 4) == -signal.SIGKILL
        until_gone(client)
        if older:
            (tmp_path / "runs/async/checkpoint-4").rename(tmp_path / "checkpoint-4")
        assert end_of(server.address, tmp_path) == 0
        assert trained(tmp_path) == list(range(STEPS * PER_STEP))
        queue = client.server_info().tables["rollouts"]
        used = STEPS * PER_STEP // GROUP_SIZE
        assert queue.size == GROUPS - used
        assert queue.reserved == 0
        assert queue.consumed == used


def test_a_trainer_that_starts_from_nothing_gets_all_groups_again_that_no_checkpoint_contains(server, tmp_path):
    insert(server.address, GROUPS)
    with ReplayClient(server.address) as client:
        assert end_of(server.address, tmp_path, "forward", 4, save_steps=100) == -signal.SIGKILL
        until_gone(client)
        assert client.server_info().tables["rollouts"].reserved > 0
        (tmp_path / "trained.jsonl").unlink()
        assert end_of(server.address, tmp_path, max_steps=2) == 0
        assert trained(tmp_path) == list(range(2 * PER_STEP))


def test_the_ranks_of_a_trainer_share_what_its_first_rank_takes(server, tmp_path):
    insert(server.address, 14)
    port = free_port()
    ranks = [start(run_rank, rank, 2, port, server.address, tmp_path, max_steps=4) for rank in range(2)]
    for process in ranks:
        process.join(600)
        assert process.exitcode == 0
    used = sorted(mark for rank in range(2) for mark in trained(tmp_path / str(rank)))
    assert used == list(range(len(used)))
    with ReplayClient(server.address) as client:
        queue = client.server_info().tables["rollouts"]
        assert queue.size == 14 - len(used) // GROUP_SIZE
        assert queue.reserved == 0


def test_an_interrupted_trainer_gives_back_at_once_what_no_checkpoint_contains(server, tmp_path):
    insert(server.address, 6)
    process = start(run, server.address, tmp_path)
    with ReplayClient(server.address) as client:
        # Three steps, and it waits for the groups of the fifth: TRL collates one micro-batch ahead.
        until(lambda: client.policy().version == 4, timeout=300.0)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
        assert process.exitcode == 1
        queue = client.server_info().tables["rollouts"]
        in_checkpoint_2 = 2 * PER_STEP // GROUP_SIZE
        assert queue.consumed == in_checkpoint_2
        assert queue.size == 6 - in_checkpoint_2
        assert queue.reserved == 0
    assert sorted(path.name for path in (tmp_path / "runs/async/weights").glob("step-*")) == ["step-3", "step-4"]
