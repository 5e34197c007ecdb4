"""Sampling from several shards: a merged batch is drawn under leases, and taken only when all of it is here.

weigh all shards ──▶ share the rows out ──▶ draw a part of each, leased ──▶ complete: take all parts
      ▲                                                                └──▶ not complete: give all parts back
      └───────────── wait, while all together have too little ─────────────────────┘

A client that goes away takes nothing with it: its leases end, and the shards take the parts back. A shard that goes
away takes its part with it, and the others make up for it. If it may have heard that the part was taken, it is asked
again when it comes back. Its rows then begin the next batch that is drawn in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from replay_client.connection import DEFAULT
from replay_client.errors import DeadlineExceededError, ReplayError
from replay_client.records import Sample
from replay_client.requests import message_of, once
from replay_client.shards.drawing import Weight, most_rows, share_of_total, share_out
from replay_client.shards.fleet import GONE, Deadline, Fleet
from replay_client.shards.shard import Shard
from replay_protos import replay_pb2 as pb

WEIGHTS_AGE = 0.05
"""Seconds for which weights hold. A client therefore asks each shard for them at most 20 times a second, and a draw is
wrong by what the shares of the shards change within this time."""
_WEIGH_SECONDS = 2.0
"""A shard that does not tell its weight within this time gives nothing to this draw."""
_PART_LEASE = 60.0
"""Seconds after which a shard takes back a part whose client has gone away."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
"""Seconds between two looks while all shards together have too little; doubled each time."""


Lease = tuple[str, int]
"""A shard's name, and the id of a lease there."""


@dataclass(frozen=True)
class Draw:
    """What a caller wants."""

    table: str
    rows: int
    least: int
    """Rows that are enough when the time is up."""
    distinct: bool
    scope: str = ""
    exclude: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Unsure:
    """A part of a batch. Its shard went away before it confirmed that this client took the part."""

    shard: Shard
    lease: int
    samples: list[Sample]


MOST_UNSURE = 256
"""Parts that a client keeps to ask again; the oldest are forgotten first."""


class Drawer:
    """Draws merged batches for one client."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._rng = np.random.default_rng()
        self._turn = int(self._rng.integers(1 << 30))
        """The shard that gives first, where they give in turn."""
        self._weights: dict[str, tuple[float, dict[Shard, Weight]]] = {}
        """By table, with the time, where they hold for a while."""
        self._unsure: deque[tuple[Draw, _Unsure]] = deque(maxlen=MOST_UNSURE)

    async def sample(self, draw: Draw, deadline: Deadline, lease: float) -> list[Sample]:
        """A batch that is the caller's, or leased to the caller for `lease` seconds.

        It may have less than `draw.least` rows in one case: a shard goes away between its draw and the take, and the
        others cannot make up for it in time.
        """
        taken = [] if lease else await self.settled(draw)
        while len(taken) < draw.rows:
            try:
                parts = await self.lease(rest_of(draw, taken), deadline, lease or _PART_LEASE)
            except DeadlineExceededError:
                if taken:  # they cannot go back, and must not be lost
                    break
                raise
            if lease:
                return parts
            taken += await self.take(draw, parts)
            if deadline.passed and len(taken) >= draw.least:
                break
        return taken

    async def lease(self, draw: Draw, deadline: Deadline, seconds: float = _PART_LEASE) -> list[Sample]:
        """A batch of leased parts. Raises DeadlineExceededError with the reason, and then keeps nothing."""
        pause = _FIRST_PAUSE
        while True:
            last_look = deadline.passed
            weights = await self._weigh(draw, deadline)
            possible = sum(most_rows(weight, draw.distinct) for weight in weights.values())
            rows = min(draw.rows, possible)
            if rows == draw.rows or (last_look and rows >= max(1, draw.least)):
                counts = self._share_out(draw, weights, rows)
                self._expect(draw, weights, counts)
                drawn = await self._draw_parts_or_give_back(draw, weights, counts, seconds)
                if len(drawn) >= rows:
                    return drawn
                await self.give_back(drawn)  # somebody else was faster, or a shard went away
                self._weights.pop(draw.table, None)
            if last_look:
                raise DeadlineExceededError(_reason(draw, weights, possible))
            await asyncio.sleep(deadline.within(pause))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def take(self, draw: Draw, samples: list[Sample], seconds: float = 0.0) -> list[Sample]:
        """Takes samples from their shards, and returns those that the shards confirm.

        A shard that goes away confirms nothing: `settled` asks it again later. With `seconds` the caller gets the
        samples under a lease of that length.
        """
        leases = {_lease_of(sample) for sample in samples if sample.info.lease}
        if seconds:
            kept, _ = await self._on_shards(leases, lambda mine: _renewal(mine, seconds))
            return [sample for sample in samples if _lease_of(sample) in kept]
        taken, unsure = await self._end_leases(leases, pb.AcknowledgeSamplesRequest(unread=True))
        for name, lease in unsure:
            part = [sample for sample in samples if _lease_of(sample) == (name, lease)]
            self._unsure.append((draw, _Unsure(self._fleet.by_name[name], lease, part)))
        return _without_leases([sample for sample in samples if not sample.info.lease or _lease_of(sample) in taken])

    async def settled(self, draw: Draw) -> list[Sample]:
        """Returns rows that earlier batches of an equal draw lacked, at most `draw.rows`.

        Their shard has come back, and confirms that it gave them to this client.
        """
        settled: list[Sample] = []
        for entry in [entry for entry in self._unsure if entry[0] == draw]:
            part = entry[1]
            if not part.shard.is_up or len(settled) + len(part.samples) > draw.rows or entry not in self._unsure:
                continue
            self._unsure.remove(entry)  # another call of this client must not ask for it as well
            lease = part.shard.name, part.lease
            taken, unsure = await self._end_leases({lease}, pb.AcknowledgeSamplesRequest(unread=True))
            if unsure:
                self._unsure.append(entry)
            elif taken:
                settled += _without_leases(part.samples)
        return settled

    async def give_back(self, samples: Iterable[Sample]) -> None:
        """As far as their shards can be reached; the others take them back by themselves."""
        await self._end_leases(set(map(_lease_of, samples)), pb.AcknowledgeSamplesRequest(give_back=True))

    async def _end_leases(
        self, leases: set[Lease], request: pb.AcknowledgeSamplesRequest
    ) -> tuple[set[Lease], set[Lease]]:
        def acknowledgement(mine: list[int]) -> pb.AcknowledgeSamplesRequest:
            its_own = once(pb.AcknowledgeSamplesRequest(batches=mine))
            its_own.MergeFrom(request)
            return its_own

        return await self._on_shards(leases, acknowledgement)

    async def _on_shards(
        self, leases: set[Lease], message: Callable[[list[int]], Any]
    ) -> tuple[set[Lease], set[Lease]]:
        """Sends each shard the message about its leases.

        Returns the leases for which that was done, and those of which the shards did not say it. The others had ended.
        """
        done: set[Lease] = set()
        unsure: set[Lease] = set()

        async def one(name: str) -> None:
            shard, mine = self._fleet.by_name[name], sorted(lease for owner, lease in leases if owner == name)
            connection, request = shard.client.connection, message(mine)
            method = "RenewLeases" if isinstance(request, pb.RenewLeasesRequest) else "AcknowledgeSamples"
            try:
                missing = (await shard.run(connection.short(method, request, DEFAULT))).missing
            except ReplayError:
                unsure.update((name, lease) for lease in mine)
            else:
                done.update((name, lease) for lease in mine if lease not in missing)

        await asyncio.gather(*(one(name) for name in {owner for owner, _ in leases}))
        return done, unsure

    async def _weigh(self, draw: Draw, deadline: Deadline) -> dict[Shard, Weight]:
        now = asyncio.get_running_loop().time()
        reusable = not draw.scope and not draw.exclude
        if reusable and (known := self._weights.get(draw.table)) and now - known[0] <= WEIGHTS_AGE:
            weights = {shard: weight for shard, weight in known[1].items() if shard.is_up}
            rows = sum(most_rows(weight, draw.distinct) for weight in weights.values())
            if rows >= draw.rows or not any(weight.ordered for weight in weights.values()):
                return weights
        request = message_of(pb.WeighRequest, table=draw.table, scope=draw.scope, exclude=sorted(draw.exclude))
        up = await self._fleet.reachable(deadline)
        weights, _ = await self._fleet.try_to_ask(
            lambda client: client.connection.short("Weigh", request, _WEIGH_SECONDS), up
        )
        # Where the total weight falls with each draw, by how much only the shard knows: the next draw looks again.
        if reusable and all(weight.ordered or not weight.consuming for weight in weights.values()):
            self._weights[draw.table] = now, weights
        return weights

    def _expect(self, draw: Draw, weights: dict[Shard, Weight], counts: list[int]) -> None:
        """Takes what this draw takes off the weights that are known. A shard that gives less is weighed again."""
        if not any(weight.ordered and weight.consuming for weight in weights.values()):
            return
        for weight, count in zip(weights.values(), counts, strict=True):
            weight.items = max(0, weight.items - count)
            weight.samples = max(0, weight.samples - count)

    def _share_out(self, draw: Draw, weights: dict[Shard, Weight], rows: int) -> list[int]:
        self._turn += 1
        return share_out(list(weights.values()), rows, distinct=draw.distinct, first=self._turn, rng=self._rng)

    async def _draw_parts_or_give_back(
        self, draw: Draw, weights: dict[Shard, Weight], counts: list[int], lease: float
    ) -> list[Sample]:
        """The parts. A caller that is cancelled meanwhile leaves none of them leased."""
        drawing = asyncio.create_task(self._draw_parts(draw, weights, counts, lease))
        try:
            return await asyncio.shield(drawing)
        except asyncio.CancelledError:
            with contextlib.suppress(ReplayError):
                await self.give_back(await drawing)
            raise

    async def _draw_parts(
        self, draw: Draw, weights: dict[Shard, Weight], counts: list[int], lease: float
    ) -> list[Sample]:
        shards, given = list(weights), list(weights.values())
        size, ordered = sum(weight.size for weight in given), any(weight.ordered for weight in given)

        async def part(index: int) -> list[Sample]:
            shard, share = shards[index], share_of_total(given, index)
            try:
                samples = await shard.run(
                    shard.client.sample(
                        draw.table,
                        counts[index],
                        min_samples=1,
                        timeout=0.0,
                        distinct=draw.distinct,
                        scope=draw.scope,
                        exclude=draw.exclude,
                        lease=lease,
                    )
                )
            except (DeadlineExceededError, *GONE):
                return []
            for sample in samples:
                sample.info.shard, sample.info.table_size = shard.name, size
                if not ordered:
                    sample.info.probability *= share
            return samples

        parts = await asyncio.gather(
            *(part(index) for index, count in enumerate(counts) if count), return_exceptions=True
        )
        drawn = [part for part in parts if isinstance(part, list)]
        for error in parts:
            if isinstance(error, BaseException):
                await self.give_back(itertools.chain(*drawn))
                raise error
        # In turn, which keeps the order within each shard.
        merged = [sample for row in itertools.zip_longest(*drawn) for sample in row if sample is not None]
        if not ordered:
            self._rng.shuffle(merged)
        return merged


def _renewal(batches: list[int], seconds: float) -> pb.RenewLeasesRequest:
    return pb.RenewLeasesRequest(batches=batches, seconds=seconds, unread=True)


def _without_leases(samples: list[Sample]) -> list[Sample]:
    for sample in samples:
        sample.info.lease = 0
    return samples


def _lease_of(sample: Sample) -> Lease:
    return sample.info.shard, sample.info.lease


def rest_of(draw: Draw, taken: list[Sample]) -> Draw:
    """What is missing when `taken` is here already."""
    if not taken:
        return draw
    here = {sample.info.key for sample in taken} if draw.distinct else set()
    least = max(0, draw.least - len(taken))
    return Draw(draw.table, draw.rows - len(taken), least, draw.distinct, draw.scope, draw.exclude | here)


def _reason(draw: Draw, weights: dict[Shard, Weight], possible: int) -> str:
    reasons = [f"{shard.name}: {weight.reason}" for shard, weight in weights.items() if weight.reason]
    if not weights:
        return f"{draw.table}: no shard answered"
    return f"{draw.table}: {possible} of {draw.rows} samples available on {len(weights)} shards; " + "; ".join(reasons)
