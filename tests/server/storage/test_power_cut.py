"""A crash of the machine: the start comes back to a commit that was acknowledged, and to none before the last sync."""

import json
import os
import random
import subprocess
import sys

import lmdb
import pytest

from replay_client import ReplayClient
from replay_server import ReplayServer, TableConfig
from replay_server.storage import chunks
from replay_server.storage.data_dir import DamagedDirectory, why_not_openable
from replay_server.storage.lmdb_load import MAP_SIZE, Databases, NotWhole, load
from replay_server.storage.roots import SyncMode, roots_in
from tests.server.storage.power_cut import PAGE, record

SECONDS = os.environ.get("REPLAY_POWER_CUT_SECONDS", "15")
SEED = os.environ.get("REPLAY_POWER_CUT_SEED", "0")
TABLES = (TableConfig(name="pool"),)


def test_a_cut_at_any_moment_leaves_a_state_that_was_acknowledged_and_nothing_synced_is_lost(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "tests.server.storage.power_cut", str(tmp_path), SECONDS, SEED],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(result.stdout)
    assert found["broken"] == []
    assert {outcome.partition(":")[0] for outcome in found["outcomes"]} == {mode.name for mode in SyncMode}


def test_the_digest_notices_old_pages_that_fit_into_the_tree(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 8000)
    rng = random.Random(1)
    recording = record(tmp_path / "run", SyncMode.NEVER, 90, random.Random(3))
    versions: dict[int, list[bytes]] = {}
    disk, well_formed = bytearray(recording.start), 0
    (tmp_path / "old").mkdir()
    for moment, pages in enumerate(recording.writes):
        for at, page in pages.items():
            disk.extend(bytes(max(0, at - len(disk))))
            disk[at : at + PAGE] = page
            versions.setdefault(at, []).append(page)
        reused = [at for at in pages if at >= 2 * PAGE and len(versions[at]) > 1]
        for at in rng.sample(reused, min(len(reused), 5)):
            path = tmp_path / "old" / "data.mdb"
            path.write_bytes(disk[:at] + rng.choice(versions[at][-4:-1]) + disk[at + PAGE :])
            if why_not_openable(path):
                continue
            with lmdb.open(str(path.parent), map_size=MAP_SIZE, max_dbs=8, readonly=True, lock=False) as env:
                databases = Databases.of(env, create=False)
                try:
                    loaded = load(env, databases, path.parent)
                except NotWhole:
                    continue
                with env.begin() as txn:
                    tables = [list(txn.cursor(db)) for db in (databases.items, databases.pieces, databases.seen)]
                if tables != recording.states[recording.commits[moment]][:3]:
                    well_formed += 1
                    assert loaded.recorded != loaded.digest
    assert well_formed, "no old page fitted into the tree, so nothing was tested"


def insert_three(data_dir, **options):
    with ReplayServer(TABLES, port=0, data_dir=data_dir, **options) as server, ReplayClient(server.address) as client:
        for n in range(3):
            client.insert(bytes([n]) * 100, {"pool": 1.0})
            if n == 1 and options:
                client.checkpoint("two")


def items_after_a_start(data_dir):
    with ReplayServer(TABLES, port=0, data_dir=data_dir) as server, ReplayClient(server.address) as client:
        info = client.server_info()
        return info.items, info.fell_back


@pytest.mark.parametrize("at", [3, 60], ids=["in its checksum", "behind it"])
def test_a_damaged_item_is_left_out_and_the_starts_after_it_find_everything_whole(tmp_path, at):
    insert_three(tmp_path)
    with lmdb.open(str(tmp_path), map_size=MAP_SIZE, max_dbs=8, readonly=True, lock=False) as env:
        items = Databases.of(env, create=False).items
        with env.begin() as txn:
            _, record = next(iter(txn.cursor(items)))
    damaged = record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]
    path = tmp_path / "data.mdb"
    path.write_bytes(path.read_bytes().replace(record, damaged))
    with ReplayServer(TABLES, port=0, data_dir=tmp_path) as server, ReplayClient(server.address) as client:
        assert (client.server_info().items, client.server_info().damaged) == (2, 1)
        client.insert(b"another", {"pool": 1.0})
    assert items_after_a_start(tmp_path) == (3, "")


@pytest.mark.parametrize("fsync", ["always", 1.0, "never"])
def test_a_start_falls_back_says_so_and_keeps_the_damaged_file(tmp_path, fsync, caplog):
    insert_three(tmp_path, fsync=fsync)
    path = tmp_path / "data.mdb"
    whole = path.read_bytes()
    newest = roots_in(path)[0].txn
    damaged = bytearray(whole)
    damaged[newest % 2 * PAGE : newest % 2 * PAGE + 512] = bytes(512)  # a torn write of the last root
    path.write_bytes(damaged)
    items, fell_back = items_after_a_start(tmp_path)
    assert items == 3  # the server synced when it stopped
    assert f"fell back to commit {newest}" in fell_back
    assert fell_back in caplog.text
    (aside,) = tmp_path.glob("damaged-*.mdb")
    assert aside.name in fell_back
    assert aside.read_bytes() == damaged
    assert items_after_a_start(tmp_path) == (3, "")


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
