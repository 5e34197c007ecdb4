"""Fleet: all shards of one client; those that can be reached, and questions to all of them at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from replay_client.aio import AsyncReplayClient
from replay_client.errors import DeadlineExceededError, ReplayError, ServerClosedError, ServerUnavailableError
from replay_client.shards.placing import Rendezvous
from replay_client.shards.shard import Shard

T = TypeVar("T")
Question = Callable[[AsyncReplayClient], Coroutine[Any, Any, T]]

GONE = (ServerUnavailableError, ServerClosedError)
"""Errors that mean: this shard does not answer, another one may."""


class Deadline:
    """When a call must end. `timeout` is in seconds; None: never."""

    def __init__(self, timeout: float | None) -> None:
        self._end = math.inf if timeout is None else asyncio.get_running_loop().time() + timeout

    @property
    def seconds(self) -> float | None:
        """What is left, at least 0; None: no end."""
        return None if math.isinf(self._end) else max(0.0, self._end - asyncio.get_running_loop().time())

    @property
    def passed(self) -> bool:
        return self.seconds == 0.0

    def within(self, seconds: float) -> float:
        """`seconds`, or what is left if that is less."""
        left = self.seconds
        return seconds if left is None else min(seconds, left)


class Fleet:
    """The shards, each with a name."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = list(shards)
        self.rendezvous = Rendezvous([shard.name for shard in shards])
        self.by_name = {shard.name: shard for shard in shards}
        self.changed = asyncio.Event()
        """Set, and made anew, when a shard has come or gone."""
        self._when_decided: list[Callable[[], None]] = []
        self.listeners: list[Callable[[Shard], None]] = []
        for shard in shards:
            shard.changed = self._changed

    def start(self) -> None:
        """Begins to connect, on the running event loop."""
        for shard in self.shards:
            shard.watch()

    @property
    def decided(self) -> bool:
        """Whether it is known of each shard if it can be reached."""
        return all(shard.decided.is_set() for shard in self.shards)

    def up(self) -> list[Shard]:
        return [shard for shard in self.shards if shard.is_up]

    def in_order(self, key: int) -> list[Shard]:
        """All shards for one key, the one to which it belongs first."""
        return [self.shards[index] for index in self.rendezvous.order(key)]

    def when_decided(self, callback: Callable[[], None]) -> None:
        """Calls back, once, when it is known of each shard if it can be reached. Any thread may call this."""
        self._when_decided.append(callback)
        self._tell_decided()  # it may have become known just before

    async def reachable(self, deadline: Deadline) -> list[Shard]:
        """The shards that are up, at least one. Raises ServerUnavailableError if the time is up before."""
        self.start()
        while not self.decided:  # soon: each shard has a short time for its first connection
            await self.changed.wait()
        while not self.up():
            changed = self.changed
            try:
                async with asyncio.timeout(deadline.seconds):
                    await changed.wait()
            except TimeoutError:
                raise self.unavailable() from None
        return self.up()

    def unavailable(self) -> ServerUnavailableError:
        names = ", ".join(self.by_name)
        return ServerUnavailableError(f"none of the {len(self.shards)} shards answers: {names}; are they running?")

    async def ask(
        self, question: Question[T], deadline: Deadline, shards: Sequence[Shard] | None = None
    ) -> dict[Shard, T]:
        """The answers of the shards that are up, or of those of `shards` that are. At least one.

        A shard that goes away meanwhile, or does not answer in time where others do, is left out. Raises any other
        error of any shard, and ServerUnavailableError if none answers in time.
        """
        while True:
            up = await self.reachable(deadline)
            asked = up if shards is None else [shard for shard in up if shard in shards]
            answers, late = await self.try_to_ask(question, asked)
            if answers or (shards is not None and not asked):
                return answers
            if late is not None:
                raise late
            if deadline.passed:
                raise self.unavailable()
            await asyncio.sleep(deadline.within(0.05))

    async def try_to_ask(
        self, question: Question[T], shards: Sequence[Shard]
    ) -> tuple[dict[Shard, T], DeadlineExceededError | None]:
        """The answers of those that answer, and the error of one that did not in time."""

        async def one(shard: Shard) -> T | ReplayError:
            try:
                return await shard.run(question(shard.client))
            except ReplayError as error:
                return error

        results = await asyncio.gather(*map(one, shards))
        answers: dict[Shard, T] = {}
        late = None
        for shard, result in zip(shards, results, strict=True):
            if isinstance(result, DeadlineExceededError):
                late = result
            elif isinstance(result, ReplayError) and not isinstance(result, GONE):
                raise result
            elif not isinstance(result, ReplayError):
                answers[shard] = result
        return answers, late

    async def ask_all(self, question: Question[T], deadline: Deadline) -> dict[Shard, T]:
        """The answers of all shards. Raises ServerUnavailableError that names those that cannot be reached in time."""
        self.start()
        while gone := [shard.name for shard in self.shards if not shard.is_up]:
            changed = self.changed
            try:
                async with asyncio.timeout(deadline.seconds):
                    await changed.wait()
            except TimeoutError:
                raise ServerUnavailableError(
                    f"this needs all shards, and {', '.join(gone)} cannot be reached"
                ) from None
        answers = await asyncio.gather(*(shard.run(question(shard.client)) for shard in self.shards))
        return dict(zip(self.shards, answers, strict=True))

    def replace(self, shards: Sequence[Shard]) -> None:
        """Goes on with these shards: some are new, and some of the old ones are not there any more."""
        self.shards, self.by_name = list(shards), {shard.name: shard for shard in shards}
        self.rendezvous = Rendezvous([shard.name for shard in shards])
        for shard in shards:
            shard.changed = self._changed
            shard.watch()

    async def close(self) -> None:
        await asyncio.gather(*(shard.close() for shard in self.shards))

    def _changed(self, shard: Shard) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
        for listener in self.listeners:
            listener(shard)
        self._tell_decided()

    def _tell_decided(self) -> None:
        while self.decided and self._when_decided:
            self._when_decided.pop()()
