"""What several tests make: servers as processes, ports, ranks, and what is read of a server.

Groups and waits are those of `replay_client.testing`, which users have too.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import multiprocessing
import os
import signal
import socket
import subprocess
import tempfile
import traceback
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from prometheus_client import parser as prometheus
from prometheus_client.openmetrics import parser as openmetrics

from replay_client import ItemInfo, ReplayClient, RolloutGroup
from replay_client.scoring import group_advantages
from replay_client.testing import PATIENCE, async_until, make_group, until  # noqa: F401, tests import them from here
from replay_server.storage.memory import MemoryStorage
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.columns import Columns, IntArray
from replay_server.tables.config import TableConfig
from replay_server.tables.extensions import configured
from replay_server.tables.items import Storage
from replay_server.tables.table import InsertBatch, Table
from tests.commands import COMMAND, Running


def make_sequences(**fields: Any) -> RolloutGroup:
    """A group of two rollouts: one of two sequences of 1 and 2 tokens, and one of one sequence, of 2 tokens behind a
    context of one."""
    group = make_group(lengths=(1, 2, 3), logprobs=(-1.0, -1.0, -1.0, np.nan, -1.0, -1.0), context_lengths=(0, 0, 1))
    return replace(
        group,
        **{
            "sequence_counts": [2, 1],
            "rewards": [1.0, 0.0],
            "advantages": group_advantages([1.0, 0.0]),
            "finish_reasons": ("stop", "length"),
            **fields,
        },
    )


def in_a_thread(call: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
    """What `call` answers or raises, as soon as the thread that it has for itself has ended it."""
    thread = ThreadPoolExecutor(1)
    try:
        return thread.submit(call, *arguments, **options)
    finally:
        thread.shutdown(wait=False)


def every_item(client: ReplayClient, table: str) -> list[ItemInfo]:
    """The items of a table, page after page."""
    items, page = [], ""
    while True:
        found = client.list_items(table, limit=5000, page=page)
        items += found.items
        if not (page := found.next_page):
            return items


def keys_in(client: ReplayClient, table: str) -> list[int]:
    return sorted(item.key for item in every_item(client, table))


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


@contextmanager
def stopped_clock() -> Iterator[Callable[[float], None]]:
    """Stops the clock of the running event loop. It goes on by as many seconds as the function is told, by any thread.

    So what has a time limit there, such as `asyncio.timeout`, ends when the test says so, and on no machine before.
    """
    loop = asyncio.get_running_loop()
    now = [loop.time()]

    def go_on(seconds: float) -> None:
        now[0] += seconds
        loop.call_soon_threadsafe(lambda: None)  # it looks at its clock

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "time", lambda: now[0])
        yield go_on


async def turns(count: int = 200) -> None:
    """Lets the event loop turn: what waits for nothing outside of this thread has happened afterwards."""
    for _ in range(count):
        await asyncio.sleep(0)


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

    `more` goes to `start_server`.
    """
    path = tmp_path / "replay.toml"
    path.write_text(config)
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
    context.set_forkserver_preload(["tests.trainer.factories", module or function.__module__])
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


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system in memory of this size, such as 24m, at `folder`; skips where none can be mounted."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    mount = subprocess.run(command, capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mount.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """A Ctrl-C raises KeyboardInterrupt, whatever another test of this process has set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def slots_of(columns: Columns) -> dict[int, int]:
    """The slot of each key that is here."""
    slots = columns.occupied()
    return dict(zip(columns.key[slots].tolist(), slots.tolist(), strict=True))


def rows_of(
    keys: Iterable[int],
    priorities: Mapping[str, float],
    *,
    version: int = 0,
    payload: bytes = b"x",
    permits: int = 0,
    labels: Any = None,
) -> InsertBatch:
    """Rows that differ in nothing but their keys. `priorities`: by the name of the table."""
    keys = list(keys)
    n = len(keys)
    by_table = {name: np.full(n, priority, np.float64) for name, priority in priorities.items()}
    return InsertBatch(keys, by_table, np.full(n, version), np.full(n, len(payload)), [(payload,)] * n, permits, labels)


def insert_rows(table: Table, priorities: Mapping[int, float], versions: Any = 0, labels: Any = None) -> None:
    """Inserts items of one byte, by key, into a table."""
    ones = np.ones(len(priorities), dtype=np.int64)
    batch = InsertBatch([*priorities], {}, ones * versions, ones, (), labels=labels)
    table.insert(batch, np.array([*priorities.values()], dtype=np.float64))


def remove_rows(columns: Columns, slots: IntArray) -> None:
    """What becomes of the rows that leave a table which no buffer has."""
    columns.leave(slots)
    columns.free(slots)


def replay_buffer(
    tables: Sequence[TableConfig],
    clock: Callable[[], float],
    *,
    admission: Any = None,
    storage: Storage | None = None,
    **options: Any,
) -> ReplayBuffer:
    """A buffer with the extensions that these sections ask for."""
    extensions = configured(tables, clock, admission)
    return ReplayBuffer(tables, clock, storage or MemoryStorage(), extensions=extensions, **options)
