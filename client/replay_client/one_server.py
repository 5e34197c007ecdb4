"""OneServer: the server of a client of one. Nothing is shared out: each request goes straight to it.

It stands where a client of several has a Fleet, a Placement, a PolicyBoard and a PermitOffice, and has their methods.
`aio.servers_of` chooses between the two, once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, TypeVar

from google.protobuf.message import Message

from replay_client.access import Access
from replay_client.connection import Connection, watch_policy
from replay_client.errors import GONE, DeadlineExceededError
from replay_client.frames import Item, unchanged_row
from replay_client.records import (
    ItemPage,
    MutationResult,
    PermitLease,
    Policy,
    lease_of,
    mutation_of,
    policy_of,
)
from replay_client.requests import once
from replay_protos import replay_pb2 as pb

T = TypeVar("T")


class OneServer:
    """Timeouts are in seconds; None waits for ever. Errors are those of `Connection.unary`."""

    decided = True
    """A writer need not wait until it is known which servers can be reached."""

    def __init__(self, access: Access, timeout: float | None) -> None:
        self.connection = Connection(access, timeout)
        self.shards = [self.connection]
        self.address, self.timeout = access.address, timeout
        self.listeners: list[Callable[[Any], None]] = []
        """Nobody watches the only server, so that these are never called."""

    # ------------------------------------------------------------------------------------------------ as a Fleet

    @property
    def carries(self) -> str:
        return self.connection.carries

    async def find_transport(self) -> str:
        return await self.connection.find_transport()

    def connect(self) -> None:
        """The first request connects."""

    def when_decided(self, callback: Callable[[], None]) -> None:
        callback()

    def up(self) -> list[Connection]:
        return self.shards

    async def ask(self, method: str, request: Message, timeout: float | None, read: Callable[[Any], T]) -> T:
        return read(await self.connection.unary(method, request, timeout))

    async def ask_all(self, method: str, request: Message, timeout: float | None, read: Callable[[Any], T]) -> T:
        return await self.ask(method, request, timeout, read)

    async def pages(
        self, request: pb.ListItemsRequest, timeout: float | None, read: Callable[[Any], ItemPage]
    ) -> ItemPage:
        return await self.ask("ListItems", request, timeout, read)

    async def say(self, method: str, request: Message, timeout: float | None) -> None:
        with suppress(DeadlineExceededError, *GONE):
            await self.connection.unary(method, request, timeout)

    async def close(self) -> None:
        await self.connection.close()

    # -------------------------------------------------------------------------------------------- as a Placement

    def shard_for(self, item: Item) -> Connection:
        return self.connection

    def forget(self, key: int, shard: Connection) -> bool:
        return False

    async def insert(self, item: Item) -> None:
        await self.connection.insert(item)

    async def settle(self, item: Item) -> None:
        """All permits are of this server."""

    async def extend(self, item: Item) -> pb.UnchangedRow | None:
        return unchanged_row(await self.connection.insert(item))

    async def change(self, method: str, request: Message, timeout: float | None) -> MutationResult:
        return mutation_of(await self.connection.unary(method, request, timeout))

    # ---------------------------------------------------------------------- as a PolicyBoard and a PermitOffice

    async def publish(self, request: pb.SetPolicyVersionRequest, timeout: float | None) -> Policy:
        request.place.servers = 1
        return policy_of((await self.connection.unary("SetPolicyVersion", request, timeout)).policy)

    def watch(self) -> AsyncGenerator[Policy]:
        return watch_policy(self.connection)

    async def acquire(self, request: pb.AcquirePermitsRequest, timeout: float | None) -> PermitLease:
        return lease_of(await self.connection.unary("AcquirePermits", once(request), timeout))

    async def release(self, lease: PermitLease, request: pb.ReleasePermitsRequest, timeout: float | None) -> int:
        return int((await self.connection.unary("ReleasePermits", once(request), timeout)).released)
