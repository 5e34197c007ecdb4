"""Large changes: they are one moment for whoever looks, and what they leave behind is cleared away in slices."""

import asyncio

import grpc
import pytest

from replay_client import AsyncReplayClient
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import ReplayServer
from replay_server.tables.config import TableConfig
from tests.kit.tables import replay_buffer, rows_of


@pytest.mark.parametrize("when_full", ["evict", "block"])
def test_an_insert_that_lacks_bytes_clears_away_as_much_as_it_needs(when_full):
    buffer = replay_buffer([TableConfig(name="t", when_full=when_full)], lambda: 0.0, rows_per_slice=10, max_bytes=25)
    assert buffer.insert(rows_of(range(1, 26), {"t": 1.0})) == (25, None)
    buffer.reset("t")
    assert buffer.insert(rows_of([100], {"t": 1.0})) == (1, None)
    assert len(buffer.items.leaving) == 2  # of three slices
    assert buffer.tables["t"].size == 1


async def test_another_table_is_served_while_a_large_removal_is_cleared_away():
    many = 200_000
    tables = [TableConfig(name="large"), TableConfig(name="other")]
    server, started = ReplayServer(tables, 0, shared_memory=False), asyncio.Event()
    running = asyncio.create_task(server.run(started.set))
    await started.wait()
    async with AsyncReplayClient(server.address) as client, grpc.aio.insecure_channel(server.address) as channel:
        stub = ReplayStub(channel)
        for start in range(0, many, 50_000):
            keys = range(start + 1, start + 50_001)
            await stub.Insert(pb.InsertRequest(keys=keys, targets=[pb.InsertTarget(table="large")]))
        await stub.Insert(pb.InsertRequest(keys=[many + 1], targets=[pb.InsertTarget(table="other")]))
        changing = asyncio.create_task(client.update_table("large", max_size=1))
        held = []
        while not held or held[-1] != 2:
            await client.sample("other", 1)
            held.append(server.items)
        assert any(2 < items < many for items in held)
        assert (await changing).size == 1
    server.request_stop()
    await running
