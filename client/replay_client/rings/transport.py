"""RingTransport: messages go over gRPC, and large payloads through shared memory if the server is on this host."""

from __future__ import annotations

import asyncio
from typing import Any

from google.protobuf.message import Message

from replay_client.access import Access
from replay_client.rings.memory import SharedMemory, settled, wait_a_moment
from replay_client.transport import NOT_KNOWN, BatchStream, GrpcStream, GrpcTransport
from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame
from replay_protos.shared_memory import BYTES_PER_FRAME, FrameWriter, RingReader, Segment, is_large


class RingTransport(GrpcTransport):
    """A channel, and the rings of its streams. A server that has none gets everything over gRPC."""

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        self._shared = SharedMemory(lambda: GrpcTransport.stream(self, "ShareMemory"))

    @property
    def carries(self) -> str:  # type: ignore[override]
        return self._shared.carries or NOT_KNOWN

    async def find_out(self) -> None:
        await self._shared.find_out()

    async def call(self, method: str, request: Message, timeout: float | None) -> Any:
        if isinstance(request, pb.GetRequest):
            return await self._get(request, timeout)
        return await super().call(method, request, timeout)

    def stream(self, method: str, request: Message | None = None, timeout: float | None = None) -> GrpcStream:
        if method == "InsertStream":
            return RingInserts(self._open(method), self._shared)
        if method == "Draw":
            return RingDraws(self._open(method), self._shared)
        return super().stream(method, request, timeout)

    async def close(self) -> None:
        await self._shared.end()
        await super().close()

    async def _get(self, request: pb.GetRequest, timeout: float | None) -> Frame[pb.GetResponse]:
        """The answer comes through a ring if the answer before it was large."""
        shared = self._shared
        ring = await shared.idle_ring() if shared.large_responses else None
        request.ring = 0 if ring is None else ring.ring_id
        complete = False
        try:
            answer = await RingAnswer(self._open("Get", request, timeout), ring).read()
            complete = True
        finally:
            if ring is not None:
                # If the answer was not read to its end, the server may still write to its ring.
                shared.give_back(ring, reusable=complete)
        shared.large_responses = is_large(answer.payloads)
        return answer


class RingAnswer(BatchStream):
    """A call with one answer, which comes through a ring if the client had one."""

    def __init__(self, call: Any, ring: RingReader | None) -> None:
        super().__init__(call)
        self._ring = ring

    def _reader_of(self, ring_id: int) -> RingReader | None:
        return self._ring if self._ring is not None and self._ring.ring_id == ring_id else None


class RingDraws(RingAnswer):
    """A call of Draw. After its first large payload the others come through a ring.

    It takes an idle ring of the client, and names it in its next message. A stream may end before the ring that it
    asked for is there, as a sampler's with a short timeout does: the ring then waits for the next stream.
    """

    def __init__(self, call: Any, shared: SharedMemory) -> None:
        super().__init__(call, None)
        self._shared = shared
        self._is_named = False

    async def write(self, request: pb.DrawRequest) -> None:
        if self._ring is not None and not self._is_named:
            self._is_named = True
            named = pb.DrawRequest()
            named.CopyFrom(request)  # the caller may send it again, on another stream
            named.ring = self._ring.ring_id
            request = named
        await super().write(request)

    async def _see(self, frame: Frame[Any]) -> None:
        if self._ring is None and is_large(frame.payloads):
            self._ring = await self._shared.idle_ring()

    def cancel(self) -> None:
        if self._ring is not None:  # the server may still write to it
            self._shared.give_back(self._ring, reusable=False)
            self._ring = None
        super().cancel()


class RingInserts(GrpcStream):
    """A call of InsertStream. Large payloads go through its ring, from the first one on."""

    def __init__(self, call: Any, shared: SharedMemory) -> None:
        super().__init__(call)
        self._shared = shared
        self._asked: asyncio.Task[Segment | None] | None = None
        self._writer: FrameWriter | None = None

    @property
    def bytes_per_message(self) -> int:
        # It is more if the payloads travel in a ring.
        return super().bytes_per_message if self._writer is None or self._writer.stalled else BYTES_PER_FRAME

    async def write(self, frame: Frame[pb.InsertRequest]) -> None:
        if self._writer is None and is_large(frame.payloads):
            self._writer = self._shared.idle_writer() or await self._new_writer()
        await super().write(frame if self._writer is None else await self._writer.place(frame))

    async def end(self, reader: asyncio.Task[None] | None = None) -> bool:
        """As Stream. The server must have acknowledged all items: the ring serves later streams."""
        ended = await super().end(reader)
        if ended and self._writer is not None:
            self._shared.keep(self._writer)
            self._writer = None
        return ended

    def cancel(self) -> None:
        if self._asked is not None:
            self._asked.add_done_callback(lambda asked: self._shared.close(settled(asked)))
            self._asked = None
        if self._writer is not None:
            self._shared.close(self._writer.segment)
            self._writer = None
        super().cancel()

    async def _new_writer(self) -> FrameWriter | None:
        """None while there is no ring."""
        if self._asked is None:
            if self.ended or (asked := self._shared.ask()) is None:
                return None
            self._asked = asked
            await wait_a_moment(asked)
        if self._asked is None or not self._asked.done():
            return None
        segment, self._asked = settled(self._asked), None
        return None if segment is None else FrameWriter(segment)
