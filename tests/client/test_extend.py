"""Columns that arrive later: `extend`, rows that wait for them, and what goes wrong, against real servers."""

import re
from pathlib import Path

import numpy as np
import pytest

from replay_client import ExtendResult, ReplayClient
from replay_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LeaseEndedError,
    PayloadTooLargeError,
    ReplayError,
    ServerUnavailableError,
    TableFullError,
)
from replay_client.testing import make_group, until
from replay_protos import replay_pb2 as pb
from replay_server import Config, ReplayServer, ServerConfig, TableConfig
from tests.kit.clocks import in_a_thread
from tests.kit.groups import keys_of
from tests.server.rpc.calls import connection

QUEUE = TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 6}, requires=["teacher_logprobs"])
TABLES = [
    TableConfig(name="plain", sampler="fifo"),
    QUEUE,
    TableConfig(name="teachers", rate_limiter={"type": "queue", "max_size": 100}),
    TableConfig(name="enough", sampler="fifo", rate_limiter={"type": "min_size", "min_size": 3}, requires=["value"]),
    TableConfig(name="first", sampler="fifo", max_times_sampled=1, forward_to="later"),
    TableConfig(name="later", sampler="fifo", requires=["teacher_logprobs"]),
    TableConfig(name="small", sampler="fifo", max_bytes=3000),
    TableConfig(name="filled", sampler="fifo", max_bytes=6000, when_full="block"),
]
MOST = 1 << 24


def server_with(data_dir: Path | None = None, *, max_bytes: int | None = None, largest: int = MOST, **more):
    section = ServerConfig(listen="127.0.0.1:0", data_dir=data_dir, max_bytes=max_bytes, max_payload_bytes=largest)
    return ReplayServer.from_config(Config(server=section, tables=tuple(TABLES), **more))


LOGPROBS = {"teacher_logprobs": np.arange(6, dtype=np.float32)}
TOKEN = {"teacher_logprobs": "token"}


@pytest.fixture(params=["memory", "disk"])
def server(request, tmp_path):
    with server_with(tmp_path / "data" if request.param == "disk" else None) as server:
        yield server


@pytest.fixture
def client(server):
    with ReplayClient(server.address, timeout=20.0) as client:
        yield client


@pytest.fixture
def memory_client():
    with server_with() as server, ReplayClient(server.address, timeout=20.0) as client:
        yield client


@pytest.mark.usefixtures("transport")
def test_columns_that_arrive_later_come_with_the_group(client):
    group = make_group(extras={"ref": np.ones(6, np.float32)}, axes={"ref": "token"}, prompt_id="p")
    key = client.insert(group, {"plain": 1.0}, tags={"environment": "math"})
    before = client.server_info().bytes
    assert client.extend(key, LOGPROBS, axes=TOKEN) == ExtendResult(added=("teacher_logprobs",))
    values = {"value": np.array([1.0, 2.0, 3.0]), "images": np.zeros((2, 4), np.uint8)}
    assert client.extend(key, values).added == ("value", "images")
    (sample,), (stored,), (listed,) = client.sample("plain", 1), client.get([key]), client.list_items("plain")
    for found in (sample.group, stored.group):
        assert found.extras.keys() == {"ref", "teacher_logprobs", "value", "images"}
        np.testing.assert_array_equal(found.extras["teacher_logprobs"], LOGPROBS["teacher_logprobs"])
        np.testing.assert_array_equal(found.extras["value"], values["value"])
        assert found.axes == {"ref": "token"} | TOKEN
        assert found.prompt_id == "p"
    assert stored.labels.columns == listed.labels.columns == frozenset(sample.group.extras)
    assert stored.labels.tags == {"environment": "math"}
    info = client.server_info()
    assert len(stored.payload) == listed.nbytes > before
    assert info.bytes == info.tables["plain"].bytes == listed.nbytes + stored.labels.nbytes
    assert info.tables["plain"].extensions == 2


@pytest.mark.usefixtures("transport")
def test_a_large_column_comes_in_many_messages(client):
    keys = [client.insert(make_group(), {"plain": 1.0}) for _ in range(2)]
    routing = np.random.default_rng(0).integers(0, 255, size=(6, 1_500_000), dtype=np.uint8)
    client.extend(keys[0], {"routing": routing})
    first, second = client.sample("plain", 2)
    np.testing.assert_array_equal(first.group.extras["routing"], routing)
    assert second.group.extras == {}


def test_a_column_that_is_there_stays_as_it_was(client):
    key = client.insert(make_group(extras={"ref": np.zeros(2)}), {"plain": 1.0})
    assert client.extend(key, {"ref": np.ones(2)}) == ExtendResult(present=("ref",))
    assert client.extend(key, {"value": np.ones(3)}).added == ("value",)
    both = {"value": np.zeros(3), "other": np.zeros(1), "ref": np.ones(2)}
    assert client.extend(key, both, axes={"value": "rollout"}) == ExtendResult(("other",), ("ref", "value"))
    (sample,) = client.sample("plain", 1)
    np.testing.assert_array_equal(sample.group.extras["ref"], np.zeros(2))
    np.testing.assert_array_equal(sample.group.extras["value"], np.ones(3))
    assert sample.group.axes == {}


@pytest.mark.usefixtures("transport")
def test_a_batch_that_was_drawn_ahead_has_the_bytes_of_its_draw(client):
    keys = [client.insert(make_group(), {"plain": 1.0}) for _ in range(3)]
    with client.sampler("plain", batch_size=3, prefetch=1) as sampler:
        for number in range(20):
            groups = [sample.group for sample in next(sampler)]
            assert all(len(group.extras) <= number for group in groups)
            client.extend(keys[number % 3], {f"column{number}": np.full(1000, number)})
    groups = [sample.group for sample in client.sample("plain", 3)]
    assert sorted(name for group in groups for name in group.extras) == sorted(f"column{n}" for n in range(20))


BAD_COLUMNS = {
    "no column": ({}, {}, "extras is empty"),
    "no arrays by name": ([1], None, "extras must be arrays by name, not [1]"),
    "a dtype that is no number": ({"a": np.array(["x"])}, {}, "extras['a'] has dtype <U1"),
    "an axis that there is not": ({"a": np.zeros(2)}, {"a": "turn"}, "axes['a'] is 'turn', not one of"),
    "an axis of nothing": ({"a": np.zeros(2)}, {"b": "token"}, "axes names 'b', which extras does not have"),
    "axes that disagree": (
        {"x": np.zeros(3), "y": np.zeros(4)},
        {"x": "token", "y": "token"},
        "extras['y'] has the shape (4,)",
    ),
    "no offset": ({"x": np.zeros(3), "x/offsets": np.zeros(0, int)}, {"x": "ragged:token"}, "the shape (1,)"),
    "a name without letters": ({"": np.zeros(2)}, {}, "column '' has a name of 0 bytes: 1 to 256"),
    "a long name": ({"x" * 257: np.zeros(2)}, {}, "has a name of 257 bytes: 1 to 256"),
}


@pytest.mark.parametrize(("extras", "axes", "message"), BAD_COLUMNS.values(), ids=BAD_COLUMNS)
def test_columns_that_no_group_can_have_are_refused_in_one_sentence(memory_client, extras, axes, message):
    key = memory_client.insert(make_group(), {"plain": 1.0})
    with pytest.raises(InvalidRequestError, match=re.escape(message)) as refusal:
        memory_client.extend(key, extras, axes=axes)
    assert "\n" not in str(refusal.value)
    assert memory_client.extend(key, LOGPROBS).added == ("teacher_logprobs",)


GROWTHS = {
    "the largest item of the server": ("plain", PayloadTooLargeError, "this server takes items of at most 8192 bytes"),
    "the largest item of a table": ("small", PayloadTooLargeError, "table 'small' holds at most 3000 bytes (max_bytes"),
    "the bytes of a table": ("filled", TableFullError, "table 'filled' is full: "),
    "the bytes of the server": ("teachers", TableFullError, "the server is full: "),
}


@pytest.mark.parametrize(("table", "error", "message"), GROWTHS.values(), ids=GROWTHS)
def test_growth_beyond_a_bound_is_refused_and_changes_nothing(table, error, message):
    with (
        server_with(max_bytes=12_000, largest=8192) as server,
        ReplayClient(server.address) as client,
    ):
        key = client.insert(make_group(extras={"a": np.zeros(100)}), {table: 1.0})
        if table in ("filled", "teachers"):
            for _ in range({"filled": 1, "teachers": 4}[table]):
                client.insert(make_group(extras={"a": np.zeros(200)}), {table: 1.0})
        before = client.server_info()
        nbytes = {"plain": 8000, "small": 2500, "filled": 2500, "teachers": 2500}[table]
        with pytest.raises(error, match=re.escape(message)) as refusal:
            client.extend(key, {"large": np.zeros(nbytes, np.uint8)})
        assert str(key) in str(refusal.value)
        after = client.server_info()
        assert after.bytes == before.bytes
        assert after.tables[table].bytes == before.tables[table].bytes
        assert client.get([key])[0].group.extras.keys() == {"a"}
        assert client.extend(key, {"little": np.zeros(1)}).added == ("little",)


# ------------------------------------------------------------------------------------------------ rows that wait


def test_a_row_waits_for_its_column_and_then_serves_who_waits_for_it_in_its_place(client):
    keys = [client.insert(make_group(), {"queue": 1.0}) for _ in range(4)]
    ready = client.insert(make_group(extras=LOGPROBS), {"queue": 1.0})
    info = client.server_info().tables["queue"]
    assert info.size == 5
    assert info.incomplete_items == 4
    assert {each.name: each.items for each in info.missing_columns} == {"teacher_logprobs": 4}
    page = client.list_items("queue", descending=True)
    assert [item.missing_columns for item in page] == [("teacher_logprobs",)] * 4 + [()]
    with pytest.raises(
        DeadlineExceededError, match=r"1 of 2 samples available \(size 5, 4 wait for teacher_logprobs\)"
    ):
        client.sample("queue", 2, timeout=0.1)
    drawn = in_a_thread(client.sample, "queue", 3, timeout=20.0)
    until(lambda: client.server_info().tables["queue"].sampling.count)
    for key in (keys[2], keys[0]):
        client.extend(key, LOGPROBS)
    assert keys_of(drawn.result()) == [keys[0], keys[2], ready]
    assert client.server_info().tables["queue"].incomplete_items == 2


def test_rows_that_wait_fill_a_queue_so_that_generators_stop(client):
    keys = [client.insert(make_group(), {"queue": 1.0}) for _ in range(6)]
    with pytest.raises(DeadlineExceededError, match=r"it is full, 6 of 6 items .*; 6 wait for teacher_logprobs$"):
        client.insert(make_group(), {"queue": 1.0}, timeout=0.1)
    client.extend(keys[3], LOGPROBS)
    assert keys_of(client.sample("queue", 1)) == [keys[3]]
    client.insert(make_group(), {"queue": 1.0})


def test_what_a_table_requires_can_change_while_it_runs(client):
    lacking = client.insert(make_group(), {"plain": 1.0})
    whole = client.insert(make_group(extras={"value": np.zeros(3)}), {"plain": 1.0})
    held = client.sample("plain", 2, lease=60.0)
    assert client.update_table("plain", requires=["value"]).incomplete_items == 1
    client.acknowledge(held, requeue=True)
    assert keys_of(client.sample("plain", 1)) == [whole]
    changed = client.update_table("plain", requires=["value", "other"])
    assert changed.incomplete_items == 2
    assert {each.name: each.items for each in changed.missing_columns} == {"value": 1, "other": 2}
    client.extend(lacking, {"other": np.zeros(1)})
    assert client.list_items("plain", descending=True).items[0].missing_columns == ("value",)
    client.update_table("plain", requires=[])
    assert keys_of(client.sample("plain", 2)) == [lacking, whole]
    with pytest.raises(InvalidRequestError, match="requires names one twice: a, a"):
        client.update_table("plain", requires=["a", "a"])


# ------------------------------------------------------------------------------------------------ the wire

WIRE = {
    "a target": (
        {"targets": [pb.InsertTarget(table="plain")], "permits": 3},
        "a message that extends items has targets, permits, which only new items have",
    ),
    "no names": ({"columns": []}, "names no column"),
    "too many numbers": ({"requests": [1, 2]}, "requests has 2 entries for 1 segment"),
    "too few bytes": ({"payload_sizes": [9]}, "bytes are missing|shorter than payload_sizes"),
}


@pytest.mark.parametrize(("fields", "message"), WIRE.values(), ids=WIRE)
def test_a_message_that_misdescribes_a_segment_changes_nothing(memory_client, fields, message):
    client = memory_client
    key = client.insert(make_group(), {"plain": 1.0})
    before = client.get([key])[0].payload
    good = {
        "keys": [key],
        "extend": True,
        "columns": [pb.Columns(names=["x"])],
        "payload_sizes": [3],
        "payloads": b"abc",
    }
    with connection(client.address) as stub:
        try:
            answer = stub.Insert(pb.InsertRequest(**good | fields))
            said = answer.errors[0].message
        except Exception as error:
            said = error.details()
        assert re.search(message, said)
        assert client.get([key])[0].payload == before
        assert not stub.Insert(pb.InsertRequest(**good)).unchanged
    assert client.get([key])[0].labels.columns == {"x"}


def test_a_server_that_drains_takes_segments_of_the_items_that_it_has_and_what_closes_them(server):
    with ReplayClient(server.address) as client:
        key = client.insert(make_group(), {"plain": 1.0})
        drawn = client.sample("plain", 1, lease=60.0)
        server.draining = True
        with pytest.raises(ReplayError, match="is being emptied"):
            client.insert(make_group(), {"plain": 1.0})
        assert client.extend(key, LOGPROBS).added
        client.insert(make_group(), {"plain": 1.0}, closes=drawn)


# ------------------------------------------------------------------------------------------------ shards


@pytest.fixture
def shards(tmp_path):
    with server_with(tmp_path / "a") as first, server_with(tmp_path / "b") as second:
        yield [first, second]


def test_a_reader_whose_lease_has_ended_adds_nothing_beside_the_next_one(client):
    key = client.insert(make_group(), {"plain": 1.0})
    (first,) = client.sample("plain", lease=20.0)
    assert client.extend(key, {"one": np.ones(1)}, axes={"one": "group"}, held=[first]).added == ("one",)
    client.acknowledge([first], requeue=True)
    (second,) = client.sample("plain", lease=20.0)
    with pytest.raises(LeaseEndedError, match=r"the batch .* stands on has gone back to its table"):
        client.extend(key, {"two": np.ones(1)}, axes={"two": "group"}, held=[first])
    assert client.extend(key, {"two": np.ones(1)}, axes={"two": "group"}, held=[second]).added == ("two",)
    assert client.extend(1, {"two": np.ones(1)}, axes={"two": "group"}, held=[first]).missing


def test_a_segment_goes_to_the_shard_that_has_its_item(shards):
    names = [f"{name}={server.address}" for name, server in zip("ab", shards, strict=True)]
    with ReplayClient(names) as client:
        keys = [client.insert(make_group(), {"queue": 1.0}) for _ in range(6)]
        for key in keys[:4]:
            assert client.extend(key, LOGPROBS).added == ("teacher_logprobs",)
        assert client.extend(keys[0], LOGPROBS).present == ("teacher_logprobs",)
        assert client.extend(999, LOGPROBS) == ExtendResult(missing=True)
        info = client.server_info().tables["queue"]
        assert info.size == 6
        assert info.incomplete_items == 2
        assert [each.items for each in info.missing_columns] == [2]
        assert sorted(keys_of(client.sample("queue", 4))) == sorted(keys[:4])


def test_a_segment_finds_an_item_on_another_shard_than_its_key_says(shards):
    names = [f"{name}={server.address}" for name, server in zip("ab", shards, strict=True)]
    for server in shards:
        with ReplayClient(server.address) as direct:
            keys = [direct.insert(make_group(), {"plain": 1.0}) for _ in range(4)]
        with ReplayClient(names) as client:
            assert all(client.extend(key, LOGPROBS).added for key in keys)


def test_an_item_is_not_called_missing_while_a_shard_is_away(shards):
    names = [f"{name}={server.address}" for name, server in zip("ab", shards, strict=True)]
    with ReplayClient(names) as client:
        client.server_info()
        shards[1].stop()
        with pytest.raises(ServerUnavailableError, match="no shard that can be reached has item 5, and b cannot be"):
            client.extend(5, LOGPROBS, timeout=1.0)


def test_columns_that_do_not_fit_the_sample_are_refused_before_anything_is_sent(memory_client):
    client = memory_client
    key = client.insert(make_group(extras={"ref": np.ones(6, np.float32)}, axes={"ref": "token"}), {"plain": 1.0})
    (sample,), (stored,) = client.sample("plain", 1), client.get([key])
    for item in (sample, stored):
        with pytest.raises(
            InvalidRequestError, match=r"'value'\] has the shape \(5,\), and its axis 'token' needs 6 rows"
        ):
            client.extend(item, {"value": np.zeros(5)}, axes={"value": "token"})
        with pytest.raises(InvalidRequestError, match="axes names 'other', which extras does not have"):
            client.extend(item, {"value": np.zeros(6)}, axes={"other": "token"})
    assert client.list_items("plain").items[0].labels.columns == {"ref"}
    # What the group has already stays, so it need not fit.
    columns = {"ref": np.zeros(3), "value": np.zeros(6)}
    result = client.extend(sample, columns, axes={"ref": "rollout", "value": "token"})
    assert result == ExtendResult(added=("value",), present=("ref",))
    assert client.extend(stored, {"late": np.zeros(2)}).added == ("late",)
    assert client.get([key])[0].group.axes == {"ref": "token", "value": "token"}


def test_a_sample_that_is_no_group_gets_no_columns(memory_client):
    memory_client.insert(b"bytes of my own", {"plain": 1.0})
    with pytest.raises(InvalidRequestError, match="the item is no group that columns could join: not a rollout group"):
        memory_client.extend(memory_client.sample("plain", 1)[0], LOGPROBS)


def test_axes_that_are_not_by_name_are_refused(memory_client):
    with pytest.raises(InvalidRequestError, match=r"axes must be by name, such as .*, not 'token'"):
        memory_client.extend(1, LOGPROBS, axes="token")
