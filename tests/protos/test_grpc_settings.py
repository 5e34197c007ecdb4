"""gRPC reads its settings when it is imported: they are there by then, whichever package a program imports first."""

import os
import subprocess
import sys

import pytest

from replay_protos import NO_EVENT_ENGINE

_SPY = """
import os, sys

class Spy:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print("found", os.environ.get("GRPC_EXPERIMENTS"), flush=True)
            os._exit(0)  # whatever else would be imported

sys.meta_path.insert(0, Spy())
"""


def run(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh process, without this process's settings of gRPC."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"} | settings
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=200
    )


@pytest.mark.parametrize(
    "first",
    [
        "import replay_client",
        "import replay_client.errors",
        "import replay_generator",
        "import replay_server",
        "import replay_cli.app",
        "import replay_trainer",
        "import replay_protos.replay_pb2_grpc",
    ],
)
def test_the_event_engine_is_off_when_grpc_is_first_imported(first):
    assert run(f"{_SPY}\n{first}\nimport grpc").stdout == f"found {NO_EVENT_ENGINE}\n"


def test_a_setting_of_the_users_own_wins():
    said = run(f"{_SPY}\nimport replay_client\nimport grpc", GRPC_EXPERIMENTS="tcp_rcv_lowat")
    assert said.stdout == "found tcp_rcv_lowat\n"


@pytest.mark.parametrize(
    ("program", "settings", "warned"),
    [
        pytest.param("import replay_client", {}, False, id="replay_client first"),
        pytest.param("import grpc, replay_client", {}, True, id="grpc first"),
        pytest.param("import grpc, replay_client", {"GRPC_EXPERIMENTS": NO_EVENT_ENGINE}, False, id="set before"),
    ],
)
def test_a_program_that_imports_grpc_too_early_is_told_what_to_set(program, settings, warned):
    said = run(program, **settings).stderr
    assert ("grpc was imported before replay_client" in said) is warned
    assert (f"GRPC_EXPERIMENTS={NO_EVENT_ENGINE}" in said) is warned
