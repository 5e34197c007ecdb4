"""Short calls on an open stream behave as calls of their own: results, refusals and tokens."""

import asyncio

import grpc
import numpy as np
import pytest

from replay_client import AsyncReplayClient, ReplayClient
from replay_client.errors import AuthenticationError, InvalidRequestError, TableNotFoundError
from replay_client.testing import until
from replay_protos import SHORT_METHODS
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import ReplayServer, TableConfig
from replay_server.config import SecurityConfig
from tests.kit.processes import sample_of, scrape, tokens_file

TABLES = [TableConfig(name="pool", sampler="prioritized", remover="fifo", max_size=64)]


@pytest.fixture
def server():
    with ReplayServer(tables=TABLES, port=0, metrics_listen="127.0.0.1:0") as server:
        yield server


def ended(server: ReplayServer, method: str) -> float:
    """How many calls of a method have ended well."""
    metric = sample_of("replay_grpc_handled_total", method=method, code="OK")
    return scrape(server.metrics_address).get(metric, 0.0)


def calls(server: ReplayServer, requests: list[pb.CallRequest]) -> list[pb.CallResponse]:
    with grpc.insecure_channel(server.address) as channel:
        return list(ReplayStub(channel).Multiplex(iter(requests), timeout=60))


def works(client: ReplayClient) -> None:
    """Each method does what it says."""
    keys = [client.insert(b"x", {"pool": 1.0}) for _ in range(3)]
    assert client.update_priorities("pool", {keys[0]: 5.0, 1: 2.0}).missing == (1,)
    assert client.list_items("pool", order_by="priority", descending=True).items[0].key == keys[0]
    assert client.acknowledge(client.sample("pool", 2, lease=60.0)).applied == 1
    assert client.delete("pool", keys).applied == 3


def test_each_method_works_over_one_stream(server):
    with ReplayClient(server.address, timeout=60.0) as client:
        works(client)
    until(lambda: ended(server, "Multiplex") == 1)


def test_a_call_that_is_refused_ends_alone_and_its_stream_goes_on(server):
    good = pb.UpdatePrioritiesRequest(table="pool").SerializeToString()
    bad = pb.UpdatePrioritiesRequest(table="nope").SerializeToString()
    answers = calls(
        server,
        [
            pb.CallRequest(method="UpdatePriorities", request=bad),
            pb.CallRequest(method="UpdatePriorities", request=b"\xff\xff"),
            pb.CallRequest(method="Reset", request=good),
            pb.CallRequest(method="UpdatePriorities", request=good),
        ],
    )
    invalid, not_found = grpc.StatusCode.INVALID_ARGUMENT.value[0], grpc.StatusCode.NOT_FOUND.value[0]
    assert [answer.code for answer in answers] == [not_found, invalid, invalid, 0]
    assert "no table 'nope'" in answers[0].message
    assert "no message of this protocol" in answers[1].message
    assert f"method 'Reset': one of {', '.join(SHORT_METHODS)}" in answers[2].message


def test_a_client_gets_the_error_and_goes_on(server):
    with ReplayClient(server.address, timeout=60.0) as client:
        for _ in range(3):
            with pytest.raises(TableNotFoundError, match="no table 'nope'"):
                client.update_priorities("nope", {1: 1.0})
            with pytest.raises(InvalidRequestError, match="priority -1"):
                client.update_priorities("pool", {1: -1.0})
        works(client)


def test_more_calls_at_once_than_streams(server):
    async def update() -> list[int]:
        async with AsyncReplayClient(server.address, timeout=60.0) as client:
            keys = [await client.insert(b"x", {"pool": 1.0}) for _ in range(4)]
            work = [client.update_priorities("pool", dict.fromkeys(keys, float(n))) for n in range(60)]
            return [result.applied for result in await asyncio.gather(*work)]

    assert asyncio.run(update()) == [4] * 60
    until(lambda: 1 <= ended(server, "Multiplex") <= 16)


def test_a_large_request_is_a_call_of_its_own(server):
    with ReplayClient(server.address, timeout=60.0) as client:
        keys = np.arange(1, 100_001, dtype=np.uint64)
        assert len(client.update_priority_arrays("pool", keys, np.ones(keys.size)).missing) == keys.size
    until(lambda: ended(server, "UpdatePriorities") == 1)


def test_a_token_that_may_only_read_is_refused(tmp_path):
    tokens = tokens_file(tmp_path, f"read-only:{'a' * 32}", f"read-write:{'b' * 32}")
    with ReplayServer(tables=TABLES, port=0, security=SecurityConfig(tokens_file=str(tokens))) as server:
        with ReplayClient(server.address, timeout=60.0, token="b" * 32) as client:
            works(client)
        with (
            ReplayClient(server.address, timeout=60.0, token="a" * 32) as client,
            pytest.raises(AuthenticationError, match="needs a token of the role read-write"),
        ):
            client.update_priorities("pool", {1: 1.0})
