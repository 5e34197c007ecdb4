"""Policy and permits: one policy version on all shards, and permits from the share of each.

Every shard gets a version, and the lowest confirmed one counts. A generator must never see a version that some shard
does not have yet: that shard would take its groups for newer than the policy. A shard that comes back with an older
version does not take the others back with it: the client that published a version brings such a shard up to date. It
also names the state to it that the shard has missed, and takes it back where the trainer went back meanwhile.

All shards have the run's `fresh_groups_per_step`, and each grants its share of it, by its index among those that grant.
So the shares sum to it exactly. A shard that stays away, or drains, has no index: the others grant its share.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress

from replay_client.connection import watch_policy
from replay_client.errors import GONE, DeadlineExceededError, InvalidRequestError, ReplayError
from replay_client.records import PermitGrant, Policy, grant_of
from replay_client.requests import once
from replay_client.shards.fleet import Fleet, Shard
from replay_client.shards.merging import lowest
from replay_client.waits import Deadline
from replay_protos import replay_pb2 as pb

_AWAY_SECONDS = 5.0
"""Seconds after which the others make up for a shard: a connection that breaks for a moment changes nothing."""
_SECONDS_PER_ROUND = 2.0
"""Seconds for which all shards are asked for permits at once. What more than one of them grants then goes back."""


def shard_index_of(shard: Shard, granting: Sequence[Shard]) -> pb.ShardIndex:
    """The index of the shard among those that grant permits. Every client orders them in the same way: by name."""
    names = sorted(each.name for each in granting)
    return pb.ShardIndex(index=names.index(shard.name), shards=len(names)) if shard in granting else pb.ShardIndex()


class PolicyBoard:
    """Publishes, reads and watches the policy for one client."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._published: pb.SetPolicyVersionRequest | None = None
        """The last version, for shards that may have it already."""
        self._named: pb.SetPolicyVersionRequest | None = None
        """What named the last state, unless the trainer has gone back since."""
        self._missed: dict[Shard, pb.SetPolicyVersionRequest] = {}
        """The last rollback, of the shards that have not heard of it."""
        self._owed: dict[Shard, pb.SetPolicyVersionRequest] = {}
        """The last version of which a share was for a shard that could not be told, with its place. Only this shard can
        make up for it: the others have granted theirs."""
        self._informed_shards: set[Shard] = set()
        """Shards that have heard of what was published last, and have not been gone since. If another client has taken
        them back meanwhile, they stay there."""
        self._away: set[Shard] = set()
        """Shards for which the others make up."""
        self._draining: set[Shard] = set()
        """The same, because they take no more inserts."""
        self._divided: list[Shard] = []
        """The shards that granted permits when all were told their places last."""
        self._one_at_a_time = asyncio.Lock()
        """An older version must not be told after a newer one, which may be lower."""
        fleet.listeners.append(self._came_or_went)

    async def publish(self, request: pb.SetPolicyVersionRequest, timeout: float | None) -> Policy:
        """Tells all shards that are up. The others get it when they come back, as long as this client lives."""
        async with self._one_at_a_time:
            for shard in [shard for shard in self._away if shard.is_up]:
                with suppress(ReplayError):  # it is gone again
                    await self._bring_up_to_date(shard)
            self._divided = self._granting
            answers = await self._fleet.answers("SetPolicyVersion", lambda shard: self._placed(request, shard), timeout)
            self._published = _repeated(request)
            self._informed_shards = set(answers)
            self._owed |= {shard: self._placed(request, shard) for shard in self._divided if shard not in answers}
            if request.rollback:
                self._owed = {}
                self._missed = {shard: request for shard in self._fleet.shards if shard not in answers}
                self._named = None
            elif request.state:
                self._named = request
            self._record_draining(answers)
        for shard in self._fleet.shards:
            if not shard.is_up or shard not in answers:
                self._came_or_went(shard)
        await self._divide()
        return lowest(answer.policy for answer in answers.values())

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
                renamed = last is not None and policy.version == last.version and policy.weights != last.weights
                if last is None or policy.version > last.version or rolled_back or renamed:
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
                async with aclosing(watch_policy(shard)) as watch:
                    async for policy in watch:
                        latest[shard] = policy
                        news.set()
            await asyncio.sleep(0.1)

    def _came_or_went(self, shard: Shard) -> None:
        if not shard.is_up:
            self._informed_shards.discard(shard)
        if self._published is not None:
            self._fleet.spawn(self._came_back(shard) if shard.is_up else self._stays_away(shard))

    async def _stays_away(self, shard: Shard) -> None:
        await asyncio.sleep(_AWAY_SECONDS)
        if not shard.is_up:
            self._away.add(shard)
            await self._divide()

    async def _came_back(self, shard: Shard) -> None:
        async def attempt(_: Deadline) -> None:
            async with self._one_at_a_time:
                if shard.is_up and shard not in self._informed_shards:
                    await self._bring_up_to_date(shard)

        with suppress(ReplayError):  # this client is closed
            await self._fleet.insist(attempt, None, ReplayError)
        await self._divide()

    async def _bring_up_to_date(self, shard: Shard) -> None:
        """Tells the shard the version and its place, unless it has a later version.

        It counts as away until it has heard of it: of versions that it missed, the others have granted its share.
        """
        assert self._published is not None
        if (rollback := self._missed.get(shard)) is not None:
            await self._roll_back(shard, rollback)
        current = await shard.ask("GetPolicy", pb.GetPolicyRequest(), 5.0)
        owed = self._owed.get(shard)
        if owed is not None and current.version < owed.version:
            await shard.ask("SetPolicyVersion", owed, 5.0)
        named = self._named
        if named is not None and current.state != named.state and current.version <= named.version:
            await shard.ask("SetPolicyVersion", self._placed(named, shard), 5.0)
        if current.version <= self._published.version:
            await shard.ask("SetPolicyVersion", self._placed(self._published, shard), 5.0)
        self._away.discard(shard)
        self._informed_shards.add(shard)

    async def _roll_back(self, shard: Shard, request: pb.SetPolicyVersionRequest) -> None:
        """Takes a shard back that was away when the trainer went back."""
        try:
            await shard.ask("SetPolicyVersion", self._placed(request, shard), 5.0)
        except InvalidRequestError:  # it does not know the state any more
            if not request.state:
                raise
            only_version = pb.SetPolicyVersionRequest(version=request.version, weights=request.weights, rollback=True)
            await shard.ask("SetPolicyVersion", self._placed(only_version, shard), 5.0)
        self._missed.pop(shard, None)

    async def _divide(self) -> None:
        """Tells all shards their places, if these have changed."""
        async with self._one_at_a_time:
            published, granting = self._published, self._granting
            if published is None or granting == self._divided:
                return
            with suppress(ReplayError):  # the next version comes with the places, too
                informed = [shard for shard in self._fleet.up() if shard in self._informed_shards]
                answers = await self._fleet.try_to_ask(
                    "SetPolicyVersion", lambda shard: self._placed(published, shard), 5.0, informed
                )
                self._record_draining(answers)
                self._divided = granting

    def _record_draining(self, answers: Mapping[Shard, pb.SetPolicyVersionResponse]) -> None:
        self._draining = self._draining - answers.keys() | {
            shard for shard, answer in answers.items() if answer.draining
        }

    @property
    def _granting(self) -> list[Shard]:
        return [shard for shard in self._fleet.shards if shard not in self._away | self._draining]

    def _placed(self, request: pb.SetPolicyVersionRequest, shard: Shard) -> pb.SetPolicyVersionRequest:
        placed = pb.SetPolicyVersionRequest(shard_index=shard_index_of(shard, self._granting))
        placed.MergeFrom(request)
        return placed


def _repeated(request: pb.SetPolicyVersionRequest) -> pb.SetPolicyVersionRequest:
    """The request for shards that may have heard of it. It takes none of them back once more."""
    state = "" if request.rollback else request.state
    return pb.SetPolicyVersionRequest(version=request.version, weights=request.weights, state=state)


class PermitOffice:
    """Acquires and releases permits for one client."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._turn = itertools.count()

    async def acquire(self, request: pb.AcquirePermitsRequest, seconds: float | None) -> PermitGrant:
        """Permits of one shard: of the next in turn that has them, or of the first that gets them."""

        async def attempt(deadline: Deadline) -> PermitGrant:
            up = self._fleet.up()
            begin = next(self._turn) % len(up)
            for shard in up[begin:] + up[:begin]:
                with suppress(DeadlineExceededError, *GONE):
                    return await self._ask(shard, request, 0.0)
            return await self._race(up, request, deadline.within(_SECONDS_PER_ROUND))

        return await self._fleet.insist(attempt, seconds, DeadlineExceededError)

    async def release(self, grant: PermitGrant, request: pb.ReleasePermitsRequest, timeout: float | None) -> int:
        """Releases permits at the shard that granted them; 0 where that shard is gone, and they end by themselves."""
        granted = [shard for shard in self._fleet.shards if grant.shard in (shard.name, "")]
        answers = await self._fleet.answers("ReleasePermits", once(request), timeout, granted)
        return sum(answer.released for answer in answers.values())

    async def _ask(self, shard: Shard, request: pb.AcquirePermitsRequest, timeout: float) -> PermitGrant:
        shard_index = shard_index_of(shard, self._fleet.shards)
        shard_request = once(pb.AcquirePermitsRequest(count=request.count, timeout=timeout, shard_index=shard_index))
        return grant_of(await shard.ask("AcquirePermits", shard_request, timeout), shard.name)

    async def _race(self, shards: list[Shard], request: pb.AcquirePermitsRequest, seconds: float) -> PermitGrant:
        """The first grant. Later ones go back. Raises the error of one shard if there is none."""
        asking = [asyncio.create_task(self._ask(shard, request, seconds)) for shard in shards]
        error: ReplayError = self._fleet.unavailable()
        first = None
        try:
            for next_grant in asyncio.as_completed(asking):
                try:
                    first = await next_grant
                    return first
                except (DeadlineExceededError, *GONE) as failure:
                    error = failure
            raise error
        finally:
            for task in asking:
                self._fleet.spawn(self._release_other(task, first))

    async def _release_other(self, asking: asyncio.Task[PermitGrant], first: PermitGrant | None) -> None:
        with suppress(ReplayError):
            grant = await asking
            if grant is not first:
                await self.release(grant, pb.ReleasePermitsRequest(grant=grant.id), self._fleet.timeout)
