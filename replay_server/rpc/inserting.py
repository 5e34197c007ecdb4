"""Inserting: the methods Insert and InsertStream, as a pipeline of generators.

    read_messages  ──▶  decide       ──▶  acknowledge      ──▶  the client
    payloads            admit, wait       commit, answer

A message has either new items or segments of items that are there (`extending.py`). Both pass here.

* A message is passed on when its last payload byte has come. A stream that ends before that never sent it.
* A message that breaks a convention of replay.proto ends its stream. The messages before it stand.
* Payload bytes of a message that is not complete count against a budget that clients share.
* Rows are decided in the order in which they came.
* What has been decided is passed on before each wait and at the end of each message.
* A row that is refused changes nothing, and does not affect the rows after it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np

from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame
from replay_protos.label_columns import labels_of_rows
from replay_protos.labels import Labels
from replay_server.config import MAX_ROWS
from replay_server.errors import Refused, busy, deadline, draining, invalid, storage_failed, too_large
from replay_server.rpc.backend import Backend, endless, unary
from replay_server.rpc.clients import Context, Seen, Side
from replay_server.rpc.extending import SegmentRow, append, segments_of
from replay_server.storage.journal import Journal
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.columns import FloatArray
from replay_server.tables.extensions.construction import Construction
from replay_server.tables.items import InsertBatch, Payload
from replay_server.tables.rules import PendingInsert
from replay_server.tables.waiting import deadline_at, result_of

MAX_CLOSES = 64
"""Batches that one item closes."""
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
        with self.backend.clients.calling(context, None) as seen:
            async for part in self._decisions(_once(request), context.peer(), seen):
                decided.extend(part)
            if self._journal is not None:
                await asyncio.wait([ticket := self._journal.ticket()])
                refuse_unwritten(decided, self._journal, ticket)
        if len(decided) < len(request.head.keys):
            raise invalid("the payload is shorter than payload_sizes says")
        return decided.response()

    @endless
    async def InsertStream(
        self, requests: AsyncIterator[Frame[pb.InsertRequest]], context: Context
    ) -> AsyncIterator[pb.InsertResponse]:
        self.backend.insert_streams += 1
        try:
            with self.backend.clients.calling(context, None) as seen:
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
        return decide(self.backend, read_messages(self.backend, requests, client), client, seen)


@dataclass(slots=True)  # not frozen: that would make it four times as slow to create
class InsertMessage:
    """The items of one InsertRequest, with all of their payloads."""

    batches: list[InsertBatch]
    """All new items in order. Consecutive rows that go to the same tables are one batch."""
    segments: list[SegmentRow]
    """The segments, where the message extends items that are there."""
    timeout: float | None
    """Seconds that each row may wait for its tables; None: for ever."""
    refusal: Refused | None
    """Why all rows are refused: the payloads are too large, or no room for them came free in time. They were read, to
    reach the message after them, and not kept."""
    nbytes: int
    """Payload bytes that are kept."""


async def read_messages(
    backend: Backend, requests: AsyncIterator[Frame[pb.InsertRequest]], client: str
) -> AsyncIterator[InsertMessage]:
    """The messages of a stream of requests. Raises Refused for a request that breaks the conventions of replay.proto.

    `client` names the connection. A client that sends no payload bytes for `stall_timeout` seconds in the middle of a
    message is refused.
    """
    max_bytes, unfinished, stall = backend.buffer.max_payload_bytes, backend.unfinished, backend.limits.stall_timeout
    async for request, payloads in requests:
        _check_columns(request)
        rows = len(request.keys)
        sizes = request.payload_sizes[:] or [0] * rows  # a slice takes half the time of list()
        total = sum(sizes)
        timeout = request.timeout if request.HasField("timeout") else None
        chunks = list(payloads)
        missing = total - sum(map(len, chunks))
        refusal: Refused | None = None
        if total > max_bytes:
            refusal = too_large(
                f"{total} bytes in one message; this server takes at most {max_bytes} (max_payload_bytes)"
            )
        if missing > 0:
            with ExitStack() as held:
                try:
                    if refusal is None:
                        await unfinished.take_in_turn(client, total, timeout)
                        held.callback(unfinished.give_back, client, total)
                except Refused as no_room_in_time:
                    refusal = no_room_in_time
                rest = await _read_rest(requests, chunks if refusal is None else None, missing, stall)
            if rest is None:
                return
            missing = rest
        if missing < 0:
            raise invalid(f"{-missing} payload bytes more than payload_sizes says")
        row_payloads: list[Payload] = [()] * rows if refusal else _payloads_of_rows(chunks, sizes)
        labels = _labels(request)
        message = InsertMessage([], [], timeout, refusal, 0 if refusal else total)
        if request.extend:
            message.segments = segments_of(request, row_payloads, labels)
        else:
            message.batches = list(_by_tables(request, [0] * rows if refusal else sizes, row_payloads, labels))
        yield message


def _check_columns(request: pb.InsertRequest) -> None:
    rows = len(request.keys)
    if rows > MAX_ROWS:
        raise invalid(f"{rows} items in one message: at most {MAX_ROWS}")
    if rows == 0:
        raise invalid("a message without items, and no item before it lacks payload bytes")
    if request.closes and (rows > 1 or request.extend):
        raise invalid(
            f"{rows} rows that close batches: send such an item in a message of its own, and not as a segment"
        )
    if len(request.closes) > MAX_CLOSES:
        raise invalid(f"an item closes {len(request.closes)} batches: at most {MAX_CLOSES}")
    for name, entries in (("policy_versions", request.policy_versions), ("payload_sizes", request.payload_sizes)):
        if len(entries) not in (0, rows):
            raise invalid(f"{name} has {len(entries)} entries for {rows} items")


def _labels(request: pb.InsertRequest) -> list[Labels] | None:
    try:
        return labels_of_rows(request.columns, request.tags, len(request.keys))
    except ValueError as error:
        raise invalid(str(error)) from None


async def _read_rest(
    requests: AsyncIterator[Frame[pb.InsertRequest]],
    chunks: list[bytes | memoryview] | None,
    missing: int,
    stall: float,
) -> int | None:
    """Reads the missing bytes of a message and appends them to `chunks`; None: they are not kept.

    Returns how many bytes are missing after that: 0, or below 0 if too many came. None: the stream ended before.
    """
    total = missing
    while missing > 0:
        try:
            async with asyncio.timeout(stall):
                more = await anext(requests, None)
        except TimeoutError:
            raise deadline(
                f"{missing} of {total} payload bytes are missing: the server waits up to {stall:g} s (stall_timeout) "
                f"for the next bytes"
            ) from None
        if more is None:
            return None
        if more.head.keys or not more.payloads:
            raise invalid(f"{missing} of {total} payload bytes are missing")
        missing -= sum(map(len, more.payloads))
        if chunks is not None:
            chunks.extend(more.payloads)
    return missing


def _payloads_of_rows(chunks: Sequence[bytes | memoryview], sizes: list[int]) -> list[Payload]:
    """Divides the payload bytes of a message among its rows.

    The chunks of a single row stay as they came, and so do chunks that are one for each row. Other rows that share a
    message get copies, because a view of a small item would keep the whole message in memory.
    """
    if len(sizes) == 1:
        return [tuple(chunks)]
    if len(chunks) == len(sizes) and all(type(chunk) is bytes for chunk in chunks) and [*map(len, chunks)] == sizes:
        return [(chunk,) for chunk in chunks]
    joined = memoryview(chunks[0] if len(chunks) == 1 else b"".join(chunks))
    return [(bytes(joined[end - size : end]),) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _by_tables(
    request: pb.InsertRequest, sizes: list[int], payloads: list[Payload], labels: list[Labels] | None
) -> Iterator[InsertBatch]:
    """The batches of a message, cut where the tables change."""
    rows = len(request.keys)
    priorities: dict[str, FloatArray] = {}
    some: dict[str, list[int]] = {}
    for target in request.targets:
        if len(target.rows) > rows:
            raise invalid(f"{len(target.rows)} rows of table {target.table[:100]!r} in a message of {rows} items")
        table, chosen, numbers = target.table, target.rows[:], target.priorities[:]
        if table in priorities:
            raise invalid(f"table {table[:100]!r} is a target twice")
        n = len(chosen) or rows
        if numbers and len(numbers) != n:
            raise invalid(f"{len(numbers)} priorities for {n} items of table {table[:100]!r}")
        given = np.array(numbers or [1.0] * n, dtype=np.float64)
        priorities[table] = given
        if chosen:
            if max(chosen) >= rows:
                raise invalid(f"row {max(chosen)} of table {table[:100]!r} in a message of {rows} items")
            some[table] = chosen
            priorities[table] = np.ones(rows)
            priorities[table][chosen] = given
    batch = InsertBatch(
        keys=request.keys[:],
        priorities=priorities,
        policy_versions=np.array(request.policy_versions[:] or [0] * rows, dtype=np.int64),
        sizes=np.array(sizes, dtype=np.int64),
        payloads=payloads,
        permits=request.permits,
        labels=labels,
        closes=tuple(dict.fromkeys(request.closes)),
    )
    if not some:
        yield batch
        return
    goes_TR = np.ones((len(priorities), rows), dtype=np.bool_)
    for row_T, table in enumerate(priorities):
        if table in some:
            goes_TR[row_T] = False
            goes_TR[row_T, some[table]] = True
    cuts = [0, *(np.flatnonzero((goes_TR[:, 1:] != goes_TR[:, :-1]).any(axis=0)) + 1).tolist(), rows]
    for start, stop in pairwise(cuts):
        part = batch[start:stop]
        there = zip(part.priorities.items(), goes_TR[:, start].tolist(), strict=True)
        part.priorities = {table: given for (table, given), goes in there if goes}
        yield part


async def decide(
    backend: Backend, messages: AsyncIterator[InsertMessage], client: str, seen: Seen
) -> AsyncIterator[Decided]:
    """Inserts, appends or refuses each row, and waits for its tables where that is necessary."""
    async for message in messages:
        seen(_side(backend.buffer, message.segments))
        decided, first = Decided(), True
        for row, segment in enumerate(message.segments, 1):
            _append(backend, message, segment, decided)
            if row % ROWS_PER_YIELD == 0:
                await asyncio.sleep(0)
        for batch in _short_batches(message.batches):
            at = 0
            while at < len(batch):
                if not first:
                    await asyncio.sleep(0)
                first = False
                inserted, next_row = _admit(backend, message, batch[at:] if at else batch)
                decided.keys.extend(batch.keys[at : at + inserted])
                decided.take_evicted(batch)
                at += inserted
                if next_row is None:
                    continue
                if isinstance(next_row, PendingInsert) and decided.keys:
                    try:
                        yield decided
                    except GeneratorExit:  # the client went away; nobody waits for the row
                        backend.buffer.abandon(next_row)
                        raise
                    decided = Decided()
                if isinstance(next_row, PendingInsert):
                    next_row = await _wait(backend, next_row, message.nbytes, client)
                    decided.take_evicted(batch)
                decided.add(batch.keys[at], next_row)
                at += 1
        yield decided


def _side(buffer: ReplayBuffer, segments: Sequence[SegmentRow]) -> Side:
    """Who sends a message. Generators extend groups under construction, and teachers all others."""
    construction = Construction.of(buffer)
    built = construction is not None and bool(segments) and segments[0].key in construction.marked
    return Side.TEACHER if segments and not built else Side.GENERATOR


def _append(backend: Backend, message: InsertMessage, segment: SegmentRow, decided: Decided) -> None:
    try:
        if message.refusal is not None:
            raise message.refusal
        unchanged = append(backend, segment)
    except Refused as refusal:
        decided.add(segment.key, refusal)
        return
    if unchanged is not None:
        decided.unchanged.append(unchanged)
    if unchanged is not None and unchanged.missing:
        decided.missing += 1
    else:
        decided.add(segment.key, None)


def _admit(backend: Backend, message: InsertMessage, batch: InsertBatch) -> tuple[int, PendingInsert | Refused | None]:
    """Inserts rows until one is refused or must wait: how many are inserted, and what became of the row after them."""
    if message.refusal is not None:
        return 0, message.refusal
    buffer = backend.buffer
    full = backend.memory.why_full(message.nbytes)
    if backend.draining or full:
        key = batch.keys[0]
        if key not in buffer.items and not buffer.known_keys.any_of([key]):  # otherwise it is a retry
            return 0, busy(full) if full else draining(key)
        batch = batch[:1]
    try:
        return buffer.insert(batch, deadline_at(buffer.clock(), message.timeout))
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
    """Rows of one stream that are inserted, appended or refused, in order."""

    keys: list[int] = field(default_factory=list)
    """Of all rows, but for the segments of items that are gone."""
    missing: int = 0
    """How many segments those are. Nothing about them has to be written."""
    errors: list[pb.RowError] = field(default_factory=list)
    """Of the rows that are refused."""
    evicted: list[tuple[int, str]] = field(default_factory=list)
    """Key and table of the rows that left a table at once."""
    unchanged: list[pb.UnchangedRow] = field(default_factory=list)
    """The segments that were not appended, and not refused either."""

    def __len__(self) -> int:
        return len(self.keys) + self.missing

    def add(self, key: int, refusal: Refused | None) -> None:
        self.keys.append(key)
        if refusal is not None:
            self.refuse(key, refusal)

    def take_evicted(self, batch: InsertBatch) -> None:
        self.evicted.extend(batch.evicted)
        batch.evicted.clear()

    def refuse(self, key: int, refusal: Refused) -> None:
        self.errors.append(pb.RowError(key=key, code=refusal.code, message=refusal.message, reason=refusal.reason))

    def extend(self, later: Decided) -> None:
        self.keys.extend(later.keys)
        self.missing += later.missing
        self.errors.extend(later.errors)
        self.evicted.extend(later.evicted)
        self.unchanged.extend(later.unchanged)

    def response(self) -> pb.InsertResponse:
        evicted = [pb.EvictedRow(key=key, table=table) for key, table in self.evicted]
        return pb.InsertResponse(decided=len(self), errors=self.errors, evicted=evicted, unchanged=self.unchanged)


async def acknowledge(journal: Journal, decisions: AsyncIterator[Decided]) -> AsyncIterator[Decided]:
    """The same decisions, each once its rows are written. Those that one commit covers are joined."""
    unanswered: deque[tuple[asyncio.Future[None], Decided]] = deque()
    decided_more, answered = asyncio.Event(), asyncio.Event()

    async def collect() -> None:
        async for decided in decisions:
            unanswered.append((ticket := journal.ticket(), decided))
            decided_more.set()
            if journal.backlog > MAX_UNWRITTEN_BYTES:
                await asyncio.wait([ticket])
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
            await asyncio.wait([ticket])
            while unanswered and unanswered[0][0] is ticket:
                decided.extend(unanswered.popleft()[1])
            refuse_unwritten(decided, journal, ticket)
            yield decided
            answered.set()
        await collector
    finally:
        collector.cancel()
        await asyncio.gather(collector, return_exceptions=True)


def refuse_unwritten(decided: Decided, journal: Journal, ticket: asyncio.Future[None]) -> None:
    """Refuses the rows that could not be written and were rolled back. The ticket is done.

    A response can wait for a later commit than the one that failed with its insert. The journal therefore remembers
    the keys of inserts that it took back. Raises Refused if that commit failed with other rows, which are there: the
    client may send all rows again, with the same keys.
    """
    if rolled_back := journal.rolled_back(decided.keys):
        refused = {error.key for error in decided.errors}
        for key in decided.keys:
            if key in rolled_back and key not in refused:
                message = f"item {key} could not be written: the disk of data_dir is full or fails"
                decided.refuse(key, storage_failed(message))
    if len(decided.errors) < len(decided.keys):
        ticket.result()
