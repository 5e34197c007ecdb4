"""Storage: where payload bytes live, by key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

Payload = tuple[bytes, ...]
"""The bytes of one item, in the pieces in which they came."""


class Storage(Protocol):
    name: str

    def put(self, key: int, payload: Payload) -> None:
        """Keeps `payload` under a key that is not in use."""

    def get(self, key: int) -> Payload:
        """The payload of a key that is in use."""

    def delete(self, keys: Iterable[int]) -> None:
        """Forgets payloads."""

    def close(self) -> None:
        """Lets go of every resource."""
