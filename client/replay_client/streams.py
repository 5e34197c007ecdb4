"""Streams: reads a gRPC stream, ends it in good order, and turns a refusal on it into the error of a call."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc

from replay_protos import REASON_KEY

_STATUS = {code.value[0]: code for code in grpc.StatusCode}
_GOODBYE = 1.0
"""Seconds that the server has to end a stream."""


async def read_message(call: Any) -> Any:
    """The next message of a stream. Raises AioRpcError if the stream has ended."""
    message = await call.read()
    if message is grpc.aio.EOF:
        raise grpc.aio.AioRpcError(
            await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )
    return message


async def end_stream(call: Any, reader: asyncio.Task[None] | None = None) -> bool:
    """Ends a stream in good order. `reader` is the task that reads it, if there is one.

    Returns whether the server has ended it too; otherwise the stream is cancelled.
    After a cancelled stream gRPC would call the event loop once more, and the loop may be closed by then.
    """

    async def read_on() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    ended = False
    # InternalError: the call broke in this moment, and gRPC cannot say more to the server.
    with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError, TimeoutError):
        async with asyncio.timeout(_GOODBYE):
            await call.done_writing()
            await (asyncio.wait([reader]) if reader else read_on())
            ended = True
    if not ended:
        call.cancel()
    return ended


def failure(code: grpc.StatusCode | int, details: str, reason: str = "") -> grpc.aio.AioRpcError:
    """The error with which a call would fail that the server refuses for this reason."""
    status = code if isinstance(code, grpc.StatusCode) else _STATUS[code]
    trailing = grpc.aio.Metadata(*([(REASON_KEY, reason)] if reason else ()))
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailing, details)
