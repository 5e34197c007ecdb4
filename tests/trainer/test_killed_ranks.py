"""One of two ranks is killed, or both, or both and the server: a resume trains on every group, and on none twice.

The server is a process, and so is each rank; the ranks meet over gloo.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from replay_client import ReplayClient
from replay_trainer.weights import saved
from tests.factories import ServerProcess, server_process, start
from tests.trainer.killed_trainer import run_rank, trained
from tests.trainer.test_killed import check_used_up, durable, insert, until_gone

pytestmark = pytest.mark.timeout(900)  # a guard against hanging; processes start where others may be busy
RANKS = 2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with server_process(tmp_path) as process:
        yield process


def start_ranks(
    address: str, folder: Path, attempt: str, deaths: Mapping[int, tuple[str, int]], **options: Any
) -> list[BaseProcess]:
    """One process for each rank. `deaths`: in which phase of which step a rank kills itself."""
    return [
        start(
            run_rank, rank, RANKS, folder / f"meeting-{attempt}", address, folder, *deaths.get(rank, ("", 0)), **options
        )
        for rank in range(RANKS)
    ]


def kill_ranks(
    address: str, folder: Path, rank: int, phase: str, step: int, *, all_ranks: bool = False, **options: Any
) -> None:
    """Trains until this rank kills itself. The other one then ends by its own error, or is killed as well."""
    processes = start_ranks(address, folder, "killed", {rank: (phase, step)}, **options)
    processes[rank].join(300)
    if all_ranks:
        for process in processes:
            process.kill()
    for process in processes:
        process.join(300)
    assert processes[rank].exitcode == -signal.SIGKILL
    assert all(process.exitcode not in (None, 0) for process in processes)


def resume_ranks(address: str, folder: Path, **options: Any) -> None:
    processes = start_ranks(address, folder, "resumed", {}, resume=True, **options)
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * RANKS
    assert list(folder.glob("run/*.tmp")) == []  # what the killed run left


@pytest.mark.parametrize(
    ("rank", "phase", "step", "options"),
    [
        # The first rank waits for the file of the second.
        (1, "rows", 2, {"fsdp": True}),
        # The other rank may still write the state of step 1.
        pytest.param(1, "backward", 2, {}, marks=pytest.mark.long),
        pytest.param(0, "updated", 2, {"fsdp": True}, marks=pytest.mark.long),
        # The other rank gives back groups that the state contains.
        pytest.param(0, "written", 2, {}, marks=pytest.mark.long),
        pytest.param(0, "announced", 3, {"save_every": 2, "fsdp": True}, marks=pytest.mark.long),
        pytest.param(1, "updated", 2, {"all_ranks": True}, marks=pytest.mark.long),
    ],
)
def test_ranks_of_which_one_is_killed_or_all_lose_no_group_and_train_on_none_twice(
    server: ServerProcess, tmp_path: Path, rank: int, phase: str, step: int, options: dict[str, Any]
) -> None:
    with ReplayClient(server.address) as client:
        keys = insert(client)
        kill_ranks(server.address, tmp_path, rank, phase, step, **options)
        until_gone(client)
        resume_ranks(server.address, tmp_path, **{k: v for k, v in options.items() if k != "all_ranks"})
        assert trained(tmp_path) == sorted(keys)
        check_used_up(client, keys, len(keys))


@pytest.mark.parametrize(("rank", "memory"), [(0, False), pytest.param(1, True, marks=pytest.mark.long)])
def test_a_rank_that_cannot_write_its_rows_stops_all_ranks_and_a_resume_goes_on(
    server: ServerProcess, tmp_path: Path, rank: int, memory: bool
) -> None:
    options: dict[str, Any] = {"fsdp": True} | ({"weights_dir": tmp_path / "memory"} if memory else {})
    with ReplayClient(server.address) as client:
        keys = insert(client)
        processes = start_ranks(server.address, tmp_path, "stopped", {rank: ("full", 2)}, **options)
        for process in processes:
            process.join(300)
        assert [process.exitcode for process in processes] == [1] * RANKS
        for each in range(RANKS):
            error = (tmp_path / f"error-{each}").read_text()
            assert f"rank {rank} could not write its part of the full state: OSError: " in error
            assert "cannot be written" in error
            assert "[Errno 28] No space" in error
        assert saved(tmp_path / "run")[-1].name == "step-1"
        assert client.policy().version == (2 if memory else 1)
        until_gone(client)
        resume_ranks(server.address, tmp_path, **options)
        assert saved(tmp_path / "run")[-1].name == "step-4"
        assert trained(tmp_path) == sorted(keys)


@pytest.mark.long
def test_ranks_and_server_killed_together_come_back_together(tmp_path: Path) -> None:
    config = durable(tmp_path)
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        keys = insert(client)
        kill_ranks(server.address, tmp_path, 0, "written", 2, all_ranks=True)
        server.kill()
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        resume_ranks(server.address, tmp_path)
        assert trained(tmp_path) == sorted(keys)
        check_used_up(client, keys, len(keys))
