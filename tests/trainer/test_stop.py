"""A trainer that is asked to stop ends after its step, or gives its wait up, with a training checkpoint.

Its resume goes on with the next step, trains on every group, and on none twice.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from replay_client import ReplayClient
from replay_client.scoring import group_priority
from replay_client.testing import make_group, until
from replay_server import ReplayServer
from replay_server.config import DEFAULT_TABLES
from replay_trainer import GRPOTrainer, leases, publication, weights
from replay_trainer.weights import published, saved
from tests.kit.models import assert_same_weights
from tests.kit.processes import free_port, run_ranks, start
from tests.kit.trainers import lines_of, make_trainer

pytestmark = pytest.mark.timeout(400)  # what it guards against is waiting without an end
STEPS, GROUPS = 4, 2


@pytest.fixture
def client() -> Iterator[ReplayClient]:
    with ReplayServer(DEFAULT_TABLES, port=0) as server, ReplayClient(server.address) as connected:
        yield connected


def insert(client: ReplayClient, count: int, *, flat: bool = False) -> list[int]:
    keys = []
    for index in range(count):
        rewards = [1.0, 1.0] if flat else [1.0, 0.0]
        group = make_group(rewards=rewards, completions=[[3 + index % 12, 6], [7]], logprobs=-2.7)
        keys.append(client.insert(group, {"rollouts": group_priority(group.rewards, group.advantages)}))
    return keys


def trainer_of(client: Any, folder: Path, **options: Any) -> GRPOTrainer:
    few = {"max_steps": STEPS, "groups_per_step": GROUPS, "zero_variance": "none", "learning_rate": 1e-2}
    return make_trainer(client, folder / "run", **(few | options))


def steps(folder: Path) -> list[int]:
    """The steps of which the run has written the metrics."""
    if not (folder / "run/metrics.jsonl").exists():
        return []
    return [line["step"] for line in lines_of(folder / "run")]


def trained(folder: Path) -> list[int]:
    """The keys of the groups that all steps trained on."""
    lines = lines_of(folder / "run", "steps.jsonl")
    return sorted(group["key"] for line in lines for group in line["trained"])


def check_resume(client: ReplayClient, folder: Path, keys: list[int], **options: Any) -> GRPOTrainer:
    """Resumes, and checks that each step is there once, and that each group was trained on once and has gone."""
    trainer = trainer_of(client, folder, resume=True, sample_timeout=60.0, **options)
    trainer.train()
    assert not trainer.stopped
    assert steps(folder) == list(range(1, STEPS + 1))
    assert trained(folder) == sorted(keys)
    queue = client.server_info().tables["rollouts"]
    assert queue.size == 0
    assert queue.reserved == 0
    assert queue.consumed == len(keys)
    return trainer


def is_waited_for(client: ReplayClient) -> bool:
    """Whether a trainer waits for groups."""
    return bool(client.server_info().tables["rollouts"].sampling.count)


@contextmanager
def stopped_by_a_signal(trainer: GRPOTrainer, when: Callable[[], Any]) -> Iterator[None]:
    """A signal stops the trainer, which runs in this block and in the main thread, when `when()` is true."""

    def send() -> None:
        until(when)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: trainer.stop())
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def stopped_by_a_thread(trainer: GRPOTrainer, when: Callable[[], Any]) -> Iterator[None]:
    def stop() -> None:
        until(when)
        trainer.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        thread.join()


SPARSE = [
    pytest.param({"save_every": 10}, id="weights of each step"),
    pytest.param({"publish_every": 3}, id="weights of each third step"),
    pytest.param({"save_every": 10, "weights_dir": "memory"}, id="weights apart"),
    pytest.param({"publish_every": 3, "weights_dir": "memory"}, id="weights apart of each third step"),
    pytest.param({"save_every": 10, "publish_in_background": False}, id="nothing in the background"),
]


def placed(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    return options | ({"weights_dir": folder / "memory"} if "weights_dir" in options else {})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("whole")
    with ReplayServer(DEFAULT_TABLES, port=0) as server, ReplayClient(server.address) as client:
        insert(client, STEPS * GROUPS)
        trainer = trainer_of(client, folder)
        trainer.train()
    return trainer.model


@pytest.mark.parametrize("options", SPARSE)
def test_a_stop_during_a_step_publishes_it_with_a_training_checkpoint(client, tmp_path, options, uninterrupted):
    options = placed(options, tmp_path)
    keys = insert(client, STEPS * GROUPS)

    def stop(metrics: dict[str, float]) -> None:
        if metrics["step"] == 2:
            trainer.stop()

    trainer = trainer_of(client, tmp_path, on_step=stop, **options)
    assert trainer.train() == 2
    assert trainer.stopped
    assert trainer.last_step == 2
    assert steps(tmp_path) == [1, 2]
    assert saved(tmp_path / "run")[-1].name == "step-2"
    assert client.policy().version == 2
    assert Path(client.policy().weights) == published(options.get("weights_dir", tmp_path / "run"))[-1]
    assert client.server_info().tables["rollouts"].size == (STEPS - 2) * GROUPS
    resumed = check_resume(client, tmp_path, keys, **options)
    assert resumed.last_step == STEPS
    assert_same_weights(resumed.model, uninterrupted)


@pytest.mark.parametrize("stopped_by", [stopped_by_a_signal, stopped_by_a_thread])
@pytest.mark.parametrize("options", SPARSE[:4])
def test_a_stop_ends_a_wait_for_groups_and_saves_the_step_before(client, tmp_path, options, stopped_by):
    options = placed(options, tmp_path)
    keys = insert(client, 2 * GROUPS)
    trainer = trainer_of(client, tmp_path, **options)
    with stopped_by(trainer, lambda: steps(tmp_path) == [1, 2] and is_waited_for(client)):
        assert trainer.train() == 2
    assert trainer.stopped
    assert saved(tmp_path / "run")[-1].name == "step-2"
    assert client.policy().version == 2
    assert list((tmp_path / "run").glob("*.tmp")) == []
    keys += insert(client, (STEPS - 2) * GROUPS)
    check_resume(client, tmp_path, keys, **options)


def test_what_was_drawn_for_a_step_that_is_given_up_goes_back(client, tmp_path):
    # One of two groups teaches something: the step keeps it, and waits for another batch.
    options = {"zero_variance": "dynamic", "save_every": 10}
    keys = insert(client, 2 * GROUPS + 1)
    flat = insert(client, 1, flat=True)
    trainer = trainer_of(client, tmp_path, **options)
    with stopped_by_a_signal(trainer, lambda: steps(tmp_path) == [1, 2] and is_waited_for(client)):
        trainer.train()
    assert saved(tmp_path / "run")[-1].name == "step-2"
    assert trained(tmp_path) == keys[:4]
    until(lambda: client.server_info().tables["rollouts"].size == 2)
    assert {item.key for item in client.list_items("rollouts")} == {keys[4], *flat}


def test_a_stop_ends_a_wait_for_the_pool_and_its_fresh_groups_go_back(tmp_path):
    options = {"zero_variance": "replace", "replay_on_empty": "wait", "replay_timeout": None, "save_every": 10}
    tables = [*DEFAULT_TABLES, DEFAULT_TABLES[1].model_copy(update={"name": "empty"})]

    def waits_for_the_pool() -> bool:
        return steps(tmp_path) == [1] and client.server_info().tables["empty"].sampling.count > 0

    with ReplayServer(tables, port=0) as server, ReplayClient(server.address) as client:
        keys = insert(client, GROUPS)
        flat = insert(client, GROUPS, flat=True)
        trainer = trainer_of(client, tmp_path, replay_table="empty", **options)
        with stopped_by_a_signal(trainer, waits_for_the_pool):
            assert trainer.train() == 1
        assert saved(tmp_path / "run")[-1].name == "step-1"
        assert trained(tmp_path) == keys
        until(lambda: client.server_info().tables["rollouts"].size == GROUPS)
        assert {item.key for item in client.list_items("rollouts")} == set(flat)


@pytest.mark.parametrize(
    "options",
    [
        {"save_every": 10},
        pytest.param({"save_every": 10, "weights_dir": "memory"}, marks=pytest.mark.long),
        pytest.param({}, marks=pytest.mark.long),
    ],
)
def test_a_stop_ends_a_wait_while_the_server_is_away(tmp_path, monkeypatch, options):
    monkeypatch.setattr(publication, "LAST_TRY", 0.5)
    monkeypatch.setattr(leases, "_REQUEUE_SECONDS", 0.5)
    options = placed(options, tmp_path)
    port, gone = free_port(), threading.Event()

    def served() -> ReplayServer:
        return ReplayServer(DEFAULT_TABLES, port=port, data_dir=tmp_path / "data")

    def end_server() -> None:
        until(lambda: steps(tmp_path) == [1, 2] and is_waited_for(client))
        server.stop(grace=0.0)
        gone.set()

    server = served()
    server.start()
    ender = threading.Thread(target=end_server)
    with ReplayClient(server.address, timeout=None) as client, ReplayClient(server.address, timeout=None) as own:
        keys = insert(client, 2 * GROUPS)
        trainer = trainer_of(own, tmp_path, **options)
        ender.start()
        with stopped_by_a_signal(trainer, gone.is_set):
            assert trainer.train() == 2
        ender.join()
        assert saved(tmp_path / "run")[-1].name == "step-2"
        with served():
            keys += insert(client, (STEPS - 2) * GROUPS)
            check_resume(client, tmp_path, keys, **options)


def test_a_stop_before_the_first_step_trains_on_nothing(client, tmp_path):
    keys = insert(client, STEPS * GROUPS)
    trainer = trainer_of(client, tmp_path, save_every=10)
    trainer.stop()
    assert trainer.train() == 0
    assert trainer.stopped
    assert trainer.last_step == 0
    assert [folder.name for folder in published(tmp_path / "run")] == ["step-0"]
    check_resume(client, tmp_path, keys)


def test_a_stop_in_the_last_step_leaves_nothing_to_do(client, tmp_path):
    insert(client, STEPS * GROUPS)

    def stop(metrics: dict[str, float]) -> None:
        if metrics["step"] == STEPS:
            trainer.stop()

    trainer = trainer_of(client, tmp_path, on_step=stop)
    assert trainer.train() == STEPS
    assert not trainer.stopped


# ------------------------------------------------------------------------------------------------------------- kills


def stop_and_die(address: str, folder: Path, phase: str, **options: Any) -> None:
    """Trains until it waits for groups, stops, and kills its process while it writes the training checkpoint."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with ReplayClient(address) as client:
        trainer = trainer_of(client, folder, **options)

        def stop() -> None:
            until(lambda: steps(folder) == [1, 2] and is_waited_for(client))
            if phase == "the state is half written":
                weights.torch.save = lambda _, path: Path(path).write_bytes(b"half") and die()  # type: ignore[assignment]
            elif phase == "no manifest names it":
                weights.os.replace = die
            elif phase == "its groups are not acknowledged":
                # The weights of the same step, without a training checkpoint, may be announced only now: of no groups.
                publication.GroupLeases.acknowledge = lambda _, groups: groups.whole and die()  # type: ignore[method-assign]
            trainer.stop()

        threading.Thread(target=stop).start()
        trainer.train()


@pytest.mark.parametrize(
    ("phase", "resumed_from"),
    [
        pytest.param("the state is half written", "step-0", marks=pytest.mark.long),
        pytest.param("no manifest names it", "step-0", marks=pytest.mark.long),
        ("its groups are not acknowledged", "step-2"),
    ],
)
def test_a_trainer_that_is_killed_while_it_stops_loses_no_group_and_repeats_none(client, tmp_path, phase, resumed_from):
    keys = insert(client, 2 * GROUPS)
    process = start(stop_and_die, client.address, tmp_path, phase, save_every=10)
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    assert saved(tmp_path / "run")[-1].name == resumed_from
    assert published(tmp_path / "run")[-1].name == "step-2"  # generators may still load it
    until(lambda: client.server_info().sample_streams == 0)
    keys += insert(client, (STEPS - 2) * GROUPS)
    check_resume(client, tmp_path, keys, save_every=10)
    assert list((tmp_path / "run").glob("*.tmp")) == []


# ------------------------------------------------------------------------------------------------------------- ranks


def stop_as_rank(address: str, folder: Path, where: str, fsdp: bool) -> None:
    """One of two ranks, of which one is asked to stop."""
    with ReplayClient(address) as client:
        trainer = trainer_of(client, folder, save_every=10, fsdp=fsdp)
        asked = 1 if where == "the second, in a step" else 0
        if trainer.ranks.index == asked:
            if where == "the second, in a step":
                backward = trainer.passes.backward
                passes = itertools.count(1)  # one of each step

                def stopping(*arguments: Any) -> Any:
                    if next(passes) == 2:
                        trainer.stop()
                    return backward(*arguments)

                trainer.passes.backward = stopping  # type: ignore[method-assign]
            else:

                def stop() -> None:
                    until(lambda: steps(folder) == [1, 2] and is_waited_for(client))
                    trainer.stop()

                threading.Thread(target=stop).start()
        assert trainer.train() == 2
        assert trainer.stopped
        assert trainer.last_step == 2


def resume_as_rank(address: str, folder: Path, fsdp: bool) -> None:
    with ReplayClient(address) as client:
        trainer = trainer_of(client, folder, resume=True, fsdp=fsdp)
        assert trainer.train() == STEPS - 2


@pytest.mark.parametrize(
    ("where", "drawn", "fsdp"),
    [
        ("the second, in a step", STEPS * GROUPS, False),
        pytest.param("the first, while both wait", 2 * GROUPS, True, marks=pytest.mark.long),
        # One of the two has its group of step 3.
        ("the first, while one of them waits", 2 * GROUPS + 1, True),
    ],
)
def test_two_ranks_of_which_one_is_asked_end_after_the_same_step(client, tmp_path, where, drawn, fsdp):
    keys = insert(client, drawn)
    assert run_ranks(2, stop_as_rank, client.address, tmp_path, where, fsdp) == ["", ""]
    assert saved(tmp_path / "run")[-1].name == "step-2"
    until(lambda: client.server_info().tables["rollouts"].size == drawn - 2 * GROUPS)
    keys += insert(client, STEPS * GROUPS - drawn)
    assert run_ranks(2, resume_as_rank, client.address, tmp_path, fsdp) == ["", ""]
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert trained(tmp_path) == sorted(keys)
