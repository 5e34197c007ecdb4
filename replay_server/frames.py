"""Frames: how items are laid out over the messages of a stream (conventions in replay.proto)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from replay_protos import replay_pb2 as pb
from replay_server.errors import Refused, invalid, too_large
from replay_server.storage import Payload

MESSAGE_BYTES = 1 << 20
"""Payload bytes in one message, about: gRPC in Python is slow with much larger ones."""
MAX_ROWS = 1 << 16
"""Rows in one message."""

Framed = TypeVar("Framed", pb.SampleResponse, pb.GetResponse)


@dataclass(frozen=True, slots=True)
class Row:
    """One item of an InsertRequest, with all of its payload."""

    key: int
    priorities: dict[str, float]
    policy_version: int
    payload: Payload
    nbytes: int
    permits: int
    timeout: float | None
    refusal: Refused | None
    """Set for an item that is too large; its bytes were let pass and not kept."""
    last_of_message: bool


async def join_rows(requests: AsyncIterator[pb.InsertRequest], max_bytes: int) -> AsyncIterator[Row]:
    """The items of a stream of requests, each as soon as its last byte is there.

    A request that breaks the conventions is refused as a whole; items before it stand. A stream that ends in the middle
    of an item never had it.
    """
    async for request in requests:
        rows = len(request.keys)
        if rows > MAX_ROWS:
            raise invalid(f"{rows} items in one message: at most {MAX_ROWS}")
        if rows == 0:
            raise invalid("a message without items, and no item before it lacks payload bytes")
        for name in ("policy_versions", "payload_sizes"):
            if len(getattr(request, name)) not in (0, rows):
                raise invalid(f"{name} has {len(getattr(request, name))} entries for {rows} items")
        priorities = _priorities(request, rows)
        sizes = list(request.payload_sizes) or [0] * rows
        versions = list(request.policy_versions) or [0] * rows
        timeout = request.timeout if request.HasField("timeout") else None
        blob, position = request.payloads, 0
        for row, (key, nbytes) in enumerate(zip(request.keys, sizes, strict=True)):
            refusal = None
            if nbytes > max_bytes:
                refusal = too_large(
                    f"item of {nbytes} bytes; this server takes at most {max_bytes} (max_payload_bytes)"
                )
            pieces: list[bytes] = []
            missing = nbytes
            while missing:
                if position == len(blob):
                    more = await anext(requests, None)
                    if more is None:
                        return
                    if more.keys or not more.payloads:
                        raise invalid(f"item {key} lacks {missing} of its {nbytes} payload bytes")
                    blob, position = more.payloads, 0
                piece = blob[position : position + missing]  # the same object, not a copy, where it is all of it
                position += len(piece)
                missing -= len(piece)
                if refusal is None:
                    pieces.append(piece)
            if row == rows - 1 and position != len(blob):
                raise invalid(f"{len(blob) - position} payload bytes more than payload_sizes says")
            yield Row(
                key=key,
                priorities=priorities[row],
                policy_version=versions[row],
                payload=tuple(pieces),
                nbytes=nbytes,
                permits=request.permits,
                timeout=timeout,
                refusal=refusal,
                last_of_message=row == rows - 1,
            )


def _priorities(request: pb.InsertRequest, rows: int) -> list[dict[str, float]]:
    """For each row the tables it goes to, with its priority there."""
    result: list[dict[str, float]] = [{} for _ in range(rows)]
    for target in request.targets:
        chosen = target.rows or range(rows)
        if target.priorities and len(target.priorities) != len(chosen):
            raise invalid(f"{len(target.priorities)} priorities for {len(chosen)} items of table {target.table!r}")
        if target.rows and max(target.rows) >= rows:
            raise invalid(f"row {max(target.rows)} of table {target.table!r} in a message of {rows} items")
        for row, priority in zip(chosen, target.priorities or [1.0] * len(chosen), strict=True):
            result[row][target.table] = priority
    return result


def split_payloads(first: Framed, payloads: Iterable[Payload]) -> Iterator[Framed]:
    """`first`, with as many payload bytes as fit, then messages with the rest of them."""
    message, filled = first, 0
    pieces: list[bytes] = []
    for payload in payloads:
        for piece in payload:
            if filled and filled + len(piece) > MESSAGE_BYTES:
                message.payloads = b"".join(pieces)
                yield message
                message, pieces, filled = type(first)(), [], 0
            pieces.append(piece)
            filled += len(piece)
    message.payloads = b"".join(pieces)
    yield message
