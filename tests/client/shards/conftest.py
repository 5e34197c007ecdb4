"""Servers in this process, as the shards of one client."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from replay_client import AsyncReplayClient, ReplayClient
from replay_client.testing import PATIENCE, until
from replay_server import ReplayServer, TableConfig
from replay_server.tables.config import AdmissionConfig
from tests.kit.processes import free_port

TABLES = [
    TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 1000}, forward_to="pool"),
    TableConfig(name="pool", sampler="prioritized", remover="min_heap"),
    TableConfig(name="one", rate_limiter={"type": "queue", "max_size": 1}),
    TableConfig(name="any", sampler="uniform"),
    TableConfig(name="fresh", rate_limiter={"type": "queue", "max_size": 1000}, max_staleness=2),
]


class Service:
    """Several servers, each of which can be stopped and started again at its address."""

    def __init__(self, admission: AdmissionConfig | None = None, count: int = 3) -> None:
        self.admission = admission
        self.servers = [ReplayServer(TABLES, free_port(), admission=admission) for _ in range(count)]
        for server in self.servers:
            server.start()
        self.addresses = [server.address for server in self.servers]

    def stop(self, index: int) -> None:
        self.servers[index].stop(grace=0)

    def start_again(self, index: int) -> None:
        """An empty server at the address of the stopped one."""
        port = int(self.addresses[index].rpartition(":")[2])
        self.servers[index] = ReplayServer(TABLES, port, admission=self.admission)
        self.servers[index].start()

    def close(self) -> None:
        for server in self.servers:
            server.stop(grace=0)


@pytest.fixture
def make_service() -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def make(**options) -> Service:
        services.append(Service(**options))
        return services[-1]

    yield make
    for service in services:
        service.close()


@pytest.fixture
def service(make_service) -> Service:
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
