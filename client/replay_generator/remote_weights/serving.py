"""WeightsServer: gives the versions in a folder to those who do not see it, over HTTP.

    GET /step-12/NAME    a file that the manifest of this version names, or the manifest itself

* It reads and never writes. Nothing but these files can be had, whatever a path says.
* Each connection has a thread, which ends after a minute without a sign of the other side.
"""

from __future__ import annotations

import json
import logging
import re
import socket
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from replay_generator.sessions.door import Door
from replay_generator.weights import MANIFEST

logger = logging.getLogger(__name__)


class WeightsServer(ThreadingTCPServer):
    """Listens from construction on, and answers in `serve_forever`. Raises OSError if the address cannot be had."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, folder: Path, door: Door) -> None:
        self._folder, self.door = folder.resolve(), door
        self.address_family = socket.AF_INET6 if ":" in door.place[0] else socket.AF_INET
        super().__init__(door.place, partial(_VersionsHandler, directory=str(self._folder)))

    def has(self, path: str) -> bool:
        """Whether the manifest of a published version names this file."""
        version, _, name = path.removeprefix("/").partition("/")
        manifest = self._folder / version / MANIFEST
        if not (re.fullmatch(r"step-\d+", version) and manifest.is_file()):
            return False
        return name in {MANIFEST, *json.loads(manifest.read_text())["files"]}

    def get_request(self) -> tuple[Any, Any]:
        connection, where = super().get_request()
        if (tls := self.door.tls()) is not None:
            # The handshake comes with the first read, in the thread of the connection: here it would hold up others.
            connection = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, where

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("the connection from %s broke", client_address, exc_info=True)


class _VersionsHandler(SimpleHTTPRequestHandler):
    server: WeightsServer
    timeout = 60.0

    def send_head(self) -> Any:
        if not self.server.door.lets_in(self.headers.get("Authorization", "")):
            self.send_error(HTTPStatus.UNAUTHORIZED, "the request needs the token, as a Bearer")
        elif not self.server.has(self.path):
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            return super().send_head()
        return None

    def log_message(self, format: str, *values: object) -> None:
        logger.debug(format, *values)
