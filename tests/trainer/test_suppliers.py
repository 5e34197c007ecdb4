"""How long a trainer waits for groups: without end, unless all who bring them have left on purpose."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replay_client import ReplayClient
from replay_client.errors import DeadlineExceededError
from replay_client.testing import make_group, until
from replay_generator import ScorerConfig
from replay_server import CheckpointsConfig, ReplayServer, TableConfig
from replay_server.storage import checkpointer
from replay_trainer import grpo, publication, suppliers
from replay_trainer.background import ServerWaits
from tests.kit.trainers import lines_of, make_trainer

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute between lines, and between looks, is a moment; ten minutes are a second."""
    monkeypatch.setattr(suppliers, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(suppliers, "DESERTED_SECONDS", 1.0)
    monkeypatch.setattr(grpo, "ServerWaits", partial(ServerWaits, seconds=0.1, look_seconds=0.05))


@pytest.fixture
def address() -> Iterator[str]:
    tables = [
        TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 64}, forward_to="replay"),
        TableConfig(name="replay", sampler="prioritized", remover="min_heap", max_size=64),
        TableConfig(name="unscored", sampler="fifo", max_times_sampled=1),
    ]
    with ReplayServer(tables, 0) as server:
        yield server.address


def come(address: str, part: str | None, name: str, **settings: Any) -> ReplayClient:
    """A client that brings one group, and says what it is."""
    client = ReplayClient(address, name=name)
    if part is not None:
        client.describe({"part": json.dumps(part)} | {key: json.dumps(value) for key, value in settings.items()})
    insert(client, "rollouts")
    return client


def insert(client: ReplayClient, table: str) -> None:
    group = make_group(rewards=[1.0, 0.0], completions=[[5, 6], [7]], logprobs=-2.7)
    client.insert(group, {table: 1.0})


def train(address: str, folder: Path, steps: int, **options: Any) -> list[int]:
    """Trains, and returns the steps that were made."""
    few = {"max_steps": steps, "groups_per_step": 1, "prefetch": 0, "zero_variance": "none"}
    with ReplayClient(address, timeout=None, name="the-trainer") as client:
        make_trainer(client, folder, **(few | options)).train()
    return [line["step"] for line in lines_of(folder)]


@pytest.mark.usefixtures("soon")
def test_a_trainer_that_nobody_has_come_to_yet_waits_and_goes_on_when_a_generator_comes(address, tmp_path, caplog):
    def later() -> None:
        until(lambda: sum("waiting for groups" in line for line in caplog.messages) >= 20, timeout=100)
        come(address, "generator", "late").close()

    thread = threading.Thread(target=later)
    thread.start()
    assert train(address, tmp_path / "run", 1) == [1]
    thread.join()
    assert any("the trainer goes on after" in line for line in caplog.messages)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("part", ["generator", "scorer", "stage", None])
def test_a_trainer_ends_with_one_sentence_when_all_who_bring_groups_have_left(address, tmp_path, caplog, part):
    with come(address, part, "gen-1") as client:
        client.leave()
    says = (
        r"no fresh groups for \d+ s: every generator and scorer that was connected has left \(gen-1\), and nothing is "
        r"to come\. Start a generator, and go on with --resume"
    )
    with pytest.raises(DeadlineExceededError, match=says):
        train(address, tmp_path / "run", 2)
    assert any("unless a generator comes, the trainer ends in" in line for line in caplog.messages)
    assert not any("goes on after" in line for line in caplog.messages)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("case", ["killed", "another is there", "unscored groups are there"])
def test_a_trainer_waits_on_while_anything_may_come(address, tmp_path, caplog, case):
    client = come(address, "generator", "gen-1")
    others: list[ReplayClient] = []
    if case == "another is there":
        others.append(come(address, "generator", "gen-2"))
    if case == "unscored groups are there":
        others.append(come(address, "scorer", "scorer-1"))
        others[0].describe(ScorerConfig("unscored").described())
        insert(client, "unscored")
        others[0].leave()
    if case != "killed":
        client.leave()
    steps = 1 + len(others)

    def later() -> None:
        until(lambda: sum("waiting for groups" in line for line in caplog.messages) >= 20, timeout=100)
        come(address, "generator", "gen-3").close()

    thread = threading.Thread(target=later)
    thread.start()
    assert train(address, tmp_path / "run", steps + 1) == [*range(1, steps + 2)]
    thread.join()
    for each in (client, *others):
        each.close()


@pytest.mark.usefixtures("soon")
def test_a_generator_that_comes_within_the_time_begins_it_anew(address, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(suppliers, "DESERTED_SECONDS", 1e6)
    with come(address, "generator", "gen-1") as client:
        client.leave()

    def later() -> None:
        until(lambda: any("the trainer ends in" in line for line in caplog.messages), timeout=100)
        come(address, "generator", "gen-2").close()

    thread = threading.Thread(target=later)
    thread.start()
    assert train(address, tmp_path / "run", 2) == [1, 2]
    thread.join()


def test_ten_minutes_pass_from_the_last_departure_to_the_end(address, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(suppliers, "time", SimpleNamespace(monotonic=lambda: now))
    with come(address, "generator", "gen-1") as client:
        client.leave()
    with ReplayClient(address, name="the-trainer") as trainer:
        waiting = suppliers.Suppliers(trainer)
        assert "the trainer ends in 600 s" in waiting.check()
        now += 599.0
        assert "the trainer ends in 1 s" in waiting.check()
        now += 1.0
        with pytest.raises(DeadlineExceededError, match="no fresh groups for 600 s"):
            waiting.check()


def test_a_limit_that_somebody_sets_names_itself_and_the_remedy(address, tmp_path):
    says = r"rollouts: .*; sample_timeout = 0\.5 s is over: raise it, or leave it out, and go on with --resume"
    with pytest.raises(DeadlineExceededError, match=says):
        train(address, tmp_path / "run", 1, sample_timeout=0.5)


def test_the_wait_for_the_pool_has_a_limit_of_its_own_that_names_itself(address, tmp_path):
    with ReplayClient(address) as client:
        group = make_group(rewards=[1.0, 1.0], completions=[[5, 6], [7]], logprobs=-2.7)
        client.insert(group, {"rollouts": 0.0})
    options = {"zero_variance": "replace", "replay_on_empty": "wait", "replay_timeout": 0.5}
    with pytest.raises(DeadlineExceededError, match=r"replay: .*; replay_timeout = 0\.5 s is over: raise it"):
        train(address, tmp_path / "run", 1, **options)


@pytest.mark.long
def test_a_checkpoint_of_the_server_that_is_late_is_one_warning_and_the_training_checkpoint_is_written(
    tmp_path, monkeypatch, caplog
):
    go_on = threading.Event()
    seal = checkpointer.seal

    def slowly(*arguments: Any) -> Any:
        go_on.wait(100)
        return seal(*arguments)

    monkeypatch.setattr(checkpointer, "seal", slowly)
    monkeypatch.setattr(publication, "CHECKPOINT_SECONDS", 0.5)
    checkpoints = CheckpointsConfig(dir=tmp_path / "checkpoints")
    with ReplayServer([TableConfig(name="rollouts"), TableConfig(name="replay")], 0, checkpoints=checkpoints) as server:
        come(server.address, "generator", "gen-1").close()
        made = train(server.address, tmp_path / "run", 1, checkpoint_server=True)
        go_on.set()
    assert made == [1]
    said = [line for line in caplog.messages if "names no checkpoint of the server" in line]
    assert len(said) == 2  # of version 0 and of the last one
    assert "the training checkpoint of step 1" in said[1]
    manifest = json.loads((tmp_path / "run/step-1/manifest.json").read_text())
    assert manifest["server_checkpoint"] == ""
    assert (tmp_path / "run/step-1/trainer.pt").exists()
