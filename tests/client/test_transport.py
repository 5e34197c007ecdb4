"""Streams that stay open between exchanges."""

import asyncio
from typing import Any, cast

import grpc
import pytest

from replay_client.transport import IdleStreams, Stream


class SilentStream:
    """A stream to a server that takes each request and answers none."""

    bytes_per_message = 1000

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.is_cancelled = False

    async def write(self, message: Any) -> None:
        self.received.append(message)

    async def read(self) -> Any:
        await asyncio.Event().wait()

    def cancel(self) -> None:
        self.is_cancelled = True


async def test_an_exchange_without_an_answer_in_time_raises_the_error_of_a_call_and_ends_its_stream():
    stream = SilentStream()
    streams = IdleStreams(lambda: cast("Stream", stream))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await streams.exchange(lambda _: [b"request"], timeout=0.0)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert raised.value.details() == "Deadline Exceeded"
    assert stream.received == [b"request"]
    assert stream.is_cancelled
