"""MetricsEndpoint: gives metrics to Prometheus and health to containers over HTTP, on threads of its own.

* /health is "ok" if the event loop responds. It needs neither token nor TLS, because it tells nothing else.
* A scrape asks the event loop once, for the server info. It formats the metrics on its own thread.
* A connection that says or reads nothing for ten seconds is cut, so that its thread ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, GCCollector, MetricsHandler, ProcessCollector

from replay_protos import replay_pb2 as pb
from replay_server.telemetry.latency import Latencies
from replay_server.telemetry.prometheus import ServerCollector

log = logging.getLogger("replay_server")
T = TypeVar("T")

PATH = "/metrics"
HEALTH = "/health"
_LOOP_SECONDS = 5.0
"""How long a scrape or a look at the health waits for the event loop."""
_SILENT_SECONDS = 10.0
"""After which a connection is cut that sends or reads nothing."""


class MetricsEndpoint:
    """Listens from construction on, and responds from `start` on. Raises OSError if the address cannot be had."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        registry = CollectorRegistry()
        try:
            self._http = _Server(host.strip("[]"), int(port), registry)
        except OSError as error:
            raise OSError(
                f"metrics_address: cannot listen on {address}: it is in use, or not one of this machine ({error})"
            ) from error
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        self._registry = registry
        self.address = f"{host}:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, name="replay-metrics", daemon=True)

    def start(self, info: Callable[[], pb.ServerInfo], latencies: Latencies) -> None:
        """Responds from now on. `info` is called on the event loop that runs now."""
        loop = asyncio.get_running_loop()
        self._http.on_loop = partial(_result_of, loop)
        self._registry.register(ServerCollector(partial(_result_of, loop, info), latencies))
        self._thread.start()

    def close(self) -> None:
        """Stops listening. A scrape under way may fail, because the event loop no longer responds."""
        if self._thread.is_alive():
            self._http.shutdown()
        self._http.server_close()


def _result_of(loop: asyncio.AbstractEventLoop, function: Callable[[], T]) -> T:
    """What `function` returns on the event loop. Raises TimeoutError if that is busy, RuntimeError if it is closed."""
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except Exception as error:
            answer.set_exception(error)

    loop.call_soon_threadsafe(call)
    return answer.result(_LOOP_SECONDS)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    on_loop: Callable[[Callable[[], None]], None]
    """Returns when the function has run on the server's event loop."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = addresses[0]
        super().__init__((str(address[0]), int(address[1])), _Handler.factory(registry))

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics: the connection from %s broke", client_address, exc_info=True)


class _Handler(MetricsHandler):
    timeout = _SILENT_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        try:
            if path == PATH:
                super().do_GET()
            elif path == HEALTH:
                self._say_health()
            else:
                self.send_error(404, explain=f"metrics are at {PATH}, health is at {HEALTH}")
        except (TimeoutError, RuntimeError):  # the event loop is busy, or closed
            self.send_error(503, explain="the server is busy or shutting down")

    def _say_health(self) -> None:
        assert isinstance(self.server, _Server)
        self.server.on_loop(lambda: None)
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *values: object) -> None:
        log.debug("metrics: " + format, *values)
