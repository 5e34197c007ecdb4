"""Shared memory: the gRPC method ShareMemory, by which clients on this host get rings.

* A ring belongs to one connection, and ends with the call of ShareMemory that opened it.
* A ring carries no payloads before the server has sent the memory of the ring to the client.
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
"""The bytes that a smaller ring takes from the budget. Each ring also costs a file descriptor, so this bounds the
number of rings."""


class SharedMemoryMethods:
    """The gRPC method ShareMemory."""

    def __init__(self, backend: Backend, rings: Rings, folder: Path | None) -> None:
        """`folder`: the folder in which clients on this host make their sockets; None: no client gets a ring."""
        self._rings = rings
        self._folder = folder
        self._budget = Budget(backend.limits.max_shared_bytes, "bytes of shared memory (max_shared_bytes)")
        self._shares: weakref.WeakKeyDictionary[Segment, Any] = weakref.WeakKeyDictionary()
        """The finalizer of each segment, which releases the bytes that the segment has taken from the budget.

        A finalizer runs only once, either when it is called or when the segment is freed.
        """
        self._has_warned = False
        """True if a warning was logged because the host has no room for a ring, and no ring was made since."""

    async def ShareMemory(self, call: Call) -> None:
        """Opens, sends and closes rings, as the requests of the stream ask. All rings of a stream end with the stream.

        A client asks for a ring, makes the socket that the response names, and then asks the server to send the memory
        of the ring to the socket.
        """
        client = call.client
        opened: dict[int, Segment] = {}
        """Id of each ring that this call has opened -> the segment of the ring."""
        try:
            while (request := await call.read()) is not None:
                if request.HasField("open"):
                    response = await self._make(client, request.open, opened)
                elif request.send:
                    response = await self._send(client, request.send, opened)
                else:  # the request is to close a ring
                    if request.close in opened:
                        self._end(client, opened.pop(request.close))
                    response = pb.ShareMemoryResponse()
                await call.write(response)
        finally:
            for segment in opened.values():
                self._end(client, segment)

    async def _make(self, client: str, capacity: int, opened: dict[int, Segment]) -> pb.ShareMemoryResponse:
        """Makes a ring, and adds it to `opened`. The response says where to make the socket, or why there is no ring.

        A client asks for a ring with `capacity` 0 only to find out if rings work.
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
            # `create` runs on a thread, because it takes long: the system zeroes all of the memory.
            segment = await asyncio.to_thread(Segment.create, self._folder, capacity)
        except OSError as error:
            self._budget.release(client, cost)
            return self._no_room(f"the system gives no memory for rings: {error.strerror}")
        except BaseException:  # for example the cancellation if the client went away
            self._budget.release(client, cost)
            raise
        # The bytes go back to the budget when the segment is freed, and not when this call ends, because another call
        # may use the segment for longer.
        release_share = weakref.finalize(segment, self._budget.release, client, cost)
        release_share.atexit = False  # when the process exits, nobody needs the budget any more
        self._shares[segment] = release_share
        self._has_warned = False
        opened[segment.ring_id] = segment
        return pb.ShareMemoryResponse(ring=segment.ring_id, path=str(segment.path))

    def _no_room(self, why: str) -> pb.ShareMemoryResponse:
        """Returns a response that refuses a ring, because the server's host has no room for the ring. Logs the reason.

        After the first refusal, the reason is not logged until a ring could be made again.
        """
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s; payloads travel over gRPC instead", why)
        return pb.ShareMemoryResponse(refusal=why)

    async def _send(self, client: str, ring_id: int, opened: dict[int, Segment]) -> pb.ShareMemoryResponse:
        """Sends the memory of a ring of `opened` to the client's socket. From then on, the ring can carry payloads."""
        segment = opened.get(ring_id)
        if segment is None or segment.handed_over:
            raise invalid(f"ring {ring_id} is not one of this stream's, or was sent before")
        try:
            # `hand_over` runs on a thread, because it may block: any process that can write to the folder may have
            # replaced the client's socket.
            await asyncio.to_thread(segment.hand_over)
        except OSError as error:
            # The bytes go back to the budget here, because it may take long until the segment object is freed. The
            # traceback of the error has the frame of `hand_over`, which refers to the segment until the garbage
            # collector runs.
            release_share = self._shares.pop(segment)
            segment.close()
            release_share()  # when the segment object is freed later, the finalizer does nothing
            return pb.ShareMemoryResponse(refusal=str(error))
        if segment.capacity:
            self._rings.add(client, segment)
        else:  # the ring has no room for payloads, because the client only wanted to find out if rings work
            self._end(client, opened.pop(ring_id))
        return pb.ShareMemoryResponse(ring=ring_id)

    def _end(self, client: str, segment: Segment) -> None:
        """Ends a ring, and removes the client's socket if it is still there."""
        with suppress(OSError):  # the socket is gone, because only a client that was killed leaves it there
            segment.path.unlink()
        self._rings.end(client, segment.ring_id)
