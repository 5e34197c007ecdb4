"""Payloads that are extended, in every storage: put, extended, deleted and read in any order, over commits that
succeed, fail half-way or are killed.

REPLAY_MODEL_EXAMPLES=2000 looks longer than a run of all tests does.
"""

import tempfile
from pathlib import Path

import lmdb as lmdb_library
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replay_server.storage import lmdb
from replay_server.storage.lmdb import FileGone, LmdbStorage, Unwritten
from replay_server.storage.memory import MemoryStorage, first_bytes
from replay_server.storage.records import ITEM, ROW, Delta, ItemRecords
from replay_server.tables.items import DamagedPayloads
from tests.server.tables.test_model import case_of

CHUNK = 7
keys = st.integers(1, 4)
sizes = st.sampled_from([0, 1, 3, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 20])
picks = st.integers(0, 1 << 16)


@pytest.fixture(autouse=True)
def many_small_pieces(monkeypatch):
    monkeypatch.setattr(lmdb, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(lmdb, "BYTES_PER_TRANSACTION", 40)
    monkeypatch.setattr(lmdb, "RESERVE", 0)


def records_of(payloads: dict[int, bytes]) -> ItemRecords:
    items = np.zeros(len(payloads), dtype=ITEM)
    items["key"] = sorted(payloads)
    items["nbytes"] = [len(payloads[key]) for key in sorted(payloads)]
    return ItemRecords(items, np.empty(0, dtype=ROW), np.empty(0, dtype=np.int64))


class Failing(dict):
    """Records of which none can be written."""

    def __or__(self, others):
        raise lmdb_library.DiskError("full")


def entries(folder: Path) -> int:
    """How many chunks the file of a storage that is closed has."""
    with lmdb_library.open(str(folder), max_dbs=8, readonly=True, lock=False) as file, file.begin() as txn:
        return txn.stat(file.open_db(b"payloads", txn))["entries"]


class InMemory(RuleBasedStateMachine):
    """Any operations on payloads in the memory of the process."""

    @initialize()
    def start(self):
        self.storage = self.make_storage()
        self.now: dict[int, bytes] = {}
        self.sizes: dict[int, list[int]] = {}
        """Those that each payload has had."""
        self.items: dict[int, int] = {}
        """A number for each item that a key has stood for."""
        self.count = 0

    def make_storage(self):
        return MemoryStorage()

    def some_bytes(self, size: int) -> tuple[bytes, ...]:
        """No two of them are equal. In several chunks, as they come from the wire."""
        self.count += 1
        whole = (self.count.to_bytes(3) * size)[:size]
        return tuple(part for part in (whole[: size // 2], whole[size // 2 :]) if part)

    @rule(key=keys, size=sizes)
    def put(self, key, size):
        if key not in self.now:
            payload = self.some_bytes(size)
            self.storage.put([key], [payload])
            self.now[key] = b"".join(payload)
            self.items[key] = self.count
            self.sizes[key] = [size]

    @rule(key=keys, size=sizes)
    def extend(self, key, size):
        if key in self.now:
            segment = self.some_bytes(size)
            self.storage.extend(key, len(self.now[key]), segment)
            self.now[key] += b"".join(segment)
            self.sizes[key].append(len(self.now[key]))

    @rule(key=keys)
    def delete(self, key):
        if key in self.now:
            self.now.pop(key)
            self.storage.delete([key])

    @rule(asked=st.lists(st.tuples(keys, picks), max_size=4, unique_by=lambda pair: pair[0]))
    def read(self, asked):
        """Payloads as they are, or as they were before they were extended."""
        there = [(key, self.sizes[key][pick % len(self.sizes[key])]) for key, pick in asked if key in self.now]
        found = self.storage.get([key for key, _ in there], [size for _, size in there])
        assert [b"".join(payload) for payload in found] == [self.now[key][:size] for key, size in there]

    @invariant()
    def all_is_there(self):
        there = getattr(self, "now", {})
        if there:
            found = self.storage.get(list(there), [len(payload) for payload in there.values()])
            assert [b"".join(payload) for payload in found] == list(there.values())


class OnDisk(InMemory):
    """The same with commits, which may be under way while anything else happens."""

    def make_storage(self):
        self.folder = tempfile.TemporaryDirectory()
        self.kept: dict[int, bytes] = {}
        self.kept_sizes: dict[int, list[int]] = {}
        self.kept_items: dict[int, int] = {}
        self.ever: set[int] = set()
        """Keys that a commit may have written."""
        self.taken: Unwritten | None = None
        return self.open()

    def open(self):
        storage = LmdbStorage(Path(self.folder.name))
        state = storage.load()
        assert state.items.items["key"].tolist() == sorted(self.kept)
        return storage

    def write(self, fails: bool) -> None:
        """`fails`: in its last transaction, after others that wrote a part of the payloads."""
        delta = Delta(records_of(self.then), sorted(self.ever - self.then.keys()))
        if fails:
            delta.state_records = Failing()
        self.storage.commit(delta, self.taken)

    @precondition(lambda self: self.taken is None)
    @rule()
    def begin_commit(self):
        self.taken, self.then = self.storage.begin_commit(), dict(self.now)
        self.then_sizes, self.then_items = {key: list(self.sizes[key]) for key in self.now}, dict(self.items)
        self.ever |= self.then.keys()

    @precondition(lambda self: self.taken is not None)
    @rule()
    def end_commit(self):
        self.write(fails=False)
        self.storage.end_commit(None)
        self.taken, self.kept, self.kept_sizes, self.kept_items = None, self.then, self.then_sizes, self.then_items

    @precondition(lambda self: self.taken is not None)
    @rule(rolled_back=st.booleans())
    def fail_commit(self, rolled_back):
        with pytest.raises(lmdb_library.DiskError) as failure:
            self.write(fails=True)
        unwritten = self.storage.end_commit(failure.value)
        self.taken = None
        for key in unwritten if rolled_back else ():
            self.delete(key)

    @rule(commit_first=st.booleans(), in_the_middle=st.booleans())
    def kill(self, commit_first, in_the_middle):
        if commit_first:
            if self.taken is None:
                self.begin_commit()
            self.end_commit()
        if in_the_middle and self.taken is not None:
            with pytest.raises(lmdb_library.DiskError):
                self.write(fails=True)
        self.storage.close()
        self.now, self.taken = dict(self.kept), None
        self.sizes, self.items = {key: list(had) for key, had in self.kept_sizes.items()}, dict(self.kept_items)
        self.storage = self.open()

    @invariant()
    def unwritten_bytes_are_counted(self):
        if hasattr(self, "storage") and self.taken is None:
            unwritten = sum(map(len, self.now.values()))
            for key, payload in self.kept.items():
                if key in self.now and self.items[key] == self.kept_items[key]:
                    unwritten -= len(payload)
            assert self.storage.unwritten == unwritten

    def teardown(self):
        """When everything is deleted, the file has no chunk."""
        if hasattr(self, "storage") and hasattr(self, "now"):
            if self.taken is not None:
                self.end_commit()
            for key in list(self.now):
                self.delete(key)
            for _ in range(2):  # the second start finds what no item needs
                self.kill(commit_first=True, in_the_middle=False)
            self.begin_commit()
            self.end_commit()
            assert self.storage.unwritten == 0
        if hasattr(self, "storage"):
            self.storage.close()
        if hasattr(self, "now"):
            assert entries(Path(self.folder.name)) == 0
        if hasattr(self, "folder"):
            self.folder.cleanup()


TestInMemory = case_of(InMemory, 50)
TestOnDisk = case_of(OnDisk, 100)


def test_the_first_bytes_of_a_payload_share_its_chunks():
    payload = (b"abc", memoryview(b"defg"))
    assert [b"".join(first_bytes(payload, size)) for size in range(8)] == [b"abcdefg"[:size] for size in range(8)]
    assert first_bytes(payload, 3)[0] is payload[0]


def test_a_damaged_last_chunk_stays_damaged_when_its_payload_is_extended(tmp_path):
    whole, last = b"0123456", b"\xa7\xb8\xc9"
    storage = LmdbStorage(tmp_path)
    storage.put([1], [(whole, last)])
    storage.commit(Delta(records_of({1: whole + last})), storage.begin_commit())
    storage.end_commit(None)
    storage.close()
    data = (tmp_path / "data.mdb").read_bytes()
    assert data.count(last) == 1
    (tmp_path / "data.mdb").write_bytes(data.replace(last, b"\xa7\xb8\xc8"))
    storage = LmdbStorage(tmp_path)
    storage.load()
    storage.extend(1, 10, (b"more",))
    storage.commit(Delta(records_of({1: whole + last + b"more"})), storage.begin_commit())
    storage.end_commit(None)
    with pytest.raises(DamagedPayloads):
        storage.get([1], [14])
    storage.close()


class Removing(tuple):
    """Records of a commit. The file goes away while the commit reads them, as it may at any moment."""

    def __new__(cls, path):
        removing = super().__new__(cls)
        removing.path = path
        return removing

    def __iter__(self):
        self.path.rename(self.path.with_name("away.mdb"))
        return super().__iter__()


def test_a_commit_during_which_the_file_is_removed_fails_and_has_no_effect(tmp_path):
    data = tmp_path / "data.mdb"
    storage = LmdbStorage(tmp_path)
    storage.put([1], [(b"lost",)])
    delta = Delta(records_of({1: b"lost"}))
    with pytest.raises(FileGone, match=r"data\.mdb was removed or replaced while the server runs") as caught:
        storage.commit(delta, storage.begin_commit(), Removing(data))
    assert storage.end_commit(caught.value) == [1]
    (tmp_path / "away.mdb").rename(data)
    assert storage.read([1], [4]) == [None]
    assert len(storage.load().items) == 0
    storage.commit(delta, storage.begin_commit())
    storage.end_commit(None)
    assert storage.get([1], [4]) == [(b"lost",)]
    storage.close()
