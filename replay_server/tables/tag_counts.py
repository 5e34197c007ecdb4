"""TagCounts: for each value of a tag, how many groups of a table were generated, became stale, and were sampled.

**Why.** A bound on staleness drops slow groups first. If one environment takes ten times as long as another, all its
groups may be dropped while the totals of the table look harmless. Nobody would notice that this environment is starved.

**How.** A table counts its groups by each tag that has a column: the tags that it indexes, the tag by which it
balances, and `environment`. The counts stay when the items leave, so their number must have a bound: at most
MAX_COUNTED values of a tag are counted. A tag with more values, such as the name of the prompt, says nothing about an
environment. As soon as a tag has more values, its counts are dropped, and it is not counted any more until a reset.

* Items without the tag are not counted.
* An item counts as generated when it is inserted, and also when its insert is refused as too stale.
* An item counts as stale if it is refused or dropped as too stale, and was never drawn. So no item of a queue is both
  stale and sampled.
* An item counts as sampled each time that its reader acknowledges it. In a table where items are drawn once, a sampled
  item is a group that was trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from replay_protos.labels import Labels
from replay_server.tables.columns import IntArray, TagColumn

MAX_COUNTED = 256
"""The most values of one tag that a table counts."""

Event = Literal["generated", "stale", "sampled"]


@dataclass
class ValueCounts:
    """The counts of one value. The message TagValueCounts of replay.proto has the same fields."""

    generated: int = 0
    stale: int = 0
    sampled: int = 0


class TagCounts:
    """The counts of one tag, by the text of its values."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[str, ValueCounts] = {}
        self.too_many = False
        """True if the tag had more than MAX_COUNTED values. Then no value of the tag is counted any more."""

    @property
    def has_values(self) -> bool:
        """True if any counted item had the tag."""
        return bool(self.values) or self.too_many

    def count_labels(self, event: Event, labels: Sequence[Labels]) -> None:
        """Counts `event` for items with these labels."""
        # Many items share one Labels object. The value of each such object is read only once.
        distinct = {id(item_labels): item_labels for item_labels in labels}
        items_by_id = Counter(map(id, labels))
        for identity, items in items_by_id.items():
            value = distinct[identity].text(self.name)
            self._count(event, value, items)

    def count_rows(self, event: Event, column: TagColumn, slots: IntArray, sign: int = 1) -> None:
        """Counts `event` for the rows at `slots` (n,), whose values are in `column`, the column of the tag.

        `sign` -1: undoes an earlier count of these rows.
        """
        if len(column) == 1:  # the column has only the value "", so no item has the tag
            return
        if not slots.size:
            return
        rows_by_code = np.bincount(column.codes[slots])
        for code in np.flatnonzero(rows_by_code).tolist():
            rows = int(rows_by_code[code])
            self._count(event, column.values[code], sign * rows)

    def _count(self, event: Event, value: str, items: int) -> None:
        """Adds `items` to the count of `event` for one value. Negative `items` undo an earlier count.

        If MAX_COUNTED values are counted already and this is another one, drops all counts and stops counting the tag.
        """
        if not value or self.too_many:  # items without the tag have the value ""
            return
        counts = self.values.get(value)
        if counts is None:
            if len(self.values) == MAX_COUNTED:
                self.values.clear()
                self.too_many = True
                return
            counts = ValueCounts()
            self.values[value] = counts
        # An event that is undone may be older than the counts of this tag. Then it was never counted, and without `max`
        # the count could fall below 0.
        count_before = getattr(counts, event)
        setattr(counts, event, max(0, count_before + items))

    def state(self) -> dict[str, tuple[int, ...]] | None:
        """The counts by value, as they are stored; None: the tag has too many values."""
        if self.too_many:
            return None
        # This runs in each commit, so it does not use dataclasses.astuple, which takes ten times as long.
        return {value: (counts.generated, counts.stale, counts.sampled) for value, counts in self.values.items()}

    def load_state(self, state: Mapping[str, Sequence[int]] | None) -> None:
        """Loads a result of `state`."""
        self.values = {}
        self.too_many = state is None
        if state is not None:
            self.values = {value: ValueCounts(*counts) for value, counts in state.items()}

    def info(self) -> dict[str, Any]:
        """The fields of the message TagCounts of replay.proto, with the values sorted by name."""
        values = []
        for value, counts in sorted(self.values.items()):
            values.append({"name": value} | vars(counts))
        return {"name": self.name, "values": values, "too_many": self.too_many}
