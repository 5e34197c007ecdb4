"""Rows and buffers for the tests of tables, which need no server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from replay_server.storage.memory import MemoryStorage
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.columns import Columns, IntArray
from replay_server.tables.config import TableConfig
from replay_server.tables.extensions import configured
from replay_server.tables.items import Storage
from replay_server.tables.table import InsertBatch, Table


def slots_of(columns: Columns) -> dict[int, int]:
    """The slot of each key that is here."""
    slots = columns.occupied()
    return dict(zip(columns.key[slots].tolist(), slots.tolist(), strict=True))


def rows_of(
    keys: Iterable[int],
    priorities: Mapping[str, float],
    *,
    version: int = 0,
    payload: bytes = b"x",
    permits: int = 0,
    labels: Any = None,
) -> InsertBatch:
    """Rows that differ in nothing but their keys. `priorities`: by the name of the table."""
    keys = list(keys)
    n = len(keys)
    by_table = {name: np.full(n, priority, np.float64) for name, priority in priorities.items()}
    return InsertBatch(keys, by_table, np.full(n, version), np.full(n, len(payload)), [(payload,)] * n, permits, labels)


def insert_rows(table: Table, priorities: Mapping[int, float], versions: Any = 0, labels: Any = None) -> None:
    """Inserts items of one byte, by key, into a table."""
    ones = np.ones(len(priorities), dtype=np.int64)
    batch = InsertBatch([*priorities], {}, ones * versions, ones, (), labels=labels)
    table.insert(batch, np.array([*priorities.values()], dtype=np.float64))


def remove_rows(columns: Columns, slots: IntArray) -> None:
    """What becomes of the rows that leave a table which no buffer has."""
    columns.leave(slots)
    columns.free(slots)


def replay_buffer(
    tables: Sequence[TableConfig],
    clock: Callable[[], float],
    *,
    admission: Any = None,
    storage: Storage | None = None,
    **options: Any,
) -> ReplayBuffer:
    """A buffer with the extensions that these sections ask for."""
    extensions = configured(tables, clock, admission)
    return ReplayBuffer(tables, clock, storage or MemoryStorage(), extensions=extensions, **options)
