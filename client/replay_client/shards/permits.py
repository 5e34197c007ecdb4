"""Permits of several shards: each shard grants from its own share of `groups_per_step`."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from dataclasses import replace

from replay_client.errors import DeadlineExceededError, ReplayError
from replay_client.records import PermitLease
from replay_client.shards.fleet import GONE, Deadline, Fleet
from replay_client.shards.shard import Shard

_SECONDS_PER_ROUND = 2.0
"""Seconds for which all shards are asked at once. What more than one of them grants in this time goes back at once."""


class PermitOffice:
    """Acquires and releases permits for one client."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._turn = itertools.count()
        self._returning: set[asyncio.Task[None]] = set()

    async def acquire(self, count: int, deadline: Deadline) -> PermitLease:
        """`count` permits of one shard: of the next in turn that has them, or of the first that gets them."""
        while True:
            last_round = deadline.passed
            up = await self._fleet.reachable(deadline)
            begin = next(self._turn) % len(up)
            for shard in up[begin:] + up[:begin]:
                with suppress(DeadlineExceededError, *GONE):
                    return await self._ask(shard, count, 0.0)
            lease = await self._race(up, count, deadline.within(_SECONDS_PER_ROUND))
            if isinstance(lease, PermitLease):
                return lease
            if last_round or deadline.passed:
                raise lease

    async def release(self, lease: PermitLease, count: int, deadline: Deadline) -> int:
        """Gives permits back to the shard that granted them; 0 where that shard is gone, and they end by themselves."""
        asked = [shard for shard in self._fleet.shards if lease.shard in (shard.name, "")]
        answers = await self._fleet.ask(
            lambda client: client.release_permits(lease, count, timeout=deadline.seconds), deadline, asked
        )
        return sum(answers.values())

    async def _ask(self, shard: Shard, count: int, timeout: float) -> PermitLease:
        lease = await shard.run(shard.client.acquire_permits(count, timeout=timeout))
        return replace(lease, shard=shard.name)

    async def _race(self, shards: list[Shard], count: int, seconds: float) -> PermitLease | ReplayError:
        """The first grant, or the error of one shard if there is none. Later grants go back."""
        asking = [asyncio.create_task(self._ask(shard, count, seconds)) for shard in shards]
        error: ReplayError = self._fleet.unavailable()
        try:
            while asking:
                done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    asking.remove(task)
                    try:
                        return task.result()
                    except (DeadlineExceededError, *GONE) as failure:
                        error = failure
            return error
        finally:
            for task in asking:
                returning = asyncio.create_task(self._give_back(task))
                self._returning.add(returning)
                returning.add_done_callback(self._returning.discard)

    async def _give_back(self, asking: asyncio.Task[PermitLease]) -> None:
        with suppress(ReplayError):
            lease = await asking
            shard = self._fleet.by_name[lease.shard]
            await shard.run(shard.client.release_permits(lease))
