"""Backend: the tables, the journal, and the bounds that clients share. All gRPC methods work on one backend."""

from __future__ import annotations

from replay_server.config import LimitsSection
from replay_server.limits import MAX_ROWS_OUTSTANDING
from replay_server.rpc.budget import Budget
from replay_server.rpc.clients import Clients
from replay_server.rpc.memory_guard import MemoryGuard
from replay_server.rpc.open_calls import OpenCalls
from replay_server.rpc.unread import Unread
from replay_server.storage.journal import Journal
from replay_server.tables.buffer import ReplayBuffer


class Backend:
    def __init__(self, buffer: ReplayBuffer, limits: LimitsSection, journal: Journal | None) -> None:
        """With a journal no client is told of a change before it is written."""
        self.buffer = buffer
        self.limits = limits
        self.journal = journal
        self.calls = OpenCalls(limits)
        # An item of the largest size must fit, or it could never be received.
        unfinished = max(limits.max_unfinished_bytes, buffer.max_payload_bytes)
        self.unfinished = Budget(unfinished, "bytes of items that are not complete (max_unfinished_bytes)")
        self.waiting = Budget(limits.max_waiting_bytes, "bytes of items that wait for their table (max_waiting_bytes)")
        self.outstanding = Budget(MAX_ROWS_OUTSTANDING, "samples under leases or drawn ahead")
        self.memory = MemoryGuard(limits.memory_share)
        # With a journal the payloads lie in a file.
        self.unread = Unread(limits.max_unread_bytes, lambda: buffer.bytes if journal is None else 0)
        self.clients = Clients(buffer.clock)
        self.draining = False
        """Whether items with new keys are refused. Another thread may set it."""
        self.insert_streams = 0
        """Open now."""
        self.sample_streams = 0
        """Open now."""

    async def durable(self) -> None:
        """Returns when all changes until now are written; at once without a journal."""
        if self.journal is not None:
            await self.journal.durable()
