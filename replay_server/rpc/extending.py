"""Extending: the rows of an InsertRequest that are segments, and how each is appended to the item that it belongs to.

A segment comes as an item does, by the pipeline of `inserting.py`: in messages and rings, with the same budgets, and it
is acknowledged once it is written. Nothing about it waits. A server that drains takes segments, because they belong to
items that it has.

The names of its columns decide: a segment with a name that the item has already is not appended. So two processes that
bring the same column do no harm, and the first wins. A retry would find its own names there. Each segment therefore has
a number of its own, under which its first answer is remembered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from replay_protos import replay_pb2 as pb
from replay_protos.labels import Labels
from replay_server.errors import busy, invalid
from replay_server.rpc.backend import Backend, first_answer
from replay_server.tables.items import Payload


@dataclass(slots=True)
class SegmentRow:
    key: int
    """Of the item to which it belongs."""
    names: frozenset[str]
    """Of its columns."""
    payload: Payload
    request: int
    """The number under which a retry comes; 0: none."""

    def digest(self) -> bytes:
        """Two segments with the same digest are the same request."""
        said = repr((self.key, sorted(self.names), sum(map(len, self.payload))))
        return hashlib.blake2b(said.encode(), digest_size=8).digest() + b"SegmentRow"


def segments_of(
    request: pb.InsertRequest, payloads: Sequence[Payload], labels: Sequence[Labels] | None
) -> list[SegmentRow]:
    """The rows of a message. Raises Refused if it says of them what can only be said of new items."""
    rows = len(request.keys)
    given = [name for name in ("targets", "policy_versions", "permits", "tags") if getattr(request, name)]
    if given:
        raise invalid(f"a message that extends items has {', '.join(given)}, which only new items have: leave them out")
    if len(request.requests) not in (0, rows):
        raise invalid(f"requests has {len(request.requests)} entries for {rows} segments")
    names = [frozenset[str]()] * rows if labels is None else [of_row.columns for of_row in labels]
    numbers = request.requests[:] or [0] * rows
    return [SegmentRow(*row) for row in zip(request.keys[:], names, payloads, numbers, strict=True)]


def append(backend: Backend, segment: SegmentRow) -> pb.UnchangedRow | None:
    """Appends a segment; None: that is done. Raises Refused; then nothing has changed."""
    buffer, digest = backend.buffer, b""
    if segment.request:
        digest = segment.digest()
        if (answer := first_answer(buffer, segment.request, digest)) is not None:
            return _row(pb.UnchangedRow.FromString(answer))
    if full := backend.memory.why_full(sum(map(len, segment.payload))):
        raise busy(full)
    result = buffer.extend(segment.key, segment.names, segment.payload)
    row = pb.UnchangedRow(key=segment.key, present=result.present, missing=result.missing)
    if segment.request:
        buffer.answers.remember([segment.request], (digest, row.SerializeToString()))
    return _row(row)


def _row(row: pb.UnchangedRow) -> pb.UnchangedRow | None:
    return row if row.missing or row.present else None
