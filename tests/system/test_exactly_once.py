"""Each item of a queue reaches a living reader once, whatever breaks between reader and server, and wherever.

REPLAY_CUT_STEP=1 cuts the answers after every byte; a run of all tests takes larger steps.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager

import grpc
import pytest

from replay_client import AsyncReplayClient, ReplayClient, Sample, SampleInfo
from replay_client.access import Access
from replay_client.connection import Connection
from replay_client.requests import new_id
from replay_client.sampling import DrawStream
from replay_protos import replay_pb2 as pb
from replay_server import ReplayServer, TableConfig
from tests.kit.processes import server_process
from tests.system.proxy import Faults, FaultyProxy

STEP = int(os.environ.get("REPLAY_CUT_STEP", "29"))
ANSWER_BYTES = 900
"""More than the server sends for one batch of the sizes used here, with its answer to `take`."""
QUIET = Faults(delay=0, reset=0, truncate=0, drop=0, refuse=0)
QUEUE = TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 1000}, forward_to="pool")
CONFIG = """
tables = [{ name = "queue", rate_limiter = { type = "queue", max_size = 1000 } }]
"""


def payload(number: int) -> bytes:
    return b"%d:" % number + bytes(300)


@contextmanager
def single_samples(reader: ReplayClient):
    yield iter(lambda: reader.sample("queue", 1), None)


READERS = {
    "samples": single_samples,
    "a sampler": lambda reader: reader.sampler("queue", prefetch=1),
    "a sampler with leases": lambda reader: reader.sampler("queue", prefetch=1, lease=60.0),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_batch_whose_answer_breaks_off_anywhere_comes_once(read):
    with (
        ReplayServer(tables=[QUEUE, TableConfig(name="pool")], port=0) as server,
        ReplayClient(server.address) as writer,
        FaultyProxy(server.address, 0, QUIET) as proxy,
        ReplayClient(proxy.address, timeout=60.0) as reader,
        read(reader) as batches,
    ):
        cuts = range(1, ANSWER_BYTES, STEP)
        for number, cut in enumerate(cuts):
            writer.insert(payload(number), {"queue": 1.0})
            proxy.cut_after = cut
            [sample] = next(batches)
            assert bytes(sample.payload) == payload(number), cut
            if sample.info.lease_id:
                assert writer.acknowledge([sample]).applied == 1
        tables = writer.server_info().tables
        queue, pool = tables["queue"], tables["pool"]
        assert queue.size == 0
        assert queue.reserved == 0
        assert queue.consumed == len(cuts)
        assert pool.size == len(cuts)


async def test_a_reader_that_is_interrupted_while_it_takes_batches_gets_each_of_them_once():
    with ReplayServer(tables=[QUEUE, TableConfig(name="pool")], port=0) as server:
        async with AsyncReplayClient(server.address) as client, client.sampler("queue", prefetch=1) as sampler:
            received = []
            for number in range(60):
                await client.insert(payload(number), {"queue": 1.0})
            while len(received) < 60:
                task = asyncio.create_task(anext(sampler))
                for _ in range(len(received) % 12):  # interrupted at one of the first points where it waits
                    await asyncio.sleep(0)
                if len(received) % 2:
                    task.cancel()
                try:
                    [sample] = await task
                except asyncio.CancelledError:
                    [sample] = await anext(sampler)
                received.append(bytes(sample.payload))
            # A batch of the stream that was interrupted may go back after the next stream has drawn others.
            assert sorted(received) == sorted(payload(number) for number in range(60))


def draw_of(**fields) -> pb.SampleRequest:
    """A draw of one item of the queue."""
    return pb.SampleRequest(table="queue", num_samples=1, id=new_id(), **fields)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Connection]:
    """A connection for draw streams of their own."""
    connection = Connection(Access(address), timeout=30.0)
    try:
        yield connection
    finally:
        await connection.close()


async def take(client: AsyncReplayClient, batch: int) -> bool:
    """Takes a batch on the client's own stream. Whether it is the reader's."""
    return (await client.acknowledge([named(batch)])).missing == ()


def named(batch: int) -> Sample:
    """A sample that names its batch, and nothing else."""
    return Sample(SampleInfo(0, 0.0, 0.0, 0.0, 0, 0, 0, 0, lease_id=batch), b"")


@pytest.mark.parametrize("stream", [False, True], ids=["lease", "stream"])
async def test_a_batch_that_was_taken_before_a_kill_may_be_taken_again_after_the_restart(tmp_path, stream):
    config = f'server.data_dir = "{tmp_path}/data"\n{CONFIG}'
    with server_process(tmp_path, config) as server:
        async with AsyncReplayClient(server.address) as client, connected(server.address) as connection:
            await client.insert(payload(0), {"queue": 1.0})
            if stream:
                draws = DrawStream(connection)
                batch = (await draws.draw(draw_of())).head.batch
                assert (await draws.end(pb.DrawRequest(acknowledge=[batch]))).done == [batch]
                await draws.close()
            else:
                [sample] = await client.sample("queue", 1, lease=60.0)
                batch = sample.info.lease_id
                assert await take(client, batch)
        server.kill()
    with server_process(tmp_path, config) as server:
        async with AsyncReplayClient(server.address) as client:
            assert await take(client, batch)
            assert not await take(client, batch + 1)
            assert (await client.server_info()).tables["queue"].size == 0


async def test_a_take_that_finds_its_stream_still_open_takes_the_batch_from_it():
    with ReplayServer(tables=[QUEUE, TableConfig(name="pool")], port=0) as server:
        async with AsyncReplayClient(server.address) as client, connected(server.address) as connection:
            await client.insert(payload(0), {"queue": 1.0})
            draws = DrawStream(connection)
            batch = (await draws.draw(draw_of())).head.batch
            assert await take(client, batch)
            assert (await draws.end(pb.DrawRequest(acknowledge=[batch]))).done == [batch]
            await draws.close()
            info = await client.server_info()
            assert info.tables["queue"].size == 0
            assert info.tables["pool"].size == 1


@pytest.mark.parametrize("lease", [0.0, 60.0])
async def test_a_draw_that_is_asked_for_again_gives_back_what_the_first_attempt_got(lease):
    """The first stream is still open: the server has not noticed yet that its connection broke."""
    with ReplayServer(tables=[QUEUE, TableConfig(name="pool")], port=0) as server:
        async with AsyncReplayClient(server.address) as client, connected(server.address) as connection:
            for number in range(2):
                await client.insert(payload(number), {"queue": 1.0})
            first, again, request = DrawStream(connection), DrawStream(connection), draw_of(lease=lease)
            batches = [await stream.draw(request) for stream in (first, again)]
            assert [bytes(rows[0]) for _, rows in batches] == [payload(0), payload(0)]
            assert (await client.server_info()).tables["queue"].reserved == 1
            assert (await again.end(pb.DrawRequest(acknowledge=[request.id]))).done == [request.id]
            with pytest.raises(grpc.aio.AioRpcError, match="has ended: choose a new id"):
                await again.draw(request)
            await first.close()
            await again.close()
            queue = (await client.server_info()).tables["queue"]
            assert queue.size == 1
            assert queue.reserved == 0
            assert queue.consumed == 1


async def test_a_batch_whose_reader_ends_before_it_takes_it_goes_back_at_once():
    with ReplayServer(tables=[QUEUE, TableConfig(name="pool")], port=0) as server:
        async with AsyncReplayClient(server.address) as client, connected(server.address) as connection:
            await client.insert(payload(0), {"queue": 1.0})
            draws = DrawStream(connection)
            batch = (await draws.draw(draw_of())).head.batch
            await draws.close()
            while (await client.server_info()).tables["queue"].reserved:
                pass  # a busy server notices a moment later
            assert not await take(client, batch)
            [sample] = await client.sample("queue", 1)
            assert bytes(sample.payload) == payload(0)


def test_a_leased_sample_does_not_get_the_batch_that_a_plain_one_could_not_take(monkeypatch):
    async def dies(self, request, timeout):
        raise RuntimeError("no answer")

    with (
        ReplayServer(tables=[QUEUE, TableConfig(name="pool")], port=0) as server,
        ReplayClient(server.address) as client,
    ):
        for number in range(2):
            client.insert(payload(number), {"queue": 1.0})
        with monkeypatch.context() as patch:
            patch.setattr("replay_client.sampling.DrawStream.finish", dies)
            with pytest.raises(RuntimeError, match="no answer"):
                client.sample("queue", 1)
        [leased] = client.sample("queue", 1, lease=30.0)
        assert bytes(leased.payload) == payload(1)
        assert client.acknowledge([leased]).applied == 1
        assert bytes(client.sample("queue", 1)[0].payload) == payload(0)
