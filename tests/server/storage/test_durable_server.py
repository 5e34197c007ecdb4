"""A server with a data_dir, over gRPC: what a restart brings back, what a start refuses, and a full disk."""

import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import grpc
import lmdb
import numpy as np
import pytest

from replay_client import ReplayClient
from replay_client.errors import ReplayError, ServerUnavailableError, StorageError
from replay_client.testing import make_group, until
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import AdmissionConfig, ReplayServer, TableConfig
from replay_server.storage import records, state
from replay_server.storage.lmdb import LmdbStorage, UnusableDirectory
from tests.kit.faults import small_disk
from tests.kit.groups import keys_in
from tests.kit.processes import fails
from tests.kit.servers import serving

TABLES = (
    TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 100}, forward_to="pool"),
    TableConfig(name="pool", sampler="prioritized", remover="min_heap", max_size=1000),
)

OVER_BOTH = pytest.mark.usefixtures("transport")
"""Runs a test with all payloads in messages, and with all of them in rings."""


def write_many(client, payload):
    with client.writer(max_in_flight=16) as writer:
        for _ in range(400):
            writer.insert(payload, {"pool": 1.0})


def try_insert(client, payload):
    try:
        return client.insert(payload, {"pool": 1.0})
    except ReplayError:
        return None


def test_a_second_server_on_the_directory_is_refused(tmp_path):
    with serving(TABLES, data_dir=tmp_path), pytest.raises(UnusableDirectory, match="in use by another server"):
        ReplayServer(TABLES, port=0, data_dir=tmp_path).start()


def test_a_format_of_another_version_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("replay_server.storage.lmdb.FORMAT", 99)
        patch.setattr("replay_server.storage.lmdb.CHUNK_KEY", struct.Struct(">QI"))  # as format 3 had it
        with serving(TABLES, data_dir=tmp_path) as client:
            client.insert(b"x", {"pool": 1.0})
    with pytest.raises(UnusableDirectory, match=r"has format 99, .* `replay table export`") as refusal:
        ReplayServer(TABLES, port=0, data_dir=tmp_path).start()
    assert "damaged" not in str(refusal.value)


def test_a_directory_that_was_used_and_lost_its_file_is_refused(tmp_path):
    with serving(TABLES, data_dir=tmp_path) as client:
        client.insert(b"x", {"pool": 1.0})
    os.truncate(tmp_path / "data.mdb", 0)
    with pytest.raises(UnusableDirectory, match=r"data.mdb is gone or empty.*--restore latest"):
        ReplayServer(TABLES, port=0, data_dir=tmp_path).start()


def test_what_the_configuration_has_no_room_for_is_dropped_and_said(tmp_path, caplog):
    with serving(TABLES, data_dir=tmp_path) as client:
        both = [client.insert(bytes([n]), {"queue": 1.0, "pool": float(n)}) for n in range(6)]
        only = client.insert(b"x", {"queue": 1.0})
    smaller = (TableConfig(name="pool", remover="min_heap", max_size=4),)
    for _ in range(2):  # and stays dropped
        with serving(smaller, data_dir=tmp_path) as client:
            assert keys_in(client, "pool") == sorted(both[2:])
            assert client.get([only, *both[:2]]) == []
            assert client.server_info().items == 4
    assert "table 'queue' is not configured any more: 7 items dropped" in caplog.text
    assert "table 'pool': 2 items evicted, for its bounds are lower now" in caplog.text


@pytest.mark.parametrize("reboot", [False, True], ids=["a restart", "a boot with the clock set back"])
def test_permits_from_before_a_restart_expire_in_their_time(tmp_path, monkeypatch, reboot):
    admission = AdmissionConfig(fresh_groups_per_step=1, max_staleness=0, permit_ttl=2.0)
    with serving(TABLES, data_dir=tmp_path, admission=admission) as client:
        client.acquire_permits(1)
    if reboot:
        wall_offset = records.wall_offset
        monkeypatch.setattr(records, "boot_id", lambda: "the next boot")
        monkeypatch.setattr(records, "wall_offset", lambda clock: wall_offset(clock) - 3600)
    with serving(TABLES, data_dir=tmp_path, admission=admission) as client:
        client.acquire_permits(1, timeout=60.0)
        assert client.server_info().admission.expired >= 1  # 2, if two seconds have passed since


def test_a_server_knows_its_index_among_shards_again_and_grants_its_share(tmp_path):
    admission = AdmissionConfig(fresh_groups_per_step=8, max_staleness=1)

    def publish(client, version, **shard):
        with grpc.insecure_channel(client.address) as channel:
            ReplayStub(channel).SetPolicyVersion(pb.SetPolicyVersionRequest(version=version, **shard))

    with serving(TABLES, data_dir=tmp_path, admission=admission) as client:
        publish(client, 2, shard_index=pb.ShardIndex(index=1, shards=3))  # 3 of the 8 groups of a step
        client.acquire_permits(2)
        assert client.server_info().admission.capacity == 2 * 3 - 2
    with serving(TABLES, data_dir=tmp_path, admission=admission) as client:
        assert client.server_info().admission.capacity == 2 * 3 - 2
        publish(client, 3)
        assert client.server_info().admission.capacity == 3 * 3 - 2


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path, "24m") as disk:
        yield disk


def test_no_start_is_empty_after_one_that_had_no_room_for_its_checkpoint(disk):
    with serving(TABLES, data_dir=disk) as client:
        keys = [client.insert(os.urandom(200_000), {"pool": 1.0}) for _ in range(50)]
        client.create_checkpoint("whole")
    data = disk / "data.mdb"
    data.write_bytes(data.read_bytes()[:-4096])
    for _ in range(2):
        with pytest.raises(UnusableDirectory, match=r"cannot take the 10\d{6} bytes|No space left"):
            ReplayServer(TABLES, port=0, data_dir=disk).start()
    for aside in disk.glob("replaced-*.mdb"):
        aside.unlink()
    with serving(TABLES, data_dir=disk) as client:
        assert keys_in(client, "pool") == sorted(keys)


@OVER_BOTH
@pytest.mark.parametrize("reserve", [0, 64 << 20])
def test_a_full_disk_refuses_inserts_and_recovers_when_there_is_room(disk, monkeypatch, reserve):
    monkeypatch.setattr("replay_server.storage.lmdb.RESERVE", reserve)  # 0: the commits themselves hit the end
    payload = os.urandom(200_000)
    kept = []
    with serving(TABLES, data_dir=disk) as client:
        with pytest.raises(StorageError, match=r"data_dir .*bytes (are )?free|could not be written"):
            kept.extend(client.insert(payload, {"pool": 1.0}) for _ in range(200))
        assert len(kept) > 60
        assert keys_in(client, "pool") == sorted(kept)
        client.set_policy_version(5)  # all else goes on
        client.delete("pool", kept[:30])
        del kept[:30]
        while len(kept) < 30:
            kept.append(until(lambda: try_insert(client, payload)))
    with serving(TABLES, data_dir=disk) as client:
        assert keys_in(client, "pool") == sorted(kept)
        assert all(bytes(item.payload) == payload for item in client.get(kept))
        assert client.policy().version == 5


def test_a_full_disk_is_said_in_the_log_and_in_the_info_until_there_is_room(disk, caplog):
    payload, kept = os.urandom(200_000), []

    def said(level):
        return [record.message for record in caplog.records if record.levelname == level]

    with serving(TABLES, data_dir=disk) as client, caplog.at_level("INFO", logger="replay_server"):
        with pytest.raises(StorageError):
            kept.extend(client.insert(payload, {"pool": 1.0}) for _ in range(200))
        until(lambda: client.server_info().commit_error)
        for _ in range(3):
            with pytest.raises(StorageError):
                client.insert(payload, {"pool": 1.0})
        (line,) = said("ERROR")
        assert str(disk) in line
        assert "refused until" in line
        client.delete("pool", kept[:30])
        until(lambda: client.server_info().commit_error == "")
        assert len(said("WARNING")) == 1
        client.insert(payload, {"pool": 1.0})


@OVER_BOTH
def test_inserts_of_a_stream_that_could_not_be_written_are_refused_one_by_one(disk, monkeypatch):
    monkeypatch.setattr(
        "replay_server.storage.lmdb.LmdbStorage._free_bytes", lambda self: (1 << 40, 0)
    )  # it seems free
    payload = os.urandom(100_000)
    with serving(TABLES, data_dir=disk) as client:
        with pytest.raises(StorageError):
            write_many(client, payload)
        there = keys_in(client, "pool")
        assert client.server_info().tables["pool"].inserts == len(there)
    with serving(TABLES, data_dir=disk) as client:
        assert keys_in(client, "pool") == there


@OVER_BOTH
@pytest.mark.parametrize("second", ["another", "a retry"])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_insert_during_a_commit_that_fails_is_not_acknowledged_by_the_next_one(
    tmp_path, monkeypatch, second, streamed
):
    failures = [lmdb.DiskError("full")] * (2 if second == "another" else 1)  # one for each payload
    begun, go_on = threading.Event(), threading.Event()
    commit = LmdbStorage.commit

    def failing(self, *changes):
        _, payloads, *_ = changes
        if payloads.parts and failures:
            begun.set()
            assert go_on.wait(200)
            raise failures.pop()
        commit(self, *changes)

    def insert(client, key):
        if not streamed:
            client.insert(b"x", {"pool": 1.0}, key=key)
            return
        with client.writer() as writer:
            writer.insert(b"x", {"pool": 1.0}, key=key)

    monkeypatch.setattr(LmdbStorage, "commit", failing)
    with serving(TABLES, data_dir=tmp_path) as client, ThreadPoolExecutor() as pool:
        first = pool.submit(insert, client, 1)
        assert begun.wait(200)
        other = pool.submit(insert, client, 2 if second == "another" else 1)
        until(lambda: (table := client.server_info().tables["pool"]).inserts + table.duplicates == 2)
        go_on.set()
        for future in (first, other):
            with pytest.raises(StorageError, match="could not be written"):
                future.result(60)
        assert keys_in(client, "pool") == []
        until(lambda: succeeds(lambda: client.insert(b"x", {"pool": 1.0}, key=1)))
        assert keys_in(client, "pool") == [1]


@OVER_BOTH
def test_a_segment_of_an_item_whose_insert_could_not_be_written_is_refused_with_it(tmp_path, monkeypatch):
    failures, begun, go_on = [lmdb.DiskError("full")], threading.Event(), threading.Event()
    commit = LmdbStorage.commit

    def failing(self, *changes):
        if changes[1].parts and failures:
            begun.set()
            assert go_on.wait(200)
            raise failures.pop()
        commit(self, *changes)

    monkeypatch.setattr(LmdbStorage, "commit", failing)
    column = {"value": np.zeros(3)}
    with serving(TABLES, data_dir=tmp_path) as client, ThreadPoolExecutor() as pool:
        insert = pool.submit(client.insert, make_group(), {"pool": 1.0}, key=1)
        assert begun.wait(200)
        extend = pool.submit(client.extend, 1, column)
        until(lambda: client.server_info().tables["pool"].extensions == 1)
        go_on.set()
        for future in (insert, extend):
            with pytest.raises(StorageError, match="could not be written"):
                future.result(60)
        assert client.extend(1, column).missing
        client.insert(make_group(), {"pool": 1.0}, key=1)
        assert client.extend(1, column).added == ("value",)
    with serving(TABLES, data_dir=tmp_path) as client:
        assert client.get([1])[0].group.extras.keys() == {"value"}


def failing_while(broken: threading.Event, monkeypatch) -> None:
    """Commits fail while `broken` is set."""
    commit = LmdbStorage.commit

    def failing(self, *changes):
        if broken.is_set():
            raise lmdb.DiskError("No space left on device")
        commit(self, *changes)

    monkeypatch.setattr(LmdbStorage, "commit", failing)


def succeeds(change) -> bool:
    try:
        change()
    except ReplayError:
        return False
    return True


def test_while_commits_fail_each_change_ends_with_the_reason_and_is_made_once_if_it_is_repeated(tmp_path, monkeypatch):
    failing_while(broken := threading.Event(), monkeypatch)
    admission = AdmissionConfig(fresh_groups_per_step=9, max_staleness=0)
    with serving(TABLES, data_dir=tmp_path, admission=admission) as client:
        pool = [client.insert(make_group(), {"pool": 1.0}) for _ in range(4)]
        queue = [client.insert(b"x", {"queue": 1.0}) for _ in range(4)]
        (leased,) = client.sample("queue", 1, lease=600.0)
        permits = client.acquire_permits(3)
        changes = [
            lambda **wait: client.delete("pool", pool[:1], **wait),
            lambda **wait: client.update_priorities("pool", {pool[1]: 5.0}, **wait),
            lambda **wait: client.set_policy_version(1, **wait),
            lambda **wait: client.acquire_permits(2, **wait),
            lambda **wait: client.release_permits(permits, **wait),
            lambda **wait: client.acknowledge([leased], **wait),
            lambda **wait: client.consume("queue", queue[3:], **wait),
            lambda **wait: client.sample("pool", 1, **wait),
            lambda **wait: client.update_table("pool", max_size=500, **wait),
        ]
        broken.set()
        for change in changes:
            with pytest.raises(
                ServerUnavailableError, match=r"^data_dir .* cannot be written: No space left on device"
            ):
                change(timeout=0.5)
        more = [
            lambda: client.insert(b"x", {"pool": 1.0}, key=99),
            lambda: client.extend(pool[2], {"value": np.zeros(3)}),
        ]
        for change in more:
            with pytest.raises(StorageError, match="the last commit failed"):
                change()
        with grpc.insecure_channel(client.address) as channel, pytest.raises(grpc.RpcError) as error:
            list(ReplayStub(channel).Sample(pb.SampleRequest(table="queue", num_samples=2)))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        waiting = [key for key in queue[:3] if key != leased.info.key]
        assert keys_in(client, "queue") == sorted(waiting)  # a reader that was told nothing has taken nothing
        broken.clear()
        for change in (*changes, *more):
            change()
        assert client.server_info().commit_error == ""
    with serving(TABLES, data_dir=tmp_path, admission=admission) as client:
        info = client.server_info()
        assert keys_in(client, "pool") == sorted([*pool[1:], leased.info.key, queue[3], 99])
        assert keys_in(client, "queue") == sorted(waiting)
        assert info.policy.version == 1
        assert info.tables["pool"].extensions == 1
        assert info.admission.running == 2


def test_changes_of_very_many_items_that_could_not_be_written_are_written_with_the_next_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "ITEMS_PER_SLICE", 2)  # so that nine items are very many
    failing_while(broken := threading.Event(), monkeypatch)
    with serving(TABLES, data_dir=tmp_path) as client:
        keys = [client.insert(b"x", {"pool": 1.0}) for _ in range(9)]
        broken.set()
        with pytest.raises(ServerUnavailableError, match="cannot be written"):
            client.update_priorities("pool", dict.fromkeys(keys, 5.0), timeout=0.5)
        broken.clear()
        client.set_policy_version(1)
    with serving(TABLES, data_dir=tmp_path) as client:
        priorities = {item.key: item.priority for item in client.list_items("pool").items}
    assert priorities == dict.fromkeys(keys, 5.0)


@OVER_BOTH
def test_a_row_that_is_drawn_before_its_commit_fails_is_sent_again_and_is_there_once(tmp_path, monkeypatch):
    failing_while(broken := threading.Event(), monkeypatch)
    with serving(TABLES, data_dir=tmp_path) as client, ThreadPoolExecutor() as pool:
        drawn = pool.submit(client.sample, "queue", 1, lease=600.0)
        until(lambda: client.server_info().tables["queue"].sampling.count)
        broken.set()
        insert = pool.submit(client.insert, b"x", {"queue": 1.0}, key=1)
        drawn.result(60)
        until(lambda: client.server_info().commit_error)
        broken.clear()
        assert insert.result(60) == 1
        assert client.server_info().tables["queue"].inserts == 1


def test_a_start_that_cannot_write_ends_with_the_reason(tmp_path, monkeypatch):
    broken = threading.Event()
    broken.set()
    failing_while(broken, monkeypatch)
    with pytest.raises(UnusableDirectory, match="cannot be written: No space left on device; make room"):
        ReplayServer(TABLES, port=0, data_dir=tmp_path).start()


def test_the_first_start_on_a_full_disk_ends_with_one_line(disk):
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            pass
    config = disk.parent / "replay.toml"
    config.write_text(f'[server]\ndata_dir = "{disk}/data"\n[[tables]]\nname = "pool"\n')
    assert f"data_dir {disk}/data: " in fails("serve", "--config", str(config), "--listen", "127.0.0.1:0")


def test_a_segment_that_could_not_be_written_is_written_again_and_then_acknowledged(tmp_path, monkeypatch):
    failures, commit = [lmdb.DiskError("full")] * 3, LmdbStorage.commit

    def failing(self, *changes):
        if any(not part.is_new for part in changes[1].parts.values()) and failures:
            raise failures.pop()
        commit(self, *changes)

    with serving(TABLES, data_dir=tmp_path) as client:
        key = client.insert(make_group(), {"pool": 1.0})
        monkeypatch.setattr(LmdbStorage, "commit", failing)
        assert client.extend(key, {"value": np.arange(3)}).added == ("value",)
        assert failures == []
        assert keys_in(client, "pool") == [key]
    with serving(TABLES, data_dir=tmp_path) as client:
        assert client.get([key])[0].group.extras["value"].tolist() == [0, 1, 2]


def test_a_disk_without_room_refuses_a_segment(disk):
    with serving(TABLES, data_dir=disk) as client:
        key = client.insert(make_group(), {"pool": 1.0})
        with pytest.raises(StorageError, match="has no room for"):
            client.extend(key, {"large": np.zeros(40_000_000, np.uint8)})
        assert client.extend(key, {"small": np.zeros(3)}).added == ("small",)


@pytest.mark.parametrize("how", ["removed", "moved away", "replaced", "with its folder"])
def test_an_insert_into_a_file_that_has_no_name_any_more_is_not_acknowledged(tmp_path, how):
    data = tmp_path / "data"
    away = tmp_path / "away.mdb"
    tables = [TableConfig(name="plain")]
    # A server without its folder ends with an error, because it cannot sync the folder.
    end = pytest.raises(FileNotFoundError, match="data") if how == "with its folder" else nullcontext()
    with (
        end,
        ReplayServer(tables, 0, data_dir=data) as server,
        ReplayClient(server.address, timeout=0.5) as client,
    ):
        kept = client.insert(b"before", {"plain": 1.0})
        if how == "with its folder":
            data.rename(tmp_path / "elsewhere")
        elif how == "removed":
            (data / "data.mdb").unlink()
        else:
            (data / "data.mdb").rename(away)
        if how == "replaced":
            (data / "data.mdb").write_bytes(away.read_bytes())
        with pytest.raises(StorageError):
            client.insert(b"lost", {"plain": 1.0})
        says = "data.mdb was removed or replaced while the server runs: put that file back, or stop the server"
        assert says in client.server_info().commit_error
        with pytest.raises(StorageError, match=says):
            client.insert(b"lost", {"plain": 1.0})
        assert client.server_info().items == 1
        if how == "moved away":  # and put back
            away.rename(data / "data.mdb")
            until(lambda: client.server_info().commit_error == "")
            later = client.insert(b"after", {"plain": 1.0})
    if how == "moved away":
        with ReplayServer(tables, 0, data_dir=data) as server, ReplayClient(server.address) as client:
            assert [bytes(item.payload) for item in client.get([kept, later])] == [b"before", b"after"]
