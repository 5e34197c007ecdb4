"""Budget: an amount that clients share. No client, and not all of them together, can use more than there is.

* At most `total` is in use, and at most half of it by one client that already uses some.
* A client that uses nothing may take more than half, or a large request could never be served.
* Waiting requests are served first come, first served, except those that wait for their own client's half.

A client is a connection (gRPC's name of the peer).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from replay_server.errors import busy, deadline


class Budget:
    def __init__(self, total: int, name: str) -> None:
        """`name` completes "N of M ...", for example "bytes of items that are not complete (max_unfinished_bytes)"."""
        self.total = total
        self.used = 0
        self._name = name
        self._used_by: dict[str, int] = {}
        self._line: OrderedDict[asyncio.Future[None], tuple[str, int]] = OrderedDict()

    def why_not(self, client: str, n: int) -> str | None:
        """Why the client cannot have n more; None if it can."""
        if self.used + n > self.total:
            return f"{self.used} of {self.total} {self._name} are in use, and {n} more were asked for"
        used = self._used_by.get(client, 0)
        if used and used + n > self.total // 2:
            return f"this client has {used} of {self.total} {self._name} in use, and no client may have over half"
        return None

    def take(self, client: str, n: int) -> None:
        """Raises Refused (RESOURCE_EXHAUSTED) if the client cannot have n more."""
        if why := self.why_not(client, n):
            raise busy(f"{why}; try again later")
        self._take(client, n)

    def give_back(self, client: str, n: int) -> None:
        self.used -= n
        left = self._used_by.pop(client, 0) - n
        if left:
            self._used_by[client] = left
        self._serve()

    @contextmanager
    def held(self, client: str, n: int) -> Iterator[None]:
        """Raises Refused as `take` does."""
        self.take(client, n)
        try:
            yield
        finally:
            self.give_back(client, n)

    @asynccontextmanager
    async def held_in_turn(self, client: str, n: int, timeout: float | None) -> AsyncIterator[None]:
        """Waits until the client can have n more. Raises Refused (DEADLINE_EXCEEDED) after `timeout` seconds."""
        await self._take_in_turn(client, n, timeout)
        try:
            yield
        finally:
            self.give_back(client, n)

    async def _take_in_turn(self, client: str, n: int, timeout: float | None) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line[future] = client, n
        self._serve()
        try:
            async with asyncio.timeout(timeout):
                await future
        except BaseException as error:
            if future.done() and not future.cancelled():  # it was served just before the wait ended
                self.give_back(client, n)
            if isinstance(error, TimeoutError):
                why = self.why_not(client, n) or f"others came first for the {self.total} {self._name}"
                raise deadline(why) from None
            raise
        finally:
            del self._line[future]
            self._serve()

    def _serve(self) -> None:
        for future, (client, n) in self._line.items():
            if future.done():
                continue
            if self.used + n > self.total:
                break
            if self.why_not(client, n) is None:
                self._take(client, n)
                future.set_result(None)

    def _take(self, client: str, n: int) -> None:
        self.used += n
        if n:
            self._used_by[client] = self._used_by.get(client, 0) + n
