"""A trainer that dies together with a shard, and is resumed while that shard is away, trains on every group once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from replay_client import ReplayClient
from replay_server import ReplayServer
from replay_server.config import DEFAULT_TABLES
from tests.factories import ServerProcess, server_process, until
from tests.trainer.factories import OnStep
from tests.trainer.killed_trainer import kill_in_a_process, run, trained
from tests.trainer.test_killed import durable, insert
from tests.trainer.test_killed_ranks import kill_ranks, start_ranks

pytestmark = pytest.mark.timeout(900)  # a guard against hanging; processes start where others may be busy
EACH = 6
"""Groups of each shard. A batch takes from both in turn, as long as both are there."""


class Pair:
    """Two durable shards as processes, each with its groups. The second one goes away."""

    def __init__(self, tmp_path: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._folders = [tmp_path / name for name in "ab"]
        for folder in self._folders:
            folder.mkdir()
        self._servers = [self._serve(folder) for folder in self._folders]
        self.addresses = [server.address for server in self._servers]
        self.address = ",".join(f"{name}={address}" for name, address in zip("ab", self.addresses, strict=True))
        self.keys: list[int] = []

    def _serve(self, folder: Path, address: str = "127.0.0.1:0") -> ServerProcess:
        return self._stack.enter_context(server_process(folder, durable(folder), address))

    def fill(self, each: int = EACH) -> None:
        self.keys = sorted(key for address in self.addresses for key in fill(address, each))

    def kill_second(self) -> None:
        self._servers[1].kill()

    def end_leases(self) -> None:
        """Ends the leases of the second shard while its clients cannot see it."""
        server = self._serve(self._folders[1])
        with ReplayClient(server.address) as client:
            until(lambda: client.server_info().tables["rollouts"].reserved == 0, seconds=60.0)
        server.kill()

    def restart_second(self) -> None:
        self._servers[1] = self._serve(self._folders[1], self.addresses[1])

    def left(self) -> list[int]:
        """The keys that are in the queues when no trainer runs."""
        keys = []
        for address in self.addresses:
            with ReplayClient(address) as client:
                until(lambda client=client: client.server_info().tables["rollouts"].reserved == 0, seconds=60.0)
                keys += [item.key for item in client.list_items("rollouts")]
        return keys


def fill(address: str, count: int = EACH) -> list[int]:
    with ReplayClient(address) as client:
        return insert(client, count)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path, stack)


def after_step(last: int, act: Callable[[], None]) -> OnStep:
    def on_step(metrics: dict[str, float]) -> None:
        if metrics["step"] == last:
            act()

    return OnStep(on_step)


@pytest.mark.long
@pytest.mark.parametrize("lease", [2.0, 300.0], ids=["its leases have ended", "its leases are open"])
def test_a_shard_that_comes_back_while_the_resumed_trainer_runs_gives_no_group_twice(
    pair: Pair, tmp_path: Path, lease: float
) -> None:
    pair.fill()
    kill_in_a_process(pair.address, tmp_path, "written", 2, lease=lease)
    pair.kill_second()
    if lease < 300.0:
        pair.end_leases()
    # From step 5 on, the groups of the first shard are used up.
    run(pair.address, tmp_path, callbacks=[after_step(4, pair.restart_second)], resume=True, max_steps=5, lease=lease)
    assert sorted(trained(tmp_path) + pair.left()) == pair.keys


@pytest.mark.long
def test_the_state_names_the_groups_of_a_shard_for_as_long_as_it_is_away(pair: Pair, tmp_path: Path) -> None:
    pair.fill()
    kill_in_a_process(pair.address, tmp_path, "written", 2, lease=2.0)
    pair.kill_second()
    pair.end_leases()
    run(pair.address, tmp_path, resume=True, max_steps=4)
    pair.restart_second()
    run(pair.address, tmp_path, resume=True, max_steps=5)
    assert sorted(trained(tmp_path) + pair.left()) == pair.keys


@pytest.mark.long
def test_every_rank_leaves_the_groups_of_an_earlier_state_out(pair: Pair, tmp_path: Path) -> None:
    pair.fill(12)
    options = {"groups_per_step": 4}
    kill_ranks(pair.address, tmp_path, 0, "written", 2, all_ranks=True, lease=2.0, **options)
    pair.kill_second()
    pair.end_leases()
    ranks = start_ranks(pair.address, tmp_path, "resumed", {}, resume=True, max_steps=5, **options)
    until(lambda: '"step": 4' in (tmp_path / "drawn.jsonl").read_text(), seconds=300.0)
    pair.restart_second()
    for rank in ranks:
        rank.join(300)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert sorted(trained(tmp_path) + pair.left()) == pair.keys


def test_a_run_goes_on_without_a_shard_that_its_state_names_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(ReplayServer(DEFAULT_TABLES, port=0)) for _ in range(3)]
        named = [f"{name}={server.address}" for name, server in zip("abc", servers, strict=True)]
        keys = [fill(server.address) for server in servers]
        kill_in_a_process(",".join(named), tmp_path, "written", 2, groups_per_step=3)
        run(",".join(named[:2]), tmp_path, resume=True, groups_per_step=3)
    used = trained(tmp_path)
    assert len(used) == len(set(used)) == 12
    assert len(set(used) & set(keys[2])) == 2
    assert len([said for said in caplog.messages if "no such shard" in said]) == 1
