"""ReplayBuffer on LMDB against the reference: any operations in any order, and a kill between any two of them.

A kill throws the buffer away and takes up what the last commit has written; the reference goes back to that moment, and
requeues what was in hand. Moving writes a checkpoint, in one of two ways, and begins with it in an empty directory.

REPLAY_MODEL_EXAMPLES=2000 looks longer than a run of all tests does.
"""

import asyncio
import copy
import tempfile
from collections import deque
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from replay_server.storage import lmdb, records, state
from replay_server.storage.checkpointer import Checkpointer
from replay_server.storage.checkpoints import CheckpointDirectory, seal
from replay_server.storage.lmdb import LmdbStorage
from replay_server.storage.state import ChangeCollector, restore
from tests.kit.tables import replay_buffer
from tests.server.storage.power_cut import dump
from tests.server.tables import test_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def many_small_pieces(monkeypatch):
    monkeypatch.setattr(lmdb, "CHUNK_BYTES", 7)
    monkeypatch.setattr(lmdb, "RESERVE", 0)
    monkeypatch.setattr(state, "ITEMS_PER_SLICE", 2)
    monkeypatch.setattr(records, "wall_offset", lambda clock: 0.0)  # the clock of the model is the wall clock as well


class DurableMachine(test_model.ModelMachine):
    def make_buffer(self, tables, admission, max_bytes):
        self.folder = tempfile.TemporaryDirectory()
        self.kept = None
        self.rest = {"admission": admission, "max_bytes": max_bytes}
        return self.open(tables)

    def open(self, tables, checkpoint=None):
        self.storage = LmdbStorage(Path(self.folder.name))
        if checkpoint is not None:
            self.storage.adopt(checkpoint.path, checkpoint.size)
        buffer = replay_buffer(
            tables, lambda: self.now, storage=self.storage, rows_per_slice=test_model.ROWS_PER_SLICE, **self.rest
        )
        recorded = self.storage.load()
        self.collector = ChangeCollector(buffer, recorded)
        assert recorded.skipped == []
        assert recorded.damaged == []
        buffer.watchers.append(self.collector)
        self.loading = buffer, recorded
        self.slices = []
        return buffer

    @rule()
    def collect_slice(self):
        """Of the next commit. Other operations come before the rest of it."""
        self.slices += islice(self.collector.slices(), 1)

    @rule()
    def commit(self):
        delta = self.collector.collect()
        self.storage.commit(delta, self.storage.begin_commit(), self.slices)
        self.slices = []
        self.storage.end_commit(None)
        self.collector.written(delta)
        self.kept = copy.deepcopy((self.model, self.leases, self.next_key))

    @precondition(lambda self: getattr(self, "kept", None))
    @rule(commit_first=st.booleans())
    def kill(self, commit_first):
        if commit_first:
            self.commit()
        self.storage.close()
        self.model, self.leases, self.next_key = self.kept
        self.start_again(lambda: restore(*self.loading))

    @precondition(lambda self: hasattr(self, "model"))
    @rule(copy_file=st.booleans())
    def move(self, copy_file):
        directory = CheckpointDirectory(Path(self.folder.name) / "checkpoints")
        directory.path.mkdir(exist_ok=True)

        async def write():
            checkpointer = Checkpointer(self.buffer, directory, keep=1)
            await checkpointer.write("here")
            await checkpointer.close()

        if copy_file:
            self.commit()
            partial = directory.path / "partial"
            self.storage.copy_to(partial)
            seal(partial, directory.file("here"), 0.0)
        else:
            asyncio.run(write())
        checkpoint = directory.open("here")
        self.storage.close()
        (Path(self.folder.name) / "data.mdb").unlink()
        (Path(self.folder.name) / "server.lock").unlink()
        self.start_again(lambda: restore(*self.loading), checkpoint)

    def start_again(self, fill, checkpoint=None):
        self.model.now = self.now
        self.pendings, self.hands, self.log = {}, [], deque()
        self.model.restart()
        tables = [table.config for table in self.model.tables.values()]
        self.buffer = self.open(tables, checkpoint)
        self.listen_to_all()
        fill()
        if self.admission is not None:
            self.model.admission_version = self.model.version
            self.model.expire_leases()
        for table in self.model.tables.values():
            if table.config.when_full == "evict":
                self.model.drop_used_up(table)
            self.shrink(table)
        self.follow()
        self.kept = None
        self.commit()

    def teardown(self):
        if hasattr(self, "model"):
            super().teardown()
            self.storage.close()
            self.folder.cleanup()

    def nothing_is_stored(self):
        self.commit()
        state = self.storage.load()
        assert len(state.items) == 0
        _, _, chunks = dump(self.storage)
        assert chunks == []


TestDurableModel = test_model.case_of(DurableMachine, 100)
