"""Frames: how items are laid out over the messages of a stream (conventions in replay.proto)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame, M
from replay_server.columns import FloatArray
from replay_server.errors import Refused, invalid, too_large
from replay_server.inserts import Inserts
from replay_server.storage import Payload

MESSAGE_BYTES = 1 << 20
"""Payload bytes in one message, about: gRPC in Python is slow with much larger ones."""
MAX_ROWS = 1 << 16
"""Rows in one message."""
MAX_TARGETS = 64
"""Tables that the rows of one message go to."""


@dataclass(frozen=True)
class Message:
    """The items of one InsertRequest, with all of their payloads."""

    inserts: list[Inserts]
    """All rows in their order, consecutive ones that go to the same tables together."""
    timeout: float | None
    refusal: Refused | None
    """Set where the payloads are too large together; they were let pass and not kept."""


async def join_messages(requests: AsyncIterator[Frame[pb.InsertRequest]], max_bytes: int) -> AsyncIterator[Message]:
    """The items of a stream of requests, each message as soon as its last payload byte is there.

    A request that breaks the conventions is refused as a whole; those before it stand. A stream that ends in the middle
    of a message never had it.
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
        refusal, blobs = None, list(payloads)
        missing = total - sum(map(len, blobs))
        if total > max_bytes:
            refusal = too_large(
                f"{total} bytes in one message; this server takes at most {max_bytes} (max_payload_bytes)"
            )
        while missing > 0:
            more = await anext(requests, None)
            if more is None:
                return
            if more.head.keys or not more.payloads:
                raise invalid(f"{missing} of {total} payload bytes are missing")
            missing -= sum(map(len, more.payloads))
            if refusal is None:
                blobs.extend(more.payloads)
        if missing < 0:
            raise invalid(f"{-missing} payload bytes more than payload_sizes says")
        versions = list(request.policy_versions) or [0] * rows
        columns = Inserts(
            keys=list(request.keys),
            priorities={},
            policy_versions=np.array(versions, dtype=np.int64),
            sizes=np.zeros(rows, dtype=np.int64) if refusal else np.array(sizes, dtype=np.int64),
            payloads=[()] * rows if refusal else _cut(blobs, sizes),
            permits=request.permits,
        )
        yield Message(
            inserts=list(_by_tables(request, columns)),
            timeout=request.timeout if request.HasField("timeout") else None,
            refusal=refusal,
        )


def _cut(blobs: Sequence[bytes | memoryview], sizes: list[int]) -> list[Payload]:
    """The pieces of each row. A message that is all one row's stays as it came; where rows share one they are copied
    out of it, or a small item would keep a large message in memory."""
    if len(sizes) == 1:
        return [tuple(blobs)]
    whole = memoryview(blobs[0] if len(blobs) == 1 else b"".join(blobs))
    return [(bytes(whole[end - size : end]),) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _by_tables(request: pb.InsertRequest, columns: Inserts) -> Iterator[Inserts]:
    """`columns` with the priorities of `request`, cut where the tables change."""
    rows = len(columns)
    priorities: dict[str, FloatArray] = {}
    goes: dict[str, npt.NDArray[np.bool_]] = {}
    if len(request.targets) > MAX_TARGETS:
        raise invalid(f"{len(request.targets)} targets in one message: at most {MAX_TARGETS}")
    for target in request.targets:
        if target.table in goes:
            raise invalid(f"table {target.table[:100]!r} is a target twice")
        chosen = np.array(target.rows, dtype=np.int64) if target.rows else np.arange(rows)
        if target.priorities and len(target.priorities) != chosen.size:
            raise invalid(
                f"{len(target.priorities)} priorities for {chosen.size} items of table {target.table[:100]!r}"
            )
        if chosen.max() >= rows:
            raise invalid(f"row {chosen.max()} of table {target.table[:100]!r} in a message of {rows} items")
        goes[target.table], priorities[target.table] = np.zeros(rows, dtype=np.bool_), np.ones(rows)
        goes[target.table][chosen] = True
        priorities[target.table][chosen] = target.priorities or 1.0
    goes_TR = np.array(list(goes.values()), dtype=np.bool_).reshape(-1, rows)
    cuts = [0, *(np.flatnonzero((goes_TR[:, 1:] != goes_TR[:, :-1]).any(axis=0)) + 1).tolist(), rows]
    for start, stop in pairwise(cuts):
        part = columns[start:stop] if len(cuts) > 2 else columns
        tables = {name: priorities[name][start:stop] for name, there in goes.items() if there[start]}
        yield replace(part, priorities=tables)


def split_payloads(first: M, payloads: Iterable[Payload]) -> Iterator[Frame[M]]:
    """`first`, with as many payload bytes as fit, then messages with the rest of them."""
    head, filled = first, 0
    pieces: list[bytes | memoryview] = []
    for payload in payloads:
        for piece in payload:
            if filled and filled + len(piece) > MESSAGE_BYTES:
                yield Frame(head, pieces)
                head, pieces, filled = type(first)(), [], 0
            pieces.append(piece)
            filled += len(piece)
    yield Frame(head, pieces)
