"""ReplayServer: builds storage, tables and service, and starts and stops gRPC."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import grpc

from replay_server.blocked_log import BlockedLog
from replay_server.buffer import ReplayBuffer
from replay_server.config import AdmissionConfig, Config, ServerSection, TableConfig
from replay_server.service import ReplayService, add_service

log = logging.getLogger("replay_server")

_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind the same address
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", -1),
    # Clients that vanished without a word (a lost machine, a cut cable) are noticed within 40 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class ReplayServer:
    """A replay server in this process, on a thread of its own.

        with ReplayServer(tables=[TableConfig(name="replay", sampler="prioritized")], port=0) as server:
            client = ReplayClient(server.address)

    `port=0` takes a free port. Raises OSError from `start` if the address cannot be had.
    """

    def __init__(
        self,
        tables: Iterable[TableConfig],
        port: int = 7400,
        host: str = "127.0.0.1",
        *,
        admission: AdmissionConfig | None = None,
        max_bytes: int | str | None = None,
    ) -> None:
        section = ServerSection.model_validate({"address": f"{host}:{port}", "max_bytes": max_bytes})
        self._set_up(Config(server=section, admission=admission, tables=tuple(tables)))

    @classmethod
    def from_config(cls, config: Config) -> Self:
        server = cls.__new__(cls)
        server._set_up(config)
        return server

    def _set_up(self, config: Config) -> None:
        self.config = config
        self._address: str | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._grace: float | None = None

    @property
    def address(self) -> str:
        """ "host:port", once it is started."""
        if self._address is None:
            raise RuntimeError("the server is not started")
        return self._address

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
        section = self.config.server
        buffer = ReplayBuffer(
            self.config.tables,
            time.monotonic,
            admission=self.config.admission,
            max_bytes=section.max_bytes,
            max_payload_bytes=section.max_payload_bytes,
        )
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = grpc.aio.server(options=_OPTIONS)
        service = ReplayService(buffer)
        add_service(service, server)
        host, _, _ = section.address.rpartition(":")
        try:
            port = server.add_insecure_port(section.address)
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {section.address}: it is in use, or not an address of this machine"
            ) from error
        self._address = f"{host}:{port}"
        await server.start()
        log.info("listening on %s with tables %s", self._address, ", ".join(buffer.tables))
        blocked_log = asyncio.create_task(BlockedLog(buffer).run())
        try:
            on_started()
            await self._stop.wait()
        finally:
            blocked_log.cancel()
            buffer.close()
            service.close()
            await server.stop(self._grace)
            buffer.storage.close()
            log.info("stopped")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
