"""Running sides: the server and the clients of one side of a comparison, started when they are first needed."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.cells import Side, Table
from benchmarks.environments import OURS, REVERB, ROOT, TRANSFERQUEUE, BuiltEnvironment, RunningEnvironment
from benchmarks.loops import Result, Task
from benchmarks.processes import Client, Failed, Server, connect_all, end_all, run_all

_FILLERS = 4
"""Clients that fill tables."""
_IDLE_SECONDS = 0.5
"""After which a server that was started is idle."""


@dataclass(frozen=True)
class System:
    environment: RunningEnvironment | BuiltEnvironment
    client_package: str


SYSTEMS = {
    "ours": System(OURS, "replay_client"),
    "ours_tcp": System(OURS, "replay_client"),
    "reverb": System(REVERB, "reverb"),
    "transferqueue": System(TRANSFERQUEUE, "transfer_queue"),
}


class RunningSide:
    """One side, for any number of measurements. After a failure it starts afresh."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._system = SYSTEMS[side.system]
        self._server: Server | None = None
        self._clients: list[Client] = []

    def measure(self, task: Task, clients: int) -> list[Result]:
        """The results of the clients. Raises Failed."""
        try:
            if task.operation == "idle_memory":
                return [self._idle_memory()]
            if task.operation == "import_time":
                return [self._import_time()]
            self._start()
            return run_all(self._enough_clients(clients), [replace(task, seed=row) for row in range(clients)])
        except Failed:
            self.stop()
            raise

    def stop(self) -> None:
        end_all(self._clients)
        self._clients = []
        if self._server is not None:
            self._server.end()
            self._server = None

    def _start(self) -> None:
        if self._server is not None or not self._side.tables:
            return
        self._server = serve(self._side.system, self._side.tables)
        connect_all(self._clients, self._address)
        for fill in self._side.fills:
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
        with serve(self._side.system, self._side.tables) as server:
            time.sleep(_IDLE_SECONDS)
            return {"megabytes": server.resident_bytes() / 1e6}

    def _import_time(self) -> Result:
        package = self._system.client_package
        program = f"import time; begin = time.perf_counter(); import {package}; print(time.perf_counter() - begin)"
        command = [str(self._system.environment.python), "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise Failed(f"importing {package} failed: {done.stderr.splitlines()[-1]}")
        return {"seconds": float(done.stdout.split()[-1])}


def serve(system: str, tables: Sequence[Table]) -> Server:
    """Starts a server of a system with these tables. Raises Failed."""
    python = str(SYSTEMS[system].environment.python)
    if system == "reverb":
        return Server([python, "-m", "benchmarks.systems.reverb", json.dumps([vars(table) for table in tables])])
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        for table in tables:
            config.write("[[tables]]\n")
            config.writelines(f"{name} = {json.dumps(value)}\n" for name, value in vars(table).items())
        config.flush()
        command = [python, "-m", "replay_server.cli", "serve", "--log-level", "error"]
        return Server([*command, "--address", "127.0.0.1:0", "--config", config.name])
