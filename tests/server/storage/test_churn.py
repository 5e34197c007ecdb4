"""Disk space follows the live data, whatever the order in which payloads of very different sizes come and go."""

import random
from pathlib import Path

import pytest

from replay_server.storage import lmdb
from replay_server.storage.lmdb import LmdbStorage
from replay_server.storage.records import Delta

ORDERS = ("oldest first", "newest first", "random", "largest first")


def churn(directory: Path, order: str, live: int, turnovers: int, least: int, most: int) -> list[float]:
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
            storage.delete([gone])
            total -= sizes.pop(gone)
        storage.commit(Delta(), storage.begin_commit())
        storage.end_commit(None)
        if written >= (len(ratios) + 1) * turnovers * live / 10:
            ratios.append(storage.facts().disk_bytes / highest)
    storage.close()
    return ratios


@pytest.mark.parametrize("order", ORDERS)
def test_the_file_stays_near_the_live_data_over_many_turnovers(tmp_path, monkeypatch, order):
    """Payloads of 50 kB to 5 MB, and an eighth of everything."""
    monkeypatch.setattr(lmdb, "CHUNK_BYTES", 8 * 4096 - 24)
    ratios = churn(tmp_path, order, live=20_000_000, turnovers=50, least=50_000 // 8, most=5_000_000 // 8)
    assert max(ratios) <= 1.3
