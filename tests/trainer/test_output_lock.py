"""One training run at a time in an output_dir, also across processes and after a kill."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from replay_trainer.weights import OutputLock
from tests.factories import start
from tests.trainer.factories import FakeClient, make_batches, make_trainer


def hold(folder: Path, answers: Connection) -> None:
    lock = OutputLock(folder)
    answers.send(lock.acquire() or "locked")
    signal.pause()


def test_a_trainer_is_refused_while_another_process_trains_in_the_folder_and_not_after_its_death(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    answer, answers = multiprocessing.Pipe(duplex=False)
    holder = start(hold, folder, answers)
    try:
        assert answer.recv() == "locked"
        client = FakeClient(make_batches(1))
        trainer = make_trainer(client, folder, max_steps=1)
        with pytest.raises(RuntimeError, match=rf"in use by another training run \(process {holder.pid} on "):
            trainer.train()
        assert client.weights == ""
        assert not any(folder.glob("step-*"))
    finally:
        holder.kill()
        holder.join()
    # The kernel has freed the lock of the killed process. Its file is still there.
    assert (folder / ".lock").exists()
    trainer.train()
    assert client.version == 1
    assert not (folder / ".lock").exists()
    lock = OutputLock(folder)
    assert lock.acquire() == ""
    lock.release()
