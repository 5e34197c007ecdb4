"""WeightsServer: offers the versions in a folder over HTTP, to generators that cannot read the folder.

    GET /step-12/NAME    a file that the manifest of this version names, or the manifest itself

* The server reads and never writes. It sends only such files, whatever path a request has.
* Each connection has a thread, which ends after a minute in which the client neither sends nor reads.
* `replay_protos.connection_bounds` sets the number of connections and the times for which the server waits. If as many
  connections are open as may be, a new connection replaces the oldest connection whose request is incomplete, or a
  connection whose client reads its file too slowly. If there are no such connections, the new connection is closed, and
  its generator tries again. A client that reads fast enough is never cut off.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from replay_client.access import ListenAddress
from replay_generator.engines.weights import MANIFEST
from replay_protos import connection_bounds

logger = logging.getLogger(__name__)

_LOOK = 0.05
"""The most seconds between two attempts to make room for a new connection."""
_CHUNK = 1 << 16
"""Bytes of a file that are sent at once."""


@dataclass
class _Progress:
    """The progress of one connection."""

    since: float = field(default_factory=lambda: time.monotonic())
    """The time when the client last made progress. Progress is to connect, to complete the request, or to read a whole
    piece of the file."""
    has_request: bool = False
    """True if the client has sent its whole request."""
    taken: int = 0
    """The number of bytes that the client has read of the current piece of its file."""

    @property
    def is_late(self) -> bool:
        """True if the client has not sent its whole request in time."""
        return not self.has_request and self.since + connection_bounds.SECONDS_PER_REQUEST < time.monotonic()

    @property
    def is_slow(self) -> bool:
        """True if the client has not read the current piece of its file in time."""
        return self.has_request and self.since + connection_bounds.SECONDS_PER_PIECE < time.monotonic()


class WeightsServer(ThreadingTCPServer):
    """The HTTP server. The constructor begins to listen at the address, and `serve_forever` answers requests.

    The constructor raises OSError if it cannot listen at the address.
    """

    allow_reuse_address = True
    request_queue_size = 1024
    daemon_threads = True

    def __init__(self, folder: Path, listen: ListenAddress) -> None:
        self._folder = folder.resolve()
        self.listen = listen
        self._lock = threading.Lock()
        """Held while `_open` is read or changed, because each connection has a thread of its own."""
        self._open: dict[socket.socket, _Progress] = {}
        """The open connections with their progress, the oldest first."""
        self._most = connection_bounds.most_connections()
        """The most connections that may be open at the same time."""
        self.address_family = socket.AF_INET6 if ":" in listen.socket_address[0] else socket.AF_INET
        super().__init__(listen.socket_address, partial(_VersionsHandler, directory=str(self._folder)))

    def has(self, path: str) -> bool:
        """True if the server may send the file at `path`: a manifest, or a file that a manifest names."""
        version, _, name = path.removeprefix("/").partition("/")
        manifest = self._folder / version / MANIFEST
        if re.fullmatch(r"step-\d+", version) is None or not manifest.is_file():
            return False
        names = {MANIFEST, *json.loads(manifest.read_text())["files"]}
        return name in names

    def get_request(self) -> tuple[Any, Any]:
        """Accepts a connection. Returns its socket, with TLS if there is a certificate, and the client's address."""
        connection, client_address = super().get_request()
        tls = self.listen.tls()  # None: there is no certificate
        if tls is not None:
            # The handshake happens at the first read, in the thread of the connection. If it happened here, it would
            # delay all other connections.
            connection = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, client_address

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Makes room for a new connection, by ending another connection if it must. Returns True once there is room.

        Returns False if the new connection may replace no other. `ThreadingTCPServer` then closes the new connection.
        It calls this method before it starts the thread of the new connection, and accepts no other connection until
        this method returns.
        """
        while True:
            with self._lock:
                if len(self._open) < self._most:
                    self._open[request] = _Progress()
                    return True
                replaced, seconds = self._replaceable()
                if replaced is None:
                    return False
                if seconds <= 0:
                    self._end(replaced)
            # If a connection was ended above, do not wait, because there is room now. Otherwise wait until the new
            # connection may replace another one, but at most _LOOK seconds, because a connection may end by itself.
            time.sleep(min(max(seconds, 0.0), _LOOK))

    def _replaceable(self) -> tuple[socket.socket | None, float]:
        """The connection that a new connection may replace, and the seconds until it may do so.

        A connection whose request is incomplete may not be replaced in its first SECONDS_SAFE. The first choice is the
        oldest connection whose request is incomplete, if these seconds are over. The second choice is the connection of
        the client that has read too slowly for the longest time. The third choice is the oldest connection whose
        request is incomplete, with the rest of these seconds. None: the new connection may replace no other.
        """
        incomplete = self._oldest_incomplete()
        seconds = 0.0
        if incomplete is not None:
            # A new connection may not be replaced at first, because its request may be on the way.
            seconds = self._open[incomplete].since + connection_bounds.SECONDS_SAFE - time.monotonic()
            if seconds <= 0:
                return incomplete, 0.0
        slow = [connection for connection, progress in self._open.items() if progress.is_slow]
        if slow:
            slowest = min(slow, key=lambda connection: self._open[connection].since)
            return slowest, 0.0
        return incomplete, seconds

    def _oldest_incomplete(self) -> socket.socket | None:
        """The oldest connection whose request is incomplete; None: there is none."""
        for connection, progress in self._open.items():
            if not progress.has_request:
                return connection
        return None

    def service_actions(self) -> None:
        """Ends the connections whose requests are late.

        `serve_forever` calls this after each new connection, and twice a second.
        """
        with self._lock:
            for connection, progress in list(self._open.items()):
                if progress.is_late:
                    self._end(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def read_whole(self, connection: socket.socket) -> None:
        """Notes that the whole request of this connection was read. Raises ConnectionError if it came too late."""
        with self._lock:
            if connection not in self._open:  # `_end` has removed it
                raise ConnectionAbortedError("the request came too late")
            self._open[connection] = _Progress(has_request=True)

    def taken(self, connection: socket.socket, count: int) -> None:
        """Notes that the client has read `count` more bytes of its file. Raises ConnectionError if it was cut off."""
        with self._lock:
            progress = self._open.get(connection)
            if progress is None:  # `_end` has removed it
                raise ConnectionAbortedError("the file was read too slowly")
            progress.taken += count
            if progress.taken >= connection_bounds.BYTES_PER_PIECE:
                progress.taken = 0
                progress.since = time.monotonic()

    def _end(self, connection: socket.socket) -> None:
        """Shuts a connection down, which wakes its thread. The thread then closes the connection."""
        del self._open[connection]
        # Call the method of the plain socket, because it also ends a connection whose TLS handshake is not finished.
        with suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("the connection from %s broke", client_address, exc_info=True)


class _VersionsHandler(SimpleHTTPRequestHandler):
    """Answers the requests of one connection, in its thread."""

    server: WeightsServer

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(connection_bounds.SECONDS_SILENT)

    def send_head(self) -> Any:
        """Checks the token and the path, and sends the head of the answer. Returns the open file that is to be sent.

        Returns None if it has sent an error instead.
        """
        self.server.read_whole(self.connection)
        authorization = self.headers.get("Authorization", "")
        if not self.server.listen.authorized(authorization):
            self.send_error(HTTPStatus.UNAUTHORIZED, "the request needs the token, as a Bearer")
            return None
        if not self.server.has(self.path):
            self.send_error(HTTPStatus.NOT_FOUND)
            return None
        return super().send_head()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """Sends the file, and counts the bytes that the client reads, so that a slow client can be cut off."""
        while data := source.read(_CHUNK):
            outputfile.write(data)
            self.server.taken(self.connection, len(data))

    def log_message(self, format: str, *values: object) -> None:
        logger.debug(format, *values)
