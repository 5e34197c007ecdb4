"""Messages: reads the items out of insert messages, and lays payloads out over response messages (see replay.proto).

* A message is passed on when its last payload byte has come. A stream that ends before that never sent it.
* A message that breaks a convention ends its stream. The messages before it stand.
* Payload bytes of a message that is not complete count against a budget that clients share.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from replay_protos import replay_pb2 as pb
from replay_protos.framing import BYTES_PER_MESSAGE, Frame, M
from replay_server.config import MAX_ROWS
from replay_server.errors import Refused, deadline, invalid, too_large
from replay_server.rpc.backend import Budget
from replay_server.tables.columns import FloatArray
from replay_server.tables.items import InsertBatch, Payload


@dataclass(slots=True)  # not frozen: that would make it four times as slow to create
class InsertMessage:
    """The items of one InsertRequest, with all of their payloads."""

    batches: list[InsertBatch]
    """All rows in order. Consecutive rows that go to the same tables are one batch."""
    timeout: float | None
    """Seconds that each row may wait for its tables; None: for ever."""
    refusal: Refused | None
    """Why all rows are refused: the payloads are too large, or no room for them came free in time. They were read, to
    reach the message after them, and not kept."""
    nbytes: int
    """Payload bytes that are kept."""


async def read_messages(
    requests: AsyncIterator[Frame[pb.InsertRequest]], max_bytes: int, unfinished: Budget, client: str, stall: float
) -> AsyncIterator[InsertMessage]:
    """The messages of a stream of requests. Raises Refused for a request that breaks the conventions of replay.proto.

    `unfinished` bounds the bytes of messages whose payloads have not all come; `client` names the connection. A client
    that sends no payload bytes for `stall` seconds in the middle of a message is refused.
    """
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
        columns = InsertBatch(
            keys=request.keys[:],
            priorities={},
            policy_versions=np.array(request.policy_versions[:] or [0] * rows, dtype=np.int64),
            sizes=np.zeros(rows, dtype=np.int64) if refusal else np.array(sizes, dtype=np.int64),
            payloads=[()] * rows if refusal else _payloads_of_rows(chunks, sizes),
            permits=request.permits,
        )
        yield InsertMessage(
            batches=list(_by_tables(request, columns)),
            timeout=timeout,
            refusal=refusal,
            nbytes=0 if refusal else total,
        )


def _check_columns(request: pb.InsertRequest) -> None:
    rows = len(request.keys)
    if rows > MAX_ROWS:
        raise invalid(f"{rows} items in one message: at most {MAX_ROWS}")
    if rows == 0:
        raise invalid("a message without items, and no item before it lacks payload bytes")
    for name, entries in (("policy_versions", request.policy_versions), ("payload_sizes", request.payload_sizes)):
        if len(entries) not in (0, rows):
            raise invalid(f"{name} has {len(entries)} entries for {rows} items")


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


def _by_tables(request: pb.InsertRequest, columns: InsertBatch) -> Iterator[InsertBatch]:
    """The batches of a message: `columns` with their priorities, cut where the tables change."""
    rows = len(columns)
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
    if not some:
        yield columns.to(priorities)
        return
    goes_TR = np.ones((len(priorities), rows), dtype=np.bool_)
    for row_T, table in enumerate(priorities):
        if table in some:
            goes_TR[row_T] = False
            goes_TR[row_T, some[table]] = True
    cuts = [0, *(np.flatnonzero((goes_TR[:, 1:] != goes_TR[:, :-1]).any(axis=0)) + 1).tolist(), rows]
    for start, stop in pairwise(cuts):
        there = zip(priorities.items(), goes_TR[:, start].tolist(), strict=True)
        yield columns[start:stop].to({table: given[start:stop] for (table, given), goes in there if goes})


def split_payloads(first: M, payloads: Iterable[Payload]) -> Iterator[Frame[M]]:
    """`first` with as many payload bytes as fit, then messages with the rest of the bytes.

    A chunk goes into one message, so that the reader need not join it, unless it is much larger than a message: a
    client that does not read would keep all of it in memory.
    """
    head, filled = first, 0
    chunks: list[bytes | memoryview] = []
    for chunk in _short_chunks(payloads):
        if filled and filled + len(chunk) > BYTES_PER_MESSAGE:
            yield Frame(head, chunks)
            head, chunks, filled = type(first)(), [], 0
        chunks.append(chunk)
        filled += len(chunk)
    yield Frame(head, chunks)


def _short_chunks(payloads: Iterable[Payload]) -> Iterator[bytes | memoryview]:
    for payload in payloads:
        for chunk in payload:
            if len(chunk) <= 2 * BYTES_PER_MESSAGE:
                yield chunk
            else:
                view = memoryview(chunk)
                yield from (view[at : at + BYTES_PER_MESSAGE] for at in range(0, len(view), BYTES_PER_MESSAGE))
