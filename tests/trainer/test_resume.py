"""The protocol of a resume, played without a trainer: a death between two of its moments loses and repeats no group.

A step draws one group and publishes a version; each checkpoint contains the steps so far. The trainer dies while it
saves its third checkpoint. `tests/contracts/test_trainer.py` plays the same with whole trainers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from replay_client import ReplayClient
from replay_client.testing import make_group
from replay_server import ReplayServer
from replay_server.config import RateLimiterConfig, TableConfig
from replay_trainer.leases import GroupLeases, TrainedGroups
from replay_trainer.resume import ResumeProtocol, SavedState
from tests.kit.groups import keys_in

GROUPS, STEPS = 6, 3
COUNTING = pytest.mark.parametrize("renumbers", [True, False], ids=["makes versions again", "counts on"])
DEATHS = pytest.mark.parametrize("death", ["written", "acknowledged", "named", "trained on"])


LOST = "do not come back"
"""In a warning that a state is not known."""


@contextmanager
def filled(retain_consumed: int) -> Iterator[ReplayClient]:
    """A client of a server that has one table, with all groups."""
    limiter = RateLimiterConfig(type="queue", max_size=GROUPS)
    table = TableConfig(name="rollouts", rate_limiter=limiter, retain_consumed=retain_consumed)
    with ReplayServer([table], port=0) as server, ReplayClient(server.address) as client:
        for key in range(1, GROUPS + 1):
            client.insert(make_group(), {"rollouts": 1.0}, key=key)
        yield client


@pytest.fixture
def client() -> Iterator[ReplayClient]:
    with filled(retain_consumed=2) as client:
        yield client


@dataclass
class Checkpoint:
    """What a trainer writes to the disk."""

    groups: TrainedGroups
    state: SavedState
    trained: list[int]


@dataclass
class Trainer:
    """As much of a trainer as the protocol knows."""

    client: ReplayClient
    folder: Path
    renumbers: bool
    trained: list[int] = field(default_factory=list)
    """The keys of all steps that the weights have seen."""
    version: int = 0

    def __post_init__(self) -> None:
        config = self.client.server_info().tables["rollouts"].config
        self.leases = GroupLeases(self.client, "rollouts", 600.0, self.folder, rank=0)
        self.protocol = ResumeProtocol(self.client, self.leases, config, renumbers=self.renumbers)

    def go_on_from(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is None:
            self.protocol.resume(TrainedGroups(), None)
            return
        self.trained = list(checkpoint.trained)
        self.version = self.protocol.resume(checkpoint.groups, checkpoint.state, where="the checkpoint").version

    def step(self) -> None:
        batch = self.leases.hold(self.client.sample("rollouts", 1, lease=600.0, timeout=10.0))
        self.trained += [sample.info.key for sample in batch]
        self.version += 1
        self.client.set_policy_version(self.version)
        self.leases.check()

    def save(self, until: str = "named") -> Checkpoint:
        """Save a checkpoint, and stop after a moment of that."""
        state = self.protocol.new_state(self.version)
        checkpoint = Checkpoint(self.leases.trained(), state, list(self.trained))
        if until != "written":
            self.leases.acknowledge(checkpoint.groups)
            self.leases.settled()
        if until not in ("written", "acknowledged"):
            self.protocol.name(state, "")
        self.leases.check()
        return checkpoint


def dead_trainer(client: ReplayClient, folder: Path, renumbers: bool, death: str) -> list[Checkpoint]:
    """The checkpoints of a trainer that died while, or after, it saved the last one."""
    trainer = Trainer(client, folder, renumbers)
    trainer.go_on_from(None)
    checkpoints = []
    for step in range(1, STEPS + 1):
        trainer.step()
        checkpoints.append(trainer.save(death if step == STEPS else "named"))
    if death == "trained on":
        trainer.step()
    return checkpoints


def trained_to_the_end(client: ReplayClient, folder: Path, renumbers: bool, checkpoint: Checkpoint) -> list[int]:
    """The keys that the weights have seen when a resumed trainer has used up the table."""
    trainer = Trainer(client, folder, renumbers)
    trainer.go_on_from(checkpoint)
    while client.server_info().tables["rollouts"].size:
        trainer.step()
    return trainer.trained


@COUNTING
@DEATHS
@pytest.mark.parametrize("retain_consumed", [0, 2])
def test_a_trainer_that_goes_on_from_its_newest_checkpoint_trains_on_every_group_once(
    tmp_path, renumbers, death, retain_consumed, caplog
):
    with filled(retain_consumed) as client:
        checkpoints = dead_trainer(client, tmp_path, renumbers, death)
        trained = trained_to_the_end(client, tmp_path, renumbers, checkpoints[-1])
        assert sorted(trained) == list(range(1, GROUPS + 1))
        assert client.server_info().tables["rollouts"].restored == 0
    assert LOST not in caplog.text


@COUNTING
@pytest.mark.parametrize("death", ["named", "trained on"])
def test_an_older_checkpoint_gets_the_groups_of_later_ones_again(client, tmp_path, renumbers, death):
    checkpoints = dead_trainer(client, tmp_path, renumbers, death)
    trained = trained_to_the_end(client, tmp_path, renumbers, checkpoints[-2])
    assert sorted(trained) == list(range(1, GROUPS + 1))
    assert client.server_info().tables["rollouts"].restored == 1


def test_groups_of_a_checkpoint_without_a_name_come_back_to_a_trainer_that_makes_versions_again(client, tmp_path):
    checkpoints = dead_trainer(client, tmp_path, True, "acknowledged")
    trained = trained_to_the_end(client, tmp_path, True, checkpoints[-2])
    assert sorted(trained) == list(range(1, GROUPS + 1))
    assert client.server_info().tables["rollouts"].restored == 1


def test_a_resume_takes_the_version_back_only_for_a_trainer_that_makes_it_again(client, tmp_path):
    checkpoint = dead_trainer(client, tmp_path, False, "trained on")[-1]
    counting_on = Trainer(client, tmp_path, False)
    counting_on.go_on_from(checkpoint)
    assert counting_on.version == STEPS + 1
    renumbering = Trainer(client, tmp_path, True)
    renumbering.go_on_from(checkpoint)
    assert renumbering.version == STEPS
    assert client.policy().state == checkpoint.state.id


@COUNTING
def test_a_trainer_that_dies_again_before_it_names_its_next_checkpoint_goes_on_from_that(
    client, tmp_path, renumbers, caplog
):
    second = Trainer(client, tmp_path, renumbers)
    second.go_on_from(dead_trainer(client, tmp_path, renumbers, "named")[-1])
    second.step()
    checkpoint = second.save("acknowledged")
    trained = trained_to_the_end(client, tmp_path, renumbers, checkpoint)
    assert sorted(trained) == list(range(1, GROUPS + 1))
    assert LOST not in caplog.text


@COUNTING
def test_the_first_checkpoint_of_a_run_comes_after_the_state_that_the_run_found(client, tmp_path, renumbers, caplog):
    client.set_policy_version(0, state="of a run before")
    trainer = Trainer(client, tmp_path, renumbers)
    trainer.go_on_from(None)
    trainer.step()
    checkpoint = trainer.save("acknowledged")
    assert checkpoint.state.before == "of a run before"
    Trainer(client, tmp_path, renumbers).go_on_from(checkpoint)
    assert LOST not in caplog.text


def test_a_resume_names_a_state_that_has_no_name_for_a_trainer_that_makes_versions_again(client, tmp_path):
    checkpoint = dead_trainer(client, tmp_path, True, "acknowledged")[-1]
    Trainer(client, tmp_path, True).go_on_from(checkpoint)
    assert client.policy().state == checkpoint.state.id


@COUNTING
def test_a_group_that_was_acknowledged_after_its_state_was_named_is_trained_on_once(client, tmp_path, renumbers):
    trainer = Trainer(client, tmp_path, renumbers)
    trainer.go_on_from(None)
    trainer.step()
    checkpoint = trainer.save("written")
    trainer.protocol.name(checkpoint.state, "")
    trainer.leases.acknowledge(checkpoint.groups)  # as if its shard had been away
    trainer.leases.settled()
    trainer.step()
    trainer.save()
    trained = trained_to_the_end(client, tmp_path, renumbers, checkpoint)
    assert sorted(trained) == list(range(1, GROUPS + 1))
    assert client.server_info().tables["rollouts"].restored == 2


def test_an_end_requeues_the_rest_of_a_batch_without_the_groups_that_a_checkpoint_contains(client, tmp_path):
    leases = GroupLeases(client, "rollouts", 600.0, tmp_path, rank=0)
    used, *left = leases.hold(client.sample("rollouts", 3, lease=600.0, timeout=10.0))
    leases.acknowledge(leases.trained(left))
    leases.settled()
    leases.requeue()
    assert keys_in(client, "rollouts") == sorted({*range(1, GROUPS + 1)} - {used.info.key})


def test_a_version_without_a_checkpoint_forgets_no_group_that_no_server_has_confirmed(client, tmp_path):
    leases = GroupLeases(client, "rollouts", 600.0, tmp_path, rank=0)
    elsewhere = {("shard-9", 1 << 40): [101]}
    leases.unconfirmed = TrainedGroups(whole=dict(elsewhere), part=[102])
    leases.acknowledge(TrainedGroups())
    assert leases.unconfirmed.whole == elsewhere
    assert leases.unconfirmed.part == [102]


@COUNTING
def test_a_server_without_its_data_is_gone_on_with(client, tmp_path, renumbers, caplog):
    checkpoint = dead_trainer(client, tmp_path, renumbers, "named")[-1]
    with filled(retain_consumed=2) as emptied:
        Trainer(emptied, tmp_path, renumbers).go_on_from(checkpoint)
    assert LOST not in caplog.text


@COUNTING
def test_a_state_that_the_server_does_not_know_any_more_is_gone_on_from_with_a_warning(
    client, tmp_path, renumbers, caplog
):
    first = dead_trainer(client, tmp_path, renumbers, "named")[0]
    with caplog.at_level(logging.WARNING):
        Trainer(client, tmp_path, renumbers).go_on_from(first)
    assert "groups that were consumed after the checkpoint do not come back: there is no state" in caplog.text
