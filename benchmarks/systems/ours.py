"""This server, through its own client. The server process is `replay serve`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from benchmarks.systems import Arrays, Bytes, Session, at_once
from replay_client import TLS, ReplayClient, RolloutGroup


class Pipeline:
    def __init__(self, client: ReplayClient, table: str, nbytes: int) -> None:
        self._table = table
        self._writer = client.writer(max_in_flight=at_once(nbytes, budget=64 << 20, most=2048))
        self.flush = self._writer.flush
        self.close = self._writer.close

    def insert(self, payload: bytes | RolloutGroup, priority: float) -> None:
        self._writer.insert(payload, {self._table: priority})


class OurSession(Session):
    def __init__(self, address: str, *, shared_memory: bool = True, tls: TLS | None = None) -> None:
        self._client = ReplayClient(address, timeout=60.0, shared_memory=shared_memory, tls=tls)

    def native(self, payload: Bytes) -> bytes:
        return payload.tobytes()

    def native_group(self, arrays: Arrays) -> RolloutGroup:
        return RolloutGroup(**arrays)

    @contextmanager
    def inserter(self, table: str, nbytes: int) -> Iterator[Pipeline]:
        pipeline = Pipeline(self._client, table, nbytes)
        try:
            yield pipeline
        finally:
            pipeline.close()

    @contextmanager
    def reader(self, table: str, nbytes: int) -> Iterator[Iterator[int]]:
        batch_size = at_once(nbytes, budget=8 << 20, most=256)
        with self._client.sampler(table, batch_size, prefetch=2) as batches:
            yield (len(batch) for batch in batches)

    @contextmanager
    def group_reader(self, table: str, groups: int, nbytes: int) -> Iterator[Iterator[int]]:
        # A power of two, so that the last batch is full: the groups of a round come in multiples of 64.
        batch_size = 1 << at_once(nbytes, budget=4 << 20, most=16).bit_length() - 1
        assert groups % batch_size == 0, "the last batch would never be full"
        with self._client.sampler(table, batch_size, prefetch=2) as batches:
            yield (sum(sample.group.num_tokens for sample in next(batches)) for _ in range(groups // batch_size))

    def keys(self, table: str, count: int) -> npt.NDArray[np.uint64]:
        keys = [item.info.key for item in self._client.sample(table, count)]
        return np.array(keys, dtype=np.uint64)

    def size(self, table: str) -> int:
        return self._client.server_info().tables[table].size

    def update(self, table: str, keys: npt.NDArray[np.uint64], priorities: npt.NDArray[np.float64]) -> None:
        self._client.update_priority_arrays(table, keys, priorities)

    def sample(self, table: str, count: int) -> None:
        self._client.sample(table, count)

    def put(self, payloads: Sequence[bytes]) -> list[int]:
        with self._client.writer(max_in_flight=len(payloads)) as writer:
            return [writer.insert(payload, {"inserts": 1.0}) for payload in payloads]

    def get(self, handle: list[int]) -> None:
        found = self._client.get(handle)
        assert len(found) == len(handle), f"{len(handle) - len(found)} of {len(handle)} items are gone"

    def put_fields(self, fields: Arrays) -> list[int]:
        group = RolloutGroup(
            prompt_ids=[0], completion_ids=[0], completion_lengths=[1], rollout_logprobs=[0.0], rewards=[0.0],
            advantages=[0.0], extras=dict(fields),
        )  # fmt: skip
        return [self._client.insert(group, {"inserts": 1.0})]

    def get_fields(self, handle: list[int]) -> Arrays:
        return RolloutGroup.decode(self._client.get(handle)[0].payload).extras

    def checkpoint(self) -> None:
        self._client.create_checkpoint("benchmark", timeout=None)

    def drop(self, handle: list[int]) -> None:
        self._client.delete("inserts", handle)

    def close(self) -> None:
        self._client.close()


session = OurSession
