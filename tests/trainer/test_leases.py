"""What becomes of groups that a full state contains, if their shard is away when they are acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from replay_client import ReplayClient, Sample
from replay_server import ReplayServer
from replay_server.config import DEFAULT_TABLES
from replay_trainer.leases import GroupLeases, TrainedGroups
from tests.factories import until

TABLE = "rollouts"


@dataclass
class Resumed:
    """A trainer that was resumed while one of two shards was away, from a state that names groups of both."""

    client: ReplayClient
    leases: GroupLeases
    batch: list[Sample]
    """The groups of the shard that is away."""
    state: TrainedGroups
    tmp_path: Path

    @contextmanager
    def shard_is_back(self) -> Iterator[None]:
        """The leases of the dead trainer have ended meanwhile."""
        port = int(self.batch[0].info.shard.rpartition(":")[2])
        with ReplayServer(DEFAULT_TABLES, port=port, data_dir=self.tmp_path / "data"):
            until(lambda: self.client.server_info().tables[TABLE].size == len(self.batch))
            yield


@pytest.fixture(params=[2, 1], ids=["whole batch", "part of a batch"])
def resumed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Resumed]:
    away = ReplayServer(DEFAULT_TABLES, port=0, data_dir=tmp_path / "data")
    away.start()
    with ReplayServer(DEFAULT_TABLES, port=0) as stays, ReplayClient([stays.address, away.address]) as client:
        for server in (stays, away):
            with ReplayClient(server.address) as alone:
                for _ in range(2):
                    alone.insert(b"", {TABLE: 1.0})
        drawn = client.sample(TABLE, 4, lease=1.0)
        batch = [sample for sample in drawn if sample.info.shard == away.address]
        killed, leases = (GroupLeases(client, TABLE, 60.0, tmp_path, rank=0) for _ in range(2))
        assert killed.hold(drawn) == drawn
        state = killed.trained(left=batch[request.param :])
        away.stop(grace=0.0)
        leases.acknowledge(state)
        leases.give_back_of_dead(state)
        yield Resumed(client, leases, batch, state, tmp_path)


def contained(resumed: Resumed) -> set[int]:
    """The keys of the away shard's groups that the state contains."""
    return resumed.state.keys & {sample.info.key for sample in resumed.batch}


def test_the_next_state_names_what_no_server_has_confirmed(resumed: Resumed) -> None:
    assert resumed.leases.unconfirmed.keys == contained(resumed)
    state = TrainedGroups.from_state_dict(resumed.leases.trained().state_dict())
    assert state.keys == contained(resumed)
    resumed.leases.acknowledge(state)  # the shard is still away
    assert resumed.leases.unconfirmed.keys == contained(resumed)


def test_groups_whose_lease_has_ended_are_taken_when_their_shard_is_back(resumed: Resumed) -> None:
    with resumed.shard_is_back():
        resumed.leases.acknowledge(resumed.leases.trained())
        assert resumed.leases.unconfirmed.keys == set()
        left = [item.key for item in resumed.client.list_items(TABLE)]
        assert set(left) == {sample.info.key for sample in resumed.batch} - contained(resumed)


def test_groups_that_come_again_before_that_are_left_out_and_end_with_their_batch(resumed: Resumed) -> None:
    with resumed.shard_is_back():
        again = resumed.client.sample(TABLE, 2, lease=60.0)
        new = resumed.leases.hold(again)
        assert {sample.info.key for sample in new} == {sample.info.key for sample in again} - contained(resumed)
        resumed.leases.acknowledge(resumed.leases.trained())
        assert resumed.leases.unconfirmed.keys == set()
        table = resumed.client.server_info().tables[TABLE]
        assert (table.size, table.reserved) == (0, 0)
