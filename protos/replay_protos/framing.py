"""Framing: messages whose last field is `bytes payloads = 15`, written and read with as few copies as gRPC allows.

The bytes on the wire are exactly protobuf's. Protobuf itself would copy the payload into the message, out of it, and
once more into a Python object at the other end. Here protobuf encodes the other fields, and the payload chunks are
joined behind them. A reader finds the payload, lets protobuf parse the bytes before the payload, and returns the
payload as a view of the message.
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
"""Top-level fields among which a reader looks for the payload. No message that we write has so many. A message with
more fields is parsed by protobuf as a whole."""
_SMALL = 4096
"""Bytes. Protobuf parses a whole message below this size faster than a reader finds the payload in it."""
# What protobuf writes before a field: its number, then the wire type 2 (length-delimited). Each is one byte long.
_PAYLOADS = 15 << 3 | 2
"""The byte before `bytes payloads = 15`."""
_SHARED = 14 << 3 | 2
"""The byte before `SharedBytes shared = 14`."""


class Frame(NamedTuple, Generic[M]):
    """A message without its payloads, and the payloads beside it."""

    head: M
    payloads: Sequence[bytes | memoryview]
    """A frame to write has any number of consecutive chunks. A frame that was read has one chunk, or none. If its bytes
    were in a ring, it may have one chunk for each row (`take_frame`)."""


class SharedFrame(NamedTuple, Generic[M]):
    """A frame whose payload bytes lie in a ring (`replay_protos.shared_memory`): the message only names their place."""

    head: M
    ring: int
    """Id of the ring."""
    position: int
    """The position of the payload in the ring. Positions go on counting each time that the ring begins anew: see
    `RingWriter`."""
    size: int
    """Bytes of the payload."""


def cut(buffers: Iterable[bytes | memoryview], size: int) -> Iterator[list[memoryview]]:
    """Yields the bytes of the buffers in order, as lists of views with `size` bytes together. Copies nothing.

    The last list may hold fewer bytes.
    """
    chunks: list[memoryview] = []
    room = size
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while rest:
            chunk = rest[:room]  # `room`: the bytes that the present list still lacks
            chunks.append(chunk)
            rest = rest[room:]
            room -= len(chunk)
            if not room:
                yield chunks
                chunks, room = [], size
    if chunks:
        yield chunks


def write_frame(frame: Frame[M] | SharedFrame[M]) -> bytes:
    """The message of a frame as protobuf encodes it."""
    head = frame.head.SerializeToString()
    if isinstance(frame, SharedFrame):
        shared = SharedBytes(ring=frame.ring, position=frame.position, size=frame.size).SerializeToString()
        # SharedBytes has three numbers of 8 bytes, so its length is below 128, and fits into one byte.
        return b"".join((head, bytes((_SHARED, len(shared))), shared))
    size = sum(map(len, frame.payloads))
    if not size:
        return head
    return b"".join((head, bytes((_PAYLOADS,)), _varint(size), *frame.payloads))


def frame_reader(kind: type[M]) -> Callable[[bytes], Frame[M]]:
    """Returns the function that reads the bytes of a message of this kind.

    If the bytes are not laid out as `write_frame` does it, protobuf parses the whole message.
    """

    def read_frame(data: bytes) -> Frame[M]:
        """The frame in the bytes of one message. Raises DecodeError, of protobuf, if the bytes are no such message."""
        # The byte at which the field `payloads` begins, and the bytes at which its value begins and ends.
        field, start, end = (0, 0, 0) if len(data) < _SMALL else _find_payloads(data)
        payload_is_last = start > 0 and end == len(data)
        if payload_is_last:
            head = kind.FromString(data[:field])
            return Frame(head, (memoryview(data)[start:end],) if end > start else ())
        # The message is small, or has another order of fields, which protobuf allows, or is not a message at all,
        # which protobuf refuses.
        head = kind.FromString(data)
        # Every message that is read as a frame has the field; mypy knows only the base class.
        payloads: bytes = head.payloads  # type: ignore[attr-defined]
        head.ClearField("payloads")
        return Frame(head, (payloads,) if payloads else ())

    return read_frame


def _find_payloads(data: bytes) -> tuple[int, int, int]:
    """Finds the field `payloads` in a message: where the field begins, and where its bytes begin and end.

    Returns zeros if the message has no such field among its first _MOST_FIELDS, or if the bytes are no message.
    """
    position = 0
    for _ in range(_MOST_FIELDS):
        field = position
        tag, position = _read_varint(data, position)
        wire_type = tag & 7
        if wire_type == 2:  # the length of the value, then the value
            length, position = _read_varint(data, position)
            if tag == _PAYLOADS:
                return field, position, position + length
            position += length
        elif wire_type == 1:  # a value of 64 bits
            position += 8
        elif wire_type == 5:  # a value of 32 bits
            position += 4
        elif wire_type == 0:  # a varint
            _, position = _read_varint(data, position)
        else:  # the type of a group, which no message of ours has, or no type at all
            break
    return 0, 0, 0


def _varint(value: int) -> bytes:
    """The number in protobuf's encoding: 7 bits a byte, low bits first. All bytes but the last have the top bit set."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The varint at `position`, and the position after it.

    After a varint that is cut off, the position is past the end of `data`.
    """
    value = 0
    for index, byte in enumerate(data[position : position + 10]):  # ten bytes of 7 bits each hold 64 bits
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    return value, len(data) + 1
