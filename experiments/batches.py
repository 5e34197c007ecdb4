"""`python -m experiments.batches ROUNDS CHECKOUT...`: what a batch costs in processor time, before and after a change.

One process holds client and servers, so that its processor time is all that an operation costs. Each checkout of this
repository measures itself in a process of its own; rounds alternate which checkout goes first.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("", "client", "protos", "trainer")
SMALL, LARGE = 400, 106_000
"""Bytes of a payload."""


def measure() -> dict[str, float]:
    """Microseconds of processor time for each operation, by name."""
    from replay_client import ReplayClient
    from replay_server import ReplayServer, TableConfig

    costs: dict[str, float] = {}

    def tables() -> list[TableConfig]:
        return [
            TableConfig(name="small", sampler="uniform"),
            TableConfig(name="large", sampler="uniform", max_size=512),
        ]

    def time_of(name: str, times: int, operation: Callable[[int], None]) -> None:
        operation(times // 10)
        begin = time.process_time()
        operation(times)
        costs[name] = 1e6 * (time.process_time() - begin) / times

    def insert(client: ReplayClient, table: str, nbytes: int) -> Callable[[int], None]:
        def operation(times: int) -> None:
            with client.writer() as writer:
                for _ in range(times):
                    writer.insert(os.urandom(nbytes), {table: 1.0})

        return operation

    def draw(client: ReplayClient, table: str, rows: int) -> Callable[[int], None]:
        def operation(times: int) -> None:
            with client.sampler(table, rows) as batches:
                for _ in range(times):
                    next(batches)

        return operation

    def repeat(call: Callable[[], object]) -> Callable[[int], None]:
        def operation(times: int) -> None:
            for _ in range(times):
                call()

        return operation

    with ReplayServer(tables=tables(), port=0) as server, ReplayServer(tables=tables(), port=0) as other:
        for way, shared_memory in (("rings", True), ("TCP", False)):
            with ReplayClient(server.address, shared_memory=shared_memory) as client:
                time_of(f"{way}: insert 400 B", 20_000, insert(client, "small", SMALL))
                time_of(f"{way}: insert 106 kB", 3_000, insert(client, "large", LARGE))
                time_of(
                    f"{way}: insert one by one", 1_500, repeat(lambda c=client: c.insert(bytes(SMALL), {"small": 1.0}))
                )
                time_of(f"{way}: sampler, 64 x 400 B", 1_500, draw(client, "small", 64))
                time_of(f"{way}: sampler, 8 x 106 kB", 600, draw(client, "large", 8))
                time_of(f"{way}: sample(1)", 1_000, repeat(lambda c=client: c.sample("small", 1)))
                time_of(f"{way}: sample(32)", 800, repeat(lambda c=client: c.sample("small", 32)))
                time_of(
                    f"{way}: sample(8) and acknowledge",
                    600,
                    repeat(lambda c=client: c.acknowledge(c.sample("small", 8, lease=30.0))),
                )
        with ReplayClient([server.address, other.address]) as client:
            insert(client, "small", SMALL)(4_000)
            time_of("two shards: sampler, 32 x 400 B", 500, draw(client, "small", 32))
            time_of("two shards: sample(32)", 400, repeat(lambda: client.sample("small", 32)))
    return costs


def main() -> None:
    rounds, checkouts = int(sys.argv[1]), [Path(name).resolve() for name in sys.argv[2:]]
    results: dict[Path, list[dict[str, float]]] = {checkout: [] for checkout in checkouts}
    for number in range(rounds):
        for checkout in checkouts if number % 2 == 0 else checkouts[::-1]:
            path = os.pathsep.join(str(checkout / package) for package in PACKAGES)
            ended = subprocess.run(
                [sys.executable, __file__], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=True
            )
            results[checkout].append(json.loads(ended.stdout))
    first = results[checkouts[0]]
    for name in first[0]:
        costs = [f"{statistics.median(each[name] for each in results[checkout]):9.1f}" for checkout in checkouts]
        ratios = [new[name] / old[name] for old, new in zip(first, results[checkouts[-1]], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name:34}", *costs, "us, last over first:", spread)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        print(json.dumps(measure()))
