"""Hostile bytes and messages, made up by hypothesis: the byte formats, and every method of the protocol.

`make fuzz` looks on with atheris, guided by coverage.
"""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay_client import ReplayClient
from replay_client.columns import encode_columns
from replay_client.testing import make_group
from replay_protos import SHORT_METHODS
from replay_protos import replay_pb2 as pb
from replay_protos.framing import SERVICE, frame_reader
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_protos.shared_memory import HEADER
from replay_server import AdmissionConfig, ReplayServer, TableConfig
from tests.server.rpc.rings import CAPACITY, Asking, insert_of
from tests.system.targets import METHODS, TABLES, Service, frame, rollout

NUMBERS = [0, 1, 2, 3, 5, 64, 2**16, 2**16 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
DOUBLES = [0.0, -0.0, 1.0, 0.5, -1.0, 5e-324, 3.4e38, 1e300, math.inf, -math.inf, math.nan]
NAMES = ["plain", "queue", "pool", "archive", "", "nope", "../plain", "a\nb\0", "x" * 300, "age", "priority", "7", "☃"]
CHANGES = [
    {"max_size": 3},
    {"max_size": 0},
    {"sampler": "prioritized"},
    {"remover": {"type": "uniform"}},
    {"max_staleness": 1},
    {"max_times_sampled": 1},
    {"when_full": "block"},
    {"when_full": "reject", "max_bytes": 10},
    {"rate_limiter": {"type": "min_size", "min_size": 2}},
    {"rate_limiter": {"type": "sample_to_insert_ratio", "samples_per_insert": 2.0, "error_buffer": 8.0}},
    {"max_bytes": None, "max_size": 20},
    {"requires": ["c"]},
    {"requires": []},
    {"name": "other"},
    [],
]
Kind = FieldDescriptor


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """One value of a field: what breaks things, and what makes the rest of the message matter."""
    bits = {Kind.CPPTYPE_INT32: (-(2**31), 2**31), Kind.CPPTYPE_UINT32: (0, 2**32)}
    bits |= {Kind.CPPTYPE_INT64: (-(2**63), 2**63), Kind.CPPTYPE_UINT64: (0, 2**64)}
    if field.cpp_type in bits:
        low, high = bits[field.cpp_type]
        odd = [number for number in [*NUMBERS, *(-number for number in NUMBERS)] if low <= number < high]
        return st.integers(0, 8) | st.sampled_from(odd)
    if field.cpp_type == Kind.CPPTYPE_DOUBLE:
        return st.sampled_from([0.0, 0.0, 0.01]) | st.sampled_from(DOUBLES)
    if field.cpp_type == Kind.CPPTYPE_BOOL:
        return st.booleans()
    if field.name == "changes":
        return st.sampled_from(CHANGES).map(json.dumps) | st.text(max_size=20)
    if field.type == Kind.TYPE_BYTES:
        return st.binary(max_size=40) | st.sampled_from([bytes(8), bytes(16), b"\x01" + bytes(7), bytes(5000)])
    if field.cpp_type == Kind.CPPTYPE_STRING:
        return st.sampled_from(NAMES[:4]) | st.sampled_from(NAMES) | st.text(max_size=10)
    return messages(GetMessageClass(field.message_type))


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Any message of a kind: each field absent or not."""

    @st.composite
    def build(draw: st.DrawFn) -> Message:
        message = kind()
        for field in kind.DESCRIPTOR.fields:
            if not draw(st.integers(0, 3)):
                continue
            if field.is_repeated:
                chosen = draw(st.lists(values(field), max_size=4))
                if field.message_type is not None and field.message_type.GetOptions().map_entry:
                    getattr(message, field.name).update({entry.key: entry.value for entry in chosen})
                else:
                    getattr(message, field.name).extend(chosen)
            elif field.message_type is not None:
                getattr(message, field.name).CopyFrom(draw(values(field)))
            else:
                setattr(message, field.name, draw(values(field)))
        return message

    return build()


TABLE = st.sampled_from([*(table.name for table in TABLES)])
KEYS = st.lists(st.integers(1, 12), min_size=1, max_size=4)
DRAW_IDS = st.integers(1 << 40, (1 << 40) + 5)
DRAWS = st.lists(DRAW_IDS, min_size=1, max_size=3)
SAMPLE = st.builds(
    pb.SampleRequest,
    id=DRAW_IDS,
    weigh=st.booleans(),
    table=TABLE,
    num_samples=st.integers(1, 3),
    min_samples=st.sampled_from([None, 1]),
    timeout=st.just(0.0),
    scope=st.sampled_from(["", "", "s"]),
    exclude=st.just([]) | KEYS,
    lease=st.sampled_from([0.0, 0.0, 60.0]),
)


@st.composite
def sensible_insert(draw: st.DrawFn) -> pb.InsertRequest:
    keys = draw(KEYS)
    sizes = draw(st.lists(st.integers(0, 50), min_size=len(keys), max_size=len(keys)))
    tables = draw(st.lists(TABLE, min_size=1, max_size=2, unique=True))
    targets = [
        pb.InsertTarget(table=table, priorities=[draw(st.sampled_from([0, 1, 2]))] * len(keys)) for table in tables
    ]
    return pb.InsertRequest(keys=keys, targets=targets, payload_sizes=sizes, timeout=0.0, payloads=bytes(sum(sizes)))


@st.composite
def sensible_segment(draw: st.DrawFn) -> pb.InsertRequest:
    keys = draw(KEYS)
    size = draw(st.integers(0, 50))
    return pb.InsertRequest(
        keys=keys,
        extend=True,
        columns=[pb.Columns(names=draw(st.lists(st.sampled_from("cde"), min_size=1, max_size=2, unique=True)))],
        requests=draw(st.just([]) | st.just([draw(st.integers(1, 3)) for _ in keys])),
        payload_sizes=[size] * len(keys),
        payloads=bytes(size * len(keys)),
    )


SENSIBLE = {
    pb.InsertRequest: sensible_insert() | sensible_segment(),
    pb.SampleRequest: SAMPLE,
    pb.DrawRequest: st.builds(
        pb.DrawRequest,
        draw=SAMPLE,
        acknowledge=st.just([]) | DRAWS,
        requeue=st.just([]) | DRAWS,
        renew=st.just([]) | DRAWS,
        seconds=st.just(60.0),
    ),
    pb.DeleteRequest: st.builds(pb.DeleteRequest, table=TABLE, keys=KEYS),
    pb.GetRequest: st.builds(pb.GetRequest, keys=KEYS),
    pb.CallRequest: st.builds(
        pb.CallRequest,
        method=st.sampled_from(SHORT_METHODS),
        request=st.builds(pb.DeleteRequest, table=TABLE, keys=KEYS).map(pb.DeleteRequest.SerializeToString),
    ),
    pb.SetPolicyVersionRequest: st.builds(
        pb.SetPolicyVersionRequest, version=st.integers(0, 4), rollback=st.booleans(), weights=st.just("w")
    ),
}
"""Requests that do something; among them the others meet a server that is not empty."""


def requests(method: Any) -> st.SearchStrategy[Message]:
    kind = GetMessageClass(method.input_type)
    return SENSIBLE[kind] | messages(kind) if kind in SENSIBLE else messages(kind)


steps = st.tuples(st.sampled_from(["flip", "cut", "insert", "double"]), st.integers(0, 1 << 16), st.binary(max_size=9))
damage = st.lists(steps)


def damaged(data: bytes, steps: list[tuple[str, int, bytes]]) -> bytes:
    for what, where, some in steps:
        at = where % (len(data) + 1)
        match what:
            case "flip":
                data = data[:at] + bytes([data[at] ^ (1 + where % 255)]) + data[at + 1 :] if at < len(data) else data
            case "cut":
                data = data[:at] + data[at + len(some) :]
            case "insert":
                data = data[:at] + some + data[at:]
            case "double":
                data = data[:at] + data[at // 2 :]
    return data


# ------------------------------------------------------------------------------------------------ byte formats


GROUP = make_group(extras={"x": [1, 2, 3]}, meta={"a": [1, {"b": 2.5}]}, loss_mask=[True] * 6).encode()
LATER = encode_columns({"value": np.zeros(3), "kept": np.zeros(2), "kept/offsets": [0, 1, 1, 2, 2, 2, 2]},
                       {"value": "rollout", "kept": "ragged:token"})  # fmt: skip


@pytest.mark.parametrize("encoded", [GROUP, b"".join([GROUP, *LATER])], ids=["group", "with later columns"])
@given(damage)
@settings(max_examples=300, deadline=None)
def test_a_damaged_group_decodes_to_a_sound_group_or_a_value_error(encoded, steps):
    rollout(damaged(encoded, steps))


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_decode_to_a_group_or_a_value_error(data):
    rollout(data)
    rollout(GROUP[:16] + data)


@given(messages(pb.InsertRequest) | messages(pb.SampleResponse) | messages(pb.GetResponse), damage)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_framing_agrees_with_protobuf_about_any_bytes(message, steps):
    frame(message.SerializeToString())
    frame(damaged(message.SerializeToString(), steps))


# ------------------------------------------------------------------------------------------------ methods


busy = [method for method in METHODS if GetMessageClass(method.input_type) in SENSIBLE]
calls = st.sampled_from([*METHODS, *busy, *busy]).flatmap(
    lambda method: st.tuples(st.just(method), st.lists(requests(method), min_size=1, max_size=3), damage)
)


@pytest.mark.long
@given(st.lists(calls, min_size=1, max_size=12))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_no_sequence_of_messages_unbalances_the_books(sequence):
    """Without the network, where every table, batch and budget can be looked into after each call."""
    service = Service()
    for method, made, _ in sequence:
        service.call(method.name, [as_frame(request) for request in made])


def as_frame(request: Message) -> Any:
    return frame_reader(type(request))(request.SerializeToString()) if hasattr(request, "payloads") else request


@pytest.fixture(scope="module", params=["grpc", "shared memory"])
def server(request):
    admission, rings = AdmissionConfig(fresh_groups_per_step=4, max_staleness=1), request.param == "shared memory"
    folder = Path("/dev/shm") if rings else False
    with ReplayServer(tables=TABLES, port=0, admission=admission, shared_memory=folder) as server:
        yield server


@given(st.lists(calls, min_size=1, max_size=3))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_message_breaks_a_server_and_every_answer_is_one_of_ours(server, sequence):
    """Over a socket, as they are made and as damaged bytes."""
    with grpc.insecure_channel(server.address) as channel:
        for method, made, steps in sequence:
            for raw in (
                [request.SerializeToString() for request in made],
                [damaged(made[0].SerializeToString(), steps)],
            ):
                code, details = answer(channel, method, raw)
                assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), f"{method.name}: {details}"
    with ReplayClient(server.address, timeout=60.0) as client:
        client.update_table("plain", max_size=20, sampler="fifo", rate_limiter="min_size", when_full="evict",
                            max_bytes=None, max_staleness=None, max_times_sampled=0, remover="fifo")  # fmt: skip
        key = client.insert(b"alive", {"plain": 1.0}, policy_version=client.policy().version)
        assert client.get([key])[0].payload == b"alive"
        client.delete("plain", [key])


PLACE = st.sampled_from([*NUMBERS, CAPACITY - 1, CAPACITY, CAPACITY + 1]) | st.integers(0, CAPACITY)
UNUSED_KEYS = itertools.count(1)
PLACES = st.lists(st.tuples(PLACE, PLACE), min_size=1, max_size=6)


@given(PLACES)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_no_place_in_a_ring_brings_other_bytes_than_the_ring_s_or_breaks_a_server(ring_server, places):
    stored, codes = dict[int, int](), set()
    with grpc.insecure_channel(ring_server.address) as channel, Asking(stub := ReplayStub(channel)) as session:
        for position, size in places:
            segment, key = session.ring(), next(UNUSED_KEYS)
            segment.view[HEADER:] = b"\7" * CAPACITY
            try:
                (response,) = stub.InsertStream(iter([insert_of(key, segment.ring_id, position, size)]), timeout=60)
                stored |= {} if response.errors else {key: size}
            except grpc.RpcError as error:
                codes.add(error.code())
            session(close=segment.ring_id)  # a ring belongs to one stream
    assert codes <= {grpc.StatusCode.INVALID_ARGUMENT}
    with ReplayClient(ring_server.address, timeout=60.0) as client:
        found = {item.key: bytes(item.payload) for item in client.get(stored)}
        assert found == {key: b"\7" * size for key, size in stored.items()}
        client.delete("plain", list(stored))


@pytest.fixture
def ring_server():
    with ReplayServer(tables=[TableConfig(name="plain", sampler="fifo")], port=0) as server:
        yield server


def answer(channel: grpc.Channel, method: Any, raw: list[bytes]) -> tuple[grpc.StatusCode, str]:
    path = f"/{SERVICE}/{method.name}"
    try:
        if method.client_streaming:
            list(channel.stream_stream(path)(iter(raw), timeout=0.1))
        elif method.server_streaming:
            list(channel.unary_stream(path)(raw[0], timeout=0.1))
        else:
            channel.unary_unary(path)(raw[0], timeout=0.1)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""
