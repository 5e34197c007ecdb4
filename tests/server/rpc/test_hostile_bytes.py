"""Bytes that no client of ours sends: damaged groups, and calls that gRPC would refuse to make."""

import socket

import msgpack
import numpy as np
import pytest

from replay_client import ReplayClient, RolloutGroup
from replay_client.rollout import MAGIC
from replay_client.testing import make_group
from replay_server import ReplayServer, TableConfig


def header(**changes) -> bytes:
    """The bytes of a group whose header says what it should not."""
    data = make_group().encode()
    length = int.from_bytes(data[8:16], "little")
    content = msgpack.unpackb(data[16 : 16 + length])
    for path, value in changes.items():
        if path.startswith("array_"):
            content["arrays"][0][int(path[-1])] = value
        else:
            content[path] = value
    packed = msgpack.packb(content)
    start = -(-(16 + len(packed)) // 64) * 64
    body = data[-(-(16 + length) // 64) * 64 :]
    return (MAGIC + len(packed).to_bytes(8, "little") + packed).ljust(start, b"\0") + body


HOSTILE = {
    "empty": b"",
    "pickle": b"\x80\x04\x95" + bytes(100),
    "other format": MAGIC[:-1] + b"\x09" + bytes(100),
    "huge header": MAGIC + (2**64 - 1).to_bytes(8, "little") + bytes(100),
    "no header": MAGIC + bytes(8),
    "deep header": MAGIC + (10_000).to_bytes(8, "little") + b"\x91" * 10_000,
    "huge list": MAGIC + (5).to_bytes(8, "little") + b"\xdd\xff\xff\xff\xff",
    "huge bytes": MAGIC + (5).to_bytes(8, "little") + b"\xc6\xff\xff\xff\xff",
    "object dtype": header(array_1="object"),
    "huge shape": header(array_2=[2**62]),
    "overflowing shape": header(array_2=[2**32, 2**32]),
    "negative shape": header(array_2=[-1]),
    "many dimensions": header(array_2=[1] * 64),
    "zero of much": header(array_2=[0, 2**62]),
    "negative offset": header(array_3=-64),
    "far offset": header(array_3=2**62),
    "unaligned": header(array_3=1),
    "float shape": header(array_2=[3.0]),
    "bool shape": header(array_2=[True]),
    "name is a number": header(array_0=7),
    "arrays is a map": header(arrays={}),
    "fields is a list": header(fields=[]),
    "unknown field": header(fields={"finish_reasons": None, "__class__": "x"}),
    "reasons is a number": header(fields={"finish_reasons": 3}),
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_hostile_bytes_decode_to_a_value_error(payload):
    with pytest.raises(ValueError, match="rollout group"):
        RolloutGroup.decode(payload)


def test_every_truncation_is_an_error():
    data = make_group(extras={"x": np.arange(4)}, meta={"a": 1}).encode()
    for end in range(len(data) - 64):
        with pytest.raises(ValueError, match="rollout group"):
            RolloutGroup.decode(data[:end])


# ------------------------------------------------------------------------------------------------ HTTP/2


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body


def call_bytes(path: bytes = b"/replay.v1.Replay/GetServerInfo", **headers: bytes) -> bytes:
    """All that a client would send for a call with an empty message, as it is; gRPC would refuse to send some of it."""
    named = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x", b"te": b"trailers"}
    named |= {b"content-type": b"application/grpc"} | {name.encode(): value for name, value in headers.items()}
    block = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in named.items())
    start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
    return start + frame(1, 4, 1, block) + frame(0, 1, 1, bytes(5))


def wait_for_answer(connection: socket.socket) -> None:
    """Returns when the server has answered with headers, a reset or a farewell, or has hung up."""
    with connection.makefile("rb") as stream:
        while head := stream.read(9):
            stream.read(int.from_bytes(head[:3]))
            if head[3] in (1, 3, 7):
                return


@pytest.mark.parametrize(
    "data",
    [
        call_bytes(b"/\xff\xfe/x"),
        call_bytes(authorization=b"Bearer \xff\xfe"),
        call_bytes()[:-5] + b"\0\xff\xff\xff\xff",
        call_bytes() + bytes(range(256)) * 100,
    ],
    ids=["path", "token", "length", "garbage"],
)
def test_bytes_that_no_client_sends_do_not_end_the_service_for_others(data):
    tables = [TableConfig(name="plain"), TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 4})]
    with (
        ReplayServer(tables, 0) as server,
        ReplayClient(server.address, timeout=60.0) as client,
        client.writer() as writer,
        client.sampler("queue") as sampler,
    ):
        host, port = server.address.split(":")
        for n in range(3):
            writer.insert(b"before", {"plain": 1.0})
            # grpcio 1.81.0 and older give no answer to a message of 4 GiB, and hang up after a minute.
            with socket.create_connection((host, int(port)), timeout=180) as hostile:
                hostile.sendall(data)
                wait_for_answer(hostile)
            writer.insert(b"after", {"queue": 1.0})
            writer.flush()
            assert bytes(next(sampler)[0].payload) == b"after"
            assert client.server_info().tables["plain"].size == n + 1
