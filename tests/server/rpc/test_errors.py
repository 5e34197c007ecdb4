"""Each cause of an error has one code and reason on the wire, and one class in the client."""

import grpc
import pytest

from replay_client import ReplayClient
from replay_client.errors import ServerBusyError, StorageError, TableFullError, error_of
from replay_protos import REASON_KEY
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import ReplayServer, TableConfig
from replay_server.errors import Code, Reason
from replay_server.rpc.limits import Budget

CLASSES = {
    Reason.NONE: TableFullError,
    Reason.TABLE_FULL: TableFullError,
    Reason.SERVER_BUSY: ServerBusyError,
    Reason.STORAGE_FAILED: StorageError,
}


@pytest.fixture
def server():
    tables = [TableConfig(name="full", max_size=1, when_full="reject"), TableConfig(name="plain")]
    with ReplayServer(tables=tables, port=0, max_bytes=1000) as server:
        yield server


def test_codes_have_the_numbers_of_grpc():
    numbers = {code.name: code.value[0] for code in grpc.StatusCode}
    assert {code.name: int(code) for code in Code}.items() <= numbers.items()


@pytest.mark.parametrize("reason", CLASSES)
def test_each_reason_has_a_class_in_the_client(reason):
    assert type(error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "why", reason)) is CLASSES[reason]


def test_a_reason_that_this_client_does_not_know_means_a_full_table():
    assert type(error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "why", "of-next-year")) is TableFullError


def test_a_reason_counts_only_with_its_code():
    assert type(error_of(Code.NOT_FOUND, "why", "server-busy")) is type(error_of(Code.NOT_FOUND, "why"))


def test_a_full_table_and_a_full_server_are_different_errors_in_single_inserts_and_writers(server):
    with ReplayClient(server.address, timeout=60.0) as client:
        client.insert(b"x", {"full": 1.0})
        with pytest.raises(TableFullError, match="size 1 = max_size 1"):
            client.insert(b"x", {"full": 1.0})
        client.update_table("full", max_size=2)
        with pytest.raises(ServerBusyError, match="the server is full"):
            client.insert(bytes(1000), {"full": 1.0, "plain": 1.0})
        with client.writer() as writer:
            writer.insert(bytes(1000), {"plain": 1.0})
            with pytest.raises(ServerBusyError, match="the server is full"):
                writer.flush()


def test_a_call_says_its_reason_in_the_trailing_metadata_and_keeps_the_code_that_older_clients_know(
    server, monkeypatch
):
    with ReplayClient(server.address, timeout=60.0) as client, grpc.insecure_channel(server.address) as channel:
        client.insert(b"x", {"plain": 1.0})
        monkeypatch.setattr(Budget, "why_not", lambda *_: "all of it is in use")
        request = pb.SampleRequest(table="plain", num_samples=1, lease=60.0)
        with pytest.raises(grpc.RpcError) as caught:
            list(ReplayStub(channel).Sample(request, timeout=60))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(caught.value.trailing_metadata())[REASON_KEY] == Reason.SERVER_BUSY
        with pytest.raises(ServerBusyError):
            client.sample("plain", 1, lease=60.0)
