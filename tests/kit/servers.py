"""Servers in this process: one with a client, and several that make one service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from replay_client import AsyncReplayClient, ReplayClient
from replay_server import ReplayServer, TableConfig
from tests.kit.processes import free_port


@contextmanager
def serving(
    tables: Iterable[TableConfig],
    *,
    restore: str | None = None,
    replace: bool = False,
    timeout: float = 60.0,
    **options: Any,
) -> Iterator[ReplayClient]:
    """A client of a server, which runs until the end of the block. `restore`: the checkpoint that it begins with.

    `options`: those of ReplayServer.
    """
    server = ReplayServer(tables, port=0, **options)
    if restore is not None:
        server.restore(restore, replace=replace)
    with server, ReplayClient(server.address, timeout=timeout) as client:
        yield client


@asynccontextmanager
async def async_serving(
    tables: Iterable[TableConfig], *, timeout: float = 20.0, **options: Any
) -> AsyncIterator[AsyncReplayClient]:
    """Like `serving`, for a test that runs on an event loop."""
    with ReplayServer(tables, port=0, **options) as server:
        async with AsyncReplayClient(server.address, timeout=timeout) as client:
            yield client


class Servers:
    """Servers with the same options, each of which can be killed, and started again at its address."""

    def __init__(self, tables: Iterable[TableConfig], *, count: int, **options: Any) -> None:
        self._options = {"tables": list(tables), **options}
        self.running = [self._start(free_port()) for _ in range(count)]
        self.addresses = [server.address for server in self.running]

    def _start(self, port: int) -> ReplayServer:
        server = ReplayServer(port=port, **self._options)
        server.start()
        return server

    def kill(self, number: int = 0) -> None:
        self.running[number].stop(grace=0)

    def restart(self, number: int = 0) -> None:
        """Starts a server at the address of one that was killed."""
        port = int(self.addresses[number].rpartition(":")[2])
        self.running[number] = self._start(port)

    def close(self) -> None:
        for server in self.running:
            server.stop(grace=0)
