"""Sampling from several shards: a merged batch is drawn in parts, and taken only when all of it is here.

weights ──▶ share the rows out ──▶ draw a part of each shard ──▶ complete: take all parts
   ▲                                     │              └──────▶ not complete: give all parts back
   ├──── each part tells the weight ─────┘                          │
   └──────────── wait, while all together have too little ──────────┘

There is one draw stream to each shard, and each step is one message to each. Weights that are younger than WEIGHTS_AGE
hold, so that a client that draws all the time never asks for them alone.

A client that goes away takes nothing with it: its streams end, and the shards take the parts back. A shard that goes
away takes its part with it, and the others make up for it. If it may have heard that the part was taken, it is asked
again when it comes back. Its rows then begin the next batch that is drawn in the same way.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from replay_client.connection import GONE_CODES, reported
from replay_client.errors import DeadlineExceededError
from replay_client.records import Sample, samples_of
from replay_client.requests import message_of
from replay_client.sampling import AsyncSampler, DrawStream, OnLease, check_prefetch, ignore, new_id
from replay_client.shards.drawing import Weight, most_rows, share_of_total, share_out
from replay_client.shards.fleet import Deadline, Fleet
from replay_client.shards.shard import Shard
from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame

WEIGHTS_AGE = 0.05
"""Seconds for which weights hold. A client therefore makes each shard weigh its table at most 40 times a second, and a
draw is wrong by what the shares of the shards change within this time."""
_ANSWER_SECONDS = 5.0
"""A shard that does not answer within this time gives nothing to this batch."""
_WEIGH_SECONDS = 2.0
"""The same for a shard that is only asked for its weight."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
"""Seconds between two looks while all shards together have too little; doubled each time."""

_HAS_NOTHING = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED, *GONE_CODES)
"""The shard lacks rows, or is gone: another one may have some."""

Part = tuple[str, int]
"""A shard's name, and the id of a draw there."""


@dataclass(frozen=True)
class DrawOfAll:
    """One caller's request for a batch from all shards together."""

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

    draw: DrawOfAll
    part: Part
    samples: list[Sample]


MOST_UNSURE = 256
"""Parts that a client keeps to ask again; the oldest are forgotten first."""


class Drawer:
    """Draws merged batches over a stream to each shard. Until they are taken, `lease` of their samples names the part.

    What is drawn and neither taken nor leased goes back when `close` ends the streams.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._streams: dict[str, DrawStream] = {}
        """By the name of the shard."""
        self._rng = np.random.default_rng()
        self._turn = int(self._rng.integers(1 << 30))
        """The shard that gives first, where they give in turn."""
        self._weights: dict[str, tuple[float, dict[Shard, Weight]]] = {}
        """By table, with the time, where they hold for a while."""
        self._unsure: deque[_Unsure] = deque(maxlen=MOST_UNSURE)

    async def sample(self, draw: DrawOfAll, deadline: Deadline, lease: float) -> list[Sample]:
        """A batch that is the caller's, or leased to the caller for `lease` seconds.

        It may have less than `draw.least` rows in one case: a shard goes away between its draw and the take, and the
        others cannot make up for it in time.
        """
        taken = [] if lease else await self.settled(draw)
        while len(taken) < draw.rows:
            try:
                parts = await self.draw(rest_of(draw, taken), deadline, lease)
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

    async def draw(self, draw: DrawOfAll, deadline: Deadline, lease: float = 0.0) -> list[Sample]:
        """A batch in parts. Raises DeadlineExceededError with the reason, and then keeps nothing."""
        pause = _FIRST_PAUSE
        while True:
            last_look = deadline.passed
            age, weights = await self._weights_for(draw, deadline)
            possible = sum(most_rows(weight, draw.distinct) for weight in weights.values())
            rows = min(draw.rows, possible)
            if rows == draw.rows or (last_look and rows >= max(1, draw.least)):
                self._turn += 1
                given = list(weights.values())
                counts = share_out(given, rows, distinct=draw.distinct, first=self._turn, rng=self._rng)
                drawn = await self._draw_parts(draw, weights, counts, lease, weigh=age > WEIGHTS_AGE / 2)
                if len(drawn) >= rows:
                    return drawn
                self.give_back(drawn)  # somebody else was faster, or a shard went away
                self._weights.pop(draw.table, None)
            if last_look:
                raise DeadlineExceededError(_reason(draw, weights, possible))
            await asyncio.sleep(deadline.within(pause))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def take(self, draw: DrawOfAll, samples: list[Sample], lease: float = 0.0) -> list[Sample]:
        """Takes samples from their shards, and returns those that the shards confirm.

        A shard that goes away confirms nothing: `settled` asks it again later, also for a caller that is interrupted.
        With `lease` the caller gets the samples under a lease of that many seconds.
        """
        parts = {_part_of(sample) for sample in samples}
        taken, unsure = set[Part](), parts
        try:
            taken, unsure = await self._take_parts(parts, lease)
        finally:
            for part in () if lease else unsure:
                self._unsure.append(_Unsure(draw, part, [sample for sample in samples if _part_of(sample) == part]))
        if lease:
            return [sample for sample in samples if _part_of(sample) in taken]
        return _without_leases([sample for sample in samples if _part_of(sample) in taken])

    async def settled(self, draw: DrawOfAll) -> list[Sample]:
        """Returns rows that earlier batches of an equal draw lacked, at most `draw.rows`.

        Their shard has come back, and confirms that it gave them to this client.
        """
        settled: list[Sample] = []
        for entry in [entry for entry in self._unsure if entry.draw == draw]:
            shard = self._fleet.by_name.get(entry.part[0])
            too_many = len(settled) + len(entry.samples) > draw.rows
            if shard is None or not shard.is_up or too_many or entry not in self._unsure:
                continue
            self._unsure.remove(entry)  # another call of this client must not ask for it as well
            settled += await self.take(draw, entry.samples)
        return settled

    def give_back(self, samples: Iterable[Sample]) -> None:
        """As far as their shards can be reached; the others take them back by themselves."""
        for name, part in {_part_of(sample) for sample in samples}:
            if name in self._streams:
                self._streams[name].give_up(part)

    def drop_soon(self) -> None:
        """Ends the streams, from any thread."""
        for stream in self._streams.values():
            stream.drop_soon()

    async def close(self) -> None:
        await asyncio.gather(*(stream.close() for stream in self._streams.values()))

    def _stream(self, name: str) -> DrawStream:
        if name not in self._streams:
            self._streams[name] = DrawStream(self._fleet.by_name[name].client.connection)
        return self._streams[name]

    async def _weights_for(self, draw: DrawOfAll, deadline: Deadline) -> tuple[float, dict[Shard, Weight]]:
        """The weight of each shard that is up, and how old they are, in seconds."""
        now = asyncio.get_running_loop().time()
        if (known := self._weights.get(draw.table)) and _is_plain(draw) and now - known[0] <= WEIGHTS_AGE:
            up = self._fleet.up()
            weights = {shard: known[1][shard] for shard in up if shard in known[1]}
            rows = sum(most_rows(weight, draw.distinct) for weight in weights.values())
            enough = rows >= draw.rows or not any(weight.ordered for weight in weights.values())
            if weights and len(weights) == len(up) and enough:
                return now - known[0], weights
        up = await self._fleet.reachable(deadline)
        answers = await self._ask({shard: _request(draw, weigh=True) for shard in up}, _WEIGH_SECONDS)
        weights = {shard: answer.head.weight for shard, answer in answers.items()}
        self._keep(draw, weights)
        return 0.0, weights

    def _keep(self, draw: DrawOfAll, weights: dict[Shard, Weight]) -> None:
        if _is_plain(draw):
            self._weights[draw.table] = asyncio.get_running_loop().time(), weights

    async def _draw_parts(
        self, draw: DrawOfAll, weights: dict[Shard, Weight], counts: list[int], lease: float, *, weigh: bool
    ) -> list[Sample]:
        given = list(weights.values())
        size, ordered = sum(weight.size for weight in given), any(weight.ordered for weight in given)
        shares = {shard: 1.0 if ordered else share_of_total(given, index) for index, shard in enumerate(weights)}
        if ordered and any(weight.consuming for weight in given):
            # A draw of another task may come before the next weights. A shard that gives less is weighed again.
            for weight, count in zip(given, counts, strict=True):
                weight.items = max(0, weight.items - count)
                weight.samples = max(0, weight.samples - count)
        elif any(weight.consuming for weight in given):
            weigh = True  # the total weight falls with each draw, by how much only the shard knows
        requests = {
            shard: _request(draw, num_samples=count, min_samples=1, timeout=0.0, lease=lease, weigh=weigh)
            for shard, count in zip(weights, counts, strict=True)
            if count or weigh
        }
        answers = await self._ask(requests, _ANSWER_SECONDS)
        if weigh:
            self._keep(draw, {shard: answer.head.weight for shard, answer in answers.items()})
        parts = []
        for shard, (head, payloads) in answers.items():
            samples = samples_of(head, payloads, leased=True)
            for sample in samples:
                sample.info.shard, sample.info.table_size = shard.name, size
                sample.info.probability *= shares[shard]
            parts.append(samples)
        # In turn, which keeps the order within each shard.
        merged = [sample for row in itertools.zip_longest(*parts) for sample in row if sample is not None]
        if not ordered:
            self._rng.shuffle(merged)
        return merged

    async def _ask(
        self, requests: Mapping[Shard, pb.SampleRequest], seconds: float
    ) -> dict[Shard, Frame[pb.SampleResponse]]:
        """The answers of the shards that have rows, or were only asked for their weight.

        Raises the error of a shard that refuses, and then keeps no rows. So does a caller that is cancelled.
        """
        asked = {shard: self._stream(shard.name).draw(request) for shard, request in requests.items()}
        answers: dict[Shard, Frame[pb.SampleResponse]] = {}
        try:
            await asyncio.wait(asked.values(), timeout=seconds)
            for shard, future in asked.items():
                if not future.done():
                    self._stream(shard.name).give_up(requests[shard].id)
                elif (error := future.exception()) is None:
                    answers[shard] = future.result()
                elif not (isinstance(error, grpc.aio.AioRpcError) and error.code() in _HAS_NOTHING):
                    raise error
        except grpc.aio.AioRpcError as error:
            self._give_up(requests)
            raise reported(error, "a shard", seconds) from None
        except BaseException:
            self._give_up(requests)
            raise
        return answers

    def _give_up(self, requests: Mapping[Shard, pb.SampleRequest]) -> None:
        for shard, request in requests.items():
            self._stream(shard.name).give_up(request.id)

    async def _take_parts(self, parts: set[Part], lease: float) -> tuple[set[Part], set[Part]]:
        """Returns the parts that were taken, or leased, and those whose shards did not answer."""
        asked: dict[str, asyncio.Future[pb.SampleResponse]] = {}
        for name in {name for name, _ in parts}:
            ids = sorted(draw_id for owner, draw_id in parts if owner == name)
            request = pb.DrawRequest(renew=ids, seconds=lease) if lease else pb.DrawRequest(take=ids)
            asked[name] = self._stream(name).end(request)
        if asked:
            await asyncio.wait(asked.values(), timeout=_ANSWER_SECONDS)
        answered = {name for name, future in asked.items() if future.done() and future.exception() is None}
        taken = {(name, draw_id) for name in answered for draw_id in asked[name].result().done}
        return taken, {(name, draw_id) for name, draw_id in parts if name not in answered}


class ShardedSampler(AsyncSampler):
    """An AsyncSampler over several shards. Up to `prefetch` merged batches are drawn ahead."""

    def __init__(
        self,
        fleet: Fleet,
        draw: DrawOfAll,
        prefetch: int,
        timeout: float | None,
        lease: float = 0.0,
        on_lease: OnLease = ignore,
    ) -> None:
        """`lease`: seconds for which the caller has each batch; 0: for good. `on_lease` is called before it begins."""
        check_prefetch(prefetch)
        self._drawer, self._draw = Drawer(fleet), draw
        self._prefetch, self._wait = prefetch, timeout
        self._lease, self._on_lease = lease, on_lease
        self._drawing: deque[asyncio.Task[list[Sample]]] = deque()
        self._taken: list[Sample] = []
        """The taken rows of a batch that lost other rows with a shard. The next batch begins with them."""
        self._closed = False

    async def __anext__(self) -> list[Sample]:
        """The next batch. Raises DeadlineExceededError, with the reason, if there is none within the timeout."""
        if self._closed:
            raise StopAsyncIteration
        deadline = Deadline(self._wait)
        if not self._taken:
            self._taken = await self._drawer.settled(self._draw)
        while len(self._taken) < self._draw.rows:
            if self._taken:  # rows are missing: draw exactly these
                drawn = await self._drawer.draw(rest_of(self._draw, self._taken), deadline)
            else:
                drawn = await self._drawn_ahead(deadline)
                self._draw_ahead(self._prefetch)  # the takes below ride on these draws
            if self._lease:
                self._on_lease(drawn)
            self._taken += await self._drawer.take(self._draw, drawn, self._lease)
        batch, self._taken = self._taken, []
        return batch

    async def _drawn_ahead(self, deadline: Deadline) -> list[Sample]:
        self._draw_ahead(max(1, self._prefetch))
        # Any of them: an order among batches that are drawn at the same time means nothing.
        await asyncio.wait(self._drawing, timeout=deadline.seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in self._drawing:
            if task.done():
                self._drawing.remove(task)
                return task.result()
        # The same question once more, for the reason of the wait.
        return await self._drawer.draw(self._draw, deadline)

    def _draw_ahead(self, batches: int) -> None:
        while len(self._drawing) < batches:
            self._drawing.append(asyncio.create_task(self._drawer.draw(self._draw, Deadline(None))))

    async def close(self) -> None:
        """Gives back what was drawn ahead."""
        self._closed = True
        drawing, self._drawing = self._drawing, deque()
        for task in drawing:
            task.cancel()
        await asyncio.gather(*drawing, return_exceptions=True)
        if self._lease:
            self._drawer.give_back(self._taken)
        await self._drawer.close()

    def __del__(self) -> None:
        if hasattr(self, "_drawer"):
            self._drawer.drop_soon()


def _request(draw: DrawOfAll, **fields: Any) -> pb.SampleRequest:
    return message_of(
        pb.SampleRequest,
        table=draw.table,
        scope=draw.scope,
        exclude=sorted(draw.exclude),
        allow_repeats=not draw.distinct,
        id=new_id(),
        **fields,
    )


def _is_plain(draw: DrawOfAll) -> bool:
    """Returns whether this draw may use the weights that a shard told another draw."""
    return not draw.scope and not draw.exclude


def _without_leases(samples: list[Sample]) -> list[Sample]:
    for sample in samples:
        sample.info.lease = 0
    return samples


def _part_of(sample: Sample) -> Part:
    return sample.info.shard, sample.info.lease


def rest_of(draw: DrawOfAll, taken: list[Sample]) -> DrawOfAll:
    """What is missing when `taken` is here already."""
    if not taken:
        return draw
    here = {sample.info.key for sample in taken} if draw.distinct else set()
    least = max(0, draw.least - len(taken))
    return DrawOfAll(draw.table, draw.rows - len(taken), least, draw.distinct, draw.scope, draw.exclude | here)


def _reason(draw: DrawOfAll, weights: dict[Shard, Weight], possible: int) -> str:
    reasons = [f"{shard.name}: {weight.reason}" for shard, weight in weights.items() if weight.reason]
    if not weights:
        return f"{draw.table}: no shard answered"
    return f"{draw.table}: {possible} of {draw.rows} samples available on {len(weights)} shards; " + "; ".join(reasons)
