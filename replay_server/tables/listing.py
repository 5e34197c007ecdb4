"""Listing: the items of a table within bounds, in an order of the reader's choice."""

from __future__ import annotations

import numpy as np

from replay_server.tables.columns import Columns, IntArray

ITEM_ORDERS = ("age", "priority", "policy_version", "times_sampled", "size")


def list_slots(
    columns: Columns,
    *,
    order_by: str,
    descending: bool,
    min_priority: float,
    max_priority: float,
    min_version: float,
    max_version: float,
) -> IntArray:
    """The slots (m,) of the items within the bounds (all inclusive), by one of ITEM_ORDERS; of equal items the older
    comes first."""
    slots = columns.used()
    priority, version = columns.priority[slots], columns.policy_version[slots]
    slots = slots[
        (priority >= min_priority) & (priority <= max_priority) & (version >= min_version) & (version <= max_version)
    ]
    if order_by == "age":  # ascending age: the newest item first
        return slots if descending else slots[::-1]
    values = getattr(columns, order_by)[slots]
    return slots[np.argsort(-values if descending else values, kind="stable")]
