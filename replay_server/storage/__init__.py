"""Storage: where payload bytes live, by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Payload = tuple[bytes | memoryview, ...]
"""The bytes of one item, in the pieces in which they came. A view is of a message that holds little else."""


class DamagedPayloads(Exception):
    """The bytes under `keys` are not what was put there."""

    def __init__(self, keys: list[int]) -> None:
        super().__init__(f"the payloads of {keys} are damaged")
        self.keys = keys


class Reader(Protocol):
    def read(self, part: slice) -> list[Payload | None]:
        """The payloads of some of the keys; None for each that is damaged. For any thread."""

    def close(self) -> None:
        """Lets go of what has been deleted meanwhile."""


class Storage(Protocol):
    name: str

    def put(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        """Keeps payloads under keys that are not in use."""

    def get(self, keys: Sequence[int], sizes: Sequence[int]) -> list[Payload]:
        """The payloads of keys that are in use, of so many bytes. Raises DamagedPayloads."""

    def reader(self, keys: Sequence[int], sizes: Sequence[int]) -> Reader:
        """What `get` does, later and on another thread; deleting the payloads meanwhile makes no difference."""

    def delete(self, keys: Sequence[int], sizes: Sequence[int]) -> None:
        """Forgets payloads, of so many bytes."""

    def why_full(self, nbytes: int) -> str | None:
        """Why a payload of so many bytes cannot be kept; None: it can."""

    def close(self) -> None:
        """Lets go of every resource."""
