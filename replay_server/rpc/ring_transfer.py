"""Ring transfer: passes the payloads of a call through rings, if the client has opened rings.

A ring is a piece of memory that a client and the server share. Without a ring, payloads travel in the messages. No
other module of the server has to know whether a payload came through a ring.
"""

from __future__ import annotations

from typing import Any

from replay_protos.framing import Frame, SharedFrame
from replay_protos.shared_memory import FrameWriter, RingReader, Segment, take_frame
from replay_server.errors import invalid, try_again

Ring = Segment | FrameWriter | RingReader
"""A ring: as a Segment until its first use, then as the writer or reader that this use has made of it."""


class Rings:
    """The rings that the server shares with clients, by connection and id."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], Ring] = {}
        """The rings that no call uses now."""
        self._open: set[tuple[str, int]] = set()
        """The connections and ids of rings whose call of ShareMemory has not ended."""

    def add(self, client: str, segment: Segment) -> None:
        """Adds a new ring."""
        key = (client, segment.ring_id)
        assert key not in self._open, "a ring is added twice"
        self._open.add(key)
        self._idle[key] = segment

    def end(self, client: str, ring_id: int) -> None:
        """Removes a ring. A call that uses the ring keeps it until the call ends."""
        self._open.discard((client, ring_id))
        self._idle.pop((client, ring_id), None)

    def lend(self, client: str, ring_id: int) -> Ring | None:
        """The ring, for one call; None if the ring has ended, or another call uses it."""
        return self._idle.pop((client, ring_id), None)

    def put_down(self, client: str, ring_id: int, ring: Ring) -> None:
        """Takes a ring back from a call, so that the client's next call may use the ring as it is."""
        assert (client, ring_id) not in self._idle, "two calls had one ring"
        if (client, ring_id) in self._open:  # otherwise the ring has ended while the call used it
            self._idle[client, ring_id] = ring


class Carrier:
    """Carries the payloads of one call: payloads of requests out of a ring, payloads of responses into another ring."""

    def __init__(self, rings: Rings, client: str) -> None:
        self._rings = rings
        self._client = client
        self._reader: RingReader | None = None
        """The ring from which the last request was read; None: no request came through a ring."""
        self._writer: FrameWriter | None = None
        """The ring for the responses; None: they travel in the messages."""

    def bring(self, request: Any) -> Any:
        """The request, with the payloads that lie in a ring. Raises Refused.

        A request of a kind without payloads may name the ring for the responses, which the call uses from then on.
        """
        if isinstance(request, Frame):  # a request of a kind with payloads
            try:  # `take_frame` returns the frame itself if its payloads lie in no ring
                return take_frame(request, self._reader_of)
            except LookupError as error:  # the ring ended with its call of ShareMemory: the client connects again
                raise try_again(str(error)) from None
            except ValueError as error:
                raise invalid(str(error)) from None
        if request.ring:
            ring = self._rings.lend(self._client, request.ring)
            if isinstance(ring, Segment):  # the first use of the ring
                ring = FrameWriter(ring)
            # If the ring has ended meanwhile, or is one for reading, the payloads travel in the messages.
            self._writer = ring if isinstance(ring, FrameWriter) else None
        return request

    async def place(self, response: Frame[Any]) -> Frame[Any] | SharedFrame[Any] | None:
        """The message that gRPC sends for a part of a response; None if this part will be sent with the next one.

        Without a ring the part is sent as it is. With a ring, small parts of one response are joined until they are
        worth a place in the ring, or the response is complete. A SharedFrame says where the payload lies in the ring. A
        Frame holds the payload itself: it is small, or the ring is full.
        """
        if self._writer is None:
            return response
        gathered = self._writer.gather(response)
        if gathered is None:  # the writer holds this part until enough parts are joined
            return None
        return await self._writer.place(gathered)

    def close(self, *, reuse_writer: bool) -> None:
        """Ends the use of the rings. The client's next call can use the reader and, with `reuse_writer`, the writer.

        A writer can be reused only if the client has read everything in its ring.
        """
        if self._reader is not None:
            self._rings.put_down(self._client, self._reader.ring_id, self._reader)
        if self._writer is not None and reuse_writer:
            self._rings.put_down(self._client, self._writer.segment.ring_id, self._writer)
        # Without these references, the rings' memory can be freed even if something still refers to the call.
        self._reader = None
        self._writer = None

    def _reader_of(self, ring_id: int) -> RingReader | None:
        """The ring with this id, for reading. None: the ring has ended, another call uses it, or it is for writing."""
        if self._reader is not None and self._reader.ring_id == ring_id:
            return self._reader
        ring = self._rings.lend(self._client, ring_id)
        if ring is None:
            return None
        if isinstance(ring, Segment):
            ring = RingReader(ring)
        # A stream reads one ring at a time: this ring replaces the one before, which no later call can use.
        self._reader = ring if isinstance(ring, RingReader) else None
        return self._reader
