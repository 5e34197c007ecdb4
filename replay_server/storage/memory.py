"""MemoryStorage: payloads live in the process, as the bytes objects that came from the wire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replay_server.storage import Payload


class MemoryStorage:
    name = "memory"

    def __init__(self) -> None:
        self._payloads: dict[int, Payload] = {}

    def put(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        self._payloads.update(zip(keys, payloads, strict=True))

    def get(self, key: int) -> Payload:
        return self._payloads[key]

    def delete(self, keys: Iterable[int]) -> None:
        for key in keys:
            del self._payloads[key]

    def close(self) -> None:
        self._payloads.clear()
