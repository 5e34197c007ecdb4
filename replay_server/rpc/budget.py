"""Budget: an amount that clients share, so that none of them, nor all together, can have more than there is."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from replay_server.errors import busy, deadline


class Budget:
    """At most `total` for all clients together, and half of it for each.

    A client that holds nothing may take more than its half. A client is a connection (gRPC's name of the peer).
    """

    def __init__(self, total: int, what: str) -> None:
        """`what` completes "N of M ...", for example "bytes of half received items (max_unfinished_bytes)"."""
        self.total = total
        self.used = 0
        self._what = what
        self._held: dict[str, int] = {}
        """By client."""
        self._line: OrderedDict[asyncio.Future[None], tuple[str, int]] = OrderedDict()
        """Who waits, first come first served, but for those who wait for their own half."""

    def why_not(self, client: str, n: int) -> str | None:
        """Why the client cannot have n more; None: it can."""
        if self.used + n > self.total:
            return f"{self.used} of {self.total} {self._what} are in use, and {n} more were asked for"
        held = self._held.get(client, 0)
        if held and held + n > self.total // 2:
            return f"this client has {held} of {self.total} {self._what} in use, and no client may have over half"
        return None

    def take(self, client: str, n: int) -> None:
        """Raises Refused (RESOURCE_EXHAUSTED) where the client cannot have n more."""
        if why := self.why_not(client, n):
            raise busy(f"{why}; try again later")
        self._take(client, n)

    def give_back(self, client: str, n: int) -> None:
        self.used -= n
        left = self._held.pop(client, 0) - n
        if left:
            self._held[client] = left
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
        """The same, but waits. Raises Refused (DEADLINE_EXCEEDED) with the reason after `timeout` seconds."""
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
            if future.done() and not future.cancelled():  # granted in the moment in which the wait ended
                self.give_back(client, n)
            if isinstance(error, TimeoutError):
                why = self.why_not(client, n) or f"others came first for the {self.total} {self._what}"
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
            self._held[client] = self._held.get(client, 0) + n
