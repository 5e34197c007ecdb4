"""A server that goes away while the trainer runs: the trainer goes on announcing, and goes on when it is back.

Groups of a training checkpoint whose shard is away when they are acknowledged are not trained on again.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from replay_client import ReplayClient, Sample
from replay_client.scoring import group_priority
from replay_client.testing import make_group, until
from replay_server import ReplayServer
from replay_server.config import DEFAULT_TABLES
from replay_trainer import GRPOConfig, GRPOTrainer, grpo, leases, publication
from replay_trainer.background import ServerWaits
from replay_trainer.leases import GroupLeases, TrainedGroups
from replay_trainer.publication import Publication
from replay_trainer.ranks import Ranks
from replay_trainer.stopping import Stopping
from replay_trainer.weights import published
from tests.kit.faults import ctrl_c_raises
from tests.kit.processes import free_port, run_ranks
from tests.kit.trainers import lines_of, make_trainer

STEPS = 4
pytestmark = pytest.mark.timeout(200)  # what it guards against is waiting without an end


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer says after moments that it waits."""
    quick = partial(ServerWaits, seconds=0.2, look_seconds=0.05)
    for module in (grpo, publication):
        monkeypatch.setattr(module, "ServerWaits", quick)


def serve(tmp_path: Path, port: int) -> ReplayServer:
    server = ReplayServer(DEFAULT_TABLES, port=port, data_dir=tmp_path / "data")
    server.start()
    return server


def fill(client: ReplayClient) -> None:
    for index in range(STEPS):
        group = make_group(rewards=[1.0, 0.0], completions=[[5, 6], [7 + index]], logprobs=-2.7)
        client.insert(group, {"rollouts": group_priority(group.rewards, group.advantages)})


def trainer_of(client: ReplayClient, folder: Path, on_step: Callable[[Any], None], **options: Any) -> GRPOTrainer:
    few = {"max_steps": STEPS, "groups_per_step": 1, "sample_timeout": 1.0}
    return make_trainer(client, folder, on_step=on_step, **(few | options))


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in lines_of(folder)]


@pytest.mark.usefixtures("soon")
def test_the_trainer_announces_weights_of_a_folder_of_their_own_when_the_server_is_back(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(publication, "FIRST_TRY", 0.2)
    server = serve(tmp_path, port := free_port())
    done: list[int] = []
    servers = [server]

    def restart() -> None:
        # Longer than sample_timeout: a line every 0.2 s.
        until(lambda: sum("waiting to announce version" in said for said in caplog.messages) >= 10, timeout=120)
        done.extend(steps(tmp_path / "run"))
        servers.append(serve(tmp_path, port))

    restarter = threading.Thread(target=restart)

    def stop_after_two(metrics: dict[str, float]) -> None:
        if metrics["step"] == 2:
            server.stop(grace=0.0)
            restarter.start()

    with ReplayClient(server.address, timeout=None) as client:
        fill(client)
        trainer_of(client, tmp_path / "run", stop_after_two, weights_dir=tmp_path / "weights").train()
        assert client.policy().version == STEPS
    restarter.join()
    servers[-1].stop()
    assert steps(tmp_path / "run") == [1, 2, 3, 4]
    assert max(done) <= 3  # a batch that was there already; then it waited
    assert "no replay server answers" in next(said for said in caplog.messages if "to announce version" in said)


@pytest.mark.long
@pytest.mark.usefixtures("soon")
def test_a_run_that_is_stopped_while_the_server_is_away_ends_and_its_last_version_is_announced_by_a_resume(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(publication, "LAST_TRY", 0.5)
    server = serve(tmp_path, port := free_port())

    def interrupt() -> None:
        until(lambda: any("waiting to announce version" in said for said in caplog.messages), timeout=120)
        _thread.interrupt_main()

    interrupter = threading.Thread(target=interrupt)

    def stop_after_two(metrics: dict[str, float]) -> None:
        if metrics["step"] == 2:
            server.stop(grace=0.0)
            interrupter.start()

    with ReplayClient(server.address, timeout=None) as client:
        fill(client)
        with ctrl_c_raises(), pytest.raises(KeyboardInterrupt):
            trainer_of(client, tmp_path / "run", stop_after_two, max_steps=2).train()
    interrupter.join()
    said = next(message for message in caplog.messages if "nobody has told it" in message)
    assert f"in {published(tmp_path / 'run')[-1]}" in said
    server = serve(tmp_path, port)
    with ReplayClient(server.address) as client:
        trainer_of(client, tmp_path / "run", lambda _: None, max_steps=3, resume=True).train()
        assert client.policy().version == 3
    server.stop()


def test_a_server_that_lost_its_items_is_gone_on_with_and_no_resume_warns_of_them(tmp_path, caplog):
    queue, pool = DEFAULT_TABLES
    tables, port = [queue.model_copy(update={"retain_consumed": 2}), pool], free_port()
    for max_steps in (2, 4, 4, 5):
        with ReplayServer(tables, port=port) as server, ReplayClient(server.address) as client:
            fill(client)
            trainer_of(client, tmp_path / "run", lambda _: None, max_steps=max_steps, resume=max_steps > 2).train()
            assert client.policy().version == max_steps
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5]
    assert [said for said in caplog.messages if "groups" in said] == []


# ---------------------------------------------------------------------------------- groups that cannot be acknowledged


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
            until(lambda: self.client.server_info().tables["rollouts"].size == len(self.batch))
            yield


@pytest.fixture(params=[2, 1], ids=["whole batch", "part of a batch"])
def resumed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Resumed]:
    away = ReplayServer(DEFAULT_TABLES, port=free_port(), data_dir=tmp_path / "data")
    away.start()
    with ReplayServer(DEFAULT_TABLES, port=0) as stays, ReplayClient([stays.address, away.address]) as client:
        for server in (stays, away):
            with ReplayClient(server.address) as alone:
                for _ in range(2):
                    alone.insert(b"", {"rollouts": 1.0})
        drawn = client.sample("rollouts", 4, lease=1.0)
        batch = [sample for sample in drawn if sample.info.shard == away.address]
        killed, leases = (GroupLeases(client, "rollouts", 60.0, tmp_path, rank=0) for _ in range(2))
        assert killed.hold(drawn) == drawn
        state = killed.trained(left=batch[request.param :])
        away.stop(grace=0.0)
        leases.acknowledge(state)
        leases.requeue_dead(state)
        yield Resumed(client, leases, batch, state, tmp_path)


def contained(resumed: Resumed) -> set[int]:
    """The keys of the away shard's groups that the state contains."""
    return resumed.state.keys & {sample.info.key for sample in resumed.batch}


def test_the_next_state_names_what_no_server_has_confirmed(resumed):
    assert resumed.leases.unconfirmed.keys == contained(resumed)
    state = TrainedGroups.from_state_dict(resumed.leases.trained().state_dict())
    assert state.keys == contained(resumed)
    resumed.leases.acknowledge(state)  # the shard is still away
    assert resumed.leases.unconfirmed.keys == contained(resumed)


def test_groups_whose_lease_has_ended_are_taken_when_their_shard_is_back(resumed):
    with resumed.shard_is_back():
        resumed.leases.acknowledge(resumed.leases.trained())
        assert resumed.leases.unconfirmed.keys == set()
        left = [item.key for item in resumed.client.list_items("rollouts")]
        assert set(left) == {sample.info.key for sample in resumed.batch} - contained(resumed)


def test_groups_that_come_again_before_that_are_left_out_and_end_with_their_batch(resumed):
    with resumed.shard_is_back():
        again = resumed.client.sample("rollouts", 2, lease=60.0)
        new = resumed.leases.hold(again)
        assert {sample.info.key for sample in new} == {sample.info.key for sample in again} - contained(resumed)
        resumed.leases.acknowledge(resumed.leases.trained())
        assert resumed.leases.unconfirmed.keys == set()
        table = resumed.client.server_info().tables["rollouts"]
        assert table.size == 0
        assert table.reserved == 0


def test_a_server_that_lost_its_items_does_not_make_the_state_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "MOST_UNCONFIRMED", 2)
    with ReplayServer(DEFAULT_TABLES, port=0) as server, ReplayClient(server.address) as client:
        held = GroupLeases(client, "rollouts", 60.0, tmp_path, rank=0)
        keys = [client.insert(b"", {"rollouts": 1.0}) for _ in range(4)]
        for _ in keys:
            batch = client.sample("rollouts", 1, lease=60.0)
            held.hold(batch)
            client.acknowledge(batch, requeue=True)
            client.delete("rollouts", [batch[0].info.key])
            held.acknowledge(held.trained())
            held.settled()
        assert held.unconfirmed.keys == set(keys[-2:])


CAME_BACK = (101, 102, 103)
"""Keys of groups that a training checkpoint contains, and whose shard is away when they are acknowledged."""


def draw_as_rank(address: str, folder: Path) -> None:
    """One of two ranks. No server confirms the groups to the first; they come back, and the other one draws them."""
    ranks, config = Ranks("cpu"), GRPOConfig(output_dir=folder / "run", report_to=())
    with ReplayClient(address) as client:
        held = GroupLeases(client, "rollouts", 60.0, folder, ranks.index)
        none: Any = None  # nothing is published
        published_by = Publication(none, none, none, client, config, ranks, False, held, Stopping(ranks))
        if ranks.is_first:
            held.acknowledge(TrainedGroups({("away", 7): list(CAME_BACK)}))
        published_by.check()
        if ranks.is_first:
            for key in (*CAME_BACK, 104):
                client.insert(b"", {"rollouts": 1.0}, key=key)
        ranks.wait()
        if not ranks.is_first:
            batch = client.sample("rollouts", 4, lease=60.0, timeout=60.0)
            assert {sample.info.key for sample in batch} == {*CAME_BACK, 104}
            assert [sample.info.key for sample in held.hold(batch)] == [104]
        ranks.wait()


def test_other_ranks_leave_groups_out_that_the_first_could_not_acknowledge(tmp_path):
    with ReplayServer(DEFAULT_TABLES, port=0) as server:
        assert run_ranks(2, draw_as_rank, server.address, tmp_path) == ["", ""]
