"""Streams: reads a gRPC stream, ends it in good order, and turns a refusal on it into the error of a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import grpc

from replay_protos import REASON_KEY

_STATUS = {code.value[0]: code for code in grpc.StatusCode}
_GOODBYE = 1.0
"""Seconds that the server has to end a stream."""
_MOST_OPEN = 16


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


class IdleStreams:
    """Streams that stay open between the exchanges of one kind. An exchange on one costs half of a call of its own.

    Each stream carries one exchange at a time. So an exchange that waits holds up no other one.
    """

    def __init__(self, open_stream: Callable[[], Any]) -> None:
        self._open = open_stream
        self._idle: list[Any] = []
        self._busy = 0

    @property
    def free(self) -> bool:
        """Whether fewer streams are in use than may stay open."""
        return self._busy < _MOST_OPEN

    async def exchange(self, messages: Iterable[Any], timeout: float | None) -> Any:
        """The server's answer to these messages. Raises AioRpcError if it is late, or the stream breaks."""
        stream = self._idle.pop() if self._idle else self._open()
        self._busy += 1
        try:
            async with asyncio.timeout(timeout):
                with suppress(asyncio.InvalidStateError):  # it ended while it was idle; the read raises the reason
                    for message in messages:
                        await stream.write(message)
                answer = await read_message(stream)
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
        if len(self._idle) < _MOST_OPEN:
            self._idle.append(stream)
        else:
            stream.cancel()
        return answer

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        await asyncio.gather(*map(end_stream, idle))
