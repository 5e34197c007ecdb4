"""TransferQueue with one storage unit, through its key-value interface. Its actors run under Ray, started here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
import transfer_queue
from tensordict import TensorDict

from benchmarks.systems import Bytes, Inserter

_PARTITION = "benchmark"


class TransferQueueSession:
    def __init__(self, address: str) -> None:
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
        storage = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 1}}
        transfer_queue.init({"backend": storage})
        self._names = count()

    def native(self, payload: Bytes) -> torch.Tensor:
        return torch.from_numpy(payload.copy())

    def inserter(self, table: str, nbytes: int) -> AbstractContextManager[Inserter]:
        raise NotImplementedError("TransferQueue has no pipelined insert")

    def reader(self, table: str, nbytes: int) -> AbstractContextManager[Iterator[int]]:
        raise NotImplementedError("TransferQueue has no tables")

    def keys(self, table: str, count: int) -> npt.NDArray[np.uint64]:
        raise NotImplementedError("TransferQueue has no tables")

    def update(self, table: str, keys: npt.NDArray[np.uint64], priorities: npt.NDArray[np.float64]) -> None:
        raise NotImplementedError("TransferQueue has no priorities")

    def sample(self, table: str, count: int) -> None:
        raise NotImplementedError("TransferQueue has no tables")

    def put(self, payloads: Sequence[torch.Tensor]) -> list[str]:
        keys = [str(next(self._names)) for _ in payloads]
        fields = TensorDict({"payload": torch.stack(list(payloads))}, batch_size=len(payloads))
        transfer_queue.kv_batch_put(keys=keys, partition_id=_PARTITION, fields=fields)
        return keys

    def get(self, handle: Any) -> None:
        found = transfer_queue.kv_batch_get(keys=handle, partition_id=_PARTITION)
        assert len(found["payload"]) == len(handle)

    def drop(self, handle: Any) -> None:
        transfer_queue.kv_clear(keys=handle, partition_id=_PARTITION)

    def close(self) -> None:
        transfer_queue.close()
        ray.shutdown()


session = TransferQueueSession
