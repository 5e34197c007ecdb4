"""Storage: where payload bytes live, by key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

Payload = tuple[bytes | memoryview, ...]
"""The bytes of one item, in the pieces in which they came. A view is of a message that holds little else."""


class Storage(Protocol):
    name: str

    def put(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        """Keeps payloads under keys that are not in use."""

    def get(self, key: int) -> Payload:
        """The payload of a key that is in use."""

    def delete(self, keys: Iterable[int]) -> None:
        """Forgets payloads."""

    def close(self) -> None:
        """Lets go of every resource."""
