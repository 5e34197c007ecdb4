"""Requests: bounds how long a browser may take to send one, and how large its body may be."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS_PER_REQUEST = 10.0
"""Seconds from the first byte of a request, or from the connection, to its last byte."""
MOST_BODY_BYTES = 4096


class BodyTooLargeError(Exception):
    """A body has more than MOST_BODY_BYTES."""


async def body_of(request: Request) -> bytes:
    """The body. Raises BodyTooLargeError as soon as more has come than any request needs."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY_BYTES:
            raise BodyTooLargeError(f"the body has more than {MOST_BODY_BYTES} bytes")
    return body


def key_of(request: Request) -> int:
    """The key in the path. Raises ValueError if it is no number of 64 bits."""
    text = request.path_params["key"]
    # Python refuses to read much longer numbers, with an error of its own.
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 1 << 64):
        raise ValueError(f"a key is a number of 64 bits, not {text[:40]!r}")
    return int(text)


class Protocol(H11Protocol):
    """Closes a connection whose request does not come whole in time: uvicorn would wait for the rest without end."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_watch()

    def _watch(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._end_watch()
        elif self._late is None:
            self._late = self.loop.call_later(SECONDS_PER_REQUEST, self.transport.abort)

    def _end_watch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
