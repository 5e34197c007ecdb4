"""ReplayServer builds storage, tables and service from a configuration, starts them, and stops them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from replay_protos import event_loop
from replay_protos.memory import keep_freed_memory
from replay_protos.transport import is_loopback
from replay_server.config import (
    CheckpointsConfig,
    Config,
    LimitsConfig,
    SecurityConfig,
    ServerConfig,
)
from replay_server.errors import Refused
from replay_server.rpc.auth import Authorizer, ServerCertificates
from replay_server.rpc.service import Listener, ReplayService
from replay_server.storage.checkpointer import Checkpointer, restore_into_memory
from replay_server.storage.checkpoints import Checkpoint, CheckpointDirectory
from replay_server.storage.data_dir import DamagedDirectory, UnusableDirectory
from replay_server.storage.journal import Fsync, Journal
from replay_server.storage.lmdb import LmdbStorage
from replay_server.storage.memory import MemoryStorage
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.config import AdmissionConfig, TableConfig
from replay_server.tables.extensions import configured
from replay_server.telemetry.blocked_log import BlockedLog

log = logging.getLogger("replay_server")
T = TypeVar("T")


class ReplayServer:
    """A replay server in this process, on a thread of its own.

        with ReplayServer(tables=[TableConfig(name="replay", sampler="prioritized")], port=0) as server:
            client = ReplayClient(server.address)

    With `port=0` the server takes a free port. Raises ValueError if a file of `security` cannot be used. `start` raises
    OSError if the server cannot listen on the address.
    """

    def __init__(
        self,
        tables: Iterable[TableConfig] = (),
        port: int = 7400,
        host: str = "127.0.0.1",
        *,
        admission: AdmissionConfig | None = None,
        max_bytes: int | str | None = None,
        metrics_listen: str | None = None,
        data_dir: str | Path | None = None,
        fsync: Fsync = "always",
        shared_memory: str | Path | Literal[False] = "/dev/shm",
        checkpoints: CheckpointsConfig | None = None,
        security: SecurityConfig | None = None,
        limits: LimitsConfig | None = None,
    ) -> None:
        section: dict[str, Any] = {
            "listen": f"{host}:{port}",
            "max_bytes": max_bytes,
            "metrics_listen": metrics_listen,
            "data_dir": data_dir,
            "fsync": fsync,
            "shared_memory": shared_memory,
        }
        config = Config(
            server=ServerConfig(**section),
            security=security or SecurityConfig(),
            limits=limits or LimitsConfig(),
            checkpoints=checkpoints or CheckpointsConfig(),
            admission=admission,
            tables=tuple(tables),
        )
        self._set_up(config, environment={})

    @classmethod
    def from_config(cls, config: Config, environment: Mapping[str, str] | None = None) -> Self:
        """Makes a server. The server takes its tokens from `environment` if `config` names no file of tokens."""
        server = cls.__new__(cls)
        server._set_up(config, environment or {})
        return server

    def _set_up(self, config: Config, environment: Mapping[str, str]) -> None:
        """Sets all attributes, for `__init__` and `from_config`. Reads tokens and certificates, but no other file."""
        self.config = config
        self._authorizer = Authorizer(config.security, environment)
        self._certificates = ServerCertificates(config.security)
        self._restore: str | None = None
        """The name of the checkpoint that the start restores; None: the start restores no checkpoint."""
        self._replace = False
        """True if the restore may put aside the items that `data_dir` holds."""
        self._address: str | None = None
        self._metrics_address: str | None = None
        self._service: ReplayService | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        """The error with which `run` ended on the thread; None: it has not ended, or has ended without an error."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        """Set when the server is to stop; None before the start."""
        self._grace: float | None = None
        """Seconds that running requests get to end after `_stop` is set; None: they end at once."""
        self._draining = False

    def restore(self, checkpoint: str, *, replace: bool = False) -> Self:
        """Makes the start restore this checkpoint; "latest" is the newest checkpoint.

        If the checkpoint is damaged, the start restores the newest whole checkpoint. If `data_dir` holds items already,
        the start puts them aside with `replace`, and fails without `replace`.
        """
        self._restore = checkpoint
        self._replace = replace
        return self

    @property
    def address(self) -> str:
        """host:port, after the start."""
        if self._address is None:
            raise RuntimeError("the server is not started")
        return self._address

    @property
    def metrics_address(self) -> str | None:
        """host:port of /metrics; None before the start, or if the server has no metrics."""
        return self._metrics_address

    @property
    def items(self) -> int:
        """The number of payloads that the server holds; 0 before the start."""
        if self._service is None:
            return 0
        return len(self._service.backend.buffer.items)

    @property
    def draining(self) -> bool:
        """True if items with new keys are refused, so that the server becomes empty.

        Any thread may set it. If it is set before the start, the server refuses new keys from the first request on.
        """
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining
        if self._service is not None:
            self._service.backend.draining = draining

    def on_loop(self, work: Callable[[ReplayBuffer], T]) -> T:
        """Runs `work` on the server's event loop, and returns its result.

        Call this from another thread than that of the event loop, after the start.
        """
        assert self._loop is not None
        assert self._service is not None
        buffer = self._service.backend.buffer

        async def call_work() -> T:  # `run_coroutine_threadsafe` takes only a coroutine
            return work(buffer)

        future = asyncio.run_coroutine_threadsafe(call_work(), self._loop)
        return future.result()  # blocks this thread until the event loop has run the coroutine

    def start(self) -> None:
        """Starts the server on its thread, and returns when clients can connect. Raises the error of a failed start.

        `stop` raises an error that ends the server later.
        """
        if self._thread is not None:
            raise RuntimeError("the server is started already")
        ready = threading.Event()
        self._failure = None

        async def main() -> None:
            """Runs the server on the new thread. Hands the error of a failed start to the thread that waits below."""
            try:
                await self.run(ready.set)
            except BaseException as error:
                if ready.is_set():  # the start has succeeded, and maybe nobody calls `stop` for a long time
                    log.exception("the server has failed")
                self._failure = error
                ready.set()

        self._thread = threading.Thread(target=lambda: event_loop.run(main()), name="replay-server", daemon=True)
        self._thread.start()
        # Waits a second at a time, because in a wait without a time limit Python may miss a signal that came just
        # before the wait.
        while not ready.wait(1.0):
            pass
        if self._failure is not None:
            self._join()

    def stop(self, grace: float | None = 5.0) -> None:
        """Ends every wait with ServerClosedError, gives running requests `grace` seconds to end, and stops the server.

        With `grace` None, running requests end at once. Raises the error with which the server has ended since the
        start, if there is one.
        """
        if self._thread is None:
            return
        assert self._loop is not None
        with suppress(RuntimeError):  # an error has ended the server, and its event loop is closed
            self._loop.call_soon_threadsafe(self.request_stop, grace)
        self._join()

    def _join(self) -> None:
        """Waits until the thread has ended, so that `start` may be called again. Raises the error that `run` raised."""
        assert self._thread is not None
        while self._thread.is_alive():
            self._thread.join(1.0)  # a second at a time, as in `start`
        self._thread = None
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

    def request_stop(self, grace: float | None = 5.0) -> None:
        """Makes `run` return. Call it on the server's event loop."""
        assert self._stop is not None
        self._grace = grace
        self._stop.set()

    async def run(self, on_started: Callable[[], None] = lambda: None) -> None:
        """Serves on the running event loop until `request_stop`. Calls `on_started` when clients can connect."""
        keep_freed_memory()
        checkpoint = None
        if self._restore is not None:
            directory = self.config.checkpoint_dir
            if directory is None:
                raise ValueError("nothing to restore from: set dir in [checkpoints], or data_dir in [server]")
            checkpoint = CheckpointDirectory(directory).open(self._restore)
        try:
            await self._serve(checkpoint, replace=self._replace, fell_back="", on_started=on_started)
        except DamagedDirectory as damage:
            if checkpoint is not None:  # the operator chose this checkpoint, so the server takes no other checkpoint
                raise
            checkpoint = self._last_resort(damage)
            fell_back = f"{damage.what}: the start fell back to checkpoint {checkpoint.name}"
            log.error("%s; all later changes are lost", fell_back)
            await self._serve(checkpoint, replace=True, fell_back=fell_back, on_started=on_started)

    def _last_resort(self, damage: DamagedDirectory) -> Checkpoint:
        """Opens the newest whole checkpoint, with which the start can go on. Raises `damage` if there is none."""
        directory = self.config.checkpoint_dir
        try:
            assert directory is not None  # there is a `data_dir`, in which checkpoints have a default folder
            return CheckpointDirectory(directory).open("latest")
        except ValueError:
            raise damage from None

    async def _serve(
        self, checkpoint: Checkpoint | None, *, replace: bool, fell_back: str, on_started: Callable[[], None]
    ) -> None:
        """Loads the items, from `checkpoint` or from `data_dir`, and serves them until `request_stop`.

        With `replace`, the checkpoint may replace the items in `data_dir`. `fell_back` is the reason why the start went
        back to the checkpoint, although no operator chose it; "": the start did not go back. Raises DamagedDirectory if
        `data_dir` is damaged.
        """
        section = self.config.server
        checkpoints = self.config.checkpoints
        directory = self.config.checkpoint_dir
        # A server that only restores from the folder writes nothing there, so the folder may be read-only.
        writes_checkpoints = checkpoints.every_minutes is not None or checkpoints.on_stop
        if writes_checkpoints and directory is not None:
            CheckpointDirectory(directory).check_writable()
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        # Without data_dir, storage and journal stay None: the payloads are in memory only.
        storage: LmdbStorage | None = None
        journal: Journal | None = None
        checkpointer: Checkpointer | None = None
        async with AsyncExitStack() as exit_stack:  # closes what is opened below, in the reverse order
            if section.data_dir is not None:
                storage = LmdbStorage(section.data_dir, fsync=section.fsync == "always", replace=replace)
                storage.fell_back = fell_back
                exit_stack.callback(storage.close)
                if checkpoint is not None:
                    storage.adopt(checkpoint.path, checkpoint.size)  # `Journal.start` below loads its items
            exit_stack.callback(self._log_end)
            buffer = ReplayBuffer(
                self.config.tables,
                time.monotonic,
                MemoryStorage() if storage is None else storage,
                extensions=configured(self.config.tables, time.monotonic, self.config.admission),
                max_bytes=section.max_bytes,
                max_payload_bytes=section.max_payload_bytes,
            )
            if storage is not None:
                journal = Journal.start(buffer, storage)
                exit_stack.push_async_callback(journal.close)
            elif checkpoint is not None:
                restore_into_memory(buffer, checkpoint)
            buffer.check_totals()  # asserts that the loaded counts agree
            if directory is not None:
                copy = None if journal is None else journal.copy_to
                checkpointer = Checkpointer(buffer, CheckpointDirectory(directory), checkpoints.keep, copy)
                exit_stack.push_async_callback(checkpointer.close)
            if journal is not None:
                # Before clients connect, the first commit shows whether the server can write to `data_dir`.
                try:
                    await journal.durable()
                except Refused as refusal:
                    raise UnusableDirectory(refusal.message) from None
            await self._listen(buffer, journal, checkpointer, exit_stack, on_started)

    def _log_end(self) -> None:
        """Logs the stop of a server that had an address. A failed start logs nothing."""
        if self._address is not None:
            log.info("stopped")

    async def _listen(
        self,
        buffer: ReplayBuffer,
        journal: Journal | None,
        checkpointer: Checkpointer | None,
        exit_stack: AsyncExitStack,
        on_started: Callable[[], None],
    ) -> None:
        """Answers clients, and runs the background tasks, until `request_stop`.

        `exit_stack` will close the metrics endpoint that this method opens.
        """
        config = self.config
        section = config.server
        checkpoints = config.checkpoints
        _check_open_address(section.listen, config.security, tokens=self._authorizer.tokens is not None)
        metrics = None
        latencies = None
        if section.metrics_listen is not None:
            # The import is here because `prometheus` imports packages that a server without metrics does not need.
            from replay_server.telemetry.prometheus import MetricsEndpoint

            metrics = MetricsEndpoint(section.metrics_listen)
            latencies = metrics.latencies
            exit_stack.push_async_callback(asyncio.to_thread, metrics.close)
        self._service = ReplayService(
            buffer,
            config.limits,
            section.data_dir,
            journal,
            checkpointer,
            section.shared_memory or None,  # `shared_memory` is False if payloads travel over gRPC only
            latencies,
        )
        self._service.backend.draining = self._draining
        listener = Listener(self._service, section.listen, config.limits, self._authorizer, self._certificates)
        self._address = listener.address
        _warn_of_open_address(self._address, config.security, tokens=self._authorizer.tokens is not None)
        await listener.start()
        if metrics is not None:
            metrics.start(self._service.administration.server_info)
            self._metrics_address = metrics.address
            log.info("metrics at http://%s/metrics", metrics.address)
            _warn_of_open_metrics(metrics.address)
        log.info("serving the tables %s", ", ".join(buffer.tables))  # `replay serve` prints the address
        tasks = [
            asyncio.create_task(BlockedLog(buffer).run()),
            asyncio.create_task(buffer.items.leaving.run()),  # clears away the rows of large changes, in slices
        ]
        if self._authorizer.tokens is not None:
            tasks.append(asyncio.create_task(self._authorizer.end_revoked()))
        if checkpointer is not None and checkpoints.every_minutes is not None:
            tasks.append(asyncio.create_task(checkpointer.run(60 * checkpoints.every_minutes)))
        try:
            on_started()
            assert self._stop is not None
            await self._stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            buffer.close()  # ends every wait, so that the calls that wait can end within the grace
            await listener.stop(self._grace)
            # The checkpoint is written after the last call has ended, so that it contains all changes.
            if checkpointer is not None and checkpoints.on_stop:
                try:
                    await checkpointer.write()
                except Refused as refusal:
                    log.error("%s", refusal.message)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _check_open_address(address: str, section: SecurityConfig, *, tokens: bool) -> None:
    """Raises ValueError if other machines can reach the address without a token or a certificate.

    Does not raise it if [security] sets `insecure`. `tokens`: True if calls need a token.
    """
    if tokens or section.tls_client_ca is not None:
        return
    if section.insecure:
        return
    if is_loopback(address.rpartition(":")[0]):
        return
    raise ValueError(
        f"refusing to listen on {address} without tokens: whoever reaches it could read and change everything. Set "
        "tokens_file in [security], or REPLAY_TOKENS_FILE; if you trust the network: --insecure, or insecure = true in "
        "[security]"
    )


def _warn_of_open_address(address: str, section: SecurityConfig, *, tokens: bool) -> None:
    """Warns if other machines can reach the address, and tokens or TLS are missing.

    `tokens`: True if calls need a token.
    """
    if is_loopback(address.rpartition(":")[0]):
        return
    if not tokens and section.tls_client_ca is None:
        log.warning(
            "listening on %s without tokens: whoever reaches it can read and change everything; set tokens_file in "
            "[security], or REPLAY_TOKENS_FILE",
            address,
        )
    if section.tls_cert is None:
        log.warning(
            "listening on %s without TLS: whoever sees its traffic can read everything%s; set tls_cert and tls_key "
            "in [security]",
            address,
            ", tokens included" if tokens else "",
        )


def _warn_of_open_metrics(address: str) -> None:
    """Warns if other machines can reach the metrics, because these are served without tokens and TLS."""
    if not is_loopback(address.rpartition(":")[0]):
        log.warning(
            "metrics at http://%s/metrics, without tokens and TLS: whoever reaches it can read names, sizes "
            "and rates of tables; set metrics_listen to one that only your monitoring reaches",
            address,
        )
