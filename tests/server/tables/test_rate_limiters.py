"""Reverb's inequalities, at the points where they begin to block."""

import math

import pytest

from replay_server.tables.rate_limiters import RateLimiter, min_size, queue, sample_to_insert_ratio


def after(limiter: RateLimiter, *, inserts: int = 0, samples: int = 0, deletes: int = 0) -> RateLimiter:
    limiter.inserts, limiter.samples, limiter.deletes = inserts, samples, deletes
    return limiter


def test_min_size_blocks_sampling_until_there_are_enough_items_and_never_inserting():
    assert not after(min_size(3), inserts=2).can_sample(1)
    assert after(min_size(3), inserts=3).can_sample(10**9)
    assert not after(min_size(3), inserts=3, deletes=1).can_sample(1)
    assert after(min_size(3), inserts=10**9).can_insert(1)


def test_a_queue_admits_as_many_unsampled_items_as_its_size_and_gives_each_once():
    assert after(queue(4), inserts=3).can_insert(1)
    assert not after(queue(4), inserts=4).can_insert(1)
    assert after(queue(4), inserts=4, samples=1, deletes=1).can_insert(1)
    assert after(queue(4), inserts=4).can_sample(4)
    assert not after(queue(4), inserts=4).can_sample(5)
    assert not after(queue(4), inserts=4, samples=4, deletes=4).can_sample(1)


def test_a_queue_of_one_alternates():
    assert after(queue(1)).can_insert(1)
    assert not after(queue(1), inserts=1).can_insert(1)
    assert after(queue(1), inserts=1).can_sample(1)
    assert after(queue(1), inserts=1, samples=1, deletes=1).can_insert(1)


def test_a_ratio_blocks_at_both_ends_of_its_error_buffer():
    # spi 2, min_size 3, e 4: min_diff 2, max_diff 10.
    def limiter() -> RateLimiter:
        return sample_to_insert_ratio(2.0, 3, 4.0)

    assert (limiter().min_diff, limiter().max_diff) == (2.0, 10.0)
    assert after(limiter(), inserts=4).can_insert(1)  # (4 + 1) * 2 - 0 = 10
    assert not after(limiter(), inserts=5).can_insert(1)  # 12 > 10
    assert after(limiter(), inserts=5, samples=2).can_insert(1)
    assert after(limiter(), inserts=3).can_sample(4)  # 6 - 4 = 2
    assert not after(limiter(), inserts=3).can_sample(5)
    assert not after(limiter(), inserts=2).can_sample(1)  # size 2 < 3


def test_up_to_min_size_items_are_admitted_whatever_the_difference():
    with pytest.warns(UserWarning, match="max_diff 5"):
        limiter = sample_to_insert_ratio(1.0, 10, (0.0, 5.0))
    assert after(limiter, inserts=9).can_insert(1)
    assert not after(limiter, inserts=10).can_insert(1)


def test_deletes_change_the_size_and_never_the_difference():
    assert not after(queue(4), inserts=4, deletes=3).can_insert(1)  # size 1, difference 4
    assert after(queue(4), inserts=4, deletes=4).can_insert(1)  # the first clause: at most min_size


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.0, 1, 4.0), "samples_per_insert must be a positive number, not 0.0"),
        ((-1.0, 1, 4.0), "samples_per_insert"),
        ((math.inf, 1, 4.0), "samples_per_insert"),
        ((1.0, 1, 0.5), "widen error_buffer"),
        ((4.0, 1, (0.0, 7.0)), "widen error_buffer"),
        ((1.0, 2, (3.0, 9.0)), "lower min_diff or raise min_size"),
        ((1.0, 1, (math.nan, 9.0)), "widen error_buffer"),
    ],
)
def test_a_ratio_that_must_block_for_ever_is_refused_with_the_remedy(arguments, words):
    with pytest.raises(ValueError, match=words):
        sample_to_insert_ratio(*arguments)


def test_a_ratio_that_may_surprise_is_warned_of():
    with pytest.warns(UserWarning, match="max_diff 3 is below"):
        sample_to_insert_ratio(1.0, 10, (0.0, 3.0))


def test_reasons_show_the_inequality_with_its_numbers():
    assert after(min_size(5), inserts=3).why_no_sample(1) == "items there: 3, wanted: 5 (size 3 < min_size 5)"
    assert after(queue(8), inserts=9, samples=1, deletes=1).why_no_insert(1) == (
        "it is full, 8 of 8 items are not sampled yet ((9 inserts + 1) * 1 - 1 samples = 9 > max_diff 8)"
    )
    assert after(queue(8), inserts=3).why_no_sample(4) == (
        "items that may be sampled now: 3, wanted: 4 (3 inserts * 1 - 0 samples - 4 requested = -1 < min_diff 0)"
    )
