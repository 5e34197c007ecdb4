"""Policy and permits: keeps one policy version on all shards, and acquires permits from each shard's share.

The client that publishes a version sends it to every shard. Readers of the policy get the lowest version of the shards
that are up. A generator must never see a version that some shard does not have yet, because the generator's groups
would then be newer than the policy of that shard.

A shard that was away may have an older version. The other shards keep the newer version. The client that published the
newer version sends it to that shard, with any state or rollback that the shard has missed.

All shards have the same setting `fresh_groups_per_step`, which holds for the whole run. Each shard grants permits for a
share of these groups. It computes its share from its index among the shards that grant permits, so the shares sum to
exactly `fresh_groups_per_step`. A shard that stays away, or is draining, has no index, so the other shards grant its
share.
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
"""Seconds that a shard must be away before the other shards grant its share. A shorter break changes no share."""
_SECONDS_PER_ROUND = 2.0
"""Seconds of one round, in which the client requests permits from all shards at once. If several shards grant permits,
the client uses the first grant and releases the others."""
_SECONDS_PER_QUESTION = 5.0
"""Seconds in which a shard must answer each request that brings it up to date or gives it a new index."""


def shard_index_of(shard: Shard, granting: Sequence[Shard]) -> pb.ShardIndex:
    """The index of `shard` among `granting`, the shards that grant permits; an empty message if it is not one of them.

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
        """The request with the last version that this client published; None if it has published none. It does no
        harm to send this request to a shard that has the version already."""
        self._request_with_state: pb.SetPolicyVersionRequest | None = None
        """The last request of this client that named a state; None if it has made none since its last rollback."""
        self._missed_rollbacks: dict[Shard, pb.SetPolicyVersionRequest] = {}
        """For each shard that has not answered the last rollback: the request of this rollback."""
        self._owed: dict[Shard, pb.SetPolicyVersionRequest] = {}
        """For each shard that had a share of a version but did not answer the request with this version: the last such
        request, with the index that the shard had. The other shards grant only their own shares of that version, so
        only this shard can grant the rest."""
        self._informed_shards: set[Shard] = set()
        """Shards that have answered the last version, and have not been away since. This client does not send them the
        version again, even if another client has set them back to an older version since then."""
        self._away: set[Shard] = set()
        """Shards that were away for _AWAY_SECONDS, and that this client has not brought up to date since then. The
        other shards grant the share of these shards too."""
        self._draining: set[Shard] = set()
        """Shards that are draining: they take no more inserts. The other shards grant the share of these shards too."""
        self._shards_with_index: list[Shard] = []
        """The shards that had an index when this client last sent indices, so that they share fresh_groups_per_step."""
        self._one_at_a_time = asyncio.Lock()
        """The lock that is held while a version is sent, so that no shard gets an older request after a newer one. The
        shard could not recognise the older request by its version, because after a rollback the newer request has the
        lower version."""
        fleet.listeners.append(self._reachability_changed)

    async def publish(self, request: pb.SetPolicyVersionRequest, timeout: float | None) -> Policy:
        """Sends a version to all shards that are up. The other shards get it from this client when they are up again.

        Returns the lowest policy that the shards answer with.
        """
        async with self._one_at_a_time:
            # First bring up to date the shards that were away and are back, so that they have a share of this version.
            back = [shard for shard in self._away if shard.is_up]
            for shard in back:
                with suppress(ReplayError):  # the shard is gone again
                    await self._bring_up_to_date(shard)
            self._shards_with_index = self._granting_shards
            answers = await self._fleet.answers(
                "SetPolicyVersion", lambda shard: self._with_index(request, shard), timeout
            )
            self._published = _repeatable(request)
            self._informed_shards = set(answers)
            for shard in self._shards_with_index:
                if shard not in answers:
                    self._owed[shard] = self._with_index(request, shard)
            if request.rollback:
                # A shard that missed the rollback gets it later. It gets no request from before the rollback any more.
                self._owed = {}
                self._missed_rollbacks = {shard: request for shard in self._fleet.shards if shard not in answers}
                self._request_with_state = None
            elif request.state:
                self._request_with_state = request
            self._record_draining(answers)
        # Shards that are away, or did not answer, get the version later, by a task that `_reachability_changed` starts.
        # The fleet has called this method too, but before the first version the method did nothing.
        for shard in self._fleet.shards:
            if not shard.is_up or shard not in answers:
                self._reachability_changed(shard)
        await self._send_new_indices()
        return lowest(answer.policy for answer in answers.values())

    async def watch(self) -> AsyncGenerator[Policy]:
        """Yields the lowest version of the shards that are up, and then each new lowest version.

        Yields a lower version than before only if the trainer has rolled back: then no shard has the last yielded
        version, or a higher one, any more.
        """
        latest: dict[Shard, Policy] = {}  # the last policy that each shard has sent
        news = asyncio.Event()  # set when a shard sends a policy, or becomes reachable or unreachable
        watchers: dict[Shard, asyncio.Task[None]] = {}
        last_yielded: Policy | None = None

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
                policies = [latest[shard] for shard in up if shard in latest]
                if not policies or len(policies) < len(up):
                    # Either no shard is up, or a shard that has just become reachable has not sent its policy yet.
                    # `news` is set when this changes.
                    continue
                policy = lowest(policies)
                highest_version = max(policy_of_shard.version for policy_of_shard in policies)
                if last_yielded is None or _is_news(policy, last_yielded, highest_version):
                    last_yielded = policy
                    yield policy
        finally:
            self._fleet.listeners.remove(reachability_changed)
            for watcher in watchers.values():
                watcher.cancel()
            await asyncio.gather(*watchers.values(), return_exceptions=True)

    async def _follow(self, shard: Shard, latest: dict[Shard, Policy], news: asyncio.Event) -> None:
        """Writes each policy that the shard sends into `latest`, and sets `news`. Runs as a task until cancelled."""
        while True:
            with suppress(*GONE):  # the shard was away for longer than the client's timeout: watch it anew
                async with aclosing(watch_policy(shard)) as watch:
                    async for policy in watch:
                        latest[shard] = policy
                        news.set()
            await asyncio.sleep(0.1)  # without this pause, a shard that always fails at once would keep a core busy

    def _reachability_changed(self, shard: Shard) -> None:
        """Starts a task for a shard that has become reachable or unreachable.

        If the shard is reachable, the task brings it up to date. If the shard stays unreachable, the task gives its
        share to the other shards. The fleet calls this method.
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
            await self._send_new_indices()

    async def _inform(self, shard: Shard) -> None:
        """Brings up to date a shard that has become reachable.

        Tries again after any error, until the client is closed. Then sends new indices, if the shard has a share again.
        """

        async def attempt(_: Deadline) -> None:
            async with self._one_at_a_time:
                if shard.is_up and shard not in self._informed_shards:
                    await self._bring_up_to_date(shard)

        no_limit = None
        with suppress(ReplayError):  # raised only after this client was closed
            await self._fleet.insist(attempt, no_limit, ReplayError)
        await self._send_new_indices()

    async def _bring_up_to_date(self, shard: Shard) -> None:
        """Sends the shard the requests that it has missed: a rollback, and versions not older than the shard's own.

        A shard in `_away` stays there until it has the last version. Until then the other shards grant its share.
        """
        assert self._published is not None
        rollback = self._missed_rollbacks.get(shard)
        if rollback is not None:
            await self._roll_back(shard, rollback)
        current = await shard.ask("GetPolicy", pb.GetPolicyRequest(), _SECONDS_PER_QUESTION)
        # The version of which the shard still has to grant its share, with the index that the shard had then.
        owed = self._owed.get(shard)
        if owed is not None and current.version < owed.version:
            await self._set_version(shard, owed)
        # The last version that named a state. The shard needs this version too, because later ones may name no state.
        with_state = self._request_with_state
        if with_state is not None:
            lacks_state = current.state != with_state.state and current.version <= with_state.version
            if lacks_state:
                await self._set_version(shard, self._with_index(with_state, shard))
        if current.version <= self._published.version:  # otherwise another client has published a newer version
            await self._set_version(shard, self._with_index(self._published, shard))
        self._away.discard(shard)
        self._informed_shards.add(shard)

    async def _set_version(self, shard: Shard, request: pb.SetPolicyVersionRequest) -> None:
        """Sends the request to one shard."""
        await shard.ask("SetPolicyVersion", request, _SECONDS_PER_QUESTION)

    async def _roll_back(self, shard: Shard, request: pb.SetPolicyVersionRequest) -> None:
        """Sends the rollback to a shard that missed it.

        If the shard no longer knows the state of the rollback, rolls back only its version.
        """
        try:
            await self._set_version(shard, self._with_index(request, shard))
        except InvalidRequestError:
            if not request.state:
                raise
            # The shard no longer knows the state.
            only_version = pb.SetPolicyVersionRequest(version=request.version, weights=request.weights, rollback=True)
            await self._set_version(shard, self._with_index(only_version, shard))
        self._missed_rollbacks.pop(shard, None)

    async def _send_new_indices(self) -> None:
        """Sends the informed shards their new indices, if the shards that grant permits have changed."""
        async with self._one_at_a_time:
            published = self._published
            granting = self._granting_shards
            if published is None or granting == self._shards_with_index:
                return
            with suppress(ReplayError):  # after an error, the shards get their indices with the next version
                informed = [shard for shard in self._fleet.up() if shard in self._informed_shards]
                answers = await self._fleet.try_to_ask(
                    "SetPolicyVersion",
                    lambda shard: self._with_index(published, shard),
                    _SECONDS_PER_QUESTION,
                    informed,
                )
                self._record_draining(answers)
                self._shards_with_index = granting

    def _record_draining(self, answers: Mapping[Shard, pb.SetPolicyVersionResponse]) -> None:
        """Notes which of the shards that answered are draining."""
        draining = {shard for shard, answer in answers.items() if answer.draining}
        draining_before = self._draining - answers.keys()  # shards that did not answer now
        self._draining = draining_before | draining

    @property
    def _granting_shards(self) -> list[Shard]:
        """The shards that grant permits."""
        not_granting = self._away | self._draining
        return [shard for shard in self._fleet.shards if shard not in not_granting]

    def _with_index(self, request: pb.SetPolicyVersionRequest, shard: Shard) -> pb.SetPolicyVersionRequest:
        """The request with the shard's index among the shards that grant permits now."""
        shard_request = pb.SetPolicyVersionRequest(shard_index=shard_index_of(shard, self._granting_shards))
        shard_request.MergeFrom(request)
        return shard_request


def _is_news(policy: Policy, last: Policy, highest_version: int) -> bool:
    """True if `watch` must yield `policy`, which is now the lowest policy of the shards.

    `last` is the policy that `watch` yielded last, and `highest_version` the highest version of the shards now.
    """
    if policy.version > last.version:
        return True
    if highest_version < last.version:  # the trainer rolled back
        return True
    is_same_version = policy.version == last.version
    return is_same_version and policy.weights != last.weights


def _repeatable(request: pb.SetPolicyVersionRequest) -> pb.SetPolicyVersionRequest:
    """A copy of the request, without the rollback, that may be sent to a shard more than once."""
    # In a request with `rollback`, `state` is the state to go back to. In a request without `rollback`, the same
    # `state` would be a new state of the trainer, so leave it out.
    state = "" if request.rollback else request.state
    return pb.SetPolicyVersionRequest(version=request.version, weights=request.weights, state=state)


class PermitOffice:
    """Acquires and releases permits for one client."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._turns = itertools.count()
        """Numbers the requests. The number of a request decides which shard it asks first, so that consecutive requests
        begin with different shards."""

    async def acquire(self, request: pb.AcquirePermitsRequest, seconds: float | None) -> PermitGrant:
        """Acquires permits from one shard.

        Takes the first shard with free permits, beginning with the shard whose turn it is. If no shard has any, takes
        the first shard that can grant some later.
        """

        async def attempt(deadline: Deadline) -> PermitGrant:
            """Asks each shard in turn for free permits. If none has any, waits for all together, for one round."""
            up = self._fleet.up()
            begin = next(self._turns) % len(up)
            for shard in up[begin:] + up[:begin]:
                with suppress(DeadlineExceededError, *GONE):  # the shard has no free permits, or is gone
                    return await self._ask(shard, request, timeout=0.0)  # 0: the shard answers at once
            return await self._race(up, request, deadline.within(_SECONDS_PER_ROUND))

        # DeadlineExceededError: no shard has granted permits in this round, so another round follows.
        return await self._fleet.insist(attempt, seconds, DeadlineExceededError)

    async def release(self, grant: PermitGrant, request: pb.ReleasePermitsRequest, timeout: float | None) -> int:
        """Releases permits at the shard that granted them, and returns the number of permits that it released.

        If that shard is away, returns 0, and the permits expire later. A grant without the name of a shard is from a
        client of one server, so all shards are tried.
        """
        possible_shards = list(self._fleet.shards)
        if grant.shard:
            possible_shards = [shard for shard in possible_shards if shard.name == grant.shard]
        answers = await self._fleet.answers("ReleasePermits", once(request), timeout, possible_shards)
        return sum(answer.released for answer in answers.values())

    async def _ask(self, shard: Shard, request: pb.AcquirePermitsRequest, timeout: float) -> PermitGrant:
        """Requests permits from one shard.

        Raises DeadlineExceededError if the shard can grant none within `timeout` seconds.
        """
        # The shard uses this index among all shards only until a trainer publishes a version. The request with the
        # version brings the shard's index among the shards that grant permits.
        shard_index = shard_index_of(shard, self._fleet.shards)
        shard_request = once(pb.AcquirePermitsRequest(count=request.count, timeout=timeout, shard_index=shard_index))
        answer = await shard.ask("AcquirePermits", shard_request, timeout)
        return grant_of(answer, shard.name)

    async def _race(self, shards: list[Shard], request: pb.AcquirePermitsRequest, seconds: float) -> PermitGrant:
        """Requests permits from several shards at once, and returns the first grant.

        Releases later grants. Raises the last error if no shard grants permits.
        """
        tasks = [asyncio.create_task(self._ask(shard, request, seconds)) for shard in shards]
        last_error: ReplayError = self._fleet.unavailable()
        first_grant = None
        try:
            for next_grant in asyncio.as_completed(tasks):
                try:
                    first_grant = await next_grant
                    return first_grant
                except (DeadlineExceededError, *GONE) as error:
                    last_error = error
            raise last_error
        finally:
            # Cancel no request, because a shard may have granted permits already, and only its answer has the id of
            # the grant.
            for task in tasks:
                self._fleet.spawn(self._release_unless_first(task, first_grant))

    async def _release_unless_first(self, task: asyncio.Task[PermitGrant], first_grant: PermitGrant | None) -> None:
        """Waits for the grant of a task of `_race`, and releases it unless `_race` has returned it as `first_grant`."""
        with suppress(ReplayError):
            grant = await task
            if grant is not first_grant:
                await self.release(grant, pb.ReleasePermitsRequest(grant=grant.id), self._fleet.timeout)
