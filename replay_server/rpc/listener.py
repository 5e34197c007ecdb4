"""Listener: gRPC's own server at one address, with the service, health checks, tokens and TLS."""

from __future__ import annotations

import logging
import resource

import grpc

from replay_server.config import LimitsSection
from replay_server.limits import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES
from replay_server.rpc.auth import Authorizer, TokenInterceptor
from replay_server.rpc.health import add_health
from replay_server.rpc.service import ReplayService, add_service
from replay_server.rpc.tls import ServerCertificates
from replay_server.telemetry.latency import Latencies

log = logging.getLogger("replay_server")
# gRPC logs this, with a traceback, when a client leaves while a response is written to it.
logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: "ExecuteBatchError raised" not in str(record.msg))

_OWN_FILES = 64
"""File descriptors that the server needs for itself."""


class Listener:
    def __init__(
        self,
        service: ReplayService,
        address: str,
        limits: LimitsSection,
        authorizer: Authorizer,
        certificates: ServerCertificates,
        latencies: Latencies | None,
    ) -> None:
        """Takes the address, and accepts no connection before `start`. Raises OSError if it cannot be had."""
        self._service = service
        self._limits = limits
        self._authorizer = authorizer
        self._certificates = certificates
        self._latencies = latencies
        host, _, _ = address.rpartition(":")
        self.address = f"{host}:{self._open(address)}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace: float | None) -> None:
        """Ends endless calls, lets the others end for `grace` seconds, and closes all connections."""
        self._health.drain()
        self._service.close()
        await self._server.stop(grace)

    def _open(self, address: str) -> int:
        """Makes a gRPC server that is not started yet; the port that it got."""
        interceptors = [] if self._authorizer.tokens is None else [TokenInterceptor(self._authorizer)]
        self._server = grpc.aio.server(options=_options(self._limits), interceptors=interceptors)
        add_service(self._service, self._server, self._latencies)
        self._health = add_health(self._server)
        try:
            if (credentials := self._certificates.credentials()) is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: it is in use, or not an address of this machine") from error


def _options(limits: LimitsSection) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind the same address
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", _connections(limits)),
        ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
        ("grpc.server_handshake_timeout_ms", 20_000),  # of TLS and HTTP/2: a connection that says nothing is closed
        # Clients that vanished without a word (a lost machine, a cut cable) are noticed within 40 s.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _connections(limits: LimitsSection) -> int:
    """How many connections may be open. Each can take two file descriptors, the second one for a ring.

    Without descriptors the server could neither sync nor write checkpoints, and gRPC could accept nobody.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY or 2 * limits.max_connections + _OWN_FILES <= files:
        return limits.max_connections
    most = max(1, (files - _OWN_FILES) // 2)
    log.warning(
        "this process may open %d files, so at most %d connections are accepted instead of %d (max_connections): raise "
        "the limit (ulimit -n)",
        files,
        most,
        limits.max_connections,
    )
    return most
