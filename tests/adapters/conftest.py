"""A server of this process with a pool, which the trainers of TRL and slime fill and sample. Its draws are the same in
each run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from replay_server import ReplayServer, TableConfig


@pytest.fixture
def server() -> Iterator[ReplayServer]:
    pool = TableConfig(name="replay", sampler="prioritized", remover="min_heap", max_size=256, seed=1)
    with ReplayServer([pool], port=0) as server:
        yield server
