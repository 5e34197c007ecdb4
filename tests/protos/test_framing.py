"""Frames are protobuf on the wire, whichever way they were written or are read."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame, frame_reader, write_frame

read = frame_reader(pb.InsertRequest)
HEADS = st.builds(
    pb.InsertRequest,
    keys=st.lists(st.integers(0, 2**64 - 1), max_size=3),
    policy_versions=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    targets=st.lists(st.builds(pb.InsertTarget, table=st.text(max_size=5), rows=st.lists(st.integers(0, 9)))),
    timeout=st.none() | st.floats(0, 1e9),
    permits=st.integers(0, 2**64 - 1),
)
PIECES = st.lists(st.binary(max_size=300), max_size=4)


@given(HEADS, PIECES)
def test_a_frame_is_written_as_protobuf_writes_its_message(head, pieces):
    message = pb.InsertRequest()
    message.CopyFrom(head)
    message.payloads = b"".join(pieces)
    assert write_frame(Frame(head, pieces)) == message.SerializeToString()


@given(HEADS, PIECES)
def test_what_was_written_is_read(head, pieces):
    frame = read(write_frame(Frame(head, pieces)))
    assert frame.head == head
    assert b"".join(frame.payloads) == b"".join(pieces)


@given(HEADS, st.binary(min_size=1, max_size=300), HEADS)
def test_other_orders_of_fields_are_read_too(head, payload, more):
    # Protobuf lets fields come in any order and merges repeated messages.
    data = pb.InsertRequest(payloads=payload).SerializeToString() + head.SerializeToString()
    data = more.SerializeToString() + data
    expected = pb.InsertRequest.FromString(data)
    frame = read(data)
    assert b"".join(frame.payloads) == payload
    expected.ClearField("payloads")
    assert frame.head == expected


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused_as_protobuf_refuses_them(data):
    try:
        expected = pb.InsertRequest.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            read(data)
        return
    frame = read(data)
    assert b"".join(frame.payloads) == expected.payloads
    expected.ClearField("payloads")
    assert frame.head.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
