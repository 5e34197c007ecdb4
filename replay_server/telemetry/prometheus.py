"""Prometheus: serves metrics to Prometheus, and health to containers, by the HTTP server of prometheus_client.

* A field of ServerInfo declares its metric in replay.proto. This module adds the few metrics that combine several
  fields.
* A scrape asks the event loop once, for the server info. The metrics are formatted on the thread of the scrape.
* /health is "ok" if the event loop responds. It needs neither token nor TLS, because it reveals nothing else.
* A connection that sends or reads nothing for ten seconds is cut, so that its thread ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import cache, partial
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from replay_protos import replay_pb2 as pb
from replay_protos.state import declared
from replay_server.telemetry.tracing import code_name

log = logging.getLogger("replay_server")
T = TypeVar("T")

PATH = "/metrics"
HEALTH = "/health"
BOUNDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of the buckets of durations, in seconds. One more bucket counts longer times."""
_LOOP_SECONDS = 5.0
"""The most seconds for which a scrape or a health check waits for the event loop."""
Families = dict[str, CounterMetricFamily | GaugeMetricFamily]
"""Metrics by name."""
# Otherwise the library would add to each series another one, with the time at which the series was created.
disable_created_metrics()  # type: ignore[no-untyped-call]


class MetricsEndpoint:
    """An HTTP server that listens from its construction on, and serves the server's metrics and health from `start` on.

    Raises OSError if it cannot listen on the address.
    """

    def __init__(self, address: str) -> None:
        """`address` is host:port; port 0 takes a free port."""
        host, _, port = address.rpartition(":")
        self._registry = CollectorRegistry()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the server; None before `start`."""
        try:
            self._http, self._thread = start_http_server(int(port), host.strip("[]"), self._registry)
        except OSError as error:
            raise OSError(
                f"metrics_listen: cannot listen on {address}: it is in use, or not one of this machine ({error})"
            ) from error
        self._metrics = make_wsgi_app(self._registry)
        # Replaces the library's own application, which has no /health.
        self._http.set_app(self._respond)
        self._http.RequestHandlerClass = _Handler  # cuts silent connections, which the library's handler does not
        self.latencies = Latencies(self._registry)
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self.address = f"{host}:{self._http.server_port}"

    def start(self, info: Callable[[], pb.ServerInfo]) -> None:
        """Serves the server's metrics and health from now on. `info` is called on the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._registry.register(ServerCollector(partial(self._on_loop, info)))

    def close(self) -> None:
        """Stops listening. A scrape under way may fail, because the event loop no longer responds."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """The WSGI application: responds to one HTTP request. Runs on a thread of the HTTP server."""
        status = "404 Not Found"
        body = f"metrics are at {PATH}, health is at {HEALTH}"
        try:
            if environ["PATH_INFO"] == PATH:
                # `_metrics` calls `ServerCollector.collect`, so it raises the errors of `_on_loop`.
                metrics: Iterable[bytes] = self._metrics(environ, start_response)
                return metrics
            if environ["PATH_INFO"] == HEALTH:
                self._on_loop(lambda: None)  # does nothing, but shows that the event loop runs
                status = "200 OK"
                body = "ok"
        except (TimeoutError, RuntimeError):  # the event loop is busy, not there yet, or closed
            status = "503 Service Unavailable"
            body = "the server is busy or shutting down"
        start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
        return [body.encode()]

    def _on_loop(self, function: Callable[[], T]) -> T:
        """Calls `function` on the event loop, and returns its result or raises its exception.

        Raises TimeoutError if the event loop is busy, and RuntimeError before `start` or if the loop is closed.
        """
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
    """Handles one connection. Logs requests and broken connections at level DEBUG only."""

    timeout = 10.0
    """Seconds without any bytes sent or read, after which the connection is cut."""

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            log.debug("metrics: the connection from %s broke", self.client_address, exc_info=True)

    def log_message(self, format: str, *values: object) -> None:
        log.debug("metrics: " + format, *values)


class ServerCollector(Collector):
    """Asks for the server info at each scrape, and keeps nothing between two scrapes."""

    def __init__(self, ask_info: Callable[[], pb.ServerInfo]) -> None:
        self._ask_info = ask_info

    def describe(self) -> list[Metric]:
        return []  # the metrics are known only when `collect` has asked for the server info

    def collect(self) -> Iterator[Metric]:
        info = self._ask_info()
        yield from server_metrics(info)


def server_metrics(info: pb.ServerInfo) -> Iterator[Metric]:
    """The metrics of one server and its tables."""
    labels = {"version": info.version, "storage": info.storage, "server_id": str(info.server_id)}
    yield InfoMetricFamily("replay_server", "Version, storage, and an id that is new at each start.", labels)
    families: Families = {}
    _add_fields(families, info, name="", text="", labels={})
    yield from families.values()
    yield _table_bounds(info, "replay_table_max_items", "The most items that it holds.", "max_size")
    yield _table_bounds(info, "replay_table_max_bytes", "Bound of replay_table_bytes, where there is one.", "max_bytes")
    yield from _client_metrics(info)


@cache
def _fields_with_metrics(message: Descriptor) -> tuple[tuple[FieldDescriptor, pb.Field], ...]:
    """The fields of a message that have a metric, or that contain fields with a metric; each with its declaration."""
    fields = []
    for field, declaration in declared(message):
        if declaration.no_metric:
            continue
        has_metric = bool(declaration.metric or declaration.label)
        if not has_metric and field.message_type is not None:
            has_metric = bool(_fields_with_metrics(field.message_type))
        if has_metric:
            fields.append((field, declaration))
    return tuple(fields)


def _add_fields(families: Families, message: Message, name: str, text: str, labels: dict[str, str]) -> None:
    """Adds a sample to `families` for each field of a message that has a metric, also in the messages inside it.

    `name`, `text` and `labels` come from the fields that contain this message: the beginning of the names of its
    metrics, the help text of a metric that declares none, and the labels of its samples.
    """
    for field, declaration in _fields_with_metrics(message.DESCRIPTOR):
        metric = name + declaration.metric
        value = getattr(message, field.name)
        if field.is_repeated:
            # The entries are messages with a name, such as tables. The declared label gets the name as its value.
            for entry in value:
                _add_fields(families, entry, metric, declaration.help, labels | {declaration.label: entry.name})
            continue
        label, _, label_value = declaration.label.partition("=")  # for example operation=insert
        field_labels = labels | {label: label_value} if label else labels
        if field.message_type is not None:
            if message.HasField(field.name):
                _add_fields(families, value, metric, declaration.help, field_labels)
            continue
        if not value and declaration.zero_is_unknown:
            continue
        # All tables share the family of a metric. Each adds one sample, with labels of its own.
        family = families.get(metric)
        if family is None:
            kind = CounterMetricFamily if declaration.counter else GaugeMetricFamily
            family = kind(metric, declaration.help or text, labels=list(field_labels))
            families[metric] = family
        # The sample of a text, such as an error, is 1 if there is a text, and 0 if the text is empty.
        sample = float(bool(value)) if isinstance(value, str) else value
        family.add_metric(list(field_labels.values()), sample)


def _table_bounds(info: pb.ServerInfo, name: str, text: str, setting: str) -> Metric:
    """The metric `name`, with the bound `setting` from the configuration of each table that has this bound."""
    gauge = GaugeMetricFamily(name, text, labels=["table"])
    for table in info.tables:
        bound = json.loads(table.config)[setting]
        if bound is not None:
            gauge.add_metric([table.name], bound)
    return gauge


def _client_metrics(info: pb.ServerInfo) -> Iterator[Metric]:
    """For each role: since when it is overdue, and the number of connected clients."""
    overdue = GaugeMetricFamily(
        "replay_overdue_seconds",
        "Since when the trainer, or all generators, are overdue: three usual intervals without a sign, "
        "and it did not say that it ends. "
        "0: it is there, or unknown.",
        labels=["role"],
    )
    for role in ("trainer", "generator"):
        ages = [entry.age for entry in info.overdue if entry.role == role]
        overdue.add_metric([role], max(ages, default=0.0))
    yield overdue
    connected = GaugeMetricFamily("replay_clients", "Named clients that have a call or stream open.", labels=["role"])
    for role in ("trainer", "generator", "teacher"):
        # A client with several roles has them all in `role`, separated by commas.
        clients = [client for client in info.clients if role in client.role and client.open > 0]
        connected.add_metric([role], len(clients))
    yield connected


class Latencies:
    """The durations of the calls of each gRPC method, and the status codes of their ends.

    * A call with one request is timed from its request to its end, waiting included.
    * A stream is timed from each message of the client to the next message of the server.
    * WatchPolicy is counted but not timed, because the server sends its messages at events and not as answers.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "replay_grpc_handling_seconds",
            "From a request to its answer, waiting included; in streams from each message to the next one back.",
            ["method"],
            buckets=BOUNDS,
            registry=registry,
        )
        self._ended = Counter(
            "replay_grpc_handled", "Calls that ended, by status code.", ["method", "code"], registry=registry
        )

    def expect(self, method: str) -> None:
        """Adds the series of a method that is timed, so that Prometheus sees the series before the first call."""
        self._seconds.labels(method)

    def ended(self, method: str, code: str, seconds: float | None) -> None:
        """Notes that a call has ended, `seconds` after its request. `seconds` is None for a stream, which has no single
        request."""
        if seconds is not None:
            self._seconds.labels(method).observe(seconds)
        self._ended.labels(method, code).inc()

    def responded(self, method: str, response: Any, seconds: float | None) -> None:
        """Notes that a response is sent, `seconds` after the last message of the client.

        `seconds` is None if that message has had a response already. A refused draw counts as a call that failed: the
        error is in the response and the stream goes on, so `ended` would not count the draw.
        """
        if seconds is not None:
            self._seconds.labels(method).observe(seconds)
        if method == "Draw" and response.head.error.code:
            self._ended.labels(method, code_name(response.head.error.code)).inc()
