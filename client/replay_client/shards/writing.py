"""Writing to several shards: a pipeline for each of them behind the bounds of one, and the rule that says which."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial

from replay_client.connection import Timeout
from replay_client.errors import InvalidRequestError, ReplayError
from replay_client.frames import Item
from replay_client.records import Buffer, PermitLease
from replay_client.requests import KeySequence
from replay_client.rollout import RolloutGroup
from replay_client.shards.fleet import Fleet
from replay_client.shards.placing import chosen_by_client
from replay_client.shards.shard import Shard
from replay_client.writer import AsyncWriter, Pipeline

_MOST_REMEMBERED = 1 << 20
"""Keys whose shard a client remembers; the one used longest ago is forgotten first."""


class Placement:
    """Which shard a group goes to. A key that has been tried on one shard never goes to another one."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tried: OrderedDict[int, Shard] = OrderedDict()
        """Keys that a shard may have and that do not belong to it, or whose insert failed there."""

    def shard_for(self, key: int, permits: str) -> Shard:
        """The shard for an insert, by the first rule that holds. `permits` names the shard that granted the permit.

        1. The shard that this client has tried the key on before: it may have the item.
        2. The shard that granted the permit, if it is up: so its admission counts the group.
        3. The shard to which the key belongs, if it is up. A shard that is draining has said that it lacks the key: it
           counts as one that is not there.
        4. The next shard for the key that is up, if a client chose the key at random: nobody else has tried it.
        5. The shard to which the key belongs. Another process may have tried the key there before, so wait for it.
        """
        if (tried := self._tried.get(key)) is not None:
            return tried
        granted = self._fleet.by_name.get(permits)
        if granted is not None and granted.takes_inserts:
            return granted
        order = self._fleet.in_order(key)
        candidates = [shard for shard in order if shard.takes_inserts or not shard.is_up] or order
        if candidates[0].is_up or not chosen_by_client(key):
            return candidates[0]
        return next((shard for shard in candidates if shard.is_up), candidates[0])

    def forget(self, key: int, shard: Shard) -> None:
        """The shard is draining and lacks the key: it may go to another one."""
        self._tried.pop(key, None)
        shard.is_draining()

    def remember(self, key: int, shard: Shard) -> None:
        """An insert of this key is unsure: from now on it goes to this shard only."""
        self._tried[key] = shard
        self._tried.move_to_end(key)
        if len(self._tried) > _MOST_REMEMBERED:
            self._tried.popitem(last=False)


class ShardedPipeline:
    """What an AsyncWriter and a Writer need of a Pipeline, over the pipelines of all shards.

    Items that a shard has not acknowledged stay with it while it is away, and count among those in flight.
    """

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        make: Callable[[Shard], Pipeline],
        max_in_flight: int,
        max_bytes: int,
        timeout: float | None,
        flush_timeout: Callable[[Timeout], float | None],
    ) -> None:
        if max_in_flight < 1 or max_bytes < 1:
            raise InvalidRequestError(f"max_in_flight {max_in_flight} and max_bytes {max_bytes} must be at least 1")
        self.timeout, self.seconds = timeout, flush_timeout
        self.granted: dict[int, str] = {}
        """The shard by the id of each permit lease in use."""
        self._fleet, self._placement, self._make = fleet, placement, make
        self._max_in_flight, self._max_bytes = max_in_flight, max_bytes
        self._pipelines: dict[Shard, Pipeline] = {}
        self._ended: list[Pipeline] = []
        """Pipelines that failed: their shard was away for too long. Each failure was raised once."""
        self._lock = threading.Lock()

    @property
    def refused(self) -> dict[int, ReplayError]:
        return {key: error for pipeline in self._all() for key, error in pipeline.refused.items()}

    @property
    def evicted(self) -> dict[int, tuple[str, ...]]:
        return {key: tables for pipeline in self._all() for key, tables in pipeline.evicted.items()}

    def offer(self, item: Item, when_room: Callable[[], None] | None = None) -> bool:
        """Takes the item if there is room. Raises the errors of earlier items."""
        with self._lock:
            self._raise_failures()
            if not self._has_room(item):
                if when_room is not None:
                    self._call_when_room(when_room)
                if not self._has_room(item):  # room that came before the callback was set calls nobody
                    return False
            return self._pipeline_for(item).offer(item, when_room)

    def drained(self, when_drained: Callable[[], None]) -> bool:
        """Whether all items are acknowledged. Raises the errors of earlier items."""
        with self._lock:
            self._raise_failures()
            waiting = [not pipeline.drained(when_drained) for pipeline in self._pipelines.values()]  # tell all of them
            return not any(waiting)

    def waiting(self) -> str:
        waiting = [pipeline.waiting() for pipeline in self._pipelines.values() if pipeline.in_flight]
        return "; ".join(waiting) or "not all shards have been tried yet"

    async def close(self) -> None:
        for pipeline in self._all():
            await pipeline.close()

    def _pipeline_for(self, item: Item) -> Pipeline:
        shard = self._placement.shard_for(item.key, self.granted.get(item.permits, ""))
        if shard not in self._pipelines:
            self._pipelines[shard] = self._make(shard)
            self._pipelines[shard].on_draining = partial(self._move, shard)
        return self._pipelines[shard]

    def _move(self, shard: Shard, item: Item) -> None:
        """The shard is draining, and refused this item: it goes to another one."""
        with self._lock:
            self._placement.forget(item.key, shard)
            self._pipeline_for(item).take_over(item)

    def _all(self) -> list[Pipeline]:
        return [*self._ended, *self._pipelines.values()]

    def _has_room(self, item: Item) -> bool:
        if not self._fleet.decided:
            return False
        in_flight = nbytes = 0
        for pipeline in self._pipelines.values():
            in_flight += pipeline.in_flight
            nbytes += pipeline.bytes_in_flight
        return not in_flight or (in_flight < self._max_in_flight and nbytes + item.nbytes <= self._max_bytes)

    def _call_when_room(self, callback: Callable[[], None]) -> None:
        if not self._fleet.decided:
            self._fleet.when_decided(callback)
        for pipeline in self._pipelines.values():
            pipeline.when_room(callback)

    def _raise_failures(self) -> None:
        """Raises the failure of a pipeline once, and replaces the pipeline: the other shards go on."""
        for shard, pipeline in self._pipelines.items():
            if (failure := pipeline.failure) is not None:
                self._ended.append(self._pipelines.pop(shard))
                raise failure


class ShardedWriter(AsyncWriter):
    """An AsyncWriter that knows which shard granted a permit."""

    def __init__(self, pipeline: ShardedPipeline, keys: KeySequence) -> None:
        super().__init__(pipeline, keys)  # type: ignore[arg-type]  # it has all that a writer uses
        self._granted = pipeline.granted

    def item(
        self,
        group: RolloutGroup | Buffer,
        priorities: Mapping[str, float],
        policy_version: int | None,
        permits: PermitLease | None,
    ) -> Item:
        if permits is not None:
            if len(self._granted) >= _MOST_REMEMBERED:
                self._granted.clear()  # a group whose lease is forgotten goes where its key belongs
            self._granted[permits.id] = permits.shard
        return super().item(group, priorities, policy_version, permits)
