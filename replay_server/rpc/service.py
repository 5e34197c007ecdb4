"""ReplayService: all gRPC methods of replay.proto, by name, and their registration. Payload bytes are never decoded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from replay_protos import replay_pb2 as pb
from replay_protos.framing import SERVICE, frame_reader, write_frame
from replay_server.config import LimitsSection
from replay_server.rpc.administration import AdministrationMethods
from replay_server.rpc.backend import Backend
from replay_server.rpc.inserting import InsertMethods
from replay_server.rpc.items import ItemMethods
from replay_server.rpc.policy import PolicyMethods
from replay_server.rpc.rpc_methods import parser
from replay_server.rpc.sampling import SampleMethods
from replay_server.rpc.shared_memory import SharedMemoryMethods
from replay_server.rpc.short_calls import ShortCalls
from replay_server.storage.checkpointer import Checkpointer
from replay_server.storage.journal import Journal
from replay_server.tables.buffer import ReplayBuffer
from replay_server.telemetry import tracing
from replay_server.telemetry.latency import Latencies

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
    ) -> None:
        """With a journal no client is told of a change before it is written.

        `shared_folder` is that of SharedMemoryMethods.
        """
        self.backend = Backend(buffer, limits, journal)
        self.sampling = SampleMethods(self.backend)
        self.administration = AdministrationMethods(self.backend, data_dir, checkpointer)
        self.shared_memory = SharedMemoryMethods(self.backend, shared_folder)
        self.short_calls = ShortCalls(self.backend)
        groups = (
            self.shared_memory,
            self.short_calls,
            InsertMethods(self.backend),
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
        """Ends the calls that would not end by themselves, and gives clients no more rings."""
        self.backend.calls.close()
        self.shared_memory.close()


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
