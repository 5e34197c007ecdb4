"""What clients may use of a server: connections, calls, memory on the way in and out, and what they hold in hand."""

import socket
import threading
import time
import urllib.request
from contextlib import contextmanager

import grpc
import psutil
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from replay_client import ReplayClient
from replay_client.errors import DeadlineExceededError
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import (
    Config,
    LimitsSection,
    ReplayServer,
    SecuritySection,
    ServerSection,
    TableConfig,
)
from replay_server.limits import (
    MAX_CHANGES,
    MAX_EXCLUDE,
    MAX_LEASE,
    MAX_ROWS,
    MAX_SAMPLE_STREAMS,
    MAX_SCOPE,
    MAX_WEIGHTS,
)
from replay_server.rpc import backend, sampling
from replay_server.tables import scopes
from tests.factories import ServerProcess, server_process, until
from tests.server.rpc.bystander import bystander

MB = 1 << 20
TABLES = [
    TableConfig(name="plain", sampler="fifo"),
    TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 1}),
]
Code = grpc.StatusCode


@contextmanager
def server_with(max_bytes: int | None = None, **limits):
    with ReplayServer(tables=TABLES, port=0, limits=LimitsSection(**limits), max_bytes=max_bytes) as server:
        yield server


@contextmanager
def connection(server: ReplayServer | ServerProcess):
    """A connection of its own: gRPC would share one between channels with the same options."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(server.address, options) as channel:
        yield ReplayStub(channel)


def item(key: int, payload: bytes = b"x", *, size: int | None = None, table: str = "plain", timeout: float = 5.0):
    return pb.InsertRequest(
        keys=[key],
        targets=[pb.InsertTarget(table=table)],
        payload_sizes=[len(payload) if size is None else size],
        payloads=payload,
        timeout=timeout,
    )


class Stream:
    """An insert stream that stays open, sends what it is told to, and keeps what it hears."""

    def __init__(self, stub: ReplayStub, *requests: pb.InsertRequest) -> None:
        self._requests, self._more, self._end = list(requests), threading.Event(), False
        self._more.set()
        self.responses: list[pb.InsertResponse] = []
        self.error: grpc.RpcError | None = None
        self._call = stub.InsertStream(self._send())
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _send(self):
        while not self._end:
            self._more.wait(30)
            self._more.clear()
            while self._requests:
                yield self._requests.pop(0)

    def _read(self) -> None:
        try:
            for response in self._call:
                self.responses.append(response)
        except grpc.RpcError as error:
            self.error = error

    def send(self, request: pb.InsertRequest) -> None:
        self._requests.append(request)
        self._more.set()

    def close(self) -> None:
        self._end = True
        self._more.set()
        self._call.cancel()
        self._thread.join(10)

    @property
    def decided(self) -> int:
        return sum(response.decided for response in self.responses)

    @property
    def errors(self) -> list[pb.RowError]:
        return [error for response in self.responses for error in response.errors]


def refused(call) -> grpc.RpcError:
    try:
        answer = call()
        if hasattr(answer, "__next__"):
            list(answer)
    except grpc.RpcError as error:
        return error
    raise AssertionError("it was not refused")


# ------------------------------------------------------------------------------------------------ connections and calls


def test_connections_beyond_the_limit_leave_those_that_are_there_alone_and_come_in_later():
    with server_with(max_connections=5) as server, ReplayClient(server.address, timeout=5.0) as first:
        first.policy()
        host, _, port = server.address.rpartition(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(20)]
        try:
            for _ in range(10):
                first.insert(b"x", {"plain": 1.0})
        finally:
            for one in idle:
                one.close()
        with ReplayClient(server.address, timeout=20.0) as later:
            assert later.list_items("plain").matching == 10


def test_connections_that_say_nothing_or_nonsense_block_nobody():
    with server_with() as server, ReplayClient(server.address, timeout=10.0) as client:
        client.policy()
        host, _, port = server.address.rpartition(":")
        before = psutil.Process().memory_info().rss
        idle = [socket.create_connection((host, int(port))) for _ in range(200)]
        for number, one in enumerate(idle):
            one.sendall(
                [b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01", bytes(3000)][
                    number % 5
                ]
            )
        for _ in range(50):
            client.insert(b"x", {"plain": 1.0})
        assert psutil.Process().memory_info().rss - before < 100 * MB
        for one in idle:
            one.close()


def test_headers_that_are_too_large_are_refused():
    with server_with() as server, connection(server) as stub:
        call = lambda: stub.GetPolicy(pb.GetPolicyRequest(), metadata=[("x-large", "x" * 100_000)], timeout=10)  # noqa: E731
        assert refused(call).code() is Code.RESOURCE_EXHAUSTED
        stub.GetPolicy(pb.GetPolicyRequest(), timeout=10)


def test_calls_beyond_the_limit_of_the_server_are_refused_until_others_have_ended():
    with server_with(max_calls=3) as server, connection(server) as stub:
        waiting = [stub.Sample(pb.SampleRequest(table="plain", num_samples=1, timeout=60.0)) for _ in range(3)]
        until(lambda: refused_or_none(stub) is not None)
        error = refused_or_none(stub)
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "max_calls" in error.details()
        for call in waiting:
            call.cancel()
        until(lambda: refused_or_none(stub) is None)


def refused_or_none(stub: ReplayStub) -> grpc.RpcError | None:
    try:
        stub.GetPolicy(pb.GetPolicyRequest(), timeout=10)
    except grpc.RpcError as error:
        return error
    return None


def test_streams_beyond_the_limit_of_a_connection_wait_at_the_client_and_others_come_in():
    with (
        server_with(max_streams_per_connection=3) as server,
        connection(server) as greedy,
        connection(server) as other,
    ):
        waiting = [greedy.Sample(pb.SampleRequest(table="plain", num_samples=1, timeout=60.0)) for _ in range(3)]
        until(lambda: other.GetServerInfo(pb.GetServerInfoRequest()).tables[0].sampling.count == 3)
        assert refused(lambda: greedy.GetPolicy(pb.GetPolicyRequest(), timeout=0.5)).code() is Code.DEADLINE_EXCEEDED
        other.GetPolicy(pb.GetPolicyRequest(), timeout=30)
        waiting[0].cancel()
        greedy.GetPolicy(pb.GetPolicyRequest(), timeout=30)


# ------------------------------------------------------------------------------------------------ on the way in


def test_an_item_in_pieces_waits_for_room_says_so_and_comes_in_when_there_is_some():
    """A third client: one connection may have half of the 4 MB, and two of them fill it."""
    with server_with(max_unfinished_bytes=4 * MB) as server:
        server_limits(server, 4 * MB)
        with connection(server) as one, connection(server) as two, connection(server) as three:
            half = [Stream(stub, item(n, bytes(MB), size=2 * MB)) for n, stub in enumerate((one, two), start=1)]
            until(lambda: unfinished(server) == 4 * MB)
            hasty = Stream(three, item(3, bytes(MB), size=2 * MB, timeout=0.3), pb.InsertRequest(payloads=bytes(MB)))
            until(lambda: hasty.errors)
            assert hasty.errors[0].code == Code.DEADLINE_EXCEEDED.value[0]
            assert "4194304 of 4194304 bytes of items that are not complete" in hasty.errors[0].message
            patient = Stream(three, item(4, bytes(MB), size=2 * MB, timeout=30.0), pb.InsertRequest(payloads=bytes(MB)))
            small = Stream(three, item(5, bytes(MB)))  # complete at once: it needs no such room
            until(lambda: small.decided == 1)
            assert patient.decided == 0
            half[0].send(pb.InsertRequest(payloads=bytes(MB)))
            until(lambda: half[0].decided == 1)
            until(lambda: patient.decided == 1)
            assert not patient.errors
            for stream in (*half, hasty, patient, small):
                stream.close()
            until(lambda: unfinished(server) == 0)


def server_limits(server: ReplayServer, max_unfinished: int) -> None:
    """The bound is never below the largest item, 1 GiB by default: lowered here, to test it with little memory."""
    server._service.backend.unfinished.total = max_unfinished


def unfinished(server: ReplayServer) -> int:
    return server._service.backend.unfinished.used


def test_one_connection_gets_no_more_than_half_of_the_room_and_others_get_theirs():
    with server_with() as server:
        server_limits(server, 8 * MB)
        with connection(server) as greedy, connection(server) as other:
            held = Stream(greedy, item(1, bytes(MB), size=3 * MB))
            until(lambda: unfinished(server) == 3 * MB)
            more = Stream(
                greedy, item(2, bytes(MB), size=3 * MB, timeout=0.3), pb.InsertRequest(payloads=bytes(2 * MB))
            )
            waits = Stream(
                greedy, item(3, bytes(MB), size=3 * MB, timeout=60), pb.InsertRequest(payloads=bytes(2 * MB))
            )
            until(lambda: more.errors)
            assert "no client may have over half" in more.errors[0].message
            theirs = Stream(other, item(4, bytes(MB), size=3 * MB), pb.InsertRequest(payloads=bytes(2 * MB)))
            until(lambda: theirs.decided == 1)
            assert not theirs.errors
            for stream in (held, more, waits, theirs):
                stream.close()


def test_an_upload_that_stalls_is_ended_and_makes_room():
    with server_with(stall_timeout=3.0) as server:
        server_limits(server, 4 * MB)
        with connection(server) as slow, connection(server) as other:
            stalled = Stream(slow, item(1, bytes(MB), size=3 * MB))
            until(lambda: unfinished(server) == 3 * MB)
            waits = Stream(other, item(2, bytes(MB), size=3 * MB, timeout=30), pb.InsertRequest(payloads=bytes(2 * MB)))
            until(lambda: waits.decided == 1)
            until(lambda: stalled.error is not None)
            assert stalled.error.code() is Code.DEADLINE_EXCEEDED
            assert "2097152 of 2097152 payload bytes are missing and come too slowly" in stalled.error.details()
            stalled.close()
            waits.close()


def test_an_upload_that_drips_is_ended_although_it_never_stops(monkeypatch):
    monkeypatch.setattr("replay_server.rpc.messages.MIN_RATE", 1 << 30)
    with server_with(stall_timeout=1.0) as server, connection(server) as stub:
        stream = Stream(stub, item(1, bytes(MB), size=900 * MB))

        def drip() -> bool:
            stream.send(pb.InsertRequest(payloads=bytes(4096)))
            return stream.error is not None

        until(drip, pause=0.05)
        assert stream.error.code() is Code.DEADLINE_EXCEEDED
        stream.close()


def test_pieces_that_cost_more_than_they_carry_are_refused():
    with server_with() as server, connection(server) as stub:
        requests = [item(1, bytes(MB), size=2 * MB), pb.InsertRequest(payloads=b"x")]
        error = refused(lambda: stub.InsertStream(iter(requests)))
        assert error.code() is Code.INVALID_ARGUMENT
        assert "a chunk of 1 bytes" in error.details()
        last = [item(1, bytes(MB), size=MB + 1), pb.InsertRequest(payloads=b"x")]
        assert next(stub.InsertStream(iter(last))).decided == 1


def test_what_waits_for_a_table_is_bounded_for_each_connection_and_refused_beyond():
    with server_with(max_waiting_bytes=8 * MB) as server, ReplayClient(server.address, timeout=5.0) as client:
        client.insert(b"first", {"queue": 1.0})
        with connection(server) as greedy, connection(server) as other:
            blocked = [Stream(greedy, item(n, bytes(2 * MB), table="queue", timeout=60)) for n in (1, 2)]
            until(lambda: waiting(client) == 2)
            third = Stream(greedy, item(3, bytes(2 * MB), table="queue", timeout=60))
            until(lambda: third.errors)
            assert third.errors[0].code == Code.RESOURCE_EXHAUSTED.value[0]
            assert "max_waiting_bytes" in third.errors[0].message
            assert waiting(client) == 2
            theirs = Stream(other, item(4, bytes(2 * MB), table="queue", timeout=60))
            until(lambda: waiting(client) == 3)
            for _ in range(4):
                client.sample("queue", 1)
            until(lambda: all(stream.decided == 1 for stream in (*blocked, theirs)))
            assert server._service.backend.waiting.used == 0
            for stream in (*blocked, third, theirs):
                stream.close()


def waiting(client: ReplayClient) -> int:
    return client.server_info().tables["queue"].inserting.count


def test_a_small_item_in_a_large_message_does_not_keep_the_message():
    """A field that nobody knows, of 15 MB, before a payload of one byte; 60 of them."""
    junk = bytes([0xA2, 0x06]) + varint(15 * MB) + bytes(15 * MB)  # field 100
    with server_with() as server, grpc.insecure_channel(server.address) as channel:
        before = psutil.Process().memory_info().rss
        insert = channel.unary_unary("/replay.v1.Replay/Insert")
        for key in range(1, 61):
            request = item(key)
            request.ClearField("payloads")
            insert(request.SerializeToString() + junk + bytes([0x7A, 1]) + b"x", timeout=30)
        with ReplayClient(server.address, timeout=10.0) as client:
            assert client.server_info().bytes == 60
        assert psutil.Process().memory_info().rss - before < 300 * MB


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


# ------------------------------------------------------------------------------------------------ on the way out


def test_a_reader_that_does_not_read_is_given_up_and_its_samples_go_back():
    with server_with(stall_timeout=3.0) as server, ReplayClient(server.address, timeout=10.0) as client:
        for _ in range(4):
            client.insert(bytes(8 * MB), {"plain": 1.0})
        with connection(server) as stub:
            call = stub.Sample(pb.SampleRequest(table="plain", num_samples=4))
            until(lambda: in_hand(client) == 4)
            until(lambda: in_hand(client) == 0)
            assert client.server_info().tables["plain"].samples == 0
            error = refused(lambda: call)
            assert error.code() is Code.DEADLINE_EXCEEDED
            assert "stall_timeout" in error.details()
        assert len(client.sample("plain", 4)) == 4


def in_hand(client: ReplayClient) -> int:
    return client.server_info().tables["plain"].reserved


@pytest.mark.parametrize("method", ["Sample", "Get"])
def test_hundreds_of_readers_that_do_not_read_cost_little_and_block_nobody(tmp_path, method):
    config = "[[tables]]\nname = 'plain'\n"
    with server_process(tmp_path, config) as server, ReplayClient(server.address, timeout=10.0) as client:
        keys = [client.insert(bytes(8 * MB), {"plain": 1.0}) for _ in range(4)]
        memory = psutil.Process(server.process.pid).memory_info
        before = memory().rss
        with connection(server) as stub:
            request = pb.SampleRequest(table="plain", num_samples=4) if method == "Sample" else pb.GetRequest(keys=keys)
            calls = [getattr(stub, method)(request) for _ in range(500)]
            for _ in range(20):
                time.sleep(0.1)
                assert memory().rss - before < 250 * MB  # 64 answers of some 2 MB
            assert len(client.sample("plain", 4)) == 4
            for call in calls:
                call.cancel()
        until(lambda: in_hand(client) == 0)


def test_a_client_reads_any_number_of_answers_one_after_the_other():
    with server_with() as server, ReplayClient(server.address, timeout=10.0) as client:
        client.insert(b"x", {"plain": 1.0})
        for _ in range(300):
            client.sample("plain", 1)


def test_what_a_reader_holds_counts_until_it_is_sent():
    with (
        server_with(stall_timeout=4.0, max_bytes=16 * MB) as server,
        connection(server) as stub,
        ReplayClient(server.address, timeout=10.0) as client,
    ):
        key = client.insert(bytes(12 * MB), {"plain": 1.0})
        call = stub.Get(pb.GetRequest(keys=[key]))
        call.initial_metadata()  # it has begun
        client.delete("plain", [key])
        assert client.server_info().bytes == 12 * MB
        until(lambda: client.server_info().bytes == 0)
        call.cancel()


def test_sample_streams_of_a_connection_are_bounded():
    with server_with() as server, connection(server) as stub:
        opening = pb.DrawRequest(draw=pb.SampleRequest(table="plain", num_samples=1, id=1 << 40))
        end = threading.Event()

        def stay():
            yield opening
            end.wait(60)

        calls = [stub.Draw(stay()) for _ in range(MAX_SAMPLE_STREAMS)]
        until(lambda: stub.GetServerInfo(pb.GetServerInfoRequest()).sample_streams == MAX_SAMPLE_STREAMS)
        assert refused(lambda: stub.Draw(iter([opening]))).code() is Code.RESOURCE_EXHAUSTED
        end.set()
        for call in calls:
            call.cancel()
        until(lambda: stub.GetServerInfo(pb.GetServerInfoRequest()).sample_streams == 0)


def test_a_stream_draws_no_more_ahead_than_its_bytes_allow(monkeypatch):
    monkeypatch.setattr(sampling, "MAX_BYTES_AHEAD", 3000)
    with server_with() as server, ReplayClient(server.address, timeout=10.0) as client:
        for _ in range(10):
            client.insert(bytes(1000), {"plain": 1.0})
        with client.sampler("plain", batch_size=1, prefetch=8) as sampler:
            next(sampler)
            until(lambda: in_hand(client) == 3)
            time.sleep(0.2)
            assert in_hand(client) == 3
            for _ in range(8):
                next(sampler)
            until(lambda: in_hand(client) == 3)
        until(lambda: in_hand(client) == 0)


def test_samples_in_hand_of_all_clients_are_bounded(monkeypatch):
    monkeypatch.setattr(backend, "MAX_ROWS_OUTSTANDING", 8)
    with server_with() as server, ReplayClient(server.address, timeout=10.0) as client, connection(server) as stub:
        for _ in range(4):
            client.insert(b"x", {"plain": 1.0})
        samples = [client.sample("plain", 4, lease=60.0)]
        lease = pb.SampleRequest(table="plain", num_samples=4, lease=60.0)
        error = refused(lambda: stub.Sample(pb.SampleRequest(table="plain", num_samples=5, lease=60.0, timeout=0)))
        assert error.code() is Code.DEADLINE_EXCEEDED  # five are not there
        list(stub.Sample(lease))
        error = refused(lambda: stub.Sample(lease))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "8 of 8 samples under leases" in error.details()
        assert in_hand(client) == 8
        client.acknowledge([sample for batch in samples for sample in batch])
        list(stub.Sample(pb.SampleRequest(table="plain", num_samples=4)))


# ------------------------------------------------------------------------------------------------ single requests


@pytest.mark.parametrize(
    ("method", "request_", "words"),
    [
        ("Sample", pb.SampleRequest(table="plain", num_samples=1, exclude=range(MAX_EXCLUDE + 1)), "to exclude"),
        ("Sample", pb.SampleRequest(table="plain", num_samples=1, scope="x" * (MAX_SCOPE + 1)), "scope of 257"),
        ("Sample", pb.SampleRequest(table="plain", num_samples=1, lease=MAX_LEASE + 1), "lease"),
        ("Delete", pb.DeleteRequest(table="plain", keys=range((1 << 20) + 1)), "1048577 keys"),
        ("Get", pb.GetRequest(keys=range(MAX_ROWS + 1)), "65537 keys"),
        ("GetServerInfo", pb.GetServerInfoRequest(tables=[""] * (MAX_ROWS + 1)), "65537 tables"),
        ("UpdateTable", pb.UpdateTableRequest(table="plain", changes=" " * (MAX_CHANGES + 1)), "changes of"),
        ("SetPolicyVersion", pb.SetPolicyVersionRequest(version=1, weights="x" * (MAX_WEIGHTS + 1)), "4096"),
        ("SetPolicyVersion", pb.SetPolicyVersionRequest(version=1, weights="a\x1b[2Jb"), "printable"),
        ("SetPolicyVersion", pb.SetPolicyVersionRequest(version=1, weights="a\nb"), "printable"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_that_asks_for_too_much_is_refused(method, request_, words):
    with server_with() as server, connection(server) as stub:
        error = refused(lambda: getattr(stub, method)(request_, timeout=30))
        assert error.code() is Code.INVALID_ARGUMENT
        assert words in error.details()
        assert len(error.details()) < 400
        assert stub.GetPolicy(pb.GetPolicyRequest()).version == 0


def test_a_target_with_more_rows_than_the_message_is_refused():
    with server_with() as server, connection(server) as stub:
        request = item(1)
        request.targets[0].rows.extend([0] * 1000)
        assert "1000 rows" in refused(lambda: stub.Insert(request)).details()


def test_the_largest_requests_hold_others_up_for_a_moment_only():
    with server_with() as server, connection(server) as stub, ReplayClient(server.address, timeout=10.0) as other:
        other.policy()
        keys = range(1 << 20)
        with bystander(other) as answers:
            stub.Delete(pb.DeleteRequest(table="plain", keys=keys))
            stub.UpdatePriorities(
                pb.UpdatePrioritiesRequest(table="plain", keys=bytes(7 * MB), priorities=bytes(7 * MB))
            )
        assert answers


def test_scopes_forget_what_has_left_and_then_the_oldest(monkeypatch):
    monkeypatch.setattr(scopes, "MAX_KEYS", 100)
    with server_with() as server, ReplayClient(server.address, timeout=10.0) as client:
        table = server._service.backend.buffer.tables["plain"]
        for _ in range(30):
            keys = [client.insert(b"x", {"plain": 1.0}) for _ in range(10)]
            drawn = client.sample("plain", 10, scope="all the time")
            assert sorted(sample.info.key for sample in drawn) == sorted(keys)
            client.delete("plain", keys)
        assert sum(len(table.scopes.given(scope)) for scope in table.scopes) <= 110
        for _ in range(60):
            client.insert(b"x", {"plain": 1.0})
        for step in range(10):
            client.sample("plain", 60, scope=f"step {step}")
            with pytest.raises(DeadlineExceededError):
                client.sample("plain", 1, scope=f"step {step}", timeout=0.0)
        assert sum(len(table.scopes.given(scope)) for scope in table.scopes) <= 260


# ------------------------------------------------------------------------------------------------ without a token


def test_callers_without_a_token_that_never_finish_a_health_check_hold_up_neither_checks_nor_calls(tmp_path):
    (tmp_path / "tokens").write_text("admin:0123456789abcdef0123")
    security = SecuritySection(tokens_file=tmp_path / "tokens")
    with ReplayServer(tables=TABLES, port=0, security=security) as server:
        end = threading.Event()

        def never():
            end.wait(30)
            yield b""

        with grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            check = channel.stream_stream("/grpc.health.v1.Health/Check")
            stalled = [check(never()) for _ in range(100)]
            with grpc.insecure_channel(server.address) as other:
                for _ in range(5):
                    assert (
                        HealthStub(other).Check(HealthCheckRequest(), timeout=4).status == HealthCheckResponse.SERVING
                    )
            assert refused(lambda: stalled[0]).code() is Code.DEADLINE_EXCEEDED
            error = refused(lambda: channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff" * 9, timeout=5))
            assert error.code() is Code.INVALID_ARGUMENT
            end.set()
        with ReplayClient(server.address, timeout=10.0, token="0123456789abcdef0123") as client:
            assert client.policy().version == 0


def test_connections_to_the_metrics_that_say_nothing_cost_few_threads_and_hold_up_no_scrape():
    config = Config(server=ServerSection(address="127.0.0.1:0", metrics_address="127.0.0.1:0"), tables=tuple(TABLES))
    with ReplayServer.from_config(config) as server:
        host, _, port = server.metrics_address.rpartition(":")
        before = threading.active_count()
        silent = [socket.create_connection((host, int(port))) for _ in range(100)]
        for one in silent[::2]:
            one.sendall(b"GET /metrics HTTP/1.0\r\nX-Slow: ")
        time.sleep(0.5)
        until(lambda: threading.active_count() - before <= 20)
        with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10) as answer:
            assert b"replay_" in answer.read()
        for one in silent:
            one.close()


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_compressed_message_counts_as_large_as_it_becomes(compression):
    def insert(stub: ReplayStub, size: int) -> pb.InsertResponse:
        targets = [pb.InsertTarget(table="plain")]
        request = pb.InsertRequest(
            keys=[size], targets=targets, payload_sizes=[size], timeout=5.0, payloads=bytes(size)
        )
        return stub.Insert(request, compression=compression, timeout=60)

    with server_with() as server, connection(server) as stub:
        assert insert(stub, 15 * MB).decided == 1
        with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
            insert(stub, 17 * MB)
        assert insert(stub, MB).decided == 1
