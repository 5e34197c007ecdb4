"""ReplayServer: builds storage, tables and service, and starts and stops gRPC."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc

from replay_server.config import CheckpointsSection, Config, LimitsSection, SecuritySection, ServerSection
from replay_server.errors import Refused
from replay_server.limits import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES
from replay_server.rpc.auth import Authorizer, TokenInterceptor, warn_of_open_address, warn_of_open_metrics
from replay_server.rpc.health import Health, add_health
from replay_server.rpc.service import ReplayService, add_service
from replay_server.rpc.tls import ServerCertificates
from replay_server.storage.checkpointer import Checkpointer
from replay_server.storage.checkpoints import CheckpointDirectory, OpenCheckpoint
from replay_server.storage.journal import Fsync, Journal
from replay_server.storage.lmdb import LmdbStorage
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.config import AdmissionConfig, TableConfig
from replay_server.telemetry.blocked_log import BlockedLog
from replay_server.telemetry.latency import Latencies

if TYPE_CHECKING:
    from replay_server.telemetry.endpoint import MetricsEndpoint

log = logging.getLogger("replay_server")
# What gRPC says, with a traceback, about a client that went away while an answer was being written to it.
logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: "ExecuteBatchError raised" not in str(record.msg))

_LOOK_EVERY = 0.1
"""Seconds between two looks at whether gRPC is still there."""
_PORT_ATTEMPTS = 50
"""How often a port is asked for that this server had a moment ago, a tenth of a second apart."""


def _options(limits: LimitsSection) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind the same address
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
        ("grpc.server_handshake_timeout_ms", 20_000),  # of TLS and HTTP/2: who connects and says nothing is cut off
        # Clients that vanished without a word (a lost machine, a cut cable) are noticed within 40 s.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


async def _ended_before(server: grpc.aio.Server, stop: asyncio.Task[Any]) -> bool:
    """Waits for `stop` (True), or until gRPC has ended by itself (False).

    gRPC 1.84 and 1.85 do so, for good and for everyone, at a call whose path is not UTF-8, which anyone can make; and
    nothing public says that it did while calls are open. These are not installed with us; later ones may be.
    """
    running: Callable[[], bool] = vars(server)["_server"].is_running
    while running() and not stop.done():
        await asyncio.wait((stop,), timeout=_LOOK_EVERY)
    return stop.done()


def _metrics_endpoint(address: str | None) -> tuple[MetricsEndpoint | None, Latencies | None]:
    if address is None:
        return None, None
    from replay_server.telemetry.endpoint import MetricsEndpoint  # loads packages that nothing else needs

    return MetricsEndpoint(address), Latencies()


class ReplayServer:
    """A replay server in this process, on a thread of its own.

        with ReplayServer(tables=[TableConfig(name="replay", sampler="prioritized")], port=0) as server:
            client = ReplayClient(server.address)

    `port=0` takes a free port. Raises ValueError if a file of `security` cannot be used, and OSError from `start` if
    the address cannot be had.
    """

    def __init__(
        self,
        tables: Iterable[TableConfig],
        port: int = 7400,
        host: str = "127.0.0.1",
        *,
        admission: AdmissionConfig | None = None,
        max_bytes: int | str | None = None,
        metrics_address: str | None = None,
        data_dir: str | Path | None = None,
        fsync: Fsync = 1.0,
        checkpoints: CheckpointsSection | None = None,
        security: SecuritySection | None = None,
        limits: LimitsSection | None = None,
    ) -> None:
        section = {
            "address": f"{host}:{port}",
            "max_bytes": max_bytes,
            "metrics_address": metrics_address,
            "data_dir": data_dir,
            "fsync": fsync,
        }
        config = Config(
            server=ServerSection.model_validate(section),
            security=security or SecuritySection(),
            limits=limits or LimitsSection(),
            checkpoints=checkpoints or CheckpointsSection(),
            admission=admission,
            tables=tuple(tables),
        )
        self._set_up(config, {})

    @classmethod
    def from_config(cls, config: Config, environment: Mapping[str, str] | None = None) -> Self:
        """A server that takes its tokens from `environment` where the configuration names no file of them."""
        server = cls.__new__(cls)
        server._set_up(config, environment or {})
        return server

    def _set_up(self, config: Config, environment: Mapping[str, str]) -> None:
        self.config = config
        self._authorizer = Authorizer(config.security, environment)
        self._certificates = ServerCertificates(config.security)
        self._restore: str | None = None
        self._replace = False
        self._address: str | None = None
        self._metrics_address: str | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._grace: float | None = None

    def restore(self, checkpoint: str, *, replace: bool = False) -> Self:
        """Makes the start begin with this checkpoint ("latest": the newest), or the newest whole one if it is damaged.

        Where `data_dir` holds items already the start fails; `replace` puts these aside.
        """
        self._restore, self._replace = checkpoint, replace
        return self

    @property
    def address(self) -> str:
        """ "host:port", once it is started."""
        if self._address is None:
            raise RuntimeError("the server is not started")
        return self._address

    @property
    def metrics_address(self) -> str | None:
        """ "host:port" of the metrics, once it is started; None: it has none."""
        return self._metrics_address

    def start(self) -> None:
        """Returns when the server answers."""
        if self._thread is not None:
            raise RuntimeError("the server is started already")
        ready = threading.Event()
        failure: list[BaseException] = []

        async def main() -> None:
            try:
                await self.run(ready.set)
            except BaseException as error:
                failure.append(error)
                ready.set()

        self._thread = threading.Thread(target=lambda: asyncio.run(main()), name="replay-server", daemon=True)
        self._thread.start()
        ready.wait()
        if failure:
            self._thread.join()
            self._thread = None
            raise failure[0]

    def stop(self, grace: float | None = 5.0) -> None:
        """Ends every wait with ServerClosedError, lets running requests end for `grace` seconds, and stops."""
        if self._thread is None:
            return
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.request_stop, grace)
        self._thread.join()
        self._thread = None

    def request_stop(self, grace: float | None = 5.0) -> None:
        """Makes `run` end; call it on the server's event loop."""
        assert self._stop is not None
        self._grace = grace
        self._stop.set()

    async def run(self, on_started: Callable[[], None] = lambda: None) -> None:
        """Serves until `request_stop`, on the running event loop; calls `on_started` once it answers."""
        section, checkpoint, storage = self.config.server, None, None
        if self._restore is not None:
            if (directory := self.config.checkpoint_dir) is None:
                raise ValueError("nothing to restore from: set dir in [checkpoints], or data_dir in [server]")
            checkpoint = CheckpointDirectory(directory).open(self._restore)
        if section.data_dir is not None:
            storage = LmdbStorage(section.data_dir, fsync=section.fsync == "always", replace=self._replace)
        try:
            await self._serve(storage, checkpoint, on_started)
        finally:
            if storage is not None:
                storage.close()

    async def _serve(
        self, storage: LmdbStorage | None, checkpoint: OpenCheckpoint | None, on_started: Callable[[], None]
    ) -> None:
        section = self.config.server
        buffer = ReplayBuffer(
            self.config.tables,
            time.monotonic,
            storage=storage,
            admission=self.config.admission,
            max_bytes=section.max_bytes,
            max_payload_bytes=section.max_payload_bytes,
        )
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        journal = checkpointer = None
        if storage is not None:
            journal = Journal.start(buffer, storage, section.fsync, checkpoint)
        elif checkpoint is not None:
            checkpoint.load(buffer)
        if (directory := self.config.checkpoint_dir) is not None:
            checkpointer = Checkpointer(buffer, CheckpointDirectory(directory), self.config.checkpoints.keep)
        try:
            if journal is not None:
                await journal.durable()
            await self._listen(buffer, journal, checkpointer, on_started)
        finally:
            if checkpointer is not None:
                await checkpointer.close()
            if journal is not None:
                await journal.close()
            if self._address is not None:  # else it never began
                log.info("stopped")

    async def _listen(
        self,
        buffer: ReplayBuffer,
        journal: Journal | None,
        checkpointer: Checkpointer | None,
        on_started: Callable[[], None],
    ) -> None:
        section, checkpoints = self.config.server, self.config.checkpoints
        metrics, latencies = _metrics_endpoint(section.metrics_address)
        service = self._service = ReplayService(buffer, self.config.limits, section.data_dir, journal, checkpointer)
        try:
            server, health, port = self._grpc_server(service, latencies, section.address)
        except OSError:
            if metrics is not None:
                metrics.close()
            raise
        host, _, _ = section.address.rpartition(":")
        self._address = f"{host}:{port}"
        warn_of_open_address(self._address, self.config.security, tokens=self._authorizer.tokens is not None)
        await server.start()
        if metrics is not None and latencies is not None:
            metrics.start(service.administration.server_info, latencies)
            self._metrics_address = metrics.address
            log.info("metrics at http://%s/metrics", metrics.address)
            warn_of_open_metrics(metrics.address)
        log.info("listening on %s with tables %s", self._address, ", ".join(buffer.tables))
        tasks = [asyncio.create_task(BlockedLog(buffer).run())]
        if self._authorizer.tokens is not None:
            tasks.append(asyncio.create_task(self._authorizer.end_revoked()))
        if checkpointer is not None and checkpoints.every_minutes is not None:
            tasks.append(asyncio.create_task(checkpointer.run(60 * checkpoints.every_minutes)))
        try:
            on_started()
            assert self._stop is not None
            stop = asyncio.create_task(self._stop.wait())
            while not await _ended_before(server, stop):
                log.error("gRPC ended by itself, and all connections with it (see above): listening anew")
                await server.stop(None)
                server, health = await self._grpc_server_again(service, latencies)
        finally:
            for task in tasks:
                task.cancel()
            health.drain()
            buffer.close()
            service.close()
            await server.stop(self._grace)
            if metrics is not None:
                await asyncio.to_thread(metrics.close)
            if checkpointer is not None and checkpoints.on_stop:
                try:
                    await checkpointer.write()
                except Refused as refusal:
                    log.error("%s", refusal.message)

    def _grpc_server(
        self, service: ReplayService, latencies: Latencies | None, address: str
    ) -> tuple[grpc.aio.Server, Health, int]:
        """A server that is not started yet, and its port. Raises OSError if the address cannot be had."""
        interceptors = [] if self._authorizer.tokens is None else [TokenInterceptor(self._authorizer)]
        server = grpc.aio.server(options=_options(self.config.limits), interceptors=interceptors)
        add_service(service, server, latencies)
        health = add_health(server)
        try:
            if (credentials := self._certificates.credentials()) is None:
                return server, health, server.add_insecure_port(address)
            return server, health, server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: it is in use, or not an address of this machine") from error

    async def _grpc_server_again(
        self, service: ReplayService, latencies: Latencies | None
    ) -> tuple[grpc.aio.Server, Health]:
        """The same at the address of before, started."""
        for attempt in range(_PORT_ATTEMPTS):
            try:
                server, health, _ = self._grpc_server(service, latencies, self.address)
                break
            except OSError:
                if attempt == _PORT_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(0.1)
        await server.start()
        return server, health

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
