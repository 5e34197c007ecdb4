"""Sampling: draws batches over a stream, acknowledges them, and returns a batch when the server has confirmed that.

A `DrawStream` carries draws, and the ids of the batches that the reader acknowledges, requeues or renews. The head of
replay_server/rpc/sampling.py shows one exchange. Two classes read such streams:

* `SingleBatches` serves the calls `sample`, `acknowledge` and `renew` of a client. For `sample` it makes one draw, and
  acknowledges the batch when all bytes of the batch have arrived.
* `AsyncSampler` keeps `prefetch` draws under way. When the caller asks for a batch, the sampler sends the
  acknowledgement of this batch together with the next draw.

Without a lease, the caller gets a batch only after the server has confirmed the acknowledgement of the batch. If the
stream breaks before that, only the server knows if the batch was acknowledged. So the client acknowledges the same id
again, on a new stream, and the server recognises an id that was acknowledged already. If the server has requeued the
batch, the client draws another batch. So a broken connection loses no batch, and delivers no batch twice.

Each sampler has a stream of its own. When the stream ends, for any reason, the server requeues the batches that the
sampler had drawn ahead.

Both classes read from one server. If the server cannot serve a draw yet, it makes the draw wait.
`replay_client.shards.sampling` has the classes that read from several servers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self, TypeVar

import grpc

from replay_client.connection import Connection
from replay_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ReplayError,
    ServerClosedError,
    ServerUnavailableError,
)
from replay_client.records import MutationResult, Sample, samples_of
from replay_client.requests import message_of, new_id
from replay_client.transport import Stream, failure
from replay_client.waits import Deadline
from replay_protos import CLOSING, REASON_KEY
from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame

MOST_UNCONFIRMED = 16
"""The most batches that a client keeps although no server has confirmed their acknowledgement."""
_ANSWER_SECONDS = 5.0
"""Seconds that a sampler waits, after its timeout, for the answer to an acknowledgement that it has sent."""

_CLOSED = "this client was closed while the call waited"
"""The text of the error for calls that `close` ends."""
_GOODBYE_SECONDS = 1.0
"""The most seconds that `DrawStream.close` waits until the last requests are sent."""

T = TypeVar("T")
Batch = Frame[pb.SampleResponse]
"""The columns of a batch, and one payload for each row."""
OnLease = Callable[[list[Sample]], None]
"""A function that is called with each leased batch just before its lease begins. A trainer uses it to renew leases."""


def ignore(_: list[Sample]) -> None:
    """Does nothing with the samples. This function is the default of `on_lease`."""


@dataclass
class Series:
    """The batches that a sampler draws. Raises InvalidRequestError for a negative `prefetch`."""

    request: pb.SampleRequest
    """The request for each batch. Its field `lease` is the length of each lease in seconds. When a lease ends, a batch
    that the caller has not acknowledged returns to its table. 0: there is no lease, so the batch is the caller's for
    good."""
    prefetch: int
    """The number of batches that are drawn ahead."""
    timeout: float | None
    """Seconds that the caller waits for each batch; None: for ever."""
    on_lease: OnLease

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise InvalidRequestError(f"prefetch must be at least 0, not {self.prefetch}")


class DrawStream:
    """A stream of draws to one server. The first request opens it, and so does the first request after a break."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stream: Stream | None = None
        self._closing = False
        """True while `close` ends the stream."""
        self._tasks: list[asyncio.Task[None]] = []
        """The reading task, which reads from the stream, and the writing task, which writes to it."""
        self._unsent: deque[pb.DrawRequest | None] = deque()
        """Requests that are not sent yet. `close` adds None as the last entry: it tells the writing task to finish."""
        self._more = asyncio.Event()
        """Set when `_unsent` has a new entry."""
        self._draws: dict[int, asyncio.Future[Batch]] = {}
        """The draws under way, by the id of the request."""
        self._answers: deque[asyncio.Future[pb.SampleResponse]] = deque()
        """The answers that have not arrived yet, to acknowledgements, requeues and renewals, in the order of the
        requests. The server answers in this order."""

    def draw(self, request: pb.SampleRequest) -> asyncio.Future[Batch]:
        """Begins a draw, and returns the future of its batch. The future raises AioRpcError if the draw fails."""
        assert request.id not in self._draws, f"draw {request.id} is under way"
        self._send(pb.DrawRequest(draw=request))
        future = self._new_future()
        self._draws[request.id] = future
        return future

    def end(self, request: pb.DrawRequest) -> asyncio.Future[pb.SampleResponse]:
        """Acknowledges, requeues or renews batches, as `request` says.

        Returns the future of the server's answer. The future raises AioRpcError if the request fails. The answer lists
        the ids of the batches for which the request succeeded (`done`), and the other ids (`missing`). If a draw begins
        right after this call, one message carries both requests.
        """
        self._send(request)
        future = self._new_future()
        self._answers.append(future)
        return future

    async def finish(self, request: pb.DrawRequest, timeout: float | None) -> pb.SampleResponse:
        """Calls `end` and waits for the server's answer, which it returns.

        Calls `end` again with the same request if the stream breaks, even if the server was restarted.
        """

        async def attempt(seconds: float | None) -> Any:
            future = self.end(request)
            return await self.result(future, seconds)

        return await self._connection.call(attempt, timeout)

    def awaited(self) -> None:
        """Tells the server that the caller now waits for the draws under way, which were drawn ahead until now."""
        self._send(pb.DrawRequest(awaited=True))

    def give_up(self, draw_id: int) -> None:
        """Requeues a batch that the reader no longer wants. If the batch is not drawn yet, the draw ends."""
        self._draws.pop(draw_id, None)
        # If the stream has ended, the server has requeued the batch already.
        if self._stream is not None:
            self.end(pb.DrawRequest(requeue=[draw_id]))  # nobody waits for the answer

    async def result(self, future: asyncio.Future[Any], seconds: float | None) -> Any:
        """Waits for the future that `draw` or `end` returned, and returns its result.

        Drops the stream, and raises AioRpcError, if the server does not answer within `seconds`; None: no limit.
        """
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            self.drop()
            # "Deadline Exceeded" is the text of gRPC itself, which `connection.reported` recognises.
            raise failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None

    def drop(self) -> None:
        """Ends the stream at once. The server requeues its batches, unless they are acknowledged or leased."""
        if self._stream is not None:
            self._break(failure(grpc.StatusCode.CANCELLED, "the client ended the stream"))

    def drop_soon(self) -> None:
        """Makes the event loop call `drop` soon. Any thread may call this method."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.drop)

    async def close(self) -> None:
        """Ends the stream in good order."""
        if self._stream is not None:
            stream = self._stream
            reader, writer = self._tasks
            self._closing = True
            self._unsent.append(None)  # the writer sends the requests before None, and then ends
            self._more.set()
            await asyncio.wait({writer}, timeout=_GOODBYE_SECONDS)
            await stream.end(reader)
            self.drop()  # makes the calls fail that still wait for an answer
            self._closing = False

    def _new_future(self) -> asyncio.Future[Any]:
        assert self._loop is not None
        return self._loop.create_future()

    def _send(self, request: pb.DrawRequest) -> None:
        """Queues the request for the task that writes. If no stream is open, opens one and starts its two tasks."""
        if self._stream is None:
            self._loop = asyncio.get_running_loop()
            self._stream = self._connection.transport.stream("Draw")
            self._unsent.clear()  # these requests were for the last stream, and failed when it ended
            self._tasks = [
                self._loop.create_task(self._read(self._stream)),
                self._loop.create_task(self._write(self._stream)),
            ]
        self._unsent.append(request)
        self._more.set()

    async def _write(self, stream: Stream) -> None:
        """Sends the requests in `_unsent` until one of them is None, or until the stream ends. Runs as a task."""
        # One task writes for all callers, because gRPC ends a stream if a caller is cancelled while it writes.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the stream has ended; `_read` gets the reason
            while True:
                while self._unsent:
                    request = self._unsent.popleft()
                    if request is None:
                        return
                    following = self._unsent[0] if self._unsent else None
                    if following is not None and following.HasField("draw") and not request.HasField("draw"):
                        # Send both requests in one message, which costs half as much. `following` becomes this message.
                        # `request` must stay as it is, because `finish` may send it again.
                        self._unsent.popleft()
                        following.MergeFrom(request)
                        request = following
                    await stream.write(request)
                self._more.clear()
                await self._more.wait()

    async def _read(self, stream: Stream) -> None:
        """Passes each answer to the future that waits for it, until the stream ends. Runs as a task.

        When the stream ends, all requests under way fail with the error of the stream.
        """
        error: Exception
        try:
            while True:
                self._receive(await stream.read())
        except asyncio.CancelledError:
            if stream is self._stream:  # this object has not dropped the stream, so the channel was closed
                self._break(ServerClosedError(_CLOSED))
            raise
        except grpc.aio.AioRpcError as broken:
            error = ServerClosedError(_CLOSED) if self._closing else broken
        except (ReplayError, LookupError, ValueError) as wrong:  # an answer that breaks the protocol
            error = wrong
        if stream is self._stream:  # else `drop` has ended this stream already, and a new one may be open
            self._break(error)

    def _receive(self, answer: Batch) -> None:
        """Sets the result of the future that waits for this answer."""
        head = answer.head
        if not head.batch:  # without the id of a draw, this is the answer to an acknowledgement, requeue or renewal
            _settle(self._answers.popleft(), head, result=head)
            return
        future = self._draws.pop(head.batch, None)
        if future is None:  # `give_up` has ended the draw
            return
        _settle(future, head, result=answer)

    def _break(self, error: Exception) -> None:
        """Ends the stream. All draws and answers under way fail with the error."""
        stream = self._stream
        self._stream = None
        assert stream is not None
        for task in self._tasks:
            if task is not asyncio.current_task():  # the task that calls this method ends by itself
                task.cancel()
        stream.cancel()
        waiting: list[asyncio.Future[Any]] = [*self._draws.values(), *self._answers]
        self._draws.clear()
        self._answers.clear()
        for future in waiting:
            _fail(future, error)


def _settle(future: asyncio.Future[T], head: pb.SampleResponse, result: T) -> None:
    """Sets the result of the future. If the head of the answer has an error, sets this error instead."""
    if head.HasField("error"):
        _fail(future, failure(head.error.code, head.error.message, head.error.reason))
    elif not future.done():  # it is done already if its caller was cancelled
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    """Sets the error of the future, unless its caller was cancelled."""
    if not future.done():
        future.set_exception(error)
        # asyncio logs an error that no code has retrieved. The caller may be gone, so retrieve it here.
        future.exception()


def leases_of(samples: Iterable[Sample]) -> dict[str, list[int]]:
    """The sorted lease ids of the samples, by the name of the server that gave the samples.

    Leaves out samples without a lease.
    """
    leases: dict[str, set[int]] = {}
    for sample in samples:
        if sample.info.lease_id:
            leases.setdefault(sample.info.shard, set()).add(sample.info.lease_id)
    return {shard: sorted(ids) for shard, ids in leases.items()}


def ending(what: str, leases: list[int], seconds: float) -> pb.DrawRequest:
    """The request that acknowledges, requeues or renews these leases.

    `what` is the name of the field: "acknowledge", "requeue" or "renew". Renewed leases end after `seconds`. Raises
    InvalidRequestError if `seconds` is no number.
    """
    return message_of(pb.DrawRequest, **{what: leases}, seconds=seconds)


class SingleBatches:
    """Draws and acknowledges batches for a client of one server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stream = DrawStream(connection)
        self._unconfirmed: dict[bytes, tuple[int, list[Sample]]] = {}
        """If a call of `sample` ends before the server has confirmed the acknowledgement of a batch, the id and the
        samples of the batch stay here. The key is the request of the call as bytes, so that the next call with an equal
        request can return the batch."""

    async def sample(self, request: pb.SampleRequest, seconds: float | None) -> list[Sample]:
        """The samples of one batch, within `seconds` (None: no limit).

        Acknowledges the batch, unless `request.lease` is set. With a lease, the caller acknowledges the batch.
        """
        deadline = Deadline(seconds)
        call_key = request.SerializeToString(deterministic=True)  # equal bytes for calls with equal arguments
        while True:
            drawn = self._unconfirmed.pop(call_key, None)
            if drawn is None:
                drawn = await self._draw(request, deadline)
            draw_id, samples = drawn
            if request.lease:  # the caller acknowledges the batch
                return samples
            is_confirmed = await self._acknowledge(draw_id, samples, call_key, deadline.seconds)
            if is_confirmed:
                return samples
            # The server has requeued the batch, so draw another one.

    async def end(
        self, samples: Iterable[Sample], what: str, timeout: float | None, lease: float = 0.0
    ) -> MutationResult:
        """Acknowledges, requeues or renews the leases of samples.

        `what` is the action, as in `ending`. Renewed leases end after `lease` seconds.
        """
        leases_by_server = leases_of(samples)
        leases = sorted(chain.from_iterable(leases_by_server.values()))
        if not leases:
            return MutationResult(applied=0, missing=())
        answer = await self._stream.finish(ending(what, leases, lease), timeout)
        return MutationResult(applied=len(answer.done), missing=tuple(answer.missing))

    def sampler(self, series: Series) -> AsyncSampler:
        """A sampler with a stream of its own."""
        return AsyncSampler(self._connection, series)

    async def close(self) -> None:
        """Ends the stream in good order. The server requeues batches that are neither acknowledged nor leased."""
        await self._stream.close()

    async def _draw(self, request: pb.SampleRequest, deadline: Deadline) -> tuple[int, list[Sample]]:
        """Draws a new batch, and returns its id and its samples. Tries again if the stream breaks."""
        # Each attempt has the same id, so that the server requeues the batch that an earlier attempt has drawn.
        request.id = new_id()

        async def attempt(rpc_timeout: float | None) -> Any:
            """Sends the draw once, and waits for its batch."""
            seconds = deadline.seconds
            if seconds is not None:
                request.timeout = seconds  # at a later attempt, the server waits only for the seconds that are left
            try:
                future = self._stream.draw(request)
                return await self._stream.result(future, rpc_timeout)
            except asyncio.CancelledError:
                self._stream.give_up(request.id)
                raise
            except grpc.aio.AioRpcError as error:
                is_closing = (error.trailing_metadata() or {}).get(REASON_KEY) == CLOSING
                if is_closing:  # the server shuts down, and a call without a timeout would try again for ever
                    raise ServerClosedError(error.details() or "") from None
                raise

        head, payloads = await self._connection.call(attempt, deadline.seconds)
        return request.id, samples_of(head, payloads, leased=request.lease > 0)

    async def _acknowledge(self, draw_id: int, samples: list[Sample], call_key: bytes, timeout: float | None) -> bool:
        """Acknowledges the batch. Returns False if the server has requeued the batch.

        If no answer arrives in time, the server may have acknowledged the batch all the same. So this method keeps the
        batch in `_unconfirmed`, for the next call with an equal request.
        """
        try:
            answer = await self._stream.finish(pb.DrawRequest(acknowledge=[draw_id]), timeout)
        except BaseException:
            self._unconfirmed[call_key] = draw_id, samples
            while len(self._unconfirmed) > MOST_UNCONFIRMED:
                oldest = next(iter(self._unconfirmed))
                del self._unconfirmed[oldest]
            raise
        return not answer.missing


class AsyncSampler(AbstractAsyncContextManager["AsyncSampler"]):
    """An endless iterator over batches; made by `AsyncReplayClient.sampler()`, used with `async with` and `async for`.

    The server draws up to `prefetch` batches ahead. A batch counts as sampled when the caller gets it. Until then the
    server requeues the batch if the connection ends, or if an item of the batch becomes stale. If a broken connection
    or an interrupt loses the server's answer to the acknowledgement of a batch, the caller gets this batch next. With a
    lease, a batch returns to its table when its lease ends, unless the caller acknowledges the batch before.
    """

    def __init__(self, connection: Connection, series: Series) -> None:
        self._connection = connection
        self._stream = DrawStream(connection)
        self._series = series
        self._lease = series.request.lease
        """The length of each lease in seconds; 0: no lease."""
        # Draws ask for no lease, because a batch that is drawn ahead belongs to the stream. The lease of a batch begins
        # when the caller asks for the batch.
        series.request.lease = 0.0
        self._ahead: deque[asyncio.Future[Batch]] = deque()
        """The draws of the batches that the caller has not received yet."""
        self._received: tuple[int, list[Sample]] | None = None
        """The id and the samples of the batch that the caller gets next. The batch stays here until the server has
        answered its acknowledgement or renewal. None: the next batch has not been received yet."""
        self._answer: asyncio.Future[pb.SampleResponse] | None = None
        """The server's answer to the acknowledgement (with a lease: the renewal) of the batch in `_received`. None: no
        such request is under way."""
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Sample]:
        """The next batch. Raises DeadlineExceededError, with the reason, if no batch comes within the timeout.

        Raises ServerUnavailableError if no server answers until this timeout or the client's own ends.
        """
        if self._closed:
            raise StopAsyncIteration
        try:
            try:
                async with asyncio.timeout(self._series.timeout):
                    return await self._next()
            except TimeoutError:
                reason = await self._explain()  # before `_drop` below, while the draws still wait at the server
            if self._answer is not None:  # the batch has arrived, and only the answer to `acknowledge` is missing
                with suppress(TimeoutError):
                    async with asyncio.timeout(_ANSWER_SECONDS):
                        return await self._next()
            raise DeadlineExceededError(reason)
        except BaseException:
            self._drop()  # the caller perhaps never asks again, so keep no batches drawn ahead
            raise

    async def _explain(self) -> str:
        """The reason why draws from this table wait, from the server if it gives one.

        Raises ServerUnavailableError if no server answers.
        """
        table = self._series.request.table
        reason = ""
        try:
            request = pb.GetServerInfoRequest(tables=[table])
            info = await self._connection.unary("GetServerInfo", request, timeout=1.0)
            reason = str(info.tables[0].sampling.reason)
        except ServerUnavailableError:
            raise
        except ReplayError:
            pass  # the reason only helps a person, and a server that answers with an error may still serve the draws
        return reason or f"{table}: no batch of {self._series.request.num_samples} within the time"

    async def _next(self) -> list[Sample]:
        """The next batch whose acknowledgement or lease the server confirms. Tries again if the stream breaks."""
        patience = self._connection.patience(self._connection.timeout)
        while True:
            try:
                if self._received is None:
                    self._received = await self._receive()
                batch_id, samples = self._received
                is_confirmed = await self._confirm(batch_id)
                if is_confirmed:
                    return samples
            except grpc.aio.AioRpcError as error:
                # `_received` stays: the next attempt acknowledges the same id again.
                self._drop()
                await patience.pause_or_raise(error)  # raises if no other attempt follows

    async def _receive(self) -> tuple[int, list[Sample]]:
        """The id and the samples of a batch that has been drawn. If none has been drawn ahead, waits for a batch."""
        assert self._answer is None, "the batch before is neither confirmed nor revoked"
        self._draw_ahead(max(1, self._series.prefetch))
        if not any(draw.done() for draw in self._ahead):
            self._stream.awaited()
            await asyncio.wait(self._ahead, return_when=asyncio.FIRST_COMPLETED)
        # The server may serve a later draw before an earlier one, so look for the first that is done.
        finished_draw = next(draw for draw in self._ahead if draw.done())
        head, payloads = finished_draw.result()
        self._ahead.remove(finished_draw)
        samples = samples_of(head, payloads, leased=self._lease > 0)
        if self._lease:
            self._series.on_lease(samples)
        return head.batch, samples

    async def _confirm(self, batch_id: int) -> bool:
        """Acknowledges the batch, or begins its lease, and returns True if the server confirms that.

        Returns False if the server has requeued the batch, because an item became stale or the stream ended. If the
        caller is cancelled, `_answer` stays, so that the next call waits for the same answer.
        """
        if self._answer is None:
            if self._lease:
                request = pb.DrawRequest(renew=[batch_id], seconds=self._lease)
            else:
                request = pb.DrawRequest(acknowledge=[batch_id])
            request.awaited = False  # the caller now works on this batch, and does not wait for the next one
            self._answer = self._stream.end(request)
            self._draw_ahead(self._series.prefetch)
        answer = await asyncio.shield(self._answer)  # a caller that is cancelled must not cancel the future
        self._answer = None
        self._received = None
        return not answer.missing

    def _draw_ahead(self, batches: int) -> None:
        """Begins draws until `_ahead` has at least `batches` draws, whether under way or done."""
        while len(self._ahead) < batches:
            self._series.request.id = new_id()
            self._ahead.append(self._stream.draw(self._series.request))
        assert len(self._ahead) <= max(1, self._series.prefetch), (len(self._ahead), self._series.prefetch)

    def _drop(self) -> None:
        """Ends the stream, so that the server requeues the batches that were drawn ahead."""
        self._stream.drop()
        self._ahead.clear()
        self._answer = None

    async def close(self) -> None:
        """Ends the sampler and its stream. The server requeues the batches that were drawn ahead."""
        self._closed = True
        await self._stream.close()
        self._drop()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        self._stream.drop_soon()
