"""AsyncSampler: an iterator over batches that the server draws ahead.

How one batch travels over the stream:

    client ──open, credit──▶ server     how many batches the server may draw ahead
    client ◀──batch───────── server     drawn, and outstanding
    client ──take──────────▶ server     when the caller asks for the batch
    client ◀──taken───────── server     now it counts as sampled; or "revoked": an item in it became stale
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import grpc

from replay_client.connection import Connection, Patience
from replay_client.errors import DeadlineExceededError, InvalidRequestError, ReplayError
from replay_client.records import Sample, samples_of
from replay_client.shared_memory import SharedSamples
from replay_client.streams import end_stream, read_message
from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame

_TAKE_SECONDS = 5.0
"""Seconds past the timeout to wait for a batch that the client has already taken."""


OnLease = Callable[[list[Sample]], None]
"""Called with each leased batch before the client takes it. A trainer uses it to renew its leases."""


def ignore(_: list[Sample]) -> None:
    """The default of `on_lease`."""


class AsyncSampler:
    """An endless iterator over batches; made by `AsyncReplayClient.sampler()`, used with `async with` and `async for`.

    The server draws up to `prefetch` batches ahead. A batch counts as sampled when the caller gets it. Until then the
    server takes it back if this client goes away, or if an item in it becomes stale. A broken connection or an
    interrupt can lose the server's answer to `take`. The caller then gets that batch next. With a lease the caller
    must acknowledge each batch, or the batch goes back to its table when the lease ends.
    """

    def __init__(
        self,
        connection: Connection,
        request: pb.SampleRequest,
        prefetch: int,
        timeout: float | None,
        on_lease: OnLease,
    ) -> None:
        if prefetch < 0:
            raise InvalidRequestError(f"prefetch must be at least 0, not {prefetch}")
        self._connection = connection
        self._request = request
        self._prefetch = prefetch
        self._timeout = timeout
        self._on_lease = on_lease
        self._call: SharedSamples | None = None
        self._ahead = 0
        """Batches that the server may have drawn and that the caller does not have yet."""
        self._ready: list[tuple[int, list[Sample]]] = []
        self._taking: tuple[int, list[Sample]] | None = None
        """The batch that the client has asked to take, until the caller has it or the server has revoked it."""
        self._busy = False
        """Whether a caller waits for the next batch."""
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Sample]:
        """The next batch. Raises DeadlineExceededError, with the reason, if there is none within the timeout."""
        if self._closed:
            raise StopAsyncIteration
        # The read has a task of its own, which goes on after the timeout: while the stream is open, the request still
        # waits in the server's line, so `_explain` can ask why. Cancelling the read would end the stream.
        task = asyncio.create_task(self._next_connected())
        self._busy = True
        try:
            await asyncio.wait({task}, timeout=self._timeout)
            if not task.done():
                reason = await self._explain()
                if self._taking is not None:  # the batch has come, and only the answer to `take` is missing
                    await asyncio.wait({task}, timeout=_TAKE_SECONDS)
                if not task.done():
                    raise DeadlineExceededError(reason)
            samples = task.result()
            self._taking = None
            return samples
        except BaseException:
            # The stream may be in the middle of a message: the next call begins a new one.
            task.cancel()
            self._drop_call()
            raise
        finally:
            self._busy = False

    async def _explain(self) -> str:
        """Why sampling this table waits."""
        table, stub = self._request.table, self._connection.stub
        with suppress(ReplayError):
            info = await self._connection.unary(stub.GetServerInfo, pb.GetServerInfoRequest(tables=[table]), 1.0)
            if reason := info.tables[0].sampling.reason:
                return reason
        return f"{table}: no batch of {self._request.num_samples} within the time"

    async def _next_connected(self) -> list[Sample]:
        patience = Patience(self._connection, self._connection.timeout)
        while True:
            try:
                if self._taking is not None and self._call is None:
                    batch_id, samples = self._taking
                    if await self._connection.take(batch_id, self._timeout, self._request.lease):
                        return samples
                    self._taking = None
                return await self._next()
            except grpc.aio.AioRpcError as error:
                self._drop_call()
                await patience.pause_or_raise(error)

    async def _next(self) -> list[Sample]:
        if self._call is None:
            self._call = self._connection.payloads.SampleStream()
            self._ahead = max(1, self._prefetch)
            await self._write(pb.SampleStreamRequest(open=self._request, credit=self._ahead))
        elif self._ahead == 0:
            self._ahead = 1
            await self._write(pb.SampleStreamRequest(credit=1))
        while True:
            while not self._ready:
                await self._receive()
            batch_id, samples = self._ready.pop(0)
            # One short round trip: the server revokes the batch if an item in it has become stale.
            if self._request.lease:
                self._on_lease(samples)
            self._taking = batch_id, samples
            await self._write(pb.SampleStreamRequest(take=batch_id, credit=1 if self._prefetch else 0))
            taken = await self._receive(batch_id)
            if taken:
                self._ahead -= 0 if self._prefetch else 1
                return samples
            self._taking = None
            if not self._prefetch:
                await self._write(pb.SampleStreamRequest(credit=1))

    async def _receive(self, asked: int = 0) -> bool:
        """Reads until the server has answered for batch `asked`; with 0, until one batch has come.

        Batches that come meanwhile go to `_ready`. Returns False if the server has revoked batch `asked`.
        """
        while True:
            message, payloads = await self._read()
            if message.taken or message.revoked:
                assert asked in (message.taken, message.revoked)
                return bool(message.taken)
            self._ready.append((message.batch, samples_of(message, payloads, leased=self._request.lease > 0)))
            if not asked:
                return True

    async def _read(self) -> Frame[pb.SampleResponse]:
        assert self._call is not None
        frame: Frame[pb.SampleResponse] = await read_message(self._call)
        return frame

    async def _write(self, request: pb.SampleStreamRequest) -> None:
        assert self._call is not None
        with suppress(asyncio.InvalidStateError):  # the stream has ended; the next read raises the reason
            await self._call.write(request)

    def _drop_call(self) -> None:
        """Ends the stream. The server then puts the batches that this client has not taken back into their table."""
        if self._call is not None:
            self._call.cancel()
        self._call = None
        self._ready.clear()

    async def close(self) -> None:
        self._closed = True
        if self._call is not None and not self._busy:
            await end_stream(self._call)
        self._drop_call()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
