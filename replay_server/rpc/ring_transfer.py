"""Ring transfer: passes the payloads of a call through rings, if the client has opened rings.

A ring is a piece of memory that a client and the server share. Without a ring, payloads travel in the messages. Because
of this module, the other modules of the server need not know whether a payload came through a ring.
"""

from __future__ import annotations

from typing import Any, TypeVar

from replay_protos.framing import Frame, SharedFrame
from replay_protos.shared_memory import FrameWriter, RingReader, Segment, take_frame
from replay_server.errors import invalid, try_again

Ring = Segment | FrameWriter | RingReader
"""A ring. It is a Segment until its first use, which makes it a writer or a reader for all later uses."""
R = TypeVar("R", FrameWriter, RingReader)


class Rings:
    """The rings that the server shares with clients, by connection and id."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], Ring] = {}
        """By connection and id: the rings that no call uses now."""
        self._open: set[tuple[str, int]] = set()
        """The connections and ids of the rings that the client's call of ShareMemory keeps open."""

    def add(self, client: str, segment: Segment) -> None:
        """Adds a new ring of the client, which no call uses yet."""
        key = (client, segment.ring_id)
        assert key not in self._open, "a ring is added twice"
        self._open.add(key)
        self._idle[key] = segment

    def end(self, client: str, ring_id: int) -> None:
        """Removes a ring. A call that uses the ring keeps it until the call ends."""
        self._open.discard((client, ring_id))
        self._idle.pop((client, ring_id), None)

    def lend(self, client: str, ring_id: int, kind: type[R]) -> R | None:
        """Gives a ring to one call, which writes to it or reads from it.

        Returns None if the ring has ended, if another call uses it, or if it was used in the other direction before.
        """
        ring = self._idle.get((client, ring_id))
        if isinstance(ring, Segment):  # the first use of the ring
            ring = kind(ring)
        if not isinstance(ring, kind):
            return None
        del self._idle[client, ring_id]
        return ring

    def put_down(self, client: str, ring_id: int, ring: Ring) -> None:
        """Takes a ring back from a call, so that the client's next call may use the ring as it is."""
        assert (client, ring_id) not in self._idle, "two calls had one ring"
        if (client, ring_id) in self._open:  # if not, the ring has ended while the call used it
            self._idle[client, ring_id] = ring


class Carrier:
    """Carries the payloads of one call: takes those of requests out of a ring, and puts those of responses into another
    ring."""

    def __init__(self, rings: Rings, client: str) -> None:
        self._rings = rings
        self._client = client
        self._reader: RingReader | None = None
        """The ring from which the last request was read; None: no request came through a ring."""
        self._writer: FrameWriter | None = None
        """The ring for the payloads of responses; None: they travel in the messages."""

    def bring(self, request: Any) -> Any:
        """Returns the request with its payloads, which are taken out of the ring if they lie in one.

        If the method's requests have no payloads, a request may name a ring instead. The call then puts the payloads of
        its responses into this ring. Raises Refused if the ring with the payloads has ended, or if no payload can be at
        the place that the request names.
        """
        if isinstance(request, Frame):  # only requests of methods with payloads are Frames
            try:
                return take_frame(request, self._reader_of)  # the same frame if its payloads lie in no ring
            except LookupError as error:  # the ring has ended, so the client has to open a new one and try again
                raise try_again(str(error)) from None
            except ValueError as error:  # the client has named an impossible place
                raise invalid(str(error)) from None
        if request.ring:
            # If the ring has ended already, or is one for reading, the payloads travel in the messages.
            self._writer = self._rings.lend(self._client, request.ring, FrameWriter)
        return request

    async def place(self, response: Frame[Any]) -> Frame[Any] | SharedFrame[Any] | None:
        """Returns the message to send for a part of a response; None if this part will be sent with the next part.

        Without a ring, each part is sent as it is. With a ring, the parts of one response are joined until they are
        large enough for the ring, or the response is complete. If the joined payload was put into the ring, the result
        is a SharedFrame, which says where. If the payload is small or the ring is full, the result is a Frame with the
        payload itself.
        """
        if self._writer is None:
            return response
        gathered = self._writer.gather(response)
        if gathered is None:  # the writer keeps this part until enough parts are joined
            return None
        return await self._writer.place(gathered)

    def close(self, *, reuse_writer: bool) -> None:
        """Ends the use of the rings. The client's next call can use the reader and, with `reuse_writer`, the writer.

        The caller sets `reuse_writer` only if the client has read everything in the ring of the writer.
        """
        if self._reader is not None:
            self._rings.put_down(self._client, self._reader.ring_id, self._reader)
        if self._writer is not None and reuse_writer:
            self._rings.put_down(self._client, self._writer.segment.ring_id, self._writer)
        # Without these references, the memory of the rings can be freed even if something still refers to the call.
        self._reader = None
        self._writer = None

    def _reader_of(self, ring_id: int) -> RingReader | None:
        """Returns the reader of a ring; None if the ring has ended, is used by another call, or is for writing."""
        if self._reader is not None and self._reader.ring_id == ring_id:
            return self._reader
        reader = self._rings.lend(self._client, ring_id, RingReader)
        if reader is not None:
            # A stream reads one ring at a time. So this ring replaces the one before, which no later call can use.
            self._reader = reader
        return reader
