"""Connections: the listening side of a server of aiohttp, with the bounds of `replay_protos.connection_bounds`.

    a connection ──▶ TLS ──▶ a request, whole within SECONDS_PER_REQUEST ──▶ its answer, however long ──▶ the next

* If the number of open connections is at its limit, a connection is closed for a new one: the oldest that has sent only
  part of its request, or else an idle one. If all connections wait for answers, the new one waits too.
* A connection that waits for an answer is never closed.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from ssl import SSLContext
from typing import Any, cast

from aiohttp import web

from replay_protos import connection_bounds

logger = logging.getLogger(__name__)

_BACKLOG = 1024
"""The most connections that the kernel holds until this process accepts them."""
_PAUSE = 0.1
"""Seconds until the next attempt after an error of the machine, for example if it has no file descriptors left."""


class _Connection(asyncio.Protocol):
    """One connection. It passes all bytes on to aiohttp's protocol, and is closed if its client is too slow."""

    def __init__(
        self,
        inner: asyncio.Protocol,
        begun: Callable[[_Connection, asyncio.Transport], None],
        lost: Callable[[_Connection, asyncio.Transport | None], None],
    ) -> None:
        """`inner`: aiohttp's protocol. `begun` is called when the transport is ready, and `lost` when it is closed."""
        self._inner = inner
        self._begun = begun
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._late: asyncio.TimerHandle | None = None
        self.since = self._loop.time()
        """The time at which the connection was opened, or at which its newest request began."""
        self._transport: asyncio.Transport | None = None
        self.opening: asyncio.Task[None] | None = None
        """The task that sets the connection up, with its TLS handshake; None: the task has ended."""
        self.is_answered = False
        """True while the server has a whole request and prepares its answer."""
        self.is_idle = False
        """True while the client has the answer to its last request and has sent no byte since."""
        self._has_next = False
        """True if the client sent more bytes, while its request was being answered."""
        self.wait(connection_bounds.SECONDS_PER_REQUEST)

    def wait(self, seconds: float | None) -> None:
        """Ends the connection after so many seconds, unless `wait` is called again. None: does not end it."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if seconds is not None:
            self._late = self._loop.call_later(seconds, self.abort)

    def begin(self) -> None:
        """Notes that the first byte of a request has come."""
        if self.is_idle:
            self.is_idle = False
            self.since = self._loop.time()
            self.wait(connection_bounds.SECONDS_PER_REQUEST)

    def answer(self) -> None:
        """Notes that the whole request has come."""
        self.is_answered = True
        self.is_idle = False
        self._has_next = False
        self.wait(None)

    def answered(self) -> None:
        """Notes that the request is answered. From now on the client has a limited time for its next request."""
        if not self.is_answered:
            return
        self.is_answered = False
        if self._has_next:
            self.is_idle = False
            self.wait(connection_bounds.SECONDS_PER_REQUEST)
        else:
            self.is_idle = True
            self.wait(connection_bounds.SECONDS_IDLE)

    def abort(self) -> None:
        """Ends the connection without an answer."""
        self.wait(None)
        if self._transport is not None:
            self._transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are no subclass of it
        self._begun(self, self._transport)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self.is_answered:
            self._has_next = True
        else:
            self.begin()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.wait(None)
        self._lost(self, self._transport)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class Connections:
    """The connections of one address."""

    def __init__(self, make: Callable[[], asyncio.Protocol], ssl_context: SSLContext | None) -> None:
        """`make` makes aiohttp's protocol for one connection. `ssl_context` None: connections are not encrypted."""
        self._make = make
        self._ssl = ssl_context
        self._most = connection_bounds.most_connections()
        self._open: dict[_Connection, None] = {}
        """The open connections, the oldest first. It is a dictionary because a set would not keep the order; its values
        are all None."""
        self._by_transport: dict[asyncio.BaseTransport, _Connection] = {}
        self._changed = asyncio.Event()
        """Set when a connection is lost or becomes idle."""
        self._is_full_said = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[socket.socket] = []

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Listens at an address. Returns its host and port. Raises OSError if the address is not available."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                where: Any = address
                if self._listeners and port == 0:
                    # All addresses get the port that the kernel has chosen for the first one.
                    chosen_port = self._listeners[0].getsockname()[1]
                    where = (where[0], chosen_port, *where[2:])
                self._listeners.append(_listener(family, where))
        except BaseException:
            self._close_listeners()
            raise
        for listener in self._listeners:
            # The current context may belong to a user's hook: tasks that start there count as the user's code.
            accepting = loop.create_task(self._accept(listener), context=contextvars.Context())
            self._tasks.add(accepting)
        return self._listeners[0].getsockname()[:2]  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Accepts no more connections. Open connections stay open."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close_listeners()

    @asynccontextmanager
    async def answering(self, request: web.Request) -> AsyncIterator[None]:
        """Surrounds one request from its head to its answer."""
        connection = None
        if request.transport is not None:
            connection = self._by_transport.get(request.transport)
        if connection is None:  # the client has gone
            yield
            return
        connection.begin()
        is_answer_made = False

        def on_whole_request() -> None:
            connection.answer()
            if is_answer_made:  # the answer was made without the body, so `answered` came too early
                connection.answered()

        request.content.on_eof(on_whole_request)
        try:
            yield
        finally:
            is_answer_made = True
            connection.answered()
            self._changed.set()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger.debug("a connection cannot be accepted: %s", error)
                await asyncio.sleep(_PAUSE)
                continue
            try:
                await self._make_room()
                connection = _Connection(self._make(), self._begun, self._lost)
            except BaseException:
                accepted.close()
                raise
            self._open[connection] = None
            opening = loop.create_task(self._serve(connection, accepted), context=contextvars.Context())
            connection.opening = opening
            self._tasks.add(opening)
            opening.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: _Connection, accepted: socket.socket) -> None:
        """Sets a connection up, with its TLS handshake. After that aiohttp's protocol gets the bytes."""
        timeout = None
        if self._ssl is not None:
            timeout = connection_bounds.SECONDS_PER_REQUEST
        transport = None
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=self._ssl, ssl_handshake_timeout=timeout
            )
        except (OSError, TimeoutError, asyncio.CancelledError) as error:
            logger.debug("a connection was not agreed on: %s", error)
        finally:
            connection.opening = None
            if transport is None:
                connection.wait(None)
                self._lost(connection, None)

    def _begun(self, connection: _Connection, transport: asyncio.Transport) -> None:
        self._by_transport[transport] = connection

    def _lost(self, connection: _Connection, transport: asyncio.Transport | None) -> None:
        if transport is not None:
            self._by_transport.pop(transport, None)
        self._open.pop(connection, None)
        self._changed.set()

    async def _make_room(self) -> None:
        """Waits until one more connection may be open."""
        while len(self._open) >= self._most:
            if not self._is_full_said:
                self._is_full_said = True
                logger.warning(
                    "%d connections are open, a quarter of the files that this process may open: those that wait for "
                    "nothing are closed for new ones; raise the limit (ulimit -n) if they are agents (said once)",
                    len(self._open),
                )
            self._changed.clear()
            seconds = self._close_one()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()

    def _close_one(self) -> float | None:
        """Closes one connection that does not wait for an answer, if there is any.

        Returns the seconds after which the oldest connection with part of a request may be closed. None: no connection
        has part of a request, or the oldest one was closed now.
        """
        half_done = [connection for connection in self._open if not connection.is_answered and not connection.is_idle]
        idle = [connection for connection in self._open if connection.is_idle]
        seconds_safe: float | None = None
        if half_done:
            oldest = min(half_done, key=lambda connection: connection.since)
            now = asyncio.get_running_loop().time()
            seconds_safe = oldest.since + connection_bounds.SECONDS_SAFE - now
            if seconds_safe <= 0:
                oldest.abort()
                return None
        if idle:
            idle[0].abort()
        return seconds_safe


def _listener(family: int, where: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
