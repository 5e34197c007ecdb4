"""Measures the cost of the page: the same load on one server, with ten viewers of its page and with none.

    python -m experiments.dashboard_overhead [--rounds 12] [--items 20000]

The page and its viewers are two processes that are stopped (SIGSTOP) in every other slice, in the order ABBA; all else
stays as it is. Each viewer follows the stream and asks, as fast as a person clicks, for lists with ever new filters and
for groups. Two ratios are told, each as the median over rounds: throughput, and processor time of the server for each
operation, which other work on the machine disturbs less. The third figure is the share of one processor that the server
works for the page alone, when nothing else asks it: that much throughput the page takes at most.
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil

from benchmarks.processes import Process
from experiments.serving import serve
from replay_client import ReplayClient, group_from_completions

CONFIG = '[server]\nmax_bytes = "2GB"\n[[tables]]\nname = "pool"\nsampler = "prioritized"\nmax_size = {items}\n'
VIEWERS = 10
CLICK = 1.5
"""Seconds between two clicks of a viewer."""
SLICE = 3.0
"""Seconds of load before the page is stopped or goes on."""
IDLE = 20.0
"""Seconds without any load, for the last figure."""
SORTS = ("age", "priority", "reward_mean", "length_mean", "logprob_mean", "times_sampled")


def view(netloc: str, number: int) -> None:
    """One person: follows the stream in a thread, and clicks."""

    def follow() -> None:
        connection = http.client.HTTPConnection(netloc)
        connection.request("GET", "/api/live")
        stream = connection.getresponse()
        while stream.read1(1 << 20):
            pass

    threading.Thread(target=follow, daemon=True).start()
    rng = random.Random(number)

    def ask(path: str) -> bytes:
        connection = http.client.HTTPConnection(netloc, timeout=600)  # one that was stopped may be closed
        connection.request("GET", path)
        return connection.getresponse().read()

    while True:
        time.sleep(rng.uniform(0.5, 1.5) * CLICK)
        query = (
            f"table=pool&sort={rng.choice(SORTS)}&bound=reward_mean:{rng.random() / 2}:1&offset={rng.randrange(500)}"
        )
        listed = ask(f"/api/groups?{query}&limit=100")
        if b'"key":"' in listed:
            key = listed.partition(b'"key":"')[2].partition(b'"')[0].decode()
            ask(f"/api/groups/{key}")


def view_all(netloc: str) -> None:
    for number in range(VIEWERS - 1):
        threading.Thread(target=view, args=(netloc, number), daemon=True).start()
    view(netloc, VIEWERS)


def steps_of(client: ReplayClient, items: int) -> list[Callable[[], int]]:
    """The load: groups of 8 completions of some 60 tokens in, batches out. Each step returns its operations."""
    rng, writer = np.random.default_rng(0), client.writer(max_in_flight=512)
    lengths = [rng.integers(40, 80, size=8) for _ in range(32)]
    payloads = [
        group_from_completions(
            prompt_ids=range(40),
            completions=[rng.integers(0, 1000, size=n) for n in each],
            logprobs=[-rng.random(n) for n in each],
            rewards=(rewards := rng.integers(0, 2, size=8)),
            advantages=rewards - rewards.mean(),
            prompt_id=f"prompt-{row}",
        ).encode()
        for row, each in enumerate(lengths)
    ]

    def insert(count: int = 256) -> int:
        for row in range(count):
            writer.insert(payloads[row % 32], {"pool": 1.0 + row})
        writer.flush()
        return count

    def sample() -> int:
        return len(client.sample("pool", 256))

    insert(items)
    return [insert, sample]


def slice_of(steps: list[Callable[[], int]], server: psutil.Process) -> tuple[float, float]:
    """Operations a second, and seconds of the server's processor for each, over one slice."""
    begin, used, done = time.perf_counter(), sum(server.cpu_times()[:2]), 0
    while (elapsed := time.perf_counter() - begin) < SLICE:
        done += sum(step() for step in steps)
    return done / elapsed, (sum(server.cpu_times()[:2]) - used) / done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--items", type=int, default=20_000, help="groups in the table")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(serve(folder, CONFIG.format(items=options.items)))
        client = stack.enter_context(ReplayClient(server.address))
        steps = steps_of(client, options.items)
        dashboard = f"-m replay_cli --address {server.address} dashboard --port 0 --no-browser"
        page = stack.enter_context(Process([sys.executable, *dashboard.split()]))
        netloc = page.read(timeout=60.0).split("/")[2]
        viewers = multiprocessing.get_context("spawn").Process(target=view_all, args=(netloc,), daemon=True)
        viewers.start()

        def look(looking: bool) -> None:
            for pid in (page.pid, viewers.pid or 0):
                os.kill(pid, signal.SIGCONT if looking else signal.SIGSTOP)

        stack.callback(viewers.kill)
        time.sleep(5.0)  # the first lists, which a page that opens asks for at once
        watched = psutil.Process(server.pid)
        ratios: list[tuple[float, float]] = []
        for number in range(options.rounds):
            sums = {False: [0.0, 0.0], True: [0.0, 0.0]}
            for looking in (False, True, True, False):
                look(looking)
                for at, figure in enumerate(slice_of(steps, watched)):
                    sums[looking][at] += figure
            ratios.append((sums[True][0] / sums[False][0], sums[True][1] / sums[False][1]))
            if number == 0:
                ratios.clear()  # warms up
        for name, column in zip(("throughput", "processor time of the server"), zip(*ratios, strict=True), strict=True):
            low, middle, high = (100 * (ratio - 1) for ratio in statistics.quantiles(column, n=4))
            print(
                f"{VIEWERS} viewers, {options.items} groups: {name} {middle:+.1f} % (quartiles {low:+.1f}, {high:+.1f})"
            )
        alone = []
        for looking in (False, True, True, False):
            look(looking)
            used = sum(watched.cpu_times()[:2])
            time.sleep(IDLE)
            alone.append((sum(watched.cpu_times()[:2]) - used) / IDLE)
        share = (alone[1] + alone[2] - alone[0] - alone[3]) / 2
        print(f"{VIEWERS} viewers, {options.items} groups: the server works {share:.2%} of one processor for the page")


if __name__ == "__main__":
    main()
