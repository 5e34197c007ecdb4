"""Streams of draws, spoken to message by message: what refuses, holds up or ends one draw, and what it leaves alone."""

import asyncio
import time
from contextlib import closing

import pytest

from replay_client.testing import until
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import LimitsConfig, ReplayServer, TableConfig
from replay_server.errors import Code
from replay_server.rpc import sampling
from replay_server.rpc.limits import Backend
from tests.kit.clocks import turns
from tests.kit.tables import replay_buffer
from tests.server.rpc.calls import Requests, bystander

TABLES = [
    TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 4}),
    TableConfig(name="pool", sampler="prioritized", remover="min_heap"),
    TableConfig(name="plain", sampler="fifo"),
]
ID = 1 << 40
"""Of a draw."""


@pytest.fixture
def server():
    with ReplayServer(tables=TABLES, port=0) as server:
        yield server


def draw_request(**fields) -> pb.DrawRequest:
    """One item of `plain`, at once, unless told otherwise."""
    return pb.DrawRequest(
        draw=pb.SampleRequest(**{"table": "plain", "num_samples": 1, "timeout": 0, "id": ID} | fields)
    )


class Drawing:
    """A stream of draws that stays open. It yields the answers; `ask` sends further requests."""

    def __init__(self, stub: ReplayStub, *requests: pb.DrawRequest) -> None:
        self._requests = Requests(*requests)
        self._answers = stub.Draw(iter(self._requests), timeout=60)

    def ask(self, request: pb.DrawRequest) -> None:
        self._requests.put(request)

    def __next__(self) -> pb.SampleResponse:
        return next(self._answers)

    def close(self) -> None:
        self._requests.put(None)
        self._answers.cancel()


def drawing(stub: ReplayStub, *requests: pb.DrawRequest):
    """Such a stream, which begins with these requests and ends with the block."""
    return closing(Drawing(stub, *requests))


def test_a_request_that_is_refused_ends_alone_and_its_stream_goes_on(stub, client):
    key = client.insert(b"x", {"plain": 1.0})
    bad, good = draw_request(table="nope"), draw_request(id=ID + 1)
    with drawing(stub, bad, pb.DrawRequest(renew=[ID]), pb.DrawRequest(), good) as answers:
        assert [next(answers).error.code for _ in range(2)] == [Code.NOT_FOUND, Code.INVALID_ARGUMENT]
        assert next(answers).keys == [key]


def test_a_draw_that_cannot_be_served_does_not_hold_up_those_behind_it(stub, client):
    key = client.insert(b"x", {"queue": 1.0})
    waits, goes = draw_request(table="pool", timeout=60.0), draw_request(table="queue", id=ID + 1)
    with drawing(stub, waits, goes) as answers:
        assert next(answers).keys == [key]


def test_a_batch_ends_once_whoever_names_it_and_however_often(stub, client):
    """An unknown id is missing. A known one may be named on any stream: its reader may have lost its own."""
    for n in range(4):
        client.insert(bytes([n]), {"queue": 1.0})

    def told(**ids) -> tuple[list[int], list[int]]:
        (answer,) = stub.Draw(iter([pb.DrawRequest(**ids)]))
        return list(answer.done), list(answer.missing)

    with drawing(stub, *(draw_request(table="queue", id=ID + n) for n in range(2))) as answers:
        assert [next(answers).batch for _ in range(2)] == [ID, ID + 1]
        unknown = [0, 1, ID + 2, 2**63 + ID, 2**64 - 1]
        assert told(acknowledge=unknown) == told(requeue=unknown) == told(renew=unknown, seconds=9.0) == ([], unknown)
        assert told(acknowledge=[ID, ID]) == ([ID, ID], [])
        assert told(requeue=[ID]) == ([], [ID])
        assert told(renew=[ID], seconds=9.0) == ([ID], [])
    until(lambda: client.server_info().tables["queue"].size == 3, "what nobody took must come back")
    assert told(acknowledge=[ID, ID + 1]) == ([ID], [ID + 1])
    assert client.server_info().tables["queue"].consumed == 1


def test_draws_of_one_stream_are_bounded(stub, client, monkeypatch):
    monkeypatch.setattr(sampling, "MAX_DRAWS", 3)
    with drawing(stub, *(draw_request(id=ID + n, timeout=60.0) for n in range(4))) as answers:
        refused = next(answers)
        assert refused.batch == ID + 3
        assert refused.error.code == Code.RESOURCE_EXHAUSTED
        assert "3 draws of this stream" in refused.error.message
        assert client.server_info().tables["plain"].sampling.count == 3


def test_many_draws_at_once_hold_nobody_up(stub, client):
    with client.writer() as writer:
        for _ in range(500):
            writer.insert(b"x" * 100, {"plain": 1.0})
    draws = [draw_request(num_samples=500, id=ID + n) for n in range(130)]
    with drawing(stub, *draws) as drawn, bystander(client):
        assert {next(drawn).batch for _ in draws} == {draw.draw.id for draw in draws}


class _Call:
    """A stream whose reader takes one answer."""

    client = "client"

    def __init__(self) -> None:
        self.read_so_far = self.written = 0

    async def read(self) -> pb.DrawRequest | None:
        self.read_so_far += 1
        return pb.DrawRequest(acknowledge=[ID]) if self.read_so_far <= 10_000 else None

    async def write(self, response: object) -> None:
        if self.written:
            await asyncio.Event().wait()
        self.written += 1


def test_a_stream_reads_no_further_than_its_reader_takes_answers():
    buffer = replay_buffer(TABLES, time.monotonic)
    backend = Backend(buffer, LimitsConfig(), None)
    call = _Call()

    async def take_one_answer() -> None:
        responder = sampling.DrawResponder(backend, sampling.OpenDraws(backend), call, lambda side: None)
        running = asyncio.create_task(responder.run())
        await turns(20_000)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(take_one_answer())
    assert call.written == 1
    assert call.read_so_far <= sampling.MAX_UNANSWERED + 3  # one is sent, one cannot be, one waits for room
