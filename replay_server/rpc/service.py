"""Service: ReplayService has all gRPC methods of replay.proto, and Listener is gRPC's server, which calls the methods.

The methods never decode the bytes of payloads.
"""

from __future__ import annotations

import errno
import logging
import resource
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_reflection.v1alpha import reflection

from replay_protos import replay_pb2 as pb
from replay_protos.framing import SERVICE
from replay_server.config import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES, LimitsConfig
from replay_server.rpc.administration import AdministrationMethods
from replay_server.rpc.auth import Authorizer, ServerCertificates
from replay_server.rpc.calls import Method, Multiplex
from replay_server.rpc.inserting import InsertMethods
from replay_server.rpc.items import ItemMethods
from replay_server.rpc.limits import Backend
from replay_server.rpc.policy import PolicyMethods
from replay_server.rpc.ring_transfer import Rings
from replay_server.rpc.sampling import SampleMethods
from replay_server.rpc.shared_memory import SharedMemoryMethods
from replay_server.storage.checkpointer import Checkpointer
from replay_server.storage.journal import Journal
from replay_server.tables.buffer import ReplayBuffer
from replay_server.telemetry import tracing

if TYPE_CHECKING:
    from replay_server.telemetry.prometheus import Latencies

log = logging.getLogger("replay_server")
# When a client leaves while gRPC writes a response to it, gRPC logs this message with a traceback. The filter drops it.
logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: "ExecuteBatchError raised" not in str(record.msg))

KEEPALIVE_MS = 20_000
"""Milliseconds. The server pings a connection that was silent for this time, and closes it if no answer comes within
this time. So it notices within 40 s that a client vanished (a lost machine, a cut cable)."""
_OWN_FILES = 64
"""The number of file descriptors that the server needs for other things than connections."""


class ReplayService:
    """All gRPC methods of replay.proto, over one buffer."""

    def __init__(
        self,
        buffer: ReplayBuffer,
        limits: LimitsConfig,
        data_dir: Path | None = None,
        journal: Journal | None = None,
        checkpointer: Checkpointer | None = None,
        shared_folder: Path | None = None,
        latencies: Latencies | None = None,
    ) -> None:
        """Makes the methods.

        journal: if given, a client gets the response to a change only after the journal has written the change.
        checkpointer: writes the checkpoints that clients ask for.
        shared_folder: the folder in which clients make sockets for shared memory; None: no shared memory.
        latencies: if given, receives the duration of each call.
        """
        durable = None if journal is None else journal.durable
        self.backend = Backend(buffer, limits, durable)
        self.sampling = SampleMethods(self.backend)
        self.administration = AdministrationMethods(self.backend, data_dir, checkpointer)
        self.methods: dict[str, Method] = {}
        """All methods of replay.proto, by name."""
        rings = Rings()
        method_groups = (
            Multiplex(self.methods),  # the loop below fills this dict
            SharedMemoryMethods(self.backend, rings, shared_folder),
            InsertMethods(self.backend, journal),
            self.sampling,
            ItemMethods(self.backend),
            PolicyMethods(self.backend),
            self.administration,
        )
        for descriptor in pb.DESCRIPTOR.services_by_name["Replay"].methods:
            name = descriptor.name
            # Exactly one of the groups has the method.
            (group,) = [group for group in method_groups if hasattr(group, name)]
            behavior = getattr(group, name)
            self.methods[name] = Method(descriptor, behavior, self.backend, rings, latencies)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Returns the handlers of all methods, for gRPC to call."""
        wrap = tracing.traced if tracing.available() else None  # None: the calls are not traced
        handlers = {name: method.handler(wrap) for name, method in self.methods.items()}
        return grpc.method_handlers_generic_handler(SERVICE, handlers)


class Listener:
    """gRPC's own server, which listens on one address and calls the methods of a ReplayService."""

    def __init__(
        self,
        service: ReplayService,
        address: str,
        limits: LimitsConfig,
        authorizer: Authorizer,
        certificates: ServerCertificates,
    ) -> None:
        """Binds the address. Raises OSError if that fails. Before `start`, no connection is accepted."""
        self._service = service
        interceptors = [] if authorizer.tokens is None else [authorizer]  # without tokens, every call may proceed
        self._server = grpc.aio.server(options=_options(limits), interceptors=interceptors)
        self._server.add_generic_rpc_handlers((service.handlers(),))
        reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), self._server)  # for grpcurl
        try:
            _check_free(address)
            credentials = certificates.credentials()
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except (RuntimeError, OSError) as error:
            raise OSError(f"cannot listen on {address}: it is in use, or not an address of this machine") from error
        host = address.rpartition(":")[0]
        self.address = f"{host}:{port}"  # if `address` has port 0, gRPC has chosen the port

    async def start(self) -> None:
        """Accepts connections from now on."""
        await self._server.start()

    async def stop(self, grace: float | None) -> None:
        """Ends endless calls, gives all other calls `grace` seconds to end, and closes all connections.

        `grace` None: all calls end at once.
        """
        self._service.backend.calls.close()
        await self._server.stop(grace)


def _check_free(address: str) -> None:
    """Raises OSError if the address is in use, or belongs to another machine.

    If gRPC found one of these two problems itself, it would also write a line to stderr. This function ignores all
    other problems, such as an unknown name, or a family of addresses that this machine lacks. gRPC finds these itself.
    """
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # gRPC sets this option, too. With it, connections of a server that has just ended do not block the address.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), int(port)))
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            raise


def _options(limits: LimitsConfig) -> list[tuple[str, int]]:
    """The settings of gRPC's server, as pairs of gRPC's name of the setting and the value."""
    return [
        ("grpc.so_reuseport", 0),  # otherwise two servers could listen on one port, and share its connections
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", -1),  # no bound
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", _most_connections(limits)),
        ("grpc.max_concurrent_streams", limits.max_calls_per_connection),
        # The time for the handshakes of TLS and HTTP/2 together. If a client takes longer, its connection is closed.
        ("grpc.server_handshake_timeout_ms", 20_000),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # clients that ping more often are disconnected
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _most_connections(limits: LimitsConfig) -> int:
    """The most connections that may be open. There are so few that the server always has free file descriptors.

    Each connection can take two descriptors, the second for a ring. Without free descriptors the server could neither
    sync nor write checkpoints, and gRPC could accept no connection.
    """
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_files == resource.RLIM_INFINITY or 2 * limits.max_connections + _OWN_FILES <= max_files:
        return limits.max_connections
    most = max(1, (max_files - _OWN_FILES) // 2)
    log.warning(
        "this process may open %d files, so at most %d connections are accepted instead of %d (max_connections): raise "
        "the limit (ulimit -n)",
        max_files,
        most,
        limits.max_connections,
    )
    return most
