"""What TRL's real AsyncGRPOTrainer alone promises of a kill: with older checkpoints, with none, and with ranks.

`tests/contracts/test_trainer.py` kills it in each phase of a step.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="pip install '.[trl]'")

from replay_client import ReplayClient
from replay_client.testing import until
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
