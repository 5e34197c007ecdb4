"""What a ChangeCollector makes of changes, where writing them fails."""

import time

from replay_server.storage.records import State, pack_items, unpack_items
from replay_server.storage.state import ChangeCollector, restore
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.config import AdmissionConfig, TableConfig
from replay_server.tables.extensions.admission import Admission
from replay_server.tables.table import SampleRequest
from tests.kit.tables import replay_buffer, rows_of


def test_what_could_not_be_written_comes_again():
    tables = [TableConfig(name="a")]
    buffer = replay_buffer(tables, time.monotonic)
    collector = ChangeCollector(buffer)
    buffer.watchers.append(collector)
    buffer.insert(rows_of([7, 8], {"a": 1.0}))
    batch, _ = buffer.sample("a", SampleRequest(1, 1, scope="step-1")).result()
    buffer.acknowledge(batch)
    collector.not_written(collector.collect())
    delta = collector.collect()
    collector.written(delta)
    assert not collector.collect()
    state = State({name: record for name, record in delta.named_records().items() if record is not None}, delta.items)
    again = replay_buffer(tables, time.monotonic)
    again.storage.put([7, 8], [(b"x",)] * 2)
    restore(again, state)
    assert again.tables["a"].scopes.keys_under("step-1") == buffer.tables["a"].scopes.keys_under("step-1") != set()
    assert again.tables["a"].counters == buffer.tables["a"].counters
    assert list(again.known_keys) == [7, 8]
    assert again.tables["a"].rng.random() == buffer.tables["a"].rng.random()


def test_scopes_of_one_record_of_changes_come_back_in_the_order_of_their_use():
    tables = [TableConfig(name="a"), TableConfig(name="b")]
    buffer = replay_buffer(tables, time.monotonic)
    buffer.insert(rows_of(range(1, 31), {"a": 1.0, "b": 1.0}))
    for number in range(30):
        for table in buffer.tables:
            buffer.sample(table, SampleRequest(1, 1, scope=f"step-{number * 7 % 30}"))
    delta = ChangeCollector(buffer).collect()  # as a checkpoint of a server in memory: all scopes are new to it
    state = State({name: record for name, record in delta.named_records().items() if record is not None})
    again = replay_buffer(tables, time.monotonic)
    restore(again, state)
    for name, table in buffer.tables.items():
        assert len(list(table.scopes)) == 30
        assert list(again.tables[name].scopes) == list(table.scopes)


def test_what_a_restart_finds_damaged_gives_its_place_in_a_queue_back():
    tables = [TableConfig(name="a", rate_limiter={"type": "queue", "max_size": 2})]
    buffer = replay_buffer(tables, time.monotonic)
    collector = ChangeCollector(buffer)
    buffer.watchers.append(collector)
    buffer.insert(rows_of([7, 8], {"a": 1.0}))
    delta = collector.collect()
    second = unpack_items([8], [dict(pack_items(delta.items))[8]])
    state = State(delta.named_records(), second)
    again = replay_buffer(tables, time.monotonic)
    restore(again, state)
    assert [again.insert(rows_of([key], {"a": 1.0}))[0] for key in (9, 10)] == [1, 0]


def restored(state: State, collector: ChangeCollector, payloads: list[int], *, admission: bool) -> ReplayBuffer:
    """A server that starts with what `collector` has recorded after `state`, which becomes that of the moment."""
    delta = collector.collect()
    named = {name: record for name, record in (state.state_records | delta.named_records()).items() if record}
    state.state_records = named
    state.items = delta.items if len(delta.items) else state.items
    state.__dict__.pop("values", None)  # they are those of the records before
    groups = AdmissionConfig(fresh_groups_per_step=2, max_staleness=0) if admission else None
    buffer = replay_buffer([TableConfig(name="a")], time.monotonic, admission=groups)
    buffer.storage.put(payloads, [(b"x",)] * len(payloads))
    restore(buffer, state)
    return buffer


def test_groups_accepted_before_a_time_without_admission_are_not_counted_below_zero():
    admission = AdmissionConfig(fresh_groups_per_step=2, max_staleness=0)
    buffer = replay_buffer([TableConfig(name="a")], time.monotonic, admission=admission)
    collector = ChangeCollector(buffer)
    buffer.watchers.append(collector)
    grant = Admission.of(buffer).acquire(1, 0.0).result()
    buffer.insert(rows_of([7], {"a": 1.0}, permits=grant.id))
    state = State()
    without = restored(state, collector, [7], admission=False)
    again = restored(state, ChangeCollector(without, state), [7], admission=True)
    again.check()
    again.delete("a", [7])
    assert Admission.of(again).accepted == 0
