"""What clients may use of a server: connections, calls, memory on the way in and out, and what they hold in hand."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path

import grpc
import pytest

from replay_client import ReplayClient
from replay_client.testing import until
from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import Config, LimitsConfig, ReplayServer, ServerConfig, TableConfig
from replay_server.rpc import inserting, limits
from replay_server.tables import remembered as tables
from tests.kit.tables import replay_buffer
from tests.server.rpc.calls import Requests, bystander, connection

MB = 1 << 20
TABLES = [
    TableConfig(name="plain", sampler="fifo"),
    TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 1}),
]
Code = grpc.StatusCode


@contextmanager
def server_with(max_bytes: int | None = None, max_payload_bytes: int = 1 << 30, data_dir: Path | None = None, **limits):
    section = ServerConfig(
        listen="127.0.0.1:0", max_bytes=max_bytes, max_payload_bytes=max_payload_bytes, data_dir=data_dir
    )
    config = Config(server=section, tables=tuple(TABLES), limits=LimitsConfig(**limits))
    with ReplayServer.from_config(config) as server:
        yield server


def item(key: int, payload: bytes = b"x", *, size: int | None = None, table: str = "plain", timeout: float = 5.0):
    return pb.InsertRequest(
        keys=[key],
        targets=[pb.InsertTarget(table=table)],
        payload_sizes=[len(payload) if size is None else size],
        payloads=payload,
        timeout=timeout,
    )


class Stream(Requests):
    """An insert stream that stays open, sends what is put into it, and keeps what it hears."""

    def __init__(self, stub: ReplayStub, *requests: pb.InsertRequest) -> None:
        super().__init__(*requests)
        self.responses: list[pb.InsertResponse] = []
        self.error: grpc.RpcError | None = None
        self.call = stub.InsertStream(iter(self))
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self) -> None:
        try:
            for response in self.call:
                self.responses.append(response)
        except grpc.RpcError as error:
            self.error = error

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.call.cancel()
        self.thread.join(10)

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


def host_and_port(server: ReplayServer) -> tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)


def test_connections_beyond_the_limit_leave_those_that_are_there_alone_and_come_in_later():
    with server_with(max_connections=5) as server, ReplayClient(server.address, timeout=60.0) as first:
        first.policy()
        with ExitStack() as idle:
            for _ in range(20):
                idle.enter_context(socket.create_connection(host_and_port(server)))
            for _ in range(10):
                first.insert(b"x", {"plain": 1.0})
        with ReplayClient(server.address, timeout=60.0) as later:
            assert later.list_items("plain").matching == 10


def test_connections_that_say_nothing_or_nonsense_block_nobody():
    said = [b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01", bytes(3000)]
    with server_with() as server, ReplayClient(server.address, timeout=60.0) as client, ExitStack() as idle:
        client.policy()
        for nonsense in said * 20:
            idle.enter_context(socket.create_connection(host_and_port(server))).sendall(nonsense)
        for _ in range(50):
            client.insert(b"x", {"plain": 1.0})


def test_headers_that_are_too_large_are_refused():
    with server_with() as server, connection(server.address) as stub:
        large = [("x-large", "x" * 100_000)]
        error = refused(lambda: stub.GetPolicy(pb.GetPolicyRequest(), metadata=large, timeout=60))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        stub.GetPolicy(pb.GetPolicyRequest(), timeout=60)


def test_calls_beyond_the_limit_of_the_server_are_refused_until_others_have_ended():
    with server_with(max_calls=3) as server, connection(server.address) as stub:
        stub.GetPolicy(pb.GetPolicyRequest(), timeout=60)  # connected: from now on calls arrive in their order
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
        stub.GetPolicy(pb.GetPolicyRequest(), timeout=60)
    except grpc.RpcError as error:
        return error
    return None


def test_streams_beyond_the_limit_of_a_connection_wait_at_the_client_and_others_come_in():
    with (
        server_with(max_calls_per_connection=3) as server,
        connection(server.address) as greedy,
        connection(server.address) as other,
    ):
        waiting = [greedy.Sample(pb.SampleRequest(table="plain", num_samples=1, timeout=60.0)) for _ in range(3)]
        until(lambda: other.GetServerInfo(pb.GetServerInfoRequest()).tables[0].sampling.count == 3)
        assert refused(lambda: greedy.GetPolicy(pb.GetPolicyRequest(), timeout=0.5)).code() is Code.DEADLINE_EXCEEDED
        other.GetPolicy(pb.GetPolicyRequest(), timeout=30)
        waiting[0].cancel()
        greedy.GetPolicy(pb.GetPolicyRequest(), timeout=30)


# ------------------------------------------------------------------------------------------------ on the way in


def in_pieces(key: int, *, mb: int = 2, timeout: float = 120.0, whole: bool = False) -> list[pb.InsertRequest]:
    """The first MB of an item, or all of it."""
    first = item(key, bytes(MB), size=mb * MB, timeout=timeout)
    return [first, pb.InsertRequest(payloads=bytes((mb - 1) * MB))] if whole else [first]


def until_used(stub: ReplayStub, used: int, total: int, unless: Callable[[], bool] = lambda: False) -> None:
    """Waits until so many bytes of items that are not complete are there, as a refusal says that asks for all of it."""
    words = f"{used} of {total} bytes of items that are not complete"
    keys = iter(range(100, 10_000))

    def is_said() -> bool:
        asks = in_pieces(next(keys), mb=total // MB, timeout=0.0, whole=True)
        (response,) = stub.InsertStream(iter(asks))
        return (bool(response.errors) and words in response.errors[0].message) or unless()

    until(is_said)


def test_an_item_in_pieces_waits_for_room_says_so_and_comes_in_when_there_is_some():
    """A third client: one connection may have half of the 4 MB, and two of them fill it."""
    with (
        server_with(max_unfinished_bytes=4 * MB, max_payload_bytes=4 * MB) as server,
        connection(server.address) as one,
        connection(server.address) as two,
        connection(server.address) as three,
    ):
        with Stream(one, *in_pieces(1)) as half, Stream(two, *in_pieces(2)), ExitStack() as streams:
            until_used(three, 4 * MB, 4 * MB)
            hasty = streams.enter_context(Stream(three, *in_pieces(3, timeout=0.3, whole=True)))
            until(lambda: hasty.errors)
            assert hasty.errors[0].code == Code.DEADLINE_EXCEEDED.value[0]
            patient = streams.enter_context(Stream(three, *in_pieces(4, whole=True)))
            small = streams.enter_context(Stream(three, item(5, bytes(MB))))  # complete at once: it needs no such room
            until(lambda: small.decided == 1)
            assert patient.decided == 0
            half.put(pb.InsertRequest(payloads=bytes(MB)))
            until(lambda: half.decided == patient.decided == 1)
            assert not patient.errors
        with Stream(one, *in_pieces(6, mb=4, whole=True)) as whole:  # all of the room
            until(lambda: whole.decided == 1)
            assert not whole.errors


def test_one_connection_gets_no_more_than_half_of_the_room_and_others_get_theirs():
    with (
        server_with(max_unfinished_bytes=8 * MB, max_payload_bytes=8 * MB) as server,
        connection(server.address) as greedy,
        connection(server.address) as other,
        Stream(greedy, *in_pieces(1, mb=3)),
    ):
        until_used(other, 3 * MB, 8 * MB)
        with (
            Stream(greedy, *in_pieces(2, mb=3, timeout=0.3, whole=True)) as more,
            Stream(greedy, *in_pieces(3, mb=3, timeout=60.0, whole=True)),
        ):
            until(lambda: more.errors)
            assert "no client may have over half" in more.errors[0].message
            with Stream(other, *in_pieces(4, mb=3, whole=True)) as theirs:
                until(lambda: theirs.decided == 1)
                assert not theirs.errors


def test_an_upload_that_stalls_is_ended_and_makes_room():
    with (
        server_with(stall_timeout=2.0, max_unfinished_bytes=4 * MB, max_payload_bytes=4 * MB) as server,
        connection(server.address) as slow,
        connection(server.address) as other,
        Stream(slow, *in_pieces(1, mb=3)) as stalled,
    ):
        until_used(other, 3 * MB, 4 * MB, unless=lambda: stalled.error is not None)
        with Stream(other, *in_pieces(2, mb=3, whole=True)) as waits:
            until(lambda: waits.decided == 1)
            until(lambda: stalled.error is not None)
        assert stalled.error.code() is Code.DEADLINE_EXCEEDED
        assert "2097152 of 2097152 payload bytes are missing" in stalled.error.details()


def test_what_waits_for_a_table_is_bounded_for_each_connection_and_refused_beyond():
    with server_with(max_waiting_bytes=8 * MB) as server, ReplayClient(server.address, timeout=60.0) as client:
        client.insert(b"first", {"queue": 1.0})
        with connection(server.address) as greedy, connection(server.address) as other:
            with ExitStack() as streams:

                def insert(stub: ReplayStub, key: int) -> Stream:
                    return streams.enter_context(Stream(stub, item(key, bytes(2 * MB), table="queue", timeout=60)))

                blocked = [insert(greedy, 1), insert(greedy, 2)]
                until(lambda: waiting(client) == 2)
                third = insert(greedy, 3)
                until(lambda: third.errors)
                assert third.errors[0].code == Code.RESOURCE_EXHAUSTED.value[0]
                assert "max_waiting_bytes" in third.errors[0].message
                assert waiting(client) == 2
                theirs = insert(other, 4)
                until(lambda: waiting(client) == 3)
                for _ in range(4):
                    client.sample("queue", 1)
                until(lambda: all(stream.decided == 1 for stream in (*blocked, theirs)))
            client.insert(b"full again", {"queue": 1.0})
            with Stream(greedy, item(5, bytes(8 * MB), table="queue", timeout=60)) as all_of_it:
                until(lambda: waiting(client) == 1 and not all_of_it.errors)  # so nothing of the others is left


def waiting(client: ReplayClient) -> int:
    return client.server_info().tables["queue"].inserting.count


async def decisions(shared: limits.Backend, message: Frame) -> AsyncIterator[inserting.Decided]:
    """What becomes of the rows of a stream with one message, for a client that goes when it reads no further."""
    messages, answers = [message], asyncio.Queue(maxsize=1)

    async def read() -> Frame | None:
        return messages.pop() if messages else None

    async def answer(decided: inserting.Decided | None) -> None:
        await answers.put(decided)
        await answers.join()

    inserts = inserting.Inserts(shared, "client", read, answer, lambda _: None)
    running = asyncio.create_task(inserts.run())
    running.add_done_callback(lambda _: answers.put_nowait(None))
    try:
        while (decided := await answers.get()) is not None:
            yield decided
            answers.task_done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


# ------------------------------------------------------------------------------------------------ on the way out


def test_an_insert_leaves_the_line_if_its_client_goes_while_it_reads_the_answers_before():
    buffer = replay_buffer(TABLES, time.monotonic)
    shared = limits.Backend(buffer, LimitsConfig(), None)

    message = Frame(
        pb.InsertRequest(keys=[1, 2], targets=[pb.InsertTarget(table="queue")], payload_sizes=[1, 1]), [b"ab"]
    )

    async def go_after_the_first_answer() -> None:
        async with aclosing(decisions(shared, message)) as decided:
            assert (await anext(decided)).keys == [1]
            assert buffer.lines["queue"].inserts.head is not None

    asyncio.run(go_after_the_first_answer())
    assert buffer.lines["queue"].inserts.head is None


def test_a_reader_that_does_not_read_is_given_up_and_its_samples_go_back():
    with server_with(stall_timeout=2.0) as server, ReplayClient(server.address, timeout=60.0) as client:
        for _ in range(4):
            client.insert(bytes(8 * MB), {"plain": 1.0})
        with connection(server.address) as stub:
            call = stub.Sample(pb.SampleRequest(table="plain", num_samples=4))
            call.initial_metadata()  # it has drawn
            until(lambda: in_hand(client) == 0)
            assert client.server_info().tables["plain"].samples == 0
            error = refused(lambda: call)
            assert error.code() is Code.DEADLINE_EXCEEDED
            assert "stall_timeout" in error.details()
        assert len(client.sample("plain", 4)) == 4


def in_hand(client: ReplayClient) -> int:
    return client.server_info().tables["plain"].reserved


def begun(stub: ReplayStub, keys: list[int]):
    """An answer that the server sends, and that nobody reads yet."""
    call = stub.Get(pb.GetRequest(keys=keys))
    call.initial_metadata()
    return call


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_slow_reader_of_items_keeps_none_of_them_and_loses_its_answer_to_inserts(on_disk, tmp_path):
    with (
        server_with(max_bytes=32 * MB, data_dir=tmp_path if on_disk else None) as server,
        connection(server.address) as stub,
        ReplayClient(server.address, timeout=60.0) as client,
    ):
        keys = [client.insert(bytes(MB), {"plain": 1.0}) for _ in range(32)]
        call = begun(stub, keys)
        later = [client.insert(bytes(MB), {"plain": 1.0}) for _ in range(31)]
        info = client.server_info()
        assert info.items == 32
        assert info.bytes == 32 * MB
        assert {item.key for item in client.list_items("plain").items} == {keys[-1], *later}
        error = refused(lambda: call)
        assert error.code() is Code.UNAVAILABLE
        assert error.details().endswith("left before its bytes were sent: ask again, for fewer at once")
        assert [item.key for item in client.get(keys)] == keys[-1:]


def test_what_is_sent_to_all_readers_of_items_together_is_bounded(monkeypatch):
    # On a fast connection gRPC takes up to 16 MB from the server before anybody reads them.
    monkeypatch.setattr(limits, "MAX_BYTES_READ", 48 * MB)
    with (
        server_with(max_payload_bytes=48 * MB) as server,
        connection(server.address) as stub,
        ReplayClient(server.address, timeout=60.0) as client,
    ):
        large, small = (client.insert(bytes(size), {"plain": 1.0}) for size in (48 * MB, 1))
        call = begun(stub, [large])
        error = refused(lambda: stub.Get(pb.GetRequest(keys=[small]), timeout=1.0))
        assert error.code() is Code.DEADLINE_EXCEEDED
        client.delete("plain", [large])
        assert client.server_info().bytes == 1  # what is being sent counts for no table
        call.cancel()
        assert [item.key for item in client.get([small])] == [small]


def test_samples_in_hand_of_all_clients_are_bounded(monkeypatch):
    monkeypatch.setattr(limits, "MAX_ROWS_OUTSTANDING", 8)
    with (
        server_with() as server,
        ReplayClient(server.address, timeout=60.0) as client,
        connection(server.address) as stub,
    ):
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


def test_the_largest_requests_hold_others_up_for_a_moment_only():
    with (
        server_with() as server,
        connection(server.address) as stub,
        ReplayClient(server.address, timeout=60.0) as other,
    ):
        other.policy()
        keys = range(1 << 20)
        with bystander(other):
            stub.Delete(pb.DeleteRequest(table="plain", keys=keys))
            stub.UpdatePriorities(
                pb.UpdatePrioritiesRequest(table="plain", keys=bytes(7 * MB), priorities=bytes(7 * MB))
            )


def test_scopes_forget_what_has_left_and_then_the_oldest(monkeypatch):
    monkeypatch.setattr(tables, "MAX_SCOPE_KEYS", 100)
    there: set[int] = set()
    known = tables.Scopes(there.__contains__)

    def give(scope: str, keys: range) -> int:
        there.clear()
        there.update(keys)
        known.give(scope, keys)
        return sum(len(known.keys_under(each)) for each in known)

    assert max(give("all the time", range(10 * n, 10 * n + 10)) for n in range(30)) <= 110
    assert max(give(f"step {n}", range(1000, 1060)) for n in range(10)) <= 160
    assert "step 0" not in known
    assert known.keys_under("step 9") == set(range(1000, 1060))


# ------------------------------------------------------------------------------------------------ without a token


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_compressed_message_counts_as_large_as_it_becomes(compression):
    def insert(stub: ReplayStub, size: int) -> pb.InsertResponse:
        return stub.Insert(item(size, bytes(size)), compression=compression, timeout=60)

    with server_with() as server, connection(server.address) as stub:
        assert insert(stub, 15 * MB).decided == 1
        with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
            insert(stub, 17 * MB)
        assert insert(stub, MB).decided == 1


async def test_a_call_that_its_client_cancels_ends_as_cancelled():
    calls = limits.OpenCalls(LimitsConfig())
    with pytest.raises(asyncio.CancelledError), calls.counted("Get", endless=False):
        raise asyncio.CancelledError
    assert calls.open["Get"] == 0
