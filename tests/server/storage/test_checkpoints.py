"""Checkpoints: written while a server goes on, listed, verified, kept, and restored from."""

import itertools
import os
import random
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from replay_client import ReplayClient
from replay_client.errors import InvalidRequestError, ReplayError
from replay_client.testing import make_group, until
from replay_server import AdmissionConfig, CheckpointsConfig, ReplayServer, TableConfig
from replay_server.rpc.limits import OpenCalls
from replay_server.storage import checkpointer, checkpoints, state
from replay_server.storage.checkpoints import CheckpointDirectory, DamagedCheckpoint, verified
from tests.kit.clocks import in_a_thread
from tests.kit.faults import small_disk
from tests.kit.groups import keys_in
from tests.kit.ledger import payload_of
from tests.kit.servers import serving

TABLES = (
    TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 1000}, forward_to="pool"),
    TableConfig(name="pool", sampler="prioritized", remover="min_heap", max_size=1000),
)


def serving_in(tmp_path, *, durable=False, restore=None, replace=False, tables=TABLES, **settings):
    """A client of a server with checkpoints. `settings`: of the section [checkpoints]."""
    return serving(
        tables,
        restore=restore,
        replace=replace,
        data_dir=tmp_path / "data" if durable else None,
        checkpoints=CheckpointsConfig(dir=tmp_path / "checkpoints", **settings),
        admission=AdmissionConfig(table=tables[0].name, fresh_groups_per_step=100, max_staleness=5),
    )


def fill(client, n=40):
    keys = [client.insert(payload_of(key), {"queue": 1.0, "pool": float(key)}, key=key) for key in range(1, n + 1)]
    client.set_policy_version(4, weights="step-4")
    client.sample("queue", 10)
    client.acquire_permits(3)
    return keys


def facts(client):
    info = client.server_info()
    tables = {
        name: (table.size, table.inserts, table.samples, table.consumed, table.forwarded, table.bytes)
        for name, table in info.tables.items()
    }
    return tables, info.policy.version, info.policy.weights, info.admission.running, info.items, info.bytes


@pytest.mark.parametrize("durable", [False, True])
def test_a_restored_server_gives_no_item_twice_under_a_scope(tmp_path, durable):
    with serving_in(tmp_path, durable=durable) as client:
        fill(client, 20)
        drawn = {sample.info.key for sample in client.sample("pool", 15, scope="step-4")}
        client.create_checkpoint("here")
    with serving_in(tmp_path, restore="here") as client:
        left = {sample.info.key for sample in client.sample("pool", 5, scope="step-4")}
        assert drawn.isdisjoint(left)


@pytest.mark.parametrize("restored_durable", [False, True])
@pytest.mark.parametrize("durable", [False, True])
def test_a_checkpoint_restores_everything_from_and_into_either_storage(tmp_path, durable, restored_durable):
    with serving_in(tmp_path, durable=durable) as client:
        keys = fill(client)
        assert client.create_checkpoint("here") == "here"
        before, queue = facts(client), keys_in(client, "queue")
        client.delete("pool", keys[:5])  # is not part of it
    aside = tmp_path / "elsewhere"
    aside.mkdir()
    (tmp_path / "checkpoints").rename(aside / "checkpoints")
    for restore in ("here", None) if restored_durable else ("here",):
        with serving_in(aside, durable=restored_durable, restore=restore) as client:
            assert facts(client) == before
            assert keys_in(client, "queue") == queue
            assert keys_in(client, "pool") == keys
            assert all(bytes(item.payload) == payload_of(item.key) for item in client.get(keys))
            assert client.insert(b"again", {"pool": 1.0}, key=keys[0]) == keys[0]  # recognised as a retry
            assert client.server_info().items == 40
            before = facts(client)


def test_a_server_starts_from_a_checkpoint_during_which_known_keys_were_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "_KEYS_PER_YIELD", 1)
    commit = checkpointer.Checkpointer._commit

    async def commit_and_forget(self, copy, delta):
        """Meanwhile inserts come, for which the server forgets the oldest keys."""
        await commit(self, copy, delta)
        self._buffer.known_keys.forget(2)

    monkeypatch.setattr(checkpointer.Checkpointer, "_commit", commit_and_forget)
    with serving_in(tmp_path) as client:
        for key in (1, 2, 3):
            client.insert(b"x", {"pool": 1.0}, key=key)
        client.create_checkpoint("here")
    with serving_in(tmp_path, durable=True, restore="here") as client:
        assert client.server_info().items == 3


@pytest.mark.parametrize("durable", [False, True])
def test_a_checkpoint_under_load_is_of_one_moment(tmp_path, durable):
    """A writer moves through two tables in step; at any one moment they differ by one item at most."""
    tables = (TableConfig(name="first"), TableConfig(name="second"))
    with serving_in(tmp_path, durable=durable, tables=tables) as client:
        stop = threading.Event()
        with client.writer() as writer:
            for key in range(1, 2000):
                writer.insert(payload_of(key), {"first": 1.0, "second": 1.0})

        def work():
            key = 10_000
            with ReplayClient(client.address) as other:
                while not stop.is_set():
                    key += 1
                    other.insert(payload_of(key), {"first": 1.0}, key=key)
                    other.insert(payload_of(key), {"second": 1.0}, key=key + (1 << 32))
                    if key % 3 == 0:
                        other.delete("first", [key - 1])
                        other.delete("second", [key - 1 + (1 << 32)])

        worker = in_a_thread(work)
        until(lambda: client.server_info().tables["second"].inserts > 2000)
        names = [client.create_checkpoint(f"under-load-{n}") for n in range(4)]
        stop.set()
        worker.result()
    grew = []
    for name in names:
        with serving_in(tmp_path, restore=name, tables=tables) as client:
            first, second = keys_in(client, "first"), keys_in(client, "second")
            mine = {key for key in first if 10_000 < key < 1 << 32}
            other = {key - (1 << 32) for key in second if 1 << 32 < key < 1 << 33}
            assert len(mine ^ other) <= 1
            assert max(mine) - max(other) in (0, 1)
            assert all(bytes(item.payload) == payload_of(item.key) for item in client.get(mine))
            grew.append(len(mine))
    assert grew == sorted(grew)


@pytest.mark.parametrize("durable", [False, True])
def test_a_checkpoint_while_items_are_extended_has_each_item_whole(tmp_path, monkeypatch, durable):
    monkeypatch.setattr(state, "ITEMS_PER_SLICE", 20)  # so that items are extended that are copied already
    tables = (TableConfig(name="pool", requires=["c0"]),)
    with serving_in(tmp_path, durable=durable, tables=tables) as client:
        with client.writer() as writer:
            keys = [writer.insert(make_group(), {"pool": 1.0}) for _ in range(1500)]
        stop, extended = threading.Event(), []

        def teach():
            with ReplayClient(client.address) as other:
                for number in itertools.count():
                    if stop.is_set():
                        return
                    key = keys[(7 * number) % len(keys)]
                    name = f"c{sum(key == before for before in extended)}"
                    assert other.extend(key, {name: np.full(50, key % 1000)}).added
                    extended.append(key)

        teacher = in_a_thread(teach)
        before = []
        for number in range(3):
            until(lambda number=number: len(extended) > 40 * (number + 1))
            before.append(len(extended))
            client.create_checkpoint(f"taught-{number}")
        stop.set()
        teacher.result()
    for number, least in enumerate(before):
        with serving_in(tmp_path, restore=f"taught-{number}", tables=tables) as client:
            items = [item for at in range(0, 1500, 500) for item in client.get(keys[at : at + 500])]
            assert [item.key for item in items] == keys
            assert all(item.labels.columns == item.group.extras.keys() for item in items)
            assert all((values == item.key % 1000).all() for item in items for values in item.group.extras.values())
            columns = sum(len(item.labels.columns) for item in items)
            info = client.server_info()
            assert least <= columns <= len(extended)
            assert info.bytes == sum(len(item.payload) + item.labels.nbytes for item in items)
            assert info.tables["pool"].incomplete_items == sum(not item.labels.columns for item in items)


def test_a_restore_falls_back_to_the_newest_whole_checkpoint_and_says_so(tmp_path, caplog):
    with serving_in(tmp_path) as client:
        for n in range(3):
            client.insert(payload_of(n), {"pool": 1.0})
            client.create_checkpoint(f"c{n}")
        assert [entry.name for entry in client.list_checkpoints()] == ["c2", "c1", "c0"]
        damaged = tmp_path / "checkpoints" / "c2.checkpoint"
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
        listed = client.list_checkpoints(verify=True)
        assert {entry.name: (entry.intact, entry.items) for entry in listed} == {
            "c2": (False, 0),
            "c1": (True, 2),
            "c0": (True, 1),
        }
    with serving_in(tmp_path, restore="latest") as client:
        assert client.server_info().items == 2
    assert "c2.checkpoint cannot be restored: its bytes are not what was written" in caplog.text
    assert "falling back to checkpoint" in caplog.text
    with pytest.raises(ValueError, match=r"no checkpoint 'c9'.*c2, c1, c0"), serving_in(tmp_path, restore="c9"):
        pass


def test_a_restore_into_a_directory_with_items_needs_a_word(tmp_path):
    with serving_in(tmp_path, durable=True) as client:
        client.insert(b"old", {"pool": 1.0}, key=1)
        client.create_checkpoint("old")
        client.insert(b"new", {"pool": 1.0}, key=2)
    with (
        pytest.raises(ValueError, match=r"holds 2 items.*--replace"),
        serving_in(tmp_path, durable=True, restore="old"),
    ):
        pass
    with serving_in(tmp_path, durable=True) as client:  # nothing has happened to it
        assert keys_in(client, "pool") == [1, 2]
    with serving_in(tmp_path, durable=True, restore="old", replace=True) as client:
        assert keys_in(client, "pool") == [1]
    assert len(list((tmp_path / "data").glob("replaced-*.mdb"))) == 1
    with serving_in(tmp_path, durable=True) as client:
        assert keys_in(client, "pool") == [1]


def test_only_the_last_few_of_its_own_are_kept_and_nothing_else_is_touched(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    foreign = ["notes.txt", "auto-mine.checkpoint", "other.checkpoint", "auto-20200101T000000.000Z.checkpoint"]
    for name in foreign:
        (folder / name).write_text("mine")
    left_over = folder / "auto-20200101T000000.000Z.checkpoint.partial"
    left_over.mkdir()
    (left_over / "data.mdb").write_text("from a crash")
    with serving_in(tmp_path, keep=2) as client:
        client.insert(b"x", {"pool": 1.0})
        client.create_checkpoint("named")
        own = [client.create_checkpoint() for _ in range(4)]
        names = {path.name for path in folder.iterdir()}
    assert names == {*foreign, "named.checkpoint", *(f"{name}.checkpoint" for name in own[2:])}


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "-x", "x" * 101, "a\0b", "a b", "é"])
def test_a_name_is_never_a_path(tmp_path, name):
    with serving_in(tmp_path) as client:
        if not name:
            assert client.create_checkpoint(name).startswith("auto-")
            return
        with pytest.raises(InvalidRequestError, match="checkpoint name"):
            client.create_checkpoint(name)
        assert list(tmp_path.iterdir()) == []


def test_checkpoints_are_made_at_intervals_and_at_the_end(tmp_path):
    with serving_in(tmp_path, every_minutes=0.01, on_stop=True) as client:
        client.insert(b"x", {"pool": 1.0})
        until(client.list_checkpoints)
        client.insert(b"y", {"pool": 1.0})
    with serving_in(tmp_path, restore="latest") as client:
        assert client.server_info().items == 2


def test_a_disk_that_is_full_fails_the_checkpoint_and_nothing_else(tmp_path):
    with small_disk(tmp_path / "checkpoints", "2m") as disk, serving_in(tmp_path) as client:
        small = client.insert(b"x", {"pool": 1.0})
        client.create_checkpoint("fits")
        client.insert(bytes(3 << 20), {"pool": 1.0})
        with pytest.raises(ReplayError, match=r"could not be written.*make room if its disk is full"):
            client.create_checkpoint("large")
        assert [path.name for path in disk.iterdir()] == ["fits.checkpoint"]
        assert client.list_checkpoints(verify=True)[0].intact
        assert client.get([small])


def test_a_checkpoint_that_fails_before_it_has_a_name_is_named_by_its_folder(tmp_path, monkeypatch):
    def list_nothing(_):
        raise OSError("Input/output error")

    with serving_in(tmp_path) as client:
        monkeypatch.setattr(CheckpointDirectory, "list", list_nothing)
        with pytest.raises(ReplayError, match=r"^a checkpoint in .*/checkpoints could not be written: Input/output"):
            client.create_checkpoint()


def test_a_restore_onto_a_full_disk_is_refused_and_works_once_there_is_room(tmp_path):
    with serving_in(tmp_path) as client:
        keys = [client.insert(os.urandom(1 << 20), {"pool": 1.0}) for _ in range(20)]
        client.create_checkpoint("large")
    with small_disk(tmp_path / "data", "4m") as disk:
        with (
            pytest.raises(ValueError, match=r"cannot take the 2\d{7} bytes of the checkpoint.*make room"),
            serving_in(tmp_path, durable=True, restore="latest"),
        ):
            pass
        subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
        with serving_in(tmp_path, durable=True, restore="latest") as client:
            assert keys_in(client, "pool") == sorted(keys)


@pytest.mark.parametrize(("when_full", "left"), [("evict", 10), ("block", 40)])
def test_a_restore_into_lower_max_bytes_evicts_what_may_be_and_says_so(tmp_path, caplog, when_full, left):
    table = TableConfig(name="pool", remover="fifo", when_full=when_full)
    section = CheckpointsConfig(dir=tmp_path / "checkpoints")
    with serving_in(tmp_path, tables=[table]) as client:
        keys = [client.insert(bytes(100), {"pool": 1.0}) for _ in range(40)]
        client.create_checkpoint("forty")
    server = ReplayServer([table], port=0, checkpoints=section, max_bytes=1000).restore("forty")
    with server, ReplayClient(server.address) as client:
        assert keys_in(client, "pool") == sorted(keys[-left:])
    assert f"4000 bytes + 0 > max_bytes 1000: {40 - left} items evicted" in caplog.text


def test_any_flip_and_any_cut_of_a_checkpoint_is_noticed(tmp_path):
    with serving_in(tmp_path) as client:
        fill(client)
        client.create_checkpoint("whole")
    path = tmp_path / "checkpoints" / "whole.checkpoint"
    data = path.read_bytes()
    assert verified(path).items == 40
    rng, copy = random.Random(0), tmp_path / "copy"
    for _ in range(500):
        damaged = bytearray(data)
        at = rng.choice([rng.randrange(len(data)), rng.randrange(2000), len(data) - 1 - rng.randrange(200)])
        if rng.random() < 0.2:
            del damaged[at:]
        else:
            damaged[at] ^= 1 << rng.randrange(8)
        copy.write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint):
            verified(copy)


def test_a_checkpoint_whose_seal_has_another_length_does_not_hide_the_others(tmp_path):
    with serving_in(tmp_path) as client:
        client.insert(b"x", {"pool": 1.0})
        client.create_checkpoint("whole")
        client.create_checkpoint("bad")
    path = tmp_path / "checkpoints" / "bad.checkpoint"
    data = path.read_bytes()
    right = int.from_bytes(data[-16:-8], "little")
    for length in (*range(right + 20), len(data) - 16, len(data), 1 << 63):
        path.write_bytes(data[:-16] + length.to_bytes(8, "little") + data[-8:])
        directory = CheckpointDirectory(path.parent)
        if length != right:
            assert [(entry.name, bool(entry.problem)) for entry in directory.list()] == [
                ("bad", True),
                ("whole", False),
            ]
            assert directory.open("latest").path.name == "whole.checkpoint"


def test_what_is_named_like_a_checkpoint_and_is_no_file_is_in_nobodys_way(tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / "folder.checkpoint").mkdir(parents=True)
    (folder / "dangling.checkpoint").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "pipe.checkpoint")  # reading it would wait for a writer
    (folder / "circle.checkpoint").symlink_to(folder / "circle.checkpoint")
    with serving_in(tmp_path) as client:
        client.insert(b"x", {"pool": 1.0})
        name = client.create_checkpoint()
        listed = client.list_checkpoints(verify=True)
        assert [entry.name for entry in listed] == [name, "circle"]
        assert "symbolic links" in listed[1].problem
        with pytest.raises(ReplayError, match="could not be written"):
            client.create_checkpoint("folder")
        assert not list(folder.glob("*.partial"))


def test_a_checkpoint_that_nobody_waits_for_any_more_is_not_begun(tmp_path, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    seal, make_calls, calls = checkpointer.seal, OpenCalls.__init__, []

    def slowly(*arguments):
        begun.set()
        assert go_on.wait(200)
        return seal(*arguments)

    def make_known(open_calls, limits):
        make_calls(open_calls, limits)
        calls.append(open_calls)

    monkeypatch.setattr(checkpointer, "seal", slowly)
    monkeypatch.setattr(OpenCalls, "__init__", make_known)
    with serving_in(tmp_path) as client:
        (open_calls,) = calls
        with ThreadPoolExecutor(6) as pool:  # by itself it would have fewer threads on a single core
            first = pool.submit(client.create_checkpoint, "first", timeout=60.0)
            assert begun.wait(200)
            with ReplayClient(client.address) as impatient:
                for n in range(5):
                    pool.submit(impatient.create_checkpoint, f"waits-{n}")
                until(lambda: open_calls.open.total() == 6)
            until(lambda: open_calls.open.total() == 1)  # the server has seen that nobody waits
            go_on.set()
            assert first.result() == "first"
        client.create_checkpoint("last")
        assert [entry.name for entry in client.list_checkpoints()] == ["last", "first"]


def test_verifying_for_many_keeps_no_checkpoint_and_no_list_waiting(tmp_path, monkeypatch):
    go_on = threading.Event()
    with serving_in(tmp_path) as client:
        client.create_checkpoint("first")
        read = checkpoints.verified
        monkeypatch.setattr(checkpoints, "verified", lambda path: (go_on.wait(200), read(path))[1])
        with ThreadPoolExecutor(40) as pool:
            verified = [pool.submit(client.list_checkpoints, verify=True) for _ in range(40)]
            client.create_checkpoint("second", timeout=60.0)
            assert len(client.list_checkpoints(timeout=60.0)) == 2
            go_on.set()
            assert all(entry.intact for future in verified for entry in future.result())


def test_a_checkpoint_of_another_version_is_refused_in_words_that_say_what_to_do(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    with serving_in(tmp_path) as client, monkeypatch.context() as patch:
        patch.setattr(checkpoints, "FORMAT", 99)
        client.create_checkpoint("newer")
        (folder / "older.checkpoint").write_bytes(b"replay checkpoint\0 frames" + bytes(8) + b"complete")
    with serving_in(tmp_path) as client:
        problems = {entry.name: entry.problem for entry in client.list_checkpoints(verify=True)}
    assert problems.keys() == {"newer", "older"}
    assert "has format 99, and this version reads format" in problems["newer"]
    assert "has a format of before 2026-11-25" in problems["older"]
    for problem in problems.values():
        assert (
            "go on with the version that wrote it, or bring its tables here with the `replay table export`" in problem
        )
        assert "damaged" not in problem
    with (
        pytest.raises(ValueError, match="go on with the version that wrote it"),
        serving_in(tmp_path, restore="latest"),
    ):
        pass
