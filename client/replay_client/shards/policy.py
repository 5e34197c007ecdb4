"""Policy: one policy version on several shards. Every shard gets it, and the lowest confirmed one counts.

A generator must never see a version that some shard does not have yet: that shard would take its groups for newer than
the policy. So the lowest version counts. A shard that comes back with an older one does not take the others back with
it: the client that published a version brings such a shard up to date.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass

from replay_client.errors import ReplayError
from replay_client.records import Policy
from replay_client.shards.fleet import GONE, Deadline, Fleet
from replay_client.shards.merging import lowest
from replay_client.shards.shard import Shard


@dataclass(frozen=True)
class _Published:
    version: int
    weights: str
    rollback: bool


class PolicyBoard:
    """Publishes, reads and watches the policy for one client."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._published: _Published | None = None
        self._catching_up: set[asyncio.Task[None]] = set()
        fleet.listeners.append(self._came_or_went)

    async def publish(self, version: int, weights: str, rollback: bool, deadline: Deadline) -> Policy:
        """Tells all shards that are up. The others get it when they come back, as long as this client lives."""
        answers = await self._fleet.ask(
            lambda client: client.set_policy_version(version, weights, rollback=rollback, timeout=deadline.seconds),
            deadline,
        )
        self._published = _Published(version, weights, rollback)
        for shard in self._fleet.shards:
            if shard.is_up and shard not in answers:
                self._came_or_went(shard)
        return lowest(answers.values())

    async def policy(self, deadline: Deadline) -> Policy:
        """The lowest version of the shards that are up."""
        answers = await self._fleet.ask(lambda client: client.policy(timeout=deadline.seconds), deadline)
        return lowest(answers.values())

    async def watch(self) -> AsyncGenerator[Policy]:
        """Yields the lowest version of the shards that are up, and then each new one.

        A lower version than before counts only when no shard has the one before any more: the trainer rolled back.
        """
        latest: dict[Shard, Policy] = {}
        news = asyncio.Event()
        watchers: dict[Shard, asyncio.Task[None]] = {}
        last: Policy | None = None

        def came_or_went(_: Shard) -> None:
            news.set()

        self._fleet.listeners.append(came_or_went)
        try:
            while True:
                await self._fleet.reachable(Deadline(None))
                for shard in self._fleet.shards:
                    if shard not in watchers:
                        watchers[shard] = asyncio.create_task(self._follow(shard, latest, news))
                await news.wait()
                news.clear()
                known = [latest[shard] for shard in self._fleet.up() if shard in latest]
                if not known or len(known) < len(self._fleet.up()):
                    continue  # a shard that has just come tells soon
                policy = lowest(known)
                rolled_back = last is not None and max(one.version for one in known) < last.version
                if last is None or policy.version > last.version or rolled_back or _other_weights(policy, last):
                    last = policy
                    yield policy
        finally:
            self._fleet.listeners.remove(came_or_went)
            for watcher in watchers.values():
                watcher.cancel()
            await asyncio.gather(*watchers.values(), return_exceptions=True)

    async def _follow(self, shard: Shard, latest: dict[Shard, Policy], news: asyncio.Event) -> None:
        while True:
            with suppress(*GONE):
                if shard.is_up:
                    async with aclosing(shard.client.watch_policy()) as watch:
                        async for policy in watch:
                            latest[shard] = policy
                            news.set()
            news.set()  # it is gone: perhaps the others are enough now
            changed = self._fleet.changed
            if not shard.is_up:
                await changed.wait()
            else:
                await asyncio.sleep(0.1)

    def _came_or_went(self, shard: Shard) -> None:
        if shard.is_up and self._published is not None:
            task = asyncio.create_task(self._catch_up(shard, self._published))
            self._catching_up.add(task)
            task.add_done_callback(self._catching_up.discard)

    async def _catch_up(self, shard: Shard, published: _Published) -> None:
        """Tells the shard, unless it knows, or a newer version has been published meanwhile."""
        while shard.is_up and self._published is published:
            try:
                current = await shard.client.policy(timeout=5.0)
                behind = current.version < published.version
                if behind or (published.rollback and current.version > published.version):
                    await shard.client.set_policy_version(
                        published.version, published.weights, rollback=published.rollback, timeout=5.0
                    )
                return
            except ReplayError:
                await asyncio.sleep(0.1)


def _other_weights(policy: Policy, last: Policy) -> bool:
    return policy.version == last.version and policy.weights != last.weights
