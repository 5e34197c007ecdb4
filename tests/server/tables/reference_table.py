"""Reference table: what one table of a ReplayBuffer must hold and allow, by brute force over lists."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from replay_protos.labels import NO_LABELS, Labels, labels_of
from replay_server.tables.config import TableConfig
from replay_server.tables.table import SampleRequest

_TAGGED = labels_of(["teacher"], {"environment": "math", "level": 1}), labels_of([], {"environment": "code"})
LABELS = (NO_LABELS, *_TAGGED, labels_of(["teacher", "images"], None))


def labels_for(key: int) -> Labels:
    """What the item of this key is inserted with."""
    return LABELS[key % len(LABELS)]


def lengths_for(key: int) -> tuple[int, int]:
    """How many completions the group of this key has, and their tokens together."""
    return key % 3, key % 3 * 7


def label_bytes(columns: frozenset[str], pairs: tuple) -> int:
    return sum(80 + len(str(text)) for text in [*columns, *(text for pair in pairs for text in pair)])


@dataclass(eq=False)
class Item:
    payload: bytes
    version: int
    unused_permit: bool
    columns: frozenset[str] = frozenset()
    forwarded: set[str] = field(default_factory=set)
    """The tables that have forwarded it. An item that leaves a table and comes back is not forwarded again."""
    partial: bool = False
    """Whether it is a partial group, with a permit."""
    pairs: tuple = ()

    @property
    def nbytes(self) -> int:
        return len(self.payload)

    @property
    def cost(self) -> int:
        """What counts for bounds."""
        return self.nbytes + label_bytes(self.columns, self.pairs)


@dataclass(eq=False)
class Row:
    key: int
    priority: float
    version: int
    item: Item
    inserted_at: float
    order: int
    sampled: int = 0

    @property
    def nbytes(self) -> int:
        return self.item.nbytes


@dataclass(eq=False)
class Hand:
    """A batch that is neither acknowledged nor requeued."""

    table: RefTable
    rows: list[Row]
    priorities: list[float]
    consumed: list[bool]
    scope: str
    epoch: int


@dataclass(eq=False)
class Retained:
    """A row that was consumed, and is retained for a rollback."""

    row: Row
    number: int
    permit: bool


@dataclass(frozen=True)
class Insert:
    """One item on its way in."""

    key: int
    priorities: dict[str, float]
    policy_version: int
    nbytes: int
    permits: int
    columns: frozenset[str] = frozenset()
    closes: tuple[int, ...] = ()

    def item(self) -> Item:
        item = Item(b"x" * self.nbytes, self.policy_version, False, self.columns)
        item.pairs = labels_for(self.key).pairs
        return item

    @property
    def cost(self) -> int:
        return self.item().cost


@dataclass(eq=False)
class Waiting:
    what: Any
    """Insert, SampleRequest, or a count of permits."""
    tables: list[RefTable]
    deadline: float
    served: Any = None


@dataclass(eq=False)
class RefTable:
    config: TableConfig
    epoch: int = 0
    orders: int = 0
    inserting: list[Waiting] = field(default_factory=list)
    sampling: list[Waiting] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.rows: list[Row] = []
        self.retained: list[Retained] = []
        self.counts: Counter[str] = Counter()
        self.tag_counts: Counter[tuple[str, str, str]] = Counter()
        """By tag, value and what happened."""
        self.inserts = self.samples = self.deletes = self.outstanding = 0
        self.scopes: dict[str, set[int]] = {}
        self.epoch += 1

    def count_tags(self, event: str, key: int, items: int = 1) -> None:
        for name in self.config.indexed:
            if value := labels_for(key).text(name):
                before = self.tag_counts[name, value, event]
                self.tag_counts[name, value, event] = max(0, before + items)

    def configure(self, config: TableConfig) -> None:
        """Changes the configuration. What was counted by a tag that is not indexed any more is forgotten."""
        self.config = config
        counted = self.tag_counts.items()
        self.tag_counts = Counter({event: count for event, count in counted if event[0] in config.indexed})

    def count_generated(self, key: int) -> None:
        completions, tokens = lengths_for(key)
        self.counts["completions"] += completions
        self.counts["completion_tokens"] += tokens
        self.count_tags("generated", key)

    def find(self, key: int) -> Row | None:
        return next((row for row in self.rows if row.key == key), None)

    @property
    def bytes(self) -> int:
        return sum(row.item.cost for row in self.rows)

    def drop(self, gone: list[Row], owed: bool = False) -> None:
        """Rows leave without a reader. To the limiter of a queue, or if so said, after the samples that they owed."""
        self.rows = [row for row in self.rows if row not in gone]
        self.deletes += len(gone)
        if owed or self.config.rate_limiter.type in ("queue", "stack"):
            self.samples += sum(max(0.0, self.limits()[0] - row.sampled) for row in gone)

    def limits(self) -> tuple[float, int, float, float]:
        """spi, min_size, min_diff, max_diff: the constants of Reverb's limiters."""
        limiter = self.config.rate_limiter
        if limiter.type == "min_size":
            return 1.0, limiter.min_size, -math.inf, math.inf
        if limiter.type in ("queue", "stack"):
            return 1.0, 1, 0.0, float(limiter.max_size)
        spi, error = limiter.samples_per_insert, limiter.error_buffer
        low, high = (
            error if isinstance(error, tuple) else (spi * limiter.min_size - error, spi * limiter.min_size + error)
        )
        return spi, limiter.min_size, low, high

    def admits(self, n: int) -> bool:
        spi, min_size, _, high = self.limits()
        return self.inserts + n - self.deletes <= min_size or (self.inserts + n) * spi - self.samples <= high

    def allows(self, n: int) -> bool:
        spi, min_size, low, _ = self.limits()
        ready = self.inserts - self.deletes - len(self.waiting())
        return ready >= min_size and self.inserts * spi - self.samples - n >= low

    def lacks(self, row: Row) -> list[str]:
        """The required columns that the row waits for."""
        return [name for name in self.config.requires if name not in row.item.columns]

    def waiting(self) -> list[Row]:
        return [row for row in self.rows if self.lacks(row)]

    def never(self, request: SampleRequest) -> bool:
        """Whether no batch can ever be drawn for `request`, as the table is configured."""
        spi, min_size, low, high = self.limits()
        if not request.distinct and self.config.max_times_sampled:
            return True
        too_many = request.distinct and request.min_samples > self.config.max_size
        return too_many or request.min_samples > max(high, spi * min_size) - low

    def full(self, *sizes: int) -> bool:
        """Whether items of these costs do not fit."""
        config = self.config
        too_many = len(self.rows) + len(sizes) > config.max_size
        return too_many or self.bytes + sum(sizes) > (config.max_bytes or math.inf)

    def stale(self, version: int, current: int) -> bool:
        return self.config.max_staleness is not None and current - version > self.config.max_staleness

    def weight(self, row: Row, selector: Any) -> float:
        if selector.type != "prioritized":
            return 1.0
        return row.priority**selector.exponent if row.priority > 0 else 0.0

    def value(self, row: Row) -> str:
        """The value of the tag that the table balances; the same of all rows if it does not."""
        return "" if self.config.balance is None else labels_for(row.key).text(self.config.balance.tag)

    def value_weight(self, row: Row) -> float:
        return 1.0 if self.config.balance is None else self.config.balance.weights.get(self.value(row), 1.0)

    def drawn_first(self, row: Row, rows: list[Row]) -> tuple[float, list[Row]]:
        """The probability of its value among `rows`, and those of this value."""
        total = sum({self.value(other): self.value_weight(other) for other in rows}.values())
        return self.value_weight(row) / total, [other for other in rows if self.value(other) == self.value(row)]

    def ordered(self, rows: list[Row], selector: Any) -> list[Row] | None:
        """The order in which a selector that is not random names the rows."""
        rank = {
            "fifo": lambda row: row.order,
            "lifo": lambda row: -row.order,
            "min_heap": lambda row: (row.priority, row.order),
            "max_heap": lambda row: (-row.priority, row.order),
        }.get(selector.type)
        return None if rank is None else sorted(rows, key=rank)

    def candidates(self, request: SampleRequest) -> list[Row]:
        out = self.scopes.get(request.scope, set()) | request.exclude
        weighs = [row for row in self.rows if self.weight(row, self.config.sampler) * self.value_weight(row) > 0]
        return [row for row in weighs if row.key not in out and not self.lacks(row)]

    def drawable(self, request: SampleRequest, n: int) -> bool:
        there = len(self.candidates(request))
        return self.allows(n) and (there >= n if request.distinct else there > 0)

    def most(self, request: SampleRequest) -> int:
        return max((n for n in range(1, request.num_samples + 1) if self.drawable(request, n)), default=0)
