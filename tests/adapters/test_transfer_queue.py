"""TransferQueue with its rows in a replay server: its own tests, and a job that dies, in an environment of their own.

`.venv-tq` is used if it is there, and made if REPLAY_MAKE_ENVIRONMENTS=1 is set; REPLAY_TQ_PYTHON names another Python
that has TransferQueue and pytest.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.environments import ROOT, BuiltEnvironment
from replay_client.testing import LocalServer, server

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

ENVIRONMENT = BuiltEnvironment(
    ROOT / ".venv-tq",
    (
        *("TransferQueue==0.1.11", "tensordict==0.10.0", "pytest", "pytest-asyncio", "pytest-timeout", "pillow"),
        *("grpcio>=1.80,<1.84", "ml-dtypes>=0.5", "msgpack>=1.1", "protobuf>=6.33.5,<8", "xxhash>=3.5"),
    ),
)
SIMPLE_STORAGE_ONLY = (
    "test_tensor_fields",  # of test_checkpoint_e2e.py: it looks for a folder simple_storage in the checkpoint
    "test_storage_saved_is_true",  # include_storage=False is ignored for SimpleStorage, and for no other backend
    "test_load_raises_on_storage_unit_count_mismatch",  # it changes a file of SimpleStorage
    "test_ssd_offload_e2e",  # a feature of SimpleStorage
)
"""Parts of the names of tests that look at SimpleStorage itself, whatever TQ_TEST_BACKEND says."""


def python_with_transfer_queue() -> str:
    if named := os.environ.get("REPLAY_TQ_PYTHON"):
        return named
    if os.environ.get("REPLAY_MAKE_ENVIRONMENTS") == "1":
        ENVIRONMENT.ensure()
    if not ENVIRONMENT.python.exists():
        pytest.skip(
            "TransferQueue is not installed; REPLAY_MAKE_ENVIRONMENTS=1 pytest tests/adapters/test_transfer_queue.py"
        )
    return str(ENVIRONMENT.python)


@pytest.fixture(scope="module")
def python() -> str:
    return python_with_transfer_queue()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[LocalServer]:
    with server(tables=[{"name": "tq", "when_full": "block"}], data_dir=tmp_path / "data") as running:
        yield running


def run(
    command: list[str], server: LocalServer, folder: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "client", "trainer", "protos"))
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "REPLAY_ADDRESS": server.address} | environment,
        capture_output=True,
        text=True,
        timeout=3000,
    )


def job(python: str, server: LocalServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run([python, "-m", "tests.adapters.run_transfer_queue", *arguments], server)


def test_the_tests_of_transfer_queue_pass_with_the_backend(python: str, running: LocalServer, tmp_path: Path) -> None:
    found = run([python, "-c", "import transfer_queue; print(transfer_queue.__file__)"], running)
    tests = Path(found.stdout.strip()).parent.parent / "tests"
    excluded = " and ".join(f"not {name}" for name in SIMPLE_STORAGE_ONLY)
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.adapters.transfer_queue_plugin", "-k", excluded]
    # In a folder of its own, so that our configuration of pytest does not apply.
    done = run(
        [python, "-m", "pytest", *options, str(tests / "e2e"), str(tests / "test_kv_storage_manager.py")],
        running,
        tmp_path,
        TQ_TEST_BACKEND="ReplayServer",
    )
    assert done.returncode == 0, done.stdout[-5000:]
    [passed] = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > 70


@pytest.fixture
def resumed(python: str, running: LocalServer, tmp_path: Path) -> dict:
    """What the second process of a job saw whose first process died some steps after its checkpoint."""
    checkpoint = tmp_path / "checkpoint"
    report = tmp_path / "report.json"
    died = job(python, running, "die", str(checkpoint))
    assert "died" in died.stdout, died.stderr[-3000:]
    cycles = os.environ.get("REPLAY_TQ_CYCLES", "20")
    done = job(python, running, "resume", str(checkpoint), cycles, str(report))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(report.read_text())
    report["left"] = running.client().server_info().tables["tq"].size
    return report


def test_a_job_that_died_finds_each_row_of_its_checkpoint_whatever_indexes_are_used_again(resumed: dict) -> None:
    assert resumed["listed"] == list(range(4, 64))
    assert resumed["wrong"] == []
    assert resumed["mislabelled"] == []
    assert resumed["wrong_later"] == []
    # The rows of the checkpoint, and the mark of the save: rows that nobody lists are gone.
    assert resumed["left"] == 61


@pytest.fixture(scope="module")
def seen(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What a job saw of values and of a silent controller, and how many items it left."""
    file = tmp_path_factory.mktemp("seen") / "report.json"
    with server(tables=[{"name": "tq", "when_full": "block"}]) as running:
        done = job(python, running, "values", str(file))
        assert done.returncode == 0, done.stderr[-3000:]
        report = json.loads(file.read_text())
        report["left"] = running.client().server_info().tables["tq"].size
    return report


def test_columns_can_come_late_and_be_overwritten_and_nothing_is_left(seen: dict) -> None:
    assert seen["overwritten"] == [7]
    assert seen["late"] == [[1.0, 1.0]]
    assert seen["kept"] == [2.0, 2.0, 2.0]
    assert "the field 'bad' has a value that is not stored, builtins.set {1, 2}" in seen["refused"]
    assert seen["left"] == 0


def test_a_put_is_announced_again_and_raises_if_the_controller_stays_silent(seen: dict) -> None:
    assert seen["silences_left"] == 0
    assert seen["wrong_after_two_silences"] == []
    assert "did not answer about a put of rows" in seen["silent"]


def test_the_plugin_of_verl_imports_nothing_heavy_and_registers_with_transfer_queue(
    python: str, running: LocalServer
) -> None:
    program = (
        "import sys; import replay_adapters.verl_plugin;"
        "print(sorted({'torch', 'grpc', 'transfer_queue', 'replay_client'} & set(sys.modules)));"
        "import transfer_queue; from transfer_queue.storage.managers.base import StorageManagerFactory;"
        "print('ReplayServer' in StorageManagerFactory._registry, 'replay_client' in sys.modules)"
    )
    done = run([python, "-c", program], running)
    assert done.stdout.splitlines() == ["[]", "True False"], done.stderr[-2000:]


def test_without_transfer_queue_the_plugin_does_nothing() -> None:
    program = "import replay_adapters.verl_plugin, importlib.util; print(importlib.util.find_spec('transfer_queue'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "None"
