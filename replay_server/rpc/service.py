"""Service: all gRPC methods of replay.proto, by name, and gRPC's own server at one address, which calls them.

Payload bytes are never decoded.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection

from replay_protos import replay_pb2 as pb
from replay_protos.framing import SERVICE, frame_reader, write_frame
from replay_server.config import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES, LimitsSection
from replay_server.rpc.administration import AdministrationMethods
from replay_server.rpc.auth import Authorizer, ServerCertificates, TokenInterceptor
from replay_server.rpc.backend import Backend, parser
from replay_server.rpc.inserting import InsertMethods
from replay_server.rpc.items import ItemMethods
from replay_server.rpc.policy import PolicyMethods
from replay_server.rpc.sampling import SampleMethods
from replay_server.rpc.shared_memory import SharedMemoryMethods
from replay_server.rpc.short_calls import ShortCalls
from replay_server.storage.checkpointer import Checkpointer
from replay_server.storage.journal import Journal
from replay_server.tables.buffer import ReplayBuffer
from replay_server.telemetry import tracing

if TYPE_CHECKING:
    from replay_server.telemetry.prometheus import Latencies

log = logging.getLogger("replay_server")
# gRPC logs this, with a traceback, when a client leaves while a response is written to it.
logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: "ExecuteBatchError raised" not in str(record.msg))

_OWN_FILES = 64
"""File descriptors that the server needs for itself."""
_METHODS = pb.DESCRIPTOR.services_by_name["Replay"].methods


class ReplayService:
    def __init__(
        self,
        buffer: ReplayBuffer,
        limits: LimitsSection,
        data_dir: Path | None = None,
        journal: Journal | None = None,
        checkpointer: Checkpointer | None = None,
        shared_folder: Path | None = None,
        recipe: str = "",
    ) -> None:
        """With a journal no client is told of a change before it is written.

        `shared_folder` is that of SharedMemoryMethods, `recipe` the name that ServerInfo has.
        """
        self.backend = Backend(buffer, limits, None if journal is None else journal.durable)
        self.sampling = SampleMethods(self.backend)
        self.administration = AdministrationMethods(self.backend, data_dir, checkpointer, recipe)
        self.shared_memory = SharedMemoryMethods(self.backend, shared_folder)
        self.short_calls = ShortCalls(self.backend)
        groups = (
            self.shared_memory,
            self.short_calls,
            InsertMethods(self.backend, journal),
            self.sampling,
            ItemMethods(self.backend),
            PolicyMethods(self.backend),
            self.administration,
        )
        self.methods: dict[str, Callable[..., Any]] = {
            method.name: getattr(group, method.name)
            for method in _METHODS
            for group in groups
            if hasattr(group, method.name)
        }

    def close(self) -> None:
        """Ends the calls that would not end by themselves."""
        self.backend.calls.close()


def add_service(service: ReplayService, server: grpc.aio.Server, latencies: Latencies | None = None) -> None:
    """Registers every method of replay.proto. Messages with a field `payloads` are read and written as Frames.

    With `latencies` every call is timed.
    """
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    handlers = {}
    for method in _METHODS:
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        behavior = service.shared_memory.carry(method.name, service.methods[method.name])
        if tracing.available() and not method.client_streaming and method.name != "WatchPolicy":
            behavior = tracing.traced(method.name, behavior)
        if latencies is not None and method.name == "WatchPolicy":
            behavior = latencies.of_stream(method.name, behavior, timed=False)
        elif latencies is not None and method.client_streaming:
            behavior = latencies.of_stream(method.name, behavior, timed=True)
        elif latencies is not None:
            behavior = latencies.of_call(method.name, behavior)
        parse = parser(frame_reader(request) if "payloads" in method.input_type.fields_by_name else request.FromString)
        serialize = write_frame if "payloads" in method.output_type.fields_by_name else response.SerializeToString
        service.short_calls.add(method.name, behavior, parse, serialize)
        kind = kinds[method.client_streaming, method.server_streaming]
        handlers[method.name] = kind(behavior, parse, serialize)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


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
        self._service.close()
        await self._server.stop(grace)

    def _open(self, address: str) -> int:
        """Makes a gRPC server that is not started yet; the port that it got."""
        interceptors = [] if self._authorizer.tokens is None else [TokenInterceptor(self._authorizer)]
        self._server = grpc.aio.server(options=_options(self._limits), interceptors=interceptors)
        add_service(self._service, self._server, self._latencies)
        reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), self._server)  # for grpcurl
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
