"""`replay bench`: measures how fast a server is, from this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from replay_server.cli.connection import ask, complete_table, connect
from replay_server.cli.options import with_access
from replay_server.cli.output import AsJson, Yes, confirm, console, fail, misuse, print_json

if TYPE_CHECKING:
    from replay_client import ReplayClient

_IN_FLIGHT = 64 << 20
"""Most payload bytes that the writer keeps in flight."""
_BATCH = 8 << 20
"""About as many payload bytes are in one batch of the sampler."""
_SAMPLE_TIMEOUT = 5.0


@with_access
def bench(
    access: dict[str, Any],
    size: Annotated[str, typer.Option(help="Bytes of a group, for example 4kB; 106kB is 8 completions of 1024.")] = (
        "106kB"
    ),
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds to measure each figure.")] = 2.0,
    table: Annotated[
        str | None,
        typer.Option(
            help="A table of the running server, which is filled and then emptied. [a server of its own]",
            autocompletion=complete_table,
        ),
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Measure inserts, acknowledgements and samples of one client, on a new server or on a spare table of yours."""
    from replay_server.tables.config import parse_bytes

    try:
        nbytes = parse_bytes(size)
    except ValueError as error:
        misuse(f"--size: {error}")
    if table is None:
        with own_server() as client:
            figures = ask(lambda: measure(client, "bench", os.urandom(nbytes), seconds))
    else:
        confirm(f"Fill {table} of the running server with random bytes and then empty it?", yes)
        with connect(access, timeout=30.0) as client:
            figures = ask(lambda: measure(client, table, os.urandom(nbytes), seconds))
    if as_json:
        print_json({"bytes": nbytes, "seconds": seconds} | figures)
        return
    megabytes = nbytes / 1e6
    out = console()
    out.print(f"payloads of {nbytes} bytes, one client")
    for name in ("insert", "sample"):
        rate = figures[f"{name}_per_second"]
        out.print(f"{name:8} {rate:10.0f} a second  {rate * megabytes:8.1f} MB/s")
    out.print(f"ack      {figures['ack_p50_ms']:10.3f} ms median  {figures['ack_p99_ms']:.3f} ms p99")


def measure(client: ReplayClient, table: str, payload: bytes, seconds: float) -> dict[str, float]:
    """Items per second of a writer and a sampler, and milliseconds of single inserts. Empties the table at the end."""
    inserts = _insert_rate(client, table, payload, seconds)
    milliseconds = _insert_times(client, table, payload, seconds)
    held = client.server_info(tables=[table]).tables[table].size
    batch = max(1, min(256, held, _BATCH // max(1, len(payload))))
    with client.sampler(table, batch, timeout=_SAMPLE_TIMEOUT) as sampler:
        samples = _rate(lambda: len(next(sampler)), seconds)
    client.reset(table)
    p50, p99 = np.quantile(milliseconds, [0.5, 0.99])
    return {
        "insert_per_second": inserts,
        "sample_per_second": samples,
        "ack_p50_ms": float(p50),
        "ack_p99_ms": float(p99),
    }


def _insert_rate(client: ReplayClient, table: str, payload: bytes, seconds: float) -> float:
    in_flight = max(1, min(1024, _IN_FLIGHT // max(1, len(payload))))
    priorities = {table: 1.0}
    with client.writer(max_in_flight=in_flight) as writer:

        def fill() -> int:
            for _ in range(in_flight):
                writer.insert(payload, priorities)
            return in_flight

        return _rate(fill, seconds, finish=writer.flush)


def _insert_times(client: ReplayClient, table: str, payload: bytes, seconds: float) -> list[float]:
    """Milliseconds of each of several inserts, one after the other."""
    milliseconds: list[float] = []
    end = time.perf_counter() + seconds
    while not milliseconds or time.perf_counter() < end:
        begin = time.perf_counter()
        client.insert(payload, {table: 1.0})
        milliseconds.append(1000 * (time.perf_counter() - begin))
    return milliseconds


def _rate(step: Callable[[], int], seconds: float, finish: Callable[[], None] = lambda: None) -> float:
    """How many items a second `step` moves, after one step that does not count."""
    step()
    finish()
    begin, done = time.perf_counter(), step()  # at least once, however long the process is kept waiting
    while time.perf_counter() - begin < seconds:
        done += step()
    finish()
    return done / (time.perf_counter() - begin)


@contextmanager
def own_server() -> Iterator[ReplayClient]:
    """A client of a server in a process of its own, with one table `bench` of at most 256 MB."""
    from replay_client import ReplayClient

    code = (
        "import contextlib, os, sys; from replay_server import ReplayServer, TableConfig\n"
        "with ReplayServer(tables=[TableConfig(name='bench', max_bytes='256MB', max_size=16384)], port=0) as server:\n"
        # A signal may have ended the command already: then nobody reads the address, and stdin is at its end.
        "    with contextlib.suppress(BrokenPipeError): os.write(1, server.address.encode() + b'\\n')\n"
        "    sys.stdin.read()\n"
    )
    # In a session of its own: Ctrl-C is for the command, which ends its server.
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            if not address:
                fail("the server of the benchmark did not start")
            with ReplayClient(address) as client:
                yield client
        finally:
            process.terminate()
            process.stdin.close()
