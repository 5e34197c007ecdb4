"""Segments and rows that wait, in a buffer of this process: what the reference model does not say."""

from __future__ import annotations

import numpy as np
import pytest

from replay_protos.labels import labels_of
from replay_server.errors import Code, Refused
from replay_server.storage import memory
from replay_server.storage.lmdb import LmdbStorage
from replay_server.storage.memory import MemoryStorage, read_payloads
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.config import TableConfig
from replay_server.tables.table import InsertBatch, SampleRequest
from tests.factories import replay_buffer


def insert(
    buffer: ReplayBuffer, *keys: int, table: str = "pool", columns: tuple[str, ...] = (), version: int = 0
) -> None:
    n = len(keys)
    labels = [labels_of(columns, None)] * n
    payloads = [(bytes([65 + key]) * 10,) for key in keys]
    batch = InsertBatch(list(keys), {table: np.ones(n)}, np.full(n, version), np.full(n, 10), payloads, labels=labels)
    while len(batch):
        done, pending = buffer.insert(batch)
        assert pending is None
        batch = batch[done:]


def buffer_with(storage=None, **config) -> ReplayBuffer:
    return replay_buffer([TableConfig(name="pool", **{"sampler": "fifo"} | config)], lambda: 0.0, storage=storage)


@pytest.fixture(params=["memory", "disk"])
def storage(request, tmp_path):
    if request.param == "memory":
        yield MemoryStorage()
        return
    storage = LmdbStorage(tmp_path)
    yield storage
    storage.close()


def test_a_batch_whose_bytes_are_read_later_has_the_bytes_of_its_draw(storage, monkeypatch):
    monkeypatch.setattr(memory, "BYTES_PER_READ", 10)  # one payload at a time
    buffer = buffer_with(storage)
    insert(buffer, 1, 2, 3)
    _, batch = buffer.sample("pool", SampleRequest(3, 3)).result()
    payloads = read_payloads(storage, batch.keys.tolist(), batch.sizes.tolist())
    assert b"".join(next(payloads)) == b"B" * 10
    for key in (1, 2, 3):
        buffer.extend(key, ["value"], (b"later",))
    assert [b"".join(payload) for payload in payloads] == [b"C" * 10, b"D" * 10]
    _, batch = buffer.sample("pool", SampleRequest(1, 1)).result()
    assert batch.sizes.tolist() == [15]


@pytest.mark.parametrize("sampler", ["fifo", "lifo", "uniform", "min_heap", "max_heap", "prioritized"])
def test_no_sampler_gives_a_row_that_waits_after_anything_that_happens_to_it(sampler):
    half_life = {"half_life": 2.0} if sampler in ("min_heap", "max_heap", "prioritized") else {}
    buffer = buffer_with(sampler={"type": sampler} | half_life, requires=["value"], seed=1)
    for key in range(1, 9):
        insert(buffer, key, columns=("value",) if key % 2 else (), version=key)
    buffer.update_priorities("pool", np.arange(1, 9, dtype=np.uint64), np.linspace(1, 2, 8))
    for version in (3, 400, 2):  # weights are computed anew, for all rows
        buffer.set_policy_version(version, "", rollback=version < 400)
        batch_id, batch = buffer.sample("pool", SampleRequest(4, 4)).result()
        assert sorted(batch.keys.tolist()) == [1, 3, 5, 7]
        buffer.give_back(batch_id)
    assert buffer.table("pool").weigh(SampleRequest(1, 1))["items"] == 4
    buffer.extend(2, ["value"], (b"x",))
    _, batch = buffer.sample("pool", SampleRequest(5, 5)).result()
    assert sorted(batch.keys.tolist()) == [1, 2, 3, 5, 7]


def test_a_segment_without_a_name_is_refused():
    buffer = buffer_with()
    insert(buffer, 1)
    with pytest.raises(Refused, match="a segment of item 1 names no column") as refusal:
        buffer.extend(1, [], (b"x",))
    assert refusal.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("bound", ["server", "table"])
def test_labels_count_for_bounds_as_they_take_memory_and_not_as_payload(bound):
    names = [tuple(f"column {n} of {key}" for n in range(1000)) for key in range(11)]  # 95 kB each
    table = TableConfig(name="pool", sampler="fifo", max_bytes=250_000 if bound == "table" else None)
    buffer = replay_buffer([table], lambda: 0.0, max_bytes=250_000 if bound == "server" else None)
    for key in range(1, 10):
        insert(buffer, key, columns=names[key])
    insert(buffer, 10)
    batch_id, batch = buffer.sample("pool", SampleRequest(3, 3)).result()
    assert (batch.keys.tolist(), batch.sizes.tolist()) == ([8, 9, 10], [10, 10, 10])
    with pytest.raises(Refused, match=r"item 10 of 10 bytes with a segment of 9\d{4}.*full"):
        buffer.extend(10, names[10], (b"x",))
    buffer.give_back(batch_id)
    buffer.reset()
    assert (buffer.items.bytes, buffer.table("pool").bytes) == (0, 0)


def test_an_item_has_a_bounded_number_of_columns():
    buffer = buffer_with()
    insert(buffer, 1)
    buffer.extend(1, [f"column{n}" for n in range(1024)], (b"x",))
    with pytest.raises(Refused, match="item 1: an item has at most 1024 columns, not 1025"):
        buffer.extend(1, ["one more"], (b"y",))
    assert buffer.items[1].nbytes == 11
