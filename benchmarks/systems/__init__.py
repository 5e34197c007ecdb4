"""The systems that are compared. Each module runs in the environment of its own system and imports nothing of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

LACKS = "this system has no such call, so no cell of the benchmarks asks it for one"
"""Why a Session raises NotImplementedError: each system overrides the calls that it has."""
Bytes = npt.NDArray[np.uint8]
Arrays = Mapping[str, npt.NDArray[Any]]


class Inserter(Protocol):
    """A pipeline of inserts, as deep as its system does best with."""

    def insert(self, payload: Any, priority: float) -> None: ...

    def flush(self) -> None:
        """Returns when every insert is acknowledged."""


class Session:
    """One client process's connection to a server. A system overrides what it can do."""

    def native(self, payload: Bytes) -> Any:
        """The payload as this system's users have it."""
        return payload

    def native_group(self, arrays: Arrays) -> Any:
        """A rollout group as this system's users have it; the names are those of RolloutGroup."""
        raise NotImplementedError(LACKS)

    def inserter(self, table: str, nbytes: int) -> AbstractContextManager[Inserter]:
        """For payloads of `nbytes`."""
        raise NotImplementedError(LACKS)

    def reader(self, table: str, nbytes: int) -> AbstractContextManager[Iterator[int]]:
        """Samples for ever; each step says how many samples it brought."""
        raise NotImplementedError(LACKS)

    def group_reader(self, table: str, groups: int, nbytes: int) -> AbstractContextManager[Iterator[int]]:
        """Samples and decodes this many groups; each step says how many tokens of completions it brought."""
        raise NotImplementedError(LACKS)

    def keys(self, table: str, count: int) -> npt.NDArray[np.uint64]:
        """Keys of `count` different items of a table."""
        raise NotImplementedError(LACKS)

    def size(self, table: str) -> int:
        """How many items a table has."""
        raise NotImplementedError(LACKS)

    def update(self, table: str, keys: npt.NDArray[np.uint64], priorities: npt.NDArray[np.float64]) -> None:
        raise NotImplementedError(LACKS)

    def sample(self, table: str, count: int) -> None:
        """One request for `count` samples."""
        raise NotImplementedError(LACKS)

    def put(self, payloads: Sequence[Any]) -> Any:
        """Stores a batch, acknowledged; returns what `get` and `drop` need."""
        raise NotImplementedError(LACKS)

    def get(self, handle: Any) -> None:
        """Fetches a batch by its keys."""
        raise NotImplementedError(LACKS)

    def put_fields(self, fields: Arrays) -> Any:
        """Stores a dict of arrays as one rollout, acknowledged; returns what `get_fields` and `drop` need."""
        raise NotImplementedError(LACKS)

    def get_fields(self, handle: Any) -> Arrays:
        """Fetches and decodes that dict."""
        raise NotImplementedError(LACKS)

    def drop(self, handle: Any) -> None:
        """Frees the batch, or the dict."""

    def checkpoint(self) -> None:
        """Writes all tables to the disk, where inserts do not do so."""

    def close(self) -> None: ...


def at_once(nbytes: int, *, budget: int, most: int) -> int:
    """How many payloads of `nbytes` make up `budget` bytes: at least 1, at most `most`."""
    return max(1, min(most, budget // nbytes))
