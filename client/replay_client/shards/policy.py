"""Policy: one policy version on several shards. Every shard gets it, and the lowest confirmed one counts.

A generator must never see a version that some shard does not have yet: that shard would take its groups for newer than
the policy. So the lowest version counts. A shard that comes back with an older one does not take the others back with
it: the client that published a version brings such a shard up to date.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from replay_client.aio import AsyncReplayClient
from replay_client.errors import ReplayError
from replay_client.records import Policy, policy_of
from replay_client.requests import message_of
from replay_client.shards.fleet import GONE, Deadline, Fleet
from replay_client.shards.merging import lowest
from replay_client.shards.shard import Shard
from replay_protos import replay_pb2 as pb

_AWAY_SECONDS = 5.0
"""Seconds after which the others make up for a shard: a connection that breaks for a moment changes nothing."""


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
        self._away: set[Shard] = set()
        """Shards for which the others make up."""
        self._groups: dict[Shard, int] = {}
        """groups_per_step of the shards that have told it; 0: without admission."""
        self._telling: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()
        """An older version must not be told after a newer one, which may be lower."""
        fleet.listeners.append(self._came_or_went)

    async def publish(self, version: int, weights: str, rollback: bool, deadline: Deadline) -> Policy:
        """Tells all shards that are up. The others get it when they come back, as long as this client lives."""
        published = _Published(version, weights, rollback)
        async with self._one_at_a_time:
            for shard in [shard for shard in self._away if shard.is_up]:
                with suppress(ReplayError):  # it is gone again
                    await self._bring_up_to_date(shard)
            share = self._share
            answers = await self._fleet.ask(lambda client: _set(client, published, share, deadline.seconds), deadline)
            self._published = published
        for shard in self._fleet.shards:
            if shard not in self._groups or not shard.is_up or shard not in answers:
                self._came_or_went(shard)
        if share != self._share:  # a shard came or went meanwhile
            await self._tell_shares()
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
        if self._published is not None:
            work = self._came_back(shard) if shard.is_up else self._stays_away(shard)
            task = asyncio.create_task(work)
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _stays_away(self, shard: Shard) -> None:
        await asyncio.sleep(_AWAY_SECONDS)
        if not shard.is_up and shard not in self._away:
            self._away.add(shard)
            await self._tell_shares()

    async def _came_back(self, shard: Shard) -> None:
        while shard.is_up:
            try:
                admission = (await shard.client.server_info(tables=[], timeout=5.0)).admission
                self._groups[shard] = admission.groups_per_step if admission else 0
                async with self._one_at_a_time:
                    await self._bring_up_to_date(shard)
                break
            except ReplayError:
                await asyncio.sleep(0.1)
        await self._tell_shares()

    async def _bring_up_to_date(self, shard: Shard) -> None:
        """Tells the shard the version, if it has another one. It counts as away until it has heard of it."""
        published = self._published
        assert published is not None
        current = await shard.client.policy(timeout=5.0)
        behind = current.version < published.version
        if behind or (published.rollback and current.version > published.version):
            # For versions that it missed, the others have granted its share.
            await _set(shard.client, published, 0.0 if behind and shard in self._away else self._share, 5.0)
        self._away.discard(shard)

    async def _tell_shares(self) -> None:
        async with self._one_at_a_time:
            assert self._published is not None
            # No rollback: it would take the shards that have done it back once more.
            published, share = replace(self._published, rollback=False), self._share
            up = [shard for shard in self._fleet.up() if self._groups.get(shard)]
            with suppress(ReplayError):  # the next version comes with the share, too
                await self._fleet.try_to_ask(lambda client: _set(client, published, share, 5.0), up)

    @property
    def _share(self) -> float:
        """The factor by which each shard that is up multiplies its groups_per_step."""
        known = [groups for groups in self._groups.values() if groups]
        if not known or not self._away:
            return 1.0
        typical = sum(known) / len(known)  # of a shard that this client has never reached
        total = sum(self._groups.get(shard, typical) for shard in self._fleet.shards)
        up = sum(self._groups.get(shard, typical) for shard in self._fleet.shards if shard not in self._away)
        return total / up if up else 1.0


async def _set(client: AsyncReplayClient, published: _Published, share: float, timeout: float | None) -> Policy:
    request = message_of(
        pb.SetPolicyVersionRequest,
        version=published.version,
        weights=published.weights,
        rollback=published.rollback,
        share=share,
    )
    return policy_of(await client.connection.unary(client.connection.stub.SetPolicyVersion, request, timeout))


def _other_weights(policy: Policy, last: Policy) -> bool:
    return policy.version == last.version and policy.weights != last.weights
