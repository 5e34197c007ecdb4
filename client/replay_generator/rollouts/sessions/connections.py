"""Connections: the listening side of a server of aiohttp, with the bounds of `replay_protos.connection_bounds`.

    a connection ──▶ TLS ──▶ a whole request, within SECONDS_PER_REQUEST ──▶ its answer, after any time ──▶ the next

* If the number of open connections is at its limit, one of them is closed to make room for a new connection: the oldest
  that has sent only part of its request, or else an idle one. If all connections wait for answers, the new one waits
  until one of them has its answer.
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
"""Seconds until the next attempt to accept a connection after an error, for example if the process has no file
descriptors left."""


class _Connection(asyncio.Protocol):
    """One connection. It passes all bytes on to aiohttp's protocol, and closes itself if its client is too slow.

    The event loop calls the methods of asyncio.Protocol. Connections calls the other methods.
    """

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
        """The timer that ends the connection if its client is too slow; None: the client has no time limit now."""
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
        self.wait(connection_bounds.SECONDS_PER_REQUEST)  # for the TLS handshake and the first request together

    def wait(self, seconds: float | None) -> None:
        """Starts the time limit of the client anew: the connection ends after `seconds`, unless `wait` is called again
        before. None: the client has no time limit."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if seconds is not None:
            self._late = self._loop.call_later(seconds, self.abort)

    def begin(self) -> None:
        """Notes that bytes of a request have come. Only the first byte after an idle time starts a time limit."""
        if self.is_idle:  # otherwise the time limit of the request, or of a new connection, has begun already
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
        # The answer came before the whole request. When the rest has come, `on_whole_request` calls this method again.
        if not self.is_answered:
            return
        self.is_answered = False
        if self._has_next:  # the next request has begun already
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
        elif self.opening is not None:  # the handshake is under way
            self.opening.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are no subclass of Transport
        self._begun(self, self._transport)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Passes bytes of the client on. While a request is answered, they belong to the next request."""
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
    """The listening address of a server, and its connections."""

    def __init__(self, make: Callable[[], asyncio.Protocol], ssl_context: SSLContext | None) -> None:
        """`make` makes aiohttp's protocol for one connection. `ssl_context` None: connections are not encrypted."""
        self._make = make
        self._ssl = ssl_context
        self._most = connection_bounds.most_connections()
        """The most connections that may be open."""
        self._open: dict[_Connection, None] = {}
        """The open connections, the oldest first. The dictionary serves as a set that keeps this order: all its values
        are None."""
        self._by_transport: dict[asyncio.BaseTransport, _Connection] = {}
        """The open connections whose handshake has ended, by their transports."""
        self._changed = asyncio.Event()
        """Set when a connection is lost or becomes idle."""
        self._is_full_said = False
        """True once a warning was logged because of too many connections."""
        self._tasks: set[asyncio.Task[None]] = set()
        """The tasks that accept connections, and those that set up connections."""
        self._listeners: list[socket.socket] = []

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Listens at an address. Returns its host and port. Raises OSError if the address is not available.

        `host`: a name or an IP address. A name may have several IP addresses, which are all listened at. `port` 0: any
        free port.
        """
        loop = asyncio.get_running_loop()
        resolved = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _, _, _, address in dict.fromkeys(resolved):  # each address once
                socket_address: Any = address
                if self._listeners and port == 0:
                    # All addresses get the port that the kernel has chosen for the first one.
                    chosen_port = self._listeners[0].getsockname()[1]
                    socket_address = (socket_address[0], chosen_port, *socket_address[2:])
                self._listeners.append(_listener(family, socket_address))
        except BaseException:
            self._close_listeners()
            raise
        for listener in self._listeners:
            # The task gets an empty context. In the current context a user's hook may run, and every task that starts
            # in such a context counts as the user's code (user_code/calls.py).
            accepting = loop.create_task(self._accept(listener), context=contextvars.Context())
            self._tasks.add(accepting)
        return self._listeners[0].getsockname()[:2]  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Accepts no more connections, and ends those that are still being set up. Other connections stay open."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close_listeners()

    @asynccontextmanager
    async def answering(self, request: web.Request) -> AsyncIterator[None]:
        """Surrounds the handling of one request, from its head to its answer. Notes when the whole request has come,
        and when it is answered."""
        connection = None
        if request.transport is not None:
            connection = self._by_transport.get(request.transport)
        if connection is None:  # the client has gone
            yield
            return
        connection.begin()
        is_answer_made = False  # `on_whole_request` reads the newest value

        def on_whole_request() -> None:
            """aiohttp calls this when the last byte of the request has come, or at once if it has come already."""
            connection.answer()
            if is_answer_made:  # the answer was made without the whole body, so `answered` below did nothing
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
        """Accepts connections until `close` cancels this task."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:  # without the pause, this loop would take the whole CPU while the error lasts
                logger.debug("a connection cannot be accepted: %s", error)
                await asyncio.sleep(_PAUSE)
                continue
            try:
                await self._make_room()  # the accepted connection is not in `self._open` yet
                connection = _Connection(self._make(), self._begun, self._lost)
            except BaseException:
                accepted.close()
                raise
            self._open[connection] = None
            # An empty context, as in `listen`.
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
            if transport is None:  # the handshake failed, so `connection_lost` may never be called
                connection.wait(None)
                self._lost(connection, None)

    def _begun(self, connection: _Connection, transport: asyncio.Transport) -> None:
        """Notes that the transport of a connection is ready."""
        self._by_transport[transport] = connection

    def _lost(self, connection: _Connection, transport: asyncio.Transport | None) -> None:
        """Forgets a connection that has ended. `transport` None: its transport was never ready."""
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
            # Waits until a connection is lost or becomes idle, or until `_close_one` may close another connection.
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()

    def _close_one(self) -> float | None:
        """Closes one connection that does not wait for an answer, if any may be closed.

        Connections with part of a request come first, but not in their first SECONDS_SAFE. Returns the seconds after
        which the oldest of them may be closed. None: no connection has part of a request, or the oldest of them was
        closed now.
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
            idle[0].abort()  # the one that was opened first; `_lost` then wakes `_make_room`
        return seconds_safe


def _listener(family: int, address: Any) -> socket.socket:
    """A socket that listens at an address, in the form of `getaddrinfo`. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A server that restarts must not wait until the kernel has forgotten the connections of its predecessor.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # IPv4 has a socket of its own, which could not get the same port otherwise.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
