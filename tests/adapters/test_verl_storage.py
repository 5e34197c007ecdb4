"""verl with its rows in a replay server: the same run as with TransferQueue's own SimpleStorage, bit by bit.

verl needs other versions of what we use, so it runs in an environment of its own: see test_verl.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.environments import ROOT
from replay_client.testing import server
from tests.adapters.killed_verl import prepare
from tests.adapters.test_verl import python_with_verl

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
STEPS = int(os.environ.get("REPLAY_VERL_STEPS", "40"))
ENTRY_POINTS = "[verl.plugins]\nreplay_server = replay_adapters.verl_plugin\n"


def installed(folder: Path) -> Path:
    """A folder that tells Python of our entry point for verl, as an installed wheel does."""
    metadata = folder / "installed/replay_server-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: replay-server\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return metadata.parent


def steps_of_run(folder: Path, backend: str, address: str) -> list[dict]:
    """Runs run_verl_storage.py, and returns the entries of its `steps.jsonl`: one for each step."""
    folder.mkdir()
    prepare(folder)
    paths = [str(ROOT / name) for name in ("", "client", "trainer", "protos")]
    environment = {
        "PYTHONPATH": os.pathsep.join([*paths, str(installed(folder))]),
        "REPLAY_TEST_START": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",
    }
    command = [python_with_verl(), "-m", "tests.adapters.run_verl_storage", folder, backend, address, STEPS]
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_a_run_of_verl_has_the_same_rows_losses_and_metrics_as_with_simple_storage(tmp_path):
    theirs = steps_of_run(tmp_path / "theirs", "SimpleStorage", "none")
    with server(tables=[{"name": "tq", "when_full": "block"}], data_dir=tmp_path / "data") as running:
        ours = steps_of_run(tmp_path / "ours", "ReplayServer", running.address)
        stats = running.client().server_info().tables["tq"]
    assert [entry["step"] for entry in theirs] == list(range(1, STEPS + 1))
    assert ours == theirs
    assert len({entry["metrics"]["actor/loss"] for entry in theirs}) > STEPS // 2  # the model learns all the time
    assert stats.inserts >= STEPS * 12  # the rows were in our server
    assert stats.size == 0
