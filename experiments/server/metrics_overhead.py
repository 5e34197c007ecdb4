"""What metrics cost: the same load in turn on a server without metrics_address and on one that is scraped every second.

    python -m experiments.server.metrics_overhead [--rounds 15]

Steps of some 20 ms alternate between the two, in the order ABBA, until each has worked for a second; in the middle
of it is one scrape. The ratio of the times of such a round is what counts: what else the machine does in it hits both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.synchronize import Event
from pathlib import Path

from experiments.serving import serve
from replay_client import ReplayClient

CONFIG = '[server]\nmax_bytes = "512MB"\n[[tables]]\nname = "bench"\nmax_bytes = "256MB"\nmax_size = 16384\n'
TABLE = {"bench": 1.0}
ROUND = 1.0
"""Seconds of each side in a round, and from one scrape to the next."""


def scrape(url: str, wanted: Event) -> None:
    """Whenever it is wanted, in a process of its own."""
    while wanted.wait():
        wanted.clear()
        with urllib.request.urlopen(url, timeout=10) as response:
            response.read()


def steps_of(client: ReplayClient, size: int) -> dict[str, Callable[[], object]]:
    """The steps of a client, by figure; the writer is the client's only one and stays open."""
    payload, many = os.urandom(size), 2048 if size < 10_000 else 96
    writer = client.writer(max_in_flight=many)

    def insert() -> None:
        for _ in range(many):
            writer.insert(payload, TABLE)
        writer.flush()

    def acknowledge() -> None:
        for _ in range(16):
            client.insert(payload, TABLE)

    def sample() -> None:
        client.sample("bench", many // 4)

    return {"insert, pipelined": insert, "insert, one by one": acknowledge, "sample": sample}


def seconds_of(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def compare(plain: Callable[[], object], measured: Callable[[], object], wanted: Event) -> float:
    """How much longer the same steps take with metrics, as a ratio: one round."""
    times, scraped = {plain: 0.0, measured: 0.0}, False
    while times[measured] < ROUND:
        for step in (plain, measured, measured, plain):
            if step is measured and not scraped and times[measured] > ROUND / 2:
                scraped = True
                wanted.set()
            times[step] += seconds_of(step)
    return times[measured] / times[plain]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plain = stack.enter_context(serve(folder, CONFIG))
        measured = stack.enter_context(serve(folder, CONFIG, "--metrics-address", "127.0.0.1:0"))
        wanted = multiprocessing.Event()
        url = measured.read(timeout=60.0).split()[-1]
        scraper = multiprocessing.Process(target=scrape, args=(url, wanted), daemon=True)
        scraper.start()
        stack.callback(scraper.kill)
        clients = [stack.enter_context(ReplayClient(server.address)) for server in (plain, measured)]
        for size in (400, 106_000):
            without, with_metrics = (steps_of(client, size) for client in clients)
            for name in without:
                compare(without[name], with_metrics[name], wanted)  # warms up
                ratios = [compare(without[name], with_metrics[name], wanted) for _ in range(options.rounds)]
                low, middle, high = (100 * (ratio - 1) for ratio in statistics.quantiles(ratios, n=4))
                print(f"{size:7} bytes  {name:18} {middle:+5.1f} % (quartiles {low:+.1f}, {high:+.1f})", flush=True)


if __name__ == "__main__":
    main()
