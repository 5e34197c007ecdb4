"""MemoryStorage: payloads live in the process, as the bytes objects that came from the wire."""

from __future__ import annotations

from collections.abc import Sequence

from replay_server.tables.payloads import Payload, Reader


class MemoryStorage:
    name = "memory"

    def __init__(self) -> None:
        self._payloads: dict[int, Payload] = {}

    def put(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        self._payloads.update(zip(keys, payloads, strict=True))

    def get(self, keys: Sequence[int], sizes: Sequence[int]) -> list[Payload]:
        return [self._payloads[key] for key in keys]

    def reader(self, keys: Sequence[int], sizes: Sequence[int]) -> Reader:
        return _Reader(self.get(keys, sizes))

    def delete(self, keys: Sequence[int], sizes: Sequence[int]) -> None:
        for key in keys:
            del self._payloads[key]

    def why_full(self, nbytes: int) -> str | None:
        return None

    def close(self) -> None:
        self._payloads.clear()


class _Reader:
    def __init__(self, payloads: list[Payload]) -> None:
        self._payloads = payloads

    def read(self, part: slice) -> list[Payload | None]:
        return list(self._payloads[part])

    def close(self) -> None:
        self._payloads = []
