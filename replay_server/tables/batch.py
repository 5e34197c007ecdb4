"""Batch: items drawn together, and the SampleRequest that says what a batch shall be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replay_server.tables.columns import FloatArray, IntArray, KeyArray


@dataclass
class SampleRequest:
    """What one batch shall be."""

    num_samples: int
    min_samples: int
    distinct: bool = True
    scope: str = ""
    exclude: frozenset[int] = frozenset()


@dataclass
class Batch:
    """Items drawn together, in hand until they are taken or given back. Columns of n rows, as at the draw."""

    keys: KeyArray
    priorities: FloatArray
    probabilities: FloatArray
    policy_versions: IntArray
    inserted_at: FloatArray
    times_sampled: IntArray
    """This time included."""
    sizes: IntArray
    orders: IntArray
    consumed: npt.NDArray[np.bool_]
    """Rows that left the table with this draw."""
    table_size: int
    scope: str
    epoch: int

    def __len__(self) -> int:
        return int(self.keys.size)
