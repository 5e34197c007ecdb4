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

How many rows each shard gives, so that the merged batch is one of a single table:

* `uniform`: a shard is drawn in proportion to the items that it has left. This is exact.
* `prioritized`: in proportion to its total effective priority. This is exact for the first row, and for all rows of a
  batch that allows repeats. Each further distinct row is drawn from what the rows before have left. Which items those
  are only their shard knows, so the weight that is left is an expectation: see `expected_rest`. With heavy-tailed
  priorities one row may take far more than expected. The batch is then drawn in several rounds of a few rows, and
  before each round the shards weigh what is left without the rows so far: see `rows_at_once`.
* Every other sampler has an order of its own. The shards that have something give in turn, each an equal run of rows. A
  message costs a server and this client as much as many small rows. So where rows are used up, a run is as long as all
  batches that a sampler draws ahead would need from one shard: together they have the same rows, and each asks fewer
  shards.
* A table that balances its draws over the values of a tag: see `balance.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from replay_client.connection import GONE_CODES, LATE_SECONDS, reported
from replay_client.errors import GONE, DeadlineExceededError, InvalidRequestError
from replay_client.records import MutationResult, Sample, samples_of
from replay_client.sampling import AsyncSampler, DrawStream, OnLease, check_prefetch, leases_of, new_id
from replay_client.shards.balance import BalancedBatch
from replay_client.shards.fleet import Fleet, Shard
from replay_client.shards.sharing import (
    Weight,
    most_rows,
    rows_at_once,
    share_in_turn,
    share_of_total,
    share_out,
    use_up,
)
from replay_client.waits import Deadline
from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame

logger = logging.getLogger(__name__)

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
class _Unsure:
    """A part of a batch. Its shard went away before it confirmed that this client took the part."""

    same_call: bytes
    """The request of the batch."""
    part: Part
    samples: list[Sample]


MOST_UNSURE = 256
"""Parts that a client keeps to ask again; the oldest are forgotten first."""


class Drawer:
    """Draws merged batches over a stream to each shard. Until they are taken, `lease` of their samples names the part.

    What is drawn and neither taken nor leased goes back when `close` ends the streams. A request is that of the whole
    batch; its own timeout does not count.
    """

    def __init__(self, fleet: Fleet, ahead: int = 1) -> None:
        """`ahead`: how many batches are drawn at the same time."""
        self._fleet, self._ahead = fleet, ahead
        self._streams: dict[Shard, DrawStream] = {}
        self._unknown: set[str] = set()
        """Names of shards that this client does not have, and that a warning has named."""
        self._rng = np.random.default_rng()
        self._turn = int(self._rng.integers(1 << 30))
        """The shard that gives first, where they give in turn."""
        self._weights: dict[str, tuple[float, dict[Shard, Weight]]] = {}
        """By table, with the time, where they hold for a while."""
        self._unsure: deque[_Unsure] = deque(maxlen=MOST_UNSURE)

    def stream(self, shard: Shard) -> DrawStream:
        """The draws of this reader to one shard. The first request opens it."""
        if shard not in self._streams:
            self._streams[shard] = DrawStream(shard)
        return self._streams[shard]

    async def end(
        self, samples: Iterable[Sample], request_for: Callable[[list[int]], pb.DrawRequest], timeout: float | None
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
                    answer = await shard.run(self.stream(shard).finish(request_for(ids), deadline.seconds))
                    return MutationResult(len(answer.done), tuple(answer.missing))
            return MutationResult(0, tuple(ids))

        results = await asyncio.gather(*(end_on(name, ids) for name, ids in leases.items()))
        missing = tuple(batch for result in results for batch in result.missing)
        return MutationResult(sum(result.applied for result in results), missing)

    def sampler(
        self, request: pb.SampleRequest, prefetch: int, seconds: float | None, on_lease: OnLease
    ) -> ShardedSampler:
        return ShardedSampler(self._fleet, request, prefetch, seconds, on_lease)

    def drop_soon(self) -> None:
        """Ends the streams, from any thread."""
        for stream in self._streams.values():
            stream.drop_soon()

    async def close(self) -> None:
        """Ends the streams in good order. What is neither taken nor leased goes back."""
        await asyncio.gather(*(stream.close() for stream in self._streams.values()))

    async def sample(self, request: pb.SampleRequest, seconds: float | None) -> list[Sample]:
        """A batch that is the caller's, or leased to the caller for `request.lease` seconds.

        It may have less rows than are enough in one case: a shard goes away between its draw and the take, and the
        others cannot make up for it in time.
        """
        _check_rows(request)
        deadline = Deadline(seconds)
        taken = [] if request.lease else await self.settled(request)
        while len(taken) < request.num_samples:
            try:
                parts = await self.draw(rest_of(request, taken), deadline, request.lease)
            except DeadlineExceededError:
                if taken:  # they cannot go back, and must not be lost
                    break
                raise
            if request.lease:
                return parts
            taken += await self.take(request, parts)
            if deadline.passed and len(taken) >= _least(request):
                break
        return taken

    async def draw(self, request: pb.SampleRequest, deadline: Deadline, lease: float = 0.0) -> list[Sample]:
        """A batch in parts. Raises DeadlineExceededError with the reason, and then keeps nothing."""
        pause, distinct = _FIRST_PAUSE, not request.allow_repeats
        while True:
            last_look = deadline.passed
            age, weights = await self._weights_for(request, deadline)
            possible = sum(most_rows(weight, distinct) for weight in weights.values())
            rows = min(request.num_samples, possible)
            if rows == request.num_samples or (last_look and rows >= max(1, _least(request))):
                drawn = await self._draw_rows(request, rows, weights, deadline, lease, weigh=age > WEIGHTS_AGE / 2)
                if len(drawn) >= rows:
                    return drawn
                self.give_back(drawn)  # somebody else was faster, or a shard went away
                self._weights.pop(request.table, None)
            if last_look:
                raise DeadlineExceededError(_reason(request, weights, possible))
            await asyncio.sleep(deadline.within(pause))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def take(self, request: pb.SampleRequest, samples: list[Sample], lease: float = 0.0) -> list[Sample]:
        """Takes samples from their shards, and returns those that the shards confirm.

        A shard that goes away confirms nothing: `settled` asks it again later, also for a caller that is interrupted.
        With `lease` the caller gets the samples under a lease of that many seconds.
        """
        parts = {_part_of(sample) for sample in samples}
        taken, unsure = set[Part](), parts
        try:
            taken, unsure = await self._take_parts(parts, lease)
        finally:
            same_call = request.SerializeToString(deterministic=True)
            for part in () if lease else unsure:
                rows = [sample for sample in samples if _part_of(sample) == part]
                self._unsure.append(_Unsure(same_call, part, rows))
        if lease:
            return [sample for sample in samples if _part_of(sample) in taken]
        return _without_leases([sample for sample in samples if _part_of(sample) in taken])

    async def settled(self, request: pb.SampleRequest) -> list[Sample]:
        """Returns rows that earlier batches of an equal request lacked, at most as many as it asks for.

        Their shard has come back, and confirms that it gave them to this client.
        """
        settled: list[Sample] = []
        same_call = request.SerializeToString(deterministic=True)
        for entry in [entry for entry in self._unsure if entry.same_call == same_call]:
            shard = self._fleet.named(entry.part[0])
            too_many = len(settled) + len(entry.samples) > request.num_samples
            if shard is None or not shard.is_up or too_many or entry not in self._unsure:
                continue
            self._unsure.remove(entry)  # another call of this client must not ask for it as well
            settled += await self.take(request, entry.samples)
        return settled

    def give_back(self, samples: Iterable[Sample]) -> None:
        """As far as their shards can be reached; the others take them back by themselves."""
        for name, part in {_part_of(sample) for sample in samples}:
            if (shard := self._fleet.named(name)) is not None:
                self.stream(shard).give_up(part)

    async def _weights_for(self, request: pb.SampleRequest, deadline: Deadline) -> tuple[float, dict[Shard, Weight]]:
        """The weight of each shard that is up, and how old they are, in seconds."""
        now = asyncio.get_running_loop().time()
        if (known := self._weights.get(request.table)) and _is_plain(request) and now - known[0] <= WEIGHTS_AGE:
            up = self._fleet.up()
            weights = {shard: known[1][shard] for shard in up if shard in known[1]}
            rows = sum(most_rows(weight, not request.allow_repeats) for weight in weights.values())
            enough = rows >= request.num_samples or not any(weight.ordered for weight in weights.values())
            if weights and len(weights) == len(up) and enough:
                return now - known[0], weights
        up = await self._fleet.reachable(deadline)
        answers = await self._ask({shard: _part(request, 0, 0.0, weigh=True) for shard in up}, _WEIGH_SECONDS)
        weights = {shard: answer.head.weight for shard, answer in answers.items()}
        self._keep(request, weights)
        return 0.0, weights

    def _keep(self, request: pb.SampleRequest, weights: dict[Shard, Weight]) -> None:
        if _is_plain(request):
            self._weights[request.table] = asyncio.get_running_loop().time(), weights

    async def _draw_rows(
        self,
        request: pb.SampleRequest,
        rows: int,
        weights: dict[Shard, Weight],
        deadline: Deadline,
        lease: float,
        *,
        weigh: bool,
    ) -> list[Sample]:
        """Draws `rows` rows, or less if somebody else was faster, in as many rounds as their priorities need."""
        if any(weight.values for weight in weights.values()):
            return await self._draw_balanced(request, rows, weights, deadline, lease, weigh=weigh)
        drawn: list[Sample] = []
        first_total = sum(weight.total for weight in weights.values())
        distinct = not request.allow_repeats
        try:
            while True:
                rest, given = rest_of(request, drawn), list(weights.values())
                now = rows_at_once(given, rows - len(drawn)) if distinct else rows
                if any(weight.ordered for weight in given):
                    ahead = self._ahead if any(weight.consuming for weight in given) else 1
                    counts, self._turn = share_in_turn(given, now, distinct=distinct, first=self._turn, ahead=ahead)
                else:
                    counts = share_out(given, now, distinct=distinct, rng=self._rng)
                more = await self._draw_parts(rest, weights, counts, lease, weigh=weigh)
                if drawn:  # the shards say the probability among what the rounds before have left
                    left = sum(weight.total for weight in given) / first_total
                    for sample in more:
                        sample.info.probability *= left
                drawn += more
                if len(drawn) >= rows or len(more) < now:
                    return drawn
                weights, weigh = await self._weights_of_rest(request, drawn, given, deadline), False
        except BaseException:
            self.give_back(drawn)
            raise

    async def _weights_of_rest(
        self, request: pb.SampleRequest, drawn: list[Sample], before: list[Weight], deadline: Deadline
    ) -> dict[Shard, Weight]:
        """The weight of each shard without the rows that the rounds so far have drawn."""
        if any(weight.consuming for weight in before):  # the next round changes what is kept for other draws
            self._weights.pop(request.table, None)
        return (await self._weights_for(rest_of(request, drawn), deadline))[1]

    async def _draw_balanced(
        self,
        request: pb.SampleRequest,
        rows: int,
        weights: dict[Shard, Weight],
        deadline: Deadline,
        lease: float,
        *,
        weigh: bool,
    ) -> list[Sample]:
        """As `_draw_rows`, where the table balances. The values of all rows are chosen before the first round."""
        distinct = not request.allow_repeats
        batch = BalancedBatch(list(weights.values()), rows, distinct=distinct, first=self._turn, rng=self._rng)
        try:
            while True:
                given = list(weights.values())
                parts = batch.next_round(given)
                counts = [sum(each.rows for each in part) for part in parts]
                rest = rest_of(request, batch.rows())
                answers = await self._answers(rest, weights, counts, lease, weigh=weigh, values=parts)
                came = batch.add([answers.get(shard, []) for shard in weights])
                if batch.is_complete or not 0 < sum(counts) == came:
                    return batch.rows()
                weights, weigh = await self._weights_of_rest(request, batch.rows(), given, deadline), False
        except BaseException:
            self.give_back(batch.rows())
            raise

    async def _draw_parts(
        self, request: pb.SampleRequest, weights: dict[Shard, Weight], counts: list[int], lease: float, *, weigh: bool
    ) -> list[Sample]:
        given = list(weights.values())
        ordered = any(weight.ordered for weight in given)
        shares = {shard: 1.0 if ordered else share_of_total(given, index) for index, shard in enumerate(weights)}
        parts = await self._answers(request, weights, counts, lease, weigh=weigh)
        for shard, samples in parts.items():
            for sample in samples:
                sample.info.probability *= shares[shard]
        # In turn, which keeps the order within each shard.
        merged = [sample for row in itertools.zip_longest(*parts.values()) for sample in row if sample is not None]
        if not ordered:
            self._rng.shuffle(merged)
        return merged

    async def _answers(
        self,
        request: pb.SampleRequest,
        weights: dict[Shard, Weight],
        counts: list[int],
        lease: float,
        *,
        weigh: bool,
        values: Sequence[Sequence[pb.ValueRows]] = (),
    ) -> dict[Shard, list[Sample]]:
        """The rows that the shards give, of those that they are asked for: `counts` rows, or these of each value."""
        given = list(weights.values())
        size = sum(weight.size for weight in given)
        if any(weight.ordered for weight in given) and any(weight.consuming for weight in given):
            # A draw of another task may come before the next weights. A shard that gives less is weighed again.
            for weight, count, part in itertools.zip_longest(given, counts, values):
                use_up(weight, count, part or ())
        elif any(weight.consuming for weight in given):
            weigh = True  # the total weight falls with each draw, by how much only the shard knows
        requests = {
            shard: _part(request, count, lease, weigh=weigh, values=part or ())
            for shard, count, part in itertools.zip_longest(weights, counts, values)
            if count or weigh
        }
        answers = await self._ask(requests, _ANSWER_SECONDS)
        if weigh:
            self._keep(request, {shard: answer.head.weight for shard, answer in answers.items()})
        parts = {}
        for shard, (head, payloads) in answers.items():
            parts[shard] = samples_of(head, payloads, leased=True)
            for sample in parts[shard]:
                sample.info.shard, sample.info.table_size = shard.name, size
        return parts

    async def _ask(
        self, requests: Mapping[Shard, pb.SampleRequest], seconds: float
    ) -> dict[Shard, Frame[pb.SampleResponse]]:
        """The answers of the shards that have rows, or were only asked for their weight.

        Raises the error of a shard that refuses, and then keeps no rows. So does a caller that is cancelled.
        """
        asked = {shard: self.stream(shard).draw(request) for shard, request in requests.items()}
        answers: dict[Shard, Frame[pb.SampleResponse]] = {}
        try:
            await self._answered(asked, seconds)
            for shard, future in asked.items():
                if not future.done():
                    self.stream(shard).give_up(requests[shard].id)
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

    async def _answered(self, asked: Mapping[Shard, asyncio.Future[Any]], seconds: float) -> None:
        """Returns when all shards have answered, apart from those that hang or need more than `seconds`."""
        if asked:
            await asyncio.wait(asked.values(), timeout=LATE_SECONDS)
        late = [shard for shard, future in asked.items() if not future.done()]
        alive = await asyncio.gather(*(shard.answers() for shard in late))
        if waited_for := [asked[shard] for shard, is_alive in zip(late, alive, strict=True) if is_alive]:
            await asyncio.wait(waited_for, timeout=seconds)

    def _give_up(self, requests: Mapping[Shard, pb.SampleRequest]) -> None:
        for shard, request in requests.items():
            self.stream(shard).give_up(request.id)

    async def _take_parts(self, parts: set[Part], lease: float) -> tuple[set[Part], set[Part]]:
        """Returns the parts that were taken, or leased, and those whose shards did not answer."""
        asked: dict[Shard, asyncio.Future[pb.SampleResponse]] = {}
        for name in {name for name, _ in parts}:
            ids = sorted(draw_id for owner, draw_id in parts if owner == name)
            request = pb.DrawRequest(renew=ids, seconds=lease) if lease else pb.DrawRequest(take=ids)
            if (shard := self._fleet.named(name)) is not None:
                asked[shard] = self.stream(shard).end(request)
        await self._answered(asked, _ANSWER_SECONDS)
        answers = {
            shard.name: future.result()
            for shard, future in asked.items()
            if future.done() and future.exception() is None
        }
        taken = {(name, draw_id) for name, answer in answers.items() for draw_id in answer.done}
        return taken, {(name, draw_id) for name, draw_id in parts if name not in answers}


class ShardedSampler(AsyncSampler):
    """An AsyncSampler over several shards. Up to `prefetch` merged batches are drawn ahead."""

    def __init__(
        self,
        fleet: Fleet,
        request: pb.SampleRequest,
        prefetch: int,
        timeout: float | None,
        on_lease: OnLease,
    ) -> None:
        """`request.lease`: seconds for which the caller has each batch; 0: for good."""
        check_prefetch(prefetch)
        _check_rows(request)
        self._drawer, self._request = Drawer(fleet, max(1, prefetch)), request
        self._prefetch, self._timeout = prefetch, timeout
        self._lease, self._on_lease = request.lease, on_lease
        self._drawing: deque[asyncio.Task[list[Sample]]] = deque()
        self._taken: list[Sample] = []
        """The taken rows of a batch that lost other rows with a shard. The next batch begins with them."""
        self._closed = False

    async def __anext__(self) -> list[Sample]:
        """The next batch. Raises DeadlineExceededError, with the reason, if there is none within the timeout."""
        if self._closed:
            raise StopAsyncIteration
        deadline = Deadline(self._timeout)
        if not self._taken:
            self._taken = await self._drawer.settled(self._request)
        while len(self._taken) < self._request.num_samples:
            if self._taken:  # rows are missing: draw exactly these
                drawn = await self._drawer.draw(rest_of(self._request, self._taken), deadline)
            else:
                drawn = await self._drawn_ahead(deadline)
                self._draw_ahead(self._prefetch)  # the takes below ride on these draws
            if self._lease:
                self._on_lease(drawn)
            self._taken += await self._drawer.take(self._request, drawn, self._lease)
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
        return await self._drawer.draw(self._request, deadline)

    def _draw_ahead(self, batches: int) -> None:
        while len(self._drawing) < batches:
            task = asyncio.create_task(self._drawer.draw(self._request, Deadline(None)))
            # Where the client is closed first, nobody asks for the result, and asyncio would log that.
            task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
            self._drawing.append(task)

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


def _without_leases(samples: list[Sample]) -> list[Sample]:
    for sample in samples:
        sample.info.lease = 0
    return samples


def _part_of(sample: Sample) -> Part:
    return sample.info.shard, sample.info.lease


def rest_of(request: pb.SampleRequest, taken: list[Sample]) -> pb.SampleRequest:
    """What is missing when `taken` is here already."""
    if not taken:
        return request
    rest = pb.SampleRequest()
    rest.CopyFrom(request)
    rest.num_samples = request.num_samples - len(taken)
    rest.min_samples = max(0, _least(request) - len(taken))
    if not request.allow_repeats:
        rest.exclude.extend({sample.info.key for sample in taken} - set(request.exclude))
    return rest


def _reason(request: pb.SampleRequest, weights: dict[Shard, Weight], possible: int) -> str:
    reasons = [f"{shard.name}: {weight.reason}" for shard, weight in weights.items() if weight.reason]
    if not weights:
        return f"{request.table}: no shard answered"
    wanted = f"{possible} of {request.num_samples} samples available on {len(weights)} shards"
    return f"{request.table}: {wanted}; " + "; ".join(reasons)
