"""Rings: sends large payloads through shared memory if the server is on the same host. Messages go over gRPC.

A ring is a ring buffer in memory that client and server both map. One side writes payloads into it, and the other side
reads them.

* The client finds out by itself if it can use rings: it asks the server for a ring, and tries to map the memory of this
  ring.
* A stream asks for its ring at its first large payload. Clients with small payloads never have a ring.
* It takes milliseconds to make a ring. So a ring is kept when its call has ended in good order, and serves a later call
  whose payloads go in the same direction.
* Without a ring, payloads travel in the messages. Other code sees the difference only in `carries`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from replay_client.access import Access
from replay_client.errors import ReplayError
from replay_client.transport import NOT_KNOWN, BatchStream, Stream, Transport
from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame
from replay_protos.shared_memory import BYTES_PER_FRAME, FrameWriter, Mailbox, RingReader, Segment, is_large

SHARED = "shared memory"
"""The value of `carries` if payloads go through rings."""
_CAPACITY = 16 << 20
"""Bytes of a ring. Many messages fit into it, and it fits into a processor's cache."""
_RING_WAIT = 0.1
"""Seconds that the first large payload of a stream waits for its ring. After that, the payload travels over gRPC."""
_REFUSAL_PAUSE = 10.0
"""Seconds after a refusal in which no stream asks for a ring."""
_FIND_OUT_WAIT = 5.0
"""The most seconds that `find_out` waits."""
_GOODBYE = 1.0
"""Seconds that `SharedMemory.end` waits for requests under way before it cancels them."""
_MOST_IDLE = 4
"""The most rings for each direction that are kept for later calls."""

Ring = RingReader | FrameWriter
"""The client's side of a ring: it reads the payloads of draws and gets, or writes the payloads of inserts."""
R = TypeVar("R", RingReader, FrameWriter)


class SharedMemory:
    """The rings of one transport.

    To get the first ring, the client opens a stream of ShareMemory. On this stream, it asks for all rings and closes
    them. All rings end with this stream.
    """

    def __init__(self, open_stream: Callable[[], Stream]) -> None:
        """`open_stream` is called for each new stream of ShareMemory."""
        self._open_stream = open_stream
        self._closed = False
        self._stream: Stream | None = None
        self._one_exchange = asyncio.Lock()
        """Held during an exchange, which is one request on the stream and its answer. So the next answer on the stream
        is always the answer to the last request."""
        self._ask_again_at = 0.0
        """The time on the loop's clock before which no stream asks for a ring."""
        self._tasks: set[asyncio.Task[Any]] = set()
        """The tasks that run exchanges."""
        self._idle: dict[type[Ring], list[Any]] = {RingReader: [], FrameWriter: []}
        """Rings that later calls may use, by their kind: RingReader for payloads that arrive, FrameWriter for
        inserts."""
        self._requested_kinds: set[type[Ring]] = set()
        """The kinds of which the client has asked for a ring, and the server has neither given nor refused it yet."""
        self.large_responses = False
        """True if the last answer to Get was so large that the next answer should come through a ring."""
        self.carries = ""
        """`SHARED`, or "grpc: " with the reason why payloads use no ring; "" while nothing is known."""

    async def find_out(self) -> None:
        """Waits until `carries` is known, but at most `_FIND_OUT_WAIT` seconds. If necessary, asks the server."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIND_OUT_WAIT):
                async with self._one_exchange:  # wait for an exchange under way, which may set `carries`
                    pass
                if self.carries:
                    return
                asking = self.ask(capacity=0)
                if asking is not None:
                    await asyncio.wait({asking})  # `wait` does not cancel the task when the time is up

    def ask(self, capacity: int = _CAPACITY) -> asyncio.Task[Segment | None] | None:
        """Starts a task that asks the server for a ring, and returns the task.

        With capacity 0, the task only finds out if the server has rings. Returns None without asking if `end` was
        called, or if the server has refused within the last `_REFUSAL_PAUSE` seconds.
        """
        if self._closed or asyncio.get_running_loop().time() < self._ask_again_at:
            return None
        # The exchange has a task of its own. If the caller stops waiting, the task still reads the answer. Otherwise
        # the next exchange would read this answer.
        return self._start(self._ask(capacity))

    async def ring(self, kind: type[R]) -> R | None:
        """Takes an idle ring for one call; None: there is no ring now.

        If no ring of this kind is idle, asks the server for one, and waits for the ring for up to `_RING_WAIT` seconds.
        """
        idle = self._idle[kind]
        if not idle and kind not in self._requested_kinds:
            asking = self.ask()
            if asking is not None:
                self._requested_kinds.add(kind)
                asking.add_done_callback(partial(self._on_answer, kind))  # adds the new ring to `idle`
                # If the ring comes later than this, it serves a later call.
                await asyncio.wait({asking}, timeout=_RING_WAIT)
        if not idle:
            return None
        ring: R = idle.pop()
        return ring

    def _on_answer(self, kind: type[Ring], asking: asyncio.Task[Segment | None]) -> None:
        """Called when the task `asking` has ended. If the server gave memory, makes a ring of it and keeps the ring."""
        self._requested_kinds.discard(kind)
        if asking.cancelled() or asking.exception() is not None:  # `_ask` has dropped the stream
            return
        segment = asking.result()
        if segment is not None:
            self.keep(kind(segment))

    def keep(self, ring: Ring) -> None:
        """Keeps a ring for later calls. The ring is new, or its call has ended in good order."""
        idle = self._idle[type(ring)]
        assert all(ring is not idle_ring for idle_ring in idle), "two calls would use one ring"
        if len(idle) < _MOST_IDLE:
            idle.append(ring)
        else:
            self.close(ring)

    def close(self, ring: Ring) -> None:
        """Tells the server that this client no longer uses the ring."""
        if self._stream is not None:  # without a stream there is nothing to close: all rings have ended with it
            self._start(self._ask_to_close(ring.segment.ring_id))

    async def end(self) -> None:
        """Ends all rings and their stream. Exchanges under way have `_GOODBYE` seconds to finish."""
        self._closed = True
        if self._tasks:
            _, late = await asyncio.wait([*self._tasks], timeout=_GOODBYE)
            for task in late:
                task.cancel()  # if the task runs `_ask`, this also drops the stream
            await asyncio.gather(*late, return_exceptions=True)
        stream = self._forget_stream()
        if stream is not None and not stream.ended:
            await stream.end()

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a task. Refers to the task until it ends, because asyncio alone would not keep it alive."""
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _ask(self, capacity: int) -> Segment | None:
        """Asks for a ring. Returns the memory of the ring; None: there is no ring, and `carries` has the reason.

        If the server refuses, or if the memory cannot be mapped, the client does not ask again for `_REFUSAL_PAUSE`
        seconds.
        """
        try:
            async with self._one_exchange:
                return await self._open_ring(capacity)
        except (OSError, ValueError, ReplayError) as error:
            self._note_refusal(str(error))
        except grpc.aio.AioRpcError as error:
            # The connection is broken. This is no refusal, so the next call may ask again. The calls that carry
            # payloads notice the broken connection, too: they try again and report the error.
            self.carries = f"grpc: {error.details()}"
        except BaseException:
            # The task was cancelled. If the stream stayed open, the next exchange would read the answer of this one.
            self._drop_stream()
            raise
        return None

    async def _open_ring(self, capacity: int) -> Segment | None:
        """Asks for a ring. Returns the memory of the ring; None: the server refuses.

        The server answers the first request with a path. At this path, the client makes a socket (`Mailbox`). At the
        second request, the server sends the file descriptor of the memory to this socket. Raises OSError if the
        descriptor does not arrive.
        """
        opened = await self._exchange(pb.ShareMemoryRequest(open=capacity))
        if opened.refusal:
            self._note_refusal(opened.refusal)
            return None
        try:
            mailbox = Mailbox(Path(opened.path))
            try:
                sent = await self._exchange(pb.ShareMemoryRequest(send=opened.ring))
            finally:
                # Call `receive` even after an error, because it also closes the mailbox. Call it in a thread, because
                # it maps every page of the ring, which takes milliseconds.
                segment = await asyncio.to_thread(mailbox.receive, opened.ring, capacity)
            if segment is None:
                raise OSError(sent.refusal or "the memory of the ring did not arrive")
        except (OSError, ValueError):
            await self._exchange(pb.ShareMemoryRequest(close=opened.ring))
            raise
        self.carries = SHARED
        return segment

    async def _ask_to_close(self, ring_id: int) -> None:
        """Asks the server to close a ring. If the stream has ended, does nothing, because all rings ended with it."""
        async with self._one_exchange:
            if self._stream is not None:
                with suppress(grpc.aio.AioRpcError):  # the stream has broken, which closes all rings, too
                    await self._exchange(pb.ShareMemoryRequest(close=ring_id))

    async def _exchange(self, request: pb.ShareMemoryRequest) -> Any:
        """Sends one request on the stream, and returns the server's answer. Opens the stream if it is not open.

        The caller holds `_one_exchange`.
        """
        if self._stream is None or self._stream.ended:
            self._forget_stream()
            self._stream = self._open_stream()
        stream = self._stream
        with suppress(asyncio.InvalidStateError):  # the stream has ended; the read raises the reason
            await stream.write(request)
        try:
            return await stream.read()
        except grpc.aio.AioRpcError:
            self._drop_stream()
            raise

    def _drop_stream(self) -> None:
        """Cancels the stream, and forgets it and the idle rings."""
        stream = self._forget_stream()
        if stream is not None:
            stream.cancel()

    def _forget_stream(self) -> Stream | None:
        """Forgets the stream, and the idle rings, because they end with the stream. Returns the stream, if any."""
        stream = self._stream
        self._stream = None
        for idle in self._idle.values():
            idle.clear()
        return stream

    def _note_refusal(self, why: str) -> None:
        """Notes the reason why there is no ring. For `_REFUSAL_PAUSE` seconds, the client asks for no ring."""
        self.carries = f"grpc: {why}"
        self._ask_again_at = asyncio.get_running_loop().time() + _REFUSAL_PAUSE


class RingTransport(Transport):
    """A transport that sends and receives large payloads through rings. If the server gives no rings, all payloads
    travel over gRPC."""

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        self._shared = SharedMemory(partial(Transport.stream, self, "ShareMemory"))

    @property
    def carries(self) -> str:
        return self._shared.carries or NOT_KNOWN

    async def find_out(self) -> None:
        await self._shared.find_out()

    async def call(self, method: str, request: Message, timeout: float | None) -> Any:
        """As `Transport.call`. The payloads of an answer to Get may come through a ring."""
        if not isinstance(request, pb.GetRequest):
            return await super().call(method, request, timeout)
        # The request has to name the ring before the size of the answer is known. So take a ring if the last answer was
        # large.
        shared = self._shared
        ring = None
        if shared.large_responses:
            ring = await shared.ring(RingReader)
        request.ring = 0 if ring is None else ring.ring_id
        is_complete = False
        try:
            stream = RingAnswer(self._open("Get", request, timeout), ring)
            answer = await stream.read()
            is_complete = True
        finally:
            if ring is not None:
                if is_complete:
                    shared.keep(ring)
                else:  # the server may still write to the ring, so no other call may use it
                    shared.close(ring)
        shared.large_responses = is_large(answer.payloads)
        return answer

    def stream(self, method: str, request: Message | None = None, timeout: float | None = None) -> Stream:
        """As `Transport.stream`. The payloads of inserts and draws may go through rings."""
        if method == "InsertStream":
            return RingInserts(self._open(method), self._shared)
        if method == "Draw":
            return RingDraws(self._open(method), self._shared)
        return super().stream(method, request, timeout)

    async def close(self) -> None:
        await self.end_idle()
        await self._shared.end()
        await super().close()


class RingAnswer(BatchStream):
    """A call whose payloads may come through a ring. RingAnswer itself is for calls of Get, and RingDraws for Draw."""

    def __init__(self, call: Any, ring: RingReader | None) -> None:
        """`ring`: the ring that the request names; None: it names no ring."""
        super().__init__(call)
        self._ring = ring

    def _reader_of(self, ring_id: int) -> RingReader | None:
        if self._ring is not None and self._ring.ring_id == ring_id:
            return self._ring
        return None


class RingDraws(RingAnswer):
    """A call of Draw. After the first large payload, later payloads come through a ring.

    At the first large payload, the call takes an idle ring of the client. The next message of the call then names this
    ring to the server. If no ring is idle, the call asks for one, but may end before that ring is made, for example if
    a sampler has a short timeout. Then the next call uses the ring.
    """

    def __init__(self, call: Any, shared: SharedMemory) -> None:
        super().__init__(call, None)
        self._shared = shared
        self._ring_is_named = False
        """True once a message has named the ring to the server."""

    async def write(self, request: pb.DrawRequest) -> None:
        """As `Stream.write`. When the call has taken a ring, the next message also names the ring to the server."""
        if self._ring is not None and not self._ring_is_named:
            self._ring_is_named = True
            assert not request.ring, "a stream has one ring"
            # Name the ring in a copy of the message, because the caller may send `request` again on another stream.
            request_with_ring = pb.DrawRequest(ring=self._ring.ring_id)
            request_with_ring.MergeFrom(request)
            request = request_with_ring
        await super().write(request)

    async def _on_first_frame(self, frame: Frame[Any]) -> None:
        if self._ring is None and is_large(frame.payloads):
            self._ring = await self._shared.ring(RingReader)

    def cancel(self) -> None:
        if self._ring is not None:  # the server may still write to the ring, so no other call may use it
            self._shared.close(self._ring)
            self._ring = None
        super().cancel()


class RingInserts(Stream):
    """A call of InsertStream. From the first large payload on, payloads go through the ring of the call."""

    def __init__(self, call: Any, shared: SharedMemory) -> None:
        super().__init__(call)
        self._shared = shared
        self._writer: FrameWriter | None = None

    @property
    def bytes_per_message(self) -> int:
        if self._writer is None or self._writer.stalled:  # if the ring has no room, payloads go in messages
            return super().bytes_per_message
        return BYTES_PER_FRAME  # if payloads go through a ring, a message should name more bytes than it could carry

    async def write(self, frame: Frame[pb.InsertRequest]) -> None:
        """As `Stream.write`. The payload goes through the ring of this call, if the call has one."""
        if self._writer is None and is_large(frame.payloads):
            self._writer = await self._shared.ring(FrameWriter)
        if self._writer is None:
            await super().write(frame)
        else:
            placed = await self._writer.place(frame)  # moves the payload into the ring, if the ring has room
            await super().write(placed)

    async def end(self, reader: asyncio.Task[None] | None = None) -> bool:
        """As `Stream.end`. If the server ends the stream in good order too, a later stream can use the ring.

        Call it only when the server has acknowledged all items, because until then it may read payloads from the ring.
        """
        ended = await super().end(reader)
        if ended and self._writer is not None:
            self._shared.keep(self._writer)
            self._writer = None
        return ended

    def cancel(self) -> None:
        if self._writer is not None:
            self._shared.close(self._writer)
            self._writer = None
        super().cancel()
