"""A client that cuts, grows or empties the memory of its rings harms nobody: the server lives and serves the others."""

import ctypes
import itertools
import os
import subprocess
import sys
from contextlib import suppress

import grpc
import pytest

from replay_client import ReplayClient
from replay_protos import replay_pb2 as pb
from replay_protos.shared_memory import HEADER
from tests.kit.processes import server_process
from tests.server.rpc.calls import bystander
from tests.server.rpc.rings import Asking, insert_of, open_rings, own_folder

TABLES = """
tables = [{ name = "plain", sampler = "fifo" }, { name = "pool", sampler = "uniform", max_size = 64 }]
"""
CAPACITY = 16 << 20
KEYS = itertools.count(1)
SIZES = {"16 kB": 16 << 10, "106 kB": 106_000, "4 MB": 4 << 20}
PUNCH_HOLE, KEEP_SIZE = 2, 1


def punch(path: str) -> None:
    """Gives all memory of the file back to the system; its size stays."""
    fd = os.open(path, os.O_RDWR)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_longlong(os.fstat(fd).st_size)
        if libc.fallocate(fd, PUNCH_HOLE | KEEP_SIZE, ctypes.c_longlong(0), size):
            raise OSError(ctypes.get_errno(), "fallocate")
    finally:
        os.close(fd)


HARM = {
    "cut to nothing": lambda path: os.truncate(path, 0),
    "cut behind the header": lambda path: os.truncate(path, HEADER),
    "cut in the middle of a page": lambda path: os.truncate(path, HEADER + 5_000),
    "grown": lambda path: os.truncate(path, 64 << 20),
    "emptied": punch,
}


def do_harm(kind: str) -> int:
    """How many rings of this process it has tried to harm."""
    paths = open_rings().values()
    for path in paths:
        with suppress(OSError):  # the system may forbid it
            HARM[kind](path)
    return len(paths)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    config = tmp_path_factory.mktemp("server")
    with own_folder() as folder, server_process(config, f'server.shared_memory = "{folder}"\n{TABLES}') as server:
        yield server


@pytest.fixture
def server(running):
    yield running
    assert running.process.poll() is None, "the server died"
    with ReplayClient(running.address) as client:
        client.reset("")


@pytest.fixture
def client(server):
    with ReplayClient(server.address, timeout=60.0, shared_memory=False) as client:
        yield client


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", HARM)
def test_a_server_reads_from_a_ring_that_its_client_has_harmed(server, stub, client, kind, size):
    key = next(KEYS)
    with Asking(stub) as session, bystander(client):
        ring = session.ring(CAPACITY)
        ring.view[HEADER : HEADER + size] = b"\7" * size
        assert do_harm(kind)
        with suppress(grpc.RpcError):
            list(stub.InsertStream(iter([insert_of(key, ring.ring_id, 0, size)]), timeout=60))
    assert [set(bytes(item.payload)) for item in client.get([key])] in ([], [{7}], [{0}])
    assert client.get([client.insert(b"another", {"pool": 1.0})])


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", HARM)
def test_a_server_writes_to_a_ring_that_its_client_has_harmed(server, stub, client, kind, size):
    keys = [client.insert(bytes(size), {"pool": 1.0}) for _ in range(4)]
    with Asking(stub) as session, bystander(client):
        for method, request in [
            (stub.Sample, pb.SampleRequest(table="pool", num_samples=4, timeout=5.0)),
            (stub.Get, pb.GetRequest(keys=keys)),
        ]:
            ring = session.ring(CAPACITY)
            request.ring = ring.ring_id
            assert do_harm(kind)
            with suppress(grpc.RpcError):
                list(method(request, timeout=60))
    assert len(client.get(keys)) == 4


CLIENT = """
import sys, threading
from contextlib import suppress
from replay_client import ReplayClient
from tests.server.rpc.test_cut_rings import HARM, do_harm

stop, harmed, size = threading.Event(), threading.Event(), int(sys.argv[2])
def harm():
    while not stop.is_set():
        if do_harm("cut to nothing"):
            harmed.set()

client = ReplayClient(sys.argv[1], timeout=60.0)
client.insert(bytes(size), {"pool": 1.0})
with client.writer() as writer, client.sampler("pool", 2) as batches:
    writer.insert(bytes(size), {"pool": 1.0})
    next(batches)
    thread = threading.Thread(target=harm)
    thread.start()
    turns = 0
    while turns < 60 or not harmed.is_set():  # on a loaded machine the rings come later than the first payloads
        writer.insert(bytes(size), {"pool": 1.0})
        next(batches)
        turns += 1
    stop.set()
    thread.join()
assert client.transport == "shared memory", client.transport
"""


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_client_that_cuts_its_rings_while_it_inserts_and_samples_harms_nobody(server, client, size):
    with bystander(client):
        ended = subprocess.run(
            [sys.executable, "-c", CLIENT, server.address, str(size)], capture_output=True, text=True, timeout=200
        )
    assert ended.returncode == 0
    assert ended.stderr == ""
