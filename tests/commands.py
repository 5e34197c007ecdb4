"""The command `replay` as a process, forked from one that has imported its modules: so it starts at once.

There are two such parents: a light one, and one that has torch and transformers too, whose import costs five seconds
of a core. A command is a process of its own all the same: it has its own environment, folder and output, it gets its
own signals, and it can be killed. Tests of the imports, and of what a process says before them, start Python anew.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from select import select
from typing import IO, Any

COMMAND = (sys.executable, "-m", "replay_cli")

# Reads a message for each command: its arguments, environment and folder, with what becomes its standard streams, and
# a pipe. A child between parent and command writes into that pipe the id of the command and, when it has ended, its
# status. A `quick` command ends as a child of multiprocessing does: to take all modules apart takes longer than most
# commands, and 1.4 s with torch.
_PARENT = """
import atexit, importlib, json, os, signal, socket, sys, threading
for module in sys.argv[2:]:
    importlib.import_module(module)
messages = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    message, files, *_ = socket.recv_fds(messages, 1 << 20, 4)
    if not message:
        os._exit(0)
    if not os.fork():
        break
    for file in files:
        os.close(file)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
messages.close()
*streams, status = files
if child := os.fork():
    for stream in streams:
        os.close(stream)
    os.write(status, b"%d " % child)
    os.write(status, b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)
os.close(status)
arguments, environment, folder, quick = json.loads(message)
os.environ.clear()
os.environ.update(environment)
os.chdir(folder)
for number, stream in enumerate(streams):
    os.dup2(stream, number)
    os.close(stream)
sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
sys.argv = ["replay", *arguments]
from replay_cli import main
if not quick:
    main()
try:
    main()
except SystemExit as end:
    if not isinstance(end.code, int | None):
        raise
    ended = end.code or 0
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(ended)
"""
_LIGHT = ("replay_client", "replay_server.config", "replay_server.server", "replay_cli.app")
_HEAVY = (
    *("replay_trainer.grpo", "replay_trainer.evaluation", "replay_generator.engines.transformers"),
    *("transformers.models.auto.tokenization_auto", "transformers.models.qwen2.modeling_qwen2"),
)
_SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""torch and transformers read them when they are imported."""


@cache
def _parent(*modules: str) -> socket.socket:
    """The messages of a parent, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-c", _PARENT, str(theirs.fileno()), *modules]
        subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ | _SETTINGS)
    return ours


class Running:
    """A command that has been started; its methods and streams are those of `subprocess.Popen`."""

    def __init__(
        self,
        *arguments: str,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        quick: bool = False,
    ) -> None:
        needs_torch = not {"train", "generate"}.isdisjoint(arguments)
        message = json.dumps([arguments, dict(os.environ if env is None else env), str(cwd or os.getcwd()), quick])
        self.args = arguments
        self.returncode: int | None = None
        self._turn = threading.Lock()
        self._status, status = os.pipe()
        self.stdout, out = self._stream(stdout, 1)
        self.stderr, err = self._stream(stderr, 2) if stderr != subprocess.STDOUT else (None, os.dup(out))
        nothing = os.open(os.devnull, os.O_RDONLY)
        files = [nothing, out, err, status]
        socket.send_fds(_parent(*_LIGHT, *_HEAVY * needs_torch), [message.encode()], files)
        for file in files:
            os.close(file)
        said = b""
        while not said.endswith(b" "):
            byte = os.read(self._status, 1)
            assert byte, "the parent of the commands has died"
            said += byte
        self.pid = int(said)

    @staticmethod
    def _stream(wanted: IO[Any] | int | None, number: int) -> tuple[IO[str] | None, int]:
        """What to read from, if it is a pipe; and the descriptor for the command."""
        if wanted == subprocess.PIPE:
            read, write = os.pipe()
            return open(read, encoding="utf-8"), write
        if wanted == subprocess.DEVNULL:
            return None, os.open(os.devnull, os.O_WRONLY)
        return None, os.dup(number if wanted is None else wanted if isinstance(wanted, int) else wanted.fileno())

    def wait(self, timeout: float | None = None) -> int:
        with self._turn:
            if self.returncode is None:
                if not select([self._status], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(["replay", *self.args], timeout or 0.0)
                self.returncode = int(os.read(self._status, 16))
                os.close(self._status)
            return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote into its pipes. It has ended then."""
        said = {1: "", 2: ""}

        def read(number: int, stream: IO[str]) -> None:
            said[number] = stream.read()

        pipes = [(number, pipe) for number, pipe in ((1, self.stdout), (2, self.stderr)) if pipe is not None]
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in pipes]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader, (_, pipe) in zip(readers, pipes, strict=True):
            reader.join()
            pipe.close()
        return said[1], said[2]

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


def run_replay(*arguments: str, address: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, with nobody at the terminal."""
    environment = os.environ | {"REPLAY_ADDRESS": address or "127.0.0.1:1"} | environment
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        status = Running(*arguments, stdout=out, stderr=err, env=environment, quick=True).wait()
        said, complained = (Path(file.name).read_text() for file in (out, err))
    return subprocess.CompletedProcess(arguments, status, said, complained)


def fails(*arguments: str, status: int = 1, address: str = "", **environment: str) -> str:
    """The one line on stderr with which a command ends that says nothing else."""
    done = run_replay(*arguments, address=address, **environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1), done
    return done.stderr
