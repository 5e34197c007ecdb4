"""Inserts: items on their way into the same tables, as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replay_server.tables.columns import FloatArray, IntArray
from replay_server.tables.payloads import Payload


@dataclass(slots=True)  # not frozen: that would make it four times as slow to create
class Inserts:
    """Items on their way in, all of them to the same tables. Columns of n rows."""

    keys: Sequence[int]
    priorities: Mapping[str, FloatArray]
    """By table; at least one."""
    policy_versions: IntArray
    sizes: IntArray
    """Bytes."""
    payloads: Sequence[Payload]
    permits: int = 0
    """Lease that one permit for each row is taken from; 0: none."""

    def __len__(self) -> int:
        return len(self.keys)

    def to(self, priorities: Mapping[str, FloatArray]) -> Inserts:
        """The same items on their way to other tables."""
        return Inserts(self.keys, priorities, self.policy_versions, self.sizes, self.payloads, self.permits)

    def __getitem__(self, rows: slice) -> Inserts:
        return Inserts(
            self.keys[rows],
            {table: priorities[rows] for table, priorities in self.priorities.items()},
            self.policy_versions[rows],
            self.sizes[rows],
            self.payloads[rows],
            self.permits,
        )
