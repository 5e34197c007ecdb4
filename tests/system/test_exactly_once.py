"""Each item of a queue reaches a living reader once, whatever breaks between reader and server, and wherever.

REPLAY_CUT_STEP=1 cuts the answers after every byte; a run of all tests takes larger steps.
"""

import asyncio
import os
from contextlib import contextmanager

import pytest

from replay_client import AsyncReplayClient, ReplayClient
from replay_protos import replay_pb2 as pb
from replay_server import ReplayServer, TableConfig
from tests.factories import server_process, until
from tests.system.proxy import Faults, FaultyProxy

STEP = int(os.environ.get("REPLAY_CUT_STEP", "29"))
ANSWER_BYTES = 900
"""More than the server sends for one batch of the sizes used here, with its answer to `take`."""
QUIET = Faults(delay=0, reset=0, truncate=0, drop=0, refuse=0)
QUEUE = TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 1000}, forward_to="pool")
CONFIG = """
[[tables]]
name = "queue"
rate_limiter = { type = "queue", max_size = 1000 }
"""


def payload(number: int) -> bytes:
    return b"%d:" % number + bytes(300)


@contextmanager
def reader_behind_a_proxy():
    """A server, a client that reaches it directly, and a proxy for the reader."""
    with (
        ReplayServer(tables=[QUEUE, TableConfig(name="pool")], port=0) as server,
        ReplayClient(server.address) as writer,
        FaultyProxy(server.address, 0, QUIET) as proxy,
    ):
        yield writer, proxy


def check_that_the_queue_is_used_up(writer: ReplayClient, inserted: int) -> None:
    info = writer.server_info()
    queue, pool = info.tables["queue"], info.tables["pool"]
    assert (queue.size, queue.consumed, pool.size) == (0, inserted, inserted)


def test_a_sample_whose_answer_breaks_off_anywhere_comes_once():
    with reader_behind_a_proxy() as (writer, proxy), ReplayClient(proxy.address, timeout=30.0) as reader:
        cuts = range(1, ANSWER_BYTES, STEP)
        for number, cut in enumerate(cuts):
            writer.insert(payload(number), {"queue": 1.0})
            proxy.cut_after = cut
            [sample] = reader.sample("queue", 1)
            assert bytes(sample.payload) == payload(number), cut
        check_that_the_queue_is_used_up(writer, len(cuts))


def test_a_batch_of_a_sampler_whose_answer_breaks_off_anywhere_comes_once():
    with reader_behind_a_proxy() as (writer, proxy), ReplayClient(proxy.address, timeout=30.0) as reader:
        cuts = range(1, ANSWER_BYTES, STEP)
        with reader.sampler("queue", prefetch=1) as sampler:
            for number, cut in enumerate(cuts):
                writer.insert(payload(number), {"queue": 1.0})
                proxy.cut_after = cut
                [sample] = next(sampler)
                assert bytes(sample.payload) == payload(number), cut
        check_that_the_queue_is_used_up(writer, len(cuts))


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


@pytest.mark.parametrize("stream", [False, True], ids=["lease", "stream"])
async def test_a_batch_that_was_taken_before_a_kill_may_be_taken_again_after_the_restart(tmp_path, stream):
    config = f'[server]\ndata_dir = "{tmp_path}/data"\n{CONFIG}'
    with server_process(tmp_path, config) as server:
        async with AsyncReplayClient(server.address) as client:
            await client.insert(payload(0), {"queue": 1.0})
            if stream:
                call = client._connection.payloads.SampleStream()
                await call.write(pb.SampleStreamRequest(open=pb.SampleRequest(table="queue", num_samples=1), credit=1))
                batch = (await call.read()).head.batch
                await call.write(pb.SampleStreamRequest(take=batch))
                assert (await call.read()).head.taken == batch
            else:
                [sample] = await client.sample("queue", 1, lease=60.0)
                batch = sample.info.lease
                assert await client._connection.take(batch, 10.0)
        server.kill()
    with server_process(tmp_path, config) as server:
        async with AsyncReplayClient(server.address) as client:
            assert await client._connection.take(batch, 10.0)
            assert not await client._connection.take(batch + 1, 10.0)
            assert (await client.server_info()).tables["queue"].size == 0


async def test_a_take_that_finds_its_stream_still_open_takes_the_batch_from_it():
    with ReplayServer(tables=[QUEUE, TableConfig(name="pool")], port=0) as server:
        async with AsyncReplayClient(server.address) as client:
            await client.insert(payload(0), {"queue": 1.0})
            call = client._connection.payloads.SampleStream()
            await call.write(pb.SampleStreamRequest(open=pb.SampleRequest(table="queue", num_samples=1), credit=1))
            batch = (await call.read()).head.batch
            assert await client._connection.take(batch, 10.0)
            await call.write(pb.SampleStreamRequest(take=batch))
            assert (await call.read()).head.taken == batch
            call.cancel()
            await asyncio.sleep(0.2)
            info = await client.server_info()
            assert (info.tables["queue"].size, info.tables["pool"].size) == (0, 1)


def test_a_batch_whose_reader_dies_before_it_takes_it_goes_back(monkeypatch):
    monkeypatch.setattr("replay_client.single_batches.TAKE_SECONDS", 0.3)

    async def dies(self, batch, timeout):
        raise RuntimeError("the reader died")

    with (
        ReplayServer(tables=[QUEUE, TableConfig(name="pool")], port=0) as server,
        ReplayClient(server.address) as client,
    ):
        client.insert(payload(0), {"queue": 1.0})
        with monkeypatch.context() as patch:
            patch.setattr("replay_client.connection.Connection.take", dies)
            with pytest.raises(RuntimeError, match="the reader died"):
                client.sample("queue", 1)
        until(lambda: client.server_info().tables["queue"].size == 1)
        assert bytes(client.sample("queue", 1)[0].payload) == payload(0)


def test_a_leased_sample_does_not_get_the_batch_that_a_plain_one_could_not_take(monkeypatch):
    async def dies(self, batch, timeout):
        raise RuntimeError("no answer")

    with (
        ReplayServer(tables=[QUEUE, TableConfig(name="pool")], port=0) as server,
        ReplayClient(server.address) as client,
    ):
        for number in range(2):
            client.insert(payload(number), {"queue": 1.0})
        with monkeypatch.context() as patch:
            patch.setattr("replay_client.connection.Connection.take", dies)
            with pytest.raises(RuntimeError, match="no answer"):
                client.sample("queue", 1)
        [leased] = client.sample("queue", 1, lease=30.0)
        assert bytes(leased.payload) == payload(1)
        assert client.acknowledge([leased]).applied == 1
        assert bytes(client.sample("queue", 1)[0].payload) == payload(0)
