"""A crash of the machine: a file that was synced has all commits, and another one is not trusted."""

import json
import os
import subprocess
import sys

import lmdb
import pytest

from replay_client import ReplayClient
from replay_server import ReplayServer, TableConfig
from replay_server.storage.data_dir import DamagedDirectory
from replay_server.storage.lmdb import MAP_SIZE
from replay_server.storage.records import boot_id
from tests.server.storage.power_cut import MODES, PAGE

SECONDS = os.environ.get("REPLAY_POWER_CUT_SECONDS", "15")
SEED = os.environ.get("REPLAY_POWER_CUT_SEED", "0")
TABLES = (TableConfig(name="pool"),)


@pytest.mark.long
def test_a_cut_at_any_moment_leaves_a_state_that_was_acknowledged_and_nothing_synced_is_lost(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "tests.server.storage.power_cut", str(tmp_path), SECONDS, SEED],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(result.stdout)
    assert found["broken"] == []
    assert {outcome.partition(":")[0] for outcome in found["outcomes"]} == set(MODES)


def insert_three(data_dir, **options):
    with ReplayServer(TABLES, port=0, data_dir=data_dir, **options) as server, ReplayClient(server.address) as client:
        for n in range(3):
            client.insert(bytes([n]) * 100, {"pool": 1.0})
            if n == 1 and options:
                client.create_checkpoint("two")


def items_after_a_start(data_dir, **options):
    with ReplayServer(TABLES, port=0, data_dir=data_dir, **options) as server, ReplayClient(server.address) as client:
        info = client.server_info()
        return info.items, info.fell_back


@pytest.mark.parametrize("at", [3, 60], ids=["in its checksum", "behind it"])
def test_a_damaged_item_is_left_out_and_the_starts_after_it_find_everything_whole(tmp_path, at):
    insert_three(tmp_path)
    with lmdb.open(str(tmp_path), map_size=MAP_SIZE, max_dbs=8, readonly=True, lock=False) as env:
        items = env.open_db(b"items", create=False)
        with env.begin() as txn:
            _, record = next(iter(txn.cursor(items)))
    damaged = record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]
    path = tmp_path / "data.mdb"
    path.write_bytes(path.read_bytes().replace(record, damaged))
    with ReplayServer(TABLES, port=0, data_dir=tmp_path) as server, ReplayClient(server.address) as client:
        assert client.server_info().items == 2
        assert client.server_info().damaged == 1
        client.insert(b"another", {"pool": 1.0})
    assert items_after_a_start(tmp_path) == (3, "")


@pytest.mark.parametrize("last", ["never", "always"])
def test_a_directory_whose_last_server_stopped_in_good_order_is_whole_after_a_reboot(tmp_path, monkeypatch, last):
    insert_three(tmp_path, fsync="never")
    assert items_after_a_start(tmp_path, fsync=last) == (3, "")
    monkeypatch.setattr("replay_server.storage.lmdb.boot_id", lambda: "the next boot")
    assert items_after_a_start(tmp_path) == (3, "")


def test_a_directory_that_nobody_synced_is_refused_after_a_crash_of_the_machine(tmp_path, monkeypatch):
    insert_three(tmp_path, fsync="never")
    (tmp_path / "unsynced").write_text(boot_id())  # as a killed server leaves it
    assert items_after_a_start(tmp_path, fsync="never") == (3, "")
    (tmp_path / "unsynced").write_text(boot_id())
    monkeypatch.setattr("replay_server.storage.lmdb.boot_id", lambda: "the next boot")
    items, fell_back = items_after_a_start(tmp_path)
    assert items == 2
    assert 'the machine stopped while a server with fsync = "never" wrote' in fell_back
    assert items_after_a_start(tmp_path) == (2, "")


def test_a_damaged_root_is_noticed(tmp_path):
    insert_three(tmp_path)
    path = tmp_path / "data.mdb"
    whole = path.read_bytes()
    newest = max(int.from_bytes(whole[at + 144 : at + 152], "little") for at in (0, PAGE))
    damaged = bytearray(whole)
    damaged[newest % 2 * PAGE : newest % 2 * PAGE + 512] = bytes(512)
    path.write_bytes(damaged)
    with pytest.raises(DamagedDirectory, match="--restore latest"):
        items_after_a_start(tmp_path)


@pytest.mark.parametrize("at", [44, 92], ids=["of free pages", "of databases"])
def test_a_tree_with_other_flags_is_noticed(tmp_path, at):
    """Each of its pages is whole, and LMDB would end the process."""
    insert_three(tmp_path)
    path = tmp_path / "data.mdb"
    damaged = bytearray(path.read_bytes())
    for root in (0, PAGE):
        damaged[root + at] ^= 4  # MDB_DUPSORT
    path.write_bytes(damaged)
    with pytest.raises(DamagedDirectory, match="unknown flags"):
        items_after_a_start(tmp_path)


def test_the_last_resort_is_a_checkpoint(tmp_path):
    insert_three(tmp_path, fsync="never")
    os.truncate(tmp_path / "data.mdb", 3 * PAGE)
    items, fell_back = items_after_a_start(tmp_path)
    assert items == 2
    assert "fell back to checkpoint two" in fell_back
    (aside,) = tmp_path.glob("replaced-*.mdb")
    assert aside.stat().st_size == 3 * PAGE
    assert items_after_a_start(tmp_path) == (2, "")


def test_without_a_whole_state_the_start_is_refused_and_names_the_remedy(tmp_path):
    insert_three(tmp_path)
    os.truncate(tmp_path / "data.mdb", 3 * PAGE)
    with pytest.raises(DamagedDirectory, match="--restore latest"):
        items_after_a_start(tmp_path)
    assert (tmp_path / "data.mdb").stat().st_size == 3 * PAGE
