"""Compares distinct batches over several shards with those of one table, for priorities with heavy tails.

    python -m experiments.server.shard_shares [--batches 1000] [--at-once]

Tables of the server and the rule of the client, without a network. The heaviest item is on the first shard. Prints the
share of the rows that come from that shard, without the heaviest item, for the shards and for one table that holds all
items; chi-square over all items, divided by its degrees of freedom; and the rounds a batch. Chi-square is at most about
1 where nothing differs. `--at-once` draws each batch in one round, as an expectation of what is left would have it.
"""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np

from benchmarks.tables import markdown
from replay_protos import replay_pb2 as pb
from tests.client.shards.test_drawing import Merged, chi_square, make_table

ITEMS = 200


def priorities(name: str, rng: np.random.Generator) -> list[float]:
    """The weights (ITEMS,), the heaviest first."""
    rest = ITEMS - 1
    match name:
        case "equal":
            return [1.0] * ITEMS
        case "exponential":
            return sorted(rng.exponential(size=ITEMS).tolist(), reverse=True)
        case "Zipf":
            return [1.0 / rank for rank in range(1, ITEMS + 1)]
        case _:  # the share of the heaviest item, in percent
            share = float(name.removesuffix(" %")) / 100.0
            return [rest * share / (1.0 - share), *[1.0] * rest]


class AtOnce(Merged):
    """Draws each batch in one round."""

    def rows_of_round(self, weights: list[pb.Weight], rows: int) -> int:
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--at-once", action="store_true")
    arguments = parser.parse_args()
    results = []
    for name in ("equal", "exponential", "Zipf", "10 %", "50 %", "90 %", "99.9 %"):
        weights = dict(enumerate(priorities(name, np.random.default_rng(3)), start=1))
        for shards in (2, 4):
            parts = [{key: weight for key, weight in weights.items() if key % shards == i} for i in range(shards)]
            on_first = set(parts[1]) - {1}
            for rows in (1, 8, 32):
                rng = np.random.default_rng(5)
                tables = [make_table("prioritized", seed, part) for seed, part in enumerate(parts)]
                merged = (AtOnce if arguments.at_once else Merged)(tables, rows, True, rng)
                alone = Merged([make_table("prioritized", 11, weights)], rows, True, rng)
                found, wanted = (
                    Counter(key for _ in range(arguments.batches) for key in side.draw()) for side in (merged, alone)
                )
                draws = arguments.batches * rows
                of_shards, of_one = (
                    sum(count for key, count in side.items() if key in on_first) / draws for side in (found, wanted)
                )
                chi = chi_square(found, wanted, draws) / max(1, len(found | wanted) - 1)
                rounds = merged.rounds / arguments.batches
                shares = f"{of_one:.1%}", f"{of_shards:.1%}"
                results.append([name, str(shards), str(rows), *shares, f"{chi:.2f}", f"{rounds:.2f}"])
    print(markdown(["priorities", "shards", "rows", "one table", "of shards", "chi-square", "rounds"], results))


if __name__ == "__main__":
    main()
