"""Sampling from several shards: fills a batch from shard after shard, and acknowledges it only when it is complete.

the shards' last answers ──▶ share the rows out ──▶ draw from each ──▶ all rows: acknowledge them
   ▲                                ▲                    │
   │                                └── less: the rest ──┤
   └──── weigh all shards, while they have too little ◀──┴── too few: requeue them

`sharing.py` computes how many rows each shard gives, from the last answers of the shards: their weights. The client
requests the weight of a shard again if the last answer is older than WEIGHTS_AGE, or if the shard had no rows. So most
batches cost one message to one shard, however many shards a pool has. If a shard has fewer rows than planned, other
shards give the rest. If all shards together have too few rows, all drawn rows are requeued: otherwise two readers that
each hold half of the rows would wait for each other.

There is one draw stream to each shard. If a client goes away, no rows are lost: its streams end, and the shards requeue
the rows. If a shard goes away, its rows cannot be confirmed, and the other shards give rows in their place. But the
shard may have received the acknowledgement of its rows. So the client acknowledges the rows again when the shard is
back. If the shard confirms that, the next batch of an equal request begins with these rows.
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
"""Seconds for which the client uses the last weight of a shard. Draws do not see changes of the weight in this time.
To compute its weight, a shard reads its whole table, so it is asked at most about twice in this time."""
_ANSWER_SECONDS = 5.0
"""Seconds in which a shard must answer a draw. A shard that answers later gives nothing to the batch."""
_WEIGH_SECONDS = 2.0
"""Seconds in which a shard must answer a request for only its weight."""
_FIRST_PAUSE = 0.005
"""Seconds between the first two attempts, while all shards together have too few rows. Each pause is twice the
last."""
_LONGEST_PAUSE = 0.1
"""Seconds of the longest of these pauses."""

_HAS_NOTHING = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED, *GONE_CODES)
"""The status codes of a shard that lacks rows, or is gone. Another shard may have rows."""

Part = tuple[str, int]
"""The part of a batch that one draw gave: the shard's name, and the id of the draw there."""
Plan = dict[Shard, tuple[int, Sequence[pb.ValueRows]]]
"""The number of rows to draw from each shard; for a table that balances, also the number of rows of each value."""
MOST_UNSURE = 256
"""The most parts that a client remembers because their shards did not confirm them. The oldest are forgotten first."""


class Drawer:
    """Draws batches over a stream to each shard.

    Until a sample is acknowledged, its `lease_id` has the id of the draw that gave it. Rows that are neither
    acknowledged nor leased are requeued when `close` ends the streams. The argument `request` of a method is the
    request for the whole batch, whose timeout is ignored.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._streams: dict[Shard, DrawStream] = {}
        self._unknown: set[str] = set()
        """Names of shards that this client does not have. A warning has named each of them already."""
        self._rng = np.random.default_rng()
        self._weights: dict[str, dict[Shard, tuple[float, Weight]]] = {}
        """For each table and shard: the time (time.monotonic) of the last weight, and this weight."""
        self._unsure: deque[tuple[bytes, list[Sample]]] = deque(maxlen=MOST_UNSURE)
        """The parts of batches that this client acknowledged, and whose shards went away before they confirmed the
        acknowledgement. Each entry has the bytes of the request for the batch, and the samples of the part."""

    def stream(self, shard: Shard) -> DrawStream:
        """The draw stream of this reader to one shard. The first request opens it."""
        if shard not in self._streams:
            self._streams[shard] = DrawStream(shard)
        return self._streams[shard]

    async def end(
        self, samples: Iterable[Sample], what: str, timeout: float | None, lease: float = 0.0
    ) -> MutationResult:
        """As `SingleBatches.end`, for each sample on the shard that gave it.

        The batches of a shard that cannot be reached count as missing, so that the caller does not use their samples.
        The batches of a shard that this client does not have count as missing too. For example, an operator may have
        removed that shard from the run.
        """
        deadline = Deadline(timeout)
        leases = leases_of(samples)
        if not leases:
            return MutationResult(0, ())
        await self._fleet.reachable(deadline)
        shards = {name: self._fleet.named(name) for name in leases}
        self._warn_of_unknown({name for name, shard in shards.items() if shard is None})

        async def end_on(name: str, ids: list[int]) -> MutationResult:
            """Ends or renews the leases `ids` on one shard. All count as missing if it cannot be reached."""
            shard = shards[name]
            if shard is not None:
                request = ending(what, ids, lease)
                with suppress(*GONE):  # the shard cannot be reached
                    answer = await shard.run(self.stream(shard).finish(request, deadline.seconds))
                    return MutationResult(len(answer.done), tuple(answer.missing))
            return MutationResult(0, tuple(ids))  # all are missing

        results = await asyncio.gather(*(end_on(name, ids) for name, ids in leases.items()))
        applied = 0
        missing: list[int] = []
        for result in results:
            applied += result.applied
            missing += result.missing
        return MutationResult(applied, tuple(missing))

    def _warn_of_unknown(self, names: set[str]) -> None:
        """Warns once of each shard that this client does not have."""
        unknown = names - self._unknown
        if unknown:
            self._unknown |= unknown
            logger.warning("batches of %s count as missing: this client has no such shard", ", ".join(sorted(unknown)))

    def sampler(self, series: Series) -> ShardedSampler:
        """A sampler with draw streams of its own."""
        return ShardedSampler(self._fleet, series)

    def drop_soon(self) -> None:
        """Ends the streams, from any thread."""
        for stream in self._streams.values():
            stream.drop_soon()

    async def close(self) -> None:
        """Ends the streams in good order. Rows that are neither acknowledged nor leased are requeued."""
        await asyncio.gather(*(stream.close() for stream in self._streams.values()))

    async def sample(self, request: pb.SampleRequest, seconds: float | None) -> list[Sample]:
        """A batch that the caller owns, or that is leased to the caller for `request.lease` seconds.

        The batch has fewer rows than `min_samples` in one case: a shard goes away after it gave its rows and before it
        confirmed their acknowledgement, and the other shards cannot give as many rows in time.
        """
        _check_rows(request)
        deadline = Deadline(seconds)
        acknowledged: list[Sample] = []
        while (missing := request.num_samples - len(acknowledged)) > 0:
            if not request.lease:
                settled = await self.settled(request, missing)
                if settled:
                    acknowledged += settled
                    continue
            try:
                drawn = await self.draw(rest_of(request, acknowledged), deadline, request.lease)
            except DeadlineExceededError:
                if acknowledged:  # these rows cannot be requeued any more, so return them, or they would be lost
                    break
                raise
            if request.lease:
                return drawn
            acknowledged += await self.acknowledge(request, drawn)
            if deadline.passed and len(acknowledged) >= _least(request):
                break
        return acknowledged

    async def draw(self, request: pb.SampleRequest, deadline: Deadline, lease: float = 0.0) -> list[Sample]:
        """A batch from one or more shards, which the caller must acknowledge unless it has a lease.

        Raises DeadlineExceededError with the reason if there is no batch; then all drawn rows are requeued.
        """
        # First try with the weights of the last answers, which costs no further message.
        known_weights = await self._known_weights(request, deadline)
        drawn = await self._fill(request, request.num_samples, known_weights, lease)
        if drawn:
            return drawn
        pause = _FIRST_PAUSE
        while True:
            is_last_attempt = deadline.passed  # when the time is up, one more attempt follows, for fewer rows
            weights = await self._weigh(request, await self._fleet.reachable(deadline))
            # When the time is up, `min_samples` rows are enough. This number is 0 for the rest of a batch that has
            # enough rows already, but `_fill` returns an empty list if there is no row.
            least = max(1, _least(request)) if is_last_attempt else request.num_samples
            drawn = await self._fill(request, least, weights, lease)
            if drawn:
                return drawn
            if is_last_attempt:
                raise DeadlineExceededError(_reason(request, weights))
            await asyncio.sleep(deadline.within(pause))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def acknowledge(self, request: pb.SampleRequest, samples: list[Sample], lease: float = 0.0) -> list[Sample]:
        """Acknowledges samples at their shards, and returns the samples whose shards confirm that.

        A shard that goes away confirms nothing. `settled` asks that shard again later, even if the caller was
        interrupted here. With a `lease`, this method does not acknowledge the samples, but begins their leases of
        `lease` seconds.
        """
        parts = {_part_of(sample) for sample in samples}
        acknowledged: set[Part] = set()
        unsure = parts  # all parts, if this call is interrupted before the answers arrive
        try:
            acknowledged, unsure = await self._acknowledge_parts(parts, lease)
        finally:
            if not lease:
                self._remember_unsure(request, samples, unsure)
        confirmed = [sample for sample in samples if _part_of(sample) in acknowledged]
        if not lease:
            for sample in confirmed:
                sample.info.lease_id = 0  # the caller of `sample` must not see the id of the draw as a lease
        return confirmed

    def _remember_unsure(self, request: pb.SampleRequest, samples: list[Sample], unsure: set[Part]) -> None:
        """Adds the samples of the parts `unsure` to `_unsure`, an entry for each part."""
        same_call = request.SerializeToString(deterministic=True)
        for part in unsure:
            rows = [sample for sample in samples if _part_of(sample) == part]
            self._unsure.append((same_call, rows))

    async def settled(self, request: pb.SampleRequest, rows: int) -> list[Sample]:
        """Up to `rows` rows of earlier batches of an equal request, which lost these rows because a shard went away.

        The shard is back, and confirms now that it gave the rows to this client.
        """
        settled: list[Sample] = []
        same_call = request.SerializeToString(deterministic=True)  # equal bytes for equal arguments
        for entry in [entry for entry in self._unsure if entry[0] == same_call]:
            _, samples = entry
            shard = self._fleet.named(samples[0].info.shard)
            if shard is None or not shard.is_up:
                continue
            if len(settled) + len(samples) > rows:  # more rows than the batch lacks
                continue
            if entry not in self._unsure:  # another call has removed this entry during the `await` below
                continue
            self._unsure.remove(entry)  # so that no other call acknowledges this part too
            settled += await self.acknowledge(request, samples)
        return settled

    def requeue(self, samples: Iterable[Sample]) -> None:
        """Requeues samples at the shards that can be reached. The other shards requeue their samples by themselves."""
        for name, draw_id in {_part_of(sample) for sample in samples}:
            shard = self._fleet.named(name)
            if shard is not None:
                self.stream(shard).give_up(draw_id)

    async def _known_weights(self, request: pb.SampleRequest, deadline: Deadline) -> dict[Shard, Weight]:
        """The last weight of each shard that is up. Requests the weight again if it is old, or if it had no rows."""
        up = await self._fleet.reachable(deadline)
        now = time.monotonic()
        distinct = not request.allow_repeats
        known = self._weights.setdefault(request.table, {})
        for shard in up:
            answered_at, weight = known.get(shard, (-math.inf, Weight()))
            if now - answered_at > WEIGHTS_AGE or not most_rows(weight, distinct):
                known.pop(shard, None)
        unknown = [shard for shard in up if shard not in known]
        if unknown:
            # Ask without `scope` and `exclude`, because the answers serve other requests too.
            plain = pb.SampleRequest(table=request.table, allow_repeats=request.allow_repeats)
            await self._weigh(plain, unknown)
        return {shard: known[shard][1] for shard in up if shard in known}

    async def _weigh(self, request: pb.SampleRequest, shards: Iterable[Shard]) -> dict[Shard, Weight]:
        """The weights for this request, of the shards that answer. Draws no rows."""
        requests = {shard: _shard_request(request, 0, 0.0, weigh=True) for shard in shards}
        answers = await self._ask(requests, _WEIGH_SECONDS)
        weights = {shard: answer.head.weight for shard, answer in answers.items()}
        if _is_plain(request):
            known = self._weights.setdefault(request.table, {})
            for shard, weight in weights.items():
                known[shard] = (time.monotonic(), weight)
        return weights

    async def _fill(
        self, request: pb.SampleRequest, least: int, weights: dict[Shard, Weight], lease: float
    ) -> list[Sample]:
        """Up to `num_samples` rows, from shard after shard; empty if the shards have fewer than `least` rows now.

        `weights` are those of the shards that may give rows. With `lease`, the rows are leased for these seconds.
        """
        distinct = not request.allow_repeats
        rows = min(request.num_samples, _possible(weights, distinct))
        if rows < least:
            return []
        ordered = any(weight.ordered for weight in weights.values())
        factors = _probability_factors(weights, ordered)
        table_size = sum(weight.size for weight in weights.values())
        drawn: list[Sample] = []
        try:
            while weights and len(drawn) < rows:
                plan = self._plan(weights, rows - len(drawn), distinct)
                if not plan:  # by their weights, the shards have no more rows
                    break
                answers = await self._answers(rest_of(request, drawn), weights, plan, lease)
                for shard, (count, _) in plan.items():
                    samples = answers.get(shard, [])
                    for sample in samples:
                        info = sample.info
                        info.probability *= factors[shard]
                        info.shard = shard.name
                        info.table_size = table_size
                    drawn += samples
                    if len(samples) < count:  # another client was faster, or the shard is gone: plan without it
                        weights = {other: weight for other, weight in weights.items() if other is not shard}
        except BaseException:
            self.requeue(drawn)
            raise
        if len(drawn) < least:
            self.requeue(drawn)
            return []
        if not ordered:
            self._rng.shuffle(drawn)  # else the position of a row in the batch would tell its shard
        return drawn

    def _plan(self, weights: Mapping[Shard, Weight], rows: int, distinct: bool) -> Plan:
        """The rows to draw from each shard, at most `rows` together. A shard that gives no rows is absent."""
        shard_weights = list(weights.values())
        plan: Plan = {}
        if any(weight.values for weight in shard_weights):  # the table balances
            values_of_shards = share_values(shard_weights, rows, distinct=distinct, rng=self._rng)
            for shard, values in zip(weights, values_of_shards, strict=True):
                count = sum(value.rows for value in values)
                if count:
                    plan[shard] = (count, values)
        else:
            counts = share_out(shard_weights, rows, distinct=distinct, rng=self._rng)
            for shard, count in zip(weights, counts, strict=True):
                if count:
                    plan[shard] = (count, ())
        return plan

    async def _answers(
        self, request: pb.SampleRequest, weights: Mapping[Shard, Weight], plan: Plan, lease: float
    ) -> dict[Shard, list[Sample]]:
        """The samples that the shards give for this plan. Stores the weights that come with the answers.

        Lowers the weights of `weights` in place by the planned rows, if draws remove rows from the table.
        """
        known = self._weights.setdefault(request.table, {})
        requests: dict[Shard, pb.SampleRequest] = {}
        for shard, (count, values) in plan.items():
            weight = weights[shard]
            # A weight that comes with this answer costs no message. A request for only a weight, which follows when the
            # last one is older than WEIGHTS_AGE, costs one. So renew the weight at half of that age.
            is_old = shard not in known or time.monotonic() - known[shard][0] > WEIGHTS_AGE / 2
            # If the table has no order, only the shard knows by how much a draw lowers the weight.
            changes_unseen = weight.consuming and not weight.ordered
            weigh = _is_plain(request) and (is_old or changes_unseen)
            if weight.consuming:  # another task may plan a draw with this weight before the answer arrives
                use_up(weight, count, values)
            requests[shard] = _shard_request(request, count, lease, weigh=weigh, values=values)
        answers = await self._ask(requests, _ANSWER_SECONDS)
        for shard, shard_request in requests.items():
            answer = answers.get(shard)
            if answer is None or len(answer.head.keys) < shard_request.num_samples:  # the weight was wrong
                known.pop(shard, None)
            elif shard_request.weigh:
                known[shard] = (time.monotonic(), answer.head.weight)
        return {shard: samples_of(answer.head, answer.payloads, leased=True) for shard, answer in answers.items()}

    async def _ask(
        self, requests: Mapping[Shard, pb.SampleRequest], seconds: float
    ) -> dict[Shard, Frame[pb.SampleResponse]]:
        """The answers of the shards. Leaves out the shards that have no rows, or do not answer within `seconds`.

        Raises the error of a shard that refuses. After an error, and if the caller is cancelled, all drawn rows are
        requeued.
        """
        futures = {shard: self.stream(shard).draw(request) for shard, request in requests.items()}
        answers: dict[Shard, Frame[pb.SampleResponse]] = {}
        try:
            await self._wait_for_answers(futures, seconds)
            for shard, future in futures.items():
                if not future.done():  # too late: if the shard draws rows after all, it requeues them
                    self.stream(shard).give_up(requests[shard].id)
                    continue
                error = future.exception()
                if error is None:
                    answers[shard] = future.result()
                elif not self._gives_nothing(shard, error):
                    raise error
        except BaseException as error:
            for shard, request in requests.items():
                self.stream(shard).give_up(request.id)
            if isinstance(error, grpc.aio.AioRpcError):
                raise reported(error, "a shard", seconds) from None
            raise
        return answers

    def _gives_nothing(self, shard: Shard, error: BaseException) -> bool:
        """True if the batch goes on without the shard after this error."""
        if isinstance(error, ServerClosedError):
            # The channel was closed. Either the fleet has removed this shard, or the whole client was closed.
            was_removed = self._fleet.named(shard.name) is not shard
            return was_removed
        return isinstance(error, grpc.aio.AioRpcError) and error.code() in _HAS_NOTHING

    async def _wait_for_answers(self, futures: Mapping[Shard, asyncio.Future[Any]], seconds: float) -> None:
        """Returns when all shards have answered, except for shards that hang or need more than `seconds`.

        Each shard has LATE_SECONDS first. A shard that is late is then probed, and has `seconds` more if it answers the
        probe.
        """
        if futures:
            await asyncio.wait(futures.values(), timeout=LATE_SECONDS)
        late = [shard for shard, future in futures.items() if not future.done()]
        answers_probe = await asyncio.gather(*(shard.answers() for shard in late))
        slow = [futures[shard] for shard, is_alive in zip(late, answers_probe, strict=True) if is_alive]
        if slow:
            await asyncio.wait(slow, timeout=seconds)

    async def _acknowledge_parts(self, parts: set[Part], lease: float) -> tuple[set[Part], set[Part]]:
        """Acknowledges the parts, or with `lease` begins their leases of these seconds.

        Returns first the parts for which that succeeded, then the parts whose shards did not answer. The other parts
        were requeued before.
        """
        futures: dict[Shard, asyncio.Future[pb.SampleResponse]] = {}
        for name in {name for name, _ in parts}:
            shard = self._fleet.named(name)
            if shard is None:  # the fleet has removed the shard: its parts count as not answered
                continue
            ids = sorted(draw_id for owner, draw_id in parts if owner == name)
            if lease:
                request = pb.DrawRequest(renew=ids, seconds=lease)
            else:
                request = pb.DrawRequest(acknowledge=ids)
            futures[shard] = self.stream(shard).end(request)
        await self._wait_for_answers(futures, _ANSWER_SECONDS)
        acknowledged: set[Part] = set()
        answered: set[str] = set()
        for shard, future in futures.items():
            if future.done() and future.exception() is None:
                answered.add(shard.name)
                acknowledged.update((shard.name, draw_id) for draw_id in future.result().done)
        silent = {(name, draw_id) for name, draw_id in parts if name not in answered}
        return acknowledged, silent


class ShardedSampler(AsyncSampler):
    """An AsyncSampler over several shards. Up to `prefetch` batches are drawn ahead, each by a task."""

    def __init__(self, fleet: Fleet, series: Series) -> None:
        """Raises InvalidRequestError for an impossible number of rows."""
        self._drawer = Drawer(fleet)  # before the check below, because `__del__` needs it even if the check raises
        self._series = series
        _check_rows(series.request)
        self._request = series.request
        self._lease = series.request.lease
        """Seconds; 0: no lease."""
        self._drawing: deque[asyncio.Task[list[Sample]]] = deque()
        """The tasks that draw batches ahead."""
        self._acknowledged: list[Sample] = []
        """The acknowledged rows of a batch that is not complete, because a shard went away or the caller was
        interrupted. The next batch begins with these rows."""
        self._closed = False

    async def __anext__(self) -> list[Sample]:
        """The next batch. Raises DeadlineExceededError, with the reason, if no batch comes within the timeout."""
        if self._closed:
            raise StopAsyncIteration
        deadline = Deadline(self._series.timeout)
        while (missing := self._request.num_samples - len(self._acknowledged)) > 0:
            settled = await self._drawer.settled(self._request, missing)
            if settled:
                self._acknowledged += settled
                continue
            if self._acknowledged:  # a batch that was drawn ahead would be too large: draw only the missing rows
                drawn = await self._drawer.draw(rest_of(self._request, self._acknowledged), deadline)
            else:
                drawn = await self._drawn_ahead(deadline)
                # Start the next draws before the acknowledgement below, which then travels in their messages.
                self._draw_ahead(self._series.prefetch)
            if self._lease:
                self._series.on_lease(drawn)
            self._acknowledged += await self._drawer.acknowledge(self._request, drawn, self._lease)
        batch = self._acknowledged
        self._acknowledged = []
        return batch

    async def _drawn_ahead(self, deadline: Deadline) -> list[Sample]:
        """The next batch that was drawn ahead. Waits for one until the deadline, and then raises the reason."""
        self._draw_ahead(max(1, self._series.prefetch))
        # Wait for any batch, because batches that are drawn at the same time have no order.
        await asyncio.wait(self._drawing, timeout=deadline.seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in self._drawing:
            if task.done():
                self._drawing.remove(task)
                return task.result()
        # The time is up. Make one more draw: if there is still no batch, its error has the reason.
        return await self._drawer.draw(self._request, deadline)

    def _draw_ahead(self, batches: int) -> None:
        """Starts tasks until `batches` of them draw or have drawn a batch."""
        while len(self._drawing) < batches:
            task = asyncio.create_task(self._drawer.draw(self._request, Deadline(None)))
            task.add_done_callback(_ignore_error)
            self._drawing.append(task)

    async def close(self) -> None:
        """Requeues the batches that were drawn ahead."""
        self._closed = True
        drawing = self._drawing
        self._drawing = deque()
        for task in drawing:
            task.cancel()
        await asyncio.gather(*drawing, return_exceptions=True)
        if self._lease:  # the rows of an incomplete batch, whose leases have begun already
            self._drawer.requeue(self._acknowledged)
        await self._drawer.close()

    def __del__(self) -> None:
        self._drawer.drop_soon()


def _ignore_error(ended: asyncio.Task[Any]) -> None:
    """Retrieves the error of a draw. asyncio logs an error that no code has retrieved, as after `close`."""
    if not ended.cancelled():
        ended.exception()


def _probability_factors(weights: Mapping[Shard, Weight], ordered: bool) -> dict[Shard, float]:
    """By the shard: the factor that makes the probability of a row at the shard the probability among all shards.

    The factor is the shard's share of the total weight. It is 1 for a table with an order, and if the total weight is
    0. It is 1 for a table with balanced values, too: its factors are in the plan (`ValueRows.share`).
    """
    total = sum(weight.total for weight in weights.values())
    factors: dict[Shard, float] = {}
    for shard, weight in weights.items():
        if ordered or weight.values or not total:
            factors[shard] = 1.0
        else:
            factors[shard] = weight.total / total
    return factors


def _shard_request(
    request: pb.SampleRequest, rows: int, lease: float, *, weigh: bool, values: Sequence[pb.ValueRows] = ()
) -> pb.SampleRequest:
    """The request to one shard for up to `rows` rows of the batch, and with `weigh` for the shard's weight too.

    The shard answers at once with the rows that it has, because the timeout is 0 and one row is enough.
    """
    shard_request = pb.SampleRequest()
    shard_request.CopyFrom(request)
    shard_request.id = new_id()
    shard_request.num_samples = rows
    shard_request.min_samples = 1
    shard_request.timeout = 0.0
    shard_request.lease = lease
    shard_request.weigh = weigh
    shard_request.values.extend(values)
    return shard_request


def _least(request: pb.SampleRequest) -> int:
    """The number of rows that is enough when the time is up."""
    return request.min_samples if request.HasField("min_samples") else request.num_samples


def _check_rows(request: pb.SampleRequest) -> None:
    """Raises InvalidRequestError for impossible numbers of rows.

    A single server checks the numbers itself. Of several shards, none sees the request for the whole batch.
    """
    if not 1 <= _least(request) <= request.num_samples:
        raise InvalidRequestError(f"min_samples {_least(request)} must be from 1 to num_samples {request.num_samples}")


def _is_plain(request: pb.SampleRequest) -> bool:
    """True if the weights for this request hold for other requests of the table, too."""
    return not request.scope and not request.exclude


def _part_of(sample: Sample) -> Part:
    """The part of the batch to which the sample belongs, until it is acknowledged."""
    return sample.info.shard, sample.info.lease_id


def rest_of(request: pb.SampleRequest, acknowledged: list[Sample]) -> pb.SampleRequest:
    """The request for the rest of a batch that has these samples already: acknowledged ones, or only drawn ones.

    The request excludes their keys, unless an item may be in the batch twice.
    """
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
    """The number of rows that the shards can give together."""
    return sum(most_rows(weight, distinct) for weight in weights.values())


def _reason(request: pb.SampleRequest, weights: Mapping[Shard, Weight]) -> str:
    """The reason why there is no batch, for the error of a caller whose time is up."""
    if not weights:
        return f"{request.table}: no shard answered"
    reasons = [f"{shard.name}: {weight.reason}" for shard, weight in weights.items() if weight.reason]
    possible = _possible(weights, not request.allow_repeats)
    wanted = f"{possible} of {request.num_samples} samples available on {counted(len(weights), 'shard')}"
    return f"{request.table}: {wanted}; " + "; ".join(reasons)
