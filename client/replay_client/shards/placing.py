"""Placing: chooses the shard of an item, and finds the item there again.

A key belongs to one shard, by rendezvous hashing: each shard has a score for each key, and the key belongs to the shard
with the highest score, its owner. Every client computes the same owner, without a question to any server. If a shard is
added to the N shards or removed, only about 1 of N keys gets another owner.

The owner of its key holds an item, unless the owner was away at the insert, or another shard granted the permit. So a
change by key is sent to the owners first, and then to all other shards for the keys that the owners lack.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from google.protobuf.message import Message

from replay_client.connection import Connection
from replay_client.errors import (
    GONE,
    DeadlineExceededError,
    InvalidRequestError,
    LeaseEndedError,
    ReplayError,
    ServerClosedError,
    ServerUnavailableError,
    ShardDrainingError,
)
from replay_client.records import MutationResult
from replay_client.requests import FIRST_KEY, LAST_KEY, Item, once, unchanged_row
from replay_client.shards.fleet import Fleet, Shard
from replay_client.waits import Deadline
from replay_protos import replay_pb2 as pb

logger = logging.getLogger(__name__)

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]

_MOST_REMEMBERED = 1 << 20
"""The most keys whose shard a client remembers after an insert without an answer. The oldest are forgotten first."""
_BLOCK = 256
"""The number of successive keys whose owners are computed at once. Computing the owner of one key takes 20 us."""
_SPLITMIX_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""The shift and the factor of each round of splitmix64."""


class Rendezvous:
    """Rendezvous hashing: each shard has a score for each key, and the shard with the highest score owns the key.

    A score depends only on the key and the name of the shard. So if a shard is added or removed, only its own keys
    change their owner.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """`names` are the names of the N shards. The methods return indices of `names`."""
        self._seeds = np.array([xxhash.xxh64_intdigest(name.encode()) for name in names], dtype=np.uint64)
        self._block: tuple[int, list[int]] = -1, []
        """The number of a block of successive keys (key // _BLOCK), and the owners of its keys. Any thread may replace
        the pair."""

    def owners(self, keys: Keys) -> Rows:
        """The index of the shard to which each of `keys` (K,) belongs, as (K,)."""
        owners = np.asarray(np.argmax(self._scores(keys), axis=1), dtype=np.int64)
        assert owners.shape == keys.shape, (owners.shape, keys.shape)
        return owners

    def owner(self, key: int) -> int:
        """As `owners`, for one key. Fast for successive keys, as a KeySequence makes them."""
        number, owners = self._block
        if key // _BLOCK != number:
            number = key // _BLOCK
            first_key = np.uint64(key - key % _BLOCK)
            owners = self.owners(np.arange(_BLOCK, dtype=np.uint64) + first_key).tolist()
            self._block = number, owners
        return owners[key % _BLOCK]

    def order(self, key: int) -> list[int]:
        """The indices of all shards for one key, from the highest score to the lowest. The owner is the first."""
        scores = self._scores(np.array([key], dtype=np.uint64))[0]
        order: list[int] = np.argsort(scores)[::-1].tolist()
        return order

    def _scores(self, keys: Keys) -> Keys:
        """The scores (K, N) of `keys` (K,) at the N shards: splitmix64 of key xor seed of the shard.

        The products wrap around at 64 bits, as splitmix64 defines them.
        """
        mixed = keys[:, None] ^ self._seeds[None, :]
        for shift, factor in _SPLITMIX_ROUNDS:
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def is_random_key(key: int) -> bool:
    """True if a KeySequence made this key at random, so that no other process can have tried to insert it before."""
    return FIRST_KEY <= key <= LAST_KEY


class Placement:
    """Chooses the shard for each item of one client. A key that a shard may already have goes to no other shard."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tried: dict[int, tuple[Shard, bool]] = {}
        """The inserts that may or may not have succeeded, by the key: the shard that may have the item, and the item's
        `moved`."""
        self._ranked: tuple[Rendezvous, Sequence[Shard]] = (Rendezvous([]), ())
        """The result of the last `_ranking`."""
        self._passed_over: set[Shard] = set()
        """Shards that granted permits and are away. The log already has a line about each of them."""

    def shard_for(self, item: Item) -> Shard:
        """The shard for an insert, by the first rule that holds.

        1. The shard on which this client has tried the key before: it may have the item.
        2. The shard that gave the samples that the item closes: no other shard knows their leases.
        3. The shard that granted the permit, if it is up and does not drain: then its admission counts the group.
           Otherwise rules 4 to 6 choose the shard, and the admission of that shard counts the group. If the granting
           shard is draining, the client then releases the permit (`settle`). If it is away, the permit stays in use
           until its lease ends.
        4. The owner of the key, if the owner is up. Rules 3 to 6 pass over a shard that is draining. For a key that a
           client chose at random, that is a shard that has lately refused any item. Another key may be on a draining
           shard, which then confirms it: only a shard that has refused this very item is passed over. If all shards
           would be passed over, none is.
        5. The shard with the next highest score that is up, if a client chose the key at random: then no other process
           has tried the key on the owner.
        6. The owner of the key, although it is away. Another process may have tried the key there before, so the insert
           waits for the owner.

        Raises LeaseEndedError if the fleet no longer has the shard of rule 2.
        """
        tried = self._tried.get(item.key)
        if tried is not None:
            shard, item.moved = tried
            return shard
        if item.closes:
            closed_on = self._fleet.named(item.closed_on)
            if closed_on is None:
                raise LeaseEndedError(f"shard {item.closed_on}, which gave what the item closes, is not there any more")
            return closed_on
        granted_by = self._fleet.named(item.granted_by)
        if granted_by is None:
            return self._shard_for_key(item)
        if granted_by.is_up and not _refuses(granted_by, item):
            shard = granted_by
        else:
            shard = self._shard_for_key(item)
        item.moved = granted_by.is_up and shard is not granted_by
        if granted_by.is_up:
            self._passed_over.discard(granted_by)
        elif shard is not granted_by and granted_by not in self._passed_over:
            self._passed_over.add(granted_by)
            logger.warning(
                "shard %s is away: groups with its permits go to other shards and count there, and these permits stay "
                "in use until their lease ends",
                granted_by.name,
            )
        return shard

    def _shard_for_key(self, item: Item) -> Shard:
        """The shard by rules 4 to 6 of `shard_for`."""
        key = item.key
        rendezvous, shards = self._ranking()
        if is_random_key(key):  # the usual case, by the fast way
            owner = shards[rendezvous.owner(key)]
            if owner.takes_inserts:
                return owner
        order = [shards[index] for index in rendezvous.order(key)]
        candidates = [shard for shard in order if not _refuses(shard, item)] or order
        if candidates[0].is_up or not is_random_key(key):  # rules 4 and 6
            return candidates[0]
        for shard in candidates:  # rule 5
            if shard.is_up:
                return shard
        return candidates[0]  # all shards are away: wait for the first

    async def insert(self, item: Item) -> None:
        """Inserts the item into its shard within its timeout. Raises the errors of `AsyncReplayClient.insert`."""

        async def attempt(deadline: Deadline) -> None:
            """Sends the item to its shard once. Remembers the shard if it may have the item after an error."""
            shard = self.shard_for(item)
            item.timeout = deadline.seconds  # the seconds that are left
            try:
                with shard.expected():  # probes the shard if the answer is late
                    await shard.insert(item)
            except ShardDrainingError:
                self.forget(item, shard)  # the next attempt, which `insist` makes, chooses another shard
                raise
            except ServerUnavailableError as error:
                self._remember(item, shard)
                raise ServerUnavailableError(
                    f"shard {shard.name} may have item {item.key} already, so no other shard gets it: {error}"
                ) from None
            # A shard that shuts down did not insert the item now, but may have inserted it at an earlier attempt.
            except (ServerClosedError, DeadlineExceededError, asyncio.CancelledError):
                self._remember(item, shard)
                raise

        await self._fleet.insist(attempt, item.timeout)
        await self.settle(item)

    async def settle(self, item: Item) -> None:
        """Releases the permit of an item that was inserted into another shard than the one that granted the permit.

        Ignores errors: a permit that is not released expires, and the shard then grants another permit in its place.
        """
        if not item.moved:
            return
        granted_by = self._fleet.named(item.granted_by)
        if granted_by is None:
            return
        request = once(pb.ReleasePermitsRequest(grant=item.permits, count=1, moved=True))
        with suppress(ReplayError):
            await self._fleet.answers("ReleasePermits", request, self._fleet.timeout, [granted_by])

    async def extend(self, item: Item) -> pb.UnchangedRow | None:
        """Appends the segment `item` to the item with the same key, on the shard that has it.

        Returns None if the segment was appended, and otherwise the reason why not. The reason is `missing` if all
        shards have answered that they lack the item. Raises ServerUnavailableError if a shard that may have the item
        cannot be reached in time.
        """

        async def attempt(deadline: Deadline) -> pb.UnchangedRow | None:
            """Tries the owner first, then the other shards, until one has the item."""
            rendezvous, shards = self._ranking()
            silent: list[str] = []  # the names of the shards that are away, or did not answer
            for shard in [shards[index] for index in rendezvous.order(item.key)]:
                item.timeout = deadline.seconds
                answer = None
                if shard.is_up:
                    with suppress(*GONE):
                        answer = await shard.run(shard.insert(item))
                if answer is None:
                    silent.append(shard.name)
                    continue
                row = unchanged_row(answer)
                has_item = row is None or not row.missing
                if has_item:
                    return row
            if silent:
                away = ", ".join(silent)
                raise ServerUnavailableError(f"no shard that can be reached has item {item.key}, and {away} cannot be")
            return pb.UnchangedRow(key=item.key, missing=True)

        return await self._fleet.insist(attempt, item.timeout)

    def forget(self, item: Item, shard: Connection) -> bool:
        """Notes that the shard is draining, and does not have the item.

        Returns True: another shard may get the item.
        """
        assert isinstance(shard, Shard)
        self._tried.pop(item.key, None)
        item.refused_by |= {shard.name}
        shard.is_draining()
        return True

    def _remember(self, item: Item, shard: Shard) -> None:
        """Binds a key to this shard, because the shard may have the item after an insert without an answer."""
        self._tried.pop(item.key, None)  # removed first, so that the key becomes the last one of the dict
        self._tried[item.key] = shard, item.moved
        if len(self._tried) > _MOST_REMEMBERED:
            oldest = next(iter(self._tried))
            del self._tried[oldest]
        assert len(self._tried) <= _MOST_REMEMBERED, len(self._tried)

    async def change(self, method: str, request: Message, timeout: float | None) -> MutationResult:
        """Changes the items that `request` names by their keys. A key counts as missing if no shard that is up has it.

        `method` is UpdatePriorities, Delete or ConsumeItems. An error of one shard leaves the other shards changed.
        """
        deadline = Deadline(timeout)
        up = await self._fleet.reachable(deadline)
        rendezvous, shards = self._ranking()
        keys = _keys_of(request)
        owners = rendezvous.owners(keys)
        found_K = np.zeros(keys.size, dtype=np.bool_)  # True for the keys that some shard had

        async def change_on(shard: Shard, owned: bool) -> int:
            """Changes the items on one shard whose keys no shard has had yet, and returns the number of changed items.

            With `owned`, tries only the keys that the shard owns; without it, only the keys of other owners.
            """
            is_own_K = owners == shards.index(shard)
            rows = np.flatnonzero(~found_K & (is_own_K == owned))
            if not rows.size:
                return 0
            try:
                answer = await shard.ask(method, _request_for(rows, request), deadline.seconds)
            except GONE:  # the keys count as missing, unless another shard has them
                return 0
            missing_keys = np.array(answer.missing, dtype=np.uint64)
            found_K[rows] |= ~np.isin(keys[rows], missing_keys)
            return int(answer.applied)

        applied = 0
        # Ask each owner first for its own keys, and then each shard for the keys that their owners lack.
        for owned in (True, False):
            counts = await asyncio.gather(*(change_on(shard, owned) for shard in up))
            applied += sum(counts)
        missing = dict.fromkeys(keys[~found_K].tolist())  # each key once, in the order of the request
        return MutationResult(applied, tuple(missing))

    def _ranking(self) -> tuple[Rendezvous, Sequence[Shard]]:
        """The shards that the fleet has now, and a Rendezvous that returns indices of these shards."""
        shards = self._fleet.shards
        if self._ranked[1] is not shards:
            names = [shard.name for shard in shards]
            assert len(set(names)) == len(names), f"two shards would have the same keys: {names}"
            self._ranked = Rendezvous(names), shards
        return self._ranked


def _refuses(shard: Shard, item: Item) -> bool:
    """True if the shard is draining, and does not have the item already, so that it would refuse the item.

    A draining shard confirms an item that it has. It may have an item whose key was not made at random, because another
    process may have inserted the item before. A shard that is away does not count as draining: by rule 6 of `shard_for`
    the item may have to wait for it.
    """
    if shard.takes_inserts or not shard.is_up:
        return False
    return is_random_key(item.key) or shard.name in item.refused_by


def _keys_of(request: Any) -> Keys:
    """The keys that a request names, as (K,). Raises InvalidRequestError unless there are as many priorities."""
    if not isinstance(request, pb.UpdatePrioritiesRequest):
        return np.array(request.keys, dtype=np.uint64)
    if len(request.keys) != len(request.priorities):  # both are bytes, 8 for each entry
        raise InvalidRequestError(f"{len(request.keys) // 8} keys and {len(request.priorities) // 8} priorities")
    return np.frombuffer(request.keys, dtype="<u8")


def _request_for(rows: Rows, request: Any) -> Any:
    """A request of the same kind, for only the keys in these rows of `request`."""
    if isinstance(request, pb.UpdatePrioritiesRequest):
        keys = np.frombuffer(request.keys, dtype="<u8")
        priorities = np.frombuffer(request.priorities, dtype="<f8")
        return pb.UpdatePrioritiesRequest(
            table=request.table,
            keys=keys[rows].tobytes(),
            priorities=priorities[rows].tobytes(),
        )
    keys_of_rows = _keys_of(request)[rows].tolist()
    return once(type(request)(table=request.table, keys=keys_of_rows))
