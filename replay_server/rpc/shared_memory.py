"""Shared memory: gives clients on this host rings, and carries the payloads of their streams through them.

* A ring belongs to one connection and one stream, and ends with the call of ShareMemory that opened it.
* A ring carries nothing before the server has sent its memory to its client.
* The memory of all rings counts against one budget (`max_shared_bytes`).
* Where no ring can be had, payloads travel in the messages as before. Nothing above this module can tell.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, cast

from google.protobuf.message import DecodeError

from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame
from replay_protos.shared_memory import (
    HEADER,
    MAX_CAPACITY,
    FrameWriter,
    RingReader,
    Segment,
    take_frame,
)
from replay_server.errors import Refused, invalid, try_again
from replay_server.rpc.backend import Backend, Budget, endless
from replay_server.rpc.clients import Context

log = logging.getLogger("replay_server")

_LEAST_COST = 1 << 20
"""Bytes that a ring counts for at least: it also costs a file descriptor."""

Stream = Callable[[Any, Context], AsyncIterator[Any]]
Call = Callable[[Any, Context], Awaitable[None]]


class SharedMemoryMethods:
    def __init__(self, backend: Backend, folder: Path | None) -> None:
        """Clients on this host, which see `folder` too, make their sockets there; None: no client gets a ring."""
        self.backend = backend
        self._folder = folder
        self._budget = Budget(backend.limits.max_shared_bytes, "bytes of shared memory (max_shared_bytes)")
        self._idle: dict[tuple[str, int], Segment | FrameWriter | RingReader] = {}
        """The rings that their clients have mapped and that no call uses now, by connection and id."""
        self._open: set[tuple[str, int]] = set()
        """The rings whose call of ShareMemory lasts."""
        self._short = False
        """Whether the last ring was refused for lack of room."""

    @endless
    async def ShareMemory(
        self, requests: AsyncIterator[pb.ShareMemoryRequest], context: Context
    ) -> AsyncGenerator[pb.ShareMemoryResponse]:
        client, opened = context.peer(), dict[int, Segment]()
        try:
            async for request in requests:
                if request.HasField("open"):
                    yield await self._make(client, request.open, opened)
                elif request.send:
                    yield await self._send(client, request.send, opened)
                else:
                    if request.close in opened:
                        self._end(client, opened.pop(request.close))
                    yield pb.ShareMemoryResponse()
        finally:
            for segment in opened.values():
                self._end(client, segment)

    async def _make(self, client: str, capacity: int, opened: dict[int, Segment]) -> pb.ShareMemoryResponse:
        if self._folder is None:
            return pb.ShareMemoryResponse(refusal="the server does not share memory ([server] shared_memory)")
        if capacity % 4096 or capacity > MAX_CAPACITY:
            raise invalid(f"a ring of {capacity} bytes: a multiple of 4096, at most {MAX_CAPACITY}")
        if not self._folder.is_dir():
            return self._no_room(f"there is no folder {self._folder} ([server] shared_memory)")
        try:
            self._budget.take(client, cost := max(HEADER + capacity, _LEAST_COST))
        except Refused as refusal:
            return pb.ShareMemoryResponse(refusal=refusal.message)
        try:
            # On a thread: the system zeroes all of the memory now.
            segment = await asyncio.to_thread(Segment.create, self._folder, capacity)
        except BaseException as error:
            self._budget.give_back(client, cost)
            if not isinstance(error, OSError):
                raise
            return self._no_room(f"the system gives no memory for rings: {error.strerror}")
        # A stream may use the memory for longer than this call lasts.
        weakref.finalize(segment, self._budget.give_back, client, cost).atexit = False
        self._short = False
        opened[segment.ring_id] = segment
        return pb.ShareMemoryResponse(ring=segment.ring_id, path=str(segment.path))

    def _no_room(self, why: str) -> pb.ShareMemoryResponse:
        if not self._short:  # one line until there is room again
            self._short = True
            log.warning("%s; payloads travel over gRPC instead", why)
        return pb.ShareMemoryResponse(refusal=why)

    async def _send(self, client: str, ring_id: int, opened: dict[int, Segment]) -> pb.ShareMemoryResponse:
        if (segment := opened.get(ring_id)) is None or segment.handed_over:
            raise invalid(f"ring {ring_id} is not one of this stream's, or was sent before")
        try:
            # On a thread: whoever can write to the folder may have put anything in the place of the client's socket.
            await asyncio.to_thread(segment.hand_over)
        except OSError as error:
            return pb.ShareMemoryResponse(refusal=str(error))
        if segment.capacity:
            self._idle[client, ring_id] = segment
            self._open.add((client, ring_id))
        else:  # it only had to show that rings work
            self._end(client, opened.pop(ring_id))
        return pb.ShareMemoryResponse(ring=ring_id)

    def _end(self, client: str, segment: Segment) -> None:
        with suppress(OSError):  # the client has removed its socket, unless it was killed
            segment.path.unlink()
        self._idle.pop((client, segment.ring_id), None)
        self._open.discard((client, segment.ring_id))

    # ------------------------------------------------------------------------------------------ what streams carry

    def carry(self, name: str, behavior: Callable[..., Any]) -> Callable[..., Any]:
        """The method of the service with this name, its payloads carried through rings where its client wants that."""
        if name == "InsertStream":
            return self._inserts(behavior)
        if name == "Draw":
            return self._samples(behavior)
        return self._response(behavior) if name in ("Sample", "Get") else behavior

    def _inserts(self, behavior: Stream) -> Stream:
        @functools.wraps(behavior)
        async def respond(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async with aclosing(behavior(self._taken(requests, context.peer()), context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield response

        return respond

    async def _taken(self, requests: AsyncIterator[Any], client: str) -> AsyncIterator[Any]:
        readers: dict[int, RingReader] = {}

        def reader_of(ring_id: int) -> RingReader | None:
            if ring_id not in readers and (ring := self._idle.pop((client, ring_id), None)) is not None:
                readers.clear()  # a stream reads one ring; another one replaces it
                if not isinstance(ring, FrameWriter):
                    readers[ring_id] = RingReader(ring) if isinstance(ring, Segment) else ring
            return readers.get(ring_id)

        try:
            async for request in requests:
                yield request if isinstance(request, DecodeError) else _take(request, reader_of)
        finally:
            for ring_id, reader in readers.items():
                if (client, ring_id) in self._open:  # for the client's next stream
                    self._idle[client, ring_id] = reader

    def _samples(self, behavior: Stream) -> Stream:
        @functools.wraps(behavior)
        async def respond(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            writer: FrameWriter | None = None

            async def watched() -> AsyncIterator[Any]:
                nonlocal writer
                async for request in requests:
                    if not isinstance(request, DecodeError) and request.ring:
                        writer = self._writer(context.peer(), request.ring)
                    yield request

            async with aclosing(behavior(watched(), context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    if writer is None:
                        yield response
                    elif (gathered := writer.gather(response)) is not None:
                        yield await writer.place(gathered)

        return respond

    def _response(self, behavior: Call) -> Call:
        @functools.wraps(behavior)
        async def respond(request: Any, context: Context) -> None:
            client, writer = context.peer(), None
            if not isinstance(request, DecodeError) and request.ring:
                writer = self._writer(client, request.ring)
            if writer is None:
                await behavior(request, context)
                return
            await behavior(request, cast("Context", _Context(context, writer)))
            if (key := (client, request.ring)) in self._open:  # for the client's next call
                self._idle[key] = writer

        return respond

    def _writer(self, client: str, ring_id: int) -> FrameWriter | None:
        """None if the ring has ended meanwhile: the payloads then travel in the messages."""
        ring = self._idle.pop((client, ring_id), None)
        return FrameWriter(ring) if isinstance(ring, Segment) else None if isinstance(ring, RingReader) else ring


def _take(request: Frame[Any], reader_of: Callable[[int], RingReader | None]) -> Frame[Any]:
    try:
        return take_frame(request, reader_of)
    except LookupError as error:  # it ended with its call: the client connects again
        raise try_again(str(error)) from None
    except ValueError as error:
        raise invalid(str(error)) from None


class _Context:
    """The context of a call, whose messages go through a ring."""

    def __init__(self, context: Context, writer: FrameWriter) -> None:
        self._context = context
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, frame: Frame[Any]) -> None:
        if (gathered := self._writer.gather(frame)) is not None:
            await self._context.write(await self._writer.place(gathered))
