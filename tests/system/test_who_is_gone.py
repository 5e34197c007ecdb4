"""A trainer and a generator that are killed are missed by name; those that end on purpose are not."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import pytest

from replay_client import ReplayClient
from replay_client.errors import AuthenticationError
from replay_server import ReplayServer, SecuritySection, TableConfig
from replay_server.rpc import info
from tests.commands import run_replay
from tests.factories import tokens_file, until

GENERATOR = """
import itertools, sys, time
from replay_client import ReplayClient
with ReplayClient(sys.argv[1], name="gen-a") as client, client.writer() as writer:
    for number in itertools.count():
        writer.insert(b"x", {"rollouts": 1.0})
        time.sleep(0.02)
"""
TRAINER = """
import sys, time
from replay_client import ReplayClient
with ReplayClient(sys.argv[1]) as client, client.sampler("rollouts", lease=60.0) as batches:
    for version, batch in enumerate(batches, 1):
        client.acknowledge(batch)
        client.set_policy_version(version)
        time.sleep(0.05)
        if version == int(sys.argv[2]):
            break
    client.leave()
"""


@pytest.fixture
def impatient(monkeypatch):
    """Called when somebody has gone: the server waits 3 s for him. Until then a machine that is busy misses nobody."""
    monkeypatch.setattr(info, "LONG_WAIT", 1000.0)
    return lambda: monkeypatch.setattr(info, "LONG_WAIT", 3.0)


@pytest.fixture
def server():
    tables = [TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 100_000})]
    with ReplayServer(tables, port=0, max_bytes="1GB") as server:
        yield server


@pytest.fixture
def client(server):
    with ReplayClient(server.address) as client:
        yield client


@pytest.fixture
def start(server):
    started = []

    def start_one(program, *arguments):
        process = subprocess.Popen([sys.executable, "-c", program, server.address, *map(str, arguments)])
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.wait()


def by_name(client):
    return {each.name: each for each in client.server_info().clients}


def sides(client):
    return {silence.side: silence.reason for silence in client.server_info().silences}


def doctor(server):
    done = run_replay("doctor", "--json", address=server.address)
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, {each["check"]: each["message"] for each in findings if each["level"] == "failure"}


def test_a_killed_trainer_and_then_a_killed_generator_are_missed_by_name(server, client, start, impatient):
    generator, trainer = start(GENERATOR), start(TRAINER, 1_000_000)
    until(lambda: client.server_info().policy.usual and len(by_name(client)) == 2)
    known = by_name(client)
    (name,) = known.keys() - {"gen-a"}
    assert name.endswith(f":{trainer.pid}")
    assert {each.name: (each.role, each.open > 0) for each in known.values()} == {
        "gen-a": ("generator", True),
        name: ("trainer", True),
    }
    assert sides(client) == {}
    assert doctor(server) == (0, {})

    trainer.kill()
    until(lambda: by_name(client)[name].open == 0)
    impatient()
    said = until(lambda: sides(client).get("trainer"))
    assert said.startswith("no new policy version since version ")
    assert f"last seen: {name} (" in said
    until(lambda: set(sides(client)) == {"trainer"})

    generator.kill()
    until(lambda: set(sides(client)) == {"trainer", "generators"})
    status, failures = doctor(server)
    assert status == 1
    assert failures.keys() == {"trainer", "generators"}
    assert "gen-a (" in failures["generators"]


def test_a_trainer_that_says_that_it_ends_is_not_missed(server, client, start, impatient):
    generator, trainer = start(GENERATOR), start(TRAINER, 20)
    assert trainer.wait(200) == 0
    ended = lambda: [each for each in client.server_info().clients if each.role == "trainer"]  # noqa: E731
    until(lambda: [(each.ended, each.open) for each in ended()] == [(True, 0)])
    impatient()
    until(lambda: client.server_info().policy.age > 1.5 * client.server_info().long_wait)  # from 1.0 on it is missed
    until(lambda: sides(client) == {})
    generator.kill()
    until(lambda: set(sides(client)) == {"generators"})


def test_a_client_that_only_reads_leaves_no_trace_and_cannot_say_that_others_end(tmp_path):
    reader, writer = "r" * 32, "w" * 32
    security = SecuritySection(tokens_file=tokens_file(tmp_path, f"read-only:{reader}", f"read-write:{writer}"))
    with (
        ReplayServer([TableConfig(name="pool")], port=0, security=security) as server,
        ReplayClient(server.address, token=writer, name="honest") as client,
        ReplayClient(server.address, token=reader, name="honest", timeout=60.0) as spy,
        ReplayClient(server.address, token=reader, name="another", timeout=60.0) as other,
    ):
        client.insert(b"x", {"pool": 1.0})
        for reads in (spy, other):
            reads.server_info()
            reads.get([1])
            reads.list_items("pool")
            next(reads.watch_policy())
            for refused in (reads.leave, partial(reads.sample, "pool"), partial(reads.insert, b"y", {"pool": 1.0})):
                with pytest.raises(AuthenticationError, match="needs a token of the role read-write"):
                    refused()
        (known,) = client.server_info().clients
        assert (known.name, known.role, known.ended) == ("honest", "generator", False)


def test_a_client_may_have_no_name(client, server):
    with ReplayClient(server.address, name="") as nameless:
        nameless.insert(b"x", {"rollouts": 1.0})
    assert client.server_info().clients == ()


@pytest.mark.parametrize("name", ["a b", "ü", "x" * 65, "a\n"])
def test_a_name_that_cannot_travel_is_refused_at_once(name):
    with pytest.raises(ValueError, match="name must have at most 64 printable ASCII characters"):
        ReplayClient("127.0.0.1:1", name=name)
