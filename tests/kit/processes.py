"""The command `replay`, servers and ranks as processes, and the ports that they listen on.

A command is forked from a process that has imported its modules: so it starts at once. There are two such parents: a
light one, and one that has torch and transformers too, whose import costs five seconds of a core. A command is a
process of its own all the same: it has its own environment, folder and output, it gets its own signals, and it can be
killed. Tests of the imports, and of what a process says before them, start Python anew.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from select import select
from typing import IO, Any, Self

from prometheus_client import parser as prometheus
from prometheus_client.openmetrics import parser as openmetrics

from replay_client import ReplayClient
from replay_client.testing import PATIENCE, until

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
    assert done.returncode == status, done
    assert done.stdout == "", done
    assert done.stderr.count("\n") == 1, done
    return done.stderr


_FIRST_PORT, _LAST_PORT, _BLOCK = 12_000, 30_000, 300

_block: tuple[int, Iterator[int]] | None = None
"""The process that took a block of ports, and the ports of that block, again and again."""


def free_port() -> int:
    """A port that nobody listens on now, on any address, and that nobody takes while its server is away.

    The system gives clients, and servers that ask for port 0, ports from 32768 on. One of those is gone as soon as
    anybody connects to anything. Each process of tests has a block of ports of its own, as long as it lives.
    """
    global _block
    if _block is None or _block[0] != os.getpid():  # a forked process has the block of its parent
        _block = os.getpid(), _take_block()
    for port in itertools.islice(_block[1], _BLOCK):
        with socket.socket() as free, suppress(OSError):
            # As servers do: connections of the server before may linger.
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("0.0.0.0", port))  # torch's store takes all addresses
            return port
    raise AssertionError(f"none of the {_BLOCK} ports of this process is free")


def _take_block() -> Iterator[int]:
    """The ports of a block that no other process of tests on this machine has."""
    folder = Path(tempfile.gettempdir(), f"replay-test-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    blocks = range(_FIRST_PORT, _LAST_PORT, _BLOCK)
    for turn in range(len(blocks)):
        first = blocks[(os.getpid() + turn) % len(blocks)]
        with suppress(OSError):
            file = os.open(folder / str(first), os.O_CREAT | os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends
            except OSError:
                os.close(file)
                raise
            return itertools.cycle(range(first, first + _BLOCK))
    raise AssertionError(f"other processes of tests have all blocks of ports: look into {folder}")


@dataclass
class ServerProcess:
    """`replay serve` as a process of its own."""

    process: Running | subprocess.Popen[str]
    address: str

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def start_server(
    config: Path | None = None,
    *options: str,
    address: str = "127.0.0.1:0",
    stderr: IO[str] | int | None = None,
    before: Callable[[], None] | None = None,
    anew: bool = False,
    **environment: str,
) -> ServerProcess:
    """Starts `replay serve` with a file of configuration (None: the default tables). Returns when clients can connect.

    `before` runs in the process before the server does. With it, with an environment, or `anew`, Python starts anew.
    Otherwise the server begins with the modules that every server imports.
    """
    command = ["serve", "--listen", address, "--log-level", "warning"]
    command += [*(["--config", str(config)] if config else []), *options]
    process: Running | subprocess.Popen[str]
    if before or environment or anew:
        process = subprocess.Popen(
            [*COMMAND, *command],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=before,
            env=os.environ | environment,
        )
    else:
        process = Running(*command, stdout=subprocess.PIPE, stderr=stderr)
    assert process.stdout is not None
    line = process.stdout.readline()
    started = ServerProcess(process, line.removeprefix("listening on ").strip())
    if not line.startswith("listening on "):
        started.kill()
        raise AssertionError(f"the server did not start: {line!r}")
    return started


@contextmanager
def server_process(
    tmp_path: Path, config: str = "", address: str = "127.0.0.1:0", options: Sequence[str] = (), **more: Any
) -> Iterator[ServerProcess]:
    """Runs `replay serve` with a TOML configuration ("": the default tables) until the end of the block.

    In `config`, {folder} stands for `tmp_path`: a server takes a relative path from the folder in which it is started,
    and that is the repository. `more` goes to `start_server`.
    """
    path = tmp_path / "replay.toml"
    path.write_text(config.replace("{folder}", str(tmp_path)))
    server = start_server(path if config else None, *options, address=address, **more)
    try:
        yield server
    finally:
        server.kill()


def start(function: Callable[..., Any], *arguments: Any, module: str = "", **options: Any) -> BaseProcess:
    """A process that runs the function.

    Its parent is a server of processes, which imports modules before the first one: what all processes of a trainer
    need, whoever comes first, since it takes five seconds; and that of the function, unless `module` names another.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.kit.trainers", module or function.__module__])
    process = context.Process(target=function, args=arguments, kwargs=options, daemon=True)
    process.start()
    return process


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Runs the function as each of `size` ranks of torch.distributed. Returns what made each of them fail, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        errors, port = [Path(folder, str(rank)) for rank in range(size)], free_port()
        processes = [
            start(_run_rank, rank, size, port, error, function, *arguments, module=function.__module__)
            for rank, error in enumerate(errors)
        ]
        try:
            for process in processes:
                process.join(500)
        finally:
            for process in processes:
                process.kill()
        said = [error.read_text() if error.exists() else "" for error in errors]
        assert [process.exitcode for process in processes] == [int(bool(words)) for words in said], said
        return said


def _run_rank(rank: int, size: int, port: int, error: Path, function: Callable[..., Any], *arguments: Any) -> None:
    if size > 1:
        group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in group.items()} | {"MASTER_ADDR": "127.0.0.1"}
    try:
        function(*arguments)
    except BaseException:
        error.write_text(traceback.format_exc())
        raise


def scrape(address: str, accept: str = "") -> dict[tuple[Any, ...], float]:
    """What Prometheus gets from a server: values by metric and labels, as `sample_of` names them."""
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        text, kind = response.read().decode(), response.headers["Content-Type"]
    parse = openmetrics if "openmetrics" in kind else prometheus
    samples = (sample for family in parse.text_string_to_metric_families(text) for sample in family.samples)
    return {sample_of(sample.name, **sample.labels): sample.value for sample in samples}


def sample_of(metric: str, **labels: str) -> tuple[Any, ...]:
    return (metric, *sorted(labels.items()))


def tokens_file(folder: Path, *tokens: str) -> Path:
    """A file of tokens ("read-only:…") that its owner alone can read."""
    path = folder / "tokens"
    path.write_text("\n".join(tokens))
    path.chmod(0o600)
    return path


class Servers:
    """`replay serve`, one or several: each is killed and comes back on its port, over what it has stored."""

    def __init__(self, folder: Path, configs: Sequence[str], named: bool = False) -> None:
        """`configs`: one for each server, with {folder} for its own folder. `named`: they are shards "a", "b", …"""
        self._configs = [folder / f"replay-{number}.toml" for number in range(len(configs))]
        for number, (path, config) in enumerate(zip(self._configs, configs, strict=True)):
            path.write_text(config.replace("{folder}", f"{folder}/shard-{number}"))
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in configs]
        self.address = ",".join(
            f"{chr(97 + i)}={address}" if named else address for i, address in enumerate(self.addresses)
        )
        self.running = [self._start(*each) for each in zip(self._configs, self.addresses, strict=True)]

    def _start(self, config: Path, address: str = "127.0.0.1:0") -> ServerProcess:
        return start_server(config, address=address)

    def kill(self, number: int = 0) -> None:
        self.running[number].kill()

    def restart(self, number: int = 0) -> None:
        self.running[number] = self._start(self._configs[number], self.addresses[number])

    def end_leases(self, number: int) -> None:
        """Ends the leases of a killed server while its clients cannot see it."""
        server = self._start(self._configs[number])
        with ReplayClient(server.address) as client:
            until(lambda: client.server_info().tables["rollouts"].reserved == 0)
        server.kill()

    def close(self) -> None:
        for server in self.running:
            server.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
