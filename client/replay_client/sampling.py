"""Sampling: draws batches over a stream, and gives a batch to the caller when the server has confirmed it.

`DrawStream` carries draws, and the ids of the batches that their reader acknowledges, requeues or renews. The head of
replay_server/rpc/sampling.py shows one exchange. Two classes read such streams:

* `SingleBatches`, for `sample`, `acknowledge` and `renew`: it makes one draw, and acknowledges the batch when all its
  bytes have arrived.
* `AsyncSampler`: `prefetch` draws are under way. When the caller asks for a batch, the acknowledgement of one batch is
  sent together with the next draw.

The caller gets a batch only when its acknowledgement is confirmed. If the stream breaks before, only the server knows
if the batch was acknowledged. Then the client acknowledges the same id again, on a new stream, and the server
recognises what it has done already. If the server has requeued the batch meanwhile, the client draws another one. So a
broken connection loses no batch, and delivers no batch twice.

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
"""The most batches that a client keeps after an acknowledgement that no server has answered."""
_ANSWER_SECONDS = 5.0
"""Seconds past the timeout of a sampler to wait for the answer to its acknowledgement."""

_CLOSED = "this client was closed while the call waited"
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
    """The request for each batch. Its `lease`: seconds for which the caller has the batch; 0: the caller owns it."""
    prefetch: int
    timeout: float | None
    on_lease: OnLease

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise InvalidRequestError(f"prefetch must be at least 0, not {self.prefetch}")


class DrawStream:
    """A stream of draws to one server. The first request opens it, and so does the first request after it broke."""

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
        """The awaited answers to acknowledgements, requeues and renewals. They come in the order of the requests."""

    def draw(self, request: pb.SampleRequest) -> asyncio.Future[Batch]:
        """Begins a draw. The result raises AioRpcError if there is no batch."""
        assert request.id not in self._draws, f"draw {request.id} is under way"
        self._send(pb.DrawRequest(draw=request))
        future = self._new_future()
        self._draws[request.id] = future
        return future

    def end(self, request: pb.DrawRequest) -> asyncio.Future[pb.SampleResponse]:
        """Acknowledges, requeues or renews, as `request` says. The result says what was done, or raises AioRpcError.

        A draw that begins right after this travels in the same message.
        """
        self._send(request)
        future = self._new_future()
        self._answers.append(future)
        return future

    async def finish(self, request: pb.DrawRequest, timeout: float | None) -> pb.SampleResponse:
        """As `end`, but tries again if the stream breaks, also after a restart of the server."""

        async def attempt(seconds: float | None) -> Any:
            return await self.result(self.end(request), seconds)

        return await self._connection.call(attempt, timeout)

    def awaited(self) -> None:
        """Tells the server that the caller now waits for the draws under way: they are no longer only drawn ahead."""
        self._send(pb.DrawRequest(awaited=True))

    def give_up(self, draw_id: int) -> None:
        """Requeues a batch that the reader does not want any more, even if it is not drawn yet."""
        self._draws.pop(draw_id, None)
        if self._stream is not None:
            self.end(pb.DrawRequest(requeue=[draw_id]))

    async def result(self, future: asyncio.Future[Any], seconds: float | None) -> Any:
        """The result of `draw` or `end`. Drops the stream if the server does not answer within `seconds`."""
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
            self._unsent.append(None)
            self._more.set()
            await asyncio.wait({writer}, timeout=_GOODBYE_SECONDS)
            await stream.end(reader)
            self.drop()
            self._closing = False

    def _new_future(self) -> asyncio.Future[Any]:
        assert self._loop is not None
        return self._loop.create_future()

    def _send(self, request: pb.DrawRequest) -> None:
        if self._stream is None:
            self._loop = asyncio.get_running_loop()
            self._stream = self._connection.transport.stream("Draw")
            self._unsent.clear()
            self._tasks = [
                self._loop.create_task(self._read(self._stream)),
                self._loop.create_task(self._write(self._stream)),
            ]
        self._unsent.append(request)
        self._more.set()

    async def _write(self, stream: Stream) -> None:
        # One task writes for all callers: gRPC ends a stream if a caller is cancelled while it writes.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader raises the reason
            while True:
                while self._unsent:
                    request = self._unsent.popleft()
                    if request is None:
                        return
                    following = self._unsent[0] if self._unsent else None
                    if following is not None and following.HasField("draw") and not request.HasField("draw"):
                        # One message for both requests costs half as much. `following` takes in `request`, which must
                        # not change because it may be sent again on another stream.
                        self._unsent.popleft()
                        following.MergeFrom(request)
                        request = following
                    await stream.write(request)
                self._more.clear()
                await self._more.wait()

    async def _read(self, stream: Stream) -> None:
        error: Exception
        try:
            while True:
                self._receive(await stream.read())
        except asyncio.CancelledError:
            if stream is self._stream:  # the channel was closed
                self._break(ServerClosedError(_CLOSED))
            raise
        except grpc.aio.AioRpcError as broken:
            error = ServerClosedError(_CLOSED) if self._closing else broken
        except (ReplayError, LookupError, ValueError) as wrong:  # an answer that breaks the protocol
            error = wrong
        if stream is self._stream:
            self._break(error)

    def _receive(self, batch: Batch) -> None:
        head = batch.head
        if not head.batch:  # the answer to an acknowledgement, requeue or renewal
            _settle(self._answers.popleft(), head, head)
            return
        future = self._draws.pop(head.batch, None)
        if future is not None:  # the draw was not given up meanwhile
            _settle(future, head, batch)

    def _break(self, error: Exception) -> None:
        """Ends the stream. All draws and answers under way fail with the error."""
        stream = self._stream
        self._stream = None
        assert stream is not None
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        stream.cancel()
        waiting: list[asyncio.Future[Any]] = [*self._draws.values(), *self._answers]
        self._draws.clear()
        self._answers.clear()
        for future in waiting:
            _fail(future, error)


def _settle(future: asyncio.Future[T], head: pb.SampleResponse, result: T) -> None:
    """Gives the future the result, or the error that the head of the answer has."""
    if head.HasField("error"):
        _fail(future, failure(head.error.code, head.error.message, head.error.reason))
    elif not future.done():  # done: the caller was cancelled
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # asyncio logs an error that nobody looks at, and the caller may be gone


def leases_of(samples: Iterable[Sample]) -> dict[str, list[int]]:
    """The leases of samples, sorted, by the name of the server that gave the samples."""
    leases: dict[str, set[int]] = {}
    for sample in samples:
        if sample.info.lease_id:
            leases.setdefault(sample.info.shard, set()).add(sample.info.lease_id)
    return {shard: sorted(ids) for shard, ids in leases.items()}


def ending(what: str, leases: list[int], seconds: float) -> pb.DrawRequest:
    """The request that acknowledges, requeues or renews these leases, as `what` says.

    Renewed leases end after `seconds`. Raises InvalidRequestError if `seconds` is no number.
    """
    return message_of(pb.DrawRequest, **{what: leases}, seconds=seconds)


class SingleBatches:
    """Draws and acknowledges batches for a client of one server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stream = DrawStream(connection)
        self._unconfirmed: dict[bytes, tuple[int, list[Sample]]] = {}
        """The id and the samples of a batch whose time was up before the server confirmed it, by the bytes of its
        request."""

    async def sample(self, request: pb.SampleRequest, seconds: float | None) -> list[Sample]:
        """The samples of one batch, within `seconds` (None: no limit). With `request.lease` the batch is not
        acknowledged."""
        deadline = Deadline(seconds)
        same_call = request.SerializeToString(deterministic=True)
        while True:
            drawn = self._unconfirmed.pop(same_call, None)
            if drawn is None:
                drawn = await self._draw(request, deadline)
            draw_id, samples = drawn
            if request.lease:
                return samples
            if await self._acknowledge(draw_id, samples, same_call, deadline.seconds):
                return samples

    async def end(
        self, samples: Iterable[Sample], what: str, timeout: float | None, lease: float = 0.0
    ) -> MutationResult:
        """Ends the leases of samples, or renews them for `lease` seconds. `what` is acknowledge, requeue or renew."""
        leases = sorted(chain.from_iterable(leases_of(samples).values()))
        if not leases:
            return MutationResult(0, ())
        answer = await self._stream.finish(ending(what, leases, lease), timeout)
        return MutationResult(len(answer.done), tuple(answer.missing))

    def sampler(self, series: Series) -> AsyncSampler:
        return AsyncSampler(self._connection, series)

    async def close(self) -> None:
        """Ends the stream in good order. Batches that are neither acknowledged nor leased are requeued."""
        await self._stream.close()

    async def _draw(self, request: pb.SampleRequest, deadline: Deadline) -> tuple[int, list[Sample]]:
        request.id = new_id()  # the same at each attempt

        async def attempt(rpc_timeout: float | None) -> Any:
            seconds = deadline.seconds
            if seconds is not None:
                request.timeout = seconds  # at a later attempt, the server waits only for the seconds that are left
            try:
                return await self._stream.result(self._stream.draw(request), rpc_timeout)
            except asyncio.CancelledError:
                self._stream.give_up(request.id)
                raise
            except grpc.aio.AioRpcError as error:
                # The server shuts down. Without this error, a call without a timeout would try again for ever.
                if (error.trailing_metadata() or {}).get(REASON_KEY) == CLOSING:
                    raise ServerClosedError(error.details() or "") from None
                raise

        head, payloads = await self._connection.call(attempt, deadline.seconds)
        return request.id, samples_of(head, payloads, request.lease > 0)

    async def _acknowledge(self, draw_id: int, samples: list[Sample], same_call: bytes, timeout: float | None) -> bool:
        """Acknowledges the batch. Returns False if the server has requeued it.

        A batch whose answer is lost is kept for the next equal call.
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
    server requeues it if this client goes away, or if an item in it becomes stale. A broken connection or an interrupt
    can lose the server's answer to `acknowledge`. The caller then gets that batch next. With a lease the caller must
    acknowledge each batch, or the batch goes back to its table when the lease ends.
    """

    def __init__(self, connection: Connection, series: Series) -> None:
        self._connection = connection
        self._stream = DrawStream(connection)
        self._series = series
        self._lease = series.request.lease
        # A batch that is drawn ahead belongs to the stream. Its lease begins when the caller asks for the batch.
        series.request.lease = 0.0
        self._ahead: deque[asyncio.Future[Batch]] = deque()
        """The draws of the batches that the caller has not received yet."""
        self._taking: tuple[int, list[Sample]] | None = None
        """The id and the samples of the next batch, until the server has confirmed or revoked it."""
        self._answer: asyncio.Future[pb.SampleResponse] | None = None
        """The server's answer to the acknowledgement of that batch."""
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
            if self._answer is not None:  # the batch has come, and only the answer to `acknowledge` is missing
                with suppress(TimeoutError):
                    async with asyncio.timeout(_ANSWER_SECONDS):
                        return await self._next()
            raise DeadlineExceededError(reason)
        except BaseException:
            self._drop()  # nothing is drawn ahead for a caller that may not come back
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
            pass  # the reason is only a help, and a failure to get it says nothing about the draws
        return reason or f"{table}: no batch of {self._series.request.num_samples} within the time"

    async def _next(self) -> list[Sample]:
        patience = self._connection.patience(self._connection.timeout)
        while True:
            try:
                if self._taking is None:
                    self._taking = await self._receive()
                batch_id, samples = self._taking
                if await self._confirmed(batch_id):
                    return samples
            except grpc.aio.AioRpcError as error:
                self._drop()
                await patience.pause_or_raise(error)

    async def _receive(self) -> tuple[int, list[Sample]]:
        """The id and the samples of the next batch that is drawn."""
        assert self._answer is None, "the batch before is neither confirmed nor revoked"
        self._draw_ahead(max(1, self._series.prefetch))
        if not any(draw.done() for draw in self._ahead):
            self._stream.awaited()
            await asyncio.wait(self._ahead, return_when=asyncio.FIRST_COMPLETED)
        # The server may serve a later draw before an earlier one.
        drawn = next(draw for draw in self._ahead if draw.done())
        head, payloads = drawn.result()
        self._ahead.remove(drawn)
        samples = samples_of(head, payloads, leased=self._lease > 0)
        if self._lease:
            self._series.on_lease(samples)
        return head.batch, samples

    async def _confirmed(self, batch_id: int) -> bool:
        """True if the server confirms the batch. False if it requeued it: an item became stale, or the stream ended."""
        if self._answer is None:
            if self._lease:
                request = pb.DrawRequest(renew=[batch_id], seconds=self._lease)
            else:
                request = pb.DrawRequest(acknowledge=[batch_id])
            request.awaited = False  # the caller has this batch and works, and does not wait for the next one
            self._answer = self._stream.end(request)
            self._draw_ahead(self._series.prefetch)
        answer = await asyncio.shield(self._answer)
        self._answer = self._taking = None
        return not answer.missing

    def _draw_ahead(self, batches: int) -> None:
        while len(self._ahead) < batches:
            self._series.request.id = new_id()
            self._ahead.append(self._stream.draw(self._series.request))
        assert len(self._ahead) <= max(1, self._series.prefetch), (len(self._ahead), self._series.prefetch)

    def _drop(self) -> None:
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
