"""Large changes: they are one moment for whoever looks, and what they leave behind is cleared away in slices."""

import asyncio

import grpc
import numpy as np
import pytest

from replay_client import AsyncReplayClient
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import ReplayServer
from replay_server.storage.lmdb import LmdbStorage
from replay_server.storage.state import ChangeCollector
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.config import TableConfig
from tests.factories import replay_buffer, rows_of
from tests.server.storage.damage import commit

ROWS = 25
IN_A_SLICE = 10
SLICES = 3

NO_STALE = {"max_staleness": 1}
REMOVALS = [
    pytest.param({}, lambda buffer: buffer.update_table("t", {"max_size": 1}), 1, id="a smaller table"),
    pytest.param(NO_STALE, lambda buffer: buffer.set_policy_version(5, ""), 0, id="a version that makes all stale"),
    pytest.param({}, lambda buffer: buffer.delete("t", list(range(1, ROWS))), 1, id="a delete"),
    pytest.param({}, lambda buffer: buffer.reset("t"), 0, id="a reset"),
]


def empty(*, settings=None, **options) -> ReplayBuffer:
    return replay_buffer([TableConfig(name="t", **(settings or {}))], lambda: 0.0, rows_per_slice=IN_A_SLICE, **options)


def fill(buffer: ReplayBuffer) -> ReplayBuffer:
    """With the items 1 to ROWS."""
    assert buffer.insert(rows_of(range(1, ROWS + 1), {"t": 1.0})) == (ROWS, None)
    return buffer


@pytest.mark.parametrize("sampler", ["fifo", "lifo", "uniform", "prioritized", "min_heap"])
@pytest.mark.parametrize(("settings", "change", "left"), REMOVALS)
def test_a_large_removal_is_whole_at_once_and_cleared_away_in_slices(settings, change, left, sampler):
    buffer = fill(empty(settings={"sampler": sampler, **settings}))
    change(buffer)
    table = buffer.tables["t"]
    for slices in range(SLICES, -1, -1):
        assert len(buffer.items.leaving) == slices
        assert (table.size, table.bytes, table.sampler.selectable(), table.remover.selectable()) == (left,) * 4
        there = [key for key in range(1, ROWS + 1) if key in table]
        assert [key for key in range(1, ROWS + 1) if not buffer.items.gone(key)] == there
        assert table.columns.key[table.columns.used()].tolist() == there
        assert len(buffer.items) == left + max(0, ROWS - left - (SLICES - slices) * IN_A_SLICE)
        buffer.clear_slice()
    assert buffer.items.bytes == left


@pytest.mark.parametrize("when_full", ["evict", "block"])
def test_an_insert_that_lacks_bytes_clears_away_as_much_as_it_needs(when_full):
    buffer = fill(empty(settings={"when_full": when_full}, max_bytes=ROWS))
    buffer.reset("t")
    assert buffer.insert(rows_of([100], {"t": 1.0})) == (1, None)
    assert len(buffer.items.leaving) == SLICES - 1
    assert buffer.tables["t"].size == 1


def test_a_kill_between_two_slices_leaves_the_whole_change_and_no_payload(tmp_path):
    storage = LmdbStorage(tmp_path)
    buffer = empty(storage=storage)
    collector = ChangeCollector(buffer)
    buffer.watchers.append(collector)

    fill(buffer)
    commit(storage, collector)
    buffer.update_table("t", {"max_size": 1})
    buffer.clear_slice()
    commit(storage, collector)
    assert len(buffer.items.leaving) == SLICES - 1
    storage.close()
    again = LmdbStorage(tmp_path)
    state = again.load()
    assert (state.items.items["key"].tolist(), state.skipped, state.damaged) == ([ROWS], [], [])
    assert again.changed  # payloads without an item are to be deleted
    commit(again, ChangeCollector(replay_buffer([TableConfig(name="t")], lambda: 0.0), state))
    assert not again.changed
    again.load()
    assert not again.changed
    again.close()


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


def test_what_changes_between_two_slices_of_a_commit_is_in_it_as_it_is_at_the_end(monkeypatch):
    monkeypatch.setattr("replay_server.storage.state.ITEMS_PER_SLICE", IN_A_SLICE)
    buffer = fill(empty())
    collector = ChangeCollector(buffer)
    buffer.watchers.append(collector)
    keys = np.arange(1, ROWS + 1, dtype=np.uint64)
    buffer.update_priorities("t", keys, np.full(ROWS, 2.0))
    slices = collector.slices()
    first = next(slices).items.items["key"].tolist()
    assert len(first) == IN_A_SLICE
    buffer.update_priorities("t", np.array(first[:1], dtype=np.uint64), np.array([3.0]))
    buffer.delete("t", first[1:2])
    assert len(next(slices).items) == IN_A_SLICE
    assert next(slices, None) is None
    last = collector.collect()
    at_the_end = dict(zip(last.items.items["key"].tolist(), last.items.rows["priority"].tolist(), strict=True))
    assert at_the_end.pop(first[0]) == 3.0
    assert last.removed == first[1:2]
    assert list(at_the_end.values()) == [2.0] * (ROWS - 2 * IN_A_SLICE)
    assert not collector.pending()
