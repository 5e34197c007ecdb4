"""Measures what an archive costs: two servers get the same load in turn, and one of them has an archive.

    python -m experiments.server.archive_overhead [--rounds 9] [--rate GROUPS]

Groups of 8 completions of 1,000 tokens pass through a queue: one process inserts them with a writer, and samples them.
Without --rate it does so as fast as it can, which no generator does. Each side works for some seconds, in the order
ABBA; before a side begins, the archiver has nothing to do. So its work hits only the side that has it. Beside the ratio
stands the share of the groups that the archiver could not keep up with: they were let go, and counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.processes import Process
from experiments.serving import serve
from replay_client import ReplayClient, RolloutGroup

CONFIG = """
[[tables]]
name = "rollouts"
rate_limiter = { type = "queue", max_size = 512 }
"""
ROUND = 2.0
"""Seconds of each side in a quarter of a round."""
BATCH = 32
"""Groups that are inserted and then sampled."""


def make_group() -> RolloutGroup:
    rng, tokens = np.random.default_rng(1), 8 * 1000
    return RolloutGroup(
        prompt_ids=rng.integers(0, 30_000, 256, dtype=np.int32),
        completion_ids=rng.integers(0, 30_000, tokens, dtype=np.int32),
        completion_lengths=np.full(8, 1000, np.int32),
        rollout_logprobs=rng.uniform(-3, 0, tokens).astype(np.float32),
        rewards=rng.uniform(0, 1, 8).astype(np.float32),
        advantages=rng.uniform(-1, 1, 8).astype(np.float32),
        policy_version=0,
        prompt_id="prompt",
    )


def idle(client: ReplayClient) -> None:
    """Waits until the archiver has written everything."""
    while (table := client.server_info().tables.get("archive")) is not None and table.size + table.reserved:
        time.sleep(0.1)


def groups_per_second(client: ReplayClient, group: RolloutGroup, rate: float | None) -> float:
    """Lets groups pass through the server for ROUND seconds; `rate`: at most so many a second (None: no limit)."""
    begin, done = time.perf_counter(), 0
    with client.writer() as writer:
        while time.perf_counter() - begin < ROUND:
            for _ in range(BATCH):
                writer.insert(group, {"rollouts": 1.0})
            writer.flush()
            client.sample("rollouts", BATCH)
            done += BATCH
            if rate is not None:
                time.sleep(max(0.0, begin + done / rate - time.perf_counter()))
    return done / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rate", type=float, help="groups a second; else as fast as it can")
    options = parser.parse_args()
    group = make_group()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        more = "", 'copy_to = "archive"\n'
        addresses = [stack.enter_context(serve(folder, CONFIG + each)).address for each in more]
        command = f"-m replay_cli --address {addresses[1]} archive run --dir {folder}/archive --segment-seconds 1"
        stack.enter_context(Process([sys.executable, *command.split()]))
        plain, archived = (stack.enter_context(ReplayClient(address)) for address in addresses)
        ratios, rates = [], []
        for number in range(options.rounds + 1):
            found: dict[ReplayClient, float] = {plain: 0.0, archived: 0.0}
            for side in (plain, archived, archived, plain):
                idle(archived)
                found[side] += groups_per_second(side, group, options.rate) / 2
            if number:  # the first one warms up
                ratios.append(found[archived] / found[plain])
                rates.append(found[plain])
        table = archived.server_info().tables["archive"]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{statistics.median(rates):.0f} groups/s without; with an archive {middle:.3f} of it ", end="")
        lost, waits = table.evicted_unsampled / table.inserts, table.size / table.inserts
        print(f"(quartiles {low:.3f}, {high:.3f}); not archived: {lost:.1%}; waiting at the end: {waits:.1%}")


if __name__ == "__main__":
    main()
