"""Limiters: what is refused, and the reasons. The inequalities stand in reference.py."""

import math

import pytest

from replay_server.tables.config import RateLimiterConfig
from replay_server.tables.limiter import RateLimiter, sample_to_insert_ratio


def after(limiter: RateLimiter, *, inserts: int = 0, samples: int = 0, deletes: int = 0) -> RateLimiter:
    limiter.inserts, limiter.samples, limiter.deletes = inserts, samples, deletes
    return limiter


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1.0, 1, 0.5), "widen error_buffer"),
        ((4.0, 1, (0.0, 7.0)), "widen error_buffer"),
        ((1.0, 2, (3.0, 9.0)), "lower min_diff or raise min_size"),
        ((1.0, 1, (math.nan, 9.0)), "widen error_buffer"),
    ],
)
def test_a_ratio_that_must_block_for_ever_is_refused_with_the_remedy(arguments, words):
    with pytest.raises(ValueError, match=words):
        sample_to_insert_ratio(*arguments)


def test_reasons_show_the_inequality_with_its_numbers():
    def queue(size: int) -> RateLimiter:
        return RateLimiterConfig(type="queue", max_size=size).build()

    min_size = RateLimiterConfig(type="min_size", min_size=5).build()
    assert after(min_size, inserts=3).why_no_sample(1) == "items there: 3, wanted: 5 (size 3 < min_size 5)"
    assert after(queue(8), inserts=9, samples=1, deletes=1).why_no_insert(1) == (
        "it is full, 8 of 8 items are not sampled yet ((9 inserts + 1) * 1 - 1 samples = 9 > max_diff 8)"
    )
    assert after(queue(8), inserts=3).why_no_sample(4) == (
        "items that may be sampled now: 3, wanted: 4 (3 inserts * 1 - 0 samples - 4 requested = -1 < min_diff 0)"
    )
