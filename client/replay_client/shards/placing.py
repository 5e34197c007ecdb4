"""Placing: chooses the shard of an item, and finds the item there again.

A key belongs to one shard, its owner, by rendezvous hashing. Each shard has a score for each key, and the owner is the
shard with the highest score. Every client computes the same owner, without asking any server. If one of N shards is
removed, or if an N-th shard is added, only about 1 of N keys gets another owner.

Usually, an item is on the owner of its key. It is on another shard if the owner was away or draining at the insert, if
another shard granted its permit, or if its insert closed samples of another shard. So a change by key is sent to the
owners first, and then to all other shards for the keys that the owners lack.
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
"""The most keys whose shard a client remembers because an insert got no answer. The oldest are forgotten first."""
_BLOCK = 256
"""The number of successive keys whose owners are computed together, because computing one owner alone takes 20 us."""
_SPLITMIX_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""The shift and the factor of each round of splitmix64."""


class Rendezvous:
    """Rendezvous hashing: each shard has a score for each key, and the shard with the highest score owns the key.

    A score depends only on the key and the name of the shard. So if a shard is added or removed, the only keys that
    change their owner are those of this shard.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """`names` are the names of the N shards. The methods return indices of `names`."""
        self._seeds = np.array([xxhash.xxh64_intdigest(name.encode()) for name in names], dtype=np.uint64)
        self._block: tuple[int, list[int]] = -1, []
        """The block of successive keys that `owner` computed last: its number (key // _BLOCK), and the owners of its
        keys. Any thread may replace the pair."""

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
            block_keys = first_key + np.arange(_BLOCK, dtype=np.uint64)
            owners = self.owners(block_keys).tolist()
            self._block = number, owners
        return owners[key % _BLOCK]

    def order(self, key: int) -> list[int]:
        """The indices of all shards, from the highest score for this key to the lowest. The owner is the first."""
        scores = self._scores(np.array([key], dtype=np.uint64))[0]
        order: list[int] = np.argsort(scores)[::-1].tolist()
        return order

    def _scores(self, keys: Keys) -> Keys:
        """The scores (K, N) of `keys` (K,) at the N shards: splitmix64(key xor seed of the shard).

        The products wrap around at 64 bits, as splitmix64 defines them.
        """
        mixed = keys[:, None] ^ self._seeds[None, :]
        for shift, factor in _SPLITMIX_ROUNDS:
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def is_random_key(key: int) -> bool:
    """True if the key is from a KeySequence, which makes keys at random.

    So no other process can have tried to insert an item with this key.
    """
    return FIRST_KEY <= key <= LAST_KEY


class Placement:
    """Chooses the shard for each item of one client. A key that a shard may already have goes to no other shard."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tried: dict[int, tuple[Shard, bool]] = {}
        """Key of an item whose insert may have succeeded -> the shard that may have the item, and the item's
        `moved`."""
        self._ranked: tuple[Rendezvous, Sequence[Shard]] = (Rendezvous([]), ())
        """The last result of `_ranking`."""
        self._passed_over: set[Shard] = set()
        """Shards that granted permits and are away. The log already has a line about each of them."""

    def shard_for(self, item: Item) -> Shard:
        """Chooses the shard for an insert, by the first of these rules that applies. Sets `item.moved`.

        1. If this client has tried to insert the key before: the shard of that attempt, because it may have the item.
        2. If the item closes samples: the shard that gave the samples, because no other shard knows their leases.
        3. If a shard has granted a permit for the item, is up, and would not refuse the item: this shard, so that its
           own admission counts the group. Otherwise rules 4 to 6 choose a shard, and the admission of that shard counts
           the group. If the granting shard is draining, the client then releases the permit (`settle`). If it is away,
           the permit stays in use until its lease ends.
        4. If the owner of the key is up: the owner.
        5. If the key is random (`is_random_key`): the shard that has the highest score among the shards that are up.
           This is safe because no other process has tried the key on the owner.
        6. Otherwise: the owner of the key, although it is away. Another process may have tried the key there before, so
           the insert waits for the owner.

        Rules 4 to 6 pass over shards that would refuse the item because they are draining (`_refuses`), unless all
        shards are such shards.

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
        if is_random_key(key):  # the usual case: `Rendezvous.owner` is faster than `order`
            owner = shards[rendezvous.owner(key)]
            if owner.takes_inserts:
                return owner
        order = [shards[index] for index in rendezvous.order(key)]
        # A shard that is away stays a candidate, because by rule 6 the item may have to wait for it.
        candidates = [shard for shard in order if not _refuses(shard, item)] or order
        if candidates[0].is_up or not is_random_key(key):  # rules 4 and 6
            return candidates[0]
        for shard in candidates:  # rule 5
            if shard.is_up:
                return shard
        return candidates[0]  # all candidates are away: the insert waits for the first

    async def insert(self, item: Item) -> None:
        """Inserts the item into the shard that `shard_for` chooses. `item.timeout` bounds all attempts together.

        Raises the errors of `AsyncReplayClient.insert`.
        """

        async def attempt(deadline: Deadline) -> None:
            """Sends the item to its shard once. Remembers the shard if it may have the item in spite of an error."""
            shard = self.shard_for(item)
            item.timeout = deadline.seconds  # the seconds that are left
            try:
                with shard.expected():  # probes the shard if the answer is late
                    await shard.insert(item)
            except ShardDrainingError:
                self.forget(item, shard)  # then the next attempt, which `insist` makes, chooses another shard
                raise
            except ServerUnavailableError as error:
                self._remember(item, shard)
                raise ServerUnavailableError(
                    f"shard {shard.name} may have item {item.key} already, so no other shard gets it: {error}"
                ) from None
            # A shard that shuts down has not inserted the item now, but may have inserted it at an earlier attempt.
            except (ServerClosedError, DeadlineExceededError, asyncio.CancelledError):
                self._remember(item, shard)
                raise

        await self._fleet.insist(attempt, item.timeout)
        await self.settle(item)

    async def settle(self, item: Item) -> None:
        """Releases the permit of an item that was inserted into another shard than the one that granted the permit.

        Ignores errors, because a permit that is not released expires. The shard then grants another in its place.
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
        """Appends the segment `item` to the stored item with the same key, on the shard that has the stored item.

        Returns None if the segment was appended, and otherwise the reason why it was not. The reason is `missing` if
        all shards have answered that they lack the stored item. Raises ServerUnavailableError if no shard that can be
        reached has it, and another shard cannot be reached in time.
        """

        async def attempt(deadline: Deadline) -> pb.UnchangedRow | None:
            """Sends the segment to the owner first, and then to the other shards, until one has the stored item."""
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

        Returns True, because another shard may get the item. (`OneServer.forget` returns False.)
        """
        assert isinstance(shard, Shard)
        self._tried.pop(item.key, None)
        item.refused_by |= {shard.name}
        shard.is_draining()
        return True

    def _remember(self, item: Item, shard: Shard) -> None:
        """Notes that this shard may have the item, because an insert got no answer. So no other shard gets the key."""
        self._tried.pop(item.key, None)  # removed first, so that the key becomes the last one of the dict
        self._tried[item.key] = shard, item.moved
        if len(self._tried) > _MOST_REMEMBERED:
            oldest = next(iter(self._tried))
            del self._tried[oldest]
        assert len(self._tried) <= _MOST_REMEMBERED, len(self._tried)

    async def change(self, method: str, request: Message, timeout: float | None) -> MutationResult:
        """Changes the items that `request` names by their keys. A key counts as missing if no shard that is up has it.

        `method` is UpdatePriorities, Delete or ConsumeItems. If one shard answers with an error, the error is raised,
        but the changes on the other shards stay.
        """
        deadline = Deadline(timeout)
        up = await self._fleet.reachable(deadline)
        rendezvous, shards = self._ranking()
        keys = _keys_of(request)
        owners = rendezvous.owners(keys)
        found_K = np.zeros(keys.size, dtype=np.bool_)  # True for the keys that a shard had

        async def change_on(shard: Shard, owned: bool) -> int:
            """Sends one shard the keys that no shard had so far, and returns the number of items that it changed.

            With `owned`, sends only the keys that this shard owns. Without it, sends only keys of other owners.
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
        # First send each shard the keys that it owns, and then the keys that their owners lack.
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
    """True if the shard is up and draining, and does not have the item, so that it would refuse the item.

    A draining shard refuses new items, and confirms an item that it has.

    * If the key is random, no other process has tried it. So the shard does not have the item if this client knows that
      the shard is draining, because it has lately refused any item.
    * If the key is not random, another process may have inserted the item into this shard. So only the shard's own
      refusal of this item shows that the shard does not have it.
    """
    if shard.takes_inserts or not shard.is_up:
        return False
    return is_random_key(item.key) or shard.name in item.refused_by


def _keys_of(request: Any) -> Keys:
    """The keys that a request names, as (K,).

    Raises InvalidRequestError for a request with priorities, if it does not have as many priorities as keys.
    """
    if not isinstance(request, pb.UpdatePrioritiesRequest):
        return np.array(request.keys, dtype=np.uint64)
    if len(request.keys) != len(request.priorities):  # both are bytes, 8 for each entry
        raise InvalidRequestError(f"{len(request.keys) // 8} keys and {len(request.priorities) // 8} priorities")
    return np.frombuffer(request.keys, dtype="<u8")


def _request_for(rows: Rows, request: Any) -> Any:
    """A request of the same type as `request`, with only those of its keys that are in these rows (indices)."""
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
