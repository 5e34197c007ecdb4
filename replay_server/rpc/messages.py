"""Frames: how items are laid out over the messages of a stream (conventions in replay.proto)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from replay_protos import replay_pb2 as pb
from replay_protos.framing import BYTES_PER_MESSAGE, Frame, M
from replay_server.errors import Refused, deadline, invalid, too_large
from replay_server.limits import MAX_ROWS, MAX_TARGETS, MIN_PIECE, MIN_RATE
from replay_server.tables.batches import InsertBatch
from replay_server.tables.columns import FloatArray
from replay_server.tables.payloads import Payload


@dataclass(frozen=True)
class Message:
    """The items of one InsertRequest, with all of their payloads."""

    inserts: list[InsertBatch]
    """All rows in their order, consecutive ones that go to the same tables together."""
    timeout: float | None
    refusal: Refused | None
    """Set where the payloads are too large together, or there was no room for them in time; they were let pass and not
    kept."""
    nbytes: int
    """Of all payloads."""


Room = Callable[[int, float | None], AbstractAsyncContextManager[None]]
"""Holds room for so many bytes of a message that is not complete, and waits for it as long as the timeout says."""


async def join_messages(
    requests: AsyncIterator[Frame[pb.InsertRequest]], max_bytes: int, room: Room, stall: float
) -> AsyncIterator[Message]:
    """The items of a stream of requests, each message as soon as its last payload byte is there.

    A request that breaks the conventions is refused as a whole, and so is one that does not go on for `stall` seconds;
    those before it stand. A stream that ends in the middle of a message never had it.
    """
    async for request, payloads in requests:
        rows = len(request.keys)
        if rows > MAX_ROWS:
            raise invalid(f"{rows} items in one message: at most {MAX_ROWS}")
        if rows == 0:
            raise invalid("a message without items, and no item before it lacks payload bytes")
        for name in ("policy_versions", "payload_sizes"):
            if len(getattr(request, name)) not in (0, rows):
                raise invalid(f"{name} has {len(getattr(request, name))} entries for {rows} items")
        sizes = list(request.payload_sizes) or [0] * rows
        total = sum(sizes)
        timeout = request.timeout if request.HasField("timeout") else None
        refusal, blobs = None, list(payloads)
        missing = total - sum(map(len, blobs))
        if total > max_bytes:
            refusal = too_large(
                f"{total} bytes in one message; this server takes at most {max_bytes} (max_payload_bytes)"
            )
        if missing > 0:
            async with AsyncExitStack() as held:
                if refusal is None:
                    try:
                        await held.enter_async_context(room(total, timeout))
                    except Refused as none_in_time:
                        refusal = none_in_time
                rest = await _rest(requests, blobs if refusal is None else None, missing, stall)
            if rest is None:
                return
            missing = rest
        if missing < 0:
            raise invalid(f"{-missing} payload bytes more than payload_sizes says")
        columns = InsertBatch(
            keys=list(request.keys),
            priorities={},
            policy_versions=np.array(request.policy_versions or [0] * rows, dtype=np.int64),
            sizes=np.zeros(rows, dtype=np.int64) if refusal else np.array(sizes, dtype=np.int64),
            payloads=[()] * rows if refusal else _cut(blobs, sizes),
            permits=request.permits,
        )
        yield Message(
            inserts=list(_by_tables(request, columns)),
            timeout=timeout,
            refusal=refusal,
            nbytes=0 if refusal else total,
        )


async def _rest(
    requests: AsyncIterator[Frame[pb.InsertRequest]], blobs: list[bytes | memoryview] | None, missing: int, stall: float
) -> int | None:
    """Reads the messages that bring the missing bytes, into `blobs` if there are any; how many are missing then (below
    0: there were too many), or None where the stream ends before."""
    total, loop = missing, asyncio.get_running_loop()
    end = loop.time() + stall + missing / MIN_RATE
    while missing > 0:
        try:
            async with asyncio.timeout(min(stall, end - loop.time())):
                more = await anext(requests, None)
        except TimeoutError:
            raise deadline(
                f"{missing} of {total} payload bytes are missing and come too slowly: the next ones were waited for up "
                f"to {stall:g} s (stall_timeout), and all of them as long as they take at {MIN_RATE} bytes a second"
            ) from None
        if more is None:
            return None
        if more.head.keys or not more.payloads:
            raise invalid(f"{missing} of {total} payload bytes are missing")
        size = sum(map(len, more.payloads))
        missing -= size
        if size < MIN_PIECE and missing > 0:
            raise invalid(f"a piece of {size} bytes: all but the last of an item have at least {MIN_PIECE}")
        if blobs is not None:
            blobs.extend(more.payloads)
    return missing


def _cut(blobs: Sequence[bytes | memoryview], sizes: list[int]) -> list[Payload]:
    """The pieces of each row. A message that is all one row's stays as it came; where rows share one they are copied
    out of it, or a small item would keep a large message in memory. The same where the rest of the message is large."""
    if len(sizes) == 1:
        return [tuple(blob if _fills_its_message(blob) else bytes(blob) for blob in blobs)]
    whole = memoryview(blobs[0] if len(blobs) == 1 else b"".join(blobs))
    return [(bytes(whole[end - size : end]),) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _fills_its_message(blob: bytes | memoryview) -> bool:
    return isinstance(blob, bytes) or len(blob.obj) <= 2 * len(blob) + MIN_PIECE  # type: ignore[arg-type]  # of bytes


def _by_tables(request: pb.InsertRequest, columns: InsertBatch) -> Iterator[InsertBatch]:
    """`columns` with the priorities of `request`, cut where the tables change."""
    rows = len(columns)
    if len(request.targets) > MAX_TARGETS:
        raise invalid(f"{len(request.targets)} targets in one message: at most {MAX_TARGETS}")
    priorities: dict[str, FloatArray] = {}
    some: dict[str, list[int]] = {}
    for target in request.targets:
        if len(target.rows) > rows:
            raise invalid(f"{len(target.rows)} rows of table {target.table[:100]!r} in a message of {rows} items")
        table, chosen = target.table, list(target.rows)
        if table in priorities:
            raise invalid(f"table {table[:100]!r} is a target twice")
        n = len(chosen) or rows
        if target.priorities and len(target.priorities) != n:
            raise invalid(f"{len(target.priorities)} priorities for {n} items of table {table[:100]!r}")
        given = np.array(target.priorities or [1.0] * n, dtype=np.float64)
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
    """`first`, with as many payload bytes as fit, then messages with the rest of them.

    Pieces are cut where they are much larger than a message, so that a reader who does not read holds only that much.
    """
    head, filled = first, 0
    pieces: list[bytes | memoryview] = []
    for payload in payloads:
        for whole in payload:
            cuts = (
                [memoryview(whole)[at : at + BYTES_PER_MESSAGE] for at in range(0, len(whole), BYTES_PER_MESSAGE)]
                if len(whole) > 2 * BYTES_PER_MESSAGE
                else [whole]
            )
            for piece in cuts:
                if filled and filled + len(piece) > BYTES_PER_MESSAGE:
                    yield Frame(head, pieces)
                    head, pieces, filled = type(first)(), [], 0
                pieces.append(piece)
                filled += len(piece)
    yield Frame(head, pieces)
