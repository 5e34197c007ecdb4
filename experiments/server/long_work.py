"""Long work: for how long the event loop of a server stands still while it works on a million items.

    python -m experiments.server.long_work [--items 1000000]   # prints the table of docs/record/performance.md

The server runs on the main thread, and its client on another one. Beside the server a ticker runs at every turn of the
event loop, and remembers the longest turn. It counts CPU time of that thread: what else the machine does has no part
in it.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import markdown
from replay_client import ReplayClient
from replay_protos import event_loop
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import ReplayServer, TableConfig

TABLE = "replay"
ROWS = 50_000
"""The rows of one insert."""
UPDATED = 300_000
"""Keys of one update."""


class Ticker:
    """Runs once in each turn of the event loop."""

    def __init__(self) -> None:
        self.longest = 0.0

    def reset(self) -> None:
        self.longest = 0.0

    async def run(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest = max(self.longest, now - before)
            before = now


class Load:
    """The client's side: what it does to the server, in order."""

    def __init__(self, address: str, ticker: Ticker, items: int, count: Callable[[], int]) -> None:
        """`count` tells how many items the server holds."""
        import grpc  # after the client, which sets how grpc works

        self._count = count
        self._client = ReplayClient(address, timeout=600.0)
        self._stub = ReplayStub(grpc.insecure_channel(address))
        self._ticker = ticker
        self._items = items
        self._keys = np.zeros(0, dtype=np.uint64)
        self._rng = np.random.default_rng(7)
        self.longest: dict[str, float] = {}
        """CPU seconds of the longest turn, by what was done."""

    def _measure(self, name: str, work: Callable[[], Any]) -> None:
        self._ticker.reset()
        work()
        self._settle()
        self.longest[name] = max(self.longest.get(name, 0.0), self._ticker.longest)

    def _settle(self) -> None:
        """Until all that was removed is cleared away."""
        before, now = -1, self._count()
        while now != before:
            time.sleep(0.2)
            before, now = now, self._count()

    def _insert(self, rows: int) -> None:
        keys = self._rng.integers(1, 1 << 63, rows, dtype=np.uint64)
        self._keys = np.concatenate([self._keys, keys])
        request = pb.InsertRequest(
            keys=keys.tolist(),
            targets=[pb.InsertTarget(table=TABLE, priorities=self._rng.random(rows).tolist())],
            payload_sizes=[8] * rows,
            payloads=bytes(8 * rows),
        )
        response = self._stub.Insert(request, timeout=600)
        assert response.decided == rows, response.errors[:1]
        assert not response.errors, response.errors[:1]

    def _fill(self) -> None:
        def insert_all() -> None:
            while self._keys.size < self._items:
                self._insert(ROWS)

        self._measure(f"inserts of {ROWS:,} rows, while the table grows to {self._items:,}", insert_all)

    def _empty(self, **settings: Any) -> None:
        self._client.update_table(TABLE, max_size=2 * self._items, **settings)
        self._client.reset(TABLE)
        self._settle()
        self._keys = self._keys[:0]

    def run(self) -> None:
        client, many = self._client, f"{self._items:,}"
        self._fill()
        updates = dict.fromkeys(self._keys[:UPDATED].tolist(), 0.5)
        self._measure(f"new priorities for {UPDATED:,} keys", lambda: client.update_priorities(TABLE, updates))
        half = self._items // 2
        self._measure(f"`max_size` halved, of {many} items", lambda: client.update_table(TABLE, max_size=half))
        self._keys = self._keys[half:]
        client.update_table(TABLE, max_size=2 * self._items)
        self._measure(f"an insert of {ROWS:,} rows", lambda: self._insert(ROWS))
        self._fill()
        self._measure(f"a reset of {many} items", lambda: client.reset(TABLE))
        self._empty()
        self._fill()
        self._measure(f"`max_size=1`, of {many} items", lambda: client.update_table(TABLE, max_size=1))
        self._empty(max_staleness=1)
        self._fill()
        self._measure(f"a version that drops {many} stale items", lambda: client.set_policy_version(5, "weights"))
        self._client.close()


async def serve(items: int, sampler: str, data_dir: Path | None) -> dict[str, float]:
    table = TableConfig(name=TABLE, sampler=sampler, max_size=2 * items)
    server = ReplayServer([table], 0, data_dir=data_dir, shared_memory=False)
    started, ticker = asyncio.Event(), Ticker()
    running = asyncio.create_task(server.run(started.set))
    await started.wait()
    ticking = asyncio.create_task(ticker.run())
    load = Load(server.address, ticker, items, lambda: server.items)
    try:
        await asyncio.to_thread(load.run)
    finally:
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking
        server.request_stop()
        await running
    return load.longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--samplers", nargs="+", default=["prioritized"])
    arguments = parser.parse_args()
    for sampler in arguments.samplers:
        in_memory = event_loop.run(serve(arguments.items, sampler, None))
        with tempfile.TemporaryDirectory() as folder:
            durable = event_loop.run(serve(arguments.items, sampler, Path(folder) / "data"))
        rows = [(what, f"{1e3 * in_memory[what]:.0f}", f"{1e3 * durable[what]:.0f}") for what in durable]
        print(f"{sampler}: the longest turn of the event loop, ms of CPU\n")
        print(markdown(("", "in memory", "durable"), rows), flush=True)


if __name__ == "__main__":
    main()
