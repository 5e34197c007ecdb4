"""Clients and servers of different versions work together, and files of an older version are read.

A wheel of a release that lies in this folder (`CONTRIBUTING.md`, "Release") is run as it is against this version, in
both directions. Without one, this version is run against itself, which tests the program of the exchange.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from replay_cli.archive.reading import read_groups
from replay_client import ReplayClient
from replay_client.testing import until
from tests.upgrade import exchange
from tests.upgrade.exchange import PIPELINED, WITH_PERMIT, WITHOUT_PERMIT, group

HERE = Path(__file__).parent
THIS = "this"
WHEELS = {path.name.split("-")[1]: path for path in sorted(HERE.glob("*.whl"))}
PAIRS = [(THIS, THIS), *((each, THIS) for each in WHEELS), *((THIS, each) for each in WHEELS)]
CONFIG = """
[server]
data_dir = "data"

[admission]
fresh_groups_per_step = 2
max_staleness = 2

[[tables]]
name = "rollouts"
rate_limiter = { type = "queue", max_size = 8 }
forward_to = "replay"
copy_to = "archive"

[[tables]]
name = "replay"
sampler = "prioritized"
max_size = 8
"""
SEEN = {
    "policy": [1, "weights/step-1"],
    "permits": [2, 3, 1, 1],
    "insert": 3,
    "list": [[PIPELINED, 0.25, 1], [WITHOUT_PERMIT, 0.5, 1], [WITH_PERMIT, 0.5, 1]],
    "extend": ["values"],
    "columns": ["reference", "values"],
    "lease": [1, 1],
    "sample": [WITH_PERMIT, 0, True],
    "forward": [WITH_PERMIT, WITHOUT_PERMIT, PIPELINED],
    "update": PIPELINED,
    "delete": [404],
    "checkpoint": ["exchanged", 3, True],
}
"""What the program of the exchange sees, whatever the versions are."""


class Version:
    """A version of the project, as a user has it who installed it."""

    def __init__(self, name: str, folder: Path) -> None:
        """`folder`: where a wheel is unpacked to."""
        self.environment: Mapping[str, str] = os.environ
        self.number = version("replay-server")
        if name != THIS:
            self.number = name
            self.environment = os.environ | {"PYTHONPATH": str(folder)}
            with zipfile.ZipFile(WHEELS[name]) as wheel:
                wheel.extractall(folder)

    def start(self, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, env=self.environment, cwd=cwd, stdout=subprocess.PIPE, text=True)

    def run(self, *arguments: str, cwd: Path) -> str:
        """What a program of Python prints."""
        with self.start(*arguments, cwd=cwd) as process:
            printed, _ = process.communicate(timeout=400)
        assert process.returncode == 0, printed
        return printed

    @contextmanager
    def server(self, folder: Path) -> Iterator[str]:
        """Its command `replay serve`, as a process. Yields the address."""
        (folder / "replay.toml").write_text(CONFIG)
        options = ("--config", "replay.toml", "--listen", "127.0.0.1:0", "--log-level", "warning")
        with self.start("-m", "replay_cli", "serve", *options, cwd=folder) as process:
            try:
                assert process.stdout is not None
                yield process.stdout.readline().removeprefix("listening on ").strip()
            finally:
                process.terminate()
                process.wait(timeout=200)


@dataclass(frozen=True)
class Exchanged:
    """What a client and a server of two versions have done with each other."""

    client: Version
    server: Version
    seen: Mapping[str, Any]
    exported: Path
    """The table `replay`, as the client's `replay table export` wrote it."""
    archive: Path
    """The folder of the client's `replay archive run`."""


@pytest.fixture(scope="module", params=PAIRS, ids=[f"client-{client}-server-{server}" for client, server in PAIRS])
def exchanged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exchanged:
    folder = tmp_path_factory.mktemp("exchanged")
    client = Version(request.param[0], folder / "client")
    server = Version(request.param[1], folder / "server")
    exported, archive = folder / "replay.jsonl", folder / "archive"
    with server.server(folder) as address:
        seen = json.loads(client.run(exchange.__file__, address, cwd=folder))
        replay = ("-m", "replay_cli", "--address", address)
        client.run(*replay, "table", "export", "replay", str(exported), cwd=folder)
        with client.start(*replay, "archive", "run", str(archive), "--segment-seconds", "0.1", cwd=folder) as archiving:
            until(lambda: any(archive.glob("*.parquet")))
            archiving.send_signal(signal.SIGTERM)
            assert archiving.wait(timeout=200) == 0
    return Exchanged(client, server, seen, exported, archive)


@pytest.mark.parametrize("fact", SEEN)
def test_a_client_sees_the_same_at_a_server_of_another_version(exchanged, fact):
    assert exchanged.seen[fact] == SEEN[fact]


def test_the_exchange_has_no_fact_that_is_not_tested(exchanged):
    assert exchanged.seen.keys() - {"client", "server"} == SEEN.keys()


def test_the_client_is_of_the_version_of_its_wheel(exchanged):
    number, path = exchanged.seen["client"]
    assert number == exchanged.client.number
    folder = exchanged.client.environment.get("PYTHONPATH", "")
    assert exchanged.client.environment is os.environ or Path(path).is_relative_to(folder)


def test_the_server_is_of_the_version_of_its_wheel(exchanged):
    assert exchanged.seen["server"] == exchanged.server.number


def test_this_version_imports_what_the_client_exported(exchanged, tmp_path):
    this = Version(THIS, tmp_path)
    with this.server(tmp_path) as address, ReplayClient(address) as client:
        this.run("-m", "replay_cli", "--address", address, "table", "import", str(exchanged.exported), cwd=tmp_path)
        imported = {item.key: item.group for item in client.get([WITH_PERMIT, PIPELINED])}
    assert imported == {WITH_PERMIT: group(), PIPELINED: group()}


def test_this_version_reads_what_the_client_archived(exchanged):
    rows = {int(row["key"]): row for row in read_groups(exchanged.archive)}
    assert rows.keys() == {WITH_PERMIT, WITHOUT_PERMIT, PIPELINED}


def test_a_server_of_this_version_starts_with_what_the_server_left_on_disk(exchanged, tmp_path):
    this = Version(THIS, tmp_path)
    folder = exchanged.archive.parent
    with this.server(folder) as address, ReplayClient(address) as client:
        assert sorted(item.key for item in client.list_items("replay").items) == [WITH_PERMIT, PIPELINED]


def test_a_wheel_that_lies_here_is_one_of_this_project():
    for path in WHEELS.values():
        assert re.fullmatch(r"replay_server-[\w.]+-py3-none-any\.whl", path.name), path.name
