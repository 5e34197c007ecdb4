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

from benchmarks.systems import Bytes, at_once

_FOR_EVER = 10**9


class Pipeline:
    def __init__(self, client: Any, table: str, nbytes: int) -> None:
        self._table = table
        in_flight = at_once(nbytes, budget=32 << 20, most=256)
        self._writer = client.writer(max_sequence_length=1, chunk_length=1, max_in_flight_items=in_flight)
        self.flush = self._writer.flush
        self.close = self._writer.close

    def insert(self, payload: Bytes, priority: float) -> None:
        self._writer.append([payload])
        self._writer.create_item(self._table, 1, priority)


class ReverbSession:
    def __init__(self, address: str) -> None:
        self._client = reverb.Client(address)

    def native(self, payload: Bytes) -> Bytes:
        return payload

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

    def put(self, payloads: Sequence[Bytes]) -> Any:
        raise NotImplementedError("Reverb does not tell the keys of what it stores")

    def get(self, handle: Any) -> None:
        raise NotImplementedError("Reverb cannot fetch by key")

    def drop(self, handle: Any) -> None:
        raise NotImplementedError("Reverb does not tell the keys of what it stores")

    def close(self) -> None:
        pass


session = ReverbSession


def serve(tables: Sequence[dict[str, Any]]) -> None:
    """Serves until killed; `tables` as in cells.Table."""
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
            reverb.Table(
                name=table["name"],
                sampler=selectors[table["sampler"]](),
                remover=selectors[table["remover"]](),
                max_size=table["max_size"],
                rate_limiter=reverb.rate_limiters.MinSize(1),
            )
            for table in tables
        ],
        port=port,
    )
    print(f"listening on 127.0.0.1:{port}", flush=True)
    server.wait()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
