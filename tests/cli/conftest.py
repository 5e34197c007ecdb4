"""A server with two tables, and the command `replay` as a process that talks to it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest

from replay_server import ReplayServer, TableConfig
from tests.kit.processes import run_replay

Replay = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def server() -> Iterator[ReplayServer]:
    tables = [
        TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 8}, forward_to="replay"),
        TableConfig(name="replay", sampler="prioritized", remover="min_heap", max_size=16, max_staleness=4),
    ]
    with ReplayServer(tables=tables, port=0) as server:
        yield server


@pytest.fixture
def replay(server) -> Replay:
    return lambda *arguments, **environment: run_replay(*arguments, address=server.address, **environment)
