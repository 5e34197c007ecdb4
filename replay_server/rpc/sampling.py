"""Sampling: draws batches for readers, sends them, and requeues the batches that readers do not acknowledge.

A reader asks for batches with draws, each under an id that the reader chooses at random. One stream (`Draw`) carries
any number of draws at once, and the ids of the batches that the reader acknowledges, requeues or renews:

    reader ──draw 1, draw 2─────────▶ server    each draw waits in the line of its table
    reader ◀──rows of 2, rows of 1─── server    both batches are outstanding, until exactly one call ends each
    reader ──acknowledge 2, draw 3──▶ server    all bytes of batch 2 have arrived, and the reader uses the batch
    reader ◀──done: 2─────────────── server    batch 2 counts as sampled; or "missing": an item in it became stale

The ids make it safe to repeat messages. A reader whose stream broke does not know which messages the server received,
and sends the same ids on its next stream. A repeated draw requeues the batch that its first attempt has drawn. For this
purpose `OpenDraws` knows the draws of all streams. If a reader acknowledges or requeues a batch again that it has ended
already, the server recognises the id (`Remembered`), also after a restart.

* A drawn batch is outstanding until exactly one call ends it, whatever its client does.
* The payloads of a batch stay in storage until they are sent, even if the batch ends before that.
* In durable mode the server confirms an acknowledgement only after it is written.
* A batch that is neither acknowledged nor leased when its stream ends is requeued at once.

The call `Sample` is one draw without a stream, for clients that need only one.
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
"""The least id of a draw. Smaller ids are not random: two clients would soon choose the same id, and each would requeue
the batches of the other."""

MAX_UNANSWERED = 1024
"""Answers of one stream that a slow reader has not read. At this number the stream reads no further requests."""


class SampleMethods:
    """The gRPC methods by which readers draw batches, and consume items."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.draws = OpenDraws(backend)

    async def Sample(self, request: pb.SampleRequest, call: Call) -> None:
        """Draws one batch, sends it, and acknowledges it, or leases it if the request asks for a lease.

        If the call ends before that, the batch is requeued.
        """
        backend = self.backend
        draws = self.draws
        ready = asyncio.Event()
        is_leased = False
        # Until the block ends, the client counts as connected.
        with backend.clients.calling(call.context, _role(backend, request.table)):
            # `ready` is set when the batch is drawn or has failed. `responses` raises the error of a batch that failed.
            draw = draws.begin(request, call.client, on_ready=lambda _: ready.set(), stream=None)
            try:
                while (responses := draws.responses(draw)) is None:
                    await ready.wait()
                    ready.clear()
                # A batch has at least one message. The last one is held back, until the batch is acknowledged.
                last = next(responses)
                for response in responses:
                    await call.write(last)
                    last = response
                # A reader that has the last message may rely on the batch, even if the server is killed then. In
                # durable mode the acknowledgement is therefore written before that message is sent.
                if not request.lease and backend.is_durable:
                    await backend.durable()  # raises Refused if the disk fails, before anything is acknowledged
                    draws.acknowledge(draw)
                    await backend.durable()  # returns when the acknowledgement is written
                await call.write(last)
                if request.lease > 0:
                    is_leased = True
                    draws.lease(draw, request.lease)
                else:
                    draws.acknowledge(draw)  # has no effect in durable mode, in which it is done
            finally:
                if not is_leased:
                    draws.drop(draw)  # no effect on a draw that was acknowledged

    async def Draw(self, call: Call) -> None:
        """Serves a stream of draws."""
        with self.backend.clients.calling(call.context, None) as on_message:
            await DrawResponder(self.backend, self.draws, call, on_message).run()

    @once(pb.MutationResponse)
    async def ConsumeItems(self, request: pb.ConsumeItemsRequest, call: Call) -> pb.MutationResponse:
        """Draws and acknowledges items without sending them: their reader has used them, but its lease has ended."""
        if len(request.keys) > MAX_KEYS:
            raise invalid(f"{len(request.keys)} keys: at most {MAX_KEYS} in one request")
        buffer = self.backend.buffer
        buffer.check_open()
        keys = list(dict.fromkeys(request.keys))
        table = buffer.table(request.table)
        missing = table.columns.absent(keys)
        batch_id = buffer.outstanding.draw_keys(table, np.array(keys, dtype=np.uint64))
        if batch_id:  # 0: the table has none of the items
            buffer.acknowledge(batch_id, sent=True)  # `sent`: the reader has used the items, however stale they are
        return pb.MutationResponse(applied=len(keys) - len(missing), missing=missing)


def _role(backend: Backend, table: str) -> ClientRole:
    """The role of clients that sample this table.

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
    """Raises Refused if a lease cannot last `seconds`."""
    if not 0 <= seconds <= MAX_LEASE:
        raise invalid(f"lease must be a number of seconds from 0 to {MAX_LEASE:g}, not {seconds}")


def _wanted(request: pb.SampleRequest) -> SampleRequest:
    """The draw, as the tables need it. Raises Refused if the draw asks for more than is allowed."""
    _check_lease(request.lease)
    if request.num_samples > MAX_ROWS:
        raise invalid(f"num_samples {request.num_samples}: at most {MAX_ROWS} in one request")
    if len(request.exclude) > MAX_EXCLUDE:
        raise invalid(f"{len(request.exclude)} keys to exclude: at most {MAX_EXCLUDE} in one request")
    if len(request.scope) > MAX_SCOPE:
        raise invalid(f"a scope of {len(request.scope)} characters: at most {MAX_SCOPE}")
    if len({rows.value for rows in request.values}) < len(request.values):
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
        values=tuple(ValueRows(rows.value, rows.rows, rows.share) for rows in request.values),
    )


@dataclass(eq=False, slots=True)
class OpenDraw:
    """One draw, from its request until its batch is acknowledged or requeued."""

    request: pb.SampleRequest
    wanted: SampleRequest
    """The batch that `request` asks for, as tables need it. Has the id of the draw."""
    client: str
    """The connection of the reader."""
    deadline: float
    """The end of its wait, by the clock of the buffer."""
    on_ready: Callable[[OpenDraw], None]
    """Called when the batch is drawn, or cannot be drawn. The call comes in the middle of a change of the buffer, so
    the function may only note it."""
    stream: DrawResponder | None
    """The stream whose end also ends the draw; None: the draw is leased, or has a call of its own."""
    pending: PendingSample | None = None
    """The request in the line of its table, and then its batch; None: the draw is leased since before a restart."""
    share: ExitStack = field(default_factory=ExitStack)
    """Holds the share of this draw in the samples that clients may have outstanding."""
    timer: asyncio.TimerHandle | None = None
    """Ends the wait at its deadline. After the batch is sent, ends the lease."""
    ended: bool = False

    @property
    def in_use(self) -> bool:
        """True if the reader uses the batch already. Then the batch stays valid even if its rows become too stale."""
        return self.stream is None or self.request.lease > 0


class OpenDraws:
    """All draws of a server that have not ended."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffer = backend.buffer
        self.by_id: dict[int, OpenDraw] = {}
        self._buffer.outstanding.on_closed = self._closed
        # Batches whose leases were recorded before a restart. Each lease begins anew.
        for batch_id, seconds in self._buffer.outstanding.leased.items():
            # Nothing is drawn or sent any more, so only the id of the draw is used.
            wanted = SampleRequest(1, 1, id=batch_id)
            draw = OpenDraw(pb.SampleRequest(), wanted, "", 0.0, lambda _: None, None)
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
        """Puts a draw into the line of its table.

        Raises Refused for a draw that can never be served, or whose id belongs to a draw that has ended.
        """
        wanted = _wanted(request)
        timeout = request.timeout if request.HasField("timeout") else None
        deadline = deadline_at(self._buffer.clock(), timeout)
        outstanding = self._buffer.outstanding
        if wanted.id in outstanding.acknowledged or wanted.id in outstanding.requeued:
            raise invalid(f"draw {wanted.id} has ended: choose a new id for each draw")
        previous_attempt = self.by_id.get(wanted.id)
        if previous_attempt is not None:
            self.drop(previous_attempt)  # the reader asks again, because it did not receive the whole answer
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
        """The messages of the batch. None: the draw waits, or waits again because an item was damaged.

        Raises Refused, and ends the draw, if there will be no batch. The iterator raises it as well, if it reads a
        damaged item after the first messages were sent.
        """
        if draw.ended:  # by `begin`, for a request with the same id
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

        The lines of a table do not count a draw as waiting while it is ahead.
        """
        if draw.pending is not None:
            for line in draw.pending.lines:
                line.set_ahead(draw.pending, ahead)

    def _read(self, draw: OpenDraw, batch: SampleBatch) -> Iterator[Response] | None:
        """The messages of a batch; None: an item was damaged, so the draw waits again.

        Raises Refused if the client has too many samples outstanding.
        """
        outlives_sending = draw.stream is not None or draw.request.lease
        if outlives_sending:  # a batch of `Sample` without a lease is outstanding only while it is sent
            # `backend.outstanding` is a budget of samples. The outstanding batches are in `buffer.outstanding`.
            share = self._backend.outstanding.held(draw.client, len(batch))
            draw.share.enter_context(share)
        keys: list[int] = batch.keys.tolist()
        try:
            # `batch.sizes` are the sizes at the draw, so the payloads end before segments that were appended since.
            # This reads the first few MB of them. `_messages` reads the rest while the batch is sent.
            payloads = read_payloads(self._buffer.storage, keys, batch.sizes.tolist())
        except DamagedPayloads as damage:
            draw.share.close()
            self._buffer.requeue(draw.wanted.id)
            self._buffer.discard(damage.keys)
            self._wait(draw)
            return None
        return self._messages(draw, batch, keys, payloads)

    def _wait(self, draw: OpenDraw) -> None:
        """Puts the draw into the line of its table. Its wait ends at its deadline. Raises Refused."""
        buffer = self._buffer
        pending = buffer.sample(draw.request.table, draw.wanted, draw.deadline)
        draw.pending = pending
        if draw.stream is not None and not draw.stream.awaited:
            self.set_ahead(draw, ahead=True)
        left = draw.deadline - buffer.clock()
        if left <= 0:
            buffer.time_out(pending)  # no effect if the batch was drawn at once
        if pending.done:  # with a batch, or with the error of the deadline
            draw.on_ready(draw)
            return
        pending.on_done = lambda: draw.on_ready(draw)
        self._set_timer(draw, left, buffer.time_out, pending)

    def _set_timer(self, draw: OpenDraw, seconds: float, act: Callable[[Any], None], argument: object) -> None:
        """Calls `act(argument)` after `seconds` (infinite: never), and cancels the call that was planned before."""
        if draw.timer is not None:
            draw.timer.cancel()
            draw.timer = None
        if seconds < math.inf:
            draw.timer = asyncio.get_running_loop().call_later(seconds, act, argument)

    def _messages(
        self, draw: OpenDraw, batch: SampleBatch, keys: list[int], payloads: Iterator[Payload]
    ) -> Iterator[Response]:
        """Yields the messages of a batch, and reads the payloads on the way.

        Ends the draw, and raises Refused, if a payload is damaged.
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
            first.tags.extend(tags_message(self._buffer.items.labels(keys) or ()))  # None: no item has labels
        self.tell_weight(draw.request, first)
        # The payloads of a batch of several messages are read while the batch is sent. The batch may end meanwhile, so
        # its items are held here: the storage deletes no payload of an item that is held.
        held = keys if batch.sizes.sum() > BYTES_PER_MESSAGE else []
        self._buffer.items.hold(held)
        try:
            yield from split_payloads(first, payloads)
        except DamagedPayloads as damage:  # a part of the batch may be sent already, so that the call cannot go on
            self.drop(draw)
            raise self._buffer.refuse_damaged(damage) from None
        finally:
            self._buffer.release(held)

    def tell_weight(self, request: pb.SampleRequest, response: pb.SampleResponse) -> None:
        """Adds the weight of the table to the response, if the draw asks for it. Raises Refused.

        A client of several servers divides its next draws among the servers by these weights.
        """
        if request.weigh:
            # The weight counts the items that a draw of one sample could return.
            wanted = SampleRequest(1, 1, scope=request.scope, exclude=frozenset(request.exclude))
            weight = self._buffer.table(request.table).weigh(wanted)
            response.weight.CopyFrom(pb.Weight(**weight))

    # ------------------------------------------------------------------------------------------ how a draw ends

    def end(self, draw_id: int, *, requeue: bool) -> bool:
        """Ends a draw as its reader asks: acknowledges the batch, or requeues it.

        Returns True if the draw has ended in this way, now or at an earlier call. Returns False if it has ended in
        another way. An acknowledgement also returns False if the draw still waits, or if an item became too stale
        before the reader used the batch, which is then requeued.
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
            self.drop(draw)  # the draw still waits, so its wait ends
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
        """Leases a batch for `seconds` from now on. Its reader uses the batch, which therefore stays valid.

        Returns True also if the reader has acknowledged the batch. Returns False if the draw has no batch, or if an
        item became too stale before the reader used the batch, which is then requeued.
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
        """Leases a batch: it outlives its stream, and is requeued after `seconds`.

        Only `renew` also records the lease, so that it outlives a restart of the server.
        """
        if draw.ended:  # while its last message was sent
            return
        self._set_timer(draw, seconds, self.drop, draw)
        if draw.stream is not None:
            draw.stream.forget(draw)
            draw.stream = None

    def drop(self, draw: OpenDraw) -> None:
        """Ends a draw whose batch nobody wants any more: requeues its batch, or ends its wait."""
        if draw.ended:
            return
        self._remove(draw)
        if self._is_drawn(draw):
            self._buffer.requeue(draw.wanted.id)
        elif draw.pending is not None and not draw.pending.done:  # otherwise the wait has failed, and nothing is left
            self._buffer.abandon(draw.pending)
            draw.on_ready(draw)  # a call of `Sample` that waits for the draw learns that the draw has ended

    def check(self) -> None:
        """Asserts that each outstanding batch belongs to a draw that has not ended and does not wait.

        Asserts also that the draws with a recorded lease belong to no stream, whose end would requeue their batches.
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
        """Ends the draw of a batch that an insert has acknowledged."""
        draw = self.by_id.get(batch_id)
        if draw is not None:
            self._remove(draw)

    def _is_drawn(self, draw: OpenDraw) -> bool:
        return draw.wanted.id in self._buffer.outstanding.by_id

    def _remove(self, draw: OpenDraw) -> None:
        """Marks a draw as ended, and forgets it. The caller ends its batch or its wait."""
        draw.ended = True
        self.by_id.pop(draw.wanted.id, None)
        if draw.timer is not None:
            draw.timer.cancel()
        draw.share.close()
        if draw.stream is not None:
            draw.stream.forget(draw)


class DrawResponder:
    """Serves one stream: begins its draws, sends one batch after the other, and ends draws as the reader says."""

    def __init__(self, backend: Backend, draws: OpenDraws, call: Call, on_message: OnMessage) -> None:
        """`on_message` notes each message of the reader, and the role that the message shows."""
        self._backend = backend
        self._buffer = backend.buffer
        self._draws = draws
        self._call = call
        self._on_message = on_message
        self.awaited = True
        """True while somebody waits for the draws of this stream."""
        self._own_draws: dict[int, OpenDraw] = {}
        """The draws that end with this stream, by id."""
        self._ready: OrderedDict[int, OpenDraw] = OrderedDict()
        """Draws that have a batch or an error. Only the draw that is being sent has payloads in memory."""
        self._answers: deque[pb.SampleResponse] = deque()
        """Messages without a batch that are to be sent: answers to acknowledgements, errors and weights."""
        self._answered = asyncio.Event()
        """Set when an answer was sent."""
        self._work = asyncio.Event()
        """Set when there is something to send, or the reader has ended the stream."""

    async def run(self) -> None:
        """Serves the stream until the reader ends it. Raises Refused."""
        reading = asyncio.create_task(self._read())
        reading.add_done_callback(lambda _: self._work.set())  # the loop below then sees that the reading has ended
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while self._answers or self._ready:
                    while self._answers:  # short, so they come before the next batch
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
            # Drops the draws before the first await: a second cancellation at an await would skip what follows.
            for draw in list(self._own_draws.values()):
                self._draws.drop(draw)
            await asyncio.gather(reading, return_exceptions=True)

    def forget(self, draw: OpenDraw) -> None:
        """Removes a draw that has ended, or is leased now."""
        self._own_draws.pop(draw.wanted.id, None)

    async def _read(self) -> None:
        """Reads the requests of the stream, and does what they ask for. Batches and answers are sent by `run`."""
        while (request := await self._call.read()) is not None:
            # Only a draw shows the role of the client, by its table.
            role = _role(self._backend, request.draw.table) if request.HasField("draw") else None
            self._on_message(role)
            while len(self._answers) >= MAX_UNANSWERED:  # the reader is slow: wait until it has read answers
                self._answered.clear()
                await self._answered.wait()
            if request.HasField("awaited"):
                self._set_awaited(request.awaited)
            answer = None
            if request.acknowledge or request.requeue or request.renew:
                answer = self._end(request)  # before the draw: draws that end make room for new draws (MAX_DRAWS)
            if request.HasField("draw"):
                self._begin(request.draw)
            if answer is not None:
                try:  # the answer confirms the acknowledgements, so these must be written first
                    await self._backend.durable()
                except Refused as refusal:
                    answer = _refused(refusal)
                self._answer(answer)

    def _set_awaited(self, awaited: bool) -> None:
        """Notes whether somebody waits for the draws of this stream, those under way included."""
        self.awaited = awaited
        for draw in self._own_draws.values():
            self._draws.set_ahead(draw, ahead=not awaited)

    def _begin(self, request: pb.SampleRequest) -> None:
        """Begins a draw. A draw that is refused is answered with its error, and the stream goes on."""
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
            self._answer(_refused(refusal, request.id))

    def _answer_weight(self, request: pb.SampleRequest) -> None:
        """Answers a draw of no samples, which only asks for the weight of the table. Raises Refused."""
        _wanted(request)  # raises Refused for a wrong request; the result is not needed
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

        After the last message the lease begins, if the draw asks for one. Yields nothing if the draw has ended, or
        waits again.
        """
        if draw.ended:  # since it became ready
            return
        try:
            responses = self._draws.responses(draw)
        except Refused as refusal:
            yield Frame(_refused(refusal, draw.request.id), ())
            return
        if responses is None:  # an item was damaged: the draw waits again, and `_on_ready` is called once more
            return
        yield from responses
        if draw.request.lease:
            self._draws.lease(draw, draw.request.lease)

    def _end(self, request: pb.DrawRequest) -> pb.SampleResponse:
        """Acknowledges, requeues and renews the draws that the request names.

        The answer lists the draws for which this was done, and all others as missing.
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
    """The message that says why a draw was refused or, with `batch` 0, a request to end draws."""
    error = pb.RowError(code=refusal.code, message=refusal.message, reason=refusal.reason)
    return pb.SampleResponse(batch=batch, error=error)
