"""Shared memory between clients and a server: who gets a ring, what goes through it, and what is left after a kill."""

import asyncio
import errno
import gc
import itertools
import logging
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from replay_client import AsyncReplayClient, ReplayClient
from replay_client.testing import until
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_protos.shared_memory import HEADER, Mailbox, Segment
from replay_server import ReplayServer, TableConfig
from replay_server.config import LimitsConfig
from tests.kit.clocks import in_a_thread
from tests.kit.faults import small_disk
from tests.kit.processes import free_port, server_process
from tests.server.rpc.calls import Requests, bystander, connection
from tests.server.rpc.rings import CAPACITY, Asking, insert_of, open_rings, own_folder

TABLES = [TableConfig(name="plain", sampler="fifo"), TableConfig(name="pool", sampler="uniform", max_size=64)]
MB = 1 << 20
NOT_KNOWN = "grpc: no large payload was sent or received yet"
SAY = f"while (way := client.transport) == {NOT_KNOWN!r}: pass"
"""A line of a client's program: after it the way of payloads is known, which on a loaded machine takes a while."""


@pytest.fixture
def folder():
    with own_folder() as folder:
        yield folder


@pytest.fixture
def rings():
    """The bytes of the rings that this process has opened since the test began: those of its server and clients."""
    before = open_rings()

    def sizes() -> dict[int, int]:
        found = {}
        for ring, path in open_rings().items():
            with suppress(OSError):  # it has ended meanwhile
                found[ring] = os.stat(path).st_size
        return {ring: size for ring, size in found.items() if ring not in before}

    return sizes


@pytest.fixture
def server(folder):
    with ReplayServer(tables=TABLES, port=0, shared_memory=folder) as server:
        yield server


def works(address: str, expected: str = "shared memory") -> None:
    """Large payloads go in and come out by every method that carries them, on the expected way."""
    payload = random.randbytes(3 * MB)
    with ReplayClient(address, timeout=60.0) as client:
        keys = [client.insert(payload, {"pool": 1.0}) for _ in range(3)]
        with client.writer() as writer:
            keys += [writer.insert(payload, {"pool": 1.0}) for _ in range(12)]
        until(lambda: client.transport.startswith(expected), client.transport)
        drawn = []
        for _ in range(3):
            assert [bytes(item.payload) for item in client.get(keys[-2:])] == [payload] * 2
            drawn += client.sample("pool", 2)
        with client.sampler("pool", 4) as batches:
            for _ in range(6):
                drawn += next(batches)
            while not any(sample.info.key in keys for sample in drawn):  # others insert here, too
                drawn += next(batches)
        assert {bytes(sample.payload) for sample in drawn if sample.info.key in keys} == {payload}


# --------------------------------------------------------------------------------------------------- who gets a ring


def test_payloads_of_every_method_go_through_rings_and_nothing_is_left(server, folder, rings):
    works(server.address)
    until(lambda: not rings(), "a ring is still there")
    server.stop()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("shared", [True, False], ids=["ring", "grpc"])
def test_items_above_the_size_of_a_frame_come_out_whole_beside_small_ones(server, shared):
    sent = [random.randbytes(size) for size in (9 * MB + 1, 0, 17, 5 * MB, 100_000, 100_000, 4 * MB, 4 * MB + 1)]
    with ReplayClient(server.address, timeout=60.0, shared_memory=shared) as client:
        with client.writer() as writer:
            keys = [writer.insert(payload, {"pool": 1.0}) for payload in sent]
        whole = dict(zip(keys, sent, strict=True))
        for _ in range(2):  # the second response of each kind finds a ring
            assert [bytes(item.payload) for item in client.get(keys)] == sent
            assert {sample.info.key: bytes(sample.payload) for sample in client.sample("pool", len(sent))} == whole
        with client.sampler("pool", len(sent)) as batches:
            for _ in range(2):
                assert {sample.info.key: bytes(sample.payload) for sample in next(batches)} == whole


def test_writers_that_follow_each_other_share_a_ring(client, rings):
    payload = random.randbytes(MB)

    def write() -> set[int]:
        with client.writer() as writer:
            keys = [writer.insert(payload, {"pool": 1.0}) for _ in range(2)]
        assert [bytes(item.payload) for item in client.get(keys)] == [payload] * 2
        return set(rings())

    for _ in range(30):  # more than fit into the ring
        write()
    # One for the writers and one for `get`. On a loaded machine a ring can come too late for the writer that asked.
    until(lambda: len(first := write()) == 2 and write() == first)


def test_a_writer_that_is_cut_off_takes_its_ring_with_it(client, rings):
    payload = random.randbytes(MB)

    def write() -> int:
        with client.writer() as writer:
            return writer.insert(payload, {"pool": 1.0})

    until(lambda: write() and rings())  # on a loaded machine the first ring comes too late for the call that asked
    with suppress(KeyboardInterrupt), client.writer() as writer:
        writer.insert(payload, {"pool": 1.0})
        raise KeyboardInterrupt
    for _ in range(3):
        assert [bytes(item.payload) for item in client.get([write()])] == [payload]
    until(lambda: len(rings()) <= 2, "the ring of the writer that failed is still there")


def test_small_payloads_need_no_ring(client, rings):
    client.insert(b"small", {"plain": 1.0})
    client.sample("plain", 1)
    assert not rings()
    until(lambda: client.transport == "shared memory")


def test_a_client_can_refuse(server, rings):
    with ReplayClient(server.address, shared_memory=False) as client:
        client.insert(bytes(MB), {"plain": 1.0})
        assert client.transport == "grpc: shared memory is turned off in this client (shared_memory=False)"
    assert not rings()


def test_a_server_can_refuse():
    with ReplayServer(tables=TABLES, port=0, shared_memory=False) as server:
        works(server.address, "grpc: the server does not share memory")


def test_an_asyncio_client_says_how_payloads_travel(server):
    async def ask() -> tuple[str, str, str]:
        async with AsyncReplayClient(server.address) as client:
            before = client.transport
            while (found := await client.find_transport()) == before:  # on a loaded machine it gives up at first
                pass
            return before, found, client.transport

    before, found, after = asyncio.run(ask())
    assert before == NOT_KNOWN
    assert found == "shared memory"
    assert after == "shared memory"


@pytest.mark.parametrize("left", [False, True], ids=["another folder", "the socket of another host"])
def test_a_client_whose_socket_the_server_does_not_see_uses_grpc_and_says_why(
    server, folder, tmp_path, rings, monkeypatch, left
):
    def elsewhere(path: Path) -> Mailbox:
        if left:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as nobody:
                nobody.bind(str(path))
        return Mailbox(tmp_path / path.name)

    monkeypatch.setattr("replay_client.rings.Mailbox", elsewhere)
    works(server.address, "grpc: the server runs on another host, or in a container")
    until(lambda: not rings(), "a ring is still there")
    assert not [*folder.iterdir(), *tmp_path.iterdir()]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_client_of_another_user_uses_grpc_and_says_why(server, folder):
    folder.chmod(0o755)
    program = (
        "import concurrent.futures.thread, os, sys; from replay_client import ReplayClient\n"
        "with ReplayClient(sys.argv[1]) as client:\n"
        "    client.insert(b'small', {'plain': 1.0}); os.setuid(65534)\n"
        f"    client.insert(bytes(1 << 20), {{'plain': 1.0}})\n    {SAY}\n    print(way)"
    )
    ended = subprocess.run([sys.executable, "-c", program, server.address], capture_output=True, text=True, timeout=200)
    assert ended.stdout.startswith("grpc: client and server run as different users"), ended.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make namespaces")
def test_a_client_in_a_container_that_shares_the_folder_has_rings(server):
    """Processes, mounts, users of memory and host name of its own: what a container has, but for the network."""
    program = (
        "import os, sys; from replay_client import ReplayClient\n"
        "with ReplayClient(sys.argv[1]) as client:\n"
        f"    client.insert(bytes(1 << 20), {{'plain': 1.0}})\n    {SAY}\n    print(os.getpid(), way)"
    )
    unshare = ["unshare", "--pid", "--fork", "--mount", "--ipc", "--uts"]
    command = [*unshare, sys.executable, "-c", program, server.address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if "unshare failed" in ended.stderr:
        pytest.skip("no namespace can be made here")
    assert ended.stdout.strip() == "1 shared memory", ended.stderr


def test_a_ring_that_its_client_has_not_received_carries_nothing_and_leaves_no_socket(stub, folder):
    with Asking(stub) as session:
        opened = session(open=CAPACITY)
        assert "is not this one's" in session(send=opened.ring).refusal
        with pytest.raises(grpc.RpcError, match="not one of this stream's"):
            list(stub.InsertStream(iter([insert_of(1, opened.ring, 0, 100)]), timeout=60))
        mailbox = Mailbox(Path(opened.path))
    until(lambda: not list(folder.iterdir()), "the socket of a client that has ended is still there")
    assert mailbox.receive(opened.ring, CAPACITY) is None


def test_a_ring_that_was_refused_gives_its_memory_back_before_any_collector_runs(folder, rings):
    limits = LimitsConfig(max_shared_bytes=20 * MB)  # one connection may use half of it
    gc.disable()
    try:
        with (
            ReplayServer(tables=TABLES, port=0, shared_memory=folder, limits=limits) as server,
            grpc.insecure_channel(server.address) as channel,
            Asking(ReplayStub(channel)) as session,
        ):
            for _ in range(5):
                opened = session(open=8 * MB)
                assert opened.refusal == ""
                assert "another host" in session(send=opened.ring).refusal  # it has no mailbox
                assert rings() == {}
                assert session(close=opened.ring).refusal == ""
    finally:
        gc.enable()


# --------------------------------------------------------------------------------------------------- no room


def test_a_system_without_memory_means_grpc_and_one_log_line(server, rings, monkeypatch, caplog):
    def no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with caplog.at_level(logging.WARNING, "replay_server"):
        works(server.address, "grpc: the system gives no memory for rings: No space left on device")
        works(server.address, "grpc: ")
    assert len([record for record in caplog.records if "no memory for rings" in record.getMessage()]) == 1
    until(lambda: not rings())


def test_a_folder_that_is_missing_or_full_means_grpc(tmp_path, rings):
    """Full: a real file system in memory, which gives no more files."""
    with ReplayServer(tables=TABLES, port=0, shared_memory=tmp_path / "missing") as server:
        works(server.address, f"grpc: there is no folder {tmp_path / 'missing'} ")
    with (
        small_disk(tmp_path / "full", "64k,nr_inodes=2,mode=1777") as full,
        ReplayServer(tables=TABLES, port=0, shared_memory=full) as server,
    ):
        (full / "other").touch()
        works(server.address, f"grpc: {full} cannot hold a socket: No space left")
        until(lambda: not rings())
        (full / "other").unlink()
        works(server.address)


def test_a_folder_whose_path_is_longer_than_that_of_a_socket_may_be_gives_rings(folder):
    (deep := folder / ("d" * 60) / ("e" * 60)).mkdir(parents=True)
    with ReplayServer(tables=TABLES, port=0, shared_memory=deep) as server:
        works(server.address)


def test_rings_are_bounded_for_all_clients_and_for_each(folder, rings):
    limits = LimitsConfig(max_shared_bytes=20 * MB)
    with ReplayServer(tables=TABLES, port=0, shared_memory=folder, limits=limits) as server:
        with ReplayClient(server.address) as first:
            with first.writer() as writer:  # on a loaded machine the ring comes too late for its first payload
                until(lambda: writer.insert(bytes(MB), {"plain": 1.0}) and rings())
                works(server.address, "grpc: ")
                assert 0 < sum(rings().values()) <= 20 * MB
            until(lambda: first.transport == "shared memory")
        until(lambda: not rings())
        with grpc.insecure_channel(server.address) as channel, Asking(ReplayStub(channel)) as session:
            refusals = [session(open=0).refusal for _ in range(30)]
            assert refusals[0] == ""
            assert "max_shared_bytes" in refusals[-1]


@pytest.mark.parametrize("capacity", [1, 4097, 65 * MB, 2**63])
def test_a_ring_of_another_size_is_refused(stub, capacity):
    with Asking(stub) as session, pytest.raises(grpc.RpcError, match="a multiple of 4096"):
        session(open=capacity)


# --------------------------------------------------------------------------------------------------- broken and hostile


def test_the_ring_of_another_connection_cannot_be_used(server, stub, client):
    with Asking(stub) as session:
        segment = session.ring()
        with connection(server.address) as other:
            with pytest.raises(grpc.RpcError) as refusal:
                list(other.InsertStream(iter([insert_of(1, segment.ring_id, 0, 100)]), timeout=60))
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    assert client.get([1]) == []


def test_a_ring_is_sent_once(stub):
    with Asking(stub) as session:
        segment = session.ring()
        with pytest.raises(grpc.RpcError, match="was sent before"):
            session(send=segment.ring_id)


@contextmanager
def lingering() -> Iterator[socket.socket]:
    """A socket that whoever closes it last waits for, until the end of the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sent = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    sent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    sent.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            sent.send(bytes(MB))
    with other:
        yield sent


@pytest.mark.parametrize("kind", ["descriptors", "a socket that lingers", "silence"])
def test_a_stranger_without_a_token_takes_nothing_from_a_server_and_does_not_stop_it(tmp_path, folder, kind):
    """What he sends to each socket in the folder, be it of this kind or that."""
    tables = '[[tables]]\nname = "pool"\nsampler = "uniform"\nmax_size = 64\n'
    with server_process(tmp_path, f'[server]\nshared_memory = "{folder}"\n{tables}') as server, ExitStack() as ends:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (300, 300))
        works(server.address)
        null, sent = ends.enter_context(Path("/dev/null").open("rb")), 0
        own = ends.enter_context(lingering()) if kind == "a socket that lingers" else null
        if own is not null:  # so that the server closes it last
            os.kill(server.process.pid, signal.SIGSTOP)
        for path, way in itertools.product(folder.iterdir(), (socket.SOCK_DGRAM, socket.SOCK_STREAM)):
            for _ in range(600 if own is null else 1):
                stranger = ends.enter_context(socket.socket(socket.AF_UNIX, way))
                stranger.settimeout(5)
                with suppress(OSError):
                    stranger.connect(str(path))
                    if kind != "silence":
                        sent += socket.send_fds(stranger, [bytes(8)], [own.fileno()])
        if sent:
            own.close()
        os.kill(server.process.pid, signal.SIGCONT)
        with ReplayClient(server.address, timeout=30.0) as client:
            for _ in range(20):  # also after all that was sent before was read
                client.insert(b"small", {"pool": 1.0})
        works(server.address)


def test_a_client_whose_socket_a_stranger_finds_first_goes_on_over_grpc(server, monkeypatch):
    with ReplayClient(server.address, timeout=60.0) as client:
        with lingering() as sent:

            def found(path: Path) -> Mailbox:
                mailbox = Mailbox(path)
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
                    stranger.connect(str(path))
                    socket.send_fds(stranger, [bytes(8)], [sent.fileno()])
                sent.close()
                return mailbox

            monkeypatch.setattr("replay_client.rings.Mailbox", found)
            key = client.insert(b"x" * MB, {"plain": 1.0})
            assert bytes(client.get([key])[0].payload) == b"x" * MB
        until(lambda: client.transport.startswith("grpc: the memory of the ring did not arrive"))


def test_bytes_that_a_client_changes_after_it_sent_them_do_not_change_the_item(stub, client):
    with Asking(stub) as session:
        segment = session.ring()
        segment.view[HEADER : HEADER + 100] = b"a" * 100
        (answer,) = stub.InsertStream(iter([insert_of(5, segment.ring_id, 0, 100)]), timeout=60)
        segment.view[HEADER : HEADER + 100] = b"b" * 100
    assert answer.decided == 1
    assert list(answer.errors) == []
    (item,) = client.get([5])
    assert bytes(item.payload) == b"a" * 100


def test_a_ring_for_inserts_that_a_get_names_is_still_one_for_inserts(stub, client):
    with Asking(stub) as session:
        segment = session.ring()
        segment.view[HEADER : HEADER + 200] = b"a" * 200
        list(stub.InsertStream(iter([insert_of(5, segment.ring_id, 0, 100)]), timeout=60))
        (response,) = stub.Get(pb.GetRequest(keys=[5], ring=segment.ring_id), timeout=60)
        assert response.payloads == b"a" * 100
        (answer,) = stub.InsertStream(iter([insert_of(6, segment.ring_id, 100, 100)]), timeout=60)
    assert list(answer.errors) == []
    assert len(client.get([6])) == 1


def test_a_ring_for_gets_that_an_insert_names_is_still_one_for_gets(stub, client):
    key = client.insert(bytes(MB), {"pool": 1.0})
    with Asking(stub) as session:
        request = pb.GetRequest(keys=[key], ring=session.ring(4 * MB).ring_id)
        for _ in range(2):
            assert sum(response.shared.size for response in stub.Get(request, timeout=60)) == MB
            with pytest.raises(grpc.RpcError, match="ring"):
                list(stub.InsertStream(iter([insert_of(6, request.ring, 0, 100)]), timeout=60))


def test_a_reader_that_spoils_its_ring_spoils_nothing_else(server, stub, client):
    keys = [client.insert(bytes([n]) * 40_000, {"pool": 1.0}) for n in range(8)]
    with Asking(stub) as session:
        segment = session.ring()
        segment.view[64:72] = (2**64 - 1).to_bytes(8, "little")
        request = pb.GetRequest(keys=keys, ring=segment.ring_id)
        sizes = [response.shared.size + len(response.payloads) for response in stub.Get(request, timeout=60)]
    assert sum(sizes) == 8 * 40_000
    assert [bytes(item.payload)[:1] for item in client.get(keys)] == [bytes([n]) for n in range(8)]


def test_a_reader_that_takes_nothing_holds_only_its_own_ring(server, stub, client):
    for _ in range(16):
        client.insert(bytes(MB), {"pool": 1.0})
    with Asking(stub) as session:
        draws = [pb.SampleRequest(table="pool", num_samples=4, id=(1 << 40) + number) for number in range(8)]
        ring = pb.DrawRequest(ring=session.ring(4 * MB).ring_id)
        with Requests(*(pb.DrawRequest(draw=draw) for draw in draws), ring) as requests:
            next(stub.Draw(iter(requests), timeout=30))
            with bystander(client):
                works(server.address)


# --------------------------------------------------------------------------------------------------- kills

CLIENT = f"""
import sys
from replay_client import ReplayClient
client = ReplayClient(sys.argv[1], timeout=60.0)
client.insert(bytes(1 << 20), {{"pool": 1.0}})
{SAY}
with client.writer() as writer, client.sampler("pool", 2) as batches:
    writer.insert(bytes(300_000), {{"pool": 1.0}})
    next(batches)
    print(way, flush=True)  # both streams have their rings: a kill finds no mailbox of one that is being handed over
    while True:
        writer.insert(bytes(300_000), {{"pool": 1.0}})
        next(batches)
"""


def start_client(address: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", CLIENT, address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "shared memory"
    return process


def test_a_killed_client_leaves_no_memory(server, rings):
    for _ in range(3):
        process = start_client(server.address)
        until(rings)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        until(lambda: not rings(), "the ring of a killed client is still there")
    works(server.address)


def test_a_killed_server_leaves_nothing_and_clients_go_on_with_the_next_one(tmp_path, folder):
    tables = '[[tables]]\nname = "pool"\nsampler = "uniform"\nmax_size = 64\n'
    config = f'[server]\nshared_memory = "{folder}"\n{tables}'
    address = f"127.0.0.1:{free_port()}"
    with server_process(tmp_path, config, address) as server:
        client = ReplayClient(address, timeout=60.0)
        client.insert(bytes(MB), {"pool": 1.0})
        busy, stop = start_client(address), threading.Event()

        def insert() -> None:
            with client.writer() as writer:
                while not stop.is_set():
                    writer.insert(random.randbytes(200_000), {"pool": 1.0})

        inserting = in_a_thread(insert)
        until(lambda: client.server_info().items > 8, "the writer and the other client have their rings")
        server.kill()
        busy.kill()
        busy.wait()
        busy.stdout.close()
        until(lambda: not list(folder.iterdir()), "something is left of a killed server")
    with server_process(tmp_path, config, address):
        stop.set()
        inserting.result()
        until(lambda: client.insert(bytes(MB), {"pool": 1.0}) and client.transport == "shared memory")
        key = client.insert(b"x" * MB, {"pool": 1.0})
        assert bytes(client.get([key])[0].payload) == b"x" * MB
        client.close()


def test_a_client_that_gives_up_while_it_waits_for_a_ring_still_works(server, rings, monkeypatch):
    create = Segment.create.__func__
    waiting, go_on = threading.Event(), threading.Event()

    def slow(cls, *arguments):
        waiting.set()
        go_on.wait(200)
        return create(cls, *arguments)

    monkeypatch.setattr(Segment, "create", classmethod(slow))

    async def run() -> None:
        async with AsyncReplayClient(server.address, timeout=60.0) as client:
            task = asyncio.create_task(client.insert(bytes(MB), {"plain": 1.0}))
            await asyncio.to_thread(waiting.wait)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            go_on.set()
            key = await client.insert(b"y" * MB, {"plain": 1.0})
            (item,) = await client.get([key])
            assert bytes(item.payload) == b"y" * MB

    asyncio.run(run())
    until(lambda: not rings())
