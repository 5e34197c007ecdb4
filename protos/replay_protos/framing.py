"""Framing: messages whose last field is `bytes payloads = 15`, written and read with as few copies as gRPC allows.

The bytes on the wire are exactly protobuf's. Protobuf itself would copy the payload into the message, out of it, and
once more into a Python object at the other end. Here protobuf encodes the other fields, and the payload chunks are
joined behind them. A reader finds the payload, lets protobuf parse the bytes before it, and returns the payload as a
view of the bytes of the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from google.protobuf.message import Message

from replay_protos.replay_pb2 import DESCRIPTOR, SharedBytes

M = TypeVar("M", bound=Message)

SERVICE: str = DESCRIPTOR.services_by_name["Replay"].full_name

BYTES_PER_MESSAGE = 1 << 20
"""The approximate number of payload bytes in one message. gRPC in Python is slow with much larger messages."""
_MOST_FIELDS = 64
"""The number of top-level fields among which a reader looks for the payload. No message that we write has so many
fields. If another program writes a message with more fields, protobuf parses it as a whole."""
_SMALL = 4096
"""A size in bytes. Protobuf parses a whole message below this size faster than a reader finds the payload in it."""
# A tag is what protobuf writes before a field: the number of the field, and the wire type 2 (length-delimited). Each of
# these two tags is one byte long.
_PAYLOADS_TAG = 15 << 3 | 2
"""The tag of `bytes payloads = 15`."""
_SHARED_TAG = 14 << 3 | 2
"""The tag of `SharedBytes shared = 14`."""


class Frame(NamedTuple, Generic[M]):
    """A message without its payloads, and the payloads beside it."""

    head: M
    payloads: Sequence[bytes | memoryview]
    """The payload bytes, as consecutive chunks. A frame to write may have any number of chunks. A frame that was read
    has one chunk, or none if there are no payload bytes. If its bytes were in a ring, it may have one chunk for each
    row (`replay_protos.shared_memory.take_frame`)."""


class SharedFrame(NamedTuple, Generic[M]):
    """A frame whose payload bytes lie in a ring (`replay_protos.shared_memory`): the message only names their place."""

    head: M
    ring: int
    """The id of the ring."""
    position: int
    """The position of the payload in the ring. Positions never decrease, also when the ring begins anew: see
    `RingWriter`."""
    size: int
    """The number of bytes of the payload."""


def cut(buffers: Iterable[bytes | memoryview], size: int) -> Iterator[list[memoryview]]:
    """Yields the bytes of the buffers in order, as lists of views. The views of a list have `size` bytes in all; those
    of the last list may have fewer. Copies nothing."""
    chunks: list[memoryview] = []  # the list that is filled now
    room = size  # the number of bytes that `chunks` still lacks
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while rest:
            chunk = rest[:room]
            chunks.append(chunk)
            rest = rest[room:]
            room -= len(chunk)
            if not room:
                yield chunks
                chunks = []
                room = size
    if chunks:
        yield chunks


def write_frame(frame: Frame[M] | SharedFrame[M]) -> bytes:
    """Encodes the message of a frame, to the bytes that protobuf would write."""
    head = frame.head.SerializeToString()
    if isinstance(frame, SharedFrame):
        shared = SharedBytes(ring=frame.ring, position=frame.position, size=frame.size).SerializeToString()
        # SharedBytes has three numbers of 8 bytes each. So its length is below 128, and is written as one byte.
        return b"".join((head, bytes((_SHARED_TAG, len(shared))), shared))
    size = sum(map(len, frame.payloads))
    if not size:
        return head
    return b"".join((head, bytes((_PAYLOADS_TAG,)), _varint(size), *frame.payloads))


def frame_reader(kind: type[M]) -> Callable[[bytes], Frame[M]]:
    """Returns the function that reads a frame from the bytes of a message of this kind.

    If the payload is not the last field of the bytes, as `write_frame` writes it, protobuf parses the whole message.
    """

    def read_frame(data: bytes) -> Frame[M]:
        """Reads the frame from the bytes of one message. Raises protobuf's DecodeError if the bytes are no message of
        this kind."""
        # `field` is the offset of the field `payloads` in `data`. `start` and `end` are the offsets of its value.
        if len(data) < _SMALL:
            field = 0
            start = 0
            end = 0
        else:
            field, start, end = _find_payloads(data)
        payload_is_last = start > 0 and end == len(data)
        if payload_is_last:
            head = kind.FromString(data[:field])
            if start == end:  # the payload is empty
                return Frame(head, ())
            return Frame(head, (memoryview(data)[start:end],))
        # The message is small, or its fields have another order, which protobuf allows, or the bytes are no message at
        # all. In the last case, protobuf raises DecodeError.
        head = kind.FromString(data)
        # Every message that is read as a frame has the field; mypy knows only the base class.
        payloads: bytes = head.payloads  # type: ignore[attr-defined]
        head.ClearField("payloads")
        return Frame(head, (payloads,) if payloads else ())

    return read_frame


def _find_payloads(data: bytes) -> tuple[int, int, int]:
    """Finds the field `payloads` in a message. Returns the offsets at which the field begins, and at which its value
    begins and ends.

    Returns zeros if the message has no such field among its first _MOST_FIELDS, or if the bytes are no message.
    """
    position = 0
    for _ in range(_MOST_FIELDS):
        field = position
        tag, position = _read_varint(data, position)
        wire_type = tag & 7
        if wire_type == 2:  # the length of the value comes first, then the value
            length, position = _read_varint(data, position)
            if tag == _PAYLOADS_TAG:
                return field, position, position + length
            position += length
        elif wire_type == 1:  # a value of 64 bits
            position += 8
        elif wire_type == 5:  # a value of 32 bits
            position += 4
        elif wire_type == 0:  # a varint
            _, position = _read_varint(data, position)
        else:  # the wire type of a group, which no message of ours has, or no wire type at all
            break
    return 0, 0, 0


def _varint(value: int) -> bytes:
    """A number as protobuf encodes it: 7 bits in each byte, the low bits first. All bytes but the last have the top bit
    set."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The value of the varint at `position`, and the position after the varint.

    If the varint is cut off or too long, the returned position is past the end of `data`.
    """
    value = 0
    for index, byte in enumerate(data[position : position + 10]):  # ten bytes of 7 bits each hold 64 bits
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    return value, len(data) + 1
