"""MetricsEndpoint: the figures for Prometheus over HTTP, on threads of its own.

A scrape asks the event loop once for the server info and does all else, formatting above all, on its own thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

from replay_protos import replay_pb2 as pb
from replay_server.telemetry.latency import Latencies
from replay_server.telemetry.prometheus import ServerCollector

log = logging.getLogger("replay_server")

PATH = "/metrics"
_ANSWER_SECONDS = 5.0
"""How long a scrape waits for the event loop."""
_REQUEST_SECONDS = 10.0
"""After which a connection that sends or reads nothing is cut."""
_MOST_CONNECTIONS = 16
"""Each has a thread; one more cuts the oldest."""


class MetricsEndpoint:
    """Listens from construction on, and answers from `start` on. Raises OSError if the address cannot be had."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._http = _Server(host.strip("[]"), int(port))
        except OSError as error:
            raise OSError(
                f"metrics_address: cannot listen on {address}: it is in use, or not one of this machine ({error})"
            ) from error
        self.address = f"{host}:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, name="replay-metrics", daemon=True)

    def start(self, info: Callable[[], pb.ServerInfo], latencies: Latencies) -> None:
        """Answers scrapes with what `info` says on the event loop that runs now."""
        loop = asyncio.get_running_loop()

        def ask() -> pb.ServerInfo:
            answer: Future[pb.ServerInfo] = Future()

            def look() -> None:
                try:
                    answer.set_result(info())
                except Exception as error:
                    answer.set_exception(error)

            loop.call_soon_threadsafe(look)
            return answer.result(_ANSWER_SECONDS)

        self._http.registry.register(ServerCollector(ask, latencies))
        self._thread.start()

    def close(self) -> None:
        """Ends it; a scrape under way may find nobody to ask, and fails."""
        if self._thread.is_alive():
            self._http.shutdown()
        self._http.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, place = places[0]
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__((str(place[0]), int(place[1])), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= _MOST_CONNECTIONS:
                with suppress(OSError):
                    next(iter(self._open)).shutdown(socket.SHUT_RDWR)
                del self._open[next(iter(self._open))]
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics: the connection from %s broke", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self._answer(404, "text/plain; charset=utf-8", f"metrics are at {PATH}\n".encode())
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            text = encode(self.server.registry)
        except (TimeoutError, RuntimeError):  # the loop is busy, or closed
            self._answer(503, "text/plain; charset=utf-8", b"the server is busy or shutting down\n")
            return
        self._answer(200, content_type, text)

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        log.debug("metrics: " + format, *values)
