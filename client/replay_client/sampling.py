"""Sampling: draws batches over a stream, and returns a batch when the server has confirmed its acknowledgement.

`DrawStream` carries draws, and the ids of the batches that their reader acknowledges, requeues or renews. The head of
replay_server/rpc/sampling.py shows one exchange. Two classes read such streams:

* `SingleBatches`, for `sample`, `acknowledge` and `renew`: it makes one draw, and acknowledges the batch when all its
  bytes have arrived.
* `AsyncSampler`: `prefetch` draws are under way. When the caller asks for a batch, the acknowledgement of one batch is
  sent together with the next draw.

The caller gets a batch only when its acknowledgement is confirmed. If the stream breaks before, only the server knows
if the batch was acknowledged. Then the client acknowledges the same id again, on a new stream, and the server
recognises an id that was acknowledged already. If the server has requeued the batch meanwhile, the client draws another
batch. So a broken connection loses no batch, and delivers no batch twice.

Each sampler has a stream of its own. When the stream ends, for any reason, the server requeues the batches that the
sampler had drawn ahead.

Both classes read from one server, which makes a draw wait until it can be served. `replay_client.shards.sampling` has
the readers of several servers.
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
"""The most batches that a client keeps because no server has answered their acknowledgement."""
_ANSWER_SECONDS = 5.0
"""Seconds that a sampler waits, after its timeout, for the answer to an acknowledgement that it has sent."""

_CLOSED = "this client was closed while the call waited"
"""The text of the error for calls that `close` ends."""
_GOODBYE_SECONDS = 1.0
"""Seconds in which a stream that ends sends its last requests."""

T = TypeVar("T")
Batch = Frame[pb.SampleResponse]
"""The columns of a batch, and one payload for each row."""
OnLease = Callable[[list[Sample]], None]
"""A function that is called with each leased batch just before its lease begins. A trainer uses it to renew leases."""


def ignore(_: list[Sample]) -> None:
    """The default of `on_lease`."""


@dataclass
class Series:
    """The batches that a sampler draws. Raises InvalidRequestError for a negative `prefetch`."""

    request: pb.SampleRequest
    """The request for each batch. Its field `lease` has the seconds after which an unacknowledged batch returns to its
    table; 0: the batch is the caller's for good."""
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
        """The task that reads from the stream, and the task that writes to it."""
        self._unsent: deque[pb.DrawRequest | None] = deque()
        """Requests that are not sent yet. None ends the stream."""
        self._more = asyncio.Event()
        """Set when there is a request to send."""
        self._draws: dict[int, asyncio.Future[Batch]] = {}
        """The draws under way, by the id of the request."""
        self._answers: deque[asyncio.Future[pb.SampleResponse]] = deque()
        """The awaited answers to acknowledgements, requeues and renewals. The server answers in the order of the
        requests."""

    def draw(self, request: pb.SampleRequest) -> asyncio.Future[Batch]:
        """Begins a draw. The result raises AioRpcError if there is no batch."""
        assert request.id not in self._draws, f"draw {request.id} is under way"
        self._send(pb.DrawRequest(draw=request))
        future = self._new_future()
        self._draws[request.id] = future
        return future

    def end(self, request: pb.DrawRequest) -> asyncio.Future[pb.SampleResponse]:
        """Acknowledges, requeues or renews batches, as `request` says.

        The result is the server's answer, or raises AioRpcError. The answer lists the ids of the batches for which the
        request succeeded (`done`), and the other ids (`missing`). A draw that begins right after this call travels in
        the same message.
        """
        self._send(request)
        future = self._new_future()
        self._answers.append(future)
        return future

    async def finish(self, request: pb.DrawRequest, timeout: float | None) -> pb.SampleResponse:
        """The answer to `end`. Tries again if the stream breaks, even after a restart of the server."""

        async def attempt(seconds: float | None) -> Any:
            return await self.result(self.end(request), seconds)

        return await self._connection.call(attempt, timeout)

    def awaited(self) -> None:
        """Tells the server that the caller now waits for the draws under way, which were drawn ahead until now."""
        self._send(pb.DrawRequest(awaited=True))

    def give_up(self, draw_id: int) -> None:
        """Requeues a batch that the reader no longer wants. If the batch is not drawn yet, the draw ends."""
        self._draws.pop(draw_id, None)
        if self._stream is not None:  # else the end of the stream has requeued its batches
            self.end(pb.DrawRequest(requeue=[draw_id]))  # nobody waits for the answer

    async def result(self, future: asyncio.Future[Any], seconds: float | None) -> Any:
        """The result of the future that `draw` or `end` returned.

        Drops the stream, and raises AioRpcError, if the server does not answer within `seconds`; None: no limit.
        """
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            self.drop()
            raise failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None  # gRPC's own words

    def drop(self) -> None:
        """Ends the stream at once. The server requeues its batches that are neither acknowledged nor leased."""
        if self._stream is not None:
            self._break(failure(grpc.StatusCode.CANCELLED, "the client ended the stream"))

    def drop_soon(self) -> None:
        """As `drop`, from any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.drop)

    async def close(self) -> None:
        """Ends the stream in good order."""
        if self._stream is not None:
            stream = self._stream
            reader, writer = self._tasks
            self._closing = True
            self._unsent.append(None)  # the writer sends the requests before, and ends
            self._more.set()
            await asyncio.wait({writer}, timeout=_GOODBYE_SECONDS)
            await stream.end(reader)
            self.drop()  # the calls that still wait for an answer fail
            self._closing = False

    def _new_future(self) -> asyncio.Future[Any]:
        assert self._loop is not None
        return self._loop.create_future()

    def _send(self, request: pb.DrawRequest) -> None:
        """Queues the request for the task that writes. Opens the stream and starts its tasks if it is not open."""
        if self._stream is None:
            self._loop = asyncio.get_running_loop()
            self._stream = self._connection.transport.stream("Draw")
            self._unsent.clear()  # requests for the stream before, which have failed with it
            self._tasks = [
                self._loop.create_task(self._read(self._stream)),
                self._loop.create_task(self._write(self._stream)),
            ]
        self._unsent.append(request)
        self._more.set()

    async def _write(self, stream: Stream) -> None:
        """Sends the requests in `_unsent`, as a task, until it meets None or the stream ends."""
        # One task writes for all callers: gRPC ends a stream if a caller is cancelled while it writes.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader raises the reason
            while True:
                while self._unsent:
                    request = self._unsent.popleft()
                    if request is None:
                        return
                    following = self._unsent[0] if self._unsent else None
                    if following is not None and following.HasField("draw") and not request.HasField("draw"):
                        # One message for both requests costs half as much. Merge `request` into `following` and not the
                        # other way round: `request` must stay as it is, because `finish` may send it again.
                        self._unsent.popleft()
                        following.MergeFrom(request)
                        request = following
                    await stream.write(request)
                self._more.clear()
                await self._more.wait()

    async def _read(self, stream: Stream) -> None:
        """Passes the answers on, as a task, until the stream ends. Then all requests under way fail with its error."""
        error: Exception
        try:
            while True:
                self._receive(await stream.read())
        except asyncio.CancelledError:
            if stream is self._stream:  # this object has not dropped the stream: the channel was closed
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
        if not head.batch:  # no id of a draw: the answer to an acknowledgement, requeue or renewal
            _settle(self._answers.popleft(), head, head)
            return
        future = self._draws.pop(head.batch, None)
        if future is not None:  # None: `give_up` has ended the draw meanwhile
            _settle(future, head, answer)

    def _break(self, error: Exception) -> None:
        """Ends the stream. All draws and answers under way fail with the error."""
        stream = self._stream
        self._stream = None
        assert stream is not None
        for task in self._tasks:
            if task is not asyncio.current_task():  # the task that reads calls this when the stream has ended
                task.cancel()
        stream.cancel()
        waiting: list[asyncio.Future[Any]] = [*self._draws.values(), *self._answers]
        self._draws.clear()
        self._answers.clear()
        for future in waiting:
            _fail(future, error)


def _settle(future: asyncio.Future[T], head: pb.SampleResponse, result: T) -> None:
    """Sets the result of the future, or the error that the head of the answer has."""
    if head.HasField("error"):
        _fail(future, failure(head.error.code, head.error.message, head.error.reason))
    elif not future.done():  # done: the caller was cancelled
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    """Sets the error of the future, unless its caller was cancelled."""
    if not future.done():
        future.set_exception(error)
        # asyncio logs an error that no code has retrieved. The caller may be gone, so retrieve it here.
        future.exception()


def leases_of(samples: Iterable[Sample]) -> dict[str, list[int]]:
    """The sorted ids of the leases of samples, by the name of the server that gave the samples.

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
        """The id and the samples of each batch that was drawn for a call whose time was up before the server confirmed
        the acknowledgement. The key is the request of the call as bytes: an equal call returns the batch."""

    async def sample(self, request: pb.SampleRequest, seconds: float | None) -> list[Sample]:
        """The samples of one batch, within `seconds` (None: no limit).

        Acknowledges the batch, unless `request.lease` is set: the caller then acknowledges it.
        """
        deadline = Deadline(seconds)
        same_call = request.SerializeToString(deterministic=True)  # equal bytes for equal arguments
        while True:
            drawn = self._unconfirmed.pop(same_call, None)
            if drawn is None:
                drawn = await self._draw(request, deadline)
            draw_id, samples = drawn
            if request.lease:  # the caller acknowledges the batch
                return samples
            if await self._acknowledge(draw_id, samples, same_call, deadline.seconds):
                return samples
            # The server has requeued the batch meanwhile: draw another one.

    async def end(
        self, samples: Iterable[Sample], what: str, timeout: float | None, lease: float = 0.0
    ) -> MutationResult:
        """Ends the leases of samples, or renews them for `lease` seconds; `what` is as in `ending`."""
        leases = sorted(chain.from_iterable(leases_of(samples).values()))
        if not leases:
            return MutationResult(0, ())
        answer = await self._stream.finish(ending(what, leases, lease), timeout)
        return MutationResult(len(answer.done), tuple(answer.missing))

    def sampler(self, series: Series) -> AsyncSampler:
        """A sampler with a stream of its own."""
        return AsyncSampler(self._connection, series)

    async def close(self) -> None:
        """Ends the stream in good order. The server requeues batches that are neither acknowledged nor leased."""
        await self._stream.close()

    async def _draw(self, request: pb.SampleRequest, deadline: Deadline) -> tuple[int, list[Sample]]:
        """The id and the samples of a new batch. Tries again if the stream breaks."""
        # Each attempt has the same id, so that the server requeues the batch that an earlier attempt has drawn.
        request.id = new_id()

        async def attempt(rpc_timeout: float | None) -> Any:
            """Sends the draw once, and waits for its batch."""
            seconds = deadline.seconds
            if seconds is not None:
                request.timeout = seconds  # at a later attempt, the server waits only for the seconds that are left
            try:
                return await self._stream.result(self._stream.draw(request), rpc_timeout)
            except asyncio.CancelledError:
                self._stream.give_up(request.id)
                raise
            except grpc.aio.AioRpcError as error:
                is_closing = (error.trailing_metadata() or {}).get(REASON_KEY) == CLOSING
                if is_closing:  # the server shuts down, and a call without a timeout would try again for ever
                    raise ServerClosedError(error.details() or "") from None
                raise

        head, payloads = await self._connection.call(attempt, deadline.seconds)
        return request.id, samples_of(head, payloads, request.lease > 0)

    async def _acknowledge(self, draw_id: int, samples: list[Sample], same_call: bytes, timeout: float | None) -> bool:
        """Acknowledges the batch. Returns False if the server has requeued it.

        If no answer arrives in time, keeps the batch for the next equal call: the server may have acknowledged it.
        """
        try:
            answer = await self._stream.finish(pb.DrawRequest(acknowledge=[draw_id]), timeout)
        except BaseException:
            self._unconfirmed[same_call] = draw_id, samples
            while len(self._unconfirmed) > MOST_UNCONFIRMED:
                oldest = next(iter(self._unconfirmed))
                del self._unconfirmed[oldest]
            raise
        return not answer.missing


class AsyncSampler(AbstractAsyncContextManager["AsyncSampler"]):
    """An endless iterator over batches; made by `AsyncReplayClient.sampler()`, used with `async with` and `async for`.

    The server draws up to `prefetch` batches ahead. A batch counts as sampled when the caller gets it. Until then the
    server requeues the batch if the connection ends, or if an item of the batch becomes stale. A broken connection or
    an interrupt can lose the server's answer to `acknowledge`. The caller then gets that batch next. With a lease, the
    batch returns to its table when the lease ends, unless the caller acknowledges it before.
    """

    def __init__(self, connection: Connection, series: Series) -> None:
        self._connection = connection
        self._stream = DrawStream(connection)
        self._series = series
        self._lease = series.request.lease
        """Seconds; 0: no lease."""
        # A batch that is drawn ahead belongs to the stream. Its lease begins when the caller asks for the batch.
        series.request.lease = 0.0
        self._ahead: deque[asyncio.Future[Batch]] = deque()
        """The draws of the batches that the caller has not received yet."""
        self._received: tuple[int, list[Sample]] | None = None
        """The id and the samples of the next batch for the caller, until the server has answered its acknowledgement.
        None: no batch has been received."""
        self._answer: asyncio.Future[pb.SampleResponse] | None = None
        """The server's answer to the acknowledgement of that batch, or to its renewal. None: nothing was sent."""
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
            self._drop()  # the caller may not ask again, so keep no batches drawn ahead
            raise

    async def _explain(self) -> str:
        """The server's reason why draws from this table wait. Raises ServerUnavailableError if no server answers."""
        table = self._series.request.table
        reason = ""
        try:
            info = await self._connection.unary("GetServerInfo", pb.GetServerInfoRequest(tables=[table]), 1.0)
            reason = str(info.tables[0].sampling.reason)
        except ServerUnavailableError:
            raise
        except ReplayError:
            pass  # the reason only helps a person; a server that answers with an error may still serve the draws
        return reason or f"{table}: no batch of {self._series.request.num_samples} within the time"

    async def _next(self) -> list[Sample]:
        """The next batch that the server confirms. Tries again if the stream breaks."""
        patience = self._connection.patience(self._connection.timeout)
        while True:
            try:
                if self._received is None:
                    self._received = await self._receive()
                batch_id, samples = self._received
                if await self._confirmed(batch_id):
                    return samples
            except grpc.aio.AioRpcError as error:
                # `_received` stays: the next attempt acknowledges the same id again.
                self._drop()
                await patience.pause_or_raise(error)  # raises if no other attempt follows

    async def _receive(self) -> tuple[int, list[Sample]]:
        """The id and the samples of the next batch that is drawn. Waits for one if none has been drawn ahead."""
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

    async def _confirmed(self, batch_id: int) -> bool:
        """Acknowledges the batch, or begins its lease, and returns True if the server confirms that.

        False if the server has requeued the batch, because an item became stale or the stream ended. `_answer` outlives
        a caller that is cancelled: the next call waits for the same answer.
        """
        if self._answer is None:
            if self._lease:
                request = pb.DrawRequest(renew=[batch_id], seconds=self._lease)
            else:
                request = pb.DrawRequest(acknowledge=[batch_id])
            request.awaited = False  # the caller has this batch and works, and does not wait for the next one
            self._answer = self._stream.end(request)
            self._draw_ahead(self._series.prefetch)
        answer = await asyncio.shield(self._answer)  # a caller that is cancelled must not cancel the future
        self._answer = None
        self._received = None
        return not answer.missing

    def _draw_ahead(self, batches: int) -> None:
        """Begins draws until `batches` are under way or drawn."""
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
        """Requeues the batches that were drawn ahead."""
        self._closed = True
        await self._stream.close()
        self._drop()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        self._stream.drop_soon()
