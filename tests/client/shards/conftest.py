"""Servers in this process, as the shards of one client."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from replay_client import AsyncReplayClient, ReplayClient
from replay_client.testing import PATIENCE, until
from replay_server import TableConfig
from tests.kit.servers import Servers

TABLES = [
    TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 1000}, forward_to="pool"),
    TableConfig(name="pool", sampler="prioritized", remover="min_heap"),
    TableConfig(name="one", rate_limiter={"type": "queue", "max_size": 1}),
    TableConfig(name="any", sampler="uniform"),
    TableConfig(name="fresh", rate_limiter={"type": "queue", "max_size": 1000}, max_staleness=2),
]


@pytest.fixture
def make_service() -> Iterator[Callable[..., Servers]]:
    """Starts servers, three unless told otherwise, as the shards of a service. They end with the test."""
    services: list[Servers] = []

    def make(count: int = 3, **options) -> Servers:
        services.append(Servers(TABLES, count=count, **options))
        return services[-1]

    yield make
    for service in services:
        service.close()


@pytest.fixture
def service(make_service) -> Servers:
    return make_service()


@contextmanager
def connected(addresses: Sequence[str] | str, **options) -> Iterator[ReplayClient]:
    """A client with a connection to each shard. A client calls a shard gone whose first connection takes long."""
    with ReplayClient(addresses, **options) as client:
        until(lambda: client.server_info().gone == ())
        yield client


async def all_up(client: AsyncReplayClient) -> None:
    """The same for a client on an event loop."""
    async with asyncio.timeout(PATIENCE):
        while (await client.server_info()).gone:
            await asyncio.sleep(0.01)


@pytest.fixture
def client(service) -> Iterator[ReplayClient]:
    with connected(service.addresses, timeout=20.0) as client:
        yield client
