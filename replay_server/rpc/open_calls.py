"""OpenCalls: counts the calls that are open, bounds the responses under way, and ends endless streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import grpc

from replay_server.config import LimitsSection
from replay_server.errors import busy, deadline
from replay_server.limits import MAX_RESPONSES

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class OpenCalls:
    def __init__(self, limits: LimitsSection) -> None:
        self._limits = limits
        self.count = 0
        self.endless: set[asyncio.Task[Any]] = set()
        """The streams that last until their clients end them."""
        self.closing = False
        self._responses: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By connection: each response with payloads that is under way holds one of MAX_RESPONSES."""

    def close(self) -> None:
        """Ends the streams that would not end by themselves."""
        self.closing = True
        for task in self.endless:
            task.cancel()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts one more open call. Raises Refused if `max_calls` are open."""
        if self.count >= self._limits.max_calls:
            raise busy(f"{self.count} calls are open, which is as many as this server takes (max_calls); try later")
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1

    async def send(self, responses: AsyncIterator[Any], context: Context) -> None:
        """Sends a response with payloads. Raises Refused if the client does not read it."""
        stall, begun = self._limits.stall_timeout, False
        try:
            async for response in responses:
                async with asyncio.timeout(stall):
                    if not begun:
                        await self._begin_response(context)
                        begun = True
                    await context.write(response)
        except TimeoutError:
            raise deadline(
                f"the answer was not read: the client took none of it for {stall:g} s (stall_timeout), or did not read "
                f"{MAX_RESPONSES} answers before it"
            ) from None

    async def _begin_response(self, context: Context) -> None:
        """Waits while MAX_RESPONSES to this connection are under way."""
        under_way = self._responses.setdefault(context.peer(), asyncio.Semaphore(MAX_RESPONSES))
        await under_way.acquire()
        # Released at the very end of the call: gRPC keeps a response that is not read, even after we gave it up.
        context.add_done_callback(lambda *_: under_way.release())  # type: ignore[arg-type]  # no lambda is generic
