"""One training run at a time in an output_dir, also across processes and after a kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from replay_trainer.weights import OutputLock
from tests.trainer.factories import FakeClient, make_batches, make_trainer

HOLDER = """
import sys
from pathlib import Path
from replay_trainer.weights import OutputLock
lock = OutputLock(Path(sys.argv[1]))
print(lock.acquire() or "locked", flush=True)
sys.stdin.read()
"""


def test_a_trainer_is_refused_while_another_process_trains_in_the_folder_and_not_after_its_death(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "locked\n"
            client = FakeClient(make_batches(1))
            trainer = make_trainer(client, folder, max_steps=1)
            with pytest.raises(RuntimeError, match=rf"in use by another training run \(process {holder.pid} on "):
                trainer.train()
            assert client.weights == ""
            assert not any(folder.glob("step-*"))
        finally:
            holder.kill()
    # The kernel has freed the lock of the killed process. Its file is still there.
    assert (folder / ".lock").exists()
    trainer.train()
    assert client.version == 1
    assert not (folder / ".lock").exists()
    lock = OutputLock(folder)
    assert lock.acquire() == ""
    lock.release()
