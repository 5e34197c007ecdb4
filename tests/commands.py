"""The command `replay` as a process, forked from one that has imported its modules: so it starts at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

COMMAND = (sys.executable, "-m", "replay_server.cli")

# Reads a line of JSON for each command: its arguments, environment, folder, and the files of its output.
_PARENT = """
import json, os, sys
import replay_client, replay_server.config, replay_server.cli.app, replay_server.cli.output
for line in sys.stdin:
    arguments, environment, folder, *outputs = json.loads(line)
    if not (child := os.fork()):
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY), number)
        sys.argv = ["replay", *arguments]
        replay_server.cli.main()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
_turn = threading.Lock()


@cache
def _parent() -> subprocess.Popen[str]:
    """It ends with this process, whose end closes its input."""
    return subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_replay(*arguments: str, address: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, with nobody at the terminal."""
    environment = os.environ | {"REPLAY_ADDRESS": address or "127.0.0.1:1"} | environment
    with _turn, tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        parent = _parent()
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(json.dumps([arguments, environment, os.getcwd(), out.name, err.name]) + "\n")
        parent.stdin.flush()
        status = int(parent.stdout.readline())
        said, complained = (Path(file.name).read_text() for file in (out, err))
    return subprocess.CompletedProcess(arguments, status, said, complained)


def fails(*arguments: str, status: int = 1, address: str = "", **environment: str) -> str:
    """The one line on stderr with which a command ends that says nothing else."""
    done = run_replay(*arguments, address=address, **environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1), done
    return done.stderr
