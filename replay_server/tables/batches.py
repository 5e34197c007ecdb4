"""Batches: columns of items on their way into tables (InsertBatch), and of items drawn together (SampleBatch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replay_server.tables.columns import FloatArray, IntArray, KeyArray
from replay_server.tables.payloads import Payload


@dataclass(slots=True)  # not frozen: that would make it four times as slow to create
class InsertBatch:
    """Items on their way into the same tables. Columns of n rows."""

    keys: Sequence[int]
    priorities: Mapping[str, FloatArray]
    """By table; at least one."""
    policy_versions: IntArray
    sizes: IntArray
    """Bytes."""
    payloads: Sequence[Payload]
    permits: int = 0
    """Id of the grant from which each row uses one permit; 0: none."""

    def __len__(self) -> int:
        return len(self.keys)

    def to(self, priorities: Mapping[str, FloatArray]) -> InsertBatch:
        """The same items for other tables."""
        return InsertBatch(self.keys, priorities, self.policy_versions, self.sizes, self.payloads, self.permits)

    def __getitem__(self, rows: slice) -> InsertBatch:
        return InsertBatch(
            self.keys[rows],
            {table: priorities[rows] for table, priorities in self.priorities.items()},
            self.policy_versions[rows],
            self.sizes[rows],
            self.payloads[rows],
            self.permits,
        )


@dataclass
class SampleRequest:
    """What a reader asks of one batch."""

    num_samples: int
    min_samples: int
    distinct: bool = True
    scope: str = ""
    exclude: frozenset[int] = frozenset()
    id: int = 0
    """Names the batch; 0: it gets an id of its own."""


@dataclass
class SampleBatch:
    """Items drawn together. Columns of n rows, as they were at the draw."""

    keys: KeyArray
    priorities: FloatArray
    probabilities: FloatArray
    policy_versions: IntArray
    inserted_at: FloatArray
    times_sampled: IntArray
    """Including this draw."""
    sizes: IntArray
    consumed: npt.NDArray[np.bool_]
    """Rows whose last draw this was. The table reserves them until the batch ends."""
    table_size: int
    scope: str
    epoch: int

    def __len__(self) -> int:
        return int(self.keys.size)
