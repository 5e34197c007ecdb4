"""What doctor, page and `tables` say of a run: one situation a row, each played by processes of its own.

A severity is earned. Red, which is a failure of the doctor, means that somebody must act now.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from replay_client import ReplayClient
from replay_client.testing import until
from replay_dashboard import app, health, live
from replay_dashboard.app import Settings
from replay_server import AdmissionConfig, ReplayServer, TableConfig
from replay_server.rpc import info, service
from replay_server.tables.buffer import ReplayBuffer
from replay_server.telemetry import host
from tests.dashboard.conftest import serving
from tests.dashboard.test_answers import looks_of
from tests.kit.processes import free_port, run_replay

GENERATOR = """
import itertools, signal, sys, time
from replay_client import ReplayClient
from replay_client.errors import ServerClosedError
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
address, name, pause, groups = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
with ReplayClient(address, name=name, timeout=None) as client, client.writer() as writer:
    client.describe({"part": '"generator"'})
    try:
        for _ in range(groups):
            try:
                lease = client.acquire_permits(1)
            except ServerClosedError:  # it is started again
                time.sleep(0.1)
                continue
            time.sleep(pause)
            writer.insert(b"x", {"rollouts": 1.0}, policy_version=client.policy().version, permits=lease)
        while True:
            time.sleep(1.0)
    finally:
        client.leave()
"""
TRAINER = """
import json, signal, sys, time
from replay_client import ReplayClient
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
address, name, pause, steps, metrics = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]
with ReplayClient(address, name=name, timeout=None) as client:
    client.describe({"part": '"trainer"'})
    version = client.policy().version
    if metrics:
        kind, path = metrics
        with open(path, "w") as file:
            for step in range(20):
                reward = 0.4 + 0.02 * step * (kind == "learning")
                told = {"step": step, "train/entropy": 0.5 * 0.8**step, "fresh/reward_mean": reward}
                file.write(json.dumps(told) + "\\n")
    try:
        while not steps:
            time.sleep(1.0)
        with client.sampler("rollouts", 4, lease=60.0, prefetch=0) as batches:
            for step in range(steps):
                batch = next(batches)
                time.sleep(pause)
                client.acknowledge(batch)
                version = max(version + 1, client.policy().version)
                client.set_policy_version(version, f"step-{version}")
            while True:
                time.sleep(1.0)
    finally:
        client.leave()
"""
MANY = 1_000_000


class Stage:
    """A server, and the processes that play at it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        self._port = free_port()
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self.serve()

    def serve(self) -> None:
        tables = [
            TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 8}, forward_to="replay"),
            TableConfig(name="replay", sampler="uniform", max_size=64),
        ]
        admission = AdmissionConfig(fresh_groups_per_step=4, max_staleness=1)
        # A paused process stays connected, however slow this machine is.
        self._monkeypatch.setattr(service, "KEEPALIVE_MS", 600_000)
        self.server = ReplayServer(tables, port=self._port, max_bytes="1MB", admission=admission)
        self.server.start()
        self.client = ReplayClient(self.server.address)

    def restart(self) -> None:
        self.client.close()
        self.server.stop()
        self.serve()

    def generator(self, name: str = "gen-a", pause: float = 0.0, groups: int = MANY) -> None:
        self._start(GENERATOR, name, pause, groups)

    def trainer(self, pause: float = 0.0, steps: int = MANY, metrics: str = "") -> None:
        self._start(TRAINER, "trainer-a", pause, steps, *([metrics, self.folder / "metrics.jsonl"] if metrics else []))

    def signal(self, number: int, *names: str) -> None:
        for name in names:
            self._started[name].send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            for name in names:
                self._started[name].wait()

    def works(self) -> None:
        """Some steps have been done, and all parts were connected for longer than what is long later."""
        until(lambda: self.client.server_info().policy.version >= 5 and self.client.server_info().policy.interval)
        works = self.client.server_info().uptime
        until(lambda: self.client.server_info().uptime > works + 4.0)

    def long(self, seconds: float = 3.0) -> None:
        """From now on a wait is long after so many seconds."""
        for name in ("LONG_WAIT", "FIRST_STEPS"):
            self._monkeypatch.setattr(info, name, seconds)

    def stop_clock(self, ahead: float) -> None:
        """Lets the clock of the server, by which it tells ages, stand still at so many seconds from now."""

        def stop(buffer: ReplayBuffer) -> None:
            now = buffer.clock() + ahead
            buffer.clock = lambda: now

        self.server.on_loop(stop)

    def close(self) -> None:
        for process in self._started.values():
            process.kill()
            process.wait()
        self.client.close()
        self.server.stop()

    def _start(self, program: str, name: str, *arguments: Any) -> None:
        command = [sys.executable, "-c", program, self.server.address, name, *map(str, arguments)]
        self._started[name] = subprocess.Popen(command)


@pytest.fixture
def stage(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "memory_available", lambda: 64 << 30)  # little memory here would be a finding, too
    monkeypatch.setattr(app, "LOOKING", 0.5)
    monkeypatch.setattr(live, "SECONDS_PER_LOOK", 0.2)
    stage = Stage(tmp_path, monkeypatch)
    stage.long(1000.0)  # until then a machine that is busy misses nobody
    yield stage
    stage.close()


def work(stage: Stage, **trainer: Any) -> None:
    stage.generator()
    stage.trainer(**trainer)
    stage.works()


def slow_trainer(stage):
    work(stage, pause=0.3)


def slow_generator(stage):
    stage.generator(pause=0.2)
    stage.trainer()
    stage.works()


def both_load(stage):
    # The clock stands still two seconds from now. So however late a busy machine looks, the server has been up for at
    # least three seconds, and was told of the parts at most two seconds ago. Two and a half are long.
    stage.long(2.5)
    time.sleep(1.0)
    stage.stop_clock(ahead=2.0)
    stage.generator(groups=0)
    stage.trainer(steps=0)
    until(lambda: len(stage.client.server_info().clients) == 2)


def both_end(stage):
    work(stage)
    stage.signal(signal.SIGTERM, "trainer-a", "gen-a")


def trainer_ends(stage):
    work(stage)
    stage.signal(signal.SIGTERM, "trainer-a")
    stage.long()


def generators_end(stage):
    work(stage)
    stage.signal(signal.SIGTERM, "gen-a")
    stage.long()


def trainer_is_killed(stage):
    work(stage)
    stage.signal(signal.SIGKILL, "trainer-a")
    stage.long()


def generators_are_killed(stage):
    work(stage)
    stage.signal(signal.SIGKILL, "gen-a")
    stage.long()


def both_are_killed(stage):
    work(stage)
    stage.signal(signal.SIGKILL, "gen-a", "trainer-a")
    stage.long()


def paused(stage):
    work(stage, pause=0.5)  # it is paused amid a step: a trainer whose request waits is not silent
    stage.signal(signal.SIGSTOP, "trainer-a")
    stage.long()


def paused_and_resumed(stage):
    paused(stage)
    until(lambda: stage.client.server_info().overdue)
    stage.signal(signal.SIGCONT, "trainer-a")


def killed_after_pauses(stage):
    def inserted():
        return stage.client.server_info().tables["rollouts"].inserted

    work(stage)
    while inserted().interval <= 4.0:  # until pauses are most, and so what is usual
        stage.signal(signal.SIGSTOP, "gen-a")
        until(lambda: inserted().age > 4.0)
        stage.signal(signal.SIGCONT, "gen-a")
        until(lambda: inserted().age < 1.0)
    stage.signal(signal.SIGKILL, "gen-a")
    stage.long()


def one_of_two_is_killed(stage):
    stage.generator("gen-b")
    work(stage)
    stage.signal(signal.SIGKILL, "gen-b")
    stage.long()


def restarted(stage):
    work(stage)
    stage.restart()
    stage.works()
    stage.long()


def no_trainer(stage):
    stage.long()
    stage.generator()


def no_generator(stage):
    stage.long()
    stage.trainer()


@dataclass
class Said:
    """What is to be said of a situation; texts are beginnings."""

    play: Callable[[Stage], None]
    level: str
    """Of the page. "failure" is red, and `doctor` ends with 1 exactly then, if the server knows of it."""
    headline: str
    detail: str = ""
    """A part of it."""
    remedy: str = ""
    doctor: tuple[str, ...] = ()
    """Level and check of what the doctor finds; beside a failure others may be there that follow from it."""
    tables: str = ""
    """A part of what `tables` prints."""


AGAIN = "see why it ended or hangs, and start it again"
SITUATIONS = {
    "healthy, and the trainer sets the pace": Said(
        slow_trainer, "ok", "Healthy", "Generators wait for permits: they are as far ahead of the trainer as they may"
    ),
    "healthy, and the generator sets the pace": Said(
        slow_generator, "ok", "Healthy", "The trainer waits for rollouts ", tables="generator gen-a: connected"
    ),
    "both load their models": Said(
        both_load, "idle", "Idle", "Nothing has been inserted or sampled", tables="generator gen-a: "
    ),
    "both have ended": Said(
        both_end, "idle", "The run has ended", "trainer trainer-a ended ", tables="gen-a: ended"
    ),
    "the trainer has ended, and generators wait": Said(
        trainer_ends, "blocked", "The trainer has ended", "1 permit request waits", "stop the generators too",
        ("warning clients", "warning permits"), "trainer trainer-a: ended",
    ),
    "generators have ended, and the trainer waits": Said(
        generators_end, "blocked", "The generator has ended", "generator gen-a ended ", "stop the trainer too",
        ("warning clients", "warning rollouts"), "generator gen-a: ended",
    ),
    "the trainer is killed": Said(
        trainer_is_killed, "failure", "The trainer is gone", "no new policy version since", AGAIN,
        ("failure trainer",), "trainer overdue: no new policy version since",
    ),
    "generators are killed": Said(
        generators_are_killed, "failure", "The generators are gone", "last seen: gen-a (", AGAIN,
        ("failure generator",), "generator overdue: ",
    ),
    "both are killed": Said(
        both_are_killed, "failure", "Trainer and generators are gone", "", AGAIN,
        ("failure generator", "failure trainer"), "generator overdue: ",
    ),
    "the trainer is paused": Said(
        paused, "failure", "The trainer is silent", "no new policy version since", AGAIN,
        ("failure trainer",), "trainer overdue: no new policy version since",
    ),
    "the trainer goes on after a pause": Said(
        paused_and_resumed, "ok", "Healthy", tables="trainer trainer-a: connected"
    ),
    "generators are killed after earlier pauses": Said(
        killed_after_pauses, "failure", "The generators are gone", "the last generator closed its connection", AGAIN,
        ("failure generator",), "last seen: gen-a (",
    ),
    "one generator of two is killed": Said(
        one_of_two_is_killed, "warning", "Running, with 1 thing to look at", "",
        "clients: generator gen-b is not connected",
        ("warning clients",), "generator gen-b: not connected",
    ),
    "the server has forgotten all": Said(restarted, "ok", "Healthy", tables="trainer trainer-a: connected"),
    "no trainer has come": Said(
        no_trainer, "blocked", "No trainer has connected yet", "1 permit request waits", "start a trainer",
        ("warning permits", "warning replay"), "1 permit request waits",
    ),
    "no generator has come": Said(
        no_generator, "blocked", "No generator has connected yet", "1 sample request waits",
        "start a generator",
        ("warning rollouts",), "none was served for",
    ),
    "the policy collapses": Said(
        lambda stage: work(stage, metrics="collapse"), "failure", "The policy is collapsing", "train/entropy fell",
        "see what the newest groups say", tables="trainer trainer-a: connected",
    ),
    "the policy learns": Said(
        lambda stage: work(stage, metrics="learning"), "ok", "Healthy", tables="trainer trainer-a: connected"
    ),
}  # fmt: skip


def found_by_doctor(stage: Stage) -> tuple[int, dict[str, dict[str, str]]]:
    """The status, and what is not well; where something fails, only that. A busy machine answers slowly: no matter."""
    done = run_replay("doctor", "--json", address=stage.server.address)
    found = [each for each in json.loads(done.stdout)["findings"] if each["check"] != "connection"]
    bad = [each for each in found if each["level"] == ("failure" if done.returncode else "warning")]
    return done.returncode, {f"{each['level']} {each['check']}": each for each in bad}


SHORT = (
    "healthy, and the trainer sets the pace",
    "generators have ended, and the trainer waits",
    "the trainer is killed",
    "generators are killed",
    "one generator of two is killed",
)
"""What each rule says of the others is tested on a clock of its own: test_silences, test_diagnosis, test_rules."""


@pytest.mark.parametrize(
    "situation", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in SITUATIONS]
)
def test_each_situation_is_named_as_it_is_and_as_bad_as_it_is(situation, stage, monkeypatch):
    said = SITUATIONS[situation]
    said.play(stage)
    monkeypatch.setattr(health, "IDLE", 1.0 if said.headline == "Idle" else 60.0)
    seen: dict[str, Any] = {}
    headlines: list[str] = []
    with (
        serving(Settings({"address": stage.server.address}, runs=stage.folder)) as url,
        closing(looks_of(url)) as looks,
    ):

        def is_said():
            seen.update(next(looks)["verdict"])
            if seen["headline"] not in headlines[-1:]:
                headlines.append(seen["headline"])
            return seen["headline"] == said.headline and said.detail in seen["detail"]

        with suppress(AssertionError):
            until(is_said)
    assert seen["headline"] == said.headline, headlines
    assert said.detail in seen["detail"]
    assert seen["level"] == said.level
    assert said.remedy in seen["remedy"] + seen["detail"]

    def is_found():
        status, found = found_by_doctor(stage)
        seen["doctor"] = found
        seen["status"] = status
        return found.keys() == set(said.doctor)

    with suppress(AssertionError):
        until(is_found)
    assert seen["doctor"].keys() == set(said.doctor)
    assert seen["status"] == (said.level == "failure" and bool(said.doctor))
    if said.doctor:
        assert any(
            said.remedy in f"{name}: {each['message']}; {each['remedy']}" for name, each in seen["doctor"].items()
        )
    assert said.tables in run_replay("tables", address=stage.server.address).stdout
