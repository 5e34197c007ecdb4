"""InsertStreams: streams kept open for single inserts, because a round trip on one costs half of a call of its own.

Each carries one insert at a time, so that inserts which wait for different tables do not wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

import grpc

from replay_client.connection import Connection, end_stream, read_message
from replay_client.errors import DeadlineExceededError
from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame

_Call: TypeAlias = "grpc.aio.StreamStreamCall[Frame[pb.InsertRequest], pb.InsertResponse]"
_MOST_IDLE = 16


class InsertStreams:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._idle: list[_Call] = []

    async def insert(self, frames: Sequence[Frame[pb.InsertRequest]], timeout: float | None) -> pb.InsertResponse:
        """Sends the messages of one item; the server's decision. Raises AioRpcError where the stream breaks."""
        call = self._idle.pop() if self._idle else self._connection.payloads.InsertStream()
        try:
            async with asyncio.timeout(timeout):
                with suppress(asyncio.InvalidStateError):  # it ended while it was idle; reading says why
                    for frame in frames:
                        await call.write(frame)
                response = await read_message(call)
        except TimeoutError:
            call.cancel()
            address = self._connection.address
            raise DeadlineExceededError(f"{address} did not answer an insert within {timeout:g} s") from None
        except BaseException:
            for broken in [call, *self._idle]:  # what broke one has broken all
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
