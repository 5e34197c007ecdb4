"""Reverb, in its fastest configuration: found by trying its writers and samplers at 400 B, 106 kB and 4 MB.

Inserts: `Client.writer` with one chunk for each item beat TrajectoryWriter, in throughput and in latency. Samples: the
Sampler under `Client.sample`, with a deeper buffer than the 1 that `sample` gives it, was as fast as TrajectoryDataset
with batches of 64 and several times as fast as TrajectoryDataset without.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import reverb

from benchmarks.systems import Arrays, Session, at_once

_FOR_EVER = 10**9
_INFO_COLUMNS = 5
"""Columns about the sample. Those of a group come after them, in the order of their names."""
_COMPLETION_IDS = 1
"""The column of a group that holds the tokens of its completions."""


class Pipeline:
    def __init__(self, client: Any, table: str, nbytes: int) -> None:
        self._table = table
        in_flight = at_once(nbytes, budget=32 << 20, most=256)
        self._writer = client.writer(max_sequence_length=1, chunk_length=1, max_in_flight_items=in_flight)
        self.flush = self._writer.flush
        self.close = self._writer.close

    def insert(self, payload: Any, priority: float) -> None:
        self._writer.append([payload])
        self._writer.create_item(self._table, 1, priority)


class ReverbSession(Session):
    def __init__(self, address: str) -> None:
        self._client = reverb.Client(address)

    def native_group(self, arrays: Arrays) -> Arrays:
        return arrays

    @contextmanager
    def inserter(self, table: str, nbytes: int) -> Iterator[Pipeline]:
        pipeline = Pipeline(self._client, table, nbytes)
        try:
            yield pipeline
        finally:
            pipeline.close()

    @contextmanager
    def reader(self, table: str, nbytes: int) -> Iterator[Iterator[int]]:
        sampler = self._client._client.NewSampler(table, _FOR_EVER, at_once(nbytes, budget=64 << 20, most=64))

        def samples() -> Iterator[int]:
            while True:
                sampler.GetNextTrajectory()
                yield 1

        yield samples()

    @contextmanager
    def group_reader(self, table: str, groups: int, nbytes: int) -> Iterator[Iterator[int]]:
        # Not for ever: it would take groups of the next round.
        sampler = self._client._client.NewSampler(table, groups, at_once(nbytes, budget=64 << 20, most=64))

        def tokens() -> Iterator[int]:
            for _ in range(groups):
                yield int(sampler.GetNextTrajectory()[_INFO_COLUMNS + _COMPLETION_IDS].size)

        yield tokens()

    def keys(self, table: str, count: int) -> npt.NDArray[np.uint64]:
        keys: set[int] = set()
        for sample in self._client.sample(table, 100 * count, emit_timesteps=False):
            keys.add(sample.info.key)
            if len(keys) == count:
                break
        return np.array(sorted(keys), dtype=np.uint64)

    def update(self, table: str, keys: npt.NDArray[np.uint64], priorities: npt.NDArray[np.float64]) -> None:
        self._client.mutate_priorities(table, updates=dict(zip(keys.tolist(), priorities.tolist(), strict=True)))

    def sample(self, table: str, count: int) -> None:
        for _ in self._client.sample(table, count, emit_timesteps=False):
            pass

    def size(self, table: str) -> int:
        return int(self._client.server_info()[table].current_size)

    def checkpoint(self) -> None:
        self._client.checkpoint()


session = ReverbSession


def serve(tables: Sequence[dict[str, Any]], folder: str | None = None) -> None:
    """Serves until killed; `tables` as in cells.Table. It loads the newest checkpoint in `folder`."""
    selectors = {
        "fifo": reverb.selectors.Fifo,
        "uniform": reverb.selectors.Uniform,
        "prioritized": lambda: reverb.selectors.Prioritized(1.0),
        "min_heap": reverb.selectors.MinHeap,
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = reverb.Server(
        [
            reverb.Table.queue(table["name"], table["max_size"])
            if table["queue"]
            else reverb.Table(
                name=table["name"],
                sampler=selectors[table["sampler"]](),
                remover=selectors[table["remover"]](),
                max_size=table["max_size"],
                rate_limiter=reverb.rate_limiters.MinSize(1),
            )
            for table in tables
        ],
        port=port,
        checkpointer=None if folder is None else reverb.checkpointers.DefaultCheckpointer(folder),
    )
    print(f"listening on 127.0.0.1:{port}", flush=True)
    server.wait()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), *sys.argv[2:])
