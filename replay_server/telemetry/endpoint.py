"""MetricsEndpoint: gives metrics to Prometheus and health to containers, over the HTTP server of prometheus_client.

* /health is "ok" if the event loop responds. It needs neither token nor TLS, because it tells nothing else.
* A scrape asks the event loop once, for the server info. It formats the metrics on a thread of its own.
* A connection that says or reads nothing for ten seconds is cut, so that its thread ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, make_wsgi_app, start_http_server

from replay_protos import replay_pb2 as pb
from replay_server.telemetry.latency import Latencies
from replay_server.telemetry.prometheus import ServerCollector

log = logging.getLogger("replay_server")
T = TypeVar("T")

PATH = "/metrics"
HEALTH = "/health"
_LOOP_SECONDS = 5.0
"""How long a scrape or a look at the health waits for the event loop."""


class MetricsEndpoint:
    """Listens from construction on, and responds from `start` on. Raises OSError if the address cannot be had."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._registry = CollectorRegistry()
        self._loop: asyncio.AbstractEventLoop | None = None
        try:
            self._http, self._thread = start_http_server(int(port), host.strip("[]"), self._registry)
        except OSError as error:
            raise OSError(
                f"metrics_address: cannot listen on {address}: it is in use, or not one of this machine ({error})"
            ) from error
        self._metrics = make_wsgi_app(self._registry)
        self._http.set_app(self._respond)
        self._http.RequestHandlerClass = _Handler
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self.address = f"{host}:{self._http.server_port}"

    def start(self, info: Callable[[], pb.ServerInfo], latencies: Latencies) -> None:
        """Responds from now on. `info` is called on the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._registry.register(ServerCollector(partial(self._on_loop, info), latencies))

    def close(self) -> None:
        """Stops listening. A scrape under way may fail, because the event loop no longer responds."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        status, said = "404 Not Found", f"metrics are at {PATH}, health is at {HEALTH}"
        try:
            if environ["PATH_INFO"] == PATH:
                metrics: Iterable[bytes] = self._metrics(environ, start_response)
                return metrics
            if environ["PATH_INFO"] == HEALTH:
                self._on_loop(lambda: None)
                status, said = "200 OK", "ok"
        except (TimeoutError, RuntimeError):  # the event loop is busy, not there yet, or closed
            status, said = "503 Service Unavailable", "the server is busy or shutting down"
        start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(said)))])
        return [said.encode()]

    def _on_loop(self, function: Callable[[], T]) -> T:
        """What `function` returns on the event loop. Raises TimeoutError if that is busy, RuntimeError without one."""
        if self._loop is None:
            raise RuntimeError("the server is not started")
        answer: Future[T] = Future()

        def call() -> None:
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(call)
        return answer.result(_LOOP_SECONDS)


class _Handler(WSGIRequestHandler):
    timeout = 10.0
    """Seconds after which a connection is cut that sends or reads nothing."""

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            log.debug("metrics: the connection from %s broke", self.client_address, exc_info=True)

    def log_message(self, format: str, *values: object) -> None:
        log.debug("metrics: " + format, *values)
