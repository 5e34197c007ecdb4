"""Churn: how much disk payloads of 50 kB to 5 MB take when they come and go for long.

    python -m tests.server.storage.churn DIRECTORY [--live MB] [--turnovers N]

prints, for each order of removal, the bytes of the file over the most that were live, after each tenth of the run.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from replay_server.storage.lmdb import LmdbStorage
from replay_server.storage.records import Delta

ORDERS = ("oldest first", "newest first", "random", "largest first")


def churn(
    directory: Path, order: str, live: int, turnovers: int, least: int = 50_000, most: int = 5_000_000
) -> list[float]:
    """Bytes of the file over the most live ones, after each tenth of the run. Sizes are spread over their logarithm."""
    rng, storage = random.Random(0), LmdbStorage(directory)
    blob = memoryview(rng.randbytes(most))
    sizes: dict[int, int] = {}
    total = written = highest = key = 0
    ratios: list[float] = []
    while len(ratios) < 10:
        for _ in range(rng.randrange(1, 8)):  # what one commit takes
            key += 1
            size = int(least * (most / least) ** rng.random())
            storage.put([key], [(blob[:size],)])
            sizes[key] = size
            total, written = total + size, written + size
        highest = max(highest, total)
        while total > live:
            match order:
                case "oldest first":
                    gone = next(iter(sizes))
                case "newest first":  # of those that have been there for a while
                    gone = list(sizes)[-min(len(sizes), 20)]
                case "random":
                    gone = rng.choice(list(sizes))
                case _:
                    gone = max(sizes, key=sizes.__getitem__)
            storage.delete([gone], [sizes[gone]])
            total -= sizes.pop(gone)
        storage.commit(Delta(), *storage.begin_commit())
        storage.end_commit(None)
        if written >= (len(ratios) + 1) * turnovers * live / 10:
            ratios.append(storage.facts().disk_bytes / highest)
    storage.close()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--live", type=float, default=300)
    parser.add_argument("--turnovers", type=float, default=50)
    arguments = parser.parse_args()
    for order in ORDERS:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            ratios = churn(Path(folder), order, int(arguments.live * 1e6), arguments.turnovers)
        print(f"{order}: " + " ".join(f"{ratio:.2f}" for ratio in ratios), flush=True)


if __name__ == "__main__":
    main()
