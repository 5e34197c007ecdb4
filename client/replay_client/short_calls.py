"""ShortCalls: open streams for calls with one short response. A round trip on an open stream costs half of a call.

Each stream carries one call at a time. A call that waits therefore holds up no other.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc

from replay_client.streams import end_stream, failure, read_message
from replay_protos import replay_pb2 as pb
from replay_protos.framing import SERVICE

MAX_BYTES = 1 << 20
"""Bytes of a request above which a call of its own costs no more."""
_MOST_OPEN = 16


class ShortCalls:
    """The streams of one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._open: Any = channel.stream_stream(
            f"/{SERVICE}/Calls", pb.CallRequest.SerializeToString, pb.CallResponse.FromString
        )
        self._idle: list[Any] = []
        self._busy = 0

    @property
    def free(self) -> bool:
        """Whether a call can go over a stream now."""
        return self._busy < _MOST_OPEN

    async def call(self, method: str, request: bytes, timeout: float | None) -> bytes:
        """The response to one call. Raises AioRpcError if the call fails, or the stream breaks."""
        stream = self._idle.pop() if self._idle else self._open()
        self._busy += 1
        try:
            async with asyncio.timeout(timeout):
                with suppress(asyncio.InvalidStateError):  # it ended while it was idle; the read raises the reason
                    await stream.write(pb.CallRequest(method=method, request=request))
                response: pb.CallResponse = await read_message(stream)
        except TimeoutError:
            stream.cancel()
            raise failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None  # as gRPC says it
        except grpc.aio.AioRpcError:
            for broken in [stream, *self._idle]:  # they share a connection, so all of them are broken
                broken.cancel()
            self._idle.clear()
            raise
        except BaseException:
            stream.cancel()
            raise
        finally:
            self._busy -= 1
        self._idle.append(stream)
        if response.code:
            raise failure(response.code, response.message, response.reason)
        return response.response

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        await asyncio.gather(*map(end_stream, idle))
