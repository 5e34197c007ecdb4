"""Administration: the gRPC methods for the server and its tables as a whole, and for checkpoints."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from replay_protos import replay_pb2 as pb
from replay_server.errors import invalid, unsupported
from replay_server.rpc import info
from replay_server.rpc.calls import Call, once
from replay_server.rpc.limits import Backend
from replay_server.storage.checkpointer import Checkpointer
from replay_server.telemetry import host

_VERSION = version("replay-server")


class AdministrationMethods:
    """The gRPC methods for the server and its tables as a whole, and for checkpoints."""

    def __init__(self, backend: Backend, data_dir: Path | None, checkpointer: Checkpointer | None) -> None:
        self.backend = backend
        self.buffer = backend.buffer
        self._data_dir = data_dir
        self._checkpointer = checkpointer
        self._server_id = secrets.randbits(63)
        """A random id. Each start of the server chooses another id, so clients notice a restart."""
        self._started = self.buffer.clock()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, call: Call) -> pb.ServerInfo:
        return self.server_info(request.tables)

    def server_info(self, tables: Sequence[str] = ()) -> pb.ServerInfo:
        """Returns all facts about the server, with the tables named in `tables`, or all tables if `tables` is empty."""
        message = info.server_info(self.buffer, tables)
        message.version = _VERSION
        message.server_id = self._server_id
        message.uptime = self.buffer.clock() - self._started
        message.insert_streams = self.backend.calls.open["InsertStream"]
        message.sample_streams = self.backend.calls.open["Draw"]
        message.long_wait = info.long_wait(self.buffer, self.backend.clients)
        message.overdue.extend(info.overdue_clients(self.buffer, self.backend.clients))
        message.clients.extend(info.clients(self.buffer, self.backend.clients))
        message.time = time.time()
        message.resident_bytes = host.resident_bytes()
        message.memory_available = host.memory_available()
        if self._data_dir is not None:
            message.disk_available = host.disk_available(self._data_dir)
        return message

    @once(pb.TableInfo)
    async def UpdateTable(self, request: pb.UpdateTableRequest, call: Call) -> pb.TableInfo:
        """Changes settings of a table while the server runs."""
        try:
            changes = json.loads(request.changes)
        except (ValueError, RecursionError) as error:
            raise invalid(f"changes must be a JSON object: {str(error)[:200]}") from error
        if not isinstance(changes, dict):
            raise invalid(f"changes must be a JSON object, not {request.changes[:40]!r}")
        table = self.buffer.update_table(request.table, changes)
        return info.table_info(self.buffer, table)

    @once(pb.ResetResponse)
    async def Reset(self, request: pb.ResetRequest, call: Call) -> pb.ResetResponse:
        removed = self.buffer.reset(request.table)
        return pb.ResetResponse(removed=removed)

    async def CreateCheckpoint(self, request: pb.CreateCheckpointRequest, call: Call) -> pb.CheckpointInfo:
        checkpoint = await self._checkpoints().write(request.name)
        return info.checkpoint(checkpoint)

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, call: Call) -> pb.ListCheckpointsResponse:
        listed = await self._checkpoints().listed(request.verify)
        return pb.ListCheckpointsResponse(checkpoints=[info.checkpoint(entry) for entry in listed])

    def _checkpoints(self) -> Checkpointer:
        """Returns the checkpointer. Raises Refused if the server has none."""
        if self._checkpointer is None:
            raise unsupported(
                "this server has no place for checkpoints: set dir in [checkpoints], or data_dir in [server]"
            )
        return self._checkpointer
