"""Sampling from several shards: a batch is filled from shard after shard, and acknowledged only when all of it is here.

the shards' last answers ──▶ share the rows out ──▶ draw from each ──▶ all rows: take them
   ▲                                ▲                    │
   │                                └── less: the rest ──┤
   └──── weigh all shards, while they have too little ◀──┴── too few: requeue them

`sharing.py` says how many rows each shard gives. It goes by what the shards answered last. An answer that is older than
WEIGHTS_AGE, or that said 0, is asked for again. So a pool of any number of shards gives most batches with one message
to one of them. A shard gives what is there, and another one the rest. Where all have too little, nothing stays drawn:
two readers that each hold a half of what is there would wait for each other.

There is one draw stream to each shard. A client that goes away takes nothing with it: its streams end, and the shards
take their rows back. A shard that goes away takes its rows with it, and the others make up for it. If it may have heard
that they were acknowledged, it is asked again when it comes back. They then begin the next batch that is drawn in the
same way.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc
import numpy as np

from replay_client.connection import GONE_CODES, LATE_SECONDS, reported
from replay_client.errors import GONE, DeadlineExceededError, InvalidRequestError, ServerClosedError
from replay_client.records import MutationResult, Sample, samples_of
from replay_client.requests import new_id
from replay_client.sampling import AsyncSampler, DrawStream, Series, ending, leases_of
from replay_client.shards.fleet import Fleet, Shard
from replay_client.shards.sharing import Weight, most_rows, share_out, share_values, use_up
from replay_client.waits import Deadline
from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame
from replay_protos.words import counted

logger = logging.getLogger(__name__)

WEIGHTS_AGE = 1.0
"""Seconds for which the last answer of a shard holds. A draw is wrong by what the shares change within this time. A
shard looks at its whole table to answer, so it is asked at most twice in this time."""
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
Plan = dict[Shard, tuple[int, Sequence[pb.ValueRows]]]
"""How many rows each shard is asked for, and of a table that balances how many of each value."""


MOST_UNSURE = 256
"""Parts that a client keeps to ask again; the oldest are forgotten first."""


class Drawer:
    """Draws batches over a stream to each shard. Until they are acknowledged, `lease` of their samples names the part.

    What is drawn and neither acknowledged nor leased goes back when `close` ends the streams. A request is that of the
    whole batch; its own timeout does not count.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._streams: dict[Shard, DrawStream] = {}
        self._unknown: set[str] = set()
        """Names of shards that this client does not have, and that a warning has named."""
        self._rng = np.random.default_rng()
        self._weights: dict[str, dict[Shard, tuple[float, Weight]]] = {}
        """By table: what each shard answered last, and when."""
        self._unsure: deque[tuple[bytes, list[Sample]]] = deque(maxlen=MOST_UNSURE)
        """Parts of batches, by the request, whose shards went away before they confirmed that this client acknowledged
        them."""

    def stream(self, shard: Shard) -> DrawStream:
        """The draws of this reader to one shard. The first request opens it."""
        if shard not in self._streams:
            self._streams[shard] = DrawStream(shard)
        return self._streams[shard]

    async def end(
        self, samples: Iterable[Sample], what: str, timeout: float | None, lease: float = 0.0
    ) -> MutationResult:
        """As `SingleBatches.end`, each on the shard that gave the sample.

        The batches of a shard that cannot be reached count as missing: nobody may use their samples. So do those of a
        shard that this client does not have, for example because a run goes on without it.
        """
        deadline = Deadline(timeout)
        if not (leases := leases_of(samples)):
            return MutationResult(0, ())
        await self._fleet.reachable(deadline)
        shards = {name: self._fleet.named(name) for name in leases}
        if unknown := {name for name, shard in shards.items() if shard is None} - self._unknown:
            self._unknown |= unknown
            logger.warning("batches of %s count as missing: this client has no such shard", ", ".join(sorted(unknown)))

        async def end_on(name: str, ids: list[int]) -> MutationResult:
            with suppress(*GONE):
                if (shard := shards[name]) is not None:
                    answer = await shard.run(self.stream(shard).finish(ending(what, ids, lease), deadline.seconds))
                    return MutationResult(len(answer.done), tuple(answer.missing))
            return MutationResult(0, tuple(ids))

        results = await asyncio.gather(*(end_on(name, ids) for name, ids in leases.items()))
        missing = tuple(batch for result in results for batch in result.missing)
        return MutationResult(sum(result.applied for result in results), missing)

    def sampler(self, series: Series) -> ShardedSampler:
        return ShardedSampler(self._fleet, series)

    def drop_soon(self) -> None:
        """Ends the streams, from any thread."""
        for stream in self._streams.values():
            stream.drop_soon()

    async def close(self) -> None:
        """Ends the streams in good order. What is neither acknowledged nor leased goes back."""
        await asyncio.gather(*(stream.close() for stream in self._streams.values()))

    async def sample(self, request: pb.SampleRequest, seconds: float | None) -> list[Sample]:
        """A batch that is the caller's, or leased to the caller for `request.lease` seconds.

        It may have less rows than are enough in one case: a shard goes away between its draw and the take, and the
        others cannot make up for it in time.
        """
        _check_rows(request)
        deadline = Deadline(seconds)
        acknowledged: list[Sample] = []
        while (missing := request.num_samples - len(acknowledged)) > 0:
            if not request.lease and (settled := await self.settled(request, missing)):
                acknowledged += settled
                continue
            try:
                parts = await self.draw(rest_of(request, acknowledged), deadline, request.lease)
            except DeadlineExceededError:
                if acknowledged:  # they cannot go back, and must not be lost
                    break
                raise
            if request.lease:
                return parts
            acknowledged += await self.acknowledge(request, parts)
            if deadline.passed and len(acknowledged) >= _least(request):
                break
        return acknowledged

    async def draw(self, request: pb.SampleRequest, deadline: Deadline, lease: float = 0.0) -> list[Sample]:
        """A batch in parts. Raises DeadlineExceededError with the reason, and then keeps nothing."""
        if drawn := await self._fill(request, request.num_samples, await self._known(request, deadline), lease):
            return drawn
        pause = _FIRST_PAUSE
        while True:
            last_look = deadline.passed
            weights = await self._weigh(request, await self._fleet.reachable(deadline))
            least = max(1, _least(request)) if last_look else request.num_samples
            if drawn := await self._fill(request, least, weights, lease):
                return drawn
            if last_look:
                raise DeadlineExceededError(_reason(request, weights))
            await asyncio.sleep(deadline.within(pause))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def acknowledge(self, request: pb.SampleRequest, samples: list[Sample], lease: float = 0.0) -> list[Sample]:
        """Acknowledges samples at their shards, and returns those that the shards confirm.

        A shard that goes away confirms nothing: `settled` asks it again later, also for a caller that is interrupted.
        With `lease` the caller gets the samples under a lease of that many seconds.
        """
        parts = {_part_of(sample) for sample in samples}
        acknowledged, unsure = set[Part](), parts
        try:
            acknowledged, unsure = await self._acknowledge_parts(parts, lease)
        finally:
            same_call = request.SerializeToString(deterministic=True)
            for part in () if lease else unsure:
                rows = [sample for sample in samples if _part_of(sample) == part]
                self._unsure.append((same_call, rows))
        confirmed = [sample for sample in samples if _part_of(sample) in acknowledged]
        for sample in () if lease else confirmed:
            sample.info.lease_id = 0
        return confirmed

    async def settled(self, request: pb.SampleRequest, rows: int) -> list[Sample]:
        """Returns up to `rows` rows that batches of an equal request lacked.

        Their shard has come back, and confirms that it gave them to this client.
        """
        settled: list[Sample] = []
        same_call = request.SerializeToString(deterministic=True)
        for entry in [entry for entry in self._unsure if entry[0] == same_call]:
            _, samples = entry
            shard = self._fleet.named(samples[0].info.shard)
            too_many = len(settled) + len(samples) > rows
            if shard is None or not shard.is_up or too_many or entry not in self._unsure:
                continue
            self._unsure.remove(entry)  # another call of this client must not ask for it as well
            settled += await self.acknowledge(request, samples)
        return settled

    def requeue(self, samples: Iterable[Sample]) -> None:
        """As far as their shards can be reached; the others take them back by themselves."""
        for name, part in {_part_of(sample) for sample in samples}:
            if (shard := self._fleet.named(name)) is not None:
                self.stream(shard).give_up(part)

    async def _known(self, request: pb.SampleRequest, deadline: Deadline) -> dict[Shard, Weight]:
        """What each shard that is up answered last. An old answer, and one of 0, is asked for again."""
        up, now, distinct = await self._fleet.reachable(deadline), time.monotonic(), not request.allow_repeats
        known = self._weights.setdefault(request.table, {})
        for shard in up:
            asked_at, weight = known.get(shard, (-math.inf, Weight()))
            if now - asked_at > WEIGHTS_AGE or not most_rows(weight, distinct):
                known.pop(shard, None)
        if unknown := [shard for shard in up if shard not in known]:
            # Without what this request leaves out: the answers serve other requests too.
            await self._weigh(pb.SampleRequest(table=request.table, allow_repeats=request.allow_repeats), unknown)
        return {shard: known[shard][1] for shard in up if shard in known}

    async def _weigh(self, request: pb.SampleRequest, shards: Iterable[Shard]) -> dict[Shard, Weight]:
        """What the shards that answer could be drawn for by this request."""
        answers = await self._ask({shard: _part(request, 0, 0.0, weigh=True) for shard in shards}, _WEIGH_SECONDS)
        weights = {shard: answer.head.weight for shard, answer in answers.items()}
        if _is_plain(request):
            known = self._weights.setdefault(request.table, {})
            known |= {shard: (time.monotonic(), weight) for shard, weight in weights.items()}
        return weights

    async def _fill(
        self, request: pb.SampleRequest, least: int, weights: dict[Shard, Weight], lease: float
    ) -> list[Sample]:
        """Up to `num_samples` rows, from shard after shard; none if `least` cannot be had now."""
        distinct = not request.allow_repeats
        rows = min(request.num_samples, _possible(weights, distinct))
        if rows < least:
            return []
        ordered = any(weight.ordered for weight in weights.values())
        total = sum(weight.total for weight in weights.values())
        shares = {
            shard: 1.0 if ordered or weight.values or not total else weight.total / total
            for shard, weight in weights.items()
        }
        size = sum(weight.size for weight in weights.values())
        drawn: list[Sample] = []
        try:
            while weights and len(drawn) < rows:
                if not (plan := self._plan(weights, rows - len(drawn), distinct)):
                    break
                answers = await self._answers(rest_of(request, drawn), weights, plan, lease)
                for shard, (count, _) in plan.items():
                    samples = answers.get(shard, [])
                    for sample in samples:
                        sample.info.probability *= shares[shard]
                        sample.info.shard, sample.info.table_size = shard.name, size
                    drawn += samples
                    if len(samples) < count:  # somebody else was faster, or it is gone
                        weights = {other: weight for other, weight in weights.items() if other is not shard}
        except BaseException:
            self.requeue(drawn)
            raise
        if len(drawn) < least:
            self.requeue(drawn)
            return []
        if not ordered:
            self._rng.shuffle(drawn)
        return drawn

    def _plan(self, weights: Mapping[Shard, Weight], rows: int, distinct: bool) -> Plan:
        shard_weights = list(weights.values())
        if any(weight.values for weight in shard_weights):
            values: Sequence[Sequence[pb.ValueRows]] = share_values(
                shard_weights, rows, distinct=distinct, rng=self._rng
            )
            counts = [sum(each.rows for each in part) for part in values]
        else:
            counts = share_out(shard_weights, rows, distinct=distinct, rng=self._rng)
            values = [()] * len(counts)
        return {shard: (count, part) for shard, count, part in zip(weights, counts, values, strict=True) if count}

    async def _answers(
        self, request: pb.SampleRequest, weights: Mapping[Shard, Weight], plan: Plan, lease: float
    ) -> dict[Shard, list[Sample]]:
        """The rows that the shards give."""
        known, requests = self._weights.setdefault(request.table, {}), {}
        for shard, (count, part) in plan.items():
            weight = weights[shard]
            is_old = shard not in known or time.monotonic() - known[shard][0] > WEIGHTS_AGE / 2
            # What a draw takes of a weight without an order only the shard knows.
            weigh = _is_plain(request) and (is_old or (weight.consuming and not weight.ordered))
            if weight.consuming:  # another task may draw before the answer
                use_up(weight, count, part)
            requests[shard] = _part(request, count, lease, weigh=weigh, values=part)
        answers = await self._ask(requests, _ANSWER_SECONDS)
        for shard, shard_request in requests.items():
            if shard not in answers or len(answers[shard].head.keys) < shard_request.num_samples:
                known.pop(shard, None)
            elif shard_request.weigh:
                known[shard] = time.monotonic(), answers[shard].head.weight
        return {shard: samples_of(*answer, leased=True) for shard, answer in answers.items()}

    async def _ask(
        self, requests: Mapping[Shard, pb.SampleRequest], seconds: float
    ) -> dict[Shard, Frame[pb.SampleResponse]]:
        """The answers of the shards that have rows, or were only asked for their weight.

        Raises the error of a shard that refuses, and then keeps no rows. So does a caller that is cancelled.
        """
        futures = {shard: self.stream(shard).draw(request) for shard, request in requests.items()}
        answers: dict[Shard, Frame[pb.SampleResponse]] = {}
        try:
            await self._answered(futures, seconds)
            for shard, future in futures.items():
                if not future.done():
                    self.stream(shard).give_up(requests[shard].id)
                elif (error := future.exception()) is None:
                    answers[shard] = future.result()
                elif isinstance(error, ServerClosedError) and self._fleet.named(shard.name) is not shard:
                    pass  # the fleet has lost this shard meanwhile, and closed its channel
                elif not (isinstance(error, grpc.aio.AioRpcError) and error.code() in _HAS_NOTHING):
                    raise error
        except BaseException as error:
            for shard, request in requests.items():
                self.stream(shard).give_up(request.id)
            if isinstance(error, grpc.aio.AioRpcError):
                raise reported(error, "a shard", seconds) from None
            raise
        return answers

    async def _answered(self, futures: Mapping[Shard, asyncio.Future[Any]], seconds: float) -> None:
        """Returns when all shards have answered, apart from those that hang or need more than `seconds`."""
        if futures:
            await asyncio.wait(futures.values(), timeout=LATE_SECONDS)
        late = [shard for shard, future in futures.items() if not future.done()]
        alive = await asyncio.gather(*(shard.answers() for shard in late))
        if waited_for := [futures[shard] for shard, is_alive in zip(late, alive, strict=True) if is_alive]:
            await asyncio.wait(waited_for, timeout=seconds)

    async def _acknowledge_parts(self, parts: set[Part], lease: float) -> tuple[set[Part], set[Part]]:
        """Returns the parts that were acknowledged, or leased, and those whose shards did not answer."""
        futures: dict[Shard, asyncio.Future[pb.SampleResponse]] = {}
        for name in {name for name, _ in parts}:
            ids = sorted(draw_id for owner, draw_id in parts if owner == name)
            request = pb.DrawRequest(renew=ids, seconds=lease) if lease else pb.DrawRequest(acknowledge=ids)
            if (shard := self._fleet.named(name)) is not None:
                futures[shard] = self.stream(shard).end(request)
        await self._answered(futures, _ANSWER_SECONDS)
        answers = {
            shard.name: future.result()
            for shard, future in futures.items()
            if future.done() and future.exception() is None
        }
        acknowledged = {(name, draw_id) for name, answer in answers.items() for draw_id in answer.done}
        return acknowledged, {(name, draw_id) for name, draw_id in parts if name not in answers}


class ShardedSampler(AsyncSampler):
    """An AsyncSampler over several shards. Up to `prefetch` batches are drawn ahead."""

    def __init__(self, fleet: Fleet, series: Series) -> None:
        self._drawer, self._series = Drawer(fleet), series
        _check_rows(series.request)
        self._request, self._lease = series.request, series.request.lease
        self._drawing: deque[asyncio.Task[list[Sample]]] = deque()
        self._acknowledged: list[Sample] = []
        """The acknowledged rows of a batch that lost other rows with a shard. The next batch begins with them."""
        self._closed = False

    async def __anext__(self) -> list[Sample]:
        """The next batch. Raises DeadlineExceededError, with the reason, if there is none within the timeout."""
        if self._closed:
            raise StopAsyncIteration
        deadline = Deadline(self._series.timeout)
        while (missing := self._request.num_samples - len(self._acknowledged)) > 0:
            if settled := await self._drawer.settled(self._request, missing):
                self._acknowledged += settled
                continue
            if self._acknowledged:  # rows are missing: draw exactly these
                drawn = await self._drawer.draw(rest_of(self._request, self._acknowledged), deadline)
            else:
                drawn = await self._drawn_ahead(deadline)
                self._draw_ahead(self._series.prefetch)  # the acknowledgements below ride on these draws
            if self._lease:
                self._series.on_lease(drawn)
            self._acknowledged += await self._drawer.acknowledge(self._request, drawn, self._lease)
        batch, self._acknowledged = self._acknowledged, []
        return batch

    async def _drawn_ahead(self, deadline: Deadline) -> list[Sample]:
        self._draw_ahead(max(1, self._series.prefetch))
        # Any of them: an order among batches that are drawn at the same time means nothing.
        await asyncio.wait(self._drawing, timeout=deadline.seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in self._drawing:
            if task.done():
                self._drawing.remove(task)
                return task.result()
        # The same question once more, for the reason of the wait.
        return await self._drawer.draw(self._request, deadline)

    def _draw_ahead(self, batches: int) -> None:
        while len(self._drawing) < batches:
            task = asyncio.create_task(self._drawer.draw(self._request, Deadline(None)))
            # Where the client is closed first, nobody asks for the result, and asyncio would log that.
            task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
            self._drawing.append(task)

    async def close(self) -> None:
        """Requeues what was drawn ahead."""
        self._closed = True
        drawing, self._drawing = self._drawing, deque()
        for task in drawing:
            task.cancel()
        await asyncio.gather(*drawing, return_exceptions=True)
        if self._lease:
            self._drawer.requeue(self._acknowledged)
        await self._drawer.close()

    def __del__(self) -> None:
        self._drawer.drop_soon()


def _part(
    request: pb.SampleRequest, rows: int, lease: float, *, weigh: bool, values: Sequence[pb.ValueRows] = ()
) -> pb.SampleRequest:
    """The request to one shard, which does not wait: for `rows` rows, of which one is enough, or for its weight."""
    part = pb.SampleRequest()
    part.CopyFrom(request)
    part.id, part.num_samples, part.min_samples, part.timeout = new_id(), rows, 1, 0.0
    part.lease, part.weigh = lease, weigh
    part.values.extend(values)
    return part


def _least(request: pb.SampleRequest) -> int:
    """Rows that are enough when the time is up."""
    return request.min_samples if request.HasField("min_samples") else request.num_samples


def _check_rows(request: pb.SampleRequest) -> None:
    """No shard sees the numbers of the whole batch. Raises InvalidRequestError."""
    if not 1 <= _least(request) <= request.num_samples:
        raise InvalidRequestError(f"min_samples {_least(request)} must be from 1 to num_samples {request.num_samples}")


def _is_plain(request: pb.SampleRequest) -> bool:
    """Returns whether this draw may use the weights that a shard told another draw."""
    return not request.scope and not request.exclude


def _part_of(sample: Sample) -> Part:
    return sample.info.shard, sample.info.lease_id


def rest_of(request: pb.SampleRequest, acknowledged: list[Sample]) -> pb.SampleRequest:
    """The request for the samples that are missing beside those `acknowledged`."""
    if not acknowledged:
        return request
    rest = pb.SampleRequest()
    rest.CopyFrom(request)
    rest.num_samples = request.num_samples - len(acknowledged)
    rest.min_samples = max(0, _least(request) - len(acknowledged))
    if not request.allow_repeats:
        rest.exclude.extend({sample.info.key for sample in acknowledged} - set(request.exclude))
    return rest


def _possible(weights: Mapping[Shard, Weight], distinct: bool) -> int:
    """How many rows the shards can give."""
    return sum(most_rows(weight, distinct) for weight in weights.values())


def _reason(request: pb.SampleRequest, weights: Mapping[Shard, Weight]) -> str:
    if not weights:
        return f"{request.table}: no shard answered"
    reasons = [f"{shard.name}: {weight.reason}" for shard, weight in weights.items() if weight.reason]
    possible = _possible(weights, not request.allow_repeats)
    wanted = f"{possible} of {request.num_samples} samples available on {counted(len(weights), 'shard')}"
    return f"{request.table}: {wanted}; " + "; ".join(reasons)
