"""Unread: the server bounds the half and unread messages that gRPC holds for all clients together."""

import os
import socket
import threading
from contextlib import contextmanager

import grpc
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_client import TLS, ReplayClient
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import LimitsSection, ReplayServer, SecuritySection, TableConfig
from replay_server.rpc import unread
from replay_server.rpc.unread import Connection, peer_name
from tests.certificates import make_certificate
from tests.factories import server_process, until
from tests.server.rpc.bystander import bystander
from tests.server.rpc.half_messages import HalfMessages

MB = 1 << 20
CONFIG = """
[limits]
max_unread_bytes = "32MiB"
[[tables]]
name = "plain"
max_size = 4
"""


@contextmanager
def server_that_looks_often(
    monkeypatch, security: SecuritySection | None = None, *, host: str = "127.0.0.1", limit: int = 256 * MB
):
    """A server with a bound that the memory of the process seems to exceed at any time."""
    monkeypatch.setattr(unread, "SECONDS_PER_LOOK", 0.02)
    monkeypatch.setattr(unread, "private_bytes", lambda: 1 << 60)
    with ReplayServer(
        tables=[TableConfig(name="plain", max_size=20)],
        port=0,
        host=host,
        limits=LimitsSection(max_unread_bytes=limit),
        security=security,
        shared_memory=False,
    ) as server:
        yield server


def connections(server: ReplayServer) -> list[Connection]:
    return list(server._service.backend.unread._by_peer.values())


def held(server: ReplayServer) -> int:
    return sum(each.unread for each in connections(server))


@contextmanager
def never_cut(server: ReplayServer, caplog):
    """Nobody is cut while the block runs, and nothing seems to be held when it has ended."""
    yield
    until(lambda: held(server) == 0, "the estimate stays above what is held")
    assert "max_unread_bytes" not in caplog.text
    assert len(connections(server)) == 1


def security(tmp_path, kind: str) -> tuple[SecuritySection | None, TLS | None]:
    if kind == "plain":
        return None, None
    ca = make_certificate(tmp_path, "ca")
    files = make_certificate(tmp_path, "server", ca)
    return SecuritySection(tls_cert=files.cert, tls_key=files.key), TLS(ca=ca.cert)


# ------------------------------------------------------------------------------------------------ too much


def test_half_messages_of_all_connections_stay_under_one_bound_and_others_notice_nothing(tmp_path):
    with (
        (tmp_path / "log").open("w+") as log,
        server_process(tmp_path, CONFIG, stderr=log) as server,
        ReplayClient(server.address, timeout=60) as client,
    ):
        client.insert(bytes(MB), {"plain": 1.0})
        memory = psutil.Process(server.process.pid).memory_info
        before = memory().rss
        small = HalfMessages(server.address, calls=2, nbytes=2 * MB)
        until(small.go_on)
        large: list[HalfMessages] = []
        with bystander(client) as answers:
            for _ in range(10):  # 240 MB; one of them fits beside the small one, and two do not
                large.append(HalfMessages(server.address, calls=2, nbytes=12 * MB))
                until(large[-1].go_on, seconds=120)
                until(lambda: len(uncut(large)) <= 1, "no connection is cut", seconds=120)
                assert memory().rss - before < 150 * MB
        assert answers
        assert uncut([small]), "it was cut although others held more"
        with ReplayClient(server.address, timeout=60) as again:
            again.insert(bytes(30 * MB), {"plain": 1.0})
        log.seek(0)
        assert "max_unread_bytes is 33554432" in log.read()
        for each in (small, *large):
            each.close()


def uncut(connections: list[HalfMessages]) -> list[HalfMessages]:
    for each in connections:
        each.go_on()
    return [each for each in connections if not each.cut]


def test_nobody_is_cut_if_the_process_does_not_have_that_much_memory(monkeypatch, caplog):
    with server_that_looks_often(monkeypatch, limit=64 * MB) as server:
        monkeypatch.setattr(unread, "private_bytes", lambda: 0)
        half = HalfMessages(server.address, calls=8, nbytes=10 * MB)
        until(half.go_on, seconds=120)
        until(lambda: held(server) > 64 * MB)
        look = server._service.backend.unread._look
        until(lambda: server._service.backend.unread._look > look + 3)
        half.go_on()
        assert not half.cut
        monkeypatch.setattr(unread, "private_bytes", lambda: 1 << 60)
        until(lambda: half.go_on() and half.cut)
        until(lambda: held(server) == 0)
        assert caplog.text.count("max_unread_bytes") == 1
        half.close()


def test_a_writer_that_is_cut_sends_again_what_was_not_acknowledged(monkeypatch, caplog):
    with server_that_looks_often(monkeypatch) as server, ReplayClient(server.address, timeout=60) as client:
        thread = threading.Thread(target=insert, args=(client, MB, 100))
        thread.start()
        until(lambda: client.server_info().tables["plain"].inserts)
        bound = server._service.backend.unread
        bound.limit = -1
        until(lambda: "max_unread_bytes" in caplog.text)
        bound.limit = 256 * MB
        thread.join()
        assert client.server_info().tables["plain"].inserts == 100


def test_a_socket_that_is_another_one_by_now_is_left_alone():
    here, there = socket.socketpair()
    with here, there:
        connection = Connection("ipv4:127.0.0.1:1", inode=os.fstat(here.fileno()).st_ino, descriptor=there.fileno())
        assert not unread._shut_down(connection)
        there.sendall(b"x")
        assert here.recv(1) == b"x"
        connection.descriptor = here.fileno()
        assert unread._shut_down(connection)
        assert there.recv(1) == b""


# ------------------------------------------------------------------------------------------------ honest clients


@pytest.mark.parametrize("kind", ["plain", "TLS"])
def test_a_client_that_inserts_without_a_pause_is_never_cut(monkeypatch, caplog, tmp_path, kind):
    section, tls = security(tmp_path, kind)
    with (
        server_that_looks_often(monkeypatch, section) as server,
        ReplayClient(server.address, timeout=60, tls=tls) as client,
        never_cut(server, caplog),
    ):
        threads = [threading.Thread(target=insert, args=(client, size, n)) for size, n in SIZES]
        for thread in threads:
            thread.start()
        for _ in range(300):
            client.insert(b"x", {"plain": 1.0})
        for thread in threads:
            thread.join()
        assert client.server_info().tables["plain"].inserts == 300 + sum(n for _, n in SIZES)


SIZES = ((100, 3000), (4096, 3000), (MB, 100), (15 * MB, 12))
"""Bytes of items, and how many."""


def insert(client: ReplayClient, size: int, n: int) -> None:
    payload = bytes(size)
    with client.writer(max_in_flight=64) as writer:
        for _ in range(n):
            writer.insert(payload, {"plain": 1.0})


@pytest.mark.parametrize("kind", ["plain", "TLS"])
def test_a_client_that_reads_and_calls_without_a_pause_is_never_cut(monkeypatch, caplog, tmp_path, kind):
    section, tls = security(tmp_path, kind)
    with (
        server_that_looks_often(monkeypatch, section) as server,
        ReplayClient(server.address, timeout=60, tls=tls) as client,
        never_cut(server, caplog),
    ):
        keys = [client.insert(bytes(size), {"plain": 1.0}) for size in (100, MB)]
        with client.sampler("plain", batch_size=2, prefetch=4) as sampler:
            for _ in range(200):
                next(sampler)
        for _ in range(500):
            client.policy()
            client.update_priorities("plain", {keys[0]: 1.0})
        for _ in range(20):
            client.get(keys)
        assert all(each.calls and each.messages > 500 for each in connections(server))


@pytest.mark.parametrize(("host", "reached"), [("[::1]", "[::1]"), ("[::]", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")])
def test_connections_are_recognized_at_every_kind_of_address(monkeypatch, caplog, host, reached):
    with (
        server_that_looks_often(monkeypatch, host=host) as server,
        ReplayClient(f"{reached}:{server.address.rpartition(':')[2]}", timeout=60) as client,
        never_cut(server, caplog),
    ):
        client.insert(bytes(MB), {"plain": 1.0})
        until(lambda: [each for each in connections(server) if each.inode and each.delivered > MB])


def test_a_link_local_address_has_the_name_that_grpc_gives_it():
    assert peer_name(("fe80::1%eth0", 5000, 0, 2)) == "ipv6:%5Bfe80::1%252%5D:5000"


# ------------------------------------------------------------------------------------------------ compression


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_compressed_message_is_refused_because_it_could_hide_what_was_received(monkeypatch, compression):
    request = pb.InsertRequest(keys=[1], targets=[pb.InsertTarget(table="plain")], payload_sizes=[MB])
    request.payloads = bytes(MB)
    with server_that_looks_often(monkeypatch) as server, grpc.insecure_channel(server.address) as channel:
        stub = ReplayStub(channel)
        for call in (
            lambda: stub.Insert(request, compression=compression, timeout=60),
            lambda: list(stub.InsertStream(iter([request]), compression=compression, timeout=60)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert stub.Insert(request, timeout=60).decided == 1


# ------------------------------------------------------------------------------------------------ the estimate


SHARES = st.floats(0, 1)
LOOKS = st.lists(
    st.tuples(
        st.integers(0, 64 * MB),  # bytes of messages that arrive
        SHARES,  # how much of what has arrived is delivered
        st.integers(0, 1000),  # messages delivered
        st.integers(0, 10),  # calls begun
        st.integers(0, 64 * MB),  # bytes sent
        SHARES,  # how much of what is allowed is overhead in truth
    ),
    min_size=1,
    max_size=30,
)


@given(LOOKS)
def test_an_estimate_is_never_above_what_is_held_and_below_it_by_what_is_allowed_at_most(looks):
    connection = Connection("ipv4:127.0.0.1:1", began=0.0)
    holds = overhead = sent = before = 0
    for arrives, share, messages, calls, more_sent, needed in looks:
        delivered = int((holds + arrives) * share)
        holds += arrives - delivered
        connection.delivered += delivered
        connection.messages += messages
        connection.calls += calls
        sent += more_sent
        allowed = 16_384 + connection.delivered // 64 + 96 * connection.messages + 512 * connection.calls + sent // 1024
        overhead += int((allowed - before) * needed)
        before = allowed
        connection.update(connection.delivered + holds + overhead, sent, now=0.0)
        assert max(0, holds - (allowed - overhead)) <= connection.unread <= holds


@given(LOOKS)
def test_an_estimate_becomes_exact_whenever_nothing_is_held(looks):
    """So what is held after a long stream is seen to the last byte, beyond what is allowed for that time."""
    connection, overhead = Connection("ipv4:127.0.0.1:1", began=0.0), 0
    for arrives, _, messages, calls, _, needed in looks:
        connection.messages += messages
        connection.calls += calls
        overhead += int((96 * messages + 512 * calls) * needed)
        connection.update(connection.delivered + overhead, 0, now=0.0)
        assert connection.unread == 0
        connection.update(connection.delivered + overhead + arrives, 0, now=0.0)
        assert connection.unread == arrives
        connection.delivered += arrives
