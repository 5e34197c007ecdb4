"""Shared memory: the method ShareMemory, by which clients on this host get rings.

* A ring belongs to one connection and one stream, and ends with the call of ShareMemory that opened it.
* A ring carries nothing before the server has sent the memory of the ring to its client.
* The memory of all rings counts against one budget (`max_shared_bytes`).
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from replay_protos import replay_pb2 as pb
from replay_protos.shared_memory import HEADER, MAX_CAPACITY, Segment
from replay_server.errors import Refused, invalid
from replay_server.rpc.calls import Call
from replay_server.rpc.limits import Backend, Budget
from replay_server.rpc.ring_transfer import Rings

log = logging.getLogger("replay_server")

_LEAST_COST = 1 << 20
"""Bytes that a smaller ring counts for in the budget, because each ring also costs a file descriptor."""


class SharedMemoryMethods:
    """The gRPC method ShareMemory."""

    def __init__(self, backend: Backend, rings: Rings, folder: Path | None) -> None:
        """Clients on this host make their sockets in `folder`, which they see too; None: no client gets a ring."""
        self._rings = rings
        self._folder = folder
        self._budget = Budget(backend.limits.max_shared_bytes, "bytes of shared memory (max_shared_bytes)")
        self._shares: weakref.WeakKeyDictionary[Segment, Any] = weakref.WeakKeyDictionary()
        """The finalizer of each segment, which releases the segment's share in the budget.

        A finalizer runs once: when it is called, or when the segment is freed.
        """
        self._is_short = False
        """True if the last ring was refused for lack of room."""

    async def ShareMemory(self, call: Call) -> None:
        """Opens, sends and closes rings, as the requests of the stream ask for. All rings end with the stream.

        A client opens a ring, makes the socket that the response names, and then asks the server to send the memory.
        """
        client = call.client
        opened: dict[int, Segment] = {}
        """The segments of the rings that this call has opened, by the ring's id."""
        try:
            while (request := await call.read()) is not None:
                if request.HasField("open"):
                    response = await self._make(client, request.open, opened)
                elif request.send:
                    response = await self._send(client, request.send, opened)
                else:
                    if request.close in opened:
                        self._end(client, opened.pop(request.close))
                    response = pb.ShareMemoryResponse()
                await call.write(response)
        finally:
            for segment in opened.values():
                self._end(client, segment)

    async def _make(self, client: str, capacity: int, opened: dict[int, Segment]) -> pb.ShareMemoryResponse:
        """Makes a ring, and adds it to `opened`. The response says where to make the socket, or why there is no ring.

        With `capacity` 0 the client only finds out if rings work.
        """
        if self._folder is None:
            return pb.ShareMemoryResponse(refusal="the server does not share memory ([server] shared_memory)")
        if capacity % 4096 or capacity > MAX_CAPACITY:
            raise invalid(f"a ring of {capacity} bytes: a multiple of 4096, at most {MAX_CAPACITY}")
        if not self._folder.is_dir():
            return self._no_room(f"there is no folder {self._folder} ([server] shared_memory)")
        cost = max(HEADER + capacity, _LEAST_COST)
        try:
            self._budget.acquire(client, cost)
        except Refused as refusal:
            return pb.ShareMemoryResponse(refusal=refusal.message)
        try:
            # On a thread, because this takes long: the system zeroes all of the memory.
            segment = await asyncio.to_thread(Segment.create, self._folder, capacity)
        except BaseException as error:
            self._budget.release(client, cost)
            if not isinstance(error, OSError):  # the client went away
                raise
            return self._no_room(f"the system gives no memory for rings: {error.strerror}")
        # The share is released when the segment is freed, because a stream may use it for longer than this call lasts.
        share = weakref.finalize(segment, self._budget.release, client, cost)
        share.atexit = False  # at the exit of the process, nobody needs the share any more
        self._shares[segment] = share
        self._is_short = False
        opened[segment.ring_id] = segment
        return pb.ShareMemoryResponse(ring=segment.ring_id, path=str(segment.path))

    def _no_room(self, why: str) -> pb.ShareMemoryResponse:
        """The response that refuses a ring because the server's host has no room for it."""
        if not self._is_short:  # one line until there is room again
            self._is_short = True
            log.warning("%s; payloads travel over gRPC instead", why)
        return pb.ShareMemoryResponse(refusal=why)

    async def _send(self, client: str, ring_id: int, opened: dict[int, Segment]) -> pb.ShareMemoryResponse:
        """Sends the memory of a ring of `opened` to the client's socket. From then on, the ring can carry payloads."""
        segment = opened.get(ring_id)
        if segment is None or segment.handed_over:
            raise invalid(f"ring {ring_id} is not one of this stream's, or was sent before")
        try:
            # On a thread, because this may block: any process that can write to the folder may have replaced the
            # client's socket.
            await asyncio.to_thread(segment.hand_over)
        except OSError as error:
            # The share is released here and not when the segment is freed, because that may be late. The error refers
            # to the segment, by its traceback and the frame of `hand_over`, until the garbage collector runs.
            share = self._shares.pop(segment)
            segment.close()
            share()  # releases the share, and makes the finalizer do nothing later
            return pb.ShareMemoryResponse(refusal=str(error))
        if segment.capacity:
            self._rings.add(client, segment)
        else:  # the client has opened a ring without room, only to find out if rings work
            self._end(client, opened.pop(ring_id))
        return pb.ShareMemoryResponse(ring=ring_id)

    def _end(self, client: str, segment: Segment) -> None:
        """Ends a ring, and removes the socket of a client that was killed."""
        with suppress(OSError):  # the client has removed its socket, unless it was killed
            segment.path.unlink()
        self._rings.end(client, segment.ring_id)
