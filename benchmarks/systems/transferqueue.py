"""TransferQueue with one storage unit, through its key-value interface. Its actors run under Ray, started here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import ray
import torch
import transfer_queue
from tensordict import TensorDict

from benchmarks.systems import Arrays, Bytes, Session

_PARTITION = "benchmark"


class TransferQueueSession(Session):
    def __init__(self, address: str) -> None:
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
        storage = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 1}}
        transfer_queue.init({"backend": storage})
        self._names = count()

    def native(self, payload: Bytes) -> torch.Tensor:
        return torch.from_numpy(payload.copy())

    def put(self, payloads: Sequence[torch.Tensor]) -> list[str]:
        keys = [str(next(self._names)) for _ in payloads]
        fields = TensorDict({"payload": torch.stack(list(payloads))}, batch_size=len(payloads))
        transfer_queue.kv_batch_put(keys=keys, partition_id=_PARTITION, fields=fields)
        return keys

    def get(self, handle: Any) -> None:
        found = transfer_queue.kv_batch_get(keys=handle, partition_id=_PARTITION)
        assert len(found["payload"]) == len(handle)

    def put_fields(self, fields: Arrays) -> list[str]:
        keys = [str(next(self._names)) for _ in next(iter(fields.values()))]
        tensors = {name: torch.from_numpy(array) for name, array in fields.items()}
        transfer_queue.kv_batch_put(
            keys=keys, partition_id=_PARTITION, fields=TensorDict(tensors, batch_size=len(keys))
        )
        return keys

    def get_fields(self, handle: Any) -> Arrays:
        found = transfer_queue.kv_batch_get(keys=handle, partition_id=_PARTITION)
        return {name: (each.values() if each.is_nested else each).numpy() for name, each in found.items()}

    def drop(self, handle: Any) -> None:
        transfer_queue.kv_clear(keys=handle, partition_id=_PARTITION)

    def close(self) -> None:
        transfer_queue.close()
        ray.shutdown()


session = TransferQueueSession
