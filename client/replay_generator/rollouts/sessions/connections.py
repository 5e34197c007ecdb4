"""Connections: accepts the connections of an aiohttp server, within the bounds of `replay_protos.connection_bounds`.

    connect ──▶ TLS ──▶ a whole request, within SECONDS_PER_REQUEST ──▶ its answer, after any time ──▶ the next request

* If the number of open connections is at its limit, one of them is closed to make room for a new connection. This is
  the connection that has been sending a request for the longest time, unless that time is below SECONDS_SAFE. Otherwise
  it is an idle connection. If all connections wait for answers, the new connection waits until one of them has its
  answer.
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

    The event loop calls the methods of asyncio.Protocol. The class Connections calls the other methods.
    """

    def __init__(
        self,
        inner: asyncio.Protocol,
        on_ready: Callable[[_Connection, asyncio.Transport], None],
        on_lost: Callable[[_Connection, asyncio.Transport | None], None],
    ) -> None:
        """`inner`: aiohttp's protocol. `on_ready` is called when the transport is ready, `on_lost` when it ends."""
        self._inner = inner
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        """The timer that ends the connection if its client is too slow; None: the client has no time limit now."""
        self.since = self._loop.time()
        """The time, on the clock of the event loop, from which the present request counts: the opening of the
        connection, the first byte after an idle time, or the answer to the request before."""
        self._transport: asyncio.Transport | None = None
        self.opening: asyncio.Task[None] | None = None
        """The task that sets the connection up, with its TLS handshake; None: there is no such task now."""
        self.awaits_answer = False
        """True while the server has a whole request and prepares its answer."""
        self.is_idle = False
        """True while the client has the answer to its last request and has sent no byte since."""
        self._has_next = False
        """True if the client sent bytes of its next request while a request was being answered."""
        # This time is for the TLS handshake and the first request together.
        self.limit_time(connection_bounds.SECONDS_PER_REQUEST)

    def limit_time(self, seconds: float | None) -> None:
        """Replaces the time limit of the client. The connection ends after `seconds`, unless this method is called
        again before. None: the client has no time limit."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self._loop.call_later(seconds, self.abort)

    def note_bytes(self) -> None:
        """Notes that bytes of a request have come. Only the first byte after an idle time starts a time limit."""
        if not self.is_idle:  # the time limit of the request, or of a new connection, has begun already
            return
        self.is_idle = False
        self.since = self._loop.time()
        self.limit_time(connection_bounds.SECONDS_PER_REQUEST)

    def note_whole_request(self) -> None:
        """Notes that the whole request has come."""
        self.awaits_answer = True
        self.is_idle = False
        self._has_next = False
        self.limit_time(None)

    def note_answer(self) -> None:
        """Notes that the request is answered. From now on the client has a limited time for its next request."""
        if not self.awaits_answer:
            # The answer was made before the whole request had come. When the rest has come, `on_whole_request` calls
            # this method again.
            return
        self.awaits_answer = False
        if self._has_next:  # the next request has begun already
            self.is_idle = False
            self.since = self._loop.time()  # `_close_one` grants the next request its time, as `limit_time` does
            self.limit_time(connection_bounds.SECONDS_PER_REQUEST)
        else:
            self.is_idle = True
            self.limit_time(connection_bounds.SECONDS_IDLE)

    def abort(self) -> None:
        """Ends the connection without an answer."""
        self.limit_time(None)
        if self._transport is not None:
            self._transport.abort()
        elif self.opening is not None:  # the handshake is under way
            self.opening.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are no subclass of Transport
        self._on_ready(self, self._transport)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Passes bytes of the client on. Bytes that come while a request is being answered are of the next request."""
        if self.awaits_answer:
            self._has_next = True
        else:
            self.note_bytes()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.limit_time(None)
        self._on_lost(self, self._transport)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class Connections:
    """Listens at the address of a server, and bounds the number of its open connections."""

    def __init__(self, make: Callable[[], asyncio.Protocol], ssl_context: SSLContext | None) -> None:
        """`make` makes aiohttp's protocol for one connection. `ssl_context` None: connections are not encrypted."""
        self._make = make
        self._ssl = ssl_context
        self._most_open = connection_bounds.most_connections()
        """The most connections that may be open."""
        self._open: dict[_Connection, None] = {}
        """The open connections, the oldest first. The dictionary serves as a set that keeps this order: all its values
        are None."""
        self._by_transport: dict[asyncio.BaseTransport, _Connection] = {}
        """The open connections whose handshake has ended, by their transports."""
        self._changed = asyncio.Event()
        """Set when a connection is lost, or has its answer."""
        self._has_warned = False
        """True once the warning about too many connections was logged."""
        self._tasks: set[asyncio.Task[None]] = set()
        """The tasks that accept connections, and those that set up connections."""
        self._listeners: list[socket.socket] = []

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Listens at an address. Returns its host and port. Raises OSError if the address is not available.

        `host`: a name or an IP address. If a name has several IP addresses, the server listens at all of them. `port`
        0: any free port.
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
            # The task gets an empty context, because the current context may be that of a user's hook. Every task that
            # starts in such a context counts as the user's code (user_code/calls.py).
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
        connection.note_bytes()
        is_answer_made = False  # `on_whole_request` reads the newest value

        def on_whole_request() -> None:
            """aiohttp calls this when the last byte of the request has come, or at once if it has come already."""
            connection.note_whole_request()
            if is_answer_made:  # the answer was made before the whole body came, so `note_answer` below did nothing
                connection.note_answer()

        request.content.on_eof(on_whole_request)
        try:
            yield
        finally:
            is_answer_made = True
            connection.note_answer()
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
                connection = _Connection(self._make(), on_ready=self._note_ready, on_lost=self._forget)
            except BaseException:
                accepted.close()
                raise
            self._open[connection] = None
            # The task gets an empty context, for the reason given in `listen`.
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
                connection.limit_time(None)
                self._forget(connection, None)

    def _note_ready(self, connection: _Connection, transport: asyncio.Transport) -> None:
        """Notes that the transport of a connection is ready."""
        self._by_transport[transport] = connection

    def _forget(self, connection: _Connection, transport: asyncio.Transport | None) -> None:
        """Forgets a connection that has ended. `transport` None: its transport was never ready."""
        if transport is not None:
            self._by_transport.pop(transport, None)
        self._open.pop(connection, None)
        self._changed.set()

    async def _make_room(self) -> None:
        """Waits until one more connection may be open. To this end, closes other connections if they may be closed."""
        while len(self._open) >= self._most_open:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%d connections are open, a quarter of the files that this process may open: those that wait for "
                    "nothing are closed for new ones; raise the limit (ulimit -n) if they are agents (said once)",
                    len(self._open),
                )
            self._changed.clear()
            seconds = self._close_one()
            # Waits until a connection is lost or has its answer, or until `_close_one` may close another connection.
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()

    def _close_one(self) -> float | None:
        """Closes one connection that does not wait for an answer, if any may be closed.

        A connection that has been sending a request for SECONDS_SAFE is closed rather than an idle one. Returns the
        seconds after which the oldest of the connections that send a request may be closed. None: no connection sends a
        request, or the oldest of them was closed now.
        """
        sending = [connection for connection in self._open if not connection.awaits_answer and not connection.is_idle]
        idle = [connection for connection in self._open if connection.is_idle]
        seconds_safe: float | None = None
        if sending:
            oldest = min(sending, key=lambda connection: connection.since)
            now = asyncio.get_running_loop().time()
            seconds_safe = oldest.since + connection_bounds.SECONDS_SAFE - now
            if seconds_safe <= 0:
                oldest.abort()
                return None
        if idle:
            idle[0].abort()  # the one that was opened first; `_forget` then wakes `_make_room`
        return seconds_safe


def _listener(family: int, address: Any) -> socket.socket:
    """Makes a socket that listens at `address`, which has the form that `getaddrinfo` returns.

    Raises OSError if the address is not available.
    """
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A server that restarts must not wait until the kernel has forgotten the connections of its predecessor.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Another socket listens for IPv4. It could not have the same port if this socket accepted IPv4 too.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
