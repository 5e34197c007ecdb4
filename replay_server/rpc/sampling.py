"""Sampling: draws batches for readers, sends them, and gives back the batches that readers do not take.

* A drawn batch is outstanding until exactly one `take` or `give_back` ends it, whatever its client does.
* The payloads of an outstanding batch stay in storage until they are sent.
* In durable mode a reader is told that a batch is its own only after that is written.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, aclosing

from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame
from replay_server.errors import busy, invalid
from replay_server.limits import (
    MAX_BYTES_AHEAD,
    MAX_EXCLUDE,
    MAX_KEYS,
    MAX_LEASE,
    MAX_ROWS,
    MAX_SAMPLE_STREAMS,
    MAX_SCOPE,
)
from replay_server.rpc.backend import Backend
from replay_server.rpc.clients import Context, Seen, Side
from replay_server.rpc.messages import split_payloads
from replay_server.rpc.rpc_methods import durable, endless, once, stream, unary
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.items import DamagedPayloads, Payload
from replay_server.tables.table import SampleBatch, SampleRequest
from replay_server.tables.waiting import deadline_at, result_of

Response = Frame[pb.SampleResponse]


class SampleMethods:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.leases = Leases(backend.buffer)
        self._stream_of: dict[int, SampleStream] = {}
        """By the ids of the batches that sample streams have outstanding."""
        self._streams: Counter[str] = Counter()
        """Open sample streams, by connection."""

    @stream
    async def Sample(self, request: pb.SampleRequest, context: Context) -> AsyncGenerator[Response]:
        _check_lease(request.lease)
        backend, buffer = self.backend, self.backend.buffer
        self.leases.give_back_of(request.request)
        with backend.clients.calling(context, Side.TRAINER), ExitStack() as share, ExitStack() as undo:
            batch_id, batch, payloads = await draw(buffer, request)
            undo.callback(buffer.give_back, batch_id)
            if request.lease:
                share.enter_context(backend.outstanding.held(context.peer(), len(batch)))
            try:
                responses = responses_of(buffer, batch_id, batch, payloads)
                last = next(responses)
                for response in responses:
                    yield last
                    last = response
            except DamagedPayloads as damage:
                undo.close()
                raise buffer.refuse_damaged(damage) from None
            # A reader that has the last message may rely on the batch, even if the server is killed then. In durable
            # mode the batch is therefore taken before that message.
            if not request.lease and backend.journal is not None:
                undo.pop_all()
                buffer.take(batch_id, sent=True)
                await backend.durable()
            yield last
            if request.lease:
                undo.pop_all()
                self.leases.begin(batch_id, request.lease, share.pop_all(), request.request)
            elif backend.journal is None:
                undo.pop_all()
                buffer.take(batch_id, sent=True)

    @endless
    async def SampleStream(
        self, requests: AsyncIterator[pb.SampleStreamRequest], context: Context
    ) -> AsyncIterator[Response]:
        reader = aiter(requests)
        opening = await anext(reader, None)
        if opening is None or not opening.HasField("open"):
            raise invalid("the first message of a sample stream must have `open`")
        _check_lease(opening.open.lease)
        client = context.peer()
        if self._streams[client] >= MAX_SAMPLE_STREAMS:
            raise busy(f"{MAX_SAMPLE_STREAMS} sample streams are open on this connection: use fewer, or connect anew")
        self.backend.sample_streams += 1
        self._streams[client] += 1
        try:
            with self.backend.clients.calling(context, Side.TRAINER) as seen:
                ahead = SampleStream(self.backend, client, reader, opening, self._stream_of, self.leases, seen)
                async with aclosing(ahead.responses()) as responses:
                    async for response in responses:
                        yield response
        finally:
            self.backend.sample_streams -= 1
            self._streams[client] -= 1
            if not self._streams[client]:
                del self._streams[client]

    @unary
    async def Weigh(self, request: pb.WeighRequest, context: Context) -> pb.Weight:
        _check_left_out(request)
        buffer = self.backend.buffer
        buffer.check_open()
        wanted = SampleRequest(1, 1, scope=request.scope, exclude=frozenset(request.exclude))
        return pb.Weight(**vars(buffer.table(request.table).weigh(wanted)))

    @unary
    @durable
    @once(pb.AcknowledgeSamplesResponse)
    async def AcknowledgeSamples(
        self, request: pb.AcknowledgeSamplesRequest, context: Context
    ) -> pb.AcknowledgeSamplesResponse:
        if len(request.batches) > MAX_ROWS:
            raise invalid(f"{len(request.batches)} batches: at most {MAX_ROWS} in one request")
        missing = [batch for batch in request.batches if not self._end(batch, request.give_back, request.unread)]
        return pb.AcknowledgeSamplesResponse(applied=len(request.batches) - len(missing), missing=missing)

    @unary
    @durable
    async def RenewLeases(self, request: pb.RenewLeasesRequest, context: Context) -> pb.AcknowledgeSamplesResponse:
        if len(request.batches) > MAX_ROWS:
            raise invalid(f"{len(request.batches)} batches: at most {MAX_ROWS} in one request")
        _check_lease(request.seconds)
        if request.seconds == 0:
            raise invalid("seconds must be above 0: AcknowledgeSamples ends a lease")
        missing = [batch for batch in request.batches if not self._renew(batch, request.seconds, request.unread)]
        return pb.AcknowledgeSamplesResponse(applied=len(request.batches) - len(missing), missing=missing)

    @unary
    @durable
    @once(pb.MutationResponse)
    async def TakeItems(self, request: pb.TakeItemsRequest, context: Context) -> pb.MutationResponse:
        if len(request.keys) > MAX_KEYS:
            raise invalid(f"{len(request.keys)} keys: at most {MAX_KEYS} in one request")
        buffer = self.backend.buffer
        buffer.check_open()
        batch_id, missing = buffer.outstanding.draw_keys(buffer.table(request.table), request.keys)
        if batch_id is not None:
            buffer.take(batch_id, sent=True)
        return pb.MutationResponse(applied=len(set(request.keys)) - len(missing), missing=missing)

    def _renew(self, batch_id: int, seconds: float, unread: bool) -> bool:
        """Returns True for a batch that is taken already, too."""
        if (sample_stream := self._stream_of.get(batch_id)) is not None:
            # The connection of the stream broke, and the server may not have noticed that yet.
            return sample_stream.lease(batch_id, seconds)
        return self.leases.renew(batch_id, seconds, unread) or batch_id in self.backend.buffer.outstanding.taken

    def _end(self, batch_id: int, give_back: bool, unread: bool) -> bool:
        """Takes a batch, or gives it back. Returns True for a retry too, and False if the batch was ended otherwise."""
        if not give_back and (sample_stream := self._stream_of.get(batch_id)) is not None:
            # The connection of the stream broke, and the server may not have noticed that yet.
            return sample_stream.end(batch_id, give_back=False)
        if self.leases.end(batch_id, give_back, unread):
            return True
        return not give_back and batch_id in self.backend.buffer.outstanding.taken


def _check_lease(seconds: float) -> None:
    if not 0 <= seconds <= MAX_LEASE:
        raise invalid(f"lease must be a number of seconds from 0 to {MAX_LEASE:g}, not {seconds}")


def _check_left_out(request: pb.SampleRequest | pb.WeighRequest) -> None:
    if len(request.exclude) > MAX_EXCLUDE:
        raise invalid(f"{len(request.exclude)} keys to exclude: at most {MAX_EXCLUDE} in one request")
    if len(request.scope) > MAX_SCOPE:
        raise invalid(f"a scope of {len(request.scope)} characters: at most {MAX_SCOPE}")


async def draw(buffer: ReplayBuffer, request: pb.SampleRequest) -> tuple[int, SampleBatch, Iterator[Payload]]:
    """Waits until the table allows the request. Returns the id of the batch, the batch, and the payload of each row.

    The caller ends the batch with ReplayBuffer.take or give_back.
    """
    if request.num_samples > MAX_ROWS:
        raise invalid(f"num_samples {request.num_samples}: at most {MAX_ROWS} in one request")
    _check_left_out(request)
    wanted = SampleRequest(
        num_samples=request.num_samples,
        min_samples=request.min_samples if request.HasField("min_samples") else request.num_samples,
        distinct=not request.allow_repeats,
        scope=request.scope,
        exclude=frozenset(request.exclude),
    )
    deadline = deadline_at(buffer.clock(), request.timeout if request.HasField("timeout") else None)
    while True:
        pending = buffer.sample(request.table, wanted, deadline)
        try:
            batch_id, batch = await result_of(pending, buffer.clock(), buffer.time_out, buffer.abandon)
        except asyncio.CancelledError:
            if pending.drawn is not None:  # it was drawn just before the client went away
                buffer.give_back(pending.drawn)
            raise
        try:
            return batch_id, batch, buffer.payloads(batch.keys.tolist())
        except DamagedPayloads as damage:  # draw again, without the damaged items
            buffer.give_back(batch_id)
            buffer.discard(damage.keys)


def responses_of(
    buffer: ReplayBuffer, batch_id: int, batch: SampleBatch, payloads: Iterable[Payload]
) -> Iterator[Frame[pb.SampleResponse]]:
    """The messages of a batch. Raises DamagedPayloads while the payloads are read."""
    first = pb.SampleResponse(
        batch=batch_id,
        keys=batch.keys.tolist(),
        priorities=batch.priorities.tolist(),
        probabilities=batch.probabilities.tolist(),
        ages=(buffer.clock() - batch.inserted_at).tolist(),
        policy_versions=batch.policy_versions.tolist(),
        times_sampled=batch.times_sampled.tolist(),
        policy_version=buffer.policy.version,
        table_size=batch.table_size,
        payload_sizes=batch.sizes.tolist(),
    )
    return split_payloads(first, payloads)


class SampleStream:
    """Draws batches ahead for one reader, as many as it gave credit for. What it does not take is given back."""

    def __init__(
        self,
        backend: Backend,
        client: str,
        requests: AsyncIterator[pb.SampleStreamRequest],
        opening: pb.SampleStreamRequest,
        stream_of: dict[int, SampleStream],
        leases: Leases,
        seen: Seen,
    ) -> None:
        """Raises Refused for too much credit. `seen` is called for each message of the reader."""
        self._backend = backend
        self._seen = seen
        self._stream_of = stream_of
        self._leases = leases
        self._buffer = backend.buffer
        self._client = client
        self._requests = requests
        self._request = opening.open
        self._credit = asyncio.Semaphore(self._credit_of(opening))
        self._outstanding: dict[int, tuple[SampleBatch, ExitStack]] = {}
        """By batch id; the stack holds the batch's share of the samples that clients may have outstanding."""
        self._sent: set[int] = set()
        """The outstanding batches that gRPC has accepted completely."""
        self._some_taken = asyncio.Event()
        # Bounded: for a slow reader a few messages wait here. The payloads of its other batches stay in the tables.
        self._outgoing: asyncio.Queue[Response | Exception | None] = asyncio.Queue(maxsize=4)
        # The messages of a batch follow each other without other messages between them.
        self._one_batch = asyncio.Lock()

    async def responses(self) -> AsyncGenerator[Response]:
        """The messages for the reader, until it ends the stream. Raises Refused."""
        tasks = [asyncio.create_task(self._draw_ahead()), asyncio.create_task(self._read_requests())]
        try:
            while (response := await self._outgoing.get()) is not None:
                if isinstance(response, Exception):
                    raise response
                yield response
        finally:
            for task in tasks:
                task.cancel()
            # Before the first await: a second cancellation would skip everything after it.
            for batch_id in list(self._outstanding):
                self.end(batch_id, give_back=True)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _draw_ahead(self) -> None:
        try:
            while True:
                await self._credit.acquire()
                while sum(int(batch.sizes.sum()) for batch, _ in self._outstanding.values()) >= MAX_BYTES_AHEAD:
                    self._some_taken.clear()
                    await self._some_taken.wait()
                batch_id, batch, payloads = await draw(self._buffer, self._request)
                self._outstanding[batch_id] = batch, (share := ExitStack())
                self._stream_of[batch_id] = self
                share.enter_context(self._backend.outstanding.held(self._client, len(batch)))
                async with self._one_batch:
                    for response in responses_of(self._buffer, batch_id, batch, payloads):
                        await self._outgoing.put(response)
                self._sent.add(batch_id)
                await asyncio.sleep(0)  # other requests run between two batches
        except DamagedPayloads as damage:
            if batch_id in self._outstanding:
                self.end(batch_id, give_back=True)
            await self._outgoing.put(self._buffer.refuse_damaged(damage))
        except Exception as error:
            await self._outgoing.put(error)

    async def _read_requests(self) -> None:
        try:
            async for request in self._requests:
                self._seen()
                for _ in range(self._credit_of(request)):
                    self._credit.release()
                if request.take:
                    await self._take(request.take)
            await self._outgoing.put(None)
        except Exception as error:
            await self._outgoing.put(error)

    async def _take(self, batch_id: int) -> None:
        retry = batch_id in self._buffer.outstanding.taken or batch_id in self._leases
        if batch_id not in self._outstanding and not retry:
            raise invalid(f"batch {batch_id} is not one of this stream's")
        if retry or self._hand_over(batch_id):
            await self._backend.durable()
            answer = pb.SampleResponse(taken=batch_id)
        else:
            answer = pb.SampleResponse(revoked=batch_id)
        async with self._one_batch:
            await self._outgoing.put(Frame(answer, ()))

    def _hand_over(self, batch_id: int) -> bool:
        """The reader asks for the batch. False: an item in it is too stale."""
        return (
            self.lease(batch_id, seconds) if (seconds := self._request.lease) else self.end(batch_id, give_back=False)
        )

    def end(self, batch_id: int, give_back: bool) -> bool:
        """Takes an outstanding batch, or gives it back. False: it was to be taken, and an item in it is too stale."""
        self._remove(batch_id, give_back).close()
        if give_back:
            self._buffer.give_back(batch_id)
            return True
        return self._buffer.take(batch_id)

    def lease(self, batch_id: int, seconds: float) -> bool:
        """Leases an outstanding batch, which then outlives this stream. False: an item in it is too stale."""
        with self._remove(batch_id) as share:
            if not self._buffer.take(batch_id, lease=seconds):
                return False
            self._leases.begin(batch_id, seconds, share.pop_all())
            return True

    def _remove(self, batch_id: int, give_back: bool = False) -> ExitStack:
        """The batch is no longer this stream's. Returns its share of the samples that clients may have outstanding."""
        if not give_back and batch_id not in self._sent:  # its payloads must stay until they are read
            raise invalid(f"batch {batch_id} is still being sent")
        self._sent.discard(batch_id)
        del self._stream_of[batch_id]
        _, share = self._outstanding.pop(batch_id)
        self._some_taken.set()
        return share

    def _credit_of(self, request: pb.SampleStreamRequest) -> int:
        if request.credit * max(1, self._request.num_samples) > MAX_ROWS:
            raise invalid(
                f"credit {request.credit} for batches of {self._request.num_samples}: at most {MAX_ROWS} samples ahead "
                f"at once"
            )
        return request.credit


class Leases:
    """Batches that readers have got with a time limit. A lease that is not ended in time gives its batch back."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._open: dict[int, tuple[asyncio.TimerHandle, ExitStack]] = {}
        """By batch id: the timer that ends the lease, and what else ends with it."""
        self._batch_of: dict[int, int] = {}
        """By the client's name of its request: the batch that it got, while the lease is open."""
        self._given_back: dict[int, None] = {}
        """The last batches that readers gave back, to recognise a retry. The buffer remembers the taken ones."""
        for batch_id, seconds in buffer.outstanding.leased.items():  # of before a restart
            self.begin(batch_id, seconds, ExitStack())

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, batch_id: int, seconds: float, share: ExitStack, request: int = 0) -> None:
        """The batch is given back after `seconds`. `share` is closed when the lease ends. `request` is the client's."""
        if request:
            self._batch_of[request] = batch_id
            share.callback(self._batch_of.pop, request, None)
        expire = functools.partial(self._end, batch_id, give_back=True)
        self._open[batch_id] = asyncio.get_running_loop().call_later(seconds, expire), share

    def __contains__(self, batch_id: int) -> bool:
        return batch_id in self._open

    def renew(self, batch_id: int, seconds: float, unread: bool) -> bool:
        """The lease ends `seconds` from now. False: it had ended, or an item of an `unread` batch is too stale."""
        if (lease := self._open.pop(batch_id, None)) is None:
            return False
        timer, share = lease
        timer.cancel()
        if not self._buffer.take(batch_id, sent=not unread, lease=seconds):
            share.close()
            return False
        self.begin(batch_id, seconds, share)
        return True

    def give_back_of(self, request: int) -> None:
        """Gives back the batch of an earlier attempt of this request: the client did not get its end."""
        if (batch_id := self._batch_of.get(request)) is not None:
            self._end(batch_id, give_back=True)

    def end(self, batch_id: int, give_back: bool, unread: bool = False) -> bool:
        """Takes the batch, or gives it back. False: its lease had ended, and this is no second time to give it back.

        A batch that is `unread` is given back, with the result False, if an item in it has become too stale.
        """
        if not self._end(batch_id, give_back, unread):
            return give_back and batch_id in self._given_back
        if give_back:
            self._given_back[batch_id] = None
            if len(self._given_back) > MAX_ROWS:
                del self._given_back[next(iter(self._given_back))]
        return True

    def _end(self, batch_id: int, give_back: bool, unread: bool = False) -> bool:
        lease = self._open.pop(batch_id, None)
        if lease is None:
            return False
        timer, share = lease
        timer.cancel()
        share.close()
        if not give_back:
            return self._buffer.take(batch_id, sent=not unread)
        self._buffer.give_back(batch_id)
        return True
