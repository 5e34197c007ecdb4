"""Unread: bounds what gRPC itself holds of all clients' messages: halves, and those that nobody has read yet.

gRPC's own bound cannot be set from Python. So the server compares what the kernel has handed to gRPC, connection by
connection, with the messages that gRPC has handed to the server. Only Linux tells; elsewhere there is no bound.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import logging
import os
import socket
import stat
import struct
import sys
import termios
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from replay_server.rpc.memory_guard import give_back_freed
from replay_server.rpc.open_calls import Context
from replay_server.telemetry.host import private_bytes

log = logging.getLogger("replay_server")

SECONDS_PER_LOOK = 0.5
"""Seconds between two looks at the connections. With very many: 50 times as long as a look takes."""
_CONNECTIONS_AT_A_TIME = 64
"""Looked at before other requests may run: less than a millisecond."""
_TCP_INFO = struct.Struct("=120xQQ")
"""tcpi_bytes_acked and tcpi_bytes_received of the kernel's struct tcp_info."""
Sized = tuple[Any, int]
"""A request, and the bytes of its message."""


@dataclass(slots=True, eq=False)
class Connection:
    """Counts what the kernel has handed to gRPC for one connection, and what gRPC has handed to the server."""

    peer: str
    """gRPC's name."""
    delivered: int = 0
    """Bytes of the messages that gRPC has handed over."""
    messages: int = 0
    calls: int = 0
    began: float = field(default_factory=time.monotonic)
    inode: int = 0
    """The inode of its socket; 0: no look has found the socket yet."""
    descriptor: int = -1
    look: int = 0
    """The last look at which it was there."""
    unread: int = 0
    """Bytes that gRPC holds, as of then."""
    cut: bool = False
    """The server has ended it; gRPC frees what it holds."""
    _received: int = 0
    _allowed: int = 0
    _overhead: int = 0

    def update(self, received: int, sent: int, now: float) -> None:
        """`received` and `sent`: bytes that the kernel has handed to gRPC, and brought to the client.

        What was received and not delivered is overhead (headers, frames, TLS, pings), or gRPC holds it:

            overhead = min(overhead + what is allowed since the last look, received - delivered)
            unread = received - delivered - overhead

        More is allowed than an honest client needs. So `overhead` becomes exact whenever gRPC holds nothing, and no
        error adds up however long a stream lasts.
        """
        if received < self._received:
            return
        allowed = (
            16_384  # handshakes of TLS and HTTP/2, once
            + self.delivered // 64  # frames of HTTP/2 and of TLS
            + 96 * self.messages  # their frames, and those of the responses that the client has read
            + 512 * self.calls  # headers
            + sent // 1024  # windows that the client opens again
            + int(64 * (now - self.began))  # pings
        )
        beyond = received - self.delivered
        self._overhead = min(self._overhead + allowed - self._allowed, beyond)
        self._allowed, self._received = allowed, received
        self.unread = beyond - self._overhead


class Unread:
    def __init__(self, limit: int, kept: Callable[[], int]) -> None:
        """`limit` bounds the bytes of all connections; `kept`: bytes of payloads that the process keeps in memory."""
        self.limit = limit
        self._kept = kept
        self._by_peer: dict[str, Connection] = {}
        self._by_inode: dict[int, Connection | None] = {}
        """None: a socket that is no connection of the server."""
        self._look = 0
        self._cost = 0.0
        """Seconds that the last look took, others' requests in between apart."""

    # ------------------------------------------------------------------------------------------ what gRPC delivers

    @staticmethod
    def sized(parse: Callable[[bytes], Any]) -> Callable[[bytes], Sized]:
        return lambda data: (parse(data), len(data))

    def of_call(self, method: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Sized, Context], Awaitable[Any]]:
        """Counts the request of `method`, a coroutine."""

        @functools.wraps(method)
        async def counted(request: Sized, context: Context) -> Any:
            connection = self._begin(context)
            connection.messages += 1
            connection.delivered += request[1]
            return await method(request[0], context)

        return counted

    def of_stream(
        self, method: Callable[[Any, Context], AsyncIterator[Any]], *, many: bool
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        """Counts the requests of `method`, an asynchronous generator; `many`: it takes a stream of them."""

        @functools.wraps(method)
        async def counted(requests: Any, context: Context) -> AsyncIterator[Any]:
            connection = self._begin(context)
            if many:
                requests = _Counted(requests, connection)
            else:
                connection.messages += 1
                requests, size = requests
                connection.delivered += size
            async with aclosing(method(requests, context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield response

        return counted

    def _begin(self, context: Context) -> Connection:
        peer = context.peer()
        if (connection := self._by_peer.get(peer)) is None:
            connection = self._by_peer[peer] = Connection(peer, look=self._look)
        connection.calls += 1
        return connection

    # ------------------------------------------------------------------------------------------ what gRPC holds

    async def run(self, port: int) -> None:
        """Keeps the bound for the connections to `port`. Runs until it is cancelled."""
        if sys.platform != "linux":
            return
        pause = SECONDS_PER_LOOK
        while True:
            await asyncio.sleep(pause)
            held = await self.look(port)
            pause = max(SECONDS_PER_LOOK, 50 * self._cost)
            if held > self.limit and await asyncio.to_thread(self._memory_exceeds_limit):
                self._cut(held)

    async def look(self, port: int) -> int:
        """Updates all connections; the bytes that gRPC holds for them."""
        self._look += 1
        self._cost, begin = 0.0, time.perf_counter()
        try:
            descriptors = os.listdir("/proc/self/fd")
        except OSError:  # all descriptors are in use for a moment
            return 0
        known, self._by_inode = self._by_inode, {}
        for number, name in enumerate(descriptors):
            if number % _CONNECTIONS_AT_A_TIME == _CONNECTIONS_AT_A_TIME - 1:
                self._cost += time.perf_counter() - begin
                await asyncio.sleep(0)
                begin = time.perf_counter()
            try:
                self._look_at(int(name), port, known)
            except (OSError, struct.error):  # closed meanwhile
                continue
        self._by_peer = {peer: each for peer, each in self._by_peer.items() if self._look - each.look <= 2}
        self._cost += time.perf_counter() - begin
        return sum(each.unread for each in self._there())

    def _there(self) -> Iterator[Connection]:
        """The connections that the last look found."""
        return (each for each in self._by_peer.values() if each.look == self._look and not each.cut)

    def _look_at(self, descriptor: int, port: int, known: dict[int, Connection | None]) -> None:
        if not (inode := _inode(descriptor)):
            return
        if inode in known and known[inode] is None:
            self._by_inode[inode] = None
            return
        with _borrowed(descriptor) as sock:
            connection = known[inode] if inode in known else self._identify(sock, port, inode)
            self._by_inode[inode] = connection
            if connection is None:
                return
            # In this order, so that bytes which come between are counted too much, and not too little.
            (queued,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
            sent, received = _TCP_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        if _inode(descriptor) == inode:  # a thread of gRPC may have closed it, and opened another
            connection.descriptor, connection.look = descriptor, self._look
            connection.update(received - queued, sent, time.monotonic())

    def _identify(self, sock: socket.socket, port: int, inode: int) -> Connection | None:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != port:
            return None
        try:
            peer = peer_name(sock.getpeername())
        except OSError:  # it listens
            return None
        connection = self._by_peer.get(peer)
        if connection is None or connection.inode not in (0, inode):
            connection = self._by_peer[peer] = Connection(peer)
        connection.inode = inode
        return connection

    def _memory_exceeds_limit(self) -> bool:
        """Whether the process holds more than `limit` beside its payloads. The estimate alone may be too high."""
        if private_bytes() - self._kept() <= self.limit:
            return False
        give_back_freed()
        return private_bytes() - self._kept() > self.limit

    def _cut(self, held: int) -> None:
        """Ends the connections that hold most, until the rest fits. gRPC then ends their calls and frees the memory."""
        before, cut = held, list[Connection]()
        for connection in sorted(self._there(), key=lambda each: -each.unread):
            if held <= self.limit:
                break
            if _shut_down(connection):
                connection.cut = True
                held -= connection.unread
                cut.append(connection)
        if cut:
            log.warning(
                "cut %d connections, the first %s with %d bytes: gRPC held %d bytes of messages that were not complete "
                "or not read yet, and max_unread_bytes is %d for all clients together: let clients send less at a "
                "time, or raise it in [limits]",
                len(cut),
                cut[0].peer,
                cut[0].unread,
                before,
                self.limit,
            )


class _Counted:
    """The requests of a stream, without their sizes."""

    def __init__(self, requests: AsyncIterator[Sized], connection: Connection) -> None:
        self._next = aiter(requests).__anext__
        self._connection = connection

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        request, size = await self._next()
        connection = self._connection
        connection.messages += 1
        connection.delivered += size
        return request


def peer_name(address: tuple[Any, ...]) -> str:
    """gRPC's name of the address of a socket."""
    host, port = address[:2]
    if ":" not in host:
        return f"ipv4:{host}:{port}"
    host = host.partition("%")[0]
    if host.startswith("::ffff:") and "." in host:
        return f"ipv4:{host.removeprefix('::ffff:')}:{port}"
    scope = f"%{address[3]}" if address[3] else ""
    return f"ipv6:{quote(f'[{host}{scope}]', safe=':')}:{port}"


def _inode(descriptor: int) -> int:
    """0: no socket."""
    status = os.fstat(descriptor)
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else 0


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The socket of a descriptor that belongs to gRPC, which alone closes it."""
    sock = socket.socket(fileno=descriptor)
    try:
        yield sock
    finally:
        sock.detach()


def _shut_down(connection: Connection) -> bool:
    """Ends the connection; False if it has ended. On a copy, which cannot become another socket meanwhile."""
    try:
        copy = os.dup(connection.descriptor)
    except OSError:
        return False
    try:
        if _inode(copy) != connection.inode:
            return False
        with _borrowed(copy) as sock:
            sock.shutdown(socket.SHUT_RDWR)
        return True
    except OSError:
        return False
    finally:
        os.close(copy)
