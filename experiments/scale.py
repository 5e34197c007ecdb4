"""Scale: what one to eight shards cost on this machine, and how many shards, nodes and dollars a run of N GPUs needs.

    python -m experiments.scale measure [--rounds 3]   # writes experiments/results/scale.json
    python -m experiments.scale plan                   # prints the tables of docs/record/performance.md from it

`measure` gives every number of shards the same work for each shard, and counts the CPU time of every process. On a
machine with few cores the wall clock says nothing about scale; CPU seconds for each group and byte do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import Process

HERE = Path(__file__).parent
RESULT, INPUT = HERE / "results/scale.json", HERE / "scale.toml"
SHARDS = (1, 2, 4, 8)
BATCH = 32
"""Groups that the reader takes at once for each shard: a larger service has a larger step."""
WORK = {4_000: 1280, 106_000: 256}
"""Groups for each shard in one round, by the bytes of a group."""

Server = tuple[str, psutil.Process]

_SERVER = """
import sys
from replay_server import ReplayServer, TableConfig
server = ReplayServer([TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 1 << 20})], 0)
server.start()
print(server.address, flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Cost:
    """CPU seconds of one round."""

    shards: int
    nbytes: int
    """Bytes of one group."""
    groups: int
    server: float
    client: float

    @property
    def groups_a_server_second(self) -> float:
        return self.groups / self.server

    @property
    def groups_a_client_second(self) -> float:
        return self.groups / self.client


def cpu_seconds(process: psutil.Process) -> float:
    """Of all threads, from Linux's clock of that process: psutil counts in steps of 10 ms."""
    return time.clock_gettime((~process.pid << 3) | 2)


def measure(servers: Sequence[Server], shards: int, nbytes: int, groups: int) -> Cost:
    """Inserts and samples `groups` groups for each shard, after a first round that warms up."""
    from replay_client import ReplayClient

    addresses, processes = zip(*servers[:shards], strict=True)
    payload, total = b"x" * nbytes, groups * shards
    with ReplayClient(addresses[0] if shards == 1 else addresses, timeout=120.0, shared_memory=False) as client:
        _round(client, payload, BATCH * shards, shards)
        server, own = sum(map(cpu_seconds, processes)), cpu_seconds(psutil.Process())
        _round(client, payload, total, shards)
        server, own = sum(map(cpu_seconds, processes)) - server, cpu_seconds(psutil.Process()) - own
    return Cost(shards, nbytes, total, server, own)


@contextmanager
def running(count: int) -> Iterator[list[Server]]:
    """Servers, each in a process of its own, with address and process."""
    with ExitStack() as stack:
        started = [stack.enter_context(Process([sys.executable, "-c", _SERVER])) for _ in range(count)]
        yield [(each.read(timeout=60.0), psutil.Process(each.pid)) for each in started]


def _round(client: Any, payload: bytes, groups: int, shards: int) -> None:
    with client.writer(max_in_flight=64 * shards) as writer:
        for _ in range(groups):
            writer.insert(payload, {"queue": 1.0})
    with client.sampler("queue", batch_size=BATCH * shards, prefetch=2) as sampler:
        for _ in range(groups // (BATCH * shards)):
            next(sampler)


def measure_all(rounds: int) -> list[dict[str, Any]]:
    """The rounds take turns, so that what else the machine does meets all of them."""
    costs = []
    with running(max(SHARDS)) as servers:
        for _, (nbytes, groups), shards in itertools.product(range(rounds), WORK.items(), SHARDS):
            costs.append(measure(servers, shards, nbytes, groups))
            print(costs[-1], file=sys.stderr, flush=True)
    rows = []
    for nbytes in WORK:
        for shards in SHARDS:
            mine = [cost for cost in costs if (cost.shards, cost.nbytes) == (shards, nbytes)]
            rows.append(
                {
                    "shards": shards,
                    "nbytes": nbytes,
                    "rounds": len(mine),
                    "groups_a_server_second": statistics.median(cost.groups_a_server_second for cost in mine),
                    "groups_a_client_second": statistics.median(cost.groups_a_client_second for cost in mine),
                    "costs": [asdict(cost) for cost in mine],
                }
            )
    return rows


# ---------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class Plan:
    """How many shards, nodes and dollars a run of `gpus` GPUs needs."""

    workload: str
    gpus: int
    groups_a_second: float
    gbytes_a_second: float
    """Written; read is `reads_a_group` times as much."""
    shards: int
    bound_by: str
    """The resource that runs out first: CPU, network or memory."""
    nodes: int
    dollars_a_month: float
    connections: int
    """How many connections each shard has: every client connects to every shard."""
    trainer_gbytes: float
    """That one rank of the trainer reads a second."""


def server_cost(measured: list[dict[str, Any]]) -> tuple[float, float]:
    """CPU seconds of a server for a group, and for a byte of it: the line through the two sizes, at eight shards."""
    most = max(row["shards"] for row in measured)
    small, large = sorted((row for row in measured if row["shards"] == most), key=lambda row: row["nbytes"])
    cost_small, cost_large = (1 / row["groups_a_server_second"] for row in (small, large))
    a_byte = max(0.0, (cost_large - cost_small) / (large["nbytes"] - small["nbytes"]))
    return max(0.0, cost_small - a_byte * small["nbytes"]), a_byte


def plan(gpus: int, name: str, inputs: dict[str, Any], cost: tuple[float, float]) -> Plan:
    machine, rules, work = inputs["machine"], inputs["rules"], inputs["workloads"][name]
    groups = 0.75 * gpus * work["tokens_a_gpu"] / work["tokens_a_group"]
    nbytes = work["tokens_a_group"] * work["bytes_a_token"]
    written, passes = groups * nbytes / 1e9, (1 + rules["reads_a_group"]) / 2
    cpu = groups * (cost[0] + cost[1] * nbytes) * passes
    a_step = groups * 60 / rules["steps_a_minute"]
    clients = 0.75 * gpus / rules["gpus_a_generator"] + gpus / 4 / rules["gpus_a_trainer_rank"]
    shards = cpu / rules["most_load"]  # one event loop is one core
    count, bound_by = max(1, math.ceil(shards)), "CPU"
    nodes_of = {
        "CPU": count * rules["cores_a_shard"] / machine["cores"],
        "network": written * max(1.0, rules["reads_a_group"]) / (machine["network_gbytes"] * rules["most_load"]),
        "memory": rules["held_steps"] * a_step * nbytes / 1e9 / (machine["memory_gbytes"] * 0.75),
    }
    node_bound, nodes = max(nodes_of.items(), key=lambda item: item[1])
    nodes = max(1, math.ceil(nodes))
    if count < nodes:
        count, bound_by = nodes, node_bound
    return Plan(
        name,
        gpus,
        groups,
        written,
        count,
        bound_by,
        nodes,
        nodes * machine["dollars_a_month"],
        math.ceil(clients),
        written * rules["reads_a_group"] / max(1.0, gpus / 4),
    )


def plans() -> list[Plan]:
    inputs = tomllib.loads(INPUT.read_text())
    cost = server_cost(json.loads(RESULT.read_text()))
    return [plan(gpus, name, inputs, cost) for name in inputs["workloads"] for gpus in (64, 1_000, 10_000)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "plan"])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.what == "measure":
        RESULT.write_text(json.dumps(measure_all(arguments.rounds), indent=1) + "\n")
    rows = json.loads(RESULT.read_text())
    print("| shards | bytes | groups a server CPU second | of one | groups a client CPU second | of one | rounds |")
    print("|---|---|---|---|---|---|---|")
    one = {row["nbytes"]: row for row in rows if row["shards"] == 1}
    for row in rows:
        rates = [row[name] for name in ("groups_a_server_second", "groups_a_client_second")]
        of_one = [row[name] / one[row["nbytes"]][name] for name in ("groups_a_server_second", "groups_a_client_second")]
        cells = [cell for pair in zip(rates, of_one, strict=True) for cell in (f"{pair[0]:.0f}", f"{pair[1]:.2f}")]
        print("|", " | ".join([str(row["shards"]), str(row["nbytes"]), *cells, str(row["rounds"])]), "|")
    print(
        "\n| workload | GPUs | groups/s | GB/s in | shards | bound by | nodes | $/month | connections | GB/s a rank |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for each in plans():
        rates = f"{each.groups_a_second:.1f} | {each.gbytes_a_second:.3g} | {each.shards} | {each.bound_by}"
        needs = f"{each.nodes} | {each.dollars_a_month:,.0f} | {each.connections} | {each.trainer_gbytes:.2g}"
        print(f"| {each.workload} | {each.gpus:,} | {rates} | {needs} |")


if __name__ == "__main__":
    main()
