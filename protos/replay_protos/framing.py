"""Framing: messages whose last field is `bytes payloads = 15`, written and read with as few copies as gRPC allows.

The bytes on the wire are exactly protobuf's. Protobuf itself would copy the payload into the message, out of it, and
once more into a Python object at the other end. Here protobuf encodes the other fields, and the payload chunks are
joined behind them. A reader finds the payload, lets protobuf parse the bytes before it, and returns it as a view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from google.protobuf.message import Message

from replay_protos.replay_pb2 import DESCRIPTOR, SharedBytes

M = TypeVar("M", bound=Message)

SERVICE: str = DESCRIPTOR.services_by_name["Replay"].full_name

BYTES_PER_MESSAGE = 1 << 20
"""Payload bytes in one message, about. gRPC in Python is slow with much larger ones."""
_MOST_FIELDS = 64
"""More top-level fields than any message that we write has. Protobuf parses a message with more fields as a whole."""
_SMALL = 4096
"""Bytes below which to let protobuf parse the whole message is faster than to find the payload."""
_PAYLOADS = 15 << 3 | 2  # field 15, length-delimited: one byte
_SHARED = 14 << 3 | 2


class Frame(NamedTuple, Generic[M]):
    """A message without its payloads, and the payloads beside it."""

    head: M
    payloads: Sequence[bytes | memoryview]
    """Consecutive chunks when writing; one view when reading, or none."""


class SharedFrame(NamedTuple, Generic[M]):
    """A frame whose payload bytes lie in a ring (`replay_protos.shared_memory`): only their position is written."""

    head: M
    ring: int
    position: int
    size: int


def cut(buffers: Iterable[bytes | memoryview], size: int) -> Iterator[list[memoryview]]:
    """The bytes of the buffers in order, `size` of them at a time and without a copy. The last list may hold fewer."""
    chunks: list[memoryview] = []
    room = size
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while rest:
            chunks.append(rest[:room])
            rest, room = rest[room:], room - len(chunks[-1])
            if not room:
                yield chunks
                chunks, room = [], size
    if chunks:
        yield chunks


def write_frame(frame: Frame[M] | SharedFrame[M]) -> bytes:
    """The message of a frame as protobuf encodes it."""
    if isinstance(frame, SharedFrame):
        shared = SharedBytes(ring=frame.ring, position=frame.position, size=frame.size).SerializeToString()
        return b"".join((frame.head.SerializeToString(), bytes((_SHARED, len(shared))), shared))
    head, size = frame.head.SerializeToString(), sum(map(len, frame.payloads))
    if not size:
        return head
    return b"".join((head, bytes((_PAYLOADS,)), _varint(size), *frame.payloads))


def frame_reader(kind: type[M]) -> Callable[[bytes], Frame[M]]:
    """Reads the bytes of a message of this kind. Protobuf parses messages that `write_frame` lays out differently."""

    def read_frame(data: bytes) -> Frame[M]:
        field, start, end = (0, 0, 0) if len(data) < _SMALL else _find_payloads(data)
        if not start or end != len(data):
            # The message is small, or has another order of fields, which protobuf allows, or is not a message at all,
            # which protobuf refuses.
            head = kind.FromString(data)
            # Every message that is read as a frame has the field; mypy knows only the base class.
            payloads: bytes = head.payloads  # type: ignore[attr-defined]
            head.ClearField("payloads")
            return Frame(head, (payloads,) if payloads else ())
        head = kind.FromString(data[:field])
        return Frame(head, (memoryview(data)[start:end],) if end > start else ())

    return read_frame


def _find_payloads(data: bytes) -> tuple[int, int, int]:
    """Where the field, and the payload in it, begin and end; zeros if there is none or the message cannot be walked."""
    position = 0
    for _ in range(_MOST_FIELDS):
        field = position
        tag, position = _read_varint(data, position)
        if tag & 7 == 2:
            length, position = _read_varint(data, position)
            if tag == _PAYLOADS:
                return field, position, position + length
            position += length
        elif tag & 7 == 1:
            position += 8
        elif tag & 7 == 5:
            position += 4
        elif tag & 7 == 0:
            _, position = _read_varint(data, position)
        else:
            break
    return 0, 0, 0


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at `position` and where it ends; past the end of `data` if it does not end."""
    value = 0
    for index, byte in enumerate(data[position : position + 10]):  # ten bytes hold 64 bits
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    return value, len(data) + 1
