"""Shard: one server of several, with its client, its address of the moment, and whether it can be reached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from grpc import ChannelConnectivity

from replay_client.aio import AsyncReplayClient
from replay_client.errors import ReplayError, ServerUnavailableError

T = TypeVar("T")

_FIRST_LOOK = 2.0
"""Seconds in which a server must accept the first connection. After that it counts as gone until it does."""
_LOOK_AGAIN = 0.5
"""Seconds between two looks for the address of a server that is gone."""

_DRAINING = 30.0
"""Seconds after which a shard that was draining is tried again: the operator may have thought better of it."""


class Locator(Protocol):
    """Finds the address of a shard by the shard's name. None: it has no address now."""

    async def __call__(self, name: str) -> str | None: ...


class Shard:
    """One server of several. `name` stays the same when the address changes, and decides which keys belong here."""

    def __init__(self, name: str, make_client: Callable[[str], AsyncReplayClient], locate: Locator | None) -> None:
        """Without `locate` the name is the address."""
        self.name = name
        self.is_up = False
        """Whether the connection stands. Any thread may read it."""
        self.draining_until = 0.0
        """On time.monotonic's clock: until then no new item goes here, because the shard refused one as draining."""
        self.decided = asyncio.Event()
        """Set when the first attempt to connect has ended."""
        self.changed: Callable[[Shard], None] = lambda _: None
        """Called when `is_up` has changed."""
        self._make_client, self._locate = make_client, locate
        self._client = make_client(name) if locate is None else None
        self._running: set[asyncio.Task[Any]] = set()
        self._watching: asyncio.Task[None] | None = None

    @property
    def client(self) -> AsyncReplayClient:
        """The client of this server alone. Raises ServerUnavailableError while the server has never had an address."""
        if self._client is None:
            raise ServerUnavailableError(f"shard {self.name} has no address yet")
        return self._client

    @property
    def takes_inserts(self) -> bool:
        """Whether new items may go here. Any thread may read it."""
        return self.is_up and time.monotonic() >= self.draining_until

    def is_draining(self) -> None:
        """The shard has refused a new item: leave it in peace for a while."""
        self.draining_until = time.monotonic() + _DRAINING

    @property
    def address(self) -> str:
        return "" if self._client is None else self._client.address

    def watch(self) -> None:
        """Begins to watch the connection, on the running event loop."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises ServerUnavailableError as soon as the connection is broken.

        So the caller can go on with other shards. Work that must not be done by another shard does not belong here.
        """
        task = asyncio.create_task(work)
        self._running.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._running.discard(task)
            task.cancel()
        if task.cancelled():
            raise ServerUnavailableError(f"the connection to shard {self.name} broke")
        return task.result()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    async def _watch(self) -> None:
        first_look_ends = asyncio.get_running_loop().time() + _FIRST_LOOK
        while True:
            if not self.is_up and self._locate is not None:
                await self._find()
            if self._client is None:
                await asyncio.sleep(_LOOK_AGAIN)
                self._tell(False)
                continue
            channel = self._client.connection.channel
            state = channel.get_state(try_to_connect=True)
            if state is ChannelConnectivity.READY:
                self._tell(True)
                await channel.wait_for_state_change(state)
                continue
            late = asyncio.get_running_loop().time() >= first_look_ends
            if state is ChannelConnectivity.TRANSIENT_FAILURE or (late and not self.decided.is_set()):
                self._tell(False)
            await self._until_it_changes(channel.wait_for_state_change(state))

    async def _until_it_changes(self, change: Awaitable[None]) -> None:
        """A connection that is neither made nor refused within some time counts as broken."""
        try:
            async with asyncio.timeout(_LOOK_AGAIN):
                await change
        except TimeoutError:
            if self.decided.is_set():
                self._tell(False)

    async def _find(self) -> None:
        assert self._locate is not None
        address = None
        with suppress(ReplayError):  # the directory does not answer: stay with the address that was
            address = await self._locate(self.name)
        if address is None:
            return
        if self._client is None:
            self._client = self._make_client(address)
        elif address != self._client.address:
            self._client.connection.move(address)

    def _tell(self, is_up: bool) -> None:
        changed = is_up != self.is_up or not self.decided.is_set()
        self.is_up = is_up
        self.decided.set()
        if not is_up:
            for task in self._running:
                task.cancel()
        if changed:
            self.changed(self)
