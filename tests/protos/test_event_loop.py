"""Servers and blocking clients run on uvloop where it is installed, and otherwise on asyncio's loop."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from replay_protos import event_loop
from tests.kit.processes import server_process

_BOTH_SIDES = """
import asyncio, gc, sys
if sys.argv[1] == "without":
    sys.modules["uvloop"] = None
from replay_client import ReplayClient
from replay_server import ReplayServer, TableConfig

with ReplayServer([TableConfig(name="pool")], port=0) as server, ReplayClient(server.address) as client:
    key = client.insert(b"payload", {"pool": 1.0})
    assert client.sample("pool")[0].info.key == key
    loops = [each for each in gc.get_objects() if isinstance(each, asyncio.AbstractEventLoop) and each.is_running()]
    print(*(type(each).__module__ for each in loops))
"""


@pytest.mark.parametrize(("uvloop", "module"), [("with", "uvloop"), ("without", "asyncio.unix_events")])
def test_server_and_blocking_client_take_the_same_kind_of_loop(uvloop, module):
    done = subprocess.run(
        [sys.executable, "-c", _BOTH_SIDES, uvloop], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout.split() == [module, module]
    assert done.stderr == ""


def test_the_loop_ends_with_what_runs_on_it_and_raises_its_errors():
    loops = []

    async def fail() -> None:
        loops.append(asyncio.get_running_loop())
        raise ValueError("it broke")

    with pytest.raises(ValueError, match="it broke"):
        event_loop.run(fail())
    assert isinstance(loops[0], uvloop.Loop)
    assert loops[0].is_closed()


def test_replay_serve_runs_on_it_and_ends_at_sigterm(tmp_path):
    with server_process(tmp_path, anew=True) as server:
        mapped = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "uvloop" in mapped
        server.process.terminate()
        assert server.process.wait(200) == 0
