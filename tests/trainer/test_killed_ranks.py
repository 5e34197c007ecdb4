"""One of two ranks is killed, or both, or the trainer and a server: a resume trains on every group, and on none twice.

The server is a process, and so is each rank; the ranks meet over gloo.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from replay_client import ReplayClient
from replay_client.testing import until
from replay_server import ReplayServer
from replay_server.config import DEFAULT_TABLES
from replay_trainer.weights import saved
from tests.kit.processes import ServerProcess, Servers, server_process, start
from tests.kit.trainers import OnStep
from tests.trainer.killed_trainer import kill_in_a_process, run, run_rank, trained
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
        # The other rank requeues groups that the state contains.
        pytest.param(0, "written", 2, {}, marks=pytest.mark.long),
        pytest.param(0, "announced", 3, {"save_every": 2, "fsdp": True}, marks=pytest.mark.long),
        pytest.param(1, "updated", 2, {"all_ranks": True}, marks=pytest.mark.long),
    ],
)
def test_ranks_of_which_one_is_killed_or_all_lose_no_group_and_train_on_none_twice(
    server, tmp_path, rank, phase, step, options
):
    with ReplayClient(server.address) as client:
        keys = insert(client)
        kill_ranks(server.address, tmp_path, rank, phase, step, **options)
        until_gone(client)
        resume_ranks(server.address, tmp_path, **{k: v for k, v in options.items() if k != "all_ranks"})
        assert trained(tmp_path) == sorted(keys)
        check_used_up(client, keys, len(keys))


@pytest.mark.parametrize(("rank", "memory"), [(0, False), pytest.param(1, True, marks=pytest.mark.long)])
def test_a_rank_that_cannot_write_its_rows_stops_all_ranks_and_a_resume_goes_on(server, tmp_path, rank, memory):
    options: dict[str, Any] = {"fsdp": True} | ({"weights_dir": tmp_path / "memory"} if memory else {})
    with ReplayClient(server.address) as client:
        keys = insert(client)
        processes = start_ranks(server.address, tmp_path, "stopped", {rank: ("full", 2)}, **options)
        for process in processes:
            process.join(300)
        assert [process.exitcode for process in processes] == [1] * RANKS
        for each in range(RANKS):
            error = (tmp_path / f"error-{each}").read_text()
            assert f"rank {rank} could not write its part of the training checkpoint: OSError: " in error
            assert "cannot be written" in error
            assert "[Errno 28] No space" in error
        assert saved(tmp_path / "run")[-1].name == "step-1"
        assert client.policy().version == (2 if memory else 1)
        until_gone(client)
        resume_ranks(server.address, tmp_path, **options)
        assert saved(tmp_path / "run")[-1].name == "step-4"
        assert trained(tmp_path) == sorted(keys)


@pytest.mark.long
def test_ranks_and_server_killed_together_come_back_together(tmp_path):
    config = durable(tmp_path)
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        keys = insert(client)
        kill_ranks(server.address, tmp_path, 0, "written", 2, all_ranks=True)
        server.kill()
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        resume_ranks(server.address, tmp_path)
        assert trained(tmp_path) == sorted(keys)
        check_used_up(client, keys, len(keys))


# ------------------------------------------------------------------------------------------------ a shard that is away

EACH = 8
"""Groups of each shard: for four steps of one trainer, should all of its batches come from it."""


class Pair(Servers):
    """Two durable shards as processes, each with its groups. The second one goes away."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, [durable(Path("{folder}"))] * 2, named=True)
        self.keys: list[int] = []

    def fill(self, each: int = EACH) -> None:
        self.keys = sorted(key for address in self.addresses for key in fill(address, each))

    def left(self) -> list[int]:
        """The keys that are in the queues when no trainer runs."""
        keys = []
        for address in self.addresses:
            with ReplayClient(address) as client:
                until(lambda client=client: client.server_info().tables["rollouts"].reserved == 0, timeout=60.0)
                keys += [item.key for item in client.list_items("rollouts")]
        return keys


def fill(address: str, count: int = EACH) -> list[int]:
    with ReplayClient(address) as client:
        return insert(client, count)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with Pair(tmp_path) as shards:
        yield shards


def after_step(last: int, act: Callable[[], None]) -> OnStep:
    def on_step(metrics: dict[str, float]) -> None:
        if metrics["step"] == last:
            act()

    return OnStep(on_step)


@pytest.mark.long
@pytest.mark.parametrize("lease", [2.0, 300.0], ids=["its leases have ended", "its leases are open"])
def test_a_shard_that_comes_back_while_the_resumed_trainer_runs_gives_no_group_twice(pair, tmp_path, lease):
    pair.fill()
    kill_in_a_process(pair.address, tmp_path, "written", 2, lease=lease)
    pair.kill(1)
    if lease < 300.0:
        pair.end_leases(1)
    # At step 5 the groups of the first shard may be used up.
    run(
        pair.address,
        tmp_path,
        callbacks=[after_step(4, lambda: pair.restart(1))],
        resume=True,
        max_steps=5,
        lease=300.0,
    )
    assert sorted(trained(tmp_path) + pair.left()) == pair.keys


@pytest.mark.long
def test_the_state_names_the_groups_of_a_shard_for_as_long_as_it_is_away(pair, tmp_path):
    pair.fill()
    kill_in_a_process(pair.address, tmp_path, "written", 2, lease=2.0)
    pair.kill(1)
    pair.end_leases(1)
    run(pair.address, tmp_path, resume=True, max_steps=4)
    pair.restart(1)
    run(pair.address, tmp_path, resume=True, max_steps=5)
    assert sorted(trained(tmp_path) + pair.left()) == pair.keys


@pytest.mark.long
def test_ranks_that_are_resumed_without_a_shard_train_on_no_group_twice_when_it_is_back(pair, tmp_path):
    pair.fill(64)  # the first shard has enough for all steps and what the ranks draw ahead, should it give all batches
    options = {"groups_per_step": 4}
    kill_ranks(pair.address, tmp_path, 0, "written", 2, all_ranks=True, lease=2.0, **options)
    pair.kill(1)
    pair.end_leases(1)
    # The shard is back before the last step, also where it starts slowly.
    ranks = start_ranks(pair.address, tmp_path, "resumed", {}, resume=True, max_steps=12, **options)
    until(lambda: '"step": 4' in (tmp_path / "drawn.jsonl").read_text(), timeout=300.0)
    pair.restart(1)
    for rank in ranks:
        rank.join(300)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert sorted(trained(tmp_path) + pair.left()) == pair.keys


def test_a_run_goes_on_without_a_shard_that_its_state_names_and_says_so_once(tmp_path, caplog):
    with ExitStack() as stack:
        servers = [stack.enter_context(ReplayServer(DEFAULT_TABLES, port=0)) for _ in range(3)]
        named = [f"{name}={server.address}" for name, server in zip("abc", servers, strict=True)]
        keys = [fill(server.address) for server in servers]
        kill_in_a_process(",".join(named), tmp_path, "written", 2, groups_per_step=3)
        # The shard of the last step, whose groups the state names: most batches come from one server.
        last = json.loads((tmp_path / "drawn.jsonl").read_text().splitlines()[-1])["keys"][-1]
        gone = next(i for i, shard in enumerate(keys) if last in shard)
        run(",".join(named[:gone] + named[gone + 1 :]), tmp_path, resume=True, groups_per_step=3)
    used = trained(tmp_path)
    assert len(used) == 12
    assert len(set(used)) == 12
    assert set(used) & set(keys[gone])
    assert len([said for said in caplog.messages if "no such shard" in said]) == 1
