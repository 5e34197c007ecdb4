"""The systems that are compared. Each module runs in the environment of its own system and imports nothing of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Inserter(Protocol):
    """A pipeline of inserts, as deep as its system does best with."""

    def insert(self, payload: Any, priority: float) -> None: ...

    def flush(self) -> None:
        """Returns when every insert is acknowledged."""


class Session(Protocol):
    """One client process's connection to a server. A system that cannot do something raises NotImplementedError."""

    def native(self, payload: Bytes) -> Any:
        """The payload as this system's users have it."""

    def inserter(self, table: str, nbytes: int) -> AbstractContextManager[Inserter]:
        """For payloads of `nbytes`."""

    def reader(self, table: str, nbytes: int) -> AbstractContextManager[Iterator[int]]:
        """Samples for ever; each step says how many samples it brought."""

    def keys(self, table: str, count: int) -> npt.NDArray[np.uint64]:
        """Keys of `count` different items of a table."""

    def update(self, table: str, keys: npt.NDArray[np.uint64], priorities: npt.NDArray[np.float64]) -> None: ...

    def sample(self, table: str, count: int) -> None:
        """One request for `count` samples."""

    def put(self, payloads: Sequence[Any]) -> Any:
        """Stores a batch, acknowledged; returns what `get` and `drop` need."""

    def get(self, handle: Any) -> None:
        """Fetches a batch by its keys."""

    def drop(self, handle: Any) -> None:
        """Frees the batch."""

    def close(self) -> None: ...


def at_once(nbytes: int, *, budget: int, most: int) -> int:
    """How many payloads of `nbytes` make up `budget` bytes: at least 1, at most `most`."""
    return max(1, min(most, budget // nbytes))
