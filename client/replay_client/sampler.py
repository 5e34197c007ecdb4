"""AsyncSampler: batches that the server draws ahead, and that count as sampled only when they are used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import grpc

from replay_client.connection import Connection, Patience
from replay_client.errors import DeadlineExceededError, InvalidRequestError, ReplayError
from replay_client.frames import missing_bytes, split_rows
from replay_client.records import Sample, samples_of
from replay_client.shared_memory import SharedSamples
from replay_client.streams import end_stream, read_message
from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame

_TAKE_SECONDS = 5.0
"""Seconds past the timeout to wait for a batch that the client has already taken."""


OnLease = Callable[[list[Sample]], None]


def ignore(_: list[Sample]) -> None:
    """The default of `on_lease`."""


class AsyncSampler:
    """An endless iterator over batches; made by `AsyncReplayClient.sampler()`, used with `async with` and `async for`.

    The server draws up to `prefetch` batches ahead. A batch counts as sampled when it is handed to the caller. Until
    then the server takes it back if this client goes away, or if an item in it becomes stale. A batch whose answer to
    `take` is lost, in a broken connection or by an interrupt, is the next that the caller gets. With a lease the caller
    acknowledges each batch, or it goes back in time.
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
        # In its own task: to interrupt the read would end the stream, and the server could not say why it waits.
        task = asyncio.create_task(self._next_connected())
        self._busy = True
        try:
            await asyncio.wait({task}, timeout=self._timeout)
            if not task.done():
                reason = await self._explain()
                if self._taking is not None:  # the answer is on its way
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
        """Reads up to the answer for batch `asked`, or without one up to the next batch. Batches go to `_ready`.

        Returns whether the server let the client take the batch.
        """
        while True:
            message, payloads = await self._read()
            if message.taken or message.revoked:
                assert asked in (message.taken, message.revoked)
                return bool(message.taken)
            chunks = list(payloads)
            while missing_bytes(message.payload_sizes, chunks):
                chunks += (await self._read()).payloads
            rows = split_rows(message.payload_sizes, chunks)
            self._ready.append((message.batch, samples_of(message, rows, leased=self._request.lease > 0)))
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
        """Ends the stream. The server takes back the batches that this client has not taken."""
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
