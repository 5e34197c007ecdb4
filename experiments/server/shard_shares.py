"""Compares distinct batches over several shards with those of one table, for priorities with heavy tails.

    python -m experiments.server.shard_shares [--batches 1000]

Tables of the server and the rule of the client, without a network. The heaviest item is on the first shard. Prints the
share of the rows that come from that shard, without the heaviest item, for the shards and for one table that holds all
items; chi-square over all items, divided by its degrees of freedom; and how many shards a batch asks. Chi-square is at
most about 1 where nothing differs.
"""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np

from benchmarks.tables import markdown
from tests.client.shards.test_sharing import Merged, make_table

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


def chi_square(found: Counter[int], wanted: Counter[int]) -> float:
    """Of two samples of as many draws each. Draws without replacement vary less, so it is at most this large."""
    return sum((found[key] - wanted[key]) ** 2 / (found[key] + wanted[key]) for key in found | wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1000)
    arguments = parser.parse_args()
    results = []
    for name in ("equal", "exponential", "Zipf", "10 %", "50 %", "90 %", "99.9 %"):
        weights = dict(enumerate(priorities(name, np.random.default_rng(3)), start=1))
        for shards in (2, 4):
            parts = [{key: weight for key, weight in weights.items() if key % shards == i} for i in range(shards)]
            on_first = set(parts[1]) - {1}
            for rows in (1, 8, 32):
                tables = [make_table("prioritized", seed, part) for seed, part in enumerate(parts)]
                merged = Merged(tables, rows, True, seed=5)
                alone = Merged([make_table("prioritized", 11, weights)], rows, True, seed=6)
                found, wanted = (
                    Counter(key for _ in range(arguments.batches) for key in side.draw()) for side in (merged, alone)
                )
                draws = arguments.batches * rows
                of_shards, of_one = (
                    sum(count for key, count in side.items() if key in on_first) / draws for side in (found, wanted)
                )
                chi = chi_square(found, wanted) / max(1, len(found | wanted) - 1)
                asked = merged.asked / arguments.batches
                shares = f"{of_one:.1%}", f"{of_shards:.1%}"
                results.append([name, str(shards), str(rows), *shares, f"{chi:.2f}", f"{asked:.2f}"])
    print(markdown(["priorities", "shards", "rows", "one table", "of shards", "chi-square", "shards asked"], results))


if __name__ == "__main__":
    main()
