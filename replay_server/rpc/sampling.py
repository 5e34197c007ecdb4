"""Sampling: draws batches for readers, sends them, and requeues the batches that readers do not acknowledge.

A reader asks for a batch with a draw, under an id that the reader chooses at random. The batch has the same id. One
stream (`Draw`) carries any number of draws at once, and the ids of batches that the reader acknowledges, requeues or
renews:

    reader ──draw 1, draw 2─────────▶ server    each draw waits in the line of its table
    reader ◀──rows of 2, rows of 1─── server    both batches are outstanding, until exactly one call ends each
    reader ──acknowledge 2, draw 3──▶ server    all bytes of batch 2 have arrived, and the reader uses the batch
    reader ◀──done: 2─────────────── server    batch 2 counts as sampled (if an item in it became stale: "missing: 2")

The ids make it safe to repeat messages. A reader whose stream broke does not know which messages the server received,
so it sends the same ids on its next stream. If the server receives a draw again, it first requeues the batch that it
has drawn for the first attempt. So `OpenDraws` has the draws of all streams. If a reader repeats the acknowledgement or
the requeue of a batch, the server recognises the id of the batch (`Remembered`), also after a restart.

* A drawn batch is outstanding until exactly one call ends it, whatever its client does.
* The payloads of a batch stay in storage until they are sent, even if the batch ends before that.
* In durable mode the server confirms an acknowledgement only after the acknowledgement is written to disk.
* A batch that is neither acknowledged nor leased when its stream ends is requeued at once.

The call `Sample` is one draw without a stream, for clients that need only one batch.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replay_protos import replay_pb2 as pb
from replay_protos.framing import BYTES_PER_MESSAGE, Frame
from replay_protos.label_columns import tags_message
from replay_server.config import MAX_DRAWS, MAX_EXCLUDE, MAX_KEYS, MAX_LEASE, MAX_ROWS, MAX_SCOPE
from replay_server.errors import Refused, busy, invalid, try_again
from replay_server.rpc.calls import Call, once, split_payloads
from replay_server.rpc.clients import ClientRole, OnMessage
from replay_server.rpc.limits import Backend
from replay_server.storage.memory import read_payloads
from replay_server.tables.balance import ValueRows
from replay_server.tables.extensions.permit_tables import PermitTables
from replay_server.tables.items import DamagedPayloads
from replay_server.tables.outstanding import MOST_ID, PendingSample, new_id
from replay_server.tables.table import Payload, SampleBatch, SampleRequest
from replay_server.tables.waiting import deadline_at

Response = Frame[pb.SampleResponse]

_LEAST_ID = 1 << 32
"""The least id of a draw. A client that sends a smaller id has probably not chosen it at random. Two such clients would
soon use the same id, and each would requeue the batches of the other. So smaller ids are refused."""

MAX_UNANSWERED = 1024
"""The most answers of one stream that wait to be sent to a slow reader. At this number, the server reads no further
requests of the stream."""


class SampleMethods:
    """The gRPC methods by which readers draw batches, and consume items."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.draws = OpenDraws(backend)

    async def Sample(self, request: pb.SampleRequest, call: Call) -> None:
        """Draws one batch and sends it. Then acknowledges the batch, or leases it if the request asks for a lease.

        If the call ends before the acknowledgement or the lease, the batch is requeued.
        """
        backend = self.backend
        draws = self.draws
        ready = asyncio.Event()
        is_leased = False
        role = _role(backend, request.table)
        # Until the block ends, the client counts as connected.
        with backend.clients.calling(call.context, role):
            # `ready` is set when the batch is drawn, or cannot be drawn. If it cannot, `responses` raises the error.
            draw = draws.begin(request, call.client, on_ready=lambda _: ready.set(), stream=None)
            try:
                while (responses := draws.responses(draw)) is None:
                    await ready.wait()
                    ready.clear()
                # A batch has at least one message. The loop sends all messages except the last one.
                last = next(responses)
                for response in responses:
                    await call.write(last)
                    last = response
                # A reader that has the last message may rely on the batch, even if the server is killed then. So in
                # durable mode the acknowledgement is written to disk before the last message is sent.
                if not request.lease and backend.is_durable:
                    await backend.durable()  # raises Refused if the disk fails, before anything is acknowledged
                    draws.acknowledge(draw)
                    await backend.durable()  # returns when the acknowledgement is written
                await call.write(last)
                if request.lease > 0:
                    is_leased = True
                    draws.lease(draw, request.lease)
                else:
                    draws.acknowledge(draw)  # no effect in durable mode, in which the batch is acknowledged above
            finally:
                if not is_leased:
                    draws.drop(draw)  # no effect if the batch was acknowledged

    async def Draw(self, call: Call) -> None:
        """Serves a stream of draws."""
        with self.backend.clients.calling(call.context, None) as on_message:
            await DrawResponder(self.backend, self.draws, call, on_message).run()

    @once(pb.MutationResponse)
    async def ConsumeItems(self, request: pb.ConsumeItemsRequest, call: Call) -> pb.MutationResponse:
        """Draws and acknowledges items without sending them.

        Their reader has used the items already, but cannot acknowledge its batch, because its lease has ended.
        """
        if len(request.keys) > MAX_KEYS:
            raise invalid(f"{len(request.keys)} keys: at most {MAX_KEYS} in one request")
        buffer = self.backend.buffer
        buffer.check_open()
        keys = list(dict.fromkeys(request.keys))
        table = buffer.table(request.table)
        missing = table.columns.absent(keys)
        batch_id = buffer.outstanding.draw_keys(table, np.array(keys, dtype=np.uint64))
        if batch_id:  # 0: the table has none of the items
            # `sent`: the items count as sampled even if they are too stale, because the reader has used them.
            buffer.acknowledge(batch_id, sent=True)
        return pb.MutationResponse(applied=len(keys) - len(missing), missing=missing)


def _role(backend: Backend, table: str) -> ClientRole:
    """Returns the role of clients that sample this table.

    Archivers sample copies, generators sample prompts or partial groups, and trainers sample all other tables.
    """
    buffer = backend.buffer
    if table in buffer.items.copies:
        return ClientRole.ARCHIVER
    permit_tables = PermitTables.of(buffer)
    if permit_tables is not None and table in permit_tables.tables:
        return ClientRole.GENERATOR
    if table in backend.clients.prompt_tables:
        return ClientRole.GENERATOR
    return ClientRole.TRAINER


def _check_lease(seconds: float) -> None:
    """Raises Refused if a lease may not last `seconds`."""
    if not 0 <= seconds <= MAX_LEASE:
        raise invalid(f"lease must be a number of seconds from 0 to {MAX_LEASE:g}, not {seconds}")


def _table_request(request: pb.SampleRequest) -> SampleRequest:
    """Converts a draw to the request that tables serve. Raises Refused if the draw asks for more than is allowed."""
    _check_lease(request.lease)
    if request.num_samples > MAX_ROWS:
        raise invalid(f"num_samples {request.num_samples}: at most {MAX_ROWS} in one request")
    if len(request.exclude) > MAX_EXCLUDE:
        raise invalid(f"{len(request.exclude)} keys to exclude: at most {MAX_EXCLUDE} in one request")
    if len(request.scope) > MAX_SCOPE:
        raise invalid(f"a scope of {len(request.scope)} characters: at most {MAX_SCOPE}")
    distinct_values = {entry.value for entry in request.values}
    if len(distinct_values) < len(request.values):
        raise invalid("values of a draw name a value twice: give the rows of each value once")
    if request.id and not _LEAST_ID <= request.id <= MOST_ID:
        raise invalid(f"id {request.id} of a draw: choose 63 random bits, and at least {_LEAST_ID}")
    min_samples = request.min_samples if request.HasField("min_samples") else request.num_samples
    return SampleRequest(
        num_samples=request.num_samples,
        min_samples=min_samples,
        distinct=not request.allow_repeats,
        scope=request.scope,
        exclude=frozenset(request.exclude),
        id=request.id or new_id(),  # a call of `Sample` needs no id
        values=tuple(ValueRows(entry.value, entry.rows, entry.share) for entry in request.values),
    )


@dataclass(eq=False, slots=True)
class OpenDraw:
    """One draw, from its request until its batch is acknowledged or requeued."""

    request: pb.SampleRequest
    wanted: SampleRequest
    """The same request in the form that tables serve. Its id is the id of the draw, even if `request` has none."""
    client: str
    """The connection of the reader."""
    deadline: float
    """The time at which the draw stops waiting for a batch, by the clock of the buffer."""
    on_ready: Callable[[OpenDraw], None]
    """Called when the batch is drawn, or cannot be drawn. The call comes in the middle of a change of the buffer, so
    the function may change nothing, and only note that the draw is ready."""
    stream: DrawResponder | None
    """The stream whose end also ends the draw; None: the draw is leased, or was made by a call of `Sample`."""
    pending: PendingSample | None = None
    """Waits in the line of the table, and then has the batch; None: the batch was leased before a restart."""
    share: ExitStack = field(default_factory=ExitStack)
    """Holds the part of the budget `Backend.outstanding` that this draw uses, and gives it back when it is closed."""
    timer: asyncio.TimerHandle | None = None
    """Ends the wait at the deadline. When the batch is leased, a new timer requeues it at the end of the lease."""
    ended: bool = False
    """True if the batch was acknowledged or requeued, or if the draw was ended before it got a batch."""

    @property
    def in_use(self) -> bool:
        """True if the reader uses the batch already, or will as soon as it arrives.

        Then the batch stays valid even if its rows become too stale.
        """
        return self.stream is None or self.request.lease > 0


class OpenDraws:
    """All draws of a server that have not ended."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffer = backend.buffer
        self.by_id: dict[int, OpenDraw] = {}
        self._buffer.outstanding.on_closed = self._closed
        # These leases were recorded before a restart. Each of them begins anew.
        for batch_id, seconds in self._buffer.outstanding.leased.items():
            # For this draw nothing is drawn or sent any more, so only its id is used.
            draw = OpenDraw(
                request=pb.SampleRequest(),
                wanted=SampleRequest(num_samples=1, min_samples=1, id=batch_id),
                client="",
                deadline=0.0,
                on_ready=lambda _: None,
                stream=None,
            )
            self.by_id[batch_id] = draw
            self.lease(draw, seconds)
        self.check()

    def begin(
        self,
        request: pb.SampleRequest,
        client: str,
        on_ready: Callable[[OpenDraw], None],
        stream: DrawResponder | None,
    ) -> OpenDraw:
        """Begins a draw: puts it into the line of its table. Ends an earlier draw with the same id.

        Raises Refused if the draw can never be served, or if its batch was acknowledged or requeued already.
        """
        wanted = _table_request(request)
        timeout = request.timeout if request.HasField("timeout") else None
        deadline = deadline_at(self._buffer.clock(), timeout)
        outstanding = self._buffer.outstanding
        if wanted.id in outstanding.acknowledged or wanted.id in outstanding.requeued:
            raise invalid(f"draw {wanted.id} has ended: choose a new id for each draw")
        previous_attempt = self.by_id.get(wanted.id)
        if previous_attempt is not None:
            self.drop(previous_attempt)  # the reader repeats the draw, because it did not receive the whole answer
        draw = OpenDraw(
            request=request,
            wanted=wanted,
            client=client,
            deadline=deadline,
            on_ready=on_ready,
            stream=stream,
        )
        self._wait(draw)
        assert wanted.id not in self.by_id, "the attempt before has not ended"
        self.by_id[wanted.id] = draw
        return draw

    def responses(self, draw: OpenDraw) -> Iterator[Response] | None:
        """Returns the messages of the batch; None: the draw waits, or waits again because an item was damaged.

        Raises Refused, and ends the draw, if there will be no batch. The iterator does the same if it finds a damaged
        item after it has yielded messages.
        """
        if draw.ended:  # `begin` has ended it for a later draw with the same id
            raise try_again("the same draw was asked for again, and the new request gets the batch")
        assert draw.pending is not None
        if not draw.pending.done:
            return None
        try:
            _, batch = draw.pending.result()  # raises the error if nothing was drawn
            return self._read(draw, batch)
        except Refused:
            self.drop(draw)
            raise

    def set_ahead(self, draw: OpenDraw, ahead: bool) -> None:
        """Notes whether the draw is made ahead, which means that nobody waits for its batch yet.

        While a draw is ahead, the line of its table does not count it as waiting.
        """
        if draw.pending is not None:
            for line in draw.pending.lines:
                line.set_ahead(draw.pending, ahead)

    def _read(self, draw: OpenDraw, batch: SampleBatch) -> Iterator[Response] | None:
        """Reads the first payloads of a batch, and returns its messages.

        If an item is damaged, removes the item, lets the draw wait again, and returns None. Raises Refused if the
        client has too many samples outstanding.
        """
        # A batch stays outstanding after it is sent, except a batch of `Sample` without a lease.
        outlives_sending = draw.stream is not None or draw.request.lease
        if outlives_sending:
            # `backend.outstanding` is a budget of samples. The outstanding batches are in `buffer.outstanding`.
            share = self._backend.outstanding.held(draw.client, len(batch))
            draw.share.enter_context(share)
        keys: list[int] = batch.keys.tolist()
        try:
            # `batch.sizes` are the sizes at the draw, so the payloads end before segments that were appended since.
            # `read_payloads` reads the first few MB of the payloads now, and the rest while `_messages` iterates.
            payloads = read_payloads(self._buffer.storage, keys, batch.sizes.tolist())
        except DamagedPayloads as damage:
            draw.share.close()
            self._buffer.requeue(draw.wanted.id)
            self._buffer.discard(damage.keys)
            self._wait(draw)
            return None
        return self._messages(draw, batch, keys, payloads)

    def _wait(self, draw: OpenDraw) -> None:
        """Puts the draw into the line of its table, until its deadline. Raises Refused if the buffer refuses it."""
        buffer = self._buffer
        pending = buffer.sample(draw.request.table, draw.wanted, draw.deadline)
        draw.pending = pending
        if draw.stream is not None and not draw.stream.awaited:
            self.set_ahead(draw, ahead=True)
        left = draw.deadline - buffer.clock()
        if left <= 0:
            buffer.time_out(pending)  # no effect if the batch was drawn at once
        if pending.done:  # `pending` has a batch, or the error of a deadline that has passed
            draw.on_ready(draw)
            return
        pending.on_done = lambda: draw.on_ready(draw)
        self._set_timer(draw, left, buffer.time_out, pending)

    def _set_timer(self, draw: OpenDraw, seconds: float, act: Callable[[Any], None], argument: object) -> None:
        """Replaces the timer of the draw by one that calls `act(argument)` after `seconds` (infinite: never)."""
        if draw.timer is not None:
            draw.timer.cancel()
            draw.timer = None
        if seconds < math.inf:
            draw.timer = asyncio.get_running_loop().call_later(seconds, act, argument)

    def _messages(
        self, draw: OpenDraw, batch: SampleBatch, keys: list[int], payloads: Iterator[Payload]
    ) -> Iterator[Response]:
        """Yields the messages of a batch, and reads its payloads one after the other.

        If a payload is damaged, ends the draw, and raises Refused.
        """
        first = pb.SampleResponse(
            batch=draw.wanted.id,
            keys=keys,
            priorities=batch.priorities.tolist(),
            probabilities=batch.probabilities.tolist(),
            ages=(self._buffer.clock() - batch.inserted_at).tolist(),
            policy_versions=batch.policy_versions.tolist(),
            times_sampled=batch.times_sampled.tolist(),
            policy_version=self._buffer.policy.version,
            table_size=batch.table_size,
            payload_sizes=batch.sizes.tolist(),
        )
        if self._buffer.items.tagged:
            labels = self._buffer.items.labels(keys) or ()  # `labels` returns None if no item has labels
            first.tags.extend(tags_message(labels))
        self.tell_weight(draw.request, first)
        # If a batch has several messages, its payloads are read while it is sent. The batch may end during that time,
        # so this function holds the items, because the storage deletes no payload of an item that is held.
        held = keys if batch.sizes.sum() > BYTES_PER_MESSAGE else []
        self._buffer.items.hold(held)
        try:
            yield from split_payloads(first, payloads)
        except DamagedPayloads as damage:  # a part of the batch may be sent already, so the draw cannot wait again
            self.drop(draw)
            raise self._buffer.refuse_damaged(damage) from None
        finally:
            self._buffer.release(held)

    def tell_weight(self, request: pb.SampleRequest, response: pb.SampleResponse) -> None:
        """Adds the weight of the table to the response, if the draw asks for it. Raises Refused if there is no table.

        A client of several servers divides its next draws among the servers by these weights.
        """
        if not request.weigh:
            return
        # The weight counts the items that a draw of one sample could return.
        one_sample = SampleRequest(
            num_samples=1,
            min_samples=1,
            scope=request.scope,
            exclude=frozenset(request.exclude),
        )
        weight = self._buffer.table(request.table).weigh(one_sample)
        response.weight.CopyFrom(pb.Weight(**weight))

    # ------------------------------------------------------------------------------------------ how a draw ends

    def end(self, draw_id: int, *, requeue: bool) -> bool:
        """Acknowledges the batch of a draw or, with `requeue`, requeues it, because its reader asks for this.

        Returns True if the draw has ended as the reader asks, now or at an earlier call. Returns False if it has ended
        in another way, and for an unknown id. Without `requeue`, also returns False if the draw still waits, or if an
        item became too stale before the reader used the batch, which is then requeued.
        """
        draw = self.by_id.get(draw_id)
        if draw is None:
            outstanding = self._buffer.outstanding
            ended_in_this_way = outstanding.requeued if requeue else outstanding.acknowledged
            return draw_id in ended_in_this_way
        if not requeue:
            return self.acknowledge(draw)
        if self._is_drawn(draw):
            self._remove(draw)
            self._buffer.requeue(draw_id, by_reader=True)  # remembers the id, because the reader may repeat the request
        else:
            self.drop(draw)  # the draw has no batch yet, so this ends its wait
        return True

    def acknowledge(self, draw: OpenDraw) -> bool:
        """Acknowledges a batch. Returns False if the draw has ended, or has no batch yet.

        Returns False also if an item became too stale before the reader used the batch, which is then requeued.
        """
        if draw.ended or not self._is_drawn(draw):
            return False
        self._remove(draw)
        return self._buffer.acknowledge(draw.wanted.id, sent=draw.in_use)

    def renew(self, draw_id: int, seconds: float) -> bool:
        """Leases a batch for `seconds` from now on. The batch then stays valid, because its reader uses it.

        Returns True if the batch is leased now, or was acknowledged before. Returns False if the draw has no batch, or
        if an item became too stale before the reader used the batch, which is then requeued.
        """
        draw = self.by_id.get(draw_id)
        if draw is None:
            return draw_id in self._buffer.outstanding.acknowledged
        if not self._is_drawn(draw):
            return False
        if not self._buffer.acknowledge(draw_id, sent=draw.in_use, lease=seconds):
            self._remove(draw)  # an item is too stale, and the buffer has requeued the batch
            return False
        self.lease(draw, seconds)
        return True

    def lease(self, draw: OpenDraw, seconds: float) -> None:
        """Leases a batch: requeues it after `seconds`. Until then it stays outstanding, even if its stream ends.

        This lease is lost if the server restarts. Only `renew` also records the lease on disk.
        """
        if draw.ended:  # it has ended while its last message was sent
            return
        self._set_timer(draw, seconds, self.drop, draw)
        if draw.stream is not None:
            draw.stream.forget(draw)
            draw.stream = None

    def drop(self, draw: OpenDraw) -> None:
        """Ends a draw whose batch nobody wants any more: requeues the batch or, if there is none, ends the wait."""
        if draw.ended:
            return
        self._remove(draw)
        if self._is_drawn(draw):
            self._buffer.requeue(draw.wanted.id)
        elif draw.pending is not None and not draw.pending.done:  # if it is done, its wait has failed already
            self._buffer.abandon(draw.pending)
            draw.on_ready(draw)  # so that a call of `Sample` that waits for the draw sees that the draw has ended

    def check(self) -> None:
        """Asserts that each outstanding batch belongs to a draw that has not ended and does not wait.

        Asserts also that no draw with a recorded lease belongs to a stream, because the end of the stream would requeue
        the batch.
        """
        outstanding = self._buffer.outstanding
        assert outstanding.by_id.keys() <= self.by_id.keys(), outstanding.by_id.keys() - self.by_id.keys()
        for draw_id, draw in self.by_id.items():
            assert draw.wanted.id == draw_id, (draw_id, draw.wanted)
            assert not draw.ended, draw_id
            waits = draw.pending is not None and not draw.pending.done
            assert not (waits and draw_id in outstanding.by_id), f"draw {draw_id} waits, and has a batch"
        for draw_id in outstanding.leased:
            assert self.by_id[draw_id].stream is None, draw_id

    def _closed(self, batch_id: int) -> None:
        """Ends the draw of a batch that an insert has closed, which has also acknowledged the batch."""
        draw = self.by_id.get(batch_id)
        if draw is not None:
            self._remove(draw)

    def _is_drawn(self, draw: OpenDraw) -> bool:
        """True if the draw has a batch, which is outstanding."""
        return draw.wanted.id in self._buffer.outstanding.by_id

    def _remove(self, draw: OpenDraw) -> None:
        """Marks a draw as ended, and forgets it. The caller must also end the batch or the wait of the draw."""
        draw.ended = True
        self.by_id.pop(draw.wanted.id, None)
        if draw.timer is not None:
            draw.timer.cancel()
        draw.share.close()
        if draw.stream is not None:
            draw.stream.forget(draw)


class DrawResponder:
    """Serves one stream: begins its draws, sends one batch after the other, and ends draws as the reader asks."""

    def __init__(self, backend: Backend, draws: OpenDraws, call: Call, on_message: OnMessage) -> None:
        """`on_message` is called for each message of the reader, with the role that the message shows."""
        self._backend = backend
        self._buffer = backend.buffer
        self._draws = draws
        self._call = call
        self._on_message = on_message
        self.awaited = True
        """True while somebody waits for the draws of this stream."""
        self._own_draws: dict[int, OpenDraw] = {}
        """By id: the draws of this stream that have not ended and are not leased. They end when the stream ends."""
        self._ready: OrderedDict[int, OpenDraw] = OrderedDict()
        """By id: the draws whose batch or error is to be sent. The payloads of a batch are read when it is sent."""
        self._answers: deque[pb.SampleResponse] = deque()
        """Messages without a batch that are to be sent: answers to acknowledgements, errors and weights."""
        self._answered = asyncio.Event()
        """Set when an answer was sent, because `_read` may wait for this."""
        self._work = asyncio.Event()
        """Set when there is something to send, or the reader has ended the stream."""

    async def run(self) -> None:
        """Serves the stream until its reader ends it. Raises Refused if a message or a batch is damaged."""
        reading = asyncio.create_task(self._read())
        reading.add_done_callback(lambda _: self._work.set())  # wakes the loop below, which then sees the end
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while self._answers or self._ready:
                    while self._answers:  # answers are short, so they are sent before the next batch
                        answer = self._answers.popleft()
                        await self._call.write(Frame(answer, ()))
                        self._answered.set()
                    if self._ready:
                        _, draw = self._ready.popitem(last=False)
                        for response in self._responses_of(draw):
                            await self._call.write(response)
                if reading.done():
                    reading.result()  # raises the error that ended the reading
                    return
        finally:
            reading.cancel()
            # Drops the draws before the first await, because another cancellation at an await would skip the rest.
            for draw in list(self._own_draws.values()):
                self._draws.drop(draw)
            await asyncio.gather(reading, return_exceptions=True)

    def forget(self, draw: OpenDraw) -> None:
        """Removes a draw from this stream, because the draw has ended or is leased now."""
        self._own_draws.pop(draw.wanted.id, None)

    async def _read(self) -> None:
        """Reads the requests of the stream, and does what they ask for. `run` sends the batches and the answers."""
        while (request := await self._call.read()) is not None:
            # Only a request with a draw shows the role of the client, by the table of the draw.
            role = _role(self._backend, request.draw.table) if request.HasField("draw") else None
            self._on_message(role)
            # If the reader is slow, this waits until `run` has sent answers.
            while len(self._answers) >= MAX_UNANSWERED:
                self._answered.clear()
                await self._answered.wait()
            if request.HasField("awaited"):
                self._set_awaited(request.awaited)
            answer = None
            # This comes before the new draw, because draws that end make room for it (MAX_DRAWS).
            if request.acknowledge or request.requeue or request.renew:
                answer = self._end(request)
            if request.HasField("draw"):
                self._begin(request.draw)
            if answer is not None:
                try:  # the answer confirms the acknowledgements, so these must be written first
                    await self._backend.durable()
                except Refused as refusal:
                    answer = _refused(refusal)
                self._answer(answer)

    def _set_awaited(self, awaited: bool) -> None:
        """Notes whether somebody waits for the draws of this stream, for present and future draws."""
        self.awaited = awaited
        for draw in self._own_draws.values():
            self._draws.set_ahead(draw, ahead=not awaited)

    def _begin(self, request: pb.SampleRequest) -> None:
        """Begins a draw. If the draw is refused, answers with the error, and the stream goes on."""
        try:
            if not request.id:
                raise invalid("a draw on a stream has an id, by which its batch is acknowledged: choose 63 random bits")
            if len(self._own_draws) >= MAX_DRAWS:
                raise busy(f"{MAX_DRAWS} draws of this stream wait or are not acknowledged: acknowledge some first")
            if request.weigh and not request.num_samples:
                self._answer_weight(request)
                return
            draw = self._draws.begin(request, self._call.client, self._on_ready, stream=self)
            self._own_draws[draw.wanted.id] = draw
        except Refused as refusal:
            self._answer(_refused(refusal, batch=request.id))

    def _answer_weight(self, request: pb.SampleRequest) -> None:
        """Answers a draw of no samples, which only asks for the weight of the table. Raises Refused."""
        _table_request(request)  # raises Refused for a wrong request; the result is not needed
        self._buffer.check_open()
        answer = pb.SampleResponse(batch=request.id)
        self._draws.tell_weight(request, answer)
        self._answer(answer)

    def _on_ready(self, draw: OpenDraw) -> None:
        self._ready[draw.wanted.id] = draw
        self._work.set()

    def _answer(self, answer: pb.SampleResponse) -> None:
        self._answers.append(answer)
        self._work.set()

    def _responses_of(self, draw: OpenDraw) -> Iterator[Response]:
        """Yields the messages of a draw that is ready, or one message with its error.

        After the last message the lease begins, if the draw asks for a lease. Yields nothing if the draw has ended, or
        waits again.
        """
        if draw.ended:  # it has ended after it became ready
            return
        try:
            responses = self._draws.responses(draw)
        except Refused as refusal:
            yield Frame(_refused(refusal, batch=draw.request.id), ())
            return
        if responses is None:  # an item was damaged: the draw waits again, and `_on_ready` is called once more
            return
        yield from responses
        if draw.request.lease:
            self._draws.lease(draw, draw.request.lease)

    def _end(self, request: pb.DrawRequest) -> pb.SampleResponse:
        """Acknowledges, requeues and renews the draws that the request names. Returns the answer.

        The answer lists the draws for which this was done as `done`, and all others as `missing`.
        """
        try:
            _check_end(request)
        except Refused as refusal:
            return _refused(refusal)
        draws = self._draws
        outcomes = [(draw_id, draws.end(draw_id, requeue=False)) for draw_id in request.acknowledge]
        outcomes += [(draw_id, draws.end(draw_id, requeue=True)) for draw_id in request.requeue]
        outcomes += [(draw_id, draws.renew(draw_id, request.seconds)) for draw_id in request.renew]
        answer = pb.SampleResponse()
        for draw_id, done in outcomes:
            if done:
                answer.done.append(draw_id)
            else:
                answer.missing.append(draw_id)
        return answer


def _check_end(request: pb.DrawRequest) -> None:
    """Raises Refused if the request ends or renews too many draws, or renews with a wrong number of seconds."""
    count = len(request.acknowledge) + len(request.requeue) + len(request.renew)
    if count > MAX_ROWS:
        raise invalid(f"{count} batches: at most {MAX_ROWS} in one request")
    _check_lease(request.seconds)
    if request.renew and not request.seconds:
        raise invalid("seconds of a renewal must be above 0: a batch that is taken or requeued has no lease")


def _refused(refusal: Refused, batch: int = 0) -> pb.SampleResponse:
    """Returns the message that says why the draw with the id `batch` was refused.

    `batch` 0: the message says why a request to end or renew draws was refused.
    """
    error = pb.RowError(code=refusal.code, message=refusal.message, reason=refusal.reason)
    return pb.SampleResponse(batch=batch, error=error)
