"""What every trainer promises that publishes weights and goes on after a kill: ours, TRL's AsyncGRPOTrainer, and Miles.

Each runs in a process of its own. Its groups are numbered, so that a number that is lost, or trained on twice, shows.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_client import ReplayClient
from replay_client.testing import until
from replay_server import ReplayServer
from replay_server.config import DEFAULT_TABLES
from tests.contracts.trainers import STEPS, TRAINERS, Miles, Ours, Trainer, TRLAsync
from tests.kit.models import NEAR, assert_same_weights
from tests.kit.servers import Servers
from tests.trainer.killed_trainer import PHASES

pytestmark = pytest.mark.timeout(900)  # a guard against hanging; processes start where others may be busy
KINDS: dict[Any, Any] = {
    kind: pytest.param(kind, id=kind.name, marks=pytest.mark.skipif(bool(why), reason=why))
    for kind, why in TRAINERS.items()
}
LEASE = 8.0
EVERY_TWO = {"save_every": 2}


def kill(kind: type[Trainer], phase: str, step: int, *, long: bool = True, **options: Any) -> Any:
    """A kill in a phase of a step. `long`: it takes more than 20 s, or others show nearly the same."""
    marks = [*KINDS[kind].marks, *([pytest.mark.long] if long else [])]
    said = " ".join(f"{name}={value}" for name, value in options.items())
    return pytest.param(kind, phase, step, options, id=f"{kind.name}: {phase} {said}".strip(), marks=marks)


BETWEEN = [
    # Of two steps the first is published, and the second has a checkpoint, too.
    kill(Ours, "announced", 3, long=False, save_every=2),
    kill(TRLAsync, "announced", 3, save_every=2),
    kill(Miles, "drawn", 4, long=False, save_every=2),
]
"""Between a publication and its checkpoint."""
KILLS = [
    *BETWEEN,
    *(kill(Ours, phase, 2) for phase in PHASES),
    # Resumed long after the leases have ended.
    *(kill(Ours, phase, 2, lease=2.0) for phase in ("updated", "written", "acknowledged")),
    kill(Ours, "updated", 4, save_every=3),
    kill(Ours, "written", 2, publish_every=2),
    kill(Ours, "updated", 4, publish_every=2, publish_in_background=False),
    kill(Ours, "announced", 2, weights_dir="memory"),
    *(kill(TRLAsync, phase, 4) for phase in ("forward", "updated", "published", "saving", "saved", "acknowledged")),
    kill(Miles, "drawn", 2, save_every=6),
    kill(Miles, "saved", 4, save_every=2),
]


@pytest.fixture(params=KINDS.values())
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Trainer:
    made: Trainer = request.param(tmp_path / "run")
    return made


@pytest.fixture
def client() -> Iterator[ReplayClient]:
    with ReplayServer(DEFAULT_TABLES, port=0) as server, ReplayClient(server.address) as connected:
        yield connected


class Uninterrupted:
    """Runs without a kill or a stop, one of each trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[type[Trainer], dict[str, torch.Tensor]] = {}

    def __call__(self, kind: type[Trainer]) -> dict[str, torch.Tensor]:
        if kind not in self.results:
            trainer = kind(self.folder / kind.name)
            with ReplayServer(DEFAULT_TABLES, port=0) as server, ReplayClient(server.address) as client:
                trainer.insert(client, 0, trainer.groups_for(STEPS))
                assert trainer.end(server.address, **EVERY_TWO) == 0
            self.results[kind] = trainer.result()
        return self.results[kind]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    return Uninterrupted(tmp_path_factory.mktemp("whole"))


@contextmanager
def running(trainer: Trainer, address: str, **options: Any) -> Iterator[BaseProcess]:
    """The trainer in a process, which does not outlive the block."""
    process = trainer.start(address, **options)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def feed(trainer: Trainer, client: ReplayClient, steps: range) -> None:
    """Inserts group after group, so that the trainer makes these steps, and waits until it has published each."""
    inserted = trainer.groups_for(steps.start - 1) if steps.start > 1 else 0
    for step in steps:
        needed = trainer.groups_for(step)
        trainer.insert(client, inserted, needed)
        inserted = needed
        until_version(trainer, client, step)


def until_version(trainer: Trainer, client: ReplayClient, step: int) -> None:
    version = trainer.first + step
    until(lambda: client.policy().version == version, f"{trainer.name} does not announce {version}", timeout=300.0)


def until_gone(client: ReplayClient) -> None:
    """Until the server has noticed that the trainer is dead. What it had drawn ahead is then in its old place."""
    until(lambda: client.server_info().sample_streams == 0, timeout=60.0)


def check_used_up(trainer: Trainer, client: ReplayClient, steps: int, inserted: int) -> None:
    """The groups of so many steps are gone, and the others are there for whoever comes next."""
    tables = client.server_info().tables
    queue, pool = tables["rollouts"], tables["replay"]
    used = trainer.used_by(steps)
    assert queue.consumed == used
    assert queue.size == inserted - used
    assert queue.reserved == 0
    assert pool.size >= used
    assert pool.inserts == pool.size, "a group is in the pool once"


def test_each_step_publishes_the_next_version_and_whoever_follows_the_policy_is_told(trainer, client):
    watch = client.watch_policy()
    with running(trainer, client.address, **EVERY_TWO) as process:
        inserted = 0
        for step in range(1, STEPS):
            inserted, before = trainer.groups_for(step), inserted
            trainer.insert(client, before, inserted)
            policy = next(policy for policy in watch if policy.version > trainer.first + step - 1)
            assert policy.version == trainer.first + step
            assert trainer.steps() >= step
            if trainer.has_weights:
                assert Path(policy.weights).name == f"step-{policy.version}"
                assert (Path(policy.weights) / "model.safetensors").exists()
        trainer.insert(client, inserted, trainer.groups_for(STEPS))
        process.join(300)
        assert process.exitcode == 0
    assert client.policy().version == trainer.first + STEPS - (0 if trainer.tells_last else 1)


@pytest.mark.parametrize(("kind", "phase", "step", "options"), KILLS)
def test_a_killed_trainer_loses_no_group_and_trains_on_none_twice(
    client, tmp_path, uninterrupted, kind, phase, step, options
):
    trainer: Trainer = kind(tmp_path / "run")
    if "weights_dir" in options:
        options = options | {"weights_dir": tmp_path / "memory"}
    inserted = trainer.groups_for(STEPS)
    trainer.insert(client, 0, inserted)
    assert trainer.end(client.address, phase, step, **options) == -signal.SIGKILL
    if "lease" in options:
        until(lambda: client.server_info().tables["rollouts"].reserved == 0, timeout=60.0)
        options = {}
    until_gone(client)
    before = client.policy().version
    lowest = trainer.first + trainer.saved() if trainer.renumbers else before
    assert trainer.end(client.address, **options) == 0
    assert trainer.trained() == list(range(STEPS * trainer.per_step))
    check_used_up(trainer, client, STEPS, inserted)
    assert_same_weights(trainer.result(), uninterrupted(kind), **NEAR)
    assert trainer.announced == sorted(trainer.announced)
    assert min(trainer.announced) >= lowest
    policy = client.policy()
    assert policy.version > before
    if trainer.has_weights:
        assert Path(policy.weights).name == f"step-{policy.version}"


def test_groups_that_no_checkpoint_contains_go_back_at_a_clean_stop(trainer, client):
    with running(trainer, client.address, **EVERY_TWO) as process:
        feed(trainer, client, range(1, 4))
        os.kill(process.pid, signal.SIGINT)
        process.join(120)
        assert process.exitcode == 1
    assert trainer.saved() == 2
    check_used_up(trainer, client, 2, trainer.groups_for(3))


@pytest.mark.long
def test_groups_that_a_trainer_holds_stay_its_own_for_longer_than_a_lease(trainer, client):
    with running(trainer, client.address, save_every=STEPS, lease=LEASE) as process:
        feed(trainer, client, range(1, 4))
        held = client.server_info().tables["rollouts"].reserved
        assert held >= trainer.used_by(3)
        time.sleep(2 * LEASE)
        assert client.server_info().tables["rollouts"].reserved == held
        trainer.insert(client, trainer.groups_for(3), trainer.groups_for(STEPS))
        process.join(300)
        assert process.exitcode == 0
    check_used_up(trainer, client, STEPS, trainer.groups_for(STEPS))


def test_a_stop_at_a_step_leaves_a_checkpoint_from_which_the_next_run_makes_the_same_bits(
    trainer, client, uninterrupted
):
    trainer.insert(client, 0, trainer.groups_for(STEPS))
    assert trainer.end(client.address, "stop", 2, **EVERY_TWO) == 0
    assert trainer.saved() == 2
    assert trainer.trained() == list(range(2 * trainer.per_step))
    assert trainer.end(client.address, **EVERY_TWO) == 0
    assert trainer.trained() == list(range(STEPS * trainer.per_step))
    assert_same_weights(trainer.result(), uninterrupted(type(trainer)))


@pytest.mark.long
@pytest.mark.parametrize("hold", [0, 3], ids=["which waits for groups", "in the middle of a step"])
def test_a_server_that_is_away_is_waited_for(trainer, tmp_path, hold):
    # The server is away for longer than each limit of the calls.
    servers = Servers(DEFAULT_TABLES, count=1, data_dir=tmp_path / "data")
    with ReplayClient(servers.addresses[0], timeout=60.0) as client:
        options = {"impatient": True, "hold": hold, **EVERY_TWO}
        with running(trainer, servers.addresses[0], **options) as process:
            if hold:
                trainer.insert(client, 0, trainer.groups_for(STEPS))
                until((trainer.folder / "held").exists, timeout=300.0)
            else:
                feed(trainer, client, range(1, 3))
            servers.kill()
            (trainer.folder / "go").touch()
            until(lambda: trainer.says_that_the_server_is_away, timeout=120.0)
            time.sleep(3.0)  # a wait that ends within a second of that line is not worth another one
            servers.restart()
            if not hold:
                trainer.insert(client, trainer.groups_for(2), trainer.groups_for(STEPS))
            process.join(300)
            assert process.exitcode == 0
        assert trainer.trained() == list(range(STEPS * trainer.per_step))
        check_used_up(trainer, client, STEPS, trainer.groups_for(STEPS))
    servers.close()
