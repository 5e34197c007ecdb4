"""`python -m experiments.server.trajectories [ROUNDS]`: what a group of several turns costs, beside one of one turn.

Each group has 8 rollouts and 8192 tokens in all. One process holds client and server, so its processor time is all that
an operation costs. Rounds go through all groups, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from replay_client import ReplayClient, RolloutGroup
from replay_server import ReplayServer, TableConfig

ROLLOUTS, TURNS, TOKENS, PROMPT = 8, 4, 8192, 256
LAYERS, EXPERTS = 48, 8
BATCH = 4
"""Groups that are drawn together."""
Operation = Callable[[int], object]


def fields_of(lengths: list[int], **fields: Any) -> dict[str, Any]:
    """The fields of a group of these sequences, all random."""
    rng = np.random.default_rng(0)
    return {
        "prompt_ids": rng.integers(0, 150_000, PROMPT, dtype=np.int32),
        "completion_ids": rng.integers(0, 150_000, TOKENS, dtype=np.int32),
        "completion_lengths": np.array(lengths, np.int32),
        "rollout_logprobs": -rng.random(TOKENS, dtype=np.float32),
        "rewards": rng.random(ROLLOUTS, dtype=np.float32),
        "advantages": rng.random(ROLLOUTS, dtype=np.float32),
        "prompt_id": "prompt",
        "finish_reasons": ("stop",) * ROLLOUTS,
        "sampling": {"temperature": 1.0},
        **fields,
    }


def shapes() -> dict[str, dict[str, Any]]:
    """The fields of each group that is measured. A quarter of each turn is the answer of a tool."""
    one = [TOKENS // ROLLOUTS] * ROLLOUTS
    written_T = np.arange(TOKENS) % (TOKENS // ROLLOUTS // TURNS) < TOKENS // ROLLOUTS // TURNS * 3 // 4
    counts = [TURNS] * ROLLOUTS
    by_turn = [TOKENS // ROLLOUTS // TURNS] * (ROLLOUTS * TURNS)
    routing = np.random.default_rng(1).integers(0, 256, (PROMPT + TOKENS, LAYERS, EXPERTS), dtype=np.uint8)
    routed = {"extras": {"routed_experts": routing}, "axes": {"routed_experts": "whole"}}
    plain = {
        "one turn": fields_of(one),
        "4 turns, one sequence": fields_of(one, loss_mask=written_T),
        "4 turns, 4 sequences": fields_of(by_turn, loss_mask=written_T, sequence_counts=counts),
    }
    return plain | {f"{name}, routing": fields | routed for name, fields in plain.items()}


def costs_of(client: ReplayClient, fields: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Microseconds of processor time for each operation with such a group."""
    group = RolloutGroup(**fields)
    encoded = group.encode()
    times = 20 if len(encoded) > 1 << 20 else 300

    def time_of(operation: Operation) -> float:
        operation(max(times // 10, 1))
        begin = time.process_time()
        operation(times)
        return 1e6 * (time.process_time() - begin) / times

    def repeated(call: Callable[[], object]) -> Operation:
        return lambda number: [call() for _ in range(number)]

    def insert(number: int) -> None:
        with client.writer() as writer:
            for _ in range(number):
                writer.insert(group, {"groups": 1.0})

    def sample(number: int) -> None:
        with client.sampler("groups", BATCH) as batches:
            for _ in islice(batches, -(-number // BATCH)):
                pass

    yield "build", time_of(repeated(lambda: RolloutGroup(**fields)))
    yield "encode", time_of(repeated(group.encode))
    yield "decode", time_of(repeated(lambda: RolloutGroup.decode(encoded)))
    yield "insert", time_of(insert)
    yield "sample", time_of(sample)
    client.reset("groups")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    groups = shapes()
    results: dict[tuple[str, str], list[float]] = {}
    table = TableConfig(name="groups", sampler="uniform", max_size=64)
    with ReplayServer([table], port=0) as server, ReplayClient(server.address) as client:
        for _ in range(rounds):
            for name, fields in groups.items():
                for operation, cost in costs_of(client, fields):
                    results.setdefault((name, operation), []).append(cost)
    operations = list(dict.fromkeys(operation for _, operation in results))
    print(f"{'':32}{'bytes':>12}", *(f"{operation + ', us':>12}" for operation in operations))
    for name, fields in groups.items():
        medians = [statistics.median(results[name, operation]) for operation in operations]
        nbytes = len(RolloutGroup(**fields).encode())
        print(f"{name:32}{nbytes:12}", *(f"{cost:12.0f}" for cost in medians))


if __name__ == "__main__":
    main()
