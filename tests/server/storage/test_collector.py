"""What a ChangeCollector makes of changes, where writing them fails."""

import time

import numpy as np

from replay_server.storage.collector import ChangeCollector
from replay_server.storage.records import State, unpack_items
from replay_server.storage.restore import restore
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.config import TableConfig
from replay_server.tables.items import InsertBatch
from replay_server.tables.table import SampleRequest


def test_what_could_not_be_written_comes_again():
    tables = [TableConfig(name="a")]
    buffer = ReplayBuffer(tables, time.monotonic)
    collector = ChangeCollector(buffer)
    buffer.watchers.append(collector)
    buffer.insert(
        InsertBatch([7, 8], {"a": np.ones(2)}, np.zeros(2, np.int64), np.ones(2, np.int64), [(b"x",), (b"y",)])
    )
    batch, _ = buffer.sample("a", SampleRequest(1, 1, scope="step-1")).result()
    buffer.take(batch)
    collector.not_written(collector.collect())
    delta = collector.collect()
    collector.written(delta)
    assert not collector.collect()
    keys, records = zip(*delta.items, strict=True)
    state = State(
        state_records={name: record for name, record in delta.state_records if record is not None},
        items=unpack_items(np.array(keys, dtype=np.uint64), records),
        known_keys=delta.known_keys,
    )
    again = ReplayBuffer(tables, time.monotonic)
    again.storage.put([7, 8], [(b"x",), (b"y",)])
    restore(again, state)
    assert again.tables["a"].scopes.given("step-1") == buffer.tables["a"].scopes.given("step-1") != set()
    assert again.tables["a"].counters == buffer.tables["a"].counters
    assert again.known_keys.order() == [7, 8]
    assert again.tables["a"].rng.random() == buffer.tables["a"].rng.random()
