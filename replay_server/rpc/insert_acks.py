"""Insert acks: holds back the response to decided rows until a commit has written them.

* A row is acknowledged only after it is written, or if its key was written before.
* Responses keep the order of the rows. The rows that one commit writes share one response.
* The stream goes on inserting while responses wait for their commit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from replay_protos import replay_pb2 as pb
from replay_server.errors import Refused, storage_failed
from replay_server.storage.journal import Journal

MAX_UNWRITTEN_BYTES = 64 << 20
"""Payload bytes of the whole server that wait to be written. Above that a stream waits before it inserts more."""
MAX_UNANSWERED = 1024
"""Responses of one stream that wait for a commit, or for a client that does not read."""


@dataclass(slots=True)
class Decided:
    """Rows of one stream that are inserted or refused, in order."""

    keys: list[int] = field(default_factory=list)
    errors: list[pb.RowError] = field(default_factory=list)
    """Of the rows that are refused."""
    evicted: list[tuple[int, str]] = field(default_factory=list)
    """Key and table of the rows that left a table at once."""

    def add(self, key: int, refusal: Refused | None) -> None:
        self.keys.append(key)
        if refusal is not None:
            self.refuse(key, refusal)

    def refuse(self, key: int, refusal: Refused) -> None:
        self.errors.append(pb.RowError(key=key, code=refusal.code, message=refusal.message, reason=refusal.reason))

    def extend(self, later: Decided) -> None:
        self.keys.extend(later.keys)
        self.errors.extend(later.errors)
        self.evicted.extend(later.evicted)

    def response(self) -> pb.InsertResponse:
        evicted = [pb.EvictedRow(key=key, table=table) for key, table in self.evicted]
        return pb.InsertResponse(decided=len(self.keys), errors=self.errors, evicted=evicted)


async def acknowledge(journal: Journal, decisions: AsyncIterator[Decided]) -> AsyncIterator[Decided]:
    """The same decisions, each once its rows are written. Those that one commit covers are joined."""
    unanswered: deque[tuple[asyncio.Future[None], Decided]] = deque()
    decided_more, answered = asyncio.Event(), asyncio.Event()

    async def collect() -> None:
        async for decided in decisions:
            unanswered.append((ticket := journal.ticket(), decided))
            decided_more.set()
            if journal.backlog > MAX_UNWRITTEN_BYTES:
                await asyncio.shield(ticket)
            while len(unanswered) >= MAX_UNANSWERED:
                answered.clear()
                await answered.wait()

    collector = asyncio.create_task(collect())
    collector.add_done_callback(lambda _: decided_more.set())
    try:
        while unanswered or not collector.done():
            if not unanswered:
                decided_more.clear()
                await decided_more.wait()
                continue
            ticket, decided = unanswered.popleft()
            await asyncio.shield(ticket)
            while unanswered and unanswered[0][0] is ticket:
                decided.extend(unanswered.popleft()[1])
            refuse_rolled_back(decided, journal)
            yield decided
            answered.set()
        await collector
    finally:
        collector.cancel()
        await asyncio.gather(collector, return_exceptions=True)


def refuse_rolled_back(decided: Decided, journal: Journal) -> None:
    """Refuses the rows that could not be written.

    A response can wait for a later commit than the one that failed with its insert. The journal therefore remembers
    the keys of inserts that it took back.
    """
    if not (rolled_back := journal.rolled_back(decided.keys)):
        return
    refused = {error.key for error in decided.errors}
    for key in decided.keys:
        if key in rolled_back and key not in refused:
            message = f"item {key} could not be written: the disk of data_dir is full or fails"
            decided.refuse(key, storage_failed(message))
