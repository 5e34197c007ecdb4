"""Ray's object store. A dict that it gives is a view of its shared memory."""

from __future__ import annotations

from typing import Any

import ray

from benchmarks.systems import Arrays, Session

_STORE_BYTES = 4 << 30


class RayStoreSession(Session):
    def __init__(self, address: str) -> None:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=_STORE_BYTES)

    def put_fields(self, fields: Arrays) -> list[Any]:
        return [ray.put(fields)]

    def get_fields(self, handle: list[Any]) -> Arrays:
        found: Arrays = ray.get(handle[0])
        return found

    def drop(self, handle: list[Any]) -> None:
        handle.clear()  # Ray frees what nobody refers to

    def close(self) -> None:
        ray.shutdown()


session = RayStoreSession
