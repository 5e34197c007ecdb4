"""Inserting: the methods Insert and InsertStream, as a pipeline of generators.

    read_messages  ──▶  decide       ──▶  acknowledge      ──▶  the client
    messages.py         admit, wait       commit, answer

* Rows are decided in the order in which they came.
* What has been decided is passed on before each wait and at the end of each message.
* A row that is refused changes nothing, and does not affect the rows after it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame
from replay_server.errors import Refused, busy, draining, invalid, storage_failed
from replay_server.rpc.backend import Backend, endless, unary
from replay_server.rpc.clients import Context, Seen, Side
from replay_server.rpc.messages import InsertMessage, read_messages
from replay_server.storage.journal import Journal
from replay_server.tables.buffer import PendingInsert
from replay_server.tables.items import InsertBatch
from replay_server.tables.waiting import deadline_at, result_of

ROWS_PER_YIELD = 256
"""Rows inserted before other requests may run: rows that are inserted one by one can take seconds."""

T = TypeVar("T")


class InsertMethods:
    def __init__(self, backend: Backend, journal: Journal | None) -> None:
        self.backend = backend
        self._journal = journal

    @unary
    async def Insert(self, request: Frame[pb.InsertRequest], context: Context) -> pb.InsertResponse:
        decided = Decided()
        with self.backend.clients.calling(context, Side.GENERATOR) as seen:
            async for part in self._decisions(_once(request), context.peer(), seen):
                decided.extend(part)
            if self._journal is not None:
                await self._journal.durable()
                refuse_rolled_back(decided, self._journal)
        if len(decided.keys) < len(request.head.keys):
            raise invalid("the payload is shorter than payload_sizes says")
        return decided.response()

    @endless
    async def InsertStream(
        self, requests: AsyncIterator[Frame[pb.InsertRequest]], context: Context
    ) -> AsyncIterator[pb.InsertResponse]:
        self.backend.insert_streams += 1
        try:
            with self.backend.clients.calling(context, Side.GENERATOR) as seen:
                decisions = self._decisions(requests, context.peer(), seen)
                if self._journal is not None:
                    decisions = acknowledge(self._journal, decisions)
                async for decided in decisions:
                    yield decided.response()
        finally:
            self.backend.insert_streams -= 1

    def _decisions(
        self, requests: AsyncIterator[Frame[pb.InsertRequest]], client: str, seen: Seen
    ) -> AsyncIterator[Decided]:
        backend = self.backend
        messages = read_messages(
            requests, backend.buffer.max_payload_bytes, backend.unfinished, client, backend.limits.stall_timeout
        )
        return decide(backend, messages, client, seen)


async def decide(
    backend: Backend, messages: AsyncIterator[InsertMessage], client: str, seen: Seen
) -> AsyncIterator[Decided]:
    """Inserts or refuses each row, and waits for its tables where that is necessary."""
    async for message in messages:
        seen()
        decided, first = Decided(), True
        for batch in _short_batches(message.batches):
            at = 0
            while at < len(batch):
                if not first:
                    await asyncio.sleep(0)
                first = False
                evicted: list[tuple[int, str]] = []
                inserted, next_row = _admit(backend, message, batch[at:] if at else batch, evicted)
                decided.keys.extend(batch.keys[at : at + inserted])
                decided.evicted.extend(evicted)
                at += inserted
                if next_row is None:
                    continue
                if isinstance(next_row, PendingInsert):
                    if decided.keys:
                        yield decided
                        decided = Decided()
                    evicted.clear()
                    next_row = await _wait(backend, next_row, message.nbytes, client)
                    decided.evicted.extend(evicted)
                decided.add(batch.keys[at], next_row)
                at += 1
        yield decided


def _admit(
    backend: Backend, message: InsertMessage, batch: InsertBatch, evicted: list[tuple[int, str]]
) -> tuple[int, PendingInsert | Refused | None]:
    """Inserts rows until one is refused or must wait: how many are inserted, and what became of the row after them."""
    if message.refusal is not None:
        return 0, message.refusal
    buffer = backend.buffer
    full = backend.memory.why_full()
    if backend.draining or full:
        key = batch.keys[0]
        if key not in buffer.items and not buffer.known_keys.any_of([key]):  # otherwise it is a retry
            return 0, busy(full) if full else draining(key)
        batch = batch[:1]
    try:
        return buffer.insert(batch, deadline_at(buffer.clock(), message.timeout), evicted)
    except Refused as refusal:
        return 0, refusal


async def _wait(backend: Backend, pending: PendingInsert, nbytes: int, client: str) -> Refused | None:
    """Waits until the row is inserted (None) or refused. The payloads of its message count as waiting meanwhile."""
    buffer = backend.buffer
    try:
        with backend.waiting.held(client, nbytes):
            await result_of(pending, buffer.clock(), buffer.time_out, buffer.abandon)
    except Refused as refusal:
        buffer.abandon(pending)  # it is still in line if the budget was what refused it
        return refusal
    return None


def _short_batches(batches: Iterable[InsertBatch]) -> Iterator[InsertBatch]:
    for batch in batches:
        if len(batch) <= ROWS_PER_YIELD:
            yield batch
        else:
            yield from (batch[at : at + ROWS_PER_YIELD] for at in range(0, len(batch), ROWS_PER_YIELD))


async def _once(request: T) -> AsyncIterator[T]:
    yield request


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
