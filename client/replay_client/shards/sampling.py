"""Sampling from several shards: fills a batch from shard after shard, and acknowledges it only when it is complete.

A batch is drawn in these steps:

1. Share the rows of the batch out among the shards, by the shards' weights (`sharing.py`).
2. Draw these rows from each shard.
3. If a shard gave fewer rows, share the missing rows out among the other shards, and draw them in the same way.
4. If the batch is complete, acknowledge its rows at their shards.
5. If all shards together have too few rows, requeue the drawn rows, request the weights of all shards, and begin again.
   Without the requeue, two readers that each hold half of the rows would wait for each other.

The weight of a shard says what the shard can give. The answer to a draw can bring the weight of its shard, too. The
client sends a request for only a weight if the last one is older than WEIGHTS_AGE, or if the shard had no rows. So most
batches cost one message to one shard, however many shards a pool has.

There is one draw stream to each shard. If a client goes away, no rows are lost, because its streams end and the shards
requeue the rows. If a shard goes away, it cannot confirm that its rows are acknowledged, so the other shards give rows
in their place. But the shard may have received the acknowledgement. So the client acknowledges the rows once more when
the shard is back. If the shard confirms them then, the next batch of an equal request begins with these rows.
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
"""Seconds for which the client uses the last weight of a shard. In this time, draws do not see how the weight changes.
A shard reads its whole table to compute its weight, so the client asks for the weight at most about twice in this
time."""
_ANSWER_SECONDS = 5.0
"""Seconds in which a shard must answer a draw. A shard that answers later gives nothing to the batch."""
_WEIGH_SECONDS = 2.0
"""Seconds in which a shard must answer a request for only its weight."""
_FIRST_PAUSE = 0.005
"""Seconds between the first two attempts to draw, while all shards together have too few rows. Each further pause is
twice as long as the pause before it."""
_LONGEST_PAUSE = 0.1
"""Seconds of the longest pause between two attempts to draw."""

_GIVES_NOTHING_CODES = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED, *GONE_CODES)
"""The status codes with which a draw fails because the shard has no rows, or is gone. Other shards may have rows."""

Part = tuple[str, int]
"""Names the part of a batch that came from one draw: the name of the shard, and the id of the draw at this shard."""
Plan = dict[Shard, tuple[int, Sequence[pb.ValueRows]]]
"""For each shard, the number of rows to draw from it, and, for a table that balances, the number of these rows of each
value."""
MOST_UNSURE = 256
"""The most parts that a client remembers because their shards did not confirm them. The oldest are forgotten first."""


class Drawer:
    """Draws batches over a stream to each shard.

    Until a sample is acknowledged, its `lease_id` is the id of the draw that gave it. Rows that are neither
    acknowledged nor leased are requeued when `close` ends the streams.

    The argument `request` of a method asks for a batch, or the rest of a batch, whichever shards give the rows. Its
    timeout is ignored.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._streams: dict[Shard, DrawStream] = {}
        self._warned_of: set[str] = set()
        """Names of shards of which a warning has already said that this client does not have them."""
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
        """Acknowledges, requeues or renews the leases of samples, each on the shard that gave the sample.

        The arguments are as in `SingleBatches.end`. The batches of a shard that cannot be reached count as missing, so
        that the caller does not use their samples. The batches of a shard that this client does not have count as
        missing too. For example, an operator may have removed that shard from the run.
        """
        deadline = Deadline(timeout)
        leases = leases_of(samples)
        if not leases:
            return MutationResult(0, ())
        await self._fleet.reachable(deadline)
        shards = {name: self._fleet.named(name) for name in leases}
        self._warn_of_unknown({name for name, shard in shards.items() if shard is None})

        async def end_on(name: str, ids: list[int]) -> MutationResult:
            """Ends or renews the leases `ids` on one shard. All ids count as missing if it cannot be reached."""
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
        """Warns of the shards `names`, which this client does not have, unless it has warned of them before."""
        new_names = names - self._warned_of
        if new_names:
            self._warned_of |= new_names
            listed = ", ".join(sorted(new_names))
            logger.warning("batches of %s count as missing: this client has no such shard", listed)

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
        """Draws a batch and acknowledges it, so that the caller owns it.

        If `request.lease` is set, the batch is leased to the caller for this number of seconds instead. A batch without
        a lease has fewer rows than `min_samples` in one case: a shard goes away after it gave its rows and before it
        confirmed their acknowledgement, and the other shards cannot replace these rows in time.
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
                if acknowledged:  # these rows cannot be requeued any more, and would be lost if this call raised
                    break
                raise
            if request.lease:
                return drawn
            acknowledged += await self.acknowledge(request, drawn)
            if deadline.passed and len(acknowledged) >= _least(request):
                break
        return acknowledged

    async def draw(self, request: pb.SampleRequest, deadline: Deadline, lease: float = 0.0) -> list[Sample]:
        """Draws a batch from one or more shards. The caller must acknowledge the batch unless it has a lease.

        If there is no batch before the deadline, requeues all drawn rows and raises DeadlineExceededError with the
        reason.
        """
        # First try with the last known weights, because to request new weights costs a message to each shard.
        known_weights = await self._known_weights(request, deadline)
        drawn = await self._fill(request, request.num_samples, known_weights, lease)
        if drawn:
            return drawn
        pause = _FIRST_PAUSE
        while True:
            is_last_attempt = deadline.passed  # when the time is up, one more attempt follows, for fewer rows
            weights = await self._weigh(request, await self._fleet.reachable(deadline))
            if is_last_attempt:
                # When the time is up, `min_samples` rows are enough. But they can be 0, for the rest of a batch that
                # has enough rows already. Then require one row, because a draw without rows counts as failed below.
                least = max(1, _least(request))
            else:
                least = request.num_samples
            drawn = await self._fill(request, least, weights, lease)
            if drawn:
                return drawn
            if is_last_attempt:
                raise DeadlineExceededError(_reason(request, weights))
            await asyncio.sleep(deadline.within(pause))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def acknowledge(self, request: pb.SampleRequest, samples: list[Sample], lease: float = 0.0) -> list[Sample]:
        """Acknowledges samples at their shards, and returns the samples whose acknowledgement is confirmed.

        A shard that goes away confirms nothing. `settled` later acknowledges the samples of such a shard once more. It
        does so even if the caller is interrupted in this method.

        With `lease`, this method does not acknowledge the samples, but begins leases of `lease` seconds, and returns
        the samples whose leases have begun.
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
        """Adds an entry for each of the parts `unsure` to `_unsure`, with the samples of the part."""
        request_bytes = request.SerializeToString(deterministic=True)
        for part in unsure:
            samples_of_part = [sample for sample in samples if _part_of(sample) == part]
            self._unsure.append((request_bytes, samples_of_part))

    async def settled(self, request: pb.SampleRequest, rows: int) -> list[Sample]:
        """Acknowledges once more the rows of shards that went away before they confirmed them, and that are back now.

        The rows are from earlier batches of an equal request, which were returned without these rows. Returns the rows
        that the shards confirm now, at most `rows`.
        """
        confirmed: list[Sample] = []
        request_bytes = request.SerializeToString(deterministic=True)  # equal bytes for equal arguments
        entries = [entry for entry in self._unsure if entry[0] == request_bytes]
        for entry in entries:
            _, samples = entry
            shard = self._fleet.named(samples[0].info.shard)
            if shard is None or not shard.is_up:
                continue
            if len(confirmed) + len(samples) > rows:  # more rows than the batch lacks
                continue
            if entry not in self._unsure:  # another call has removed this entry during the `await` below
                continue
            self._unsure.remove(entry)  # so that no other call acknowledges this part too
            confirmed += await self.acknowledge(request, samples)
        return confirmed

    def requeue(self, samples: Iterable[Sample]) -> None:
        """Requeues samples at the shards that can be reached. The other shards requeue their samples by themselves."""
        for name, draw_id in {_part_of(sample) for sample in samples}:
            shard = self._fleet.named(name)
            if shard is not None:
                self.stream(shard).give_up(draw_id)

    async def _known_weights(self, request: pb.SampleRequest, deadline: Deadline) -> dict[Shard, Weight]:
        """Returns the last weight of each shard that is up.

        First requests a new weight from each shard whose last weight is unknown, is old, or has no rows. Leaves out the
        shards that do not answer.
        """
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
            # Ask without `scope` and `exclude`, so that other requests can use the answers too.
            plain = pb.SampleRequest(table=request.table, allow_repeats=request.allow_repeats)
            await self._weigh(plain, unknown)
        return {shard: known[shard][1] for shard in up if shard in known}

    async def _weigh(self, request: pb.SampleRequest, shards: Iterable[Shard]) -> dict[Shard, Weight]:
        """Requests the weight of each shard for this request. Draws no rows. Leaves out shards that do not answer."""
        requests = {shard: _shard_request(request, rows=0, lease=0.0, weigh=True) for shard in shards}
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
        """Draws up to `num_samples` rows. If the shards have fewer than `least` rows now, returns an empty list.

        `weights` has the weight of each shard that may give rows. With `lease`, the rows are leased for `lease`
        seconds. Rows that are drawn but not returned are requeued.
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
                samples_of_shards = await self._draw_planned(rest_of(request, drawn), weights, plan, lease)
                for shard, (count, _) in plan.items():
                    samples = samples_of_shards.get(shard, [])
                    for sample in samples:
                        info = sample.info
                        info.probability *= factors[shard]
                        info.shard = shard.name
                        info.table_size = table_size
                    drawn += samples
                    if len(samples) < count:  # another client was faster, or the shard is gone: go on without the shard
                        weights = {other: weight for other, weight in weights.items() if other is not shard}
        except BaseException:
            self.requeue(drawn)
            raise
        if len(drawn) < least:
            self.requeue(drawn)
            return []
        if not ordered:
            self._rng.shuffle(drawn)  # otherwise the position of a row in the batch would depend on its shard
        return drawn

    def _plan(self, weights: Mapping[Shard, Weight], rows: int, distinct: bool) -> Plan:
        """Computes how many rows to draw from each shard, at most `rows` together. Leaves out shards without rows."""
        shard_weights = list(weights.values())
        plan: Plan = {}
        if any(weight.values for weight in shard_weights):  # the table balances
            values_of_shards = share_values(shard_weights, rows, distinct=distinct, rng=self._rng)
            for shard, values in zip(weights, values_of_shards, strict=True):
                count = sum(value_rows.rows for value_rows in values)
                if count:
                    plan[shard] = (count, values)
        else:
            counts = share_out(shard_weights, rows, distinct=distinct, rng=self._rng)
            for shard, count in zip(weights, counts, strict=True):
                if count:
                    plan[shard] = (count, ())
        return plan

    async def _draw_planned(
        self, request: pb.SampleRequest, weights: Mapping[Shard, Weight], plan: Plan, lease: float
    ) -> dict[Shard, list[Sample]]:
        """Draws as planned, and returns the samples of each shard that answers.

        Stores the weights that come with the answers. If draws remove rows from the table, reduces the weights in
        `weights` by the planned rows, in place.
        """
        known = self._weights.setdefault(request.table, {})
        requests: dict[Shard, pb.SampleRequest] = {}
        for shard, (count, values) in plan.items():
            weight = weights[shard]
            weigh = _is_plain(request) and self._needs_weight(request.table, shard, weight)
            if weight.consuming:  # another task may plan a draw with this weight before the answer arrives
                use_up(weight, count, values)
            requests[shard] = _shard_request(request, count, lease, weigh=weigh, values=values)
        answers = await self._ask(requests, _ANSWER_SECONDS)
        for shard, shard_request in requests.items():
            answer = answers.get(shard)
            if answer is None or len(answer.head.keys) < shard_request.num_samples:
                known.pop(shard, None)  # the weight was wrong, so the next draw requests it anew
            elif shard_request.weigh:
                known[shard] = (time.monotonic(), answer.head.weight)
        return {shard: samples_of(answer.head, answer.payloads, leased=True) for shard, answer in answers.items()}

    def _needs_weight(self, table: str, shard: Shard, weight: Weight) -> bool:
        """True if a draw from the shard should also bring a new weight. `weight` is its weight in the plan."""
        if weight.consuming and not weight.ordered:  # only the shard knows by how much the draw lowers its weight
            return True
        known = self._weights[table]
        if shard not in known:
            return True
        # When the known weight is older than WEIGHTS_AGE, the client requests a new one, which costs a message. A new
        # weight in the answer to a draw costs no message, so ask for it in this way at half of that age already.
        answered_at, _ = known[shard]
        return time.monotonic() - answered_at > WEIGHTS_AGE / 2

    async def _ask(
        self, requests: Mapping[Shard, pb.SampleRequest], seconds: float
    ) -> dict[Shard, Frame[pb.SampleResponse]]:
        """Sends each shard its request, and returns the answers of the shards.

        Leaves out the shards that have no rows, are gone, or do not answer within `seconds`. Raises the error of a
        shard that refuses its request. After an error, or if the caller is cancelled, requeues all drawn rows.
        """
        futures = {shard: self.stream(shard).draw(request) for shard, request in requests.items()}
        answers: dict[Shard, Frame[pb.SampleResponse]] = {}
        try:
            await self._wait_for_answers(futures, seconds)
            for shard, future in futures.items():
                if not future.done():  # too late: if the shard still draws rows, it must requeue them
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
        """True if the error means that the shard has no rows or is gone. The batch then goes on without the shard."""
        if isinstance(error, ServerClosedError):
            # The channel was closed. Either the fleet has removed this shard, or the whole client was closed.
            was_removed = self._fleet.named(shard.name) is not shard
            return was_removed
        return isinstance(error, grpc.aio.AioRpcError) and error.code() in _GIVES_NOTHING_CODES

    async def _wait_for_answers(self, futures: Mapping[Shard, asyncio.Future[Any]], seconds: float) -> None:
        """Waits until each shard has answered, hangs, or has had its time.

        Each shard has LATE_SECONDS to answer. A shard that has not answered by then is probed. If it answers the probe,
        it has `seconds` more. If it does not, it hangs.
        """
        if futures:
            await asyncio.wait(futures.values(), timeout=LATE_SECONDS)
        late = [shard for shard, future in futures.items() if not future.done()]
        answers_probe = await asyncio.gather(*(shard.answers() for shard in late))
        slow = [futures[shard] for shard, is_alive in zip(late, answers_probe, strict=True) if is_alive]
        if slow:
            await asyncio.wait(slow, timeout=seconds)

    async def _acknowledge_parts(self, parts: set[Part], lease: float) -> tuple[set[Part], set[Part]]:
        """Acknowledges the parts, or with `lease` begins leases of `lease` seconds for them.

        Returns two sets: the parts for which the shards confirm this, and the parts whose shards did not answer. All
        other parts had been requeued already.
        """
        futures: dict[Shard, asyncio.Future[pb.SampleResponse]] = {}
        names = {name for name, _ in parts}
        for name in names:
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
        self._drawer = Drawer(fleet)  # set before the check, because `__del__` uses it even if the check raises
        self._series = series
        _check_rows(series.request)
        self._request = series.request
        self._lease = series.request.lease
        """Seconds for which each batch is leased to the caller; 0: no lease."""
        self._drawing: deque[asyncio.Task[list[Sample]]] = deque()
        """The tasks that draw batches ahead."""
        self._acknowledged: list[Sample] = []
        """The acknowledged rows of a batch that is not complete, because a shard went away or the caller was
        interrupted. The next batch begins with these rows."""
        self._closed = False

    async def __anext__(self) -> list[Sample]:
        """Returns the next batch. Raises DeadlineExceededError, with the reason, if none comes within the timeout."""
        if self._closed:
            raise StopAsyncIteration
        deadline = Deadline(self._series.timeout)
        while (missing := self._request.num_samples - len(self._acknowledged)) > 0:
            settled = await self._drawer.settled(self._request, missing)
            if settled:
                self._acknowledged += settled
                continue
            if self._acknowledged:  # draw only the missing rows, because a batch that was drawn ahead is too large
                drawn = await self._drawer.draw(rest_of(self._request, self._acknowledged), deadline)
            else:
                drawn = await self._drawn_ahead(deadline)
                # Start the next draws before the acknowledgement below, so that one message carries both.
                self._draw_ahead(self._series.prefetch)
            if self._lease:
                self._series.on_lease(drawn)
            self._acknowledged += await self._drawer.acknowledge(self._request, drawn, self._lease)
        batch = self._acknowledged
        self._acknowledged = []
        return batch

    async def _drawn_ahead(self, deadline: Deadline) -> list[Sample]:
        """Returns a batch that was drawn ahead, and waits for one until the deadline.

        If there is none by then, draws once more without a wait. This draw raises DeadlineExceededError with the reason
        if there is still no batch.
        """
        self._draw_ahead(max(1, self._series.prefetch))
        # Wait for any batch, because batches that are drawn at the same time have no order.
        await asyncio.wait(self._drawing, timeout=deadline.seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in self._drawing:
            if task.done():
                self._drawing.remove(task)
                return task.result()
        return await self._drawer.draw(self._request, deadline)  # the time is up

    def _draw_ahead(self, batches: int) -> None:
        """Starts tasks that draw, until `_drawing` has a task for each of `batches` batches."""
        while len(self._drawing) < batches:
            task = asyncio.create_task(self._drawer.draw(self._request, Deadline(None)))
            task.add_done_callback(_ignore_error)
            self._drawing.append(task)

    async def close(self) -> None:
        """Requeues the batches that were drawn ahead, and ends the streams."""
        self._closed = True
        drawing = self._drawing
        self._drawing = deque()
        for task in drawing:
            task.cancel()
        await asyncio.gather(*drawing, return_exceptions=True)
        if self._lease:
            # The leases of the rows of an incomplete batch have begun already, so the end of the streams does not
            # requeue these rows.
            self._drawer.requeue(self._acknowledged)
        await self._drawer.close()

    def __del__(self) -> None:
        self._drawer.drop_soon()


def _ignore_error(ended: asyncio.Task[Any]) -> None:
    """Retrieves the error of a draw, because asyncio logs errors that no code retrieves, as after `close`."""
    if not ended.cancelled():
        ended.exception()


def _probability_factors(weights: Mapping[Shard, Weight], ordered: bool) -> dict[Shard, float]:
    """For each shard, the factor that turns a row's probability at the shard into its probability among all shards.

    The factor is the shard's share of the total weight. It is 1 for a table with an order, and if the total weight is
    0. It is also 1 for a table that balances values, because the plan has the factors of the values
    (`ValueRows.share`).
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
    """The request to one shard for up to `rows` rows of the batch. With `weigh` it asks for the shard's weight, too.

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
    """The number of rows that are enough when the time is up."""
    return request.min_samples if request.HasField("min_samples") else request.num_samples


def _check_rows(request: pb.SampleRequest) -> None:
    """Raises InvalidRequestError for impossible numbers of rows.

    A single server checks the numbers itself. But no shard of several sees the request for the whole batch, so the
    client checks them.
    """
    if not 1 <= _least(request) <= request.num_samples:
        raise InvalidRequestError(f"min_samples {_least(request)} must be from 1 to num_samples {request.num_samples}")


def _is_plain(request: pb.SampleRequest) -> bool:
    """True if the request draws from the whole table, so that its weights hold for other requests of the table, too."""
    return not request.scope and not request.exclude


def _part_of(sample: Sample) -> Part:
    """The part of the batch to which the sample belongs. The sample must not be acknowledged yet."""
    return sample.info.shard, sample.info.lease_id


def rest_of(request: pb.SampleRequest, samples: list[Sample]) -> pb.SampleRequest:
    """The request for the rest of a batch that has these samples already.

    The samples are acknowledged, or only drawn. The request excludes their keys, unless an item may be in the batch
    twice.
    """
    if not samples:
        return request
    rest = pb.SampleRequest()
    rest.CopyFrom(request)
    rest.num_samples = request.num_samples - len(samples)
    rest.min_samples = max(0, _least(request) - len(samples))
    if not request.allow_repeats:
        keys = {sample.info.key for sample in samples}
        rest.exclude.extend(keys - set(request.exclude))
    return rest


def _possible(weights: Mapping[Shard, Weight], distinct: bool) -> int:
    """The number of rows that the shards can give together."""
    return sum(most_rows(weight, distinct) for weight in weights.values())


def _reason(request: pb.SampleRequest, weights: Mapping[Shard, Weight]) -> str:
    """Says why there is no batch, for the error that a caller gets whose time is up."""
    if not weights:
        return f"{request.table}: no shard answered"
    reasons = [f"{shard.name}: {weight.reason}" for shard, weight in weights.items() if weight.reason]
    possible = _possible(weights, not request.allow_repeats)
    available = f"{possible} of {request.num_samples} samples available on {counted(len(weights), 'shard')}"
    return f"{request.table}: {available}; " + "; ".join(reasons)
