"""Policy and permits: keeps one policy version on all shards, and acquires permits from each shard's share.

The client that publishes a version sends it to every shard. The lowest version of the shards that are up counts. A
generator must never see a version that some shard does not have yet: for that shard, the generator's groups would be
newer than the policy. A shard that was away may have an older version. The other shards keep the newer version, and the
client that published it brings that shard up to date: it sends the version, and any state or rollback that the shard
has missed.

All shards have the same `fresh_groups_per_step`, that of the run. Each shard grants a share of this number, by its
index among the shards that grant permits, so that the shares sum to the number exactly. A shard that stays away, or is
draining, has no index: the other shards grant its share.
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
"""Seconds that a shard must be away before the other shards grant its share. A shorter break changes nothing."""
_SECONDS_PER_ROUND = 2.0
"""Seconds of one round, in which the client requests permits from all shards at once. If several shards grant some, the
client uses the first grant and releases the others."""
_SECONDS_PER_QUESTION = 5.0
"""Seconds in which a shard must answer a request that brings it up to date."""


def shard_index_of(shard: Shard, granting: Sequence[Shard]) -> pb.ShardIndex:
    """The index of the shard among the shards that grant permits; an empty message if it is not one of them.

    Every client orders the shards in the same way: by name.
    """
    if shard not in granting:
        return pb.ShardIndex()
    names = sorted(granting_shard.name for granting_shard in granting)
    return pb.ShardIndex(index=names.index(shard.name), shards=len(names))


class PolicyBoard:
    """Publishes, reads and watches the policy for one client."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._published: pb.SetPolicyVersionRequest | None = None
        """The last version that this client published, as a request that is harmless for shards that have the version
        already; None: this client has published none."""
        self._with_state: pb.SetPolicyVersionRequest | None = None
        """The last request that named a state; None if there is none since the last rollback."""
        self._missed_rollbacks: dict[Shard, pb.SetPolicyVersionRequest] = {}
        """The request of the last rollback, by each shard that has not answered it."""
        self._owed: dict[Shard, pb.SetPolicyVersionRequest] = {}
        """For each shard that had a share of a version but did not answer the request with the version: the last such
        request, with the shard's index. The other shards grant only their own shares of that version, so only this
        shard can grant the rest."""
        self._informed_shards: set[Shard] = set()
        """Shards that have answered the last version, and have not been away since. This client does not send them the
        version again, even if another client has set them back to an older version meanwhile."""
        self._away: set[Shard] = set()
        """Shards that have been away for _AWAY_SECONDS, and are not up to date again. The other shards grant the share
        of these shards too."""
        self._draining: set[Shard] = set()
        """Shards that are draining: they take no more inserts. The other shards grant the share of these shards too."""
        self._divided: list[Shard] = []
        """The shards among which the share was divided when this client last sent indices."""
        self._one_at_a_time = asyncio.Lock()
        """Held while a version is sent. Otherwise a shard could get an older request after a newer one, and could not
        recognise it as the older: after a rollback, the newer request has the lower version."""
        fleet.listeners.append(self._reachability_changed)

    async def publish(self, request: pb.SetPolicyVersionRequest, timeout: float | None) -> Policy:
        """Sends a version to all shards that are up. The other shards get it from this client when they are up again.

        Returns the lowest policy that the shards answer with.
        """
        async with self._one_at_a_time:
            # Bring the shards that are up again up to date first, so that they have a share of this version.
            for shard in [shard for shard in self._away if shard.is_up]:
                with suppress(ReplayError):  # the shard is gone again
                    await self._bring_up_to_date(shard)
            self._divided = self._granting
            answers = await self._fleet.answers(
                "SetPolicyVersion", lambda shard: self._with_index(request, shard), timeout
            )
            self._published = _repeated(request)
            self._informed_shards = set(answers)
            for shard in self._divided:
                if shard not in answers:
                    self._owed[shard] = self._with_index(request, shard)
            if request.rollback:  # a shard that missed this gets the rollback later, and no version before it
                self._owed = {}
                self._missed_rollbacks = {shard: request for shard in self._fleet.shards if shard not in answers}
                self._with_state = None
            elif request.state:
                self._with_state = request
            self._record_draining(answers)
        # Shards that are away, or did not answer, get the version later. Before the first version,
        # `_reachability_changed` did nothing for them.
        for shard in self._fleet.shards:
            if not shard.is_up or shard not in answers:
                self._reachability_changed(shard)
        await self._divide()
        return lowest(answer.policy for answer in answers.values())

    async def watch(self) -> AsyncGenerator[Policy]:
        """Yields the lowest version of the shards that are up, and then each new lowest version.

        After a version, a lower version is yielded only if no shard has the higher one any more: then the trainer has
        rolled back.
        """
        latest: dict[Shard, Policy] = {}  # the last policy that each shard has sent
        news = asyncio.Event()  # set when a shard sends a policy, or becomes reachable or unreachable
        watchers: dict[Shard, asyncio.Task[None]] = {}
        last: Policy | None = None  # the policy that was yielded last

        def reachability_changed(_: Shard) -> None:
            news.set()

        self._fleet.listeners.append(reachability_changed)
        try:
            while True:
                await self._fleet.reachable(Deadline(None))
                for shard in self._fleet.shards:
                    if shard not in watchers:
                        watchers[shard] = asyncio.create_task(self._follow(shard, latest, news))
                await news.wait()
                news.clear()
                up = self._fleet.up()
                known = [latest[shard] for shard in up if shard in latest]
                if not known or len(known) < len(up):
                    continue  # a shard that has just become reachable will soon send its policy, which sets `news`
                policy = lowest(known)
                highest_version = max(policy_of_shard.version for policy_of_shard in known)
                if last is None or _is_news(policy, last, highest_version):
                    last = policy
                    yield policy
        finally:
            self._fleet.listeners.remove(reachability_changed)
            for watcher in watchers.values():
                watcher.cancel()
            await asyncio.gather(*watchers.values(), return_exceptions=True)

    async def _follow(self, shard: Shard, latest: dict[Shard, Policy], news: asyncio.Event) -> None:
        """Writes each policy of one shard into `latest` and sets `news`, as a task that never ends by itself."""
        while True:
            with suppress(*GONE):  # the shard was away for longer than the client's timeout: watch it anew
                async with aclosing(watch_policy(shard)) as watch:
                    async for policy in watch:
                        latest[shard] = policy
                        news.set()
            await asyncio.sleep(0.1)  # an error that comes at once, again and again, must not use a whole core

    def _reachability_changed(self, shard: Shard) -> None:
        """Brings a shard that is up again up to date, or gives away the share of one that stays away, as a task.

        The fleet calls this method when a shard has become reachable or unreachable.
        """
        if not shard.is_up:
            self._informed_shards.discard(shard)
        if self._published is None:  # this client has no version to send
            return
        if shard.is_up:
            self._fleet.spawn(self._inform(shard))
        else:
            self._fleet.spawn(self._note_away(shard))

    async def _note_away(self, shard: Shard) -> None:
        """Gives the share of the shard to the other shards, if it is still away after _AWAY_SECONDS."""
        await asyncio.sleep(_AWAY_SECONDS)
        if not shard.is_up:
            self._away.add(shard)
            await self._divide()

    async def _inform(self, shard: Shard) -> None:
        """Brings a shard that is up again up to date. Tries again after any error, until the client is closed."""

        async def attempt(_: Deadline) -> None:
            async with self._one_at_a_time:
                if shard.is_up and shard not in self._informed_shards:
                    await self._bring_up_to_date(shard)

        with suppress(ReplayError):  # raised only after this client was closed
            await self._fleet.insist(attempt, None, ReplayError)
        await self._divide()

    async def _bring_up_to_date(self, shard: Shard) -> None:
        """Sends the shard the requests that it has missed: a rollback, and each version that is not older than its own.

        The shard counts as away until it has the last version. Until then the other shards grant its share.
        """
        assert self._published is not None
        rollback = self._missed_rollbacks.get(shard)
        if rollback is not None:
            await self._roll_back(shard, rollback)
        current = await shard.ask("GetPolicy", pb.GetPolicyRequest(), _SECONDS_PER_QUESTION)
        # The version of which the shard still has to grant its share, with the index that it had then.
        owed = self._owed.get(shard)
        if owed is not None and current.version < owed.version:
            await self._set_version(shard, owed)
        # The last version that named a state, because later versions may name none.
        with_state = self._with_state
        if with_state is not None:
            lacks_state = current.state != with_state.state and current.version <= with_state.version
            if lacks_state:
                await self._set_version(shard, self._with_index(with_state, shard))
        if current.version <= self._published.version:  # a newer version is of another client, and stays
            await self._set_version(shard, self._with_index(self._published, shard))
        self._away.discard(shard)
        self._informed_shards.add(shard)

    async def _set_version(self, shard: Shard, request: pb.SetPolicyVersionRequest) -> None:
        """Sends the request to one shard."""
        await shard.ask("SetPolicyVersion", request, _SECONDS_PER_QUESTION)

    async def _roll_back(self, shard: Shard, request: pb.SetPolicyVersionRequest) -> None:
        """Sends the rollback to a shard that was away when the trainer rolled back."""
        try:
            await self._set_version(shard, self._with_index(request, shard))
        except InvalidRequestError:  # the shard no longer knows the state, so roll back the version alone
            if not request.state:
                raise
            only_version = pb.SetPolicyVersionRequest(version=request.version, weights=request.weights, rollback=True)
            await self._set_version(shard, self._with_index(only_version, shard))
        self._missed_rollbacks.pop(shard, None)

    async def _divide(self) -> None:
        """Sends the informed shards their new indices, if the set of shards that grant permits has changed."""
        async with self._one_at_a_time:
            published = self._published
            granting = self._granting
            if published is None or granting == self._divided:
                return
            with suppress(ReplayError):  # the next version that is published brings the indices, too
                informed = [shard for shard in self._fleet.up() if shard in self._informed_shards]
                answers = await self._fleet.try_to_ask(
                    "SetPolicyVersion",
                    lambda shard: self._with_index(published, shard),
                    _SECONDS_PER_QUESTION,
                    informed,
                )
                self._record_draining(answers)
                self._divided = granting

    def _record_draining(self, answers: Mapping[Shard, pb.SetPolicyVersionResponse]) -> None:
        """Notes which of the shards that answered are draining."""
        draining = {shard for shard, answer in answers.items() if answer.draining}
        self._draining = (self._draining - answers.keys()) | draining

    @property
    def _granting(self) -> list[Shard]:
        """The shards that grant permits."""
        not_granting = self._away | self._draining
        return [shard for shard in self._fleet.shards if shard not in not_granting]

    def _with_index(self, request: pb.SetPolicyVersionRequest, shard: Shard) -> pb.SetPolicyVersionRequest:
        """The request with the shard's index among the shards that grant permits now."""
        shard_request = pb.SetPolicyVersionRequest(shard_index=shard_index_of(shard, self._granting))
        shard_request.MergeFrom(request)
        return shard_request


def _is_news(policy: Policy, last: Policy, highest_version: int) -> bool:
    """True if `watch`, which has yielded `last`, must yield `policy`, the lowest policy of the shards, now.

    `highest_version` is the highest version of the shards.
    """
    if policy.version > last.version:
        return True
    if highest_version < last.version:  # the trainer rolled back
        return True
    has_new_weights = policy.weights != last.weights
    return policy.version == last.version and has_new_weights


def _repeated(request: pb.SetPolicyVersionRequest) -> pb.SetPolicyVersionRequest:
    """The request in a form for shards that may have got it before: it rolls no shard back a second time."""
    # The state of a rollback names the checkpoint to roll back to. Without `rollback` it would name a new checkpoint.
    state = "" if request.rollback else request.state
    return pb.SetPolicyVersionRequest(version=request.version, weights=request.weights, state=state)


class PermitOffice:
    """Acquires and releases permits for one client."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._turns = itertools.count()
        """Numbers the requests. A request tries the shards that are up in turn, beginning with the shard of its
        number."""

    async def acquire(self, request: pb.AcquirePermitsRequest, seconds: float | None) -> PermitGrant:
        """Permits of one shard: the next in turn that has free permits, or else the first that can grant some later."""

        async def attempt(deadline: Deadline) -> PermitGrant:
            """Asks each shard in turn for free permits, and then waits for all shards together, for one round."""
            up = self._fleet.up()
            begin = next(self._turns) % len(up)
            for shard in up[begin:] + up[:begin]:
                with suppress(DeadlineExceededError, *GONE):  # the shard has no free permits, or is gone
                    return await self._ask(shard, request, 0.0)  # 0: the shard answers at once
            return await self._race(up, request, deadline.within(_SECONDS_PER_ROUND))

        # DeadlineExceededError: no shard has granted permits in this round, so another round follows.
        return await self._fleet.insist(attempt, seconds, DeadlineExceededError)

    async def release(self, grant: PermitGrant, request: pb.ReleasePermitsRequest, timeout: float | None) -> int:
        """Releases permits at the shard that granted them, and returns their number.

        Returns 0 if that shard is away: the permits then expire. A grant without the name of a shard is from a client
        of one server, so all shards are tried.
        """
        granting = [shard for shard in self._fleet.shards if grant.shard in (shard.name, "")]
        answers = await self._fleet.answers("ReleasePermits", once(request), timeout, granting)
        return sum(answer.released for answer in answers.values())

    async def _ask(self, shard: Shard, request: pb.AcquirePermitsRequest, timeout: float) -> PermitGrant:
        """Permits of one shard. Raises DeadlineExceededError if the shard can grant none within `timeout` seconds."""
        # This index counts only until a trainer has published a version, with indices among the granting shards.
        shard_index = shard_index_of(shard, self._fleet.shards)
        shard_request = once(pb.AcquirePermitsRequest(count=request.count, timeout=timeout, shard_index=shard_index))
        return grant_of(await shard.ask("AcquirePermits", shard_request, timeout), shard.name)

    async def _race(self, shards: list[Shard], request: pb.AcquirePermitsRequest, seconds: float) -> PermitGrant:
        """The first grant of several shards. Releases later grants. Raises the last error if no shard grants any."""
        requests = [asyncio.create_task(self._ask(shard, request, seconds)) for shard in shards]
        error: ReplayError = self._fleet.unavailable()
        first = None
        try:
            for next_grant in asyncio.as_completed(requests):
                try:
                    first = await next_grant
                    return first
                except (DeadlineExceededError, *GONE) as failure:
                    error = failure
            raise error
        finally:
            # Cancel no request: a shard may have granted permits already, and only its answer has their id.
            for task in requests:
                self._fleet.spawn(self._release_unless_first(task, first))

    async def _release_unless_first(self, task: asyncio.Task[PermitGrant], first: PermitGrant | None) -> None:
        """Waits for a grant, and releases it unless it is `first`, the grant that `_race` returned."""
        with suppress(ReplayError):
            grant = await task
            if grant is not first:
                await self.release(grant, pb.ReleasePermitsRequest(grant=grant.id), self._fleet.timeout)
