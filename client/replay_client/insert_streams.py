"""InsertStreams: open streams for single inserts. A round trip on an open stream costs half of a new call.

Each stream carries one insert at a time. So an insert that waits for its table does not delay another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from replay_client.connection import Connection
from replay_client.errors import DeadlineExceededError
from replay_client.shared_memory import SharedInserts
from replay_client.streams import end_stream, read_message
from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame

_MOST_IDLE = 16


class InsertStreams:
    """The idle streams of one client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._idle: list[SharedInserts] = []

    async def insert(self, frames: Sequence[Frame[pb.InsertRequest]], timeout: float | None) -> pb.InsertResponse:
        """Sends one item and returns the server's decision. Raises AioRpcError if the stream breaks."""
        call = self._idle.pop() if self._idle else self._connection.payloads.InsertStream()
        try:
            async with asyncio.timeout(timeout):
                with suppress(asyncio.InvalidStateError):  # the idle stream has ended; the read raises the reason
                    for frame in frames:
                        await call.write(frame)
                response: pb.InsertResponse = await read_message(call)
        except TimeoutError:
            call.cancel()
            address = self._connection.address
            raise DeadlineExceededError(f"{address} did not answer an insert within {timeout:g} s") from None
        except BaseException:
            for broken in [call, *self._idle]:  # they share a connection, so all of them are broken
                broken.cancel()
            self._idle.clear()
            raise
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(call)
        else:
            call.cancel()
        return response

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        await asyncio.gather(*map(end_stream, idle))
