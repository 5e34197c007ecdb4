"""Shared memory: carries the payloads of a client's streams through rings, if its server runs on the same host.

* The client finds out by itself: it asks the server for a ring and looks whether it can map it.
* A stream asks for its ring at its first large payload. Clients with small payloads never have one.
* A ring takes milliseconds to make. One whose call has ended in good order serves the next call of its kind.
* Where no ring can be had, payloads travel in the messages. Nothing above this module can tell, except by `transport`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from replay_client.errors import ReplayError, ServerUnavailableError
from replay_client.rows import Rows
from replay_client.streams import end_stream
from replay_protos import replay_pb2 as pb
from replay_protos.framing import BYTES_PER_MESSAGE, SERVICE, Frame
from replay_protos.shared_memory import BYTES_PER_FRAME, FrameWriter, Mailbox, RingReader, Segment, is_large, pass_on

SHARED = "shared memory"
"""What `transport` says if payloads go through rings."""
_CAPACITY = 16 << 20
"""Bytes of a ring. Many messages fit into it, and it fits into a processor's cache."""
_MOMENT = 0.1
"""Seconds that the first large payload of a stream waits for its ring. Without a ring, payloads travel over gRPC."""
_PAUSE = 10.0
"""Seconds. After a refusal no stream asks for a ring during this time."""
_ANSWER = 5.0
"""Seconds for which `find_out` waits."""
_GOODBYE = 1.0
"""Seconds that the server has to end the call."""
_MOST_IDLE = 4
"""Rings of each direction that are kept for later calls."""
_Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.ShareMemoryRequest, pb.ShareMemoryResponse]"


class SharedMemory:
    """The rings of one channel. The first ring opens a call of ShareMemory; all rings end with this call."""

    def __init__(self, channel: grpc.aio.Channel, *, wanted: bool) -> None:
        self._open_call: Any = channel.stream_stream(
            f"/{SERVICE}/ShareMemory", pb.ShareMemoryRequest.SerializeToString, pb.ShareMemoryResponse.FromString
        )
        self._wanted = wanted
        self._call: _Call | None = None
        self._one_exchange = asyncio.Lock()
        self._ask_again_at = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle: list[RingReader] = []
        """Rings that later calls of `sample` and `get` may use."""
        self._idle_writers: list[FrameWriter] = []
        """Rings that later insert streams may use."""
        self._asked: asyncio.Task[Segment | None] | None = None
        """The request for an idle ring that is under way."""
        self.large_responses = False
        """Whether the last response was so large that a ring is worth while."""
        self.transport = "" if wanted else "grpc: shared memory is turned off in this client (shared_memory=False)"
        """`SHARED`, or "grpc: " with the reason; "" while nothing is known."""

    async def find_out(self) -> None:
        """Wait until `transport` is known, or until the server has had time to answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER):
                async with self._one_exchange:  # a ring may be on its way
                    pass
                if not self.transport and (asked := self.ask(0)) is not None:
                    await asyncio.wait({asked})

    def ask(self, capacity: int = _CAPACITY) -> asyncio.Task[Segment | None] | None:
        """Ask the server for a ring. With capacity 0, ask only whether it has rings. None: no ring now."""
        if not self._wanted or asyncio.get_running_loop().time() < self._ask_again_at:
            return None
        # In its own task: if the caller stops waiting, the next exchange must not get the response to this one.
        return self._start(self._ask(capacity))

    async def idle_ring(self) -> RingReader | None:
        """A ring for one response; None while there is no ring."""
        if not self._idle and self._asked is None and (asked := self.ask()) is not None:
            self._asked = asked
            asked.add_done_callback(self._keep)
            await asyncio.wait({asked}, timeout=_MOMENT)
        return self._idle.pop() if self._idle else None

    def _keep(self, asked: asyncio.Task[Segment | None]) -> None:
        self._asked = None  # its result would keep the memory of the ring for as long as this client
        if (segment := _result(asked)) is not None:
            self._idle.append(RingReader(segment))

    def give_back(self, ring: RingReader, *, reusable: bool) -> None:
        """Ends the use of an idle ring."""
        if reusable and len(self._idle) < _MOST_IDLE:
            self._idle.append(ring)
        else:
            self.close(ring.segment)

    def idle_writer(self) -> FrameWriter | None:
        """The ring of an insert stream that has ended; None: there is none."""
        return self._idle_writers.pop() if self._idle_writers else None

    def keep(self, writer: FrameWriter) -> None:
        """Keeps the ring of an insert stream that the server has ended, after it took all payloads out of the ring."""
        if len(self._idle_writers) < _MOST_IDLE:
            self._idle_writers.append(writer)
        else:
            self.close(writer.segment)

    def close(self, segment: Segment | None) -> None:
        """Tell the server that this client no longer uses the ring."""
        if segment is not None and self._call is not None:
            self._start(self._ask_to_close(segment.ring_id))

    async def end(self) -> None:
        """Ends all rings."""
        self._wanted = False
        if self._tasks:
            _, late = await asyncio.wait([*self._tasks], timeout=_GOODBYE)
            for task in late:
                task.cancel()  # which ends the call, too
            await asyncio.gather(*late, return_exceptions=True)
        call = self._forget_call()
        if call is None or call.done():
            return
        await end_stream(call)

    def _start(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _ask(self, capacity: int) -> Segment | None:
        try:
            async with self._one_exchange:
                return await self._open_ring(capacity)
        except (OSError, ValueError, ReplayError) as error:
            self._refuse(str(error))
        except grpc.aio.AioRpcError as error:
            self._drop_call()
            # Not an error here: the calls that carry payloads report it better, and retry.
            self.transport = f"grpc: {error.details()}"
        except BaseException:
            self._drop_call()
            raise
        return None

    async def _open_ring(self, capacity: int) -> Segment | None:
        opened = await self._exchange(pb.ShareMemoryRequest(open=capacity))
        if opened.refusal:
            self._refuse(opened.refusal)
            return None
        try:
            mailbox = Mailbox(Path(opened.path))
            try:
                sent = await self._exchange(pb.ShareMemoryRequest(send=opened.ring))
            finally:  # on a thread, because the system maps every page of the ring now
                segment = await asyncio.to_thread(mailbox.receive, opened.ring, capacity)
            if segment is None:
                raise OSError(sent.refusal or "the memory of the ring did not arrive")
        except (OSError, ValueError):
            await self._exchange(pb.ShareMemoryRequest(close=opened.ring))
            raise
        self.transport = SHARED
        return segment

    async def _ask_to_close(self, ring_id: int) -> None:
        async with self._one_exchange:
            if self._call is not None:
                with suppress(grpc.aio.AioRpcError):
                    await self._exchange(pb.ShareMemoryRequest(close=ring_id))

    async def _exchange(self, request: pb.ShareMemoryRequest) -> pb.ShareMemoryResponse:
        if self._call is None or self._call.done():
            self._forget_call()
            self._call = self._open_call()
        call: Any = self._call
        with suppress(asyncio.InvalidStateError):  # the call has ended; the read raises the reason
            await call.write(request)
        response = await call.read()
        if not isinstance(response, pb.ShareMemoryResponse):
            raise grpc.aio.AioRpcError(
                await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
            )
        return response

    def _drop_call(self) -> None:
        if (call := self._forget_call()) is not None:
            call.cancel()

    def _forget_call(self) -> _Call | None:
        """All rings end with their call."""
        call, self._call = self._call, None
        self._idle.clear()
        self._idle_writers.clear()
        return call

    def _refuse(self, why: str) -> None:
        self.transport = f"grpc: {why}"
        self._ask_again_at = asyncio.get_running_loop().time() + _PAUSE


class _RingOfStream:
    """The ring of one stream, from the first large payload on."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self._asked: asyncio.Task[Segment | None] | None = None
        self._ended = False

    async def segment(self) -> Segment | None:
        """The ring; None while there is none."""
        if self._asked is None:
            if self._ended or (asked := self._shared.ask()) is None:
                return None
            self._asked = asked
            await asyncio.wait({asked}, timeout=_MOMENT)
        if not self._asked.done():
            return None
        if (segment := _result(self._asked)) is None:
            self._asked = None
        return segment

    def hand_over(self) -> None:
        """The ring belongs to the caller now."""
        self._asked = None

    def end(self) -> None:
        self._ended = True
        if self._asked is not None:
            self._asked.add_done_callback(lambda asked: self._shared.close(_result(asked)))
            self._asked = None


def _result(asked: asyncio.Task[Segment | None]) -> Segment | None:
    return None if asked.cancelled() or asked.exception() is not None else asked.result()


class SharedInserts:
    """A call of InsertStream. Large payloads go through its ring."""

    def __init__(self, call: Any, shared: SharedMemory) -> None:
        self._call = call
        self.read = call.read
        self._shared = shared
        self._ring = _RingOfStream(shared)
        self._writer: FrameWriter | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __aiter__(self) -> AsyncIterator[pb.InsertResponse]:
        responses: AsyncIterator[pb.InsertResponse] = aiter(self._call)
        return responses

    @property
    def bytes_per_message(self) -> int:
        """About how many payload bytes a message should carry. It is more if the payloads travel in a ring."""
        return BYTES_PER_MESSAGE if self._writer is None or self._writer.stalled else BYTES_PER_FRAME

    async def write(self, frame: Frame[pb.InsertRequest]) -> None:
        if self._writer is None and is_large(frame.payloads):
            self._writer = self._shared.idle_writer() or await self._new_writer()
        await self._call.write(frame if self._writer is None else await self._writer.place(frame))

    async def _new_writer(self) -> FrameWriter | None:
        if (segment := await self._ring.segment()) is None:
            return None
        self._ring.hand_over()
        return FrameWriter(segment)

    def keep_ring(self) -> None:
        """Leaves the ring to later streams. The server must have acknowledged all items, and have ended this stream."""
        if self._writer is not None:
            self._shared.keep(self._writer)
            self._writer = None

    def cancel(self) -> bool:
        self._ring.end()
        if self._writer is not None:
            self._shared.close(self._writer.segment)
            self._writer = None
        return bool(self._call.cancel())


class SharedSamples:
    """A call of Draw. After its first large payload the others come through a ring.

    It takes an idle ring of the client. A stream may end before the ring that it asked for is there, as a sampler's
    with a short timeout does: the ring then waits for the next stream.
    """

    def __init__(self, call: Any, shared: SharedMemory, send: Callable[[pb.DrawRequest], None]) -> None:
        self._call = call
        self._shared = shared
        self._send = send
        self._reader: RingReader | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def read(self) -> Any:
        """The next batch, with one payload for each row, or another message. EOF: the stream has ended."""
        if (frame := await self._call.read()) is grpc.aio.EOF:
            return frame
        head, rows = frame.head, Rows(frame.head.payload_sizes)
        while True:
            if (
                self._reader is None
                and is_large(frame.payloads)
                and (ring := await self._shared.idle_ring()) is not None
            ):
                self._reader = ring
                self._send(pb.DrawRequest(ring=ring.ring_id))
            pass_on(frame, self._reader_of, rows.add)
            if not rows.missing:
                return Frame(head, rows.payloads)
            if (frame := await self._call.read()) is grpc.aio.EOF:
                return frame

    def _reader_of(self, ring_id: int) -> RingReader | None:
        return self._reader if self._reader is not None and self._reader.ring_id == ring_id else None

    def cancel(self) -> bool:
        if self._reader is not None:  # the server may still write to it
            self._shared.give_back(self._reader, reusable=False)
            self._reader = None
        return bool(self._call.cancel())


class SharedResponse:
    """The method Get. A response comes through a ring if the response before it was large."""

    def __init__(self, method: Any, shared: SharedMemory) -> None:
        self._method = method
        self._shared = shared

    async def __call__(self, request: pb.GetRequest, **options: Any) -> Frame[Any]:
        """The response: its first message, and one payload for each row. `options` are those of a call of gRPC."""
        shared = self._shared
        ring = await shared.idle_ring() if shared.large_responses else None
        request.ring = 0 if ring is None else ring.ring_id
        rings = {} if ring is None else {ring.ring_id: ring}
        head, rows, complete = None, Rows(()), False
        try:
            async for frame in self._method(request, **options):
                if head is None:
                    head, rows = frame.head, Rows(frame.head.payload_sizes)
                pass_on(frame, rings.get, rows.add)
            complete = True
        finally:
            if ring is not None:
                # If the response was not read to its end, the server may still write to its ring.
                shared.give_back(ring, reusable=complete)
        if head is None or rows.missing:
            raise ServerUnavailableError("the server ended the answer in the middle")
        shared.large_responses = is_large(rows.payloads)
        return Frame(head, rows.payloads)
