"""Weights: what a table could be sampled for. A client of several servers divides its batches by them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from replay_server.tables.batches import SampleRequest
from replay_server.tables.table import Table

_MOST = 1 << 62
"""Stands for a rate limiter without a bound."""


@dataclass(frozen=True)
class Weight:
    """The message Weight of replay.proto, field by field."""

    total: float
    squares: float
    items: int
    samples: int
    ordered: bool
    consuming: bool
    size: int
    reason: str


def weigh(table: Table, request: SampleRequest) -> Weight:
    """What `request` could draw from now. O(size), in one vectorised pass."""
    excluded = np.array(sorted(table.excluded(request)), dtype=np.int64)
    total, squares = table.sampler.weigh(excluded)
    return Weight(
        total=total,
        squares=squares,
        items=table.sampler.selectable() - excluded.size,
        samples=int(min(table.limiter.most_samples(), _MOST)),
        ordered=table.config.sampler.type not in ("uniform", "prioritized"),
        consuming=bool(table.config.max_times_sampled),
        size=table.size,
        reason=table.why_no_sample(request, 1) or "",
    )
