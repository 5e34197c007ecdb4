"""A server with two tables, and the command `replay` as a process that talks to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from replay_client import ReplayClient
from replay_server import ReplayServer, TableConfig

Replay = Callable[..., subprocess.CompletedProcess[str]]


def run_replay(*arguments: str, address: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, with nobody at the terminal."""
    return subprocess.run(
        [sys.executable, "-m", "replay_server.cli", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"REPLAY_ADDRESS": address or "127.0.0.1:1"} | environment,
    )


@pytest.fixture
def server() -> Iterator[ReplayServer]:
    tables = [
        TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 8}, forward_to="replay"),
        TableConfig(name="replay", sampler="prioritized", remover="min_heap", max_size=16, max_staleness=4),
    ]
    with ReplayServer(tables=tables, port=0) as server:
        yield server


@pytest.fixture
def client(server) -> Iterator[ReplayClient]:
    with ReplayClient(server.address) as client:
        yield client


@pytest.fixture
def replay(server) -> Replay:
    return lambda *arguments, **environment: run_replay(*arguments, address=server.address, **environment)
