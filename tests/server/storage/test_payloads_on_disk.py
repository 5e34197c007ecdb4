"""Payloads that live on disk: damaged ones are never served, and they take no memory."""

import os
import time
from pathlib import Path

import grpc
import psutil
import pytest

from replay_client import ReplayClient
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import ReplayServer, TableConfig
from tests.factories import server_process

QUEUE = TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 100})
POOL = TableConfig(name="pool", sampler="fifo")


def damage(data_dir: Path, payload: bytes) -> None:
    """Flips a bit in the middle of a payload."""
    path = data_dir / "data.mdb"
    data = bytearray(path.read_bytes())
    at = data.index(payload) + len(payload) // 2
    data[at] ^= 4
    path.write_bytes(data)


@pytest.fixture(params=["found at once", "found on the way"])
def damaged(tmp_path, request, monkeypatch, transport):
    """A server with items 0 to 5 in both tables, of which 2 is damaged."""
    if request.param == "found on the way":
        monkeypatch.setattr("replay_server.tables.items.BYTES_PER_READ", 5000)
    payloads = [os.urandom(3000) for _ in range(6)]
    with ReplayServer([QUEUE, POOL], port=0, data_dir=tmp_path) as server, ReplayClient(server.address) as client:
        for key, payload in enumerate(payloads):
            client.insert(payload, {"queue": 1.0, "pool": 1.0}, key=key)
    damage(tmp_path, payloads[2])
    with ReplayServer([QUEUE, POOL], port=0, data_dir=tmp_path) as server, ReplayClient(server.address) as client:
        yield client
        info = client.server_info()
        assert (info.damaged, info.tables["pool"].deleted) == (1, 1)
        assert not client.get([2])


def test_a_sample_gets_others_in_place_of_a_damaged_item(damaged):
    assert [sample.info.key for sample in damaged.sample("queue", 5)] == [0, 1, 3, 4, 5]


def test_a_sampler_goes_on_past_a_damaged_item(damaged):
    with damaged.sampler("queue", batch_size=1) as sampler:
        assert [next(sampler)[0].info.key for _ in range(5)] == [0, 1, 3, 4, 5]


def test_get_says_that_a_damaged_item_is_missing(damaged):
    assert [item.key for item in damaged.get(range(6))] == [0, 1, 3, 4, 5]


def test_a_checkpoint_goes_without_a_damaged_item(damaged):
    name = damaged.checkpoint()
    (found,) = damaged.checkpoints(verify=True)
    assert (found.name, found.intact, found.items) == (name, True, 5)


def test_a_buffer_larger_than_its_memory_works(tmp_path):
    config = f'[server]\ndata_dir = "{tmp_path}/data"\n[[tables]]\nname = "pool"\nsampler = "fifo"\n'
    with server_process(tmp_path, config) as server, ReplayClient(server.address, timeout=5.0) as client:
        process = psutil.Process(server.process.pid)
        blob, keys = os.urandom(1 << 20), []
        with client.writer() as writer:
            keys = [writer.insert(blob, {"pool": 1.0}) for _ in range(300)]
        assert client.server_info().bytes == 300 << 20
        for key in keys[::10]:
            assert bytes(client.get([key])[0].payload) == blob
        memory = process.memory_info()
        assert memory.rss - memory.shared < 200 << 20  # what is mapped from the file is the system's to take back


def test_answers_that_are_not_read_keep_little_in_memory_and_others_not_waiting(tmp_path):
    config = f'[server]\ndata_dir = "{tmp_path}/data"\n[[tables]]\nname = "pool"\nsampler = "fifo"\n'
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        process = psutil.Process(server.process.pid)
        blob, keys = os.urandom(1 << 20), []
        with client.writer() as writer:
            keys = [writer.insert(blob, {"pool": 1.0}) for _ in range(300)]
        memory = process.memory_info()
        before = memory.rss - memory.shared
        with grpc.insecure_channel(server.address) as channel:
            stub = ReplayStub(channel)
            requests = [stub.Get(pb.GetRequest(keys=keys)) for _ in range(3)]
            requests += [stub.Sample(pb.SampleRequest(table="pool", num_samples=300, lease=9)) for _ in range(3)]
            deadline = time.monotonic() + 2.0
            while time.monotonic() < deadline:
                client.policy()  # an error if it has to wait for long
            memory = process.memory_info()
            assert memory.rss - memory.shared - before < 150 << 20
            for number, request in enumerate(requests):
                if number in (1, 4):  # the others are given up unread
                    assert sum(len(piece.payloads) for piece in request) == 300 << 20
                request.cancel()
