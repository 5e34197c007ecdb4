"""SharedMemory: the rings of one client, if its server runs on the same host.

* The client finds out by itself: it asks the server for a ring and looks whether it can map it.
* A stream asks for its ring at its first large payload. Clients with small payloads never have one.
* A ring takes milliseconds to make. One whose call has ended in good order serves the next call of its kind.
* Where no ring can be had, payloads travel in the messages. Nobody else can tell, except by `carries`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from replay_client.errors import ReplayError
from replay_client.transport import Stream
from replay_protos import replay_pb2 as pb
from replay_protos.shared_memory import FrameWriter, Mailbox, RingReader, Segment

SHARED = "shared memory"
"""What `carries` says if payloads go through rings."""
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


class SharedMemory:
    """The rings of one transport. The first ring opens a stream of ShareMemory; all rings end with this stream."""

    def __init__(self, open_stream: Callable[[], Stream]) -> None:
        self._open_stream = open_stream
        self._closed = False
        self._stream: Stream | None = None
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
        self.carries = ""
        """`SHARED`, or "grpc: " with the reason; "" while nothing is known."""

    async def find_out(self) -> None:
        """Wait until `carries` is known, or until the server has had time to answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER):
                async with self._one_exchange:  # a ring may be on its way
                    pass
                if not self.carries and (asked := self.ask(0)) is not None:
                    await asyncio.wait({asked})

    def ask(self, capacity: int = _CAPACITY) -> asyncio.Task[Segment | None] | None:
        """Ask the server for a ring. With capacity 0, ask only whether it has rings. None: no ring now."""
        if self._closed or asyncio.get_running_loop().time() < self._ask_again_at:
            return None
        # In its own task: if the caller stops waiting, the next exchange must not get the response to this one.
        return self._start(self._ask(capacity))

    async def idle_ring(self) -> RingReader | None:
        """A ring for one response; None while there is no ring."""
        if not self._idle and self._asked is None and (asked := self.ask()) is not None:
            self._asked = asked
            asked.add_done_callback(self._keep)
            await wait_a_moment(asked)
        return self._idle.pop() if self._idle else None

    def _keep(self, asked: asyncio.Task[Segment | None]) -> None:
        self._asked = None  # its result would keep the memory of the ring for as long as this client
        if (segment := settled(asked)) is not None:
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
        if segment is not None and self._stream is not None:
            self._start(self._ask_to_close(segment.ring_id))

    async def end(self) -> None:
        """Ends all rings."""
        self._closed = True
        if self._tasks:
            _, late = await asyncio.wait([*self._tasks], timeout=_GOODBYE)
            for task in late:
                task.cancel()  # which ends the call, too
            await asyncio.gather(*late, return_exceptions=True)
        if (stream := self._forget_stream()) is not None and not stream.ended:
            await stream.end()

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
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
            # Not an error here: the calls that carry payloads report it better, and retry.
            self.carries = f"grpc: {error.details()}"
        except BaseException:
            self._drop_stream()
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
        self.carries = SHARED
        return segment

    async def _ask_to_close(self, ring_id: int) -> None:
        async with self._one_exchange:
            if self._stream is not None:
                with suppress(grpc.aio.AioRpcError):
                    await self._exchange(pb.ShareMemoryRequest(close=ring_id))

    async def _exchange(self, request: pb.ShareMemoryRequest) -> pb.ShareMemoryResponse:
        if self._stream is None or self._stream.ended:
            self._forget_stream()
            self._stream = self._open_stream()
        stream = self._stream
        with suppress(asyncio.InvalidStateError):  # the stream has ended; the read raises the reason
            await stream.write(request)
        try:
            response: pb.ShareMemoryResponse = await stream.read()
        except grpc.aio.AioRpcError:
            self._drop_stream()
            raise
        return response

    def _drop_stream(self) -> None:
        if (stream := self._forget_stream()) is not None:
            stream.cancel()

    def _forget_stream(self) -> Stream | None:
        """All rings end with their stream."""
        stream, self._stream = self._stream, None
        self._idle.clear()
        self._idle_writers.clear()
        return stream

    def _refuse(self, why: str) -> None:
        self.carries = f"grpc: {why}"
        self._ask_again_at = asyncio.get_running_loop().time() + _PAUSE


async def wait_a_moment(asked: asyncio.Task[Segment | None]) -> None:
    """For a ring that was asked for."""
    await asyncio.wait({asked}, timeout=_MOMENT)


def settled(asked: asyncio.Task[Segment | None]) -> Segment | None:
    """The ring that was asked for; None: there is none."""
    return None if asked.cancelled() or asked.exception() is not None else asked.result()
