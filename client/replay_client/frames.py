"""Frames: how items are laid out over messages (conventions in replay.proto), from the client's side."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from replay_client.errors import InvalidRequestError
from replay_client.records import Buffer
from replay_client.requests import whole_number
from replay_client.rollout import RolloutGroup
from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame

MESSAGE_BYTES = 1 << 20
"""Payload bytes in one message, about: gRPC in Python is slow with much larger ones."""
MESSAGE_ROWS = 256
"""Items in one message: more of them make it no faster, and their acknowledgement later."""


class KeySequence:
    """Keys that no other client chooses: 38 random bits, then a counter of 24. Not safe across a fork."""

    def __init__(self) -> None:
        self._keys: Iterator[int] = iter(())

    def __next__(self) -> int:
        key = next(self._keys, None)
        if key is None:
            start = (secrets.randbits(38) | 1 << 38) << 24
            self._keys = iter(range(start, start + (1 << 24)))
            key = next(self._keys)
        return key

    def __iter__(self) -> KeySequence:
        return self


@dataclass(slots=True)  # not frozen: that would make it four times as slow to create
class Item:
    """One item on its way to the server."""

    key: int
    priorities: Mapping[str, float]
    policy_version: int
    payload: Sequence[Buffer]
    """Consecutive buffers."""
    nbytes: int
    timeout: float | None
    """Seconds it may wait to be admitted; None: for ever."""
    permits: int = 0

    @classmethod
    def of(
        cls,
        key: int,
        group: RolloutGroup | Buffer,
        priorities: Mapping[str, float],
        policy_version: int | None,
        timeout: float | None,
        permits: int,
    ) -> Item:
        if isinstance(group, RolloutGroup):
            payload: Sequence[Buffer] = group.encode_pieces()
            version = group.policy_version if policy_version is None else policy_version
        elif isinstance(group, bytes | bytearray | memoryview):
            if isinstance(group, memoryview):
                group = group.cast("B")  # the length of any other view is not its number of bytes
            payload, version = (group,), policy_version or 0
        else:
            raise InvalidRequestError(f"a group must be a RolloutGroup or its bytes, not a {type(group).__name__}")
        # All of it here, where the caller is: in a pipeline it would stop the items of others.
        key, version = whole_number("key", key, 64), whole_number("policy_version", version, 63)
        try:
            "".join(priorities).encode()  # nothing else can travel as a name
            priorities = {table: float(priority) for table, priority in priorities.items()}
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"priorities must be numbers by table name, not {priorities}: {error}") from error
        nbytes = len(payload[0]) if len(payload) == 1 else sum(map(len, payload))
        return cls(key, priorities, version, payload, nbytes, timeout, permits)


def pack_items(items: Sequence[Item]) -> Iterator[Frame[pb.InsertRequest]]:
    """The messages for `items`: small ones many to a message, large ones in pieces."""
    start = 0
    while start < len(items):
        first, stop, nbytes = items[start], start, 0
        while (
            stop < len(items)
            and stop - start < MESSAGE_ROWS
            and (stop == start or nbytes + items[stop].nbytes <= MESSAGE_BYTES)
            and (items[stop].permits, items[stop].timeout) == (first.permits, first.timeout)
        ):
            nbytes += items[stop].nbytes
            stop += 1
        yield from _message(items[start:stop], nbytes)
        start = stop


def _message(items: Sequence[Item], nbytes: int) -> Iterator[Frame[pb.InsertRequest]]:
    request = pb.InsertRequest(
        keys=[item.key for item in items],
        policy_versions=[item.policy_version for item in items],
        targets=_targets(items),
        payload_sizes=[item.nbytes for item in items],
        timeout=items[0].timeout,
        permits=items[0].permits,
    )
    if nbytes <= MESSAGE_BYTES:
        yield Frame(request, [piece for item in items for piece in item.payload])
        return
    for pieces in _cut(items[0].payload):
        yield Frame(request, pieces)
        request = pb.InsertRequest()


def _cut(payload: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """The buffers in portions of MESSAGE_BYTES, without copying them."""
    portion: list[Buffer] = []
    room = MESSAGE_BYTES
    for buffer in payload:
        rest = memoryview(buffer).cast("B")
        while rest:
            portion.append(rest[:room])
            rest, room = rest[room:], room - len(portion[-1])
            if not room:
                yield portion
                portion, room = [], MESSAGE_BYTES
    if portion:
        yield portion


def _targets(items: Sequence[Item]) -> list[pb.InsertTarget]:
    rows: dict[str, list[int]] = {}
    for row, item in enumerate(items):
        for table in item.priorities:
            rows.setdefault(table, []).append(row)
    return [
        pb.InsertTarget(
            table=table,
            priorities=[items[row].priorities[table] for row in chosen],
            rows=[] if len(chosen) == len(items) else chosen,
        )
        for table, chosen in rows.items()
    ]


class PayloadJoiner:
    """Gathers the payloads of the rows of a batch from its messages."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._sizes = list(sizes)
        self._pieces: list[memoryview] = []
        self._missing = self._sizes[0] if self._sizes else 0
        self.payloads: list[Buffer] = []
        self._finish_empty()

    @property
    def complete(self) -> bool:
        return len(self.payloads) == len(self._sizes)

    def feed(self, payloads: Sequence[Buffer]) -> None:
        for payload in payloads:
            self._feed(memoryview(payload))

    def _feed(self, rest: memoryview) -> None:
        while rest:
            if self.complete:
                raise ValueError(f"{len(rest)} payload bytes more than the sizes of the batch say")
            piece, rest = rest[: self._missing], rest[self._missing :]
            self._pieces.append(piece)
            self._missing -= len(piece)
            if self._missing == 0:
                self._finish_row()
                self._finish_empty()

    def _finish_row(self) -> None:
        # Views, not copies, unless a payload came in several messages.
        self.payloads.append(self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces))
        self._pieces = []
        if not self.complete:
            self._missing = self._sizes[len(self.payloads)]

    def _finish_empty(self) -> None:
        while not self.complete and self._missing == 0:
            self._finish_row()
