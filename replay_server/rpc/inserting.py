"""Inserting: the methods Insert and InsertStream. They add new items, and append segments to items on the server.

    Inserts                  reads messages, and decides each row, which means to insert or to refuse it
    acknowledged             in durable mode, waits until the decided rows are written
    the client               receives the answers

* A message is decided when its last payload byte has come. If its stream ends before that, the message has no effect.
* A message that breaks a convention of replay.proto ends its stream. The messages before it keep their effect.
* Payload bytes of a message that is not complete count against a budget that clients share.
* Rows are decided in the order in which they came. A new item may have to wait for its tables. A segment never waits.
* Decided rows are answered before each wait and at the end of each message.
* A row that is refused changes nothing, and does not affect the rows after it.
* A server that drains still accepts segments, and items that close batches, because these belong to items that it has.

A segment is not appended if the item already has one of the segment's columns. So if two processes send the same
column, the item keeps the column that came first. If a client sends a segment again because it got no answer, the item
may have the columns of the first attempt. So that the client then gets the answer to its first attempt, each segment
has a number, under which the server remembers the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise

import numpy as np

from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame
from replay_protos.label_columns import labels_of_rows
from replay_protos.labels import NO_LABELS, Labels
from replay_protos.words import counted
from replay_server.config import MAX_ROWS
from replay_server.errors import Refused, busy, deadline, draining, invalid, storage_failed, too_large
from replay_server.rpc.calls import Call, first_answer
from replay_server.rpc.clients import ClientRole, OnMessage
from replay_server.rpc.limits import Backend
from replay_server.storage.journal import Journal
from replay_server.tables.columns import FloatArray
from replay_server.tables.extensions.permit_tables import PermitTables
from replay_server.tables.rules import PendingInsert
from replay_server.tables.table import InsertBatch, Payload
from replay_server.tables.waiting import deadline_at, result_of

ROWS_PER_YIELD = 256
"""Rows that are inserted before other requests may run. To insert all rows of a message without a break can take
seconds, if they must be inserted singly."""
MAX_UNWRITTEN_BYTES = 64 << 20
"""Unwritten payload bytes of the whole server above which a stream waits before it inserts more."""
MAX_UNANSWERED = 1024
"""Responses of one stream that wait for a commit, or for a client that does not read. At this number the stream decides
no further rows."""

Request = Frame[pb.InsertRequest]
"""A message of a client, with those payload bytes that came with it."""


class InsertMethods:
    """The gRPC methods Insert and InsertStream."""

    def __init__(self, backend: Backend, journal: Journal | None) -> None:
        self._backend = backend
        self._journal = journal

    async def Insert(self, request: Request, call: Call) -> pb.InsertResponse:
        """Does the same as InsertStream for a stream of one message, and joins all answers into one response."""
        all_rows = Decided()
        unread = [request]

        # `Inserts` calls these two functions in the place of reading from and writing to a stream.
        async def read() -> Request | None:
            return unread.pop() if unread else None

        async def answer(decided: Decided) -> None:
            all_rows.extend(decided)

        with self._backend.clients.calling(call.context, role=None) as on_message:
            await Inserts(self._backend, call.client, read, answer, on_message).run()
            if self._journal is not None:
                ticket = self._journal.ticket()
                await asyncio.wait([ticket])  # raises no error: `refuse_unwritten` looks at the ticket
                refuse_unwritten(all_rows, self._journal, ticket)
        return all_rows.message()

    async def InsertStream(self, call: Call) -> None:
        """Inserts the rows of a stream, and answers them on the stream."""

        async def answer(decided: Decided) -> None:
            await call.write(decided.message())

        with self._backend.clients.calling(call.context, role=None) as on_message:
            inserts = Inserts(self._backend, call.client, call.read, answer, on_message)
            if self._journal is None:
                await inserts.run()
            else:
                await acknowledged(self._journal, inserts)  # runs `inserts`, and answers rows when they are written


class Decided:
    """Decided rows of one stream, in order, and the response that tells the client what was decided."""

    __slots__ = ("_response", "keys", "missing")

    def __init__(self) -> None:
        self.keys: list[int] = []
        """The keys of all rows except the segments of items that are gone."""
        self.missing = 0
        """The number of segments of items that are gone. They need no commit."""
        self._response = pb.InsertResponse()

    def __len__(self) -> int:
        return len(self.keys) + self.missing

    @property
    def refused(self) -> list[int]:
        """The keys of the rows that are refused."""
        return [error.key for error in self._response.errors]

    def refuse(self, key: int, refusal: Refused) -> None:
        """Adds the error of a refused row. `keys` must hold the row's key already."""
        self._response.errors.add(key=key, code=refusal.code, message=refusal.message, reason=refusal.reason)

    def evict(self, batch: InsertBatch) -> None:
        """Adds the rows of `batch` that a full table evicted as soon as they were inserted.

        Empties `batch.evicted`, so that no row is added twice.
        """
        for key, table in batch.evicted:
            self._response.evicted.add(key=key, table=table)
        batch.evicted.clear()

    def append(self, key: int, unchanged: pb.UnchangedRow) -> None:
        """Adds a segment that was not refused. If the segment was not appended, `unchanged` has the reason."""
        if unchanged.missing:
            self.missing += 1
        else:
            self.keys.append(key)
        if unchanged.missing or unchanged.present:
            self._response.unchanged.append(unchanged)

    def extend(self, later: Decided) -> None:
        """Adds rows that were decided after these."""
        self.keys.extend(later.keys)
        self.missing += later.missing
        self._response.MergeFrom(later._response)

    def message(self) -> pb.InsertResponse:
        """The response about all these rows."""
        self._response.decided = len(self)
        return self._response


class Inserts:
    """One stream of inserts."""

    def __init__(
        self,
        backend: Backend,
        client: str,
        read: Callable[[], Awaitable[Request | None]],
        answer: Callable[[Decided], Awaitable[None]],
        on_message: OnMessage,
    ) -> None:
        """`read` returns the next message of the client; None: there is no more. `answer` sends the decided rows.

        `client` is gRPC's name of the connection. `on_message` notes each message, and the role that it shows.
        """
        self._backend = backend
        self._buffer = backend.buffer
        self._client = client
        self._read = read
        self.answer = answer
        self._on_message = on_message
        # All attributes below belong to the message whose rows are being decided.
        self._decided = Decided()
        """The rows that are decided and not answered yet."""
        self._nbytes = 0
        """Bytes of the message's payloads; 0 if the payloads are refused, and therefore not kept in memory."""
        self._timeout: float | None = None
        """Seconds that each row may wait for its tables; None: for ever."""
        self._refusal: Refused | None = None
        """The error of all rows, if the payloads are too large, or if no room for them became free in time; otherwise
        None. Refused payloads are read, to reach the next message, but are not kept."""

    async def run(self) -> None:
        """Decides rows until the client ends the stream.

        Raises Refused for a message that breaks the conventions of replay.proto, or whose next bytes do not come for
        `stall_timeout` seconds.
        """
        while (frame := await self._read()) is not None:
            request = frame.head
            check_message(request)
            rows = len(request.keys)
            sizes = request.payload_sizes[:] or [0] * rows  # a slice takes half the time of list()
            chunks = await self._chunks(frame, sum(sizes))
            payloads: list[Payload] = [()] * rows
            if self._refusal is None:
                payloads = payloads_of_rows(chunks, sizes)
            else:  # the payloads were not kept, and each row will be refused
                sizes = [0] * rows
            self._decided = Decided()
            if request.extend:
                await self._extend(request, payloads)
            else:
                self._on_message(ClientRole.GENERATOR)
                is_first = True
                for batch in batches_of(request, sizes, payloads):
                    await self._insert(batch, first=is_first)
                    is_first = False
            await self.answer(self._decided)

    async def _chunks(self, frame: Request, total: int) -> Sequence[bytes | memoryview]:
        """Reads the `total` payload bytes of a message, and returns them.

        Sets `_timeout`, `_refusal` and `_nbytes` for the message. If the payloads are refused, which `_refusal` tells,
        their bytes are read, and the result must not be used. Raises Refused if the message has fewer or more bytes
        than `total`.
        """
        request = frame.head
        chunks = frame.payloads
        limit = self._buffer.max_payload_bytes
        self._timeout = request.timeout if request.HasField("timeout") else None
        self._refusal = None
        if total > limit:
            self._refusal = too_large(
                f"{total} bytes in one message; this server takes at most {limit} (max_payload_bytes)"
            )
        missing = total - sum(map(len, chunks))
        if missing > 0:  # the rest comes in later messages of the stream
            chunks = list(chunks)
            budget = self._backend.unfinished
            # Until the message is complete, it takes `total` bytes of the budget. The end of the block gives them back.
            with ExitStack() as on_complete:
                if self._refusal is None:
                    try:
                        await budget.take_in_turn(self._client, total, self._timeout)  # waits until the bytes fit
                        on_complete.callback(budget.release, self._client, total)
                    except Refused as no_room_in_time:
                        self._refusal = no_room_in_time
                missing = await self._read_rest(chunks, missing)
        if missing < 0:
            raise invalid(f"{-missing} payload bytes more than payload_sizes says")
        self._nbytes = total if self._refusal is None else 0
        if missing > 0:
            raise invalid(
                f"the stream ended in the middle of a message: {missing} of {total} payload bytes are missing"
            )
        return chunks

    async def _read_rest(self, chunks: list[bytes | memoryview], total: int) -> int:
        """Reads the `total` missing bytes of a message, and appends them to `chunks` unless the payloads are refused.

        Returns the number of bytes that are missing afterwards. It is above 0 if the stream has ended, and below 0 if
        too many bytes were sent.
        """
        missing = total
        stall = self._backend.limits.stall_timeout
        while missing > 0:
            try:
                async with asyncio.timeout(stall):
                    more = await self._read()
            except TimeoutError:
                raise deadline(
                    f"{missing} of {total} payload bytes are missing: the server waits up to {stall:g} s "
                    f"(stall_timeout) for the next bytes"
                ) from None
            if more is None:
                break
            if more.head.keys or not more.payloads:  # the next message, or a part without any bytes
                raise invalid(f"{missing} of {total} payload bytes are missing")
            missing -= sum(map(len, more.payloads))
            if self._refusal is None:
                chunks.extend(more.payloads)
        return missing

    # ------------------------------------------------------------------------------------------- new items

    async def _insert(self, batch: InsertBatch, first: bool) -> None:
        """Inserts or refuses each row, and waits for the row's tables if that is necessary.

        Lets other requests run after each ROWS_PER_YIELD rows, and also before a batch that is not the first one of its
        message, so that a message of many small batches does not hold them up. `first`: the batch is the first one.
        """
        row = 0
        rows = len(batch)
        while row < rows:
            if not first:
                await asyncio.sleep(0)
            first = False
            # To slice a single row would only cost time. A slice shares the list `evicted` with the batch.
            next_rows = batch if rows == 1 else batch[row : row + ROWS_PER_YIELD]
            inserted, outcome = self._admit(next_rows)
            self._decided.keys.extend(batch.keys[row : row + inserted])
            self._decided.evict(batch)
            row += inserted
            if outcome is None:  # `_admit` has inserted as many rows as it could at once
                continue
            if isinstance(outcome, PendingInsert):
                refusal = await self._wait(outcome)
                self._decided.evict(batch)  # again, for the row that has waited
            else:
                refusal = outcome
            self._decided.keys.append(batch.keys[row])
            if refusal is not None:
                self._decided.refuse(batch.keys[row], refusal)
            row += 1

    def _admit(self, batch: InsertBatch) -> tuple[int, PendingInsert | Refused | None]:
        """Inserts rows until one is refused or must wait.

        Returns the number of inserted rows, and the refusal or the wait of the row after these rows; None: the row
        after these rows is not decided yet.
        """
        if self._refusal is not None:
            return 0, self._refusal
        buffer = self._buffer
        full = self._backend.memory.why_full(self._nbytes)
        if full or (self._backend.draining and not batch.closes):
            # New items are refused. But a retry of an item that was inserted before is confirmed, as at any other time.
            key = batch.keys[0]
            # `known_keys` has the keys of the last inserts, also of items that have left since.
            is_retry = key in buffer.items or key in buffer.known_keys
            if not is_retry:
                return 0, (busy(full) if full else draining(key))
            batch = batch[:1]  # insert only this row now, because the rows after it may be new items
        try:
            return buffer.insert(batch, deadline_at(buffer.clock(), self._timeout))
        except Refused as refusal:
            return 0, refusal

    async def _wait(self, pending: PendingInsert) -> Refused | None:
        """Waits until a row is inserted or refused. Returns the refusal; None if the row is inserted.

        The rows decided before this row are answered first. While the row waits, the payloads of its message count
        against `max_waiting_bytes`.
        """
        buffer = self._buffer
        try:
            if self._decided.keys:
                await self.answer(self._decided)
                self._decided = Decided()
            with self._backend.waiting.held(self._client, self._nbytes):
                await result_of(pending, buffer.clock(), buffer.time_out, buffer.abandon)
        except Refused as refusal:
            return refusal
        finally:
            # If the budget refused the row, or if the client went away, the row is still in line, so take it out.
            # Otherwise this does nothing.
            buffer.abandon(pending)
        return None

    # ------------------------------------------------------------------------------------------- segments

    async def _extend(self, request: pb.InsertRequest, payloads: Sequence[Payload]) -> None:
        """Appends or refuses each segment of a message."""
        # A client that extends partial groups is a generator. A client that extends other items is a teacher. The first
        # segment of the message decides.
        permit_tables = PermitTables.of(self._buffer)
        # `marked` has the keys of the partial groups, which are the items in permit tables that hold a permit.
        is_partial = permit_tables is not None and request.keys[0] in permit_tables.marked
        self._on_message(ClientRole.GENERATOR if is_partial else ClientRole.TEACHER)
        labels = labels_in(request) or [NO_LABELS] * len(payloads)
        numbers = request.requests[:] or [0] * len(payloads)  # the number of each segment; 0: none
        for row, (key, payload) in enumerate(zip(request.keys, payloads, strict=True)):
            if row and row % ROWS_PER_YIELD == 0:
                await asyncio.sleep(0)
            try:
                answer = self._append(key, labels[row].columns, payload, numbers[row], request.closes)
                self._decided.append(key, answer)
            except Refused as refusal:
                self._decided.keys.append(key)
                self._decided.refuse(key, refusal)

    def _append(
        self, key: int, names: Collection[str], payload: Payload, number: int, held: Sequence[int]
    ) -> pb.UnchangedRow:
        """Appends a segment with columns of these `names` to the item `key`. The result tells whether it was appended.

        A retry of the segment has the same `number`; 0: the client never retries this segment. `held` are the ids of
        batches that the writer of the segment must still have. If the segment is refused, raises Refused, and nothing
        has changed.
        """
        if self._refusal is not None:
            raise self._refusal
        buffer = self._buffer
        nbytes = sum(map(len, payload))
        digest = b""
        if number:
            # Two requests with one number are the same request if their digests are equal. The digest of a segment ends
            # with "segment", and that of a call with the type of the request, so the two are never equal.
            identity = repr((key, sorted(names), nbytes)).encode()
            digest = hashlib.blake2b(identity, digest_size=8).digest() + b"segment"
            answer = first_answer(buffer, number, digest)
            if answer is not None:
                return pb.UnchangedRow.FromString(answer)
        full = self._backend.memory.why_full(nbytes)
        if full:
            raise busy(full)
        # If the item is gone, the batches do not matter, because the answer is that the item is missing.
        if key in buffer.items:
            refusal = buffer.outstanding.why_not_closed(held)
            if refusal is not None:
                raise refusal
        # `present` has the columns of the segment that the item had already. If there are any, nothing was appended.
        # Empty: the segment was appended. None: there is no such item.
        present = buffer.extend(key, names, payload)
        unchanged = pb.UnchangedRow(key=key, present=present or (), missing=present is None)
        if number:
            buffer.answers.remember([number], (digest, unchanged.SerializeToString()))
        return unchanged


def check_message(request: pb.InsertRequest) -> None:
    """Raises Refused if the message has no rows or too many, or if its fields do not fit together.

    A field with one entry for each row may also be empty.
    """
    rows = len(request.keys)
    if rows > MAX_ROWS:
        raise invalid(f"{rows} items in one message: at most {MAX_ROWS}")
    if rows == 0:
        raise invalid("a message without items, and no item before it lacks payload bytes")
    if request.closes and rows > 1:
        raise invalid(f"{rows} rows that close batches: send such an item in a message of its own")
    entries_of = {
        "policy_versions": len(request.policy_versions),
        "payload_sizes": len(request.payload_sizes),
        "lengths.completions": len(request.lengths.completions),
        "lengths.tokens": len(request.lengths.tokens),
    }
    for name, entries in entries_of.items():
        if entries not in (0, rows):
            raise invalid(f"{name} has {counted(entries, 'entry')} for {counted(rows, 'item')}")
    if request.extend:
        surplus = [name for name in ("targets", "policy_versions", "permits", "tags") if getattr(request, name)]
        if request.HasField("lengths"):
            surplus.append("lengths")
        if surplus:
            raise invalid(
                f"a message that extends items has {', '.join(surplus)}, which only new items have: leave them out"
            )
        if len(request.requests) not in (0, rows):
            raise invalid(f"requests has {counted(len(request.requests), 'entry')} for {counted(rows, 'segment')}")


def labels_in(request: pb.InsertRequest) -> list[Labels] | None:
    """The labels of each row; None if no row has labels. Raises Refused if the labels are not valid."""
    try:
        return labels_of_rows(request.columns, request.tags, len(request.keys))
    except ValueError as error:
        raise invalid(str(error)) from None


def payloads_of_rows(chunks: Sequence[bytes | memoryview], sizes: list[int]) -> list[Payload]:
    """The payload of each row of a message, from the message's chunks and the number of bytes of each row.

    If there is a single row, or exactly one whole chunk for each row, the payloads are the chunks as they came.
    Otherwise the bytes are copied, because a view of a small item would keep the whole message in memory.
    """
    if len(sizes) == 1:
        return [tuple(chunks)]
    are_whole = all(type(chunk) is bytes for chunk in chunks)  # a view may be a part of a larger message
    if are_whole and list(map(len, chunks)) == sizes:
        return [(chunk,) for chunk in chunks]
    joined: bytes | memoryview = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    view = memoryview(joined)
    ends = accumulate(sizes)
    return [(bytes(view[end - size : end]),) for end, size in zip(ends, sizes, strict=True)]


def batches_of(request: pb.InsertRequest, sizes: list[int], payloads: list[Payload]) -> Iterator[InsertBatch]:
    """Yields the new items of a message, in order. Consecutive rows for the same tables are one batch.

    Raises Refused for targets or labels that no item can have.
    """
    rows = len(sizes)
    priorities: dict[str, FloatArray] = {}
    """Table -> the priority (rows,) of each row."""
    rows_of_tables: dict[str, list[int]] = {}
    """Table -> the rows that are inserted into the table. An empty list stands for all rows."""
    for target in request.targets[:]:
        if target.table in priorities:
            raise invalid(f"table {target.table[:100]!r} is a target twice")
        priorities[target.table] = _priorities_in(target, rows)
        rows_of_tables[target.table] = target.rows[:]
    batch = InsertBatch(
        keys=request.keys[:],
        priorities=priorities,
        policy_versions=np.array(request.policy_versions[:] or [0] * rows, dtype=np.int64),
        sizes=np.array(sizes, dtype=np.int64),
        payloads=payloads,
        permits=request.permits,
        moved=request.moved,
        labels=labels_in(request),
        completions=request.lengths.completions[:],
        completion_tokens=request.lengths.tokens[:],
        closes=tuple(dict.fromkeys(request.closes[:])),
    )
    if any(rows_of_tables.values()):
        yield from _divided_by_tables(batch, rows_of_tables)
    else:  # all rows go to all tables
        yield batch


def _priorities_in(target: pb.InsertTarget, rows: int) -> FloatArray:
    """The priorities (rows,) of the rows of a message in one table. Rows for other tables have priority 1.

    Raises Refused if `target` has rows that the message lacks, or a wrong number of priorities.
    """
    table = target.table
    chosen = target.rows[:]  # the rows that go to this table; empty: all rows
    given = target.priorities[:]  # the priorities of these rows; empty: 1 each
    if chosen and (len(chosen) > rows or max(chosen) >= rows):
        raise invalid(
            f"{len(chosen)} rows of table {table[:100]!r}, up to row {max(chosen)}, in a message of {rows} items"
        )
    n = len(chosen) or rows
    if given and len(given) != n:
        raise invalid(f"{counted(len(given), 'priority')} for {counted(n, 'item')} of table {table[:100]!r}")
    if given and not chosen:
        return np.array(given)
    priorities = np.ones(rows)
    if given:
        priorities[chosen] = given
    return priorities


def _divided_by_tables(batch: InsertBatch, rows_of_tables: dict[str, list[int]]) -> Iterator[InsertBatch]:
    """Divides the batch into consecutive parts, so that all rows of a part go to the same tables. Yields the parts.

    `rows_of_tables` has the rows that go to each table; an empty list stands for all rows.
    """
    # goes_TR[t, r] is True if row r is inserted into table t. T: tables, R: rows.
    goes_TR = np.zeros((len(rows_of_tables), len(batch)), dtype=np.bool_)
    for goes_R, rows in zip(goes_TR, rows_of_tables.values(), strict=True):
        goes_R[rows or slice(None)] = True
    differs_from_next = (goes_TR[:, 1:] != goes_TR[:, :-1]).any(axis=0)  # (R - 1,)
    cuts = (np.flatnonzero(differs_from_next) + 1).tolist()  # the first rows of all parts but the first
    for start, stop in pairwise([0, *cuts, len(batch)]):
        part = batch[start:stop]
        tables = [table for table, goes in zip(rows_of_tables, goes_TR[:, start], strict=True) if goes]
        part.priorities = {table: part.priorities[table] for table in tables}
        yield part


async def acknowledged(journal: Journal, inserts: Inserts) -> None:
    """Runs `inserts`, and answers rows once they are written. Answers about rows of one commit are joined."""
    unanswered: deque[tuple[asyncio.Future[None], Decided]] = deque()
    """Decided rows, each with the ticket that is done when they are written."""
    decided_more = asyncio.Event()
    answered = asyncio.Event()
    answer_client = inserts.answer

    async def answer(decided: Decided) -> None:
        """Notes decided rows, for the loop below to answer. `inserts` calls this in the place of `answer_client`.

        In most cases, returns before the rows are written. But waits while the disk is too slow, or while too many rows
        are unanswered.
        """
        ticket = journal.ticket()
        unanswered.append((ticket, decided))
        decided_more.set()
        if journal.backlog > MAX_UNWRITTEN_BYTES:  # the disk is slower than the clients
            await asyncio.wait([ticket])
        while len(unanswered) >= MAX_UNANSWERED:
            answered.clear()
            await answered.wait()

    inserts.answer = answer
    inserting = asyncio.create_task(inserts.run())
    inserting.add_done_callback(lambda _: decided_more.set())  # when no more rows will come, this wakes the loop below
    try:
        while unanswered or not inserting.done():
            if not unanswered:
                decided_more.clear()
                await decided_more.wait()
                continue
            ticket, decided = unanswered.popleft()
            await asyncio.wait([ticket])  # raises no error: `refuse_unwritten` looks at the ticket
            while unanswered and unanswered[0][0] is ticket:  # rows that the same commit has written
                _, later = unanswered.popleft()
                decided.extend(later)
            refuse_unwritten(decided, journal, ticket)
            await answer_client(decided)
            answered.set()
        await inserting  # raises the error that ended the stream
    finally:
        inserting.cancel()
        await asyncio.gather(inserting, return_exceptions=True)


def refuse_unwritten(decided: Decided, journal: Journal, ticket: asyncio.Future[None]) -> None:
    """Refuses the rows that could not be written and were rolled back. The ticket must be done.

    The commit that failed may be an earlier one than that of the ticket. So this does not look at the ticket, but asks
    the journal, which remembers the keys of inserts that it rolled back.

    If the commit of the ticket failed, but some rows were neither rolled back nor refused before, raises Refused. These
    rows are still in the buffer, and the client may send all rows again, with the same keys.
    """
    unwritten = journal.rolled_back(decided.keys) - set(decided.refused)
    if unwritten:
        for key in decided.keys:
            if key in unwritten:
                why = f"item {key} could not be written: the disk of data_dir is full or fails"
                decided.refuse(key, storage_failed(why))
    if len(decided.refused) < len(decided.keys):
        ticket.result()  # raises Refused if the commit of the ticket failed
