"""Running sides: the server and the clients of one side of a comparison, started when they are first needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.cells import CHECKPOINT, Side
from benchmarks.environments import (
    CERTIFICATE,
    FILES,
    KEY,
    OURS,
    REDIS,
    REVERB,
    ROOT,
    TRANSFERQUEUE,
    BuiltEnvironment,
    RunningEnvironment,
    ensure_certificate,
)
from benchmarks.loops import Result, Task
from benchmarks.processes import Client, Failed, Server, connect_all, end_all, run_all

_FILLERS = 4
"""Clients that fill tables."""
_IDLE_SECONDS = 0.5
"""Seconds after its start in which a server becomes idle."""
_RESTART_SECONDS = 600.0
"""Seconds that a server has to load its tables."""
_CHECKPOINT_SECONDS = 60.0
"""A tenth of the seconds that a server has to write its tables."""


@dataclass(frozen=True)
class System:
    environment: RunningEnvironment | BuiltEnvironment
    client_package: str = ""
    """The package that users import; empty: the time of the import is not measured."""


SYSTEMS = {
    "ours": System(OURS, "replay_client"),
    "ours_tcp": System(OURS),
    "ours_tls": System(OURS),
    "reverb": System(REVERB, "reverb"),
    "redis": System(REDIS),
    "transferqueue": System(TRANSFERQUEUE),
    "ray_store": System(TRANSFERQUEUE),
    "zmq_pickle": System(TRANSFERQUEUE),
}


class RunningSide:
    """One side, for any number of measurements. After a failure its processes are started again."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._system = SYSTEMS[side.system]
        self._server: Server | None = None
        self._clients: list[Client] = []
        self._folder: Path | None = None

    def measure(self, task: Task, clients: int, beside: Task | None = None) -> list[Result]:
        """The results of the clients, or those of the one `beside` them. Raises Failed."""
        try:
            if task.operation == "idle_memory":
                return [self._idle_memory()]
            if task.operation == "import_time":
                return [self._import_time()]
            if task.operation == "restart":
                return [self._restart(task)]
            self._start()
            tasks = [replace(task, seed=row) for row in range(clients)]
            if beside is None:
                return run_all(self._enough_clients(clients), tasks)
            return run_all(self._enough_clients(clients + 1), [*tasks, beside])[-1:]
        except Failed:
            self.stop()
            raise

    def stop(self) -> None:
        self._kill()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _kill(self) -> None:
        end_all(self._clients)
        self._clients = []
        if self._server is not None:
            self._server.end()
            self._server = None

    def _start(self) -> None:
        if self._server is not None or not self._side.tables:
            return
        if self._side.durability:
            FILES.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=f"{self._side.system}-", dir=FILES))
        self._server = serve(self._side, self._folder)
        connect_all(self._clients, self._address)
        for fill in self._side.fills:
            self._fill(fill)

    def _fill(self, fill: Task) -> None:
        clients = self._enough_clients(min(_FILLERS, fill.items))
        shares = [len(range(row, fill.items, len(clients))) for row in range(len(clients))]
        run_all(clients, [replace(fill, items=share, seed=row) for row, share in enumerate(shares)])

    @property
    def _address(self) -> str:
        return "" if self._server is None else self._server.address

    def _enough_clients(self, number: int) -> list[Client]:
        new = [Client(self._system.environment.python, self._side.system) for _ in range(number - len(self._clients))]
        self._clients += new
        connect_all(new, self._address)
        return self._clients[:number]

    def _idle_memory(self) -> Result:
        with serve(self._side) as server:
            time.sleep(_IDLE_SECONDS)
            return {"megabytes": server.resident_bytes() / 1e6}

    def _restart(self, task: Task) -> Result:
        """Fills a fresh server, kills it, and starts it again with its files."""
        self.stop()
        self._start()
        self._fill(replace(task, operation="fill"))
        written = {}
        if self._side.durability == CHECKPOINT:
            patient = replace(task, operation="checkpoint", seconds=_CHECKPOINT_SECONDS)
            written = {"seconds_of_checkpoint": run_all(self._enough_clients(1), [patient])[0]["seconds"]}
        self._kill()
        assert self._folder is not None
        forget(self._folder)
        begin = time.perf_counter()
        self._server = serve(self._side, self._folder, patience=_RESTART_SECONDS)
        seconds = time.perf_counter() - begin
        (found,) = run_all(self._enough_clients(1), [replace(task, operation="size", items=0)])
        self.stop()
        if found["items"] != task.items:
            raise Failed(f"{found['items']} of {task.items} items are there after a restart")
        return {"items": task.items, "seconds": seconds, "nbytes": task.nbytes, **written}

    def _import_time(self) -> Result:
        package = self._system.client_package
        program = f"import time; begin = time.perf_counter(); import {package}; print(time.perf_counter() - begin)"
        command = [str(self._system.environment.python), "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise Failed(f"importing {package} failed: {done.stderr.splitlines()[-1]}")
        return {"seconds": float(done.stdout.split()[-1])}


def serve(side: Side, folder: Path | None = None, patience: float = 60.0) -> Server:
    """Starts a server of a system. `folder`: for its tables; None: they are in memory. Raises Failed."""
    python = str(SYSTEMS[side.system].environment.python)
    tables = json.dumps([vars(table) for table in side.tables])
    kept = [] if folder is None else [str(folder)]
    match side.system:
        case "reverb":
            command = ["-m", "benchmarks.systems.reverb", tables, *kept]
        case "redis":
            command = ["-m", "benchmarks.systems.redis", tables, side.durability, *kept]
        case "zmq_pickle":
            command = ["-m", "benchmarks.systems.zmq_pickle"]
        case _:
            with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
                config.write(configuration(side, folder))
                config.flush()
                command = ["-m", "replay_cli", "serve", "--log-level", "error", "--listen", "127.0.0.1:0"]
                command += ["--config", config.name]
                if side.durability == CHECKPOINT and folder is not None and any(folder.iterdir()):
                    command += ["--restore", "latest"]
                return Server([python, *command], patience)
    return Server([python, *command], patience)


def configuration(side: Side, folder: Path | None) -> str:
    """The TOML of one of our servers."""
    lines = []
    if side.durability == CHECKPOINT:
        lines += ["[checkpoints]", f"dir = {json.dumps(str(folder))}"]
    elif folder is not None:
        lines += ["[server]", f"data_dir = {json.dumps(str(folder))}", f"fsync = {json.dumps(side.durability)}"]
    if side.system == "ours_tls":
        ensure_certificate()
        lines += ["[security]", f'tls_cert = "{CERTIFICATE}"', f'tls_key = "{KEY}"']
    for table in side.tables:
        lines += ["[[tables]]", f'name = "{table.name}"']
        if table.queue:
            lines.append(f'rate_limiter = {{ type = "queue", max_size = {table.max_size} }}')
        else:
            lines += [f'sampler = "{table.sampler}"', f'remover = "{table.remover}"', f"max_size = {table.max_size}"]
    return "\n".join(lines) + "\n"


def forget(folder: Path) -> None:
    """Drops the files of a folder from the cache of the system, as after a start of the machine."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
